"""Linear, embedding and expert layers for CPUs that keep their weights as the file has them: packed, in 16 bits, or float32.

The weights are expanded inside weft's own product, to the numbers that a float32 copy would hold (native/weft.h), so an answer
has the same bits as with such a copy. Where weft's operations are not there, mlx's own layers run.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers

from weft.kernels import primitives
from weft.kernels.primitives import ops

HALVES = (mx.float16, mx.bfloat16)
MODES = ("affine", "mxfp4", "nvfp4")
GROUP_LANES = 16  # as in native/: a group is read in lanes


def can_keep(layer: Any) -> bool:
    """Whether weft's product takes this layer's weights as they are, also in 16 bits and packed."""
    if primitives.missing is not None:
        return False
    if type(layer) in PLAIN_LAYERS:
        return True
    is_known = type(layer) in PACKED_LAYERS and layer.mode in MODES and layer.group_size % GROUP_LANES == 0
    return is_known and layer.get("global_scale") is None


def kept_parameters(model: nn.Module) -> set[str]:
    """Return the names of a bound model's parameters that need not be float32, because weft's product expands them."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, KeptLinear | KeptEmbedding | KeptSwitch)]
    return {f"{name}.{part}" for name in layers for part in ("weight", "scales", "biases")}


def weights_of(layer: Any) -> "ops.Weights":
    """Return a layer's weights as weft's operations take them, made once for each weight that the layer has."""
    held = layer.__dict__.get("weft_weights")
    if held is None or held[0] is not layer["weight"]:
        made = ops.Weights(layer["weight"], bias=layer.get("bias"), **_packing(layer))
        held = layer.__dict__["weft_weights"] = (layer["weight"], made)
    found: ops.Weights = held[1]
    return found


def _packing(layer: Any) -> dict[str, Any]:
    if "scales" not in layer:
        return {}
    scales = {"scales": layer["scales"], "biases": layer.get("biases")}
    return scales | {"mode": layer.mode, "bits": layer.bits, "group_size": layer.group_size}


class KeptLinear:
    """Mixin of linear layers: x @ weightᵀ + bias as one operation."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc,no-any-return]
        return ops.linear(x, [weights_of(self)])


class KeptEmbedding:
    """Mixin of embeddings: rows of the weights, or the product with all of them."""

    def __call__(self, tokens: mx.array) -> mx.array:
        if tokens.dtype not in (mx.int32, mx.uint32):
            tokens = tokens.astype(mx.int32)
        return ops.embed(tokens, weights_of(self))

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the product with the whole embedding, as an output layer that shares its weights with it."""
        if x.dtype != mx.float32:
            return super().as_linear(x)  # type: ignore[misc,no-any-return]
        return ops.linear(x, [weights_of(self)])


class KeptSwitch:
    """Mixin of switch layers: each line's product with the weights of its experts, as one operation."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        is_shared = x.shape[:-2] == (*indices.shape[:-1], 1)
        if x.dtype != mx.float32 or x.shape[-2] != 1 or not (is_shared or x.shape[:-2] == indices.shape):
            return super().__call__(x, indices, sorted_indices=sorted_indices)  # type: ignore[misc,no-any-return]
        return ops.switched(x, indices, weights_of(self))[..., None, :]


class KeptFloatLinear(KeptLinear, nn.Linear):  # type: ignore[misc]
    """An `nn.Linear` on weft's product."""


class PackedLinear(KeptLinear, nn.QuantizedLinear):  # type: ignore[misc]
    """An `nn.QuantizedLinear` on weft's product."""


class KeptFloatEmbedding(KeptEmbedding, nn.Embedding):  # type: ignore[misc]
    """An `nn.Embedding` on weft's product."""


class PackedEmbedding(KeptEmbedding, nn.QuantizedEmbedding):  # type: ignore[misc]
    """An `nn.QuantizedEmbedding` on weft's product."""


class KeptFloatSwitch(KeptSwitch, switch_layers.SwitchLinear):  # type: ignore[misc]
    """mlx-lm's `SwitchLinear` on weft's product."""


class PackedSwitch(KeptSwitch, switch_layers.QuantizedSwitchLinear):  # type: ignore[misc]
    """mlx-lm's `QuantizedSwitchLinear` on weft's product."""


PLAIN_LAYERS: dict[type, type] = {
    nn.Linear: KeptFloatLinear,
    nn.Embedding: KeptFloatEmbedding,
    switch_layers.SwitchLinear: KeptFloatSwitch,
}
PACKED_LAYERS: dict[type, type] = {
    nn.QuantizedLinear: PackedLinear,
    nn.QuantizedEmbedding: PackedEmbedding,
    switch_layers.QuantizedSwitchLinear: PackedSwitch,
}


def bind(model: nn.Module) -> None:
    """Let a model's linear, embedding and expert layers compute with weft's product, where it is there."""
    for layer in model.modules():
        if can_keep(layer):
            layer.__class__ = (PLAIN_LAYERS | PACKED_LAYERS)[type(layer)]
