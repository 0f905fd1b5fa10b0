"""`make compare`: weft and what a user would pick instead, on the same work, in one run: `python -m bench.compare`.

Each server is started once a model and round. In the first round everybody is heard; later ones go as far as the time does.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.compare import picture, table
from bench.compare import visit as visits
from bench.compare.install import LLAMA
from bench.compare.results import Results
from bench.compare.rivals import Rival, Unavailable, all_rivals, install
from bench.compare.work import WORKLOADS

MODELS = ("smollm2", "tiny-hybrid")
MINUTES, QUICK_MINUTES = 57.0, 9.5  # installing included
ROUNDS, CROWD, QUICK_CROWD = 2, 64, 16
VISIT_SECONDS = 30.0  # kept back for everyone who is still to come in a round
STOCK = ("single", "eight", "sixteen")  # what is asked of servers with MLX's own BLAS, and why not the rest
NOT_STOCK = "not asked: with MLX's own BLAS a long prompt takes minutes"
QUICK = ("single", "eight", "arrivals", "beside", "schemas", "same")
ONCE = ("same",)  # in the first round only: alone or in a crowd, it is the longest of all


def main() -> None:
    """Run, or print again."""
    words = argparse.ArgumentParser(prog="python -m bench.compare", description="weft and others side by side")
    words.add_argument("--quick", action="store_true", help="smollm2, three servers, one round: within ten minutes")
    words.add_argument("--table", action="store_true", help="print the tables of the last run, and run nothing")
    words.add_argument("--log", action="store_true", help="write docs/log.md, the README's table and the picture")
    words.add_argument("--only", nargs="+", help="weft and the servers whose label holds one of these words")
    words.add_argument("--models", nargs="+", choices=MODELS, help="these models only")
    words.add_argument("--asked", nargs="+", choices=tuple(WORKLOADS), help="these workloads only")
    words.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often everybody is heard ({ROUNDS})")
    words.add_argument("--minutes", type=float, help=f"when later rounds end ({MINUTES:.0f}, with --quick {QUICK_MINUTES})")
    given = words.parse_args()
    console = Console()
    if console.width < table.WIDTH and not console.is_terminal:
        console = Console(width=table.WIDTH)
    if not given.table:
        run(given, console)
    results = Results.load()
    table.printed(results, console)
    if given.log:
        table.logged(results)
        picture.FILE.write_text(picture.drawn(results))


def run(given: argparse.Namespace, console: Console) -> None:
    """Install, then hear everybody in every round, each round beginning with another."""
    deadline = time.monotonic() + 60 * (given.minutes or (QUICK_MINUTES if given.quick else MINUTES))
    rounds = 1 if given.quick else given.rounds
    results = Results(facts(given.quick, rounds))
    rivals = installed(chosen(given.quick, given.only), results, console)
    models = given.models or (MODELS[:1] if given.quick else MODELS)
    plan = [(round_, model, rival) for round_ in range(rounds) for model in models for rival in order(rivals, round_)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    took: dict[tuple[str, str], float] = {}
    with Progress(*columns, console=console, refresh_per_second=1) as bar:
        task = bar.add_task("", total=len(plan))
        for index, (round_, model, rival) in enumerate(plan):
            began = time.monotonic()
            later = [(each, of) for again, of, each in plan[index + 1 :] if again == round_]
            expected = took.get((rival.label, model), 0.0)
            weft_to_come = sum(took.get((each.label, of), 0.0) for each, of in later if each.kind == "weft")
            if began + expected + weft_to_come < deadline or not round_:
                until = deadline if round_ else deadline - VISIT_SECONDS * len(later)
                asked = tuple(each for each in asked_of(rival, given.quick, round_) if each in (given.asked or WORKLOADS))
                one = visits.Visit(rival, model, round_, asked, results.facts["crowd"], until)
                begin = f"round {round_ + 1} of {rounds}, {model}, {rival.label}"
                visits.run(one, results, partial(say, bar, task, begin, deadline))
                took[rival.label, model] = time.monotonic() - began
            bar.advance(task)


def say(bar: Progress, task: TaskID, begin: str, deadline: float, what: str) -> None:
    """Show what is being run, and what time is left at most."""
    left = max(deadline - time.monotonic(), 0) / 60
    bar.update(task, description=f"{begin}: {what} (at most {left:.0f} min left)")


def chosen(quick: bool, only: list[str] | None) -> list[Rival]:
    """Who is to be compared. The short form builds nothing: llama.cpp is in it where it is built already."""
    rivals = all_rivals()
    if quick:
        built = (LLAMA / ".ready").exists()
        mlx_lm = [each for each in rivals if each.name == "mlx-lm" and each.blas == "weft's"]
        rivals = [rivals[0], *mlx_lm, *(each for each in rivals if built and each.kind == "llama.cpp" and "Q4_1" in each.label)]
    return [each for each in rivals if each.kind == "weft" or not only or any(word in each.label for word in only)]


def installed(rivals: list[Rival], results: Results, console: Console) -> list[Rival]:
    """Those that are there now; the others are in the table too, with the reason."""
    for rival in rivals:
        for workload in set(WORKLOADS) - set(asked_of(rival, quick=False, round_=0)):
            results.miss(rival.label, "", workload, NOT_STOCK)
    results.rivals = [{"label": each.label, "kind": each.kind, "version": each.version, "blas": each.blas} for each in rivals]
    groups: dict[str, list[Rival]] = {}  # servers in one folder; folders are made beside each other
    for rival in rivals:
        groups.setdefault(rival.name if rival.kind == "mlx" else rival.kind, []).append(rival)
    why: dict[str, str] = {}

    def have(group: list[Rival]) -> None:
        for rival in group:
            try:
                install(rival, console.print)
            except Unavailable as error:
                why[rival.label] = str(error)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(have, groups.values()))
    for label, reason in why.items():
        results.miss(label, "", "", reason)
    return [rival for rival in rivals if rival.label not in why]


def asked_of(rival: Rival, quick: bool, round_: int) -> tuple[str, ...]:
    """The workloads of a visit."""
    if rival.kind == "mlx" and rival.blas == "stock":
        return STOCK
    return tuple(each for each in (QUICK if quick else WORKLOADS) if not (round_ and each in ONCE))


def order(rivals: list[Rival], round_: int) -> list[Rival]:
    """Everybody, begun with another in each round; whoever has the least to do comes last where time may run out."""
    turned = rivals[round_ % len(rivals) :] + rivals[: round_ % len(rivals)]
    return sorted(turned, key=lambda each: each.kind == "mlx" and each.blas == "stock") if round_ else turned


def facts(quick: bool, rounds: int) -> dict[str, object]:
    """What the figures hold for."""
    return {
        "command": "make compare-quick" if quick else "make compare",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "rounds": "one round" if rounds == 1 else f"medians of up to {rounds} rounds ± half their range",
        "crowd": QUICK_CROWD if quick else CROWD,
    }


if __name__ == "__main__":
    main()
