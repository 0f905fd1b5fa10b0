"""Tool calls: one table of families yields the trigger, the grammar, the stream parser and the tests.

`CallFormat` is one model's way with calls; `Codec` has one. Nothing here knows engines, wires or model names.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.normalise import PromptWriter
from weft.text.reasoning import KNOWN
from weft.text.tokenizer import Tokenizer
from weft.text.tools.arguments import decoded
from weft.text.tools.call_reader import CallReader
from weft.text.tools.custom_input import CustomInputReader, custom_input, wrap_custom_input
from weft.text.tools.families import FAMILIES, GENERIC, Family
from weft.text.tools.grammar import tool_grammar
from weft.text.tools.harmony import HarmonyReader
from weft.text.tools.selection import ToolSelection, read_tool_selection, read_tools, template_tools
from weft.text.tools.tool import Tool
from weft.text.types import CallArguments, CallClosed, Conversation, Message, Text, ToolCall

__all__ = [
    "CallFormat",
    "CallReader",
    "CustomInputReader",
    "Family",
    "HarmonyReader",
    "Tool",
    "ToolSelection",
    "custom_input",
    "find_family",
    "read_tool_selection",
    "read_tools",
    "template_tools",
    "wrap_custom_input",
]

log = logging.getLogger("weft.text")

NAME = "zq_probe"
SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "count": {"type": "integer"}}}
PROBE: dict[str, Any] = {"type": "function", "function": {"name": NAME, "description": "d", "parameters": SCHEMA}}
ARGUMENTS = ({"word": "zq one", "count": 1}, {"word": "zq two", "count": 2})


@dataclass(frozen=True)
class CallFormat:
    """How one model writes calls."""

    family: Family
    tokens: frozenset[tuple[str, int]]  # that its vocabulary has for markers of calls

    @staticmethod
    def of(writer: PromptWriter, tokenizer: Tokenizer) -> CallFormat | None:
        """A model's way, found by its chat template; None where that has no place for tools."""
        family = find_family(writer)
        if family is None:
            return None
        form = CallFormat(family, frozenset())
        if form.notice is not None:
            log.warning("%s", form.notice)
        added = ((fact.content, token) for token, fact in tokenizer.inner.get_added_tokens_decoder().items())
        return replace(form, tokens=frozenset((text, token) for text, token in added if text.strip() and text in family.literals))

    @property
    def notice(self) -> str | None:
        """What the operator should know."""
        guess = f"the chat template writes tool calls in no way that weft knows; they are read like those of {self.family.name}"
        return guess if self.family.is_guess else None

    @property
    def shown(self) -> frozenset[int]:
        """Tokens whose text the reader must see, also where special ones are left out."""
        return frozenset(token for _, token in self.tokens)

    @property
    def trigger(self) -> str:
        """What must not come within thinking; nothing where calls are not announced."""
        return "" if self.family.is_anchored or self.family.is_harmony else self.family.trigger

    def reader(self, tools: Sequence[Tool]) -> CallReader | HarmonyReader:
        """A reader for one answer."""
        return HarmonyReader(tools) if self.family.is_harmony else CallReader(self.family, tools)

    def grammar(self, choice: ToolSelection, answer: GrammarSpec | None = None) -> GrammarSpec:
        """What an answer may be. Raises InvalidRequest for a strict tool that can not be held to its schema."""
        return tool_grammar(self.family, choice, self.tokens, answer)


def find_family(writer: PromptWriter) -> Family | None:
    """The family whose reader understands the calls that the template writes; one call at a time where it writes no more."""
    one = _written(writer, ARGUMENTS[:1])
    if one is None:
        return None
    scores = {family: score for family in FAMILIES if (score := _unread(family, one, ARGUMENTS[:1])) is not None}
    if scores:
        family = min(scores, key=lambda family: scores[family])
        is_several = _unread(family, _written(writer, ARGUMENTS) or (), ARGUMENTS) is not None
        return family if is_several else replace(family, between=None)
    source = writer.template.with_tools.source
    guess = next((family for family in FAMILIES if not family.is_anchored and family.trigger in source), GENERIC)
    return replace(guess, is_guess=True)


def _written(writer: PromptWriter, arguments: Sequence[dict[str, Any]]) -> tuple[str, ...] | None:
    """Calls as the template writes them: all since the question, and as an answer begins. None: it has no place for tools."""
    asked = Message("user", "zq?")
    calls = tuple(ToolCall(NAME, json.dumps(one), f"functions.{NAME}:{index}") for index, one in enumerate(arguments))
    results = (Message("tool", f"zq{index}", tool_call_id=call.id) for index, call in enumerate(calls))
    answered = (Message("assistant", None, tool_calls=calls), *results)
    try:
        prompt = writer.write(Conversation((asked,), (PROBE,)))
    except InvalidRequest:
        return None
    try:
        whole = writer.write(Conversation((asked, *answered), (PROBE,), add_generation_prompt=False))
    except InvalidRequest:
        return ()
    answer = whole[len(commonprefix([prompt, whole])) :]  # noqa: RUF071 - texts, not paths
    for markers in KNOWN:
        answer = answer.rpartition(markers.close)[2]
    return whole.rpartition("zq?")[2], answer


def _unread(family: Family, texts: Sequence[str], arguments: Sequence[dict[str, Any]]) -> int | None:
    """How much of a text is left beside these calls by the family's reader; None where it does not find them."""
    left = []
    for text in texts:
        found = CallFormat(family, frozenset()).reader(read_tools([PROBE])).feed(text)
        closed = [delta.index for delta in found if isinstance(delta, CallClosed)]
        told = ("".join(one.text for one in found if isinstance(one, CallArguments) and one.index == index) for index in closed)
        if [decoded(text) for text in told] == list(arguments):
            left.append(sum(len(one.text) for one in found if isinstance(one, Text)))
    return min(left, default=None)
