"""The gate of an engine on a machine of its own, `weft engine MODEL --listen HOST:PORT`: keeps the engine, lets fronts use it.

The engine is a child process, kept alive by a lifeline as in a server. Fronts connect over TCP and have sessions. The gate gives
every sequence a number of its own, so nothing of one session is ever taken for another's. A front that is silent for
`LEASE_SECONDS`, or that says hello again, has lost its sequences here. Messages are msgspec's; nothing received is executed.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weft.config import cache_folder
from weft.errors import WeftError
from weft.ipc.link import configure_link
from weft.ipc.messages import (
    PROTOCOL,
    Alive,
    AskPrefixes,
    Beat,
    Cancel,
    EngineEvents,
    EngineStatus,
    Failed,
    FetchFiles,
    FromGate,
    GateReady,
    Hello,
    Leaving,
    Loading,
    ModelFile,
    Prefixes,
    SessionEnded,
    Submit,
    ToFront,
    ToGate,
    Welcome,
)
from weft.memory.disk_files import identity_of
from weft.serving.engine_key import EngineKey, until_cancelled
from weft.serving.lifeline import Lifeline
from weft.serving.model_files import digests_of, read_model_file
from weft.serving.prefix_index import ReportedChunks
from weft.serving.starters import Starter
from weft.serving.starters.given import VERSION

log = logging.getLogger("weft.serving")

LEASE_SECONDS = 10.0  # of silence, after which a front's sequences are cancelled
TICK_SECONDS = 0.25
LAST_SECONDS = 1.0  # for fronts to take their sequences away before the gate ends

Send = Callable[[bytes, FromGate], None]


@dataclass
class Session:
    """One connection of a front: its sequences by the front's numbers, and when it was heard last."""

    heard_at: float
    front: str = ""  # which front it is of
    numbers: dict[int, int] = field(default_factory=dict)  # the front's → the engine's


