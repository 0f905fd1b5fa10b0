"""The gates of most models on CPU, where MLX's exp costs 12 ns a number (docs/log.md): our product's, or written with power.

Bound at load in the modules a model is made of, as the gated delta rule is. On GPUs mlx-lm's own stay.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations

from weft.cache import fused

COMPILED = type(activations.swiglu)


def silu(x: mx.array) -> mx.array:
    """x · sigmoid(x). Where e^−x overflows to infinity the quotient is zero, as it should be."""
    return fused.silu(x) if x.ndim > 1 and fused.is_bound(x.dtype) else x / (1.0 + mx.power(math.e, -x))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) · x."""
    return silu(gate) * x


def precise_swiglu(like: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """The same in float32, given back in the type of `like`."""
    return swiglu(gate.astype(mx.float32), x.astype(mx.float32)).astype(like.dtype)


class Layers(ModuleType):
    """`mlx.nn` with our silu."""

    silu = staticmethod(silu)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)


def bind(model: Any) -> list[str]:
    """Put ours into this model's modules when it runs on a CPU; the names of those changed."""
    if mx.default_device() == mx.gpu:
        return []
    modules = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    return [name for name in sorted(modules) if _bind(sys.modules[name])]


def _bind(module: ModuleType) -> bool:
    found = vars(module)
    ours = {"swiglu": swiglu, "precise_swiglu": precise_swiglu}
    changed: dict[str, Any] = {name: own for name, own in ours.items() if found.get(name) is getattr(activations, name)}
    if module is activations or not module.__name__.startswith("mlx_lm."):
        return False
    # What is compiled for any shape must not look at shapes, as ours does: such a module keeps its silu.
    is_compiled = any(type(value) is COMPILED for name, value in found.items() if name not in changed)
    if found.get("nn") is nn and not is_compiled:
        changed["nn"] = Layers("mlx.nn")
    found.update(changed)
    return bool(changed)
