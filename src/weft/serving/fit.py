"""The models on this machine, and whether one more would fit into its memory beside those that are loaded.

What an engine needs is reckoned from a model's files as the engine's ledger reckons: weights and a row within its budget,
a share of which is kept free. Imports no mlx and starts nothing. `registry` and `weft ls` ask here.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.config import RESERVE_SHARE, SAFE_SHARE
from weft.kernels import blas

if TYPE_CHECKING:
    from weft.model.resolve import LocalModel

ROW_BYTES = 128 << 20  # for the least one wants to ask: a thousand tokens of a model of eight billion weights, in half precision
TIGHT_SHARE = 0.75  # of what is free; a model that needs more leaves little for rows and kept prompts
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, by its format

Verdict = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True)
class Fit:
    """What a model's engine needs at the least, and what it could have. None: not known."""

    needed_bytes: int | None
    free_bytes: int | None

    @property
    def verdict(self) -> Verdict:
        """Will it fit?"""
        if self.needed_bytes is None or self.free_bytes is None:
            return "unknown"
        if self.needed_bytes > self.free_bytes:
            return "does not fit"
        return "tight" if self.needed_bytes > TIGHT_SHARE * self.free_bytes else "fits"


def needed_bytes(model: LocalModel) -> int | None:
    """The least an engine of this model can live in; None while its files are not here."""
    if model.folder is None:
        return None
    files = [model.folder] if model.folder.is_file() else model.folder.glob("model*.safetensors")
    return math.ceil((sum(map(_weights_bytes, files)) + ROW_BYTES) / (1 - RESERVE_SHARE))


def free_bytes(limit: int | None = None, engines: Sequence[dict[str, int]] = (), coming: int = 0) -> int | None:
    """What one more engine could have: at most `limit`, beside engines that say where their bytes are. None: not known.

    Those that are on their way will have `coming` bytes. A CPU's engine takes of what the system calls available, from which
    the loaded ones are gone already. A GPU's memory is known from the budgets of the engines on it; they share it, though
    each takes its budget from the whole.
    """
    if blas.is_mlx_on_cpu():
        there = _available_bytes()
    elif limit is None and (budgets := [engine["budget"] for engine in engines if "budget" in engine]):
        there = max(budgets) - sum(engine.get("active", 0) for engine in engines)
    else:
        there = _physical_bytes() if sys.platform == "darwin" else None  # Metal's memory is the machine's, CUDA's is not
    known = [] if there is None else [max(0, there - coming)]
    return min([*known, *([] if limit is None else [limit])], default=None)


def _available_bytes() -> int | None:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(int(found[1]) * 1024 * SAFE_SHARE) if found else None


def _physical_bytes() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * SAFE_SHARE)


def _weights_bytes(file: Path) -> int:
    """A file's weights as they will be in memory: on a CPU in float32 where they are not packed."""
    if not blas.is_mlx_on_cpu():
        return file.stat().st_size
    if file.suffix == ".gguf":
        from weft.model import gguf

        return sum(4 * math.prod(tensor.shape) for tensor in gguf.read(file).tensors.values())
    try:
        with file.open("rb") as opened:
            tensors = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_HEADER_BYTES)))
        halves = [entry["shape"] for entry in tensors.values() if entry.get("dtype") in ("F16", "BF16")]
        return file.stat().st_size + sum(2 * int(math.prod(shape)) for shape in halves)
    except (ValueError, LookupError, AttributeError, TypeError):  # damaged: the engine will say how
        return file.stat().st_size
