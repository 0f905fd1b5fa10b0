"""Kernels: attention (CPU, CUDA), fused CPU layers, gated delta rule, BLAS on Linux. This file imports no mlx."""

import sys
from types import ModuleType
from typing import Any


def modules_behind(model: Any) -> list[ModuleType]:
    """Return the Python modules that define a model's layers and their base classes, sorted by name."""
    names = {base.__module__ for layer in model.modules() for base in type(layer).__mro__}
    return [sys.modules[name] for name in sorted(names)]
