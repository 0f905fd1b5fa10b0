"""Tool calls: finds the format (family) in which a model writes them, and makes grammars and stream readers for it."""

import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any, Self

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.normalise import PromptWriter
from weft.text.reasoning import KNOWN
from weft.text.tokenizer import Tokenizer
from weft.text.tools.arguments import Pairs, decode_json
from weft.text.tools.call_reader import CallReader, HarmonyReader
from weft.text.tools.call_writer import spelling_of
from weft.text.tools.custom_tools import CustomInputReader, custom_input, wrap_custom_input
from weft.text.tools.described import NOTATION
from weft.text.tools.families import FAMILIES, Family
from weft.text.tools.grammar import MarkerTokens, tool_grammar
from weft.text.tools.tool import Tool, ToolSelection, read_tool_selection, read_tools, template_tools
from weft.text.types import CallArguments, CallClosed, Conversation, Message, Text, ToolCall

__all__ = ["CallFormat", "CallReader", "CustomInputReader", "Family", "HarmonyReader", "Tool", "ToolSelection"]
__all__ += ["custom_input", "find_family", "read_tool_selection", "read_tools", "template_tools", "wrap_custom_input"]

log = logging.getLogger("weft.text")

NAME = "zq_probe"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "count": {"type": "integer"}}}
PROBE: dict[str, Any] = {"type": "function", "function": {"name": NAME, "description": "d", "parameters": SCHEMA}}
ARGUMENTS = ({"word": "zq one", "count": 1}, {"word": "zq two", "count": 2})
TEXTS = ({"word": "zq one"}, {"word": "zq two"})
NUMBERS = ({"count": 1}, {"count": 2})


@dataclass(frozen=True)
class CallFormat:
    """How one model writes tool calls: its family and the ids of its marker tokens; makes call readers and grammars."""

    family: Family
    tokens: MarkerTokens
    leads: tuple[str, ...] = ()  # what comes between reasoning or text and a call, and is neither
    is_described: bool = False  # by weft, in the system message: the template does not show the model tools or their format

    @classmethod
    def of(cls, writer: PromptWriter, tokenizer: Tokenizer, *, describes: bool = False) -> Self | None:
        """Detect the call format from a model's chat template, logging a warning for a guess.

        If the template takes no tools, or writes calls in no known way: the format in which weft describes them if it
        `describes` any, else None.
        """
        vocabulary = tokenizer.vocabulary
        added = {vocabulary.added[token].content: token for token in vocabulary.reserved_ids}
        found = find_family(writer, added)
        if found is None and not describes:
            return None
        family = found or NOTATION
        tokens = frozenset((text, token) for text, token in added.items() if text.strip() and text in family.literals)
        form = cls(family, tokens, is_described=found is None)
        if form.notice is not None:
            log.warning("%s", form.notice)
        return form

    @property
    def notice(self) -> str | None:
        """A warning for the operator that the family is only a guess; None if the template's own calls were read."""
        guess = f"the chat template shows no tool calls; by the markers it names they are read like those of {self.family.name}"
        return guess if self.family.is_guess else None

    @property
    def shown(self) -> frozenset[int]:
        return frozenset(token for _, token in self.tokens)

    @property
    def trigger(self) -> str:
        """The text that announces a call, which is forbidden in reasoning; "" if the family has no such text."""
        return "" if self.family.is_anchored or self.family.is_harmony else self.family.trigger

    def reader(self, tools: Sequence[Tool], *, is_required: bool = False, reads_bare: bool = False) -> CallReader | HarmonyReader:
        if self.family.is_harmony:
            return HarmonyReader(tools)
        return CallReader(self.family, tools, is_required=is_required, reads_bare=reads_bare, leads=self.leads)

    def with_leads(self, leads: tuple[str, ...], tokenizer: Tokenizer) -> Self:
        """Return the format with these leads; their markers are read, too."""
        vocabulary = tokenizer.vocabulary
        added = {vocabulary.added[token].content: token for token in vocabulary.reserved_ids}
        texts = "\0".join(leads)
        more = frozenset((text, token) for text, token in added.items() if text.strip() and text in texts)
        return replace(self, leads=leads, tokens=self.tokens | more)

    def grammar(
        self, selection: ToolSelection, answer: GrammarSpec | None = None, *, goes_on: bool = False
    ) -> GrammarSpec | None:
        """Return the grammar of an answer with calls; None where a described tool's call is read as the model writes it.

        An answer that `goes_on` may not end by itself. Raises InvalidRequest for a strict tool that can not be enforced.
        """
        is_bound = not selection.is_parallel or any(tool.strict or tool.grammar is not None for tool in selection.tools)
        if self.is_described and selection.mode == "auto" and answer is None and not is_bound:
            return None
        return tool_grammar(self.family, selection, self.tokens, answer, goes_on=goes_on, leads=self.leads)


