"""All figures of a run, in a file from the moment they are known; and what they come to: medians, spreads, ratios to weft.

The file is written anew after every workload, so a run that is cut off loses nothing. Table and picture read it.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.compare.work import METRICS, Figure

FILE = Path(__file__).parents[2] / "build" / "compare" / "results.json"
LIKE = 0.03  # ratios so close to 1 are no difference


@dataclass(frozen=True)
class Cell:
    """What the rounds of one server at one metric come to."""

    value: float
    spread: float  # half of what lies between the lowest and the highest round
    cut: bool  # the value is a bound in the server's favour
    note: str
    of: int  # for a count: of how many

    @property
    def size(self) -> float:
        """What is compared: a count as a share."""
        return self.value / self.of if self.of else self.value


@dataclass
class Results:
    """Who was compared, what was found, and why something was not."""

    facts: dict[str, Any] = field(default_factory=dict)
    rivals: list[dict[str, str]] = field(default_factory=list)  # label, kind, version, blas; weft first
    figures: list[dict[str, Any]] = field(default_factory=list)  # rival, model, round and a figure's own
    absent: list[dict[str, Any]] = field(default_factory=list)  # rival, model, workload ("" for all), why

    @classmethod
    def load(cls) -> Results:
        """Those of the last run."""
        return cls(**json.loads(FILE.read_text()))

    def save(self) -> None:
        """Write the file, whole or not at all."""
        FILE.parent.mkdir(parents=True, exist_ok=True)
        part = FILE.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False))
        part.replace(FILE)

    def add(self, rival: str, model: str, round_: int, figures: list[Figure]) -> None:
        """Keep what a workload gave."""
        self.figures += [{"rival": rival, "model": model, "round": round_, **asdict(figure)} for figure in figures]
        self.save()

    def miss(self, rival: str, model: str, workload: str, why: str) -> None:
        """Keep why there is nothing."""
        self.absent.append({"rival": rival, "model": model, "workload": workload, "why": why})
        self.save()

    @property
    def models(self) -> list[str]:
        """Those with figures, in the order of the run."""
        return list(dict.fromkeys(figure["model"] for figure in self.figures))

    def labels(self, kind: str = "", blas: str = "") -> list[str]:
        """The servers of a kind and a BLAS, or all, weft first."""
        return [each["label"] for each in self.rivals if kind in ("", each["kind"]) and blas in ("", each["blas"])]

    def cell(self, rival: str, model: str, metric: str) -> Cell | None:
        """The median over the rounds; None where there is no figure."""
        asked = (rival, model, metric)
        found = [each for each in self.figures if (each["rival"], each["model"], each["metric"]) == asked]
        if not found:
            return None
        values = [each["value"] for each in found]
        cut = any(each["cut"] for each in found)
        return Cell(statistics.median(values), (max(values) - min(values)) / 2, cut, found[0]["note"], found[0]["of"])

    def why(self, rival: str, model: str, metric: str) -> str:
        """Why there is no such figure."""
        for each in self.absent:
            here = each["rival"] == rival and each["model"] in ("", model)
            if here and each["workload"] in ("", METRICS[metric].workload):
                return str(each["why"])
        return "not asked for"

    def ratio(self, rival: str, model: str, metric: str) -> float | None:
        """Its figure over weft's; None where one is missing, or weft's is nothing."""
        own, weft = self.cell(rival, model, metric), self.cell("weft", model, metric)
        return own.size / weft.size if own and weft and weft.size else None

    def advantage(self, rival: str, model: str, metric: str) -> float | None:
        """How many times better weft is: above 1 weft is ahead, whatever the metric's direction."""
        ratio = self.ratio(rival, model, metric)
        if ratio is None:
            return None
        return (1 / ratio if ratio else float("inf")) if METRICS[metric].more_is_better else ratio

    def closest(self, rivals: list[str], model: str, metric: str) -> tuple[str, float] | None:
        """The best of these rivals, and how many times better weft is than it."""
        found = [(rival, times) for rival in rivals if (times := self.advantage(rival, model, metric)) is not None]
        return min(found, key=lambda each: each[1], default=None)


def sign(times: float | None, cut: bool = False) -> str:
    """+ where weft is better, − where it loses, = where there is no difference to speak of, ? where a bound does not tell."""
    if times is None:
        return ""
    return "+" if times > 1 + LIKE else "?" if cut else "−" if times < 1 - LIKE else "="
