"""The gate of most models' MLPs on CPU, where MLX's exp costs three times its power (docs/log.md).

Bound at load in the modules a model is made of, as the gated delta rule is. On GPUs mlx-lm's own stays.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) · x. Where e^−gate overflows to infinity the quotient is zero, as it should be."""
    return gate * x / (1.0 + mx.power(math.e, -gate))


def bind(model: Any) -> list[str]:
    """Replace mlx-lm's `swiglu` in this model's modules when it runs on a CPU; the names of those changed."""
    if mx.default_device() == mx.gpu:
        return []
    bound = []
    for name in sorted({kind.__module__ for module in model.modules() for kind in type(module).__mro__}):
        module = sys.modules[name]
        if getattr(module, "swiglu", None) is activations.swiglu and module is not activations:
            module.swiglu = swiglu  # type: ignore[attr-defined]
            bound.append(name)
    return bound
