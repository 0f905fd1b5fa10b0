"""Draw the figures of `weft bench serve --json FILE` as an SVG: one lane of requests per client, and the percentiles.

Run as `python -m bench.load_picture load.json load.svg`.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT, TOP = 960, 80, 20, 96
LANE, GAP = 14, 4  # pixels
MAX_LANES_HEIGHT = 720
BARS = 56  # the height of one figure's bars
COLOURS = {"waits": "#c8a45c", "answers": "#3f7f93", "fails": "#b5443c"}
STYLE = "text{font:12px sans-serif;fill:#222}.small{font-size:10px;fill:#555}.head{font-size:15px}"


def drawn(summary: dict[str, Any], requests: list[dict[str, Any]]) -> str:
    """The picture's text."""
    lanes = max((each["client"] for each in requests), default=0) + 1
    lane = min(LANE, (MAX_LANES_HEIGHT - lanes * GAP) / lanes) if lanes * (LANE + GAP) > MAX_LANES_HEIGHT else LANE
    lane = max(lane, 1)
    below = TOP + lanes * (lane + GAP) + 30
    parts = [*_head(summary), *_timeline(requests, summary["seconds"] or 1.0, lane, below - 26)]
    for index, (name, title) in enumerate((("first_token", "first token"), ("gap", "token gap"))):
        if summary[name]:
            parts += _bars(summary[name], title, below + 14 + index * (BARS + 24))
    height = below + 2 * (BARS + 24) + 10
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    back = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>'
    return "\n".join([f"<svg {box}>", f"<style>{STYLE}</style>", back, *parts, "</svg>"]) + "\n"


def _head(summary: dict[str, Any]) -> list[str]:
    failed = sum(summary["errors"].values())
    first = f"{summary['model']}: {summary['requests']} requests of {summary['clients']} clients in {summary['seconds']:.1f} s"
    second = (
        f"prefill {summary['prefill_per_second']:.0f} tok/s, decode {summary['decode_per_second']:.0f} tok/s, {failed} failed"
    )
    parts = [_text(LEFT, 26, first, "head"), _text(LEFT, 46, second)]
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 110
        parts += [f'<rect x="{x}" y="60" width="12" height="12" fill="{colour}"/>', _text(x + 18, 70, name)]
    return parts


def _timeline(requests: list[dict[str, Any]], seconds: float, lane: float, bottom: float) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / seconds
    parts = []
    for request in requests:
        y, first = TOP + request["client"] * (lane + GAP), request["first"]
        if request["error"] is not None:
            spans = [("fails", request["start"], request["end"])]
        else:
            first = request["end"] if first is None else first
            spans = [("waits", request["start"], first), ("answers", first, request["end"])]
        for name, start, end in spans:
            width = max((end - start) * scale, 0.5)
            box = f'x="{LEFT + start * scale:.1f}" y="{y:.1f}" width="{width:.1f}" height="{lane:.1f}"'
            parts.append(f'<rect {box} fill="{COLOURS[name]}"/>')
    parts.append(_text(10, TOP + 10, "clients", "small"))
    for step in range(5):
        at = seconds * step / 4
        anchor = "end" if step == 4 else "start" if step == 0 else "middle"
        parts.append(_text(LEFT + at * scale, bottom + 12, f"{at:.1f} s", "small", anchor))
    return parts


def _bars(spread: dict[str, float], title: str, top: float) -> list[str]:
    """Three bars on one scale, the largest as long as there is room."""
    scale = (WIDTH - LEFT - RIGHT - 90) / (spread["max"] or 1.0)
    parts = [_text(10, top, title)]
    for index, name in enumerate(("p50", "p95", "max")):
        y, length = top + 8 + index * 17, max(spread[name] * scale, 0.5)
        parts += [
            _text(LEFT - 30, y + 11, name, "small"),
            f'<rect x="{LEFT}" y="{y:.1f}" width="{length:.1f}" height="13" fill="{COLOURS["answers"]}"/>',
            _text(LEFT + length + 6, y + 11, f"{spread[name] * 1000:.1f} ms", "small"),
        ]
    return parts


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{of_kind} text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    load = json.loads(source.read_text(encoding="utf-8"))
    target.write_text(drawn(load["summary"], load["requests"]), encoding="utf-8")
