"""Engines over TCP: gates with fake engines, fronts with and without the key, leases, leaving, files and nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from fronts import FAKE_ENGINE
from pools import all_open, answers, ask, become, expected, proved
from waiting import HANG_SECONDS
from weft.config import EngineSettings
from weft.errors import EngineRefused, WeftError
from weft.ipc.limits import Sampling
from weft.ipc.messages import (
    PROTOCOL,
    Alive,
    Cancel,
    EngineEvents,
    FetchFiles,
    Hello,
    SessionEnded,
    Submit,
    TokenEvent,
    Welcome,
)
from weft.serving.engine_key import EngineKey, write_new_key
from weft.serving.gate import LEASE_SECONDS, Gate, Session
from weft.serving.model_files import digests_of, keep_file, local_folder, missing_files, read_model_file
from weft.serving.pool import EnginePool
from weft.serving.starters import EngineExit
from weft.serving.starters.given import Given, parse_address
from weft.serving.starters.here import Here

SETTINGS = EngineSettings(model="m")
KEY, OTHER_KEY = EngineKey(b"k" * 32), EngineKey(b"o" * 32)
SLOW = ("--token-seconds", "0.002")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weft.serving.lifeline.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def fake_gate(*words: str) -> Gate:
    return Gate(Here(SETTINGS, (sys.executable, str(FAKE_ENGINE), *words, "m")), 60.0)


@asynccontextmanager
async def listening(gate: Gate, key: EngineKey | None = KEY) -> AsyncIterator[str]:
    """A gate at a free port; gives its address."""
    async with gate.listen("tcp://127.0.0.1:*", key) as bound:
        yield bound.removeprefix("tcp://")


@asynccontextmanager
async def front_of(*addresses: str, key: EngineKey | None = KEY) -> AsyncIterator[EnginePool]:
    pool = EnginePool([Given(SETTINGS, address, key) for address in addresses], 60.0)
    pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def told(story: Callable[[list[Gate], EnginePool], Awaitable[None]], num_gates: int, *words: str) -> None:
    """Tell a story about gates with fake engines, and a front that has them all."""

    async def run() -> None:
        gates = [fake_gate(*words) for _ in range(num_gates)]
        async with AsyncExitStack() as stack:
            addresses = [await stack.enter_async_context(listening(gate)) for gate in gates]
            pool = await stack.enter_async_context(front_of(*addresses))
            await all_open(pool)
            await story(gates, pool)

    asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))


def test_streams_go_on_at_another_gate_when_an_engine_dies_behind_its_own() -> None:
    async def story(gates: list[Gate], pool: EnginePool) -> None:
        prompts = [[place + 1, 50, 60] for place in range(10)]
        subscriptions = [ask(pool, prompt, 400, n=1 + place % 2) for place, prompt in enumerate(prompts)]
        await proved(pool)
        pid = gates[0].lifeline.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        found = await asyncio.gather(*map(answers, subscriptions))
        await all_open(pool)  # it is back

        assert found == [[expected(prompt, 400)] * (1 + place % 2) for place, prompt in enumerate(prompts)]
        assert pool.dispatcher.num_moved > 0
        assert not any(gate.owners for gate in gates)

    told(story, 2, *SLOW)


def test_a_gate_that_leaves_has_its_streams_taken_elsewhere() -> None:
    async def story(gates: list[Gate], pool: EnginePool) -> None:
        prompts = [[place + 1, 50, 60] for place in range(8)]
        subscriptions = [ask(pool, prompt, 500) for prompt in prompts]
        await become(lambda: all(gate.owners for gate in gates))
        await gates[0].leave(0.0)

        await become(lambda: not pool.replicas[0].is_open)
        assert not gates[0].owners
        assert await asyncio.gather(*map(answers, subscriptions)) == [[expected(prompt, 500)] for prompt in prompts]
        assert pool.dispatcher.num_moved > 0

    told(story, 2, *SLOW)


def test_two_fronts_share_an_engine_and_one_s_end_is_not_felt_by_the_other() -> None:
    async def story(_: list[Gate], pool: EnginePool) -> None:
        async with front_of(pool.replicas[0].name) as other:
            await become(lambda: other.replicas[0].is_open)
            mine = [ask(pool, [place + 1, 9], 300) for place in range(4)]
            theirs = [ask(other, [place + 1, 9], 300) for place in range(4)]
            assert await answers(theirs[0]) == [expected([1, 9], 300)]
        found = await asyncio.gather(*map(answers, mine))

        assert found == [[expected([place + 1, 9], 300)] for place in range(4)]
        assert await answers(ask(pool, [7], 5)) == [[7] * 5]

    told(story, 1, *SLOW)


def test_the_files_of_a_model_come_once_and_by_digest(tmp_path: Path) -> None:
    async def story(_: list[Gate], pool: EnginePool) -> None:
        ready = pool.replicas[0].condition.ready
        assert ready is not None
        folder = Path(ready.folder)

        assert folder.is_relative_to(tmp_path / "cache")
        assert {"tokenizer.json", "chat_template.jinja", "config.json"} <= {path.name for path in folder.iterdir()}
        assert not list(folder.glob("*.safetensors"))
        assert missing_files(folder, digests_of(folder)) == []

    told(story, 1)


def refusal(start: Callable[[], Any]) -> str:
    """What is said when an engine can not be used."""

    async def run() -> str:
        with pytest.raises((EngineRefused, OSError)) as raised:
            async with start():
                pass
        return str(raised.value)

    return asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))


@pytest.mark.parametrize("key", [OTHER_KEY, None])
def test_a_front_with_a_wrong_key_or_none_gets_no_word(key: EngineKey | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.starters.given.WELCOME_SECONDS", 0.6)
    gate, heard = fake_gate(), []
    monkeypatch.setattr(gate, "handle", lambda *message: heard.append(message))

    async def run() -> None:
        async with listening(gate) as address, front_of(address, key=key) as pool:
            await become(lambda: pool.condition.failed)

            assert "another engine key" in (pool.condition.failed or "")
            assert heard == []

    asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))


def test_a_client_that_knows_only_the_engine_s_public_key_gets_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.starters.given.WELCOME_SECONDS", 0.6)
    stranger = EngineKey(b"s" * 32)
    stranger._publics["engine"] = KEY._publics["engine"]

    async def run() -> None:
        async with listening(fake_gate()) as address, front_of(address, key=stranger) as pool:
            await become(lambda: pool.condition.failed or pool.condition.ready)

            assert "another engine key" in (pool.condition.failed or "")

    asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))


def test_an_address_where_nobody_listens_is_named() -> None:
    said = refusal(lambda: Given(SETTINGS, "127.0.0.1:9").start())

    assert said.startswith("127.0.0.1:9 can not be reached (")


def test_an_engine_of_another_protocol_is_named_with_both_versions() -> None:
    async def run() -> str:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")

            async def answer() -> None:
                identity, _ = await socket.recv_multipart()
                await socket.send_multipart([identity, msgspec.msgpack.encode(Welcome(PROTOCOL + 1, "9.9"))])

            answering = asyncio.create_task(answer())
            with pytest.raises(EngineRefused) as raised:
                async with Given(SETTINGS, f"127.0.0.1:{port}").start():
                    pass
            await answering
            return str(raised.value)

    said = asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))
    assert f"speaks weft 9.9, protocol {PROTOCOL + 1}" in said
    assert f"protocol {PROTOCOL}" in said


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"other": true}')

    async def run() -> None:
        async with (
            listening(fake_gate()) as one,
            listening(fake_gate("--folder", str(model))) as other,
            front_of(one, other) as pool,
        ):
            await become(lambda: any(replica.condition.failed for replica in pool.replicas))
            (failed,) = [replica.condition.failed for replica in pool.replicas if replica.condition.failed]

            assert "has other weights or another config under the name m" in failed

    asyncio.run(asyncio.wait_for(run(), HANG_SECONDS))


@pytest.mark.parametrize("text", ["", "a b:1", "a:99999", "a:b", "http://a:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(WeftError, match="is no address of an engine"):
        parse_address(text)


def test_addresses_are_read() -> None:
    assert [parse_address(text) for text in ("mac1", "mac1:9", ":9", "[::1]:9")] == [
        ("mac1", 8500),
        ("mac1", 9),
        ("", 9),
        ("[::1]", 9),
    ]


class Gated:
    """A gate without sockets: what it sends to fronts and to its engine is kept."""

    def __init__(self) -> None:
        self.now = 0.0
        self.gate = Gate(Here(SETTINGS), 60.0, clock=lambda: self.now)
        self.sent: list[tuple[bytes, Any]] = []
        self.engine: list[Any] = []
        self.gate.send = lambda identity, message: self.sent.append((identity, message))
        self.gate.lifeline.client.attach(self.engine.append, 4)
        self.gate._ready = msgspec.UNSET  # type: ignore[assignment]  # it is ready
        for identity in (b"a", b"b"):
            self.gate.sessions[identity] = Session(self.now, identity.decode())

    def submit(self, identity: bytes, *numbers: int) -> None:
        self.gate.handle(identity, Submit(numbers, [1], (Sampling(),) * len(numbers)))


@pytest.mark.parametrize("is_crash", [True, False])
def test_fronts_are_told_whether_the_engine_has_crashed(is_crash: bool) -> None:
    gated = Gated()
    gated.gate.lifeline.last_exit = EngineExit("is gone", is_crash)
    gated.gate._update()

    assert [message.is_crash for _, message in gated.sent] == [is_crash] * 2


def test_equal_numbers_of_two_fronts_are_told_apart() -> None:
    gated = Gated()
    gated.submit(b"a", 5)
    gated.submit(b"b", 5)
    ours = [submit.numbers[0] for submit in gated.engine]
    gated.gate._forward(EngineEvents(tokens=[TokenEvent(ours[1], 70), TokenEvent(ours[0], 60, finish="stop")]))

    told = {identity: message.tokens for identity, message in gated.sent}
    assert told == {b"a": [TokenEvent(5, 60, finish="stop")], b"b": [TokenEvent(5, 70)]}
    assert list(gated.gate.owners.values()) == [(b"b", 5)]


def test_a_front_that_is_silent_for_a_lease_loses_its_sequences_and_the_other_keeps_its_own() -> None:
    gated = Gated()
    gated.submit(b"a", 1, 2)
    gated.submit(b"b", 3)
    gated.now = LEASE_SECONDS - 1
    gated.gate.handle(b"b", Alive())
    gated.now = LEASE_SECONDS + 1
    gated.gate.end_silent()

    assert list(gated.gate.sessions) == [b"b"]
    assert gated.engine[-1] == Cancel((0, 1))
    assert list(gated.gate.owners.values()) == [(b"b", 3)]
    gated.submit(b"a", 9)
    assert gated.sent[-1] == (b"a", SessionEnded("it was silent for too long"))


def test_who_says_hello_again_has_lost_what_he_had() -> None:
    gated = Gated()
    gated.gate._ready = None
    gated.gate.sessions[b"a"].numbers[1] = 0
    gated.gate.owners[0] = (b"a", 1)
    gated.gate.handle(b"a", Hello(PROTOCOL, "1", "f"))

    assert gated.engine == [Cancel((0,))]
    assert gated.gate.sessions[b"a"].numbers == {}


def test_a_front_that_comes_back_over_another_connection_has_lost_what_it_had_there() -> None:
    gated = Gated()
    gated.gate._ready = None
    gated.gate.sessions[b"a"].front = "f"
    gated.gate.sessions[b"a"].numbers[1] = 0
    gated.gate.owners[0] = (b"a", 1)
    gated.gate.handle(b"new", Hello(PROTOCOL, "1", "f"))

    assert gated.engine == [Cancel((0,))]
    assert set(gated.gate.sessions) == {b"b", b"new"}


def test_a_front_of_another_protocol_gets_no_session() -> None:
    gated = Gated()
    gated.gate.handle(b"c", Hello(PROTOCOL + 1, "9.9", "f"))

    assert [type(message) for _, message in gated.sent] == [Welcome]
    assert b"c" not in gated.gate.sessions


def test_what_is_no_message_ends_its_session_alone() -> None:
    async def story(gates: list[Gate], pool: EnginePool) -> None:
        running = ask(pool, [1, 2], 600)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            KEY.secure_client(socket)
            socket.connect(f"tcp://{pool.replicas[0].name}")
            await socket.send(msgspec.msgpack.encode(Hello(PROTOCOL, "1", "f")))
            await socket.recv()
            await socket.send(b"\x80\x04cos\nsystem\n(S'true'\ntR.")  # a pickle
            while msgspec.msgpack.decode(await socket.recv())["type"] != "SessionEnded":
                pass

        assert len(gates[0].sessions) == 1
        assert await answers(running) == [expected([1, 2], 600)]

    told(story, 1, *SLOW)


def test_only_files_of_the_model_s_folder_are_sent_and_their_names_lead_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "weights.safetensors").write_text("w")

    assert list(digests_of(folder)) == ["tokenizer.json"]
    for name in ("../secret.json", "weights.safetensors", "/etc/passwd", ".hidden.json", "a/b.json"):
        assert read_model_file(folder, name) == b""
        assert missing_files(folder, {name: "0"}) == []


def test_other_files_are_kept_in_another_folder(tmp_path: Path) -> None:
    one, other = local_folder({"a.json": "1"}), local_folder({"a.json": "2"})
    keep_file(one, "additional_chat_templates/b.jinja", b"text")

    assert one != other
    assert (one / "additional_chat_templates" / "b.jinja").read_bytes() == b"text"
    assert one.is_relative_to(tmp_path / "cache")


def test_a_key_is_written_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "key"
    write_new_key(path)

    assert path.stat().st_mode & 0o777 == 0o600
    assert isinstance(EngineKey.read(path), EngineKey)
    with pytest.raises(WeftError, match="exists"):
        write_new_key(path)


@pytest.mark.parametrize("text", ["", "abc", "z" * 64])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)

    with pytest.raises(WeftError, match="no engine key"):
        EngineKey.read(tmp_path / "key")


def test_a_file_that_was_not_offered_is_not_read() -> None:
    gated = Gated()

    async def run() -> None:
        gated.gate.handle(b"a", FetchFiles(("config.json",)))
        await asyncio.gather(*gated.gate._tasks, return_exceptions=True)

    gated.gate._ready = None
    asyncio.run(run())
    assert gated.sent == []
