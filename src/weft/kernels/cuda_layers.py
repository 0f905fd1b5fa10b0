"""Decoder layers of decode steps on CUDA: a dozen launches instead of thirty, built by compiled functions instead of by Python.

A step on a GPU waits for its host, which prepares each operation. Here the projections of one input are joined into one product,
what lies between two products is one kernel, and a step's graph is traced once for all layers of a kind and shape. Prompts are
computed by `cuda_prompts.py`; only those with images come here, and their attention layers are mlx-lm's.
"""

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen3, qwen3_5, qwen3_next
from mlx_lm.models.activations import swiglu

from weft.kernels import cuda, cuda_product
from weft.kernels.cuda import DeltaLayout, LineSpans, equal_spans
from weft.kernels.cuda_product import MAX_STEP_TOKENS, Product, Weight
from weft.memory.grouped import RaggedRows
from weft.memory.positions import current_notes, note_states

log = logging.getLogger("weft.kernels")

Arrays = list[mx.array]


class Kernels:
    """The operations that these layers are made of; tests put plain ones in their place."""

    product = staticmethod(cuda_product.product)
    add_norm = staticmethod(cuda.add_norm)
    delta_inputs = staticmethod(cuda.delta_inputs)
    delta_rule = staticmethod(cuda.delta_rule)
    gated_norm = staticmethod(cuda.gated_norm)


def kernels_of_prompts(in_prompts: Product) -> type[Kernels]:
    """Return the operations of a prompt's chunk, with this product."""

    class PromptKernels(Kernels):
        product = staticmethod(in_prompts)  # type: ignore[assignment]

    return PromptKernels


@dataclass(frozen=True)
class BoundLayer:
    """What a decoder layer was bound to, and its arrays: all of a gated delta layer, those before and after attention."""

    kind: "CudaDelta | CudaAttention"
    arrays: Arrays
    more: Arrays


def joined(layers: list[nn.Module]) -> Weight | None:
    """Join the weights of linear layers with the same input; theirs become parts of it. None if they can not be joined."""
    weights = [Weight.of(layer) for layer in layers]
    if any(weight is None or "bias" in layer for weight, layer in zip(weights, layers, strict=True)):
        return None
    found = [weight for weight in weights if weight is not None]
    if len({(one.bits, one.array.dtype, tuple(part.shape[1] for part in one.arrays)) for one in found}) > 1:
        return None
    arrays = [mx.concatenate(list(parts)) for parts in zip(*(one.arrays for one in found), strict=True)]
    mx.eval(arrays)  # sync: when a model is loaded
    start = 0
    for layer, one in zip(layers, found, strict=True):
        end = start + one.array.shape[0]
        for name, array in zip(("weight", "scales", "biases"), arrays, strict=False):
            layer[name] = array[start:end]
            mx.eval(layer[name])  # sync: when a model is loaded; a view of the joined array
        start = end
    return Weight.from_arrays(arrays, found[0].bits)


