"""What every wire gives the handler: a request understood (`ParsedRequest`), and a `Reply` that turns deltas into its bytes.

The handler in `app` knows only these; a new wire is one more module with a `translate` function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weft.errors import WeftError
from weft.ipc.limits import Sampling
from weft.text.types import Delta, GenerationRequest, ReuseExplanation, Usage

EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class ReplyHeader:
    """What all parts of one reply have in common."""

    id: str  # the request's id, without a wire's prefix
    created: int  # seconds since 1970
    model: str  # the served model's name
    fingerprint: str  # weft's and mlx's versions
    sampling: Sampling | None = None  # as the model does it; None while that is not known


class Reply(Protocol):
    """One reply on one wire. Streamed or whole, it is made of the same deltas, fed in the same order."""

    def opening(self) -> bytes:
        """Frames sent with the headers, before any work."""

    def begun(self, usage: Usage) -> bytes:
        """Frames before the first pieces: by now it is known what the prompt took."""

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
class ParsedRequest:
    """A request body understood."""

    generation: GenerationRequest  # without prompts: the model is asked for, and nothing of it
    stream: bool
    ignored: tuple[str, ...]  # fields nobody knows: told in a header
    reply: Callable[[ReplyHeader], Reply]
    media_type: str = EVENTS  # of a stream
    streams_overflow: bool = False  # that a prompt is too long is told within the stream: Codex looks for it there


def reused_fields(reused: ReuseExplanation) -> dict[str, Any]:
    """How far a prompt was known before, as every wire tells it."""
    return {
        "matched": reused.matched,
        "cause": reused.cause,
        "position": reused.position,
        "token": reused.token,
        "instead": reused.instead,
        "why": reused.why,
    }


def kept_tokens(usage: Usage) -> int:
    """How many tokens of a prompt were computed and are kept: all but its last one, which every request computes, or none."""
    is_retained = usage.reuse is not None and usage.reuse.cause != "off"
    return max(usage.prompt_tokens - usage.cached_tokens - 1, 0) if is_retained else 0


def request_ids(given: str) -> Iterator[str]:
    """What a client may mean by an id: that of its request, or that of the reply."""
    yield given
    yield from (given.removeprefix(prefix) for prefix in ("chatcmpl-", "cmpl-", "msg_", "resp_") if given.startswith(prefix))
