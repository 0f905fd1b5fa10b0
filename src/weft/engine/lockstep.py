"""How the ranks of a sharded engine stay in step: all run the same engine, and all that could differ comes from rank 0.

What an engine does depends on its messages, on the clock, on when constraints are compiled, and on what their masks took. Rank 0
sends each of these to the others as it meets them; the others use what they are sent instead of their own. So every rank plans
the same steps over the same rows and samples the same tokens, and its collective operations meet those of the others. A rank that
finds itself elsewhere than rank 0 raises OutOfStep before it takes part in the step: the end of the engine, not a wrong token.
"""

import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import msgspec

from weft.ipc.messages import ToEngine, ToFront

CompileVerdict = Literal["compiled", "refused", "late"]


class AgreedTime(msgspec.Struct, frozen=True, tag=True):
    """What rank 0 read off its clock."""

    now: float


class AgreedMessages(msgspec.Struct, frozen=True, tag=True):
    """What the front has sent to rank 0."""

    messages: list[ToEngine]


class AgreedCompiled(msgspec.Struct, frozen=True, tag=True):
    """Which of the constraints in work are taken now, by place, and what became of each."""

    due: list[tuple[int, CompileVerdict]]


class AgreedMasks(msgspec.Struct, frozen=True, tag=True):
    """How long the masks of a step's lines took."""

    seconds: dict[int, float]


class AgreedRows(msgspec.Struct, frozen=True, tag=True):
    """What a turn is about to compute: of each row its number, tokens computed, and the last token of its answer."""

    rows: list[tuple[int, int, int]]


Agreed = AgreedTime | AgreedMessages | AgreedCompiled | AgreedMasks | AgreedRows
Kind = TypeVar("Kind", AgreedTime, AgreedMessages, AgreedCompiled, AgreedMasks, AgreedRows)


class OutOfStep(BaseException):
    """A rank is not where rank 0 is; no border may take that for the failure of a row, so it is no Exception."""


def is_lost_rank(error: Exception) -> bool:
    """Whether MLX's ring says that another rank can not be reached any more: no row's fault, and nothing can be computed."""
    return isinstance(error, RuntimeError) and str(error).startswith("[ring]")


class Lockstep(Protocol):
    """What the engine of a rank needs to stay in step."""

    def agree(self, value: Kind) -> Kind:
        """Return rank 0's value in place of this rank's own. Raises OutOfStep."""
        ...

    def clock(self) -> float: ...


class _AgreedClock:
    """Rank 0's clock for the thread that computes; the threads that compile constraints read their own."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def clock(self) -> float:
        now = time.monotonic()
        return self.agree(AgreedTime(now)).now if threading.current_thread() is self._thread else now

    def agree(self, value: Kind) -> Kind:
        raise NotImplementedError


class LeadingRank(_AgreedClock):
    """Rank 0: its values are those of all."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        super().__init__()
        self._send = send
        self._encoder = msgspec.msgpack.Encoder()

    def agree(self, value: Kind) -> Kind:
        self._send(self._encoder.encode(value))
        return value


class FollowingRank(_AgreedClock):
    """Another rank: takes each value from rank 0, and must be asking for the same kind."""

    def __init__(self, receive: Callable[[], bytes]) -> None:
        super().__init__()
        self._receive = receive
        self._decoder: msgspec.msgpack.Decoder[Agreed] = msgspec.msgpack.Decoder(Agreed)

    def agree(self, value: Kind) -> Kind:
        theirs = self._decoder.decode(self._receive())
        if type(theirs) is not type(value):
            raise OutOfStep(f"rank 0 has a {type(theirs).__name__} where this rank has a {type(value).__name__}")
        if isinstance(theirs, AgreedRows) and theirs != value:
            raise OutOfStep(f"rank 0 computes {theirs.rows}, this rank would compute {value}")
        return theirs


class MessageChannel(Protocol):
    """The engine's end of a channel to the front."""

    def receive(self, wait_seconds: float) -> list[ToEngine]: ...

    def send(self, message: ToFront) -> None: ...


class AgreedChannel:
    """The channel of an engine in lockstep: all ranks receive what rank 0 does; `inner` is None where nobody listens."""

    def __init__(self, lockstep: Lockstep, inner: MessageChannel | None) -> None:
        self._lockstep, self._inner = lockstep, inner

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        messages = [] if self._inner is None else self._inner.receive(wait_seconds)
        return self._lockstep.agree(AgreedMessages(messages)).messages

    def send(self, message: ToFront) -> None:
        if self._inner is not None:
            self._inner.send(message)
