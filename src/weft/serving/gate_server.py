"""The process of `weft engine`: checks its address and key, runs the gate, and leaves in good order when it is told to end."""

import asyncio
import signal
import sys

import uvloop
import zmq

from weft import log
from weft.config import GateConfig, find_engine_key, is_loopback
from weft.errors import WeftError
from weft.serving.engine_key import EngineKey
from weft.serving.gate import Gate
from weft.serving.starters.given import parse_address
from weft.serving.starters.here import Here


def serve_engine(config: GateConfig) -> int:
    """Run an engine and its gate until a signal ends them; return the exit status, 1 if the model can not be served."""
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
        return runner.run(
            _run(Gate(Here(settings), config.hang_seconds), f"tcp://{host or '*'}:{port}", key, config.drain_seconds)
        )


async def _run(gate: Gate, address: str, key: EngineKey | None, drain_seconds: float) -> int:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        async with gate.listen(address, key) as bound:
            sys.stderr.write(f"weft engine listens at {bound} ({'with a key' if key is not None else 'without a key'})\n")
            waiting = [asyncio.create_task(ended.wait()), asyncio.create_task(_failed(gate))]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if (why := gate.lifeline.condition.failed) is not None:
                sys.stderr.write(f"weft: {why}\n")
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
