"""Where a later prompt may part from this one, as token positions: where the assistant's turns begin, where the instructions
end and the first user speaks, and where the client says so. The engine ends its chunks there.

The places are looked for in the written prompt; nothing is written or tokenised a second time. Knows a tokenizer and what a
template writes around texts. `Codec` uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile

from weft.errors import InvalidRequest
from weft.text.normalise import INSTRUCTING, PromptWriter
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Message

REACH = 1 << 18  # characters that a template may write between two texts: tools, calls with a file in their arguments
SHORT = 16  # tokens of instructions that are not worth a cut
QUESTION, ANSWER, INSTRUCTION = Message("user", "Hello"), Message("assistant", "Hi"), Message("system", "Be brief")


class BoundaryFinder:
    """How one model's prompts are cut."""

    def __init__(self, writer: PromptWriter | None, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._assistant: list[int] = []  # the tokens that open an assistant's turn, in the history as for a new one
        self._user: list[int] = []  # and a user's
        self._is_folded = False  # instructions stand inside the user's turn
        if writer is not None:
            with suppress(InvalidRequest):  # a template that refuses the simplest talk has no turns to speak of
                self._learn(writer)

    def encode(self, conversation: Conversation, prompt: str) -> tuple[list[int], tuple[int, ...]]:
        """The written prompt as ids, and the places inside it. A place is found again when the conversation has grown."""
        marks = {(index, part) for index, message in enumerate(conversation.messages) for part in message.breakpoints}
        if self._is_folded and (leading := list(takewhile(_instructs, conversation.messages))):
            marks.add((len(leading) - 1, len(_texts(leading[-1])) - 1))
        ids, places = self._tokenizer.encode_placed(prompt, _ends(conversation, prompt, marks))
        places += _places(ids, self._assistant)
        places += [place for place in islice(_places(ids, self._user), 1) if place >= SHORT and not self._is_folded]
        return ids, tuple(sorted({place for place in places if 0 < place < len(ids)}))

    def _learn(self, writer: PromptWriter) -> None:
        def write(*messages: Message, asks: bool = False) -> str:
            return writer.write(Conversation(messages, add_generation_prompt=asks))

        plain, past = write(QUESTION), write(QUESTION, ANSWER, QUESTION)
        opening, history = self._ids(write(QUESTION, asks=True).removeprefix(plain)), self._ids(past)
        while not _has(history, opening):
            opening.pop()
        self._assistant = self._bare(opening)
        first, later = (self._ids(text.rpartition("Hello")[0]) for text in (plain, past))
        self._user = self._bare(_common_end(first, later))
        instructed = write(INSTRUCTION, QUESTION)
        while not _has(self._ids(instructed), self._user):
            self._user.pop(0)
        self._is_folded = bool(self._user) and _has(self._ids(instructed.partition("Be brief")[0]), self._user)

    def _bare(self, opening: list[int]) -> list[int]:
        """Without white space at its end: that may become one token with the text after it."""
        while opening and not self._tokenizer.token_bytes(opening[-1]).strip():
            opening.pop()
        return opening

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _ends(conversation: Conversation, prompt: str, marks: set[tuple[int, int]]) -> list[int]:
    """Where in the prompt the marked parts end; those that the template wrote otherwise are not found.

    All parts before a marked one are looked for in their order, because a text may be there more than once.
    """
    ends: list[int] = []
    end = 0
    for index, message in enumerate(conversation.messages[: max(marks)[0] + 1] if marks else ()):
        for part, text in enumerate(_texts(message)):
            said = text.strip()  # templates trim
            found = prompt.find(said, end, end + len(said) + REACH) if said else -1
            if found >= 0:
                end = found + len(said)
                ends += [end] if (index, part) in marks else []
    return ends


def _texts(message: Message) -> list[str]:
    content = message.content or ""
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _instructs(message: Message) -> bool:
    return message.role in INSTRUCTING


def _common_end(first: list[int], second: list[int]) -> list[int]:
    pairs = zip(reversed(first), reversed(second), strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][::-1]


def _has(ids: list[int], part: list[int]) -> bool:
    return not part or any(True for _ in _places(ids, part))


def _places(ids: list[int], part: list[int]) -> Iterator[int]:
    """Where `part` begins in `ids`."""
    place = -1
    with suppress(ValueError):
        while part:
            place = ids.index(part[0], place + 1)
            if ids[place : place + len(part)] == part:
                yield place
