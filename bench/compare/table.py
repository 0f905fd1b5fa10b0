"""The results as tables: every figure with its ratio to weft, and the goals with their bars. For terminals and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.compare.picture import ROWS
from bench.compare.results import Cell, Results, sign
from bench.compare.work import METRICS

ROOT = Path(__file__).parents[2]
COLOURS = {"+": "green", "−": "red"}
LEGEND = "ratio to weft behind each figure; + weft is better, − weft loses, = within 3 %; < and >: cut off, worse than that"
WIDTH = 230  # columns, where no terminal says
PICTURE = "![For each workload how many times better weft is than the best other of each kind](docs/pictures/compare.svg)"
CLEARLY = 0.8  # "clearly ahead"
# Times better than llama.cpp on the same file of four bits, and on its eight bits, whichever is better.
OVER_PACKED = {"single": 0.8, "eight": 1.5, "sixteen": 1.5, "agent_total": 1.25, "schemas_rate": 1.5}
README = re.compile(r"(<!-- compare -->\n).*?(<!-- /compare -->)", re.DOTALL)


@dataclass(frozen=True)
class Goal:
    """A bar, and whether weft's figure is over it; None where nobody was there to compare with."""

    what: str
    bar: str
    found: str
    holds: bool | None


def shown(cell: Cell, metric: str) -> str:
    """The figure as it is read."""
    unit = METRICS[metric].unit
    if cell.of:
        return f"{cell.value:.0f}/{cell.of}"
    digits = 0 if cell.value >= 100 or unit in ("ms", "MB") else 1 if cell.value >= 10 else 2
    spread = f" ±{cell.spread:.{digits}f}" if cell.spread else ""
    before = ("<" if METRICS[metric].more_is_better else ">") if cell.cut else ""
    return f"{before}{cell.value:.{digits}f}{spread}"


def rows(results: Results, model: str, notes: list[str]) -> Iterable[tuple[str, list[tuple[str, str]]]]:
    """For each metric its title, and per rival the cell's text and its sign. Reasons for gaps are added to the notes."""
    for metric, facts in METRICS.items():
        if not results.cell("weft", model, metric):
            continue
        cells = []
        for rival in results.labels():
            cell, ratio = results.cell(rival, model, metric), results.ratio(rival, model, metric)
            if cell is None:
                cells.append((f"— [{noted(notes, f'{rival}: {results.why(rival, model, metric)}')}]", ""))
                continue
            mark = "" if rival == "weft" else sign(results.advantage(rival, model, metric), cell.cut)
            times = f" ({ratio:.2f}× {mark})" if mark and ratio is not None else ""
            note = f" [{noted(notes, f'{rival}: {cell.note}')}]" if cell.value < cell.of and cell.note else ""
            cells.append((shown(cell, metric) + times + note, mark))
        yield f"({facts.number}) {facts.title}{', ' if facts.unit else ''}{facts.unit}", cells


def noted(notes: list[str], words: str) -> int:
    """The number of this footnote, a new one where it is new."""
    if words not in notes:
        notes.append(words)
    return notes.index(words) + 1


def goals(results: Results) -> list[Goal]:
    """What weft wants to hold against the others, model by model."""
    found: list[Goal] = []
    mlx, stock, bound = (results.labels("mlx", blas) for blas in ("", "stock", "weft's"))
    f32 = [label for label in results.labels("llama.cpp") if "f32" in label]
    packed = [label for label in results.labels("llama.cpp") if label not in f32]
    for model in results.models:
        for metric in ("eight", "sixteen"):
            found.append(_goal(results, model, metric, "best MLX rival with its own BLAS", stock, 2.0))
            found.append(_goal(results, model, metric, "best MLX rival with weft's BLAS", bound, 1.2))
        for metric, share in (("arrivals_max", 0.3), ("gap_p95", 0.5), ("agent_total", 0.5), ("schemas_rate", 1 / 1.5)):
            found.append(_goal(results, model, metric, "best MLX rival", mlx, 1 / share))
            found.append(_goal(results, model, metric, "llama.cpp f32", f32, 1 / CLEARLY))
        for metric, wanted in OVER_PACKED.items():
            found.append(_goal(results, model, metric, "llama.cpp with packed weights", packed, wanted))
        found += [_all_of(results, model, metric) for metric in ("schemas_right", "same")]
    return found


