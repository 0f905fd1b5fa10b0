"""Engines placed by Ray as a front sees them: gates with fake engines, and a driver without Ray that says where they are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from fronts import FAKE_ENGINE
from pools import all_open, answers, ask, become, expected
from waiting import HANG_SECONDS
from weft.api.admin import show_replicas
from weft.config import EngineSettings, GateConfig, ServerConfig
from weft.errors import WeftError
from weft.serving.autoscaler import Autoscaler
from weft.serving.gate import Gate
from weft.serving.model import ServedModel
from weft.serving.pool import EnginePool
from weft.serving.starters.here import Here
from weft.serving.starters.on_ray import OnRay, RayFleet, default_resources, look_at_cluster, parse_resources
from weft.serving.starters.ray_driver import FleetOrder

SETTINGS = EngineSettings(model="m")
DRIVER = Path(__file__).parent.parent / "fake_ray_driver.py"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weft.serving.lifeline.FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("weft.serving.lifeline.LONGEST_AWAY_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr("weft.serving.starters.on_ray.PAUSE_SECONDS", 0.01)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


class Cluster:
    """What the driver says of a cluster, and what it was told."""

    def __init__(self, folder: Path, autoscaler: Autoscaler | None = None) -> None:
        self.news, self.diary = folder / "news", folder / "diary"
        self.news.write_text("")
        names = ("0", "1")
        order = FleetOrder("auto", GateConfig("m"), names if autoscaler is None else names[:1], {"CPU": 2.0})
        self.fleet = RayFleet(order, (sys.executable, str(DRIVER), str(self.news), str(self.diary)))
        self.pool = EnginePool([OnRay(SETTINGS, name, self.fleet) for name in names], 60.0, self.fleet, autoscaler)

    def say(self, text: str) -> None:
        beside = self.news.with_suffix(".new")
        beside.write_text(text)
        beside.rename(self.news)

    def has_noted(self, text: str) -> bool:
        return self.diary.exists() and text in self.diary.read_text()


@asynccontextmanager
async def gate(*words: str) -> AsyncIterator[str]:
    command = (sys.executable, str(FAKE_ENGINE), *words, "m")
    async with Gate(Here(SETTINGS, command), 60.0).listen("tcp://127.0.0.1:*", None) as bound:
        yield bound.removeprefix("tcp://")


def told(folder: Path, story: Callable[[Cluster], Awaitable[None]], autoscaler: Autoscaler | None = None) -> Cluster:
    async def run() -> Cluster:
        cluster = Cluster(folder, autoscaler)
        cluster.pool.start()
        try:
            async with asyncio.timeout(HANG_SECONDS):
                await story(cluster)
        finally:
            await cluster.pool.stop()
        return cluster

    return asyncio.run(run())


def placed(*addresses: str) -> str:
    engines = ", ".join(f'"{name}": {{"address": "{address}"}}' for name, address in enumerate(addresses))
    return f'{{"engines": {{{engines}}}}}'


def test_engines_are_reached_where_ray_has_placed_them(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with AsyncExitStack() as stack:
            cluster.say(placed(*[await stack.enter_async_context(gate()) for _ in range(2)]))
            await all_open(cluster.pool)
            got = await answers(ask(cluster.pool, [5, 6, 7], 20))

            assert got == [expected([5, 6, 7], 20)]

    told(tmp_path, story)


def test_an_engine_that_was_placed_elsewhere_is_found_there(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with gate() as first, gate() as third:
            async with gate() as second:
                cluster.say(placed(first, second))
                await all_open(cluster.pool)
            await become(lambda: not cluster.pool.replicas[1].is_open)
            cluster.say(placed(first, third))
            await all_open(cluster.pool)

    told(tmp_path, story)


def test_while_ray_is_away_answers_go_on_and_the_status_says_it(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with gate("--token-seconds", "0.002") as one, gate() as other:
            cluster.say(placed(one, other))
            await all_open(cluster.pool)
            running = ask(cluster.pool, [5, 6, 7], 200)
            cluster.say('{"problem": "Ray\'s head can not be reached"}')
            await become(lambda: cluster.fleet.problem)
            shown = show_replicas(ServedModel("m", cluster.pool))

            assert shown["placement"] == {"can_place": False, "message": "Ray's head can not be reached"}
            assert [row["status"] for row in shown["replicas"]] == ["ready", "ready"]
            assert await answers(running) == [expected([5, 6, 7], 200)]
            cluster.say(placed(one, other))
            await become(lambda: cluster.fleet.problem is None)

    told(tmp_path, story)


def test_a_renewed_engine_is_replaced_where_it_is(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with gate() as one, gate() as other, gate() as new:
            cluster.say(placed(one, other))
            await all_open(cluster.pool)
            await cluster.pool.renew("1", 0.0)
            await become(lambda: cluster.has_noted('"1"'))
            cluster.say(placed(one, new))
            await all_open(cluster.pool)

    told(tmp_path, story)


def test_a_front_that_ends_lets_go_of_its_engines(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        async with gate() as one:
            cluster.say(placed(one))
            await become(lambda: cluster.pool.replicas[0].is_open)

    assert told(tmp_path, story).has_noted("let go")


def test_an_engine_that_is_not_placed_says_what_it_needs(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        await become(lambda: "CPU 2" in str(cluster.pool.condition.loading))

    told(tmp_path, story)


def test_an_engine_that_can_not_serve_is_given_up(tmp_path: Path) -> None:
    async def story(cluster: Cluster) -> None:
        failed = '{"failed": "there is no engine key"}'
        cluster.say(f'{{"engines": {{"0": {failed}, "1": {failed}}}}}')
        await become(lambda: cluster.pool.condition.failed == "there is no engine key")

    told(tmp_path, story)


@pytest.mark.parametrize("text", ["GPU", "GPU=", "GPU=0", "=1", "GPU=1,,", "CPU=-2", "CPU=nan"])
def test_resources_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(WeftError, match="NAME=AMOUNT"):
        parse_resources(text)


def test_resources_are_read() -> None:
    assert parse_resources("CPU=4, fast=0.5") == {"CPU": 4.0, "fast": 0.5}


def test_an_engine_takes_a_gpu_or_else_a_whole_machine() -> None:
    assert default_resources([{"CPU": 8.0}, {"CPU": 4.0, "GPU": 2.0}]) == {"GPU": 1.0}
    assert default_resources([{"CPU": 8.0}, {"CPU": 4.0}]) == {"CPU": 8.0}


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(WeftError, match=r"pip install 'weft\[ray\]'"):
        look_at_cluster("auto")


def test_a_cluster_that_is_not_there_is_said_in_a_sentence() -> None:
    words = '{"problem": "Ray at x can not be used: nobody is there"}'

    with pytest.raises(WeftError, match="nobody is there; start it with `ray start --head`"):
        look_at_cluster("auto", (sys.executable, "-c", f"print({words!r})"))


def test_an_address_where_nobody_listens_is_known_at_once() -> None:
    with pytest.raises(WeftError, match=r"ray 127.0.0.1:1: nobody listens there .* HOST:6379"):
        look_at_cluster("127.0.0.1:1", (sys.executable, "-c", ""))


def test_a_driver_that_says_nothing_is_an_error_too() -> None:
    with pytest.raises(WeftError, match="could not be used"):
        look_at_cluster("auto", (sys.executable, "-c", ""))


@pytest.mark.parametrize(
    "config", [ServerConfig(ray=""), ServerConfig(ray="auto", engines=("a:1",)), ServerConfig(ray_resources="GPU=1")]
)
def test_settings_that_contradict_ray_are_refused(config: ServerConfig) -> None:
    with pytest.raises(WeftError, match="ray"):
        config.check()
