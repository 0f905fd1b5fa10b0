"""The results as one picture: for each workload how many times better weft is than the best rival of each kind.

Right of the line weft is ahead, left of it behind; both directions are drawn to one logarithmic scale. In a page it takes the
page's light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from bench.compare.results import Results
from bench.load_picture import _text as text

FILE = Path(__file__).parents[2] / "docs" / "pictures" / "compare.svg"
WIDTH, LEFT, RIGHT, TOP, GUTTER = 960, 232, 64, 118, 72
BAR, GAP = 11, 14
LEAST, MOST = 1 / 4, 64
TICKS = (1 / 4, 1, 4, 16, 64)
ROWS = {
    "single": "one stream",
    "eight": "8 streams",
    "sixteen": "16 streams",
    "arrivals_max": "8 at once, one prefix: first token",
    "gap_p95": "token gap beside a long prompt",
    "agent_total": "40 turns of an agent",
    "schemas_rate": "strict schemas, valid answers/s",
    "same": "answers in a crowd as alone",
    "start": "start to first token",
    "memory": "memory when idle",
}
STYLE = """text{font:12px sans-serif;fill:#24292f}.small{font-size:10px;fill:#57606a}.head{font-size:16px;font-weight:600}
.back{fill:#fff}.line{stroke:#d0d7de}.one{stroke:#24292f;stroke-width:1.5}
.k0{fill:#2f7d8f}.k1{fill:#79b4c0}.k2{fill:#b0762b}.k3{fill:#dcb677}.behind{fill:#c23b33}
@media (prefers-color-scheme: dark){text{fill:#e6edf3}.small{fill:#9aa4af}.back{fill:#0d1117}.line{stroke:#30363d}
.one{stroke:#e6edf3}.k0{fill:#4fb3c8}.k1{fill:#2a6f7e}.k2{fill:#e0a458}.k3{fill:#8f6a35}.behind{fill:#f0655b}}"""


def kinds(results: Results) -> dict[str, list[str]]:
    """The rivals in groups, of which the best is drawn."""
    llama = results.labels("llama.cpp")
    groups = {
        "best MLX server, weft's BLAS bound": results.labels("mlx", "weft's"),
        "best MLX server as it comes": results.labels("mlx", "stock"),
        "llama.cpp, the same f32 weights": [label for label in llama if "f32" in label],
        "llama.cpp, 8-bit weights": [label for label in llama if "f32" not in label],
    }
    return {name: labels for name, labels in groups.items() if labels}


def drawn(results: Results) -> str:
    """The picture's text."""
    groups = kinds(results)
    band = len(groups) * BAR + GAP
    height = TOP + len(ROWS) * band + 24
    panel = (WIDTH - LEFT - RIGHT - GUTTER * (len(results.models) - 1)) / max(len(results.models), 1)
    parts = [*_head(groups)]
    for index, title in enumerate(ROWS.values()):
        parts.append(text(LEFT - 14, TOP + index * band + len(groups) * BAR / 2 + 4, title, anchor="end"))
    for index, model in enumerate(results.models):
        parts += _panel(results, model, groups, LEFT + index * (panel + GUTTER), panel, height - 24)
    frame = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    back = f'<rect class="back" width="{WIDTH}" height="{height}"/>'
    return "\n".join([f"<svg {frame}>", f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def _head(groups: dict[str, list[str]]) -> list[str]:
    parts = [text(20, 28, "How many times better weft is", "head")]
    parts.append(
        text(20, 46, "right of the line: weft ahead, left of it and red: weft behind; ≥: the other was cut off", "small")
    )
    for index, name in enumerate(groups):
        x = 20 + index * 232
        parts += [f'<rect class="k{index}" x="{x}" y="60" width="12" height="12"/>', text(x + 18, 70, name)]
    return parts


def _panel(results: Results, model: str, groups: dict[str, list[str]], left: float, width: float, bottom: float) -> list[str]:
    def at(times: float) -> float:
        share = math.log(min(max(times, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return left + share * width

    parts = [text(at(1), TOP - 24, model, anchor="middle")]
    for tick in TICKS:
        kind = "one" if tick == 1 else "line"
        parts.append(f'<line class="{kind}" x1="{at(tick):.1f}" x2="{at(tick):.1f}" y1="{TOP - 6}" y2="{bottom - 6:.0f}"/>')
        parts.append(text(at(tick), bottom + 8, f"{tick:g} ×" if tick >= 1 else f"1/{1 / tick:g}", "small", "middle"))
    for row, metric in enumerate(ROWS):
        for index, labels in enumerate(groups.values()):
            y = TOP + row * (len(groups) * BAR + GAP) + index * BAR
            parts += _bar(results, model, metric, labels, f"k{index}", y, at)
    return parts


def _bar(
    results: Results, model: str, metric: str, labels: list[str], kind: str, y: float, at: Callable[[float], float]
) -> list[str]:
    best = results.closest(labels, model, metric)
    if best is None:
        return [text(at(1) + 5, y + BAR - 1, "—", "small")]
    label, times = best
    cell = results.cell(label, model, metric)
    start, end = sorted((at(1), at(times)))
    about = "≥ " if cell and cell.cut else ""
    words = "none right" if math.isinf(times) else f"{about}{times:.2g} ×" if times < 10 else f"{about}{times:.0f} ×"
    box = f'x="{start:.1f}" y="{y + 1:.1f}" width="{max(end - start, 1):.1f}" height="{BAR - 2}"'
    aside = text(start - 4, y + BAR - 1, words, "small", "end") if times < 1 else text(end + 4, y + BAR - 1, words, "small")
    return [f'<rect class="{kind if times >= 1 else "behind"}" {box}/>', aside]
