"""Whether a model fits into memory: the bytes its engine needs at least, computed from its files, and those that are free."""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from weft.config import RESERVE_SHARE, SAFE_SHARE, available_memory_bytes
from weft.errors import BadModel
from weft.kernels import blas
from weft.memory.safetensors import read_header

if TYPE_CHECKING:
    from weft.model.resolve import LocalModel

ROW_BYTES = 128 << 20  # for a small request: a thousand tokens of a model of eight billion weights, in half precision
TIGHT_SHARE = 0.75  # of the free bytes; a model that needs more leaves little for rows and cached prefixes

FitVerdict = Literal["fits", "tight", "does not fit", "unknown"]
MIN_MATRIX_WIDTH = 8  # a convolution's kernel is narrower


@dataclass(frozen=True)
class Fit:
    """The bytes that a model's engine needs at least and the bytes free for it (None: unknown), and the verdict from both."""

    needed_bytes: int | None
    free_bytes: int | None

    @property
    def verdict(self) -> FitVerdict:
        if self.needed_bytes is None or self.free_bytes is None:
            return "unknown"
        if self.needed_bytes > self.free_bytes:
            return "does not fit"
        return "tight" if self.needed_bytes > TIGHT_SHARE * self.free_bytes else "fits"


def needed_bytes(model: "LocalModel") -> int | None:
    """Estimate the smallest memory budget to serve this model, from its files; None if they are not on this machine."""
    if model.folder is None:
        return None
    files = [model.folder] if model.folder.is_file() else model.folder.glob("model*.safetensors")
    return math.ceil((sum(map(_weights_bytes, files)) + ROW_BYTES) / (1 - RESERVE_SHARE))


def free_bytes(limit: int | None = None, engines: Sequence[dict[str, int]] = (), upcoming: int = 0) -> int | None:
    """Return the bytes free for one more engine, at most `limit`, beside engines that report this memory; None if unknown.

    Engines that are being loaded will take `upcoming` bytes. A CPU's engine takes of what the system calls available, from
    which the loaded ones are gone already. A GPU's memory is known from the budgets of the engines on it; they share it,
    though each takes its budget from the whole.
    """
    if blas.is_mlx_on_cpu():
        there = available_memory_bytes()
    elif limit is None and (budgets := [engine["budget"] for engine in engines if "budget" in engine]):
        there = max(budgets) - sum(engine.get("active", 0) for engine in engines)
    elif sys.platform == "darwin":  # Metal's memory is the machine's, CUDA's is not
        there = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * SAFE_SHARE)
    else:
        there = None
    known = [] if there is None else [max(0, there - upcoming)]
    return min([*known, *([] if limit is None else [limit])], default=None)


def _weights_bytes(file: Path) -> int:
    """Return the bytes a weight file takes in memory; on a CPU what weft's product does not expand is counted as float32."""
    keeps = blas.compiled_library("_primitives") is not None
    if not blas.is_mlx_on_cpu() or (keeps and file.suffix == ".gguf"):
        return file.stat().st_size
    if file.suffix == ".gguf":
        from weft.model import gguf  # here and below: a server starts sooner without

        return sum(4 * math.prod(tensor.shape) for tensor in gguf.read(file).tensors.values())
    try:
        tensors = read_header(file).values()
        halves = [
            tensor.shape for tensor in tensors if tensor.dtype in ("F16", "BF16") and not (keeps and _is_matrix(tensor.shape))
        ]
    except BadModel:  # the engine will say what is wrong with it
        halves = []
    return file.stat().st_size + sum(2 * math.prod(shape) for shape in halves)


def _is_matrix(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is one of a product, or scales of it; norms and convolutions are not."""
    return len(shape) >= 2 and shape[-1] >= MIN_MATRIX_WIDTH