def _goal(results: Results, model: str, metric: str, whom: str, rivals: list[str], wanted: float) -> Goal:
    """`wanted` is how many times better weft is to be."""
    facts, best = METRICS[metric], results.closest(rivals, model, metric)
    what = f"{model}: ({facts.number}) {facts.title}, over {whom}"
    more = facts.more_is_better
    bar = f"≥ {wanted:.2g} ×" if more else f"≤ {1 / wanted:.2g} ×"
    if best is None:
        return Goal(what, bar, "not run", None)
    name, times = best
    ratio = times if more else 1 / times
    if ratio == float("inf"):
        return Goal(what, bar, "nobody else had a right one", True)
    cell = results.cell(name, model, metric)
    cut = cell is not None and cell.cut
    about = ("> " if more else "< ") if cut else ""
    return Goal(what, bar, f"{about}{ratio:.2f} × ({name})", times >= wanted or (None if cut else False))


def _all_of(results: Results, model: str, metric: str) -> Goal:
    facts, cell = METRICS[metric], results.cell("weft", model, metric)
    others = [(label, results.cell(label, model, metric)) for label in results.labels() if label != "weft"]
    counts = ", ".join(f"{label} {shown(other, metric)}" for label, other in others if other)
    found = f"{shown(cell, metric)}{f' ({counts})' if counts else ''}" if cell else "not run"
    return Goal(f"{model}: ({facts.number}) {facts.title}", "all", found, cell.value == cell.of if cell else None)


def printed(results: Results, console: Console) -> None:
    """Everything, for a terminal."""
    notes: list[str] = []
    for model in results.models:
        table = Table("", title=f"{model} · {results.facts.get('rounds', '')}", box=box.SIMPLE_HEAD, title_justify="left")
        table.columns[0].max_width = 46
        for label in results.labels():
            table.add_column(label.replace(" + ", "\n+ "), justify="right")
        for title, cells in rows(results, model, notes):
            table.add_row(title, *(Text(text.replace(" (", "\n("), style=COLOURS.get(mark, "")) for text, mark in cells))
        console.print(table)
    console.print(LEGEND, markup=False)
    for number, words in enumerate(notes, 1):
        console.print(f"[{number}] {words}", markup=False)
    table = Table("goal", "bar", "found", "", title="goals", box=box.SIMPLE_HEAD, title_justify="left")
    for goal in goals(results):
        table.add_row(goal.what, goal.bar, goal.found, Text(*verdict(goal)))
    console.print(table)


def verdict(goal: Goal) -> tuple[str, str]:
    """In words, and the colour."""
    return ("—", "") if goal.holds is None else ("holds", "green") if goal.holds else ("falls short", "red")


def markdown(results: Results) -> str:
    """The same as a section of the log."""
    facts, notes = results.facts, list[str]()
    versions = ", ".join(f"{each['label']} {each['version']}" for each in results.rivals if each["blas"] != "stock")
    lines = [f"## Side by side: `{facts.get('command', 'make compare')}` ({facts.get('date', '')})", ""]
    lines += [f"{facts.get('machine', '')}. {facts.get('rounds', '')}. {versions}.", LEGEND[0].upper() + LEGEND[1:] + ".", ""]
    for model in results.models:
        lines += grid(
            [model, *results.labels()], ((title, *(text for text, _ in cells)) for title, cells in rows(results, model, notes))
        )
    lines += [f"[{number}] {words}  " for number, words in enumerate(notes, 1)]
    lines += [
        "",
        *grid(["goal", "bar", "found", ""], ((goal.what, goal.bar, goal.found, verdict(goal)[0]) for goal in goals(results))),
    ]
    return "\n".join(lines).rstrip() + "\n"


def grid(head: list[str], body: Iterable[tuple[str, ...]]) -> list[str]:
    """The lines of a table in Markdown, an empty one behind it."""
    told = [head, ["---"] * len(head), *body]
    return [*("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in told), ""]


def in_short(results: Results) -> str:
    """The picture and a small table for the README: how many times better than the best other weft is, losses as well."""
    others = [label for label in results.labels() if label != "weft"]

    def best(model: str, metric: str) -> str:
        found = results.closest(others, model, metric)
        return "—" if found is None else "nobody else" if found[1] == float("inf") else f"{found[1]:.1f} × ({found[0]})"

    body = ((title, *(best(model, metric) for model in results.models)) for metric, title in ROWS.items())
    head = [f"times better than the best other, {results.facts['date']} (below 1: worse)", *results.models]
    return "\n".join([PICTURE, "", *grid(head, body)]).rstrip() + "\n"


def logged(results: Results) -> None:
    """Append to the log, and put the short form into the README between its two marks."""
    log, readme = ROOT / "docs" / "log.md", ROOT / "README.md"
    log.write_text(log.read_text().rstrip() + "\n\n" + markdown(results))
    readme.write_text(README.sub(lambda found: f"{found[1]}{in_short(results)}{found[2]}", readme.read_text()))
