"""What every wire gives the handler: a request understood (`Asked`), and a `Reply` that turns deltas into its bytes.

The handler in `app` knows only these; a new wire is one more module with a `translate` function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.chat.conversation import Delta, Generation, Reused
from weft.errors import WeftError


@dataclass(frozen=True)
class Heading:
    """What all parts of one reply have in common."""

    id: str  # the request's id, without a wire's prefix
    created: int  # seconds since 1970
    model: str  # the served model's name
    fingerprint: str  # weft's and mlx's versions


class Reply(Protocol):
    """One reply on one wire. Streamed or whole, it is made of the same deltas, fed in the same order."""

    def opening(self) -> bytes:
        """Frames sent with the headers, before any work."""

    def pieces(self, choice: int, deltas: Sequence[Delta]) -> bytes:
        """Frames for what one choice has new; b"" when there is nothing to tell."""

    def heartbeat(self, computed: int, total: int) -> bytes:
        """A frame that says: alive, `computed` of `total` prompt tokens done. Sent in silence."""

    def closing(self) -> bytes:
        """Frames after the last choice finished."""

    def failure(self, error: WeftError) -> bytes:
        """Frames for a failure after the headers; nothing follows them."""

    def take(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Collect what one choice has new, for `whole`."""

    def whole(self) -> dict[str, Any]:
        """The body of a reply that is not streamed."""


@dataclass(frozen=True)
class Asked:
    """A request body understood."""

    generation: Generation
    stream: bool
    ignored: tuple[str, ...]  # fields nobody knows: told in a header
    reply: Callable[[Heading], Reply]


def reused_fields(reused: Reused) -> dict[str, Any]:
    """How far a prompt was known before, as every wire tells it."""
    return {
        "matched": reused.matched,
        "cause": reused.cause,
        "position": reused.position,
        "token": reused.token,
        "instead": reused.instead,
        "why": reused.why,
    }


def request_ids(given: str) -> Iterator[str]:
    """What a client may mean by an id: that of its request, or that of the reply."""
    yield given
    yield from (given.removeprefix(prefix) for prefix in ("chatcmpl-", "cmpl-") if given.startswith(prefix))
