"""How weft computes: CPU, CUDA and attention kernels, and the matrix product under MLX on Linux. Imports no mlx itself."""

import sys
from types import ModuleType
from typing import Any


def modules_behind(model: Any) -> list[ModuleType]:
    """The Python modules that define a model's layers and their base classes, sorted by name. Kernels are bound there."""
    names = {base.__module__ for layer in model.modules() for base in type(layer).__mro__}
    return [sys.modules[name] for name in sorted(names)]