@dataclass(frozen=True)
class CudaMLP:
    """The second half of a layer: add what attention found, normalise, and add what the MLP makes of it."""

    bits: tuple[int, int]
    eps: float

    @classmethod
    def of(cls, layer: nn.Module) -> "tuple[CudaMLP, Arrays] | None":
        mlp = layer.mlp
        parts = [mlp.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
        if type(mlp) not in (llama.MLP, qwen3.MLP, qwen3_next.Qwen3NextMLP) or "bias" in parts[2]:
            return None
        inward, outward = joined(parts[:2]), Weight.of(parts[2])
        if inward is None or outward is None:
            return None
        norm = layer.post_attention_layernorm
        return cls((inward.bits, outward.bits), norm.eps), [norm.weight, *inward.arrays, *outward.arrays]

    def __call__(self, kernels: type[Kernels], x: mx.array, attended: mx.array, arrays: Arrays) -> mx.array:
        norm, *weights = arrays
        inward, outward = split_weights(weights, self.bits)
        added, normed = kernels.add_norm(x, attended, norm, self.eps)
        gate, up = mx.split(kernels.product(normed, inward), 2, axis=-1)
        return added + kernels.product(swiglu(gate, up), outward)


def split_weights(arrays: Arrays, bits: tuple[int, ...]) -> list[Weight]:
    """Group a flat list of arrays into weights with these numbers of bits."""
    weights, arrays = [], list(arrays)
    for number in bits:
        count = 1 if number == 16 else 3
        weights.append(Weight.from_arrays(arrays[:count], number))
        arrays = arrays[count:]
    return weights


@dataclass(frozen=True)
class CudaDelta:
    """A gated delta layer (Qwen3.5) in a decode step."""

    layout: DeltaLayout
    gate_at: int
    num_taps: int
    bits: tuple[int, int]
    eps: tuple[float, float]
    mlp: CudaMLP

    @classmethod
    def of(cls, layer: nn.Module) -> "tuple[CudaDelta, Arrays] | None":
        own = layer.linear_attn
        inward = joined([own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a])
        outward, mlp = Weight.of(own.out_proj), CudaMLP.of(layer)
        if inward is None or outward is None or mlp is None or own.head_k_dim % 32 or own.head_v_dim % 32:
            return None
        channels, width = own.conv_dim, inward.array.shape[0]
        layout = DeltaLayout(
            own.num_k_heads, own.num_v_heads, own.head_k_dim, own.head_v_dim, (channels, channels, width),
            own.key_dim, 2 * own.key_dim, width - own.num_v_heads, width - 2 * own.num_v_heads,
        )  # fmt: skip
        norm = layer.input_layernorm
        arrays = [norm.weight, own.conv1d.weight, own.A_log, own.dt_bias, own.norm.weight]
        found = cls(layout, channels, own.conv_kernel_size, (inward.bits, outward.bits), (norm.eps, own.norm.eps), mlp[0])
        return found, [*arrays, *inward.arrays, *outward.arrays, *mlp[1]]

    def first_states(self, rows: int, dtype: mx.Dtype) -> Arrays:
        """Return the states of rows before their first token."""
        layout = self.layout
        columns = mx.zeros((rows, self.num_taps - 1, layout.widths[0]), dtype)
        return [columns, mx.zeros((rows, layout.heads, layout.value_dim, layout.key_dim))]

    def __call__(
        self, kernels: type[Kernels], keeps_states: bool, x: mx.array, states: Arrays, spans: LineSpans, arrays: Arrays
    ) -> Arrays:
        """Return output and both next states, and if asked for the states after each token and the convolution's input."""
        norm, taps, log_rate, bias, inner_norm, *weights = arrays
        num_weights = sum(1 if bits == 16 else 3 for bits in self.bits)
        inward, outward = split_weights(weights[:num_weights], self.bits)
        (columns, state), layout = states, self.layout
        lines = x.reshape(-1, x.shape[-1])
        projected = kernels.product(mx.fast.rms_norm(lines, norm, self.eps[0]), inward)
        mixed, next_columns = kernels.delta_inputs(projected, columns, taps, spans, layout)
        by_token = (mixed, mixed, mixed, projected, projected)
        found, last, kept = kernels.delta_rule(by_token, (log_rate, bias, state), spans, layout, keeps_states=keeps_states)
        gated = kernels.gated_norm(found, projected, self.gate_at, inner_norm, self.eps[1])
        output = self.mlp(kernels, lines, kernels.product(gated, outward), weights[num_weights:]).reshape(x.shape)
        if kept is None:
            return [output, next_columns, last]
        new = projected[:, : self.gate_at].reshape(*x.shape[:2], -1)
        return [output, next_columns, last, kept.reshape(*x.shape[:2], *state.shape[1:]), mx.concatenate([columns, new], axis=1)]


@dataclass(frozen=True)
class CudaAttention:
    """An attention layer in a decode step: before and after attention itself, which reads the slabs."""

    heads: tuple[int, int]  # of queries, of keys
    dim: int
    is_gated: bool  # each query head comes with a gate
    bits: tuple[int, int]
    eps: tuple[float, ...]  # of the layer's norm, and of those of queries and keys
    mlp: CudaMLP

    @classmethod
    def of(cls, layer: nn.Module) -> "tuple[CudaAttention, Arrays, Arrays] | None":
        own = layer.self_attn
        is_gated = type(own) is qwen3_next.Qwen3NextAttention
        heads = (own.num_attention_heads, own.num_key_value_heads) if is_gated else (own.n_heads, own.n_kv_heads)
        inward, outward, mlp = joined([own.q_proj, own.k_proj, own.v_proj]), Weight.of(own.o_proj), CudaMLP.of(layer)
        if inward is None or outward is None or mlp is None or "bias" in own.o_proj:
            return None
        norm, inner = layer.input_layernorm, [own[name] for name in ("q_norm", "k_norm") if name in own]
        dim = inward.array.shape[0] // (heads[0] * (2 if is_gated else 1) + 2 * heads[1])
        eps = (norm.eps, *(one.eps for one in inner))
        before = [norm.weight, *(one.weight for one in inner), *inward.arrays]
        return cls(heads, dim, is_gated, (inward.bits, outward.bits), eps, mlp[0]), before, [*outward.arrays, *mlp[1]]

    def before(self, kernels: type[Kernels], rope: Any, x: mx.array, offset: mx.array, arrays: Arrays) -> Arrays:
        """Return queries, keys and values (B, heads, T, dim), and the gates of gated queries."""
        (rows, tokens, width), (heads, key_heads), dim = x.shape, self.heads, self.dim
        norm, *rest = arrays
        norms, weights = rest[: len(self.eps) - 1], rest[len(self.eps) - 1 :]
        normed = mx.fast.rms_norm(x.reshape(-1, width), norm, self.eps[0])
        found = kernels.product(normed, *split_weights(weights, self.bits[:1]))
        ends = [heads * dim * (2 if self.is_gated else 1)]
        queries, keys, values = mx.split(found, [*ends, ends[0] + key_heads * dim], axis=-1)
        queries, gates = mx.split(queries.reshape(rows, tokens, heads, -1), [dim], axis=-1)
        keys = keys.reshape(rows, tokens, key_heads, dim)
        if norms:
            queries, keys = (
                mx.fast.rms_norm(one, weight, eps) for one, weight, eps in zip((queries, keys), norms, self.eps[1:], strict=True)
            )
        queries, keys = (rope(one.transpose(0, 2, 1, 3), offset=offset) for one in (queries, keys))
        values = values.reshape(rows, tokens, key_heads, dim).transpose(0, 2, 1, 3)
        return [queries, keys, values, *([gates] if self.is_gated else [])]

    def after(self, kernels: type[Kernels], x: mx.array, attended: mx.array, gates: Arrays, arrays: Arrays) -> mx.array:
        """Return the layer's output from what attention found, (B, heads, T, dim)."""
        num_arrays = 1 if self.bits[1] == 16 else 3
        found = attended.transpose(0, 2, 1, 3)
        if self.is_gated:
            found = found * mx.sigmoid(gates[0])
        lines = found.reshape(-1, self.heads[0] * self.dim)
        (outward,) = split_weights(arrays[:num_arrays], self.bits[1:])
        projected, before = kernels.product(lines, outward), x.reshape(-1, x.shape[-1])
        return self.mlp(kernels, before, projected, arrays[num_arrays:]).reshape(x.shape)


class StepOfDelta:
    """Mixin of a decoder layer with a gated delta rule: decode steps go through its compiled step."""

    weft_step: "tuple[functools.partial[Arrays], Callable[..., Arrays], Callable[..., Arrays], Arrays]"
    weft_parts: BoundLayer

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if isinstance(cache, RaggedRows):
            return cache.forward(self, x)
        if mask is not None or cache is None or cache.lengths is not None:
            return super().__call__(x, mask, cache)  # type: ignore[misc,no-any-return]
        (rows, tokens, _), notes = x.shape, current_notes()
        plain, compiled, keeping, arrays = self.weft_step
        states = [cache[0], cache[1]] if cache[0] is not None else plain.func.first_states(rows, x.dtype)
        run = keeping if notes is not None else compiled if tokens <= MAX_STEP_TOKENS else plain
        output, columns, last, *kept = run(x, states, equal_spans(rows, tokens), arrays)
        if notes is not None:
            note_states(last, kept[0])
            notes.note_convolution(kept[1])
        cache[0], cache[1] = columns, last
        cache.advance(x.shape[1])
        return output  # type: ignore[no-any-return]


class StepOfAttention:
    """Mixin of a decoder layer with attention: decode steps go through its compiled steps, before and after attention."""

    weft_step: "tuple[Callable[..., Arrays], Callable[..., mx.array], Arrays, Arrays]"
    weft_parts: BoundLayer

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if isinstance(cache, RaggedRows):
            return cache.forward(self, x)
        offset = None if cache is None else cache.offset
        if x.shape[1] > MAX_STEP_TOKENS or not isinstance(offset, int | mx.array):
            return super().__call__(x, mask, cache)  # type: ignore[misc,no-any-return]
        before, after, arrays, more = self.weft_step
        places = offset if isinstance(offset, mx.array) else mx.array([offset] * x.shape[0], mx.int32)
        queries, keys, values, *gates = before(x, places, arrays)
        keys, values = cache.update_and_fetch(keys, values)
        attend = sys.modules[type(self.self_attn).__module__].scaled_dot_product_attention
        found = attend(queries, keys, values, cache=cache, scale=self.self_attn.scale, mask=mask)
        return after(x, found, gates, more)  # type: ignore[no-any-return]


def bind(model: nn.Module, in_prompts: Product = cuda_product.prompt_product) -> bool:
    """Let a model's products use these kernels, and its layers if all of them do; returns whether they do.

    Then the numbers of a line in a step depend on that line alone. `in_prompts` is the product of prompts' lines.
    """
    if cuda_product.bind(model, in_prompts=in_prompts):
        return False
    bind_steps(model, Kernels, kernels_of_prompts(in_prompts))
    return True


def bind_steps(model: nn.Module, kernels: type[Kernels] = Kernels, prompt_kernels: type[Kernels] = Kernels) -> int:
    """Let the decoder layers of these kinds take compiled steps; returns how many do."""
    made: dict[Any, Any] = {}
    count = 0
    for layer in list(model.modules()):
        if type(layer) is qwen3_5.DecoderLayer and layer.is_linear and (found := CudaDelta.of(layer)) is not None:
            step, arrays = found
            for keeps in (False, True):
                if (step, keeps) not in made:
                    made[step, keeps] = mx.compile(functools.partial(step, kernels, keeps))
            layer.weft_step = (functools.partial(step, prompt_kernels, False), made[step, False], made[step, True], arrays)
            layer.weft_kind = step
            layer.__class__ = _with(StepOfDelta, type(layer))
            layer.weft_parts = BoundLayer(step, arrays, [])
            count += 1
        elif type(layer) in (qwen3_5.DecoderLayer, llama.TransformerBlock, qwen3.TransformerBlock):
            if (attention := CudaAttention.of(layer)) is None:
                continue
            kind, before, after = attention
            rope = layer.self_attn.rope
            key = (kind, type(rope), repr(rope), _numbers(getattr(rope, "_freqs", None)))
            if key not in made:
                halves = functools.partial(kind.before, kernels, rope), functools.partial(kind.after, kernels)
                made[key] = tuple(mx.compile(half) for half in halves)
            layer.weft_step = (*made[key], before, after)
            layer.weft_kind = kind
            layer.__class__ = _with(StepOfAttention, type(layer))
            layer.weft_parts = BoundLayer(kind, before, after)
            count += 1
    return count


def _numbers(array: mx.array | None) -> tuple[float, ...]:
    return () if array is None else tuple(np.array(array).tolist())


def _with(mixin: type, layer: type) -> type:
    return type(f"Stepped{layer.__name__}", (mixin, layer), {})