def find_family(writer: PromptWriter, vocabulary: Collection[str] = ()) -> Family | None:
    """Return the family whose reader parses the calls that the template writes; None if it takes no tools.

    A template that writes calls in a way unknown to weft has no family either. One that writes no calls has a family, as a
    guess, if all marks of this family and of no other are in its text or in the vocabulary of added tokens, and if histories can
    be written: it has a place for results, and weft can write the family's calls into answers.
    """
    one = _write_calls(writer, ARGUMENTS[:1])
    if one is None:
        return None
    if not one:
        return _guess_family(writer.template.with_tools.source, vocabulary) if writer.takes_results else None
    family = _read_family(writer, ARGUMENTS, FAMILIES)
    if family is not None and family.is_anchored:
        family = _announced(family, writer.template.with_tools.source) or family
    if family is None:  # there are templates that print all values with quotes, or none
        keyed = [family for family in FAMILIES if isinstance(family.notation, Pairs)]
        family = _read_family(writer, TEXTS, keyed) or _read_family(writer, NUMBERS, keyed)
    escaped = "\\u00e3" in "".join(_write_calls(writer, [{"word": "zq \u00e3"}]) or ())
    return family and replace(family, is_ascii=escaped)


def _announced(family: Family, source: str) -> Family | None:
    """Return the family of the same calls behind a begin for which the template asks in words, though it writes none itself."""
    framed = [one for one in FAMILIES if one.begin and not one.is_anchored and one.call == family.call]
    asked = [one for one in framed if one.begin.rstrip() + '{"name"' in source]
    return asked[0] if len(asked) == 1 else None


def _read_family(writer: PromptWriter, arguments: Sequence[dict[str, Any]], families: Sequence[Family]) -> Family | None:
    """Return the family that reads calls with these arguments, leaving least as text; without `between` if only one call."""
    one = _write_calls(writer, arguments[:1]) or ()
    scores = {family: score for family in families if (score := _count_unread(family, one, arguments[:1])) is not None}
    if not scores:
        return None
    family = min(scores, key=lambda family: scores[family])
    is_several = (
        writer.takes_several_calls and _count_unread(family, _write_calls(writer, arguments) or (), arguments) is not None
    )
    return family if is_several else replace(family, between=None)  # one call at a time


def _guess_family(source: str, vocabulary: Collection[str]) -> Family | None:
    named = [family for family in FAMILIES if all(mark in source or mark in vocabulary for mark in family.marks or ("\0",))]
    fullest = [family for family in named if all(family.marks >= other.marks for other in named)]
    return replace(fullest[0], is_guess=True) if len(fullest) == 1 and spelling_of(fullest[0]) is not None else None


def _write_calls(writer: PromptWriter, arguments: Sequence[dict[str, Any]]) -> tuple[str, ...] | None:
    """Render a probe chat with tool calls, as two texts to parse; () if the template refuses calls, None if it refuses tools."""
    question = Message("user", "zq?")
    calls = tuple(ToolCall(NAME, json.dumps(one), f"functions.{NAME}:{index}") for index, one in enumerate(arguments))
    results = (Message("tool", f"zq{index}", tool_call_id=call.id) for index, call in enumerate(calls))
    answered = (Message("assistant", None, tool_calls=calls), *results)
    prompt = None
    try:
        prompt = writer.write(Conversation((question,), (PROBE,)))
        whole = writer.write(Conversation((question, *answered), (PROBE,), add_generation_prompt=False))
    except InvalidRequest:
        return None if prompt is None else ()
    answer = whole[len(commonprefix([prompt, whole])) :]  # noqa: RUF071 - texts, not paths
    for markers in KNOWN:
        answer = answer.rpartition(markers.close)[2]
    return whole.rpartition("zq?")[2], answer


def _count_unread(family: Family, texts: Sequence[str], arguments: Sequence[dict[str, Any]]) -> int | None:
    """Return how many characters the family's reader leaves as text beside the expected calls; None if it misreads them."""
    left = []
    for text in texts:
        found = CallFormat(family, frozenset()).reader(read_tools([PROBE])).feed(text)
        closed = [delta.index for delta in found if isinstance(delta, CallClosed)]
        made = ("".join(one.text for one in found if isinstance(one, CallArguments) and one.index == index) for index in closed)
        if [decode_json(text) for text in made] == list(arguments):
            left.append(sum(len(one.text) for one in found if isinstance(one, Text)))
    return min(left, default=None)
