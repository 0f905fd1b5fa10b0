"""One server's turn: it is started with a model, does one workload after the other, and is ended.

Whatever goes wrong is kept as the reason why a figure is missing; nothing is dropped in silence. `__main__` says who is
visited and for how long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from bench.compare.client import is_there
from bench.compare.results import Results
from bench.compare.rivals import Rival, Running, Unavailable, serving
from bench.compare.side import Side
from bench.compare.work import WORKLOADS, Failed, Figure, first_answer, memory_mb
from weft.model.resolve import resolve

CAP, STOCK_CAP, CROWD_CAP = 60.0, 20.0, 90.0  # seconds of one workload
FIRST_SECONDS = 60.0  # to the first answer of all
LEAST_SECONDS = 5.0  # without which nothing is begun
NO_TIME = "the run's time was over"


@dataclass(frozen=True)
class Visit:
    """Whom, with what, and until when at most (`time.monotonic`)."""

    rival: Rival
    model: str
    round: int
    workloads: tuple[str, ...]
    crowd: int
    deadline: float

    @property
    def key(self) -> tuple[str, str, int]:
        """What its figures are filed under."""
        return self.rival.label, self.model, self.round

    def seconds(self, workload: str) -> float:
        """What this workload is given now."""
        stock = self.rival.kind == "mlx" and self.rival.blas == "stock"
        cap = STOCK_CAP if stock else CROWD_CAP if workload == "same" else CAP
        return min(cap, self.deadline - time.monotonic())


def run(visit: Visit, results: Results, say: Callable[[str], None]) -> None:
    """Start the server and have it work; anew when it died, and after a workload that was cut off: it may still be at it."""
    left = list(visit.workloads)
    first = True
    while first or left:
        say("starts")
        try:
            if visit.deadline - time.monotonic() < LEAST_SECONDS:
                raise Failed(NO_TIME)
            with serving(visit.rival, visit.model) as running:
                asyncio.run(_work(visit, running, first, left, results, say))
        except (Unavailable, Failed) as error:
            results.miss(visit.rival.label, visit.model, "", str(error))
            return
        first = False


async def _work(
    visit: Visit, running: Running, first: bool, left: list[str], results: Results, say: Callable[[str], None]
) -> None:
    """Take one workload after the other from those that are left, until one is cut off or kills the server."""
    tokenizer = Tokenizer.from_file(str(resolve(visit.model, progress=False) / "tokenizer.json"))
    side = Side(running.url, running.model, visit.model, tokenizer, visit.crowd)
    figures = await _start(side, running)
    if first:
        results.add(*visit.key, figures)
    while left:
        workload = left.pop(0)
        figures = []
        say(workload)
        try:
            if (seconds := visit.seconds(workload)) < LEAST_SECONDS:
                raise Failed(NO_TIME)
            figures = await WORKLOADS[workload](side, seconds)
        except Failed as error:
            died = "" if await is_there(running.url) else "; the server died of it"
            results.miss(visit.rival.label, visit.model, workload, f"{error}{died}")
        else:
            results.add(*visit.key, figures)
        if any(figure.cut for figure in figures) or not await is_there(running.url):
            return


async def _start(side: Side, running: Running) -> list[Figure]:
    """The first answer of all: how long it took from the start, and what the server holds then."""
    moment = await first_answer(side, FIRST_SECONDS)
    figures = [Figure("start", moment - running.spawned)]
    held = memory_mb(running.pids())
    return figures if held is None else [*figures, Figure("memory", held)]
