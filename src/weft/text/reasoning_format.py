"""How a model writes its reasoning: found by letting its chat template write some, else by the markers that are known."""

import re
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidRequest, TemplateFailed
from weft.text.answer_frame import find_ends, find_pair, tokens_of
from weft.text.normalise import PromptWriter
from weft.text.reasoning import Markers, find_markers
from weft.text.reasoning_effort import SWITCHES
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Message

QUESTION, THOUGHT, ANSWER, MORE = "zq three?", "zq thought", "zq answer", "zq more"
# A tag, or a word between two tags, as in <|open|>think<|sep|>.
FIRST_TAG = re.compile(r"(?:<[^<>\s]+>\w+<[^<>\s]+>|<[^<>\s]+>|\[[^\[\]\n]+\])")
LAST_TAG = re.compile(r"(?:<[^<>\s]+>\w+<[^<>\s]+>|<[^<>\s]+>|\[[^\[\]\n]+\])$")
# Template variables that make a template show the reasoning of past turns, or write the prompt of a model that reasons.
THINKING: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": True}, {"thinking": True}, {"reasoning_effort": "high"})


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning, what is written between it and the answer, and what in front of an answer without any."""

    markers: Markers
    gap: str = ""  # between the close marker and the answer
    begin: str = ""  # in front of an answer without reasoning
    ends: tuple[str, ...] = ()  # between an answer and the token that ends its turn
    reopens: bool = False  # text and reasoning may alternate within one answer
    tokens: frozenset[int] = frozenset()  # of all these texts, which are read though special tokens are skipped


def find_format(writer: PromptWriter, tokenizer: Tokenizer, *, has_channels: bool = False) -> ReasoningFormat | None:
    """Return how the model reasons; None if it does not, or does so in channels, which have a reader of their own."""
    tried = _try(writer)
    known = find_markers(writer.template.source, tokenizer)
    if has_channels or (tried is None and known is None):
        return None
    markers = known if tried is None else tried.markers
    assert markers is not None
    gap, begin = (_gap_of_switch(writer, markers), "") if tried is None else (tried.gap, tried.begin)
    ends = () if tried is None else tried.ends
    opened, closed = find_pair(_prompt_of_reasoner(writer), markers)
    if opened:
        gap, ends = gap + opened, (closed, *ends)
    tokens = tokens_of(tokenizer, (*markers, gap, begin))
    return ReasoningFormat(markers, gap, begin, ends, _alternates(writer, markers), tokens)


def _prompt_of_reasoner(writer: PromptWriter) -> str:
    """Return the whole prompt of a model that is told to reason."""
    on = next(({name: on} for name, (on, _) in SWITCHES.items() if name in writer.template.variables), {})
    try:
        return writer.write(Conversation((Message("user", QUESTION),), template_kwargs=on))
    except InvalidRequest:
        return ""


def _try(writer: PromptWriter) -> ReasoningFormat | None:
    for more in THINKING:
        reasoned = _answered(writer, {writer.capabilities.reasoning_key: THOUGHT}, more)
        before, found, after = reasoned.partition(THOUGHT)
        between, answered, _ = after.partition(ANSWER)
        if found and answered and between.strip():
            break
    else:
        return None
    prompt = _render(writer, [], more, add_generation_prompt=True)
    close = FIRST_TAG.match(between.strip())
    opening = "" if close is None else _opening(before, prompt, close[0])
    if close is None or not opening:
        return None
    markers = Markers(opening, close[0])
    begin = _answered(writer, {}, more).partition(ANSWER)[0]
    begin = begin[len(prompt) :] if begin.startswith(prompt) else ""
    is_reasoning = markers.open in begin or (markers.close in begin and begin.strip() != markers.close)
    is_reasoning |= prompt.rstrip().endswith(markers.open)
    gap = between.partition(close[0])[2]
    ends = find_ends(_answered(writer, {}, more).partition(ANSWER)[2], "".join((*markers, gap)))
    return ReasoningFormat(markers, gap, "" if is_reasoning else begin.strip("\n"), ends)


def _opening(before: str, prompt: str, close: str) -> str:
    """Return the open marker: what a history has more than a prompt, or a prompt more than a history, else the last tag."""
    in_history, in_prompt = before.removeprefix(prompt), prompt.removeprefix(before)
    if in_history != before and in_history.strip():
        return in_history.strip()
    if in_prompt != prompt and in_prompt.strip() and close not in in_prompt:
        return in_prompt.strip()
    tag = LAST_TAG.search(before.rstrip())
    return "" if tag is None else tag[0]


def _gap_of_switch(writer: PromptWriter, markers: Markers) -> str:
    """Return the white space that the template writes behind the empty reasoning of a switched-off model; "" if unknown."""
    after = _render(writer, [], {"enable_thinking": False}, add_generation_prompt=True).rpartition(markers.close)[2]
    return "" if after.strip() else after


def _alternates(writer: PromptWriter, markers: Markers) -> bool:
    """Whether the template writes an answer of reasoning, text, reasoning and text as that: such a model may reason again."""
    for kind in ("thinking", "reasoning"):
        words = ((kind, THOUGHT), ("text", ANSWER), (kind, MORE), ("text", "zq end"))
        parts = [{"type": name, name: word, "closed": True} for name, word in words]
        text = _render(writer, [{"role": "assistant", "content": parts}], {}, add_generation_prompt=False)
        pieces = re.split(f"({re.escape(markers.open)}|{re.escape(markers.close)})", text)
        found = [piece.strip() for piece in pieces]
        marks = [markers.open, THOUGHT, markers.close, ANSWER, markers.open, MORE, markers.close]
        if any(found[start : start + len(marks)] == marks for start in range(len(found))):
            return True
    return False


def _answered(writer: PromptWriter, also: dict[str, str], more: dict[str, Any]) -> str:
    """Return what the template writes behind the question for an answer."""
    return _render(writer, [{"role": "assistant", "content": ANSWER, **also}], more, add_generation_prompt=False)


def _render(writer: PromptWriter, messages: list[dict[str, Any]], more: dict[str, Any], *, add_generation_prompt: bool) -> str:
    capabilities = writer.capabilities
    question: Any = QUESTION if "user" in capabilities.text else [{"type": "text", "text": QUESTION}]
    asked = [{"role": "user", "content": question}, *messages]
    try:
        text = writer.template.render(asked, add_generation_prompt=add_generation_prompt, **more)
    except TemplateFailed:
        return ""
    return text.partition(QUESTION)[2]
