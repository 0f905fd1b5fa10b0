"""The process of `weft engine`: checks its address and key, runs the gate, and leaves in good order when it is told to end."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import uvloop
import zmq

from weft import log
from weft.config import GateConfig, find_engine_key, is_loopback
from weft.errors import WeftError
from weft.serving.engine_key import EngineKey
from weft.serving.gate import Gate
from weft.serving.starters.given import parse_address
from weft.serving.starters.here import Here


async def _for_ever() -> None:
    await asyncio.Event().wait()


def _write(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@dataclass(frozen=True)
class GateKeeping:
    """Who hears of a gate's address and of its failure, and what ends it beside signals; by default a terminal and nothing."""

    announce: Callable[[str, str], object] = lambda address, words: _write(f"weft engine listens at {address} ({words})")
    on_failure: Callable[[str], object] = lambda why: _write(f"weft: {why}")
    until: Callable[[], Awaitable[None]] = _for_ever


def serve_engine(config: GateConfig, keeping: GateKeeping | None = None) -> int:
    """Run an engine and its gate until they are ended; return the exit status, 1 if the model can not be served."""
    settings, (host, port) = config.engine_settings(), parse_address(config.listen)
    path = find_engine_key(config.engine_key)
    key = EngineKey.read(path) if path is not None else None
    if key is None and not is_loopback(host):
        message = (
            f"listen {config.listen} can be reached from other machines and there is no engine key: make one with `weft key`"
        )
        raise WeftError(message)
    log.setup(config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        gate, address = Gate(Here(settings), config.hang_seconds), f"tcp://{host or '*'}:{port}"
        return runner.run(_run(gate, address, key, config.drain_seconds, keeping or GateKeeping()))


async def _run(gate: Gate, address: str, key: EngineKey | None, drain_seconds: float, keeping: GateKeeping) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with gate.listen(address, key) as bound:
            keeping.announce(bound, "with a key" if key is not None else "without a key")
            waiting = [asyncio.ensure_future(one) for one in (ended.wait(), _failed(gate), keeping.until())]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if (why := gate.lifeline.condition.failed) is not None:
                keeping.on_failure(why)
                return 1
            await gate.leave(drain_seconds)
    except zmq.ZMQError as error:
        raise WeftError(f"{address} can not be taken ({error.strerror}); choose another with --listen") from error
    return 0


async def _failed(gate: Gate) -> None:
    """Wait until the engine has failed for good."""
    while gate.lifeline.condition.failed is None:
        await gate.settled.wait()
        gate.settled.clear()
