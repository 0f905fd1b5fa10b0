"""What a model writes around its answer besides reasoning and calls, found by letting its chat template write some."""

import re
from collections.abc import Sequence
from typing import Any

from weft.errors import InvalidRequest
from weft.text.normalise import PromptWriter
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Delta, Message, Text, ToolCall

QUESTION, THOUGHT, ANSWER, NAMES = "zq three?", "zq thought", "zq answer", ("zq_first", "zq_second")
NAME = "⟨name⟩"
TAG = re.compile(r"<[^<>\s]+>")
TAGS = re.compile(r"(?:\s*<[^<>\s]+>\w*)+\s*")  # tags, with words between them
GROUP = re.compile(r"<[^<>\s]+>(?:\w+<[^<>\s]+>)?")
PAIR = re.compile(r"(<(\w+)>)(</\2>)")  # as an instruction shows it: between <response></response>


def find_ends(after: str, marks: str) -> tuple[str, ...]:
    """Return what is written between an answer and the token that ends the turn: its first group of tags, its first two, …

    `marks` are texts that end no turn.
    """
    after = after.strip()
    tags = TAG.findall(after)
    if not TAGS.fullmatch(after) or not tags:
        return ()
    end = after if tags[-1] in marks else after[: after.rindex(tags[-1])].strip()
    return tuple(end[: group.end()] for group in GROUP.finditer(end))


def find_pair(prompt: str, markers: Sequence[str]) -> tuple[str, str]:
    """Return the tags in which a prompt that asks for reasoning in its markers asks for the answer; "" if it does not."""
    asked = [(match[1], match[3]) for match in PAIR.finditer(prompt)]
    others = {pair for pair in asked if pair != tuple(markers)}
    return others.pop() if tuple(markers) in asked and len(others) == 1 else ("", "")


def find_leads(writer: PromptWriter, trigger: str, close: str, gap: str) -> tuple[str, ...]:
    """Return what is written between reasoning, text, another call or the prompt and a call, with ⟨name⟩ for the tool's name.

    One that begins with no tag comes only at the beginning of an answer.
    """
    calls = tuple(ToolCall(name, "{}", f"functions.{name}:{index}") for index, name in enumerate(NAMES))
    prompt, one = _written(writer), _written(writer, tool_calls=calls[:1])
    thought = _written(writer, reasoning=THOUGHT, tool_calls=calls[:1]).partition(THOUGHT)[2]
    text = _written(writer, content=ANSWER, tool_calls=calls[:1]).partition(ANSWER)[2]
    second = _written(writer, tool_calls=calls).partition(trigger)[2].partition(trigger)
    between = second[0][second[0].rfind("</") :].partition(">")[2] if second[1] else ""
    turn_end = TAG.findall(_written(writer, content=ANSWER).partition(ANSWER)[2])[-1:]
    first = one.removeprefix(prompt) if prompt and one.startswith(prompt) else ""
    found = [part.partition(trigger)[0] for part in (first, thought) if trigger in part]
    leads = [part.rpartition(close)[2] if close else part for part in found]
    leads += [lead.removeprefix(gap) for lead in leads]
    leads += [between, text.partition(trigger)[0] if trigger in text else ""]
    whole = [re.sub("|".join(NAMES), NAME, lead.strip()) for lead in leads]
    is_turn_end = [bool(turn_end) and turn_end[0] not in close and lead.startswith(turn_end[0]) for lead in whole]
    return tuple(
        dict.fromkeys(
            lead for lead, ends in zip(whole, is_turn_end, strict=True) if TAG.search(lead) and "{" not in lead and not ends
        )
    )


def _written(writer: PromptWriter, **answer: Any) -> str:
    """Return what the template writes behind a question with tools; "" if it refuses the answer."""
    tools = tuple({"type": "function", "function": {"name": name, "description": "d", "parameters": {}}} for name in NAMES)
    messages = (Message("user", QUESTION), *([Message("assistant", **{"content": None, **answer})] if answer else ()))
    try:
        text = writer.write(Conversation(messages, tools, add_generation_prompt=not answer))
    except InvalidRequest:
        return ""
    return text.rpartition(QUESTION)[2]


class AnswerEnd:
    """Holds back what may be the end of the frame around an answer, and drops it where the answer ends."""

    def __init__(self, ends: Sequence[str]) -> None:
        self.held = ""
        self._ends = tuple(ends)

    def feed(self, pieces: list[Delta]) -> list[Delta]:
        given: list[Delta] = []
        for piece in pieces:
            text = self.held + (piece.text if isinstance(piece, Text) else "")
            start = self._start(text) if isinstance(piece, Text) else len(text)
            self.held = text[start:]
            given += [Text(text[:start])] if start else []
            given += [] if isinstance(piece, Text) else [piece]
        return given

    def _start(self, text: str) -> int:
        """Return where the text may be the beginning of an end."""
        start = text.find("<")
        while start >= 0 and not any(end.startswith(text[start:]) for end in self._ends):
            start = text.find("<", start + 1)
        return len(text) if start < 0 else start

    def finish(self) -> tuple[list[Delta], int]:
        """Return what was held back and is text, and the number of characters that were dropped."""
        held, self.held = self.held, ""
        is_end = held in self._ends
        return [Text(held)] if held and not is_end else [], len(held) if is_end else 0


def tokens_of(tokenizer: Tokenizer, texts: Sequence[str]) -> frozenset[int]:
    """Return the tokens of these texts."""
    return frozenset(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False))
