"""Weft's own operations for MLX's CPU graph (native/primitives.cpp) as `ops`, or why they are not there (`missing`).

They are compiled for one version of mlx, when weft is installed, and need weft's BLAS to be bound before mlx is imported.
"""

import importlib.metadata
from typing import Final

import mlx.core as mx

from weft.kernels import blas

__all__ = ["missing", "ops"]

REBUILD = "reinstall weft with a C++ compiler present (pip install --force-reinstall --no-deps)"


def _why_not(error: str, built_for: str | None) -> str | None:
    """Return why the operations can not be used: not a CPU's MLX, not compiled, or compiled for another mlx; None if they can."""
    if not blas.is_mlx_on_cpu() or mx.default_device() == mx.gpu:
        return "MLX does not compute with a CPU's BLAS here"
    if built_for is None:
        return f"weft's operations for CPUs can not be loaded ({error}): {REBUILD}"
    if built_for != (installed := importlib.metadata.version("mlx")):
        return f"weft's operations for CPUs are built for mlx {built_for}, but {installed} is installed: {REBUILD}"
    return None


try:
    from weft.kernels import _primitives as ops
except ImportError as error:
    ops = None  # type: ignore[assignment]  # nobody asks for it who has looked at `missing`
    missing: Final = _why_not(str(error), None)
else:
    missing: Final = _why_not("", ops.mlx_version)  # type: ignore[misc]