class Gate:
    """Keeps one engine alive and serves it to any number of fronts; decides nothing about their requests."""

    def __init__(self, starter: Starter, hang_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lifeline = Lifeline(starter, hang_seconds)
        self.lifeline.on_message, self.lifeline.on_change = self._forward, self._update
        self.clock = clock
        self.sessions: dict[bytes, Session] = {}
        self.owners: dict[int, tuple[bytes, int]] = {}  # the engine's number → its session, and the front's number
        self.send: Send = lambda _identity, _message: None
        self.settled = asyncio.Event()  # ready or failed
        self._ready: GateReady | None = None
        self._reported = ReportedChunks()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_leaving = False

    @contextlib.asynccontextmanager
    async def listen(self, address: str, key: EngineKey | None) -> AsyncIterator[str]:
        """Serve fronts at this address, which is given back with its port; raises zmq.ZMQError if it can not be taken."""
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            admitting = asyncio.create_task(key.admit(context)) if key is not None else None
            await asyncio.sleep(0)  # it must be there before the first client
            if key is not None:
                key.secure_server(socket)
            configure_link(socket)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.bind(address)
            self.send = _sender(socket)
            tasks = [asyncio.create_task(self._receive(socket)), asyncio.create_task(self._watch_leases())]
            self.lifeline.start()
            try:
                yield socket.getsockopt_string(zmq.LAST_ENDPOINT)
            finally:
                await self.lifeline.stop()
                for task in (*tasks, *self._tasks, *([] if admitting is None else [admitting])):
                    await until_cancelled(task)

    async def leave(self, drain_seconds: float) -> None:
        """Take nothing new; return when all sequences have ended, or after `drain_seconds` have been taken elsewhere."""
        self._is_leaving = True
        self._broadcast(Leaving())
        deadline = self.clock() + drain_seconds
        while self.owners and self.clock() < deadline:
            await asyncio.sleep(TICK_SECONDS / 5)
        self._broadcast(Leaving(is_over=True))
        deadline = self.clock() + LAST_SECONDS
        await asyncio.sleep(TICK_SECONDS)  # what fronts had sent before they heard it comes, and is cancelled
        while self.owners and self.clock() < deadline:
            await asyncio.sleep(TICK_SECONDS / 5)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        decoder = msgspec.msgpack.Decoder(ToGate)
        while True:
            identity, data, *_ = await socket.recv_multipart()
            try:
                self.handle(identity, decoder.decode(data))
            except msgspec.MsgspecError as error:
                log.warning("a front sent what is no message (%s); its session is ended", error)
                self._end_session(identity, "a message could not be understood")

    def handle(self, identity: bytes, message: ToGate) -> None:
        """Act on a front's message; whoever has no session is told to say hello first."""
        if isinstance(message, Hello):
            self._greet(identity, message)
            return
        if (session := self.sessions.get(identity)) is None:
            self.send(identity, SessionEnded("it was silent for too long"))
            return
        session.heard_at = self.clock()
        match message:
            case Submit():
                self._submit(identity, session, message)
            case Cancel():
                self._cancel([number for one in message.numbers if (number := session.numbers.get(one)) is not None])
            case AskPrefixes():
                self._start(self._answer(identity, message))
            case FetchFiles():
                self._start(self._send_files(identity, message))
            case Alive():
                pass

    def _greet(self, identity: bytes, hello: Hello) -> None:
        own = [known for known, session in self.sessions.items() if session.front == hello.front or known == identity]
        for known in own:  # of a connection that was lost
            self._end_session(known, "the front began anew")
        self.send(identity, Welcome(PROTOCOL, VERSION))
        if hello.protocol != PROTOCOL:
            log.warning("a front of weft %s speaks protocol %d, not %d", hello.version, hello.protocol, PROTOCOL)
            return
        self.sessions[identity] = Session(self.clock(), hello.front)
        condition = self.lifeline.condition
        if self._ready is not None:
            self._introduce(identity, self._ready)
        elif condition.failed is not None:
            self.send(identity, Failed(condition.failed))
        else:
            self.send(identity, condition.loading or Loading("reading the weights' digest"))

    def _introduce(self, identity: bytes, ready: GateReady) -> None:
        """Tell a front that the engine is ready and everything that it has cached."""
        self.send(identity, ready)
        for kept in self._reported.in_parts():
            self.send(identity, EngineEvents(kept=kept))
        if self._is_leaving:
            self.send(identity, Leaving())

    def _submit(self, identity: bytes, session: Session, message: Submit) -> None:
        if self.lifeline.client.send is None or self._ready is None:
            return  # the front is about to hear that the engine has ended
        numbers = tuple(itertools.islice(self._numbers, len(message.numbers)))
        for theirs, ours in zip(message.numbers, numbers, strict=True):
            session.numbers[theirs], self.owners[ours] = ours, (identity, theirs)
        self.lifeline.client.send(msgspec.structs.replace(message, numbers=numbers))

    def _cancel(self, numbers: list[int]) -> None:
        for number in numbers:
            self._drop(number)
        if numbers and self.lifeline.client.send is not None:
            self.lifeline.client.send(Cancel(tuple(numbers)))

    def _drop(self, number: int) -> None:
        identity, theirs = self.owners.pop(number)
        if (session := self.sessions.get(identity)) is not None and session.numbers.get(theirs) == number:
            del session.numbers[theirs]

    async def _answer(self, identity: bytes, request: AskPrefixes) -> None:
        with contextlib.suppress(WeftError):  # the front has a limit of its own to wait
            answer: Prefixes = await self.lifeline.client.prefixes(clear=request.clear, scope=request.scope)
            self.send(identity, msgspec.structs.replace(answer, number=request.number))

    async def _send_files(self, identity: bytes, request: FetchFiles) -> None:
        if (known := self._ready) is None:
            return
        folder = Path(known.ready.folder)
        for name in request.names:
            data = await asyncio.to_thread(read_model_file, folder, name) if name in known.files else b""
            self.send(identity, ModelFile(name, data))

    def _forward(self, message: ToFront) -> None:
        """Give an engine's message to the fronts it concerns."""
        match message:
            case EngineEvents():
                self._reported.take(message)
                self._distribute(message)
            case Beat() | Loading():
                self._broadcast(message)

    def _distribute(self, events: EngineEvents) -> None:
        shares: dict[bytes, EngineEvents] = {}

        def share(number: int) -> tuple[EngineEvents, int] | None:
            if (owner := self.owners.get(number)) is None:
                return None
            return shares.setdefault(owner[0], EngineEvents([], [], [])), owner[1]

        for outcome in events.outcomes:
            if (found := share(outcome.sequence)) is not None:
                found[0].outcomes.append(msgspec.structs.replace(outcome, sequence=found[1]))
        for prompt in events.prompts:
            if (found := share(prompt.sequence)) is not None:
                found[0].prompts.append(msgspec.structs.replace(prompt, sequence=found[1]))
        for token in events.tokens:
            if (found := share(token.sequence)) is not None:
                found[0].tokens.append(msgspec.structs.replace(token, sequence=found[1]))
                if token.finish is not None:
                    self._drop(token.sequence)
        has_news = events.status is not None or events.kept or events.gone
        for identity in list(self.sessions if has_news and self._ready is not None else shares):
            own = shares.get(identity, EngineEvents([], [], []))
            status = None if events.status is None else self._own_status(identity, events.status)
            self.send(identity, EngineEvents(own.outcomes, own.prompts, own.tokens, status, events.kept, events.gone))

    def _own_status(self, identity: bytes, status: EngineStatus) -> EngineStatus:
        """Return the engine's status with a front's own numbers of the sequences in prefill."""

        def own(numbers: tuple[int, ...]) -> tuple[int, ...]:
            owners = [self.owners.get(number) for number in numbers]
            return tuple(owner[1] for owner in owners if owner is not None and owner[0] == identity)

        return msgspec.structs.replace(status, prefilling=own(status.prefilling), following=own(status.following))

    def _update(self) -> None:
        condition = self.lifeline.condition
        if condition.failed is not None:
            self._broadcast(Failed(condition.failed))
            self.settled.set()
        elif condition.ready is None and self._ready is not None:
            self._ready = None
            self._reported.clear()
            self.owners.clear()
            for identity in list(self.sessions):
                self._end_session(identity, "its engine has ended", is_crash=self.lifeline.last_exit.is_crash)
        elif condition.ready is not None and self._ready is None:
            self._start(self._make_ready())

    async def _make_ready(self) -> None:
        """Find out which weights and files the engine's model has, which takes a while the first time; then tell the fronts."""
        ready = self.lifeline.condition.ready
        assert ready is not None
        folder = Path(ready.folder)
        weights = await asyncio.to_thread(identity_of, folder, (), cache_folder() / "weights.json")
        files = await asyncio.to_thread(digests_of, folder)
        if self.lifeline.condition.ready != ready:
            return  # it has ended meanwhile
        self._ready = GateReady(msgspec.structs.replace(ready, weights=weights), files)
        self.settled.set()
        for identity in self.sessions:
            self._introduce(identity, self._ready)

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.end_silent()

    def end_silent(self) -> None:
        """Cancel the sequences of fronts that were not heard for the length of a lease."""
        limit = self.clock() - LEASE_SECONDS
        for identity in [identity for identity, session in self.sessions.items() if session.heard_at < limit]:
            log.warning("a front is silent for %g s; its requests are cancelled", LEASE_SECONDS)
            self._end_session(identity, "it was silent for too long")

    def _end_session(self, identity: bytes, why: str, *, is_crash: bool = False) -> None:
        if (session := self.sessions.pop(identity, None)) is not None:
            self._cancel([number for number in session.numbers.values() if number in self.owners])
            self.send(identity, SessionEnded(why, is_crash))

    def _broadcast(self, message: FromGate) -> None:
        for identity in list(self.sessions):
            self.send(identity, message)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sender(socket: zmq.asyncio.Socket) -> Send:
    encoder = msgspec.msgpack.Encoder()

    def forget_error(sending: asyncio.Future[Any]) -> None:
        if not sending.cancelled():
            sending.exception()  # its connection is gone; its lease ends

    def send(identity: bytes, message: FromGate) -> None:
        asyncio.ensure_future(socket.send_multipart([identity, encoder.encode(message)])).add_done_callback(forget_error)

    return send
