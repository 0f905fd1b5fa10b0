"""A gate that another process keeps (`python -m weft.serving.kept_gate`): told what to run on stdin, and ended with it.

The keeper writes the `GateConfig` as a line of JSON and holds stdin open. The gate says on stdout where it listens, or why it can
not serve. When stdin ends, because the keeper closes it or is gone, the gate leaves in good order.
"""

import asyncio
import os
import sys

import msgspec

from weft.config import GateConfig
from weft.errors import WeftError
from weft.serving.gate_server import GateKeeping, serve_engine
from weft.serving.starters.given import parse_address


class GateNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line that a kept gate writes: where it listens, or why its model can not be served."""

    address: str | None = None
    failed: str | None = None


def main() -> int:
    """Run the gate that the first line of stdin describes; return the exit status, 1 if its model can not be served."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed is no news

    def tell(news: GateNews) -> None:
        output.write(msgspec.json.encode(news) + b"\n")

    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=GateConfig)
    host, _ = parse_address(config.listen)
    keeping = GateKeeping(
        announce=lambda address, _: tell(GateNews(address=f"{host}:{address.rpartition(':')[2]}")),
        on_failure=lambda why: tell(GateNews(failed=why)),
        until=_end_of_stdin,
    )
    try:
        return serve_engine(config, keeping)
    except WeftError as error:
        tell(GateNews(failed=str(error)))
        return 1


async def _end_of_stdin() -> None:
    ended, loop, stdin = asyncio.Event(), asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(stdin, 4096):
            ended.set()

    loop.add_reader(stdin, read)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(stdin)


if __name__ == "__main__":
    sys.exit(main())
