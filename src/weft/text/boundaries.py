"""Finds prompt positions where later prompts may diverge: turn starts, end of instructions, client marks. Chunks end there."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile

from weft.errors import InvalidRequest
from weft.text.normalise import INSTRUCTING, PromptWriter
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Message

MAX_BETWEEN = 1 << 18  # characters that a template may write between two texts: tools, calls with a file in their arguments
MIN_INSTRUCTIONS = 16  # tokens; shorter instructions are not worth a cut
QUESTION, ANSWER, INSTRUCTION = Message("user", "Hello"), Message("assistant", "Hi"), Message("system", "Be brief")


class BoundaryFinder:
    """Finds the cache boundaries in one model's prompts: token positions from which a later prompt may differ."""

    def __init__(self, writer: PromptWriter | None, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._assistant: list[int] = []  # the tokens that open an assistant's turn, in the history and in the generation prompt
        self._user: list[int] = []  # the tokens that open a user's turn
        self._is_folded = False  # instructions are inside the user's turn
        if writer is not None:
            with suppress(InvalidRequest):  # a template that refuses the simplest conversation has no known turns
                self._learn(writer)

    def encode(self, conversation: Conversation, prompt: str) -> tuple[list[int], tuple[int, ...]]:
        """Encode the rendered prompt; return its ids and sorted boundaries, which remain when the conversation grows."""
        marks = {(index, part) for index, message in enumerate(conversation.messages) for part in message.breakpoints}
        if self._is_folded and (leading := list(takewhile(lambda one: one.role in INSTRUCTING, conversation.messages))):
            marks.add((len(leading) - 1, len(leading[-1].texts) - 1))
        ids, places = self._tokenizer.encode_with_offsets(prompt, _ends_of_marked(conversation, prompt, marks))
        places += _occurrences(ids, self._assistant)
        first_user = islice(_occurrences(ids, self._user), 1)
        places += [place for place in first_user if place >= MIN_INSTRUCTIONS and not self._is_folded]
        return ids, tuple(sorted({place for place in places if 0 < place < len(ids)}))

    def _learn(self, writer: PromptWriter) -> None:
        def write(*messages: Message, add_generation_prompt: bool = False) -> str:
            return writer.write(Conversation(messages, add_generation_prompt=add_generation_prompt))

        plain, past = write(QUESTION), write(QUESTION, ANSWER, QUESTION)
        opening = self._ids(write(QUESTION, add_generation_prompt=True).removeprefix(plain))
        while not _has(self._ids(past), opening):
            opening.pop()
        self._assistant = self._without_blanks(opening)
        ends = zip(*(reversed(self._ids(text.rpartition("Hello")[0])) for text in (plain, past)), strict=False)
        self._user = self._without_blanks([one for one, _ in takewhile(lambda pair: pair[0] == pair[1], ends)][::-1])
        instructed = write(INSTRUCTION, QUESTION)
        while not _has(self._ids(instructed), self._user):
            self._user.pop(0)
        self._is_folded = bool(self._user) and _has(self._ids(instructed.partition("Be brief")[0]), self._user)

    def _without_blanks(self, opening: list[int]) -> list[int]:
        """Remove white-space tokens from the end of `opening`, since they may merge with the text that follows, and return it."""
        while opening and not self._tokenizer.token_bytes(opening[-1]).strip():
            opening.pop()
        return opening

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _ends_of_marked(conversation: Conversation, prompt: str, marks: set[tuple[int, int]]) -> list[int]:
    """Return the offsets in `prompt` where the marked message parts end; parts that the template altered are left out."""
    ends, end = [], 0
    # All parts before a marked one are searched in their order, because a text may be there more than once.
    for index, message in enumerate(conversation.messages[: max(marks)[0] + 1] if marks else ()):
        for part, text in enumerate(map(str.strip, message.texts)):  # templates trim
            found = prompt.find(text, end, end + len(text) + MAX_BETWEEN) if text else -1
            if found >= 0:
                end = found + len(text)
                ends += [end] if (index, part) in marks else []
    return ends


def _has(ids: list[int], part: list[int]) -> bool:
    return not part or next(_occurrences(ids, part), None) is not None


def _occurrences(ids: list[int], part: list[int]) -> Iterator[int]:
    position = -1
    with suppress(ValueError):
        while part:
            position = ids.index(part[0], position + 1)
            if ids[position : position + len(part)] == part:
                yield position
