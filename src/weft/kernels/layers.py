"""What most models are made of, on CPU: gates, norms and rotary positions as one operation each, where our product is bound.

MLX has up to twenty small operations for each there, and an exp of 12 ns a number. Bound at load into this model's layers and
modules, as the gated delta rule is. On GPUs mlx-lm's own stay.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models.rope_utils import Llama3RoPE

from weft.kernels import fused

COMPILED = type(activations.swiglu)
ANGLES = fused.Angles()


class Norm(nn.RMSNorm):  # type: ignore[misc]
    """An RMSNorm in one operation."""

    def __call__(self, x: mx.array) -> mx.array:
        """x over the root of its mean square, weighed."""
        weight = self["weight"]
        if x.ndim > 1 and weight.dtype == mx.float32 and fused.is_bound(x.dtype):
            return fused.norm(x, weight, self.eps)
        return super().__call__(x)  # type: ignore[no-any-return]


class Positions(nn.RoPE):  # type: ignore[misc]
    """A RoPE in one operation, its angles made once a step."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x (B, heads, T, dim), turned by its places."""
        if x.ndim != 4 or not fused.is_bound(x.dtype):
            return super().__call__(x, offset)  # type: ignore[no-any-return]
        angles = ANGLES.at(offset, x.shape[2], self.dims, self.base, self.scale, None)
        return fused.turned(x, angles, of_neighbours=self.traditional)


class Llama3Positions(Llama3RoPE):  # type: ignore[misc]
    """The same for those with rates of their own."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """x (B, heads, T, dim), turned by its places."""
        if x.ndim != 4 or not fused.is_bound(x.dtype):
            return super().__call__(x, offset)  # type: ignore[no-any-return]
        angles = ANGLES.at(offset, x.shape[2], self.dims, None, 1.0, self._freqs)
        return fused.turned(x, angles, of_neighbours=self.traditional)


OURS = {nn.RMSNorm: Norm, nn.RoPE: Positions, Llama3RoPE: Llama3Positions}


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
    for layer in model.modules():
        layer.__class__ = OURS.get(type(layer), type(layer))
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
