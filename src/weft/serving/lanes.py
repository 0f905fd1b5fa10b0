"""Threads in which prompts are encoded: a few for short ones and one for long ones, so that no chat waits behind a book.

Tenants take turns in them: nobody's book waits behind all of another's. A job whose client has left is not begun; one that has
begun looks now and then whether it is still wanted.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from weft.fair_pool import FairPool
from weft.text.types import Conversation, GenerationRequest

Result = TypeVar("Result")

LONG_CHARACTERS = 1 << 16  # of a request's texts: 50 ms and more of tokenising
MESSAGE_CHARACTERS = 16  # what a message costs beside its text
SHORT_THREADS, LONG_THREADS = 4, 1


class EncodingLanes:
    """Two small pools of threads, by the length of what is to be encoded."""

    def __init__(self) -> None:
        self._short = FairPool(SHORT_THREADS, "encode")
        self._long = FairPool(LONG_THREADS, "encode-long")

    async def run(self, tenant: str, num_characters: int, work: Callable[[], Result]) -> Result:
        """Do a tenant's work in a thread of its lane; cancelled before it has begun, it is dropped."""
        pool = self._long if num_characters > LONG_CHARACTERS else self._short
        return await asyncio.wrap_future(pool.submit(tenant, work))

    def close(self) -> None:
        """Drop what has not begun. Threads that are at work end with their work."""
        for pool in (self._short, self._long):
            pool.close()


def num_characters(generation: GenerationRequest) -> int:
    """Return about how many characters a request's prompts and prediction cost; a token id costs as much as one."""
    return sum(map(_length, generation.prompts)) + len(generation.prediction or "")


def _length(prompt: Conversation | str | tuple[int, ...]) -> int:
    if not isinstance(prompt, Conversation):
        return len(prompt)
    texts = (text for message in prompt.messages for text in (*message.texts, message.reasoning))
    arguments = (call.arguments for message in prompt.messages for call in message.tool_calls)
    return MESSAGE_CHARACTERS * len(prompt.messages) + sum(len(text) for text in (*texts, *arguments) if isinstance(text, str))
