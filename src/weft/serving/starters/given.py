"""Engines that others start: `weft engine` on this or another machine, reached over TCP at a given address."""

import asyncio
import contextlib
import importlib.metadata
import re
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from weft.config import EngineSettings
from weft.errors import EngineRefused, WeftError
from weft.ipc.link import configure_link
from weft.ipc.messages import (
    PROTOCOL,
    Alive,
    FetchFiles,
    FromGate,
    GateReady,
    Hello,
    ModelFile,
    Ready,
    SessionEnded,
    Shutdown,
    ToFront,
    Welcome,
)
from weft.serving.engine_key import EngineKey
from weft.serving.model_files import digest_of, keep_file, local_folder, missing_files
from weft.serving.starters import EngineExit

VERSION = importlib.metadata.version("weft")
DEFAULT_PORT = 8500
REACH_SECONDS = 3.0  # for a connection
WELCOME_SECONDS = 5.0  # for an engine that was reached to answer
ALIVE_SECONDS = 1.0  # how often a front says that it is there
FAILED_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
FILE_SECONDS = 60.0  # for the files of a model to come


def parse_address(text: str, default_port: int = DEFAULT_PORT) -> tuple[str, int]:
    """Return host and port of `host`, `host:port`, `:port` or `[v6]:port`; raise WeftError if it is none of these."""
    found = re.fullmatch(r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|[^:\[\]/\s]*)(:(?P<port>\d{1,5}))?", text)
    port = int(found["port"]) if found is not None and found["port"] else default_port
    if found is None or not text or port > 65535:
        raise WeftError(f"{text!r} is no address of an engine: write HOST:PORT, as mac1:{DEFAULT_PORT}")
    return found["host"], port


class GivenEngine:
    """One session with an engine's gate: a channel as to an engine of our own, until the session or the connection ends."""

    pid = None

    def __init__(self, name: str, socket: zmq.asyncio.Socket) -> None:
        self.name = name
        self._socket = socket
        self._decoder: msgspec.msgpack.Decoder[FromGate] = msgspec.msgpack.Decoder(FromGate)
        self._encoder = msgspec.msgpack.Encoder()
        self._ended: asyncio.Future[EngineExit] = asyncio.get_running_loop().create_future()
        self._held: list[FromGate] = []  # came while files were fetched
        self.num_broken = 0  # handshakes
        self.is_welcome = False
        self.retire: Callable[[], None] = lambda: None  # an engine that is not ours is left as it is

    @property
    def channel(self) -> "GivenEngine":
        return self

    def send(self, message: Any) -> None:
        """Queue a message for the gate; an engine that is not ours is never told to shut down, and has its own settings."""
        if not isinstance(message, (Shutdown, EngineSettings)):
            self._socket.send(self._encoder.encode(message))

    async def receive(self) -> ToFront:
        while True:
            message = self._held.pop(0) if self._held else await self._next()
            match message:
                case GateReady():
                    return await self._with_files(message)
                case SessionEnded():
                    self.end(message.why, is_crash=message.is_crash)
                    await asyncio.Event().wait()  # whoever waits for its end cancels this
                case Welcome() | ModelFile():
                    continue
                case _:
                    return message

    async def wait(self) -> EngineExit:
        return await asyncio.shield(self._ended)

    async def kill(self) -> None:
        self.end("it was silent")

    def end(self, why: str, *, is_crash: bool = False) -> None:
        if not self._ended.done():
            self._ended.set_result(EngineExit(f"at {self.name} has no session any more: {why}", is_crash))

    async def greet(self, front: str) -> None:
        """Say hello and wait for the answer. Raises TimeoutError if none comes, EngineRefused for another protocol."""
        self.send(Hello(PROTOCOL, VERSION, front))
        message = await asyncio.wait_for(self._next(), WELCOME_SECONDS)
        if not isinstance(message, Welcome) or message.protocol != PROTOCOL:
            theirs = (
                f"weft {message.version}, protocol {message.protocol}" if isinstance(message, Welcome) else "another protocol"
            )
            raise EngineRefused(f"{self.name} speaks {theirs}, and this is weft {VERSION}, protocol {PROTOCOL}: use one version")
        self.is_welcome = True

    async def say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_SECONDS)
            self.send(Alive())

    async def _next(self) -> FromGate:
        message: FromGate = self._decoder.decode(await self._socket.recv())
        return message

    async def _with_files(self, gate: GateReady) -> Ready:
        """Return Ready with a folder on this machine, after fetching what of the model's files is not there yet."""
        folder = local_folder(gate.files)
        wanted = await asyncio.to_thread(missing_files, folder, gate.files)
        if wanted:
            self.send(FetchFiles(tuple(wanted)))
        async with asyncio.timeout(FILE_SECONDS):
            while wanted:
                message = await self._next()
                if not isinstance(message, ModelFile):
                    self._held.append(message)
                elif message.name in wanted:
                    wanted.remove(message.name)
                    if digest_of(message.data) == gate.files[message.name]:  # else it has changed; the codec says what is missing
                        await asyncio.to_thread(keep_file, folder, message.name, message.data)
        return msgspec.structs.replace(gate.ready, folder=str(folder))


@dataclass
class Given:
    """Reaches an engine at an address, again and again: machines are switched off and on."""

    settings: EngineSettings
    address: str
    key: EngineKey | None = None
    may_be_away: bool = True
    name: str = field(init=False)
    front: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        host, port = parse_address(self.address)
        self.name = f"{host or '127.0.0.1'}:{port}"

    @contextlib.asynccontextmanager
    async def start(self) -> AsyncIterator[GivenEngine]:
        """Begin a session with the engine at the address. Raises OSError if it is not reached, EngineRefused if it is no use."""
        await self._probe()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            configure_link(socket)
            if self.key is not None:
                self.key.secure_client(socket)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | FAILED_HANDSHAKES)
            socket.connect(f"tcp://{self.name}")
            engine = GivenEngine(self.name, socket)
            tasks = [asyncio.create_task(engine.say_alive()), asyncio.create_task(_watch(monitor, engine))]
            try:
                await self._greet(engine)
                yield engine
            finally:
                for task in tasks:
                    task.cancel()
                socket.disable_monitor()
                monitor.close()  # before anything is awaited: the server may be stopped just now
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _greet(self, engine: GivenEngine) -> None:
        """Wait for the engine's welcome; one that breaks every handshake off, and is still there, has another key."""
        try:
            await engine.greet(self.front)
        except TimeoutError:
            await self._probe()
            if engine.num_broken:
                raise EngineRefused(f"{self.name} gives no answer: it has another engine key, or is no `weft engine`") from None
            raise OSError(f"{self.name} gives no answer") from None

    async def _probe(self) -> None:
        """Connect and disconnect: only so an address that nobody listens at is known from an engine that keeps silent."""
        host, port = parse_address(self.name)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), port), REACH_SECONDS)
        except TimeoutError:
            raise OSError(f"{self.name} can not be reached within {REACH_SECONDS:g} s") from None
        except OSError as error:
            raise OSError(f"{self.name} can not be reached ({error.strerror or error})") from error
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _watch(monitor: zmq.asyncio.Socket, engine: GivenEngine) -> None:
    """Count handshakes that fail, and end the session when its connection is lost."""
    while True:
        event = await recv_monitor_message(monitor)
        if event["event"] & FAILED_HANDSHAKES:
            engine.num_broken += 1
        elif engine.is_welcome:
            engine.end("the connection is lost")
