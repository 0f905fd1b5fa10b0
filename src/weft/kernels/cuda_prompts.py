"""Prompts on CUDA: chunks of several prompts, of any lengths, in one forward, each with the numbers it has alone.

Their lines lie one behind the other and are filled up, once for the whole forward, to what products in blocks take
(`block_product.py`); attention and the gated delta rule are kernels over ragged rows (`ragged.py`). mlx-lm's model is run over
all lines as over one prompt; the caches that it hands to each layer compute that layer. A prompt alone is a forward of one row.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from weft.kernels import cuda, ragged
from weft.kernels.block_product import BlockProducts, joined_parts
from weft.kernels.cuda_layers import Arrays, BoundLayer, CudaAttention, CudaDelta, CudaMLP, split_weights
from weft.kernels.cuda_model import STACKS
from weft.kernels.cuda_paged import HeadsLayout, Rotation
from weft.kernels.cuda_product import INVARIANT_LAYERS, Weight
from weft.kernels.ragged import Planes, RaggedLines
from weft.memory.grouped import RaggedRows


class PromptOperations:
    """The operations that prompts' layers are made of beside products; tests put plain ones in their place."""

    add_norm = staticmethod(cuda.add_norm)
    delta_inputs = staticmethod(cuda.delta_inputs)
    gated_norm = staticmethod(cuda.gated_norm)
    delta_rule = staticmethod(ragged.delta_rule)
    attend = staticmethod(ragged.attend)
    gate_lines = staticmethod(ragged.gate_lines)
    new_planes = staticmethod(ragged.new_planes)
    heads = staticmethod(ragged.prompt_heads)
    has_heads = True  # else they are made of MLX's operations


class RaggedPrompts:
    """A model's forward over prompts' lines: its products, its other operations, and the caches that compute its layers."""

    has_own_bits = False  # those of the model's own forward: a prompt alone is computed by this one too

    def __init__(
        self,
        products: BlockProducts,
        operations: type[PromptOperations] = PromptOperations,
        groups: Iterable[int] = (),
        stack: Any = None,
    ) -> None:
        self.products = products
        self.operations = operations
        self.groups = frozenset(groups)  # query heads to a key head, of its attention layers
        self.stack = stack  # its embedding and layers, where nothing else is between these; else None

    def forward_of(
        self, rows: Sequence[Sequence[Any]], chunks: Sequence[Sequence[int]]
    ) -> "tuple[RaggedLines, list[RaggedStates | RaggedKeyValues]]":
        """Return the lines of a forward of each row's chunk, and its caches by layer over the rows' own."""
        by_layer = list(zip(*rows, strict=True))
        held = next((layer for layer in by_layer if type(layer[0]) is KVCache), None)  # all layers hold as much
        starts = [0] * len(rows) if held is None else [cache.offset for cache in held]
        capacities = None if held is None else tuple(map(_capacity_with, held, map(len, chunks)))
        lines = RaggedLines(chunks, starts, capacities, self.groups)
        return lines, [(RaggedKeyValues if type(layer[0]) is KVCache else RaggedStates)(self, lines, layer) for layer in by_layer]

    def layers_of(self, rows: Sequence[Sequence[Any]], chunks: Sequence[Sequence[int]]) -> Iterator[Arrays]:
        """Build the forward of each row's chunk layer by layer, as far as asked for; yields the states that rows have by each."""
        lines, caches = self.forward_of(rows, chunks)
        x = self.stack.embed_tokens(lines.tokens)
        for layer, own in zip(self.stack.layers, caches, strict=True):
            x = own.forward(layer, x)
            yield [array for row in own.rows for array in arrays_in(row)]


def arrays_in(cache: KVCache | ArraysCache) -> Arrays:
    """Return the arrays of one row's cache."""
    return [cache.keys, cache.values] if isinstance(cache, KVCache) else list(cache.cache)


@dataclass(frozen=True)
class PromptMLP:
    """The second half of a layer: add what attention found, normalise, and add what the MLP makes of it."""

    norm: mx.array
    eps: float
    inward: Weight
    outward: Weight

    @classmethod
    def of(cls, kind: CudaMLP, arrays: Arrays) -> "PromptMLP":
        return cls(arrays[0], kind.eps, *split_weights(arrays[1:], kind.bits))

    def __call__(self, prompts: RaggedPrompts, x: mx.array, attended: mx.array) -> mx.array:
        """Return the layer's output from its input and what attention found, both (lines, H)."""
        products = prompts.products
        added, normed = prompts.operations.add_norm(x, attended, self.norm, self.eps)
        parts: list[mx.array] = []
        for start, end in products.blocks(x.shape[0], self.inward):  # its wide results are not joined
            gated = prompts.operations.gate_lines(products.block(normed[start:end], self.inward))
            parts += products.parts(gated, self.outward)
        return added + joined_parts(parts)


@dataclass(frozen=True)
class PromptDelta:
    """A gated delta layer as prompts compute it."""

    kind: CudaDelta
    norm: mx.array
    taps: mx.array
    of_heads: tuple[mx.array, mx.array]  # log rate and bias
    inner_norm: mx.array
    inward: Weight
    outward: Weight
    mlp: PromptMLP

    @classmethod
    def of(cls, kind: CudaDelta, arrays: Arrays) -> "PromptDelta":
        norm, taps, log_rate, bias, inner_norm, *weights = arrays
        count = sum(1 if bits == 16 else 3 for bits in kind.bits)
        inward, outward = split_weights(weights[:count], kind.bits)
        return cls(kind, norm, taps, (log_rate, bias), inner_norm, inward, outward, PromptMLP.of(kind.mlp, weights[count:]))

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.inward, self.outward, self.mlp.inward, self.mlp.outward

    def __call__(self, prompts: RaggedPrompts, lines: RaggedLines, x: mx.array, states: Arrays) -> Arrays:
        """Return the output of lines (lines, H), and both next states of the rows."""
        operations, kind, (columns, state) = prompts.operations, self.kind, states
        projected = prompts.products(mx.fast.rms_norm(x, self.norm, kind.eps[0]), self.inward)
        mixed, next_columns = operations.delta_inputs(projected, columns, self.taps, lines.spans, kind.layout)
        found, last = operations.delta_rule(mixed, projected, (*self.of_heads, state), lines.spans, kind.layout)
        gated = operations.gated_norm(found, projected, kind.gate_at, self.inner_norm, kind.eps[1])
        return [self.mlp(prompts, x, prompts.products(gated, self.outward)), next_columns, last]


@dataclass(frozen=True)
class PromptAttention:
    """An attention layer as prompts compute it."""

    kind: CudaAttention
    norm: mx.array
    norms: Arrays  # of queries and keys, if any
    inward: Weight
    outward: Weight
    mlp: PromptMLP
    layout: HeadsLayout | None = None  # of its heads, where a kernel knows how they turn
    speeds: mx.array | None = None  # by which they turn

    @classmethod
    def of(cls, kind: CudaAttention, before: Arrays, after: Arrays, attention: Any) -> "PromptAttention":
        norm, norms, weights = before[0], before[1 : len(kind.eps)], before[len(kind.eps) :]
        count = 1 if kind.bits[1] == 16 else 3
        inward, outward = split_weights([*weights, *after[:count]], kind.bits)
        mlp, rotation = PromptMLP.of(kind.mlp, after[count:]), Rotation.of(attention.rope)
        if rotation is None:
            return cls(kind, norm, norms, inward, outward, mlp)
        layout = HeadsLayout(*kind.heads, kind.dim, kind.is_gated, kind.eps[1:], rotation, attention.scale)
        own = (layout, ragged.speeds_of(rotation)) if layout.is_supported else ()
        return cls(kind, norm, norms, inward, outward, mlp, *own)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.inward, self.outward, self.mlp.inward, self.mlp.outward

    def before(self, prompts: RaggedPrompts, lines: RaggedLines, rope: Any, x: mx.array) -> Arrays:
        """Return queries, keys and values (lines, heads, dim) of lines (lines, H), and the gates of gated queries."""
        kind, (heads, key_heads), dim = self.kind, self.kind.heads, self.kind.dim
        found = prompts.products(mx.fast.rms_norm(x, self.norm, kind.eps[0]), self.inward)
        if (layout := self.layout) is not None and self.speeds is not None and prompts.operations.has_heads:
            speeds = self.speeds
            turns = lines.once(("turns", layout.rotation), lambda: ragged.turns_of(lines, speeds))
            made = [*prompts.operations.heads(found, self.norms, turns, layout)]
            return [*made, found[:, : heads * dim * 2].reshape(-1, heads, 2 * dim)[..., dim:]] if kind.is_gated else made
        width = heads * dim * (2 if kind.is_gated else 1)
        queries, keys, values = mx.split(found, [width, width + key_heads * dim], axis=-1)
        queries, gates = mx.split(queries.reshape(x.shape[0], heads, -1), [dim], axis=-1)
        keys, values = (one.reshape(x.shape[0], key_heads, dim) for one in (keys, values))
        if self.norms:
            both = zip((queries, keys), self.norms, kind.eps[1:], strict=True)
            queries, keys = (mx.fast.rms_norm(one, weight, eps) for one, weight, eps in both)
        # For the rope layer every line is a row of one token.
        queries, keys = (rope(one[:, :, None], offset=lines.positions).reshape(one.shape) for one in (queries, keys))
        return [*(mx.contiguous(one) for one in (queries, keys, values)), *([gates] if kind.is_gated else [])]

    def after(self, prompts: RaggedPrompts, x: mx.array, attended: mx.array, gates: Arrays) -> mx.array:
        """Return the layer's output from its input (lines, H) and what attention found, (lines, heads, dim)."""
        found = times_sigmoid(attended, gates[0]) if gates else attended
        return self.mlp(prompts, x, prompts.products(found.reshape(x.shape[0], -1), self.outward))


@functools.partial(mx.compile, shapeless=True)
def times_sigmoid(x: mx.array, gates: mx.array) -> mx.array:
    """Return x times the sigmoid of its gates."""
    return x * mx.sigmoid(gates)


class RaggedStates(RaggedRows):
    """The caches of one gated delta layer of several rows."""

    def __init__(self, prompts: RaggedPrompts, lines: RaggedLines, rows: Sequence[Any]) -> None:
        self.prompts, self.lines, self.rows = prompts, lines, rows

    def make_mask(self, _: int) -> None:
        """Return None: no row is padded."""

    def forward(self, layer: Any, x: mx.array) -> mx.array:
        """Compute the layer over lines (1, lines, H), and keep each row's states in its own cache."""
        own: PromptDelta = layer.weft_prompt
        output, *states = own(self.prompts, self.lines, x.squeeze(0), self._states(own.kind, x.dtype))  # an index would copy it
        for part, state in enumerate(states):
            for at, row in enumerate(self.rows):
                row[part] = state if len(self.rows) == 1 else state[at : at + 1]
        for row, count in zip(self.rows, self.lines.counts, strict=True):
            row.advance(count)
        return output[None]

    def _states(self, kind: CudaDelta, dtype: mx.Dtype) -> Arrays:
        """Return both states of all rows side by side; those of a new row are zeros."""
        count = len(self.rows)
        if all(row[0] is None for row in self.rows):
            return self.lines.once(("first", kind, count), lambda: kind.first_states(count, dtype))
        first = self.lines.once(("first", kind, 1), lambda: kind.first_states(1, dtype))
        return [joined_parts([new if row[part] is None else row[part] for row in self.rows]) for part, new in enumerate(first)]


class RaggedKeyValues(RaggedRows):
    """The KV caches of one attention layer of several rows."""

    def __init__(self, prompts: RaggedPrompts, lines: RaggedLines, rows: Sequence[KVCache]) -> None:
        self.prompts, self.lines, self.rows = prompts, lines, rows

    def make_mask(self, *_: Any, **__: Any) -> None:
        """Return None: attention knows which tokens each line may read."""

    def forward(self, layer: Any, x: mx.array) -> mx.array:
        """Compute the layer over lines (1, lines, H), and keep each row's keys and values in its own cache."""
        own: PromptAttention = layer.weft_prompt
        lines = x.squeeze(0)  # an index would copy it
        queries, keys, values, *gates = own.before(self.prompts, self.lines, layer.self_attn.rope, lines)
        held = self._append(keys, values)
        found = self.prompts.operations.attend(queries, keys, values, held, self.lines, layer.self_attn.scale)
        return own.after(self.prompts, lines, found, gates)[None]

    def _append(self, keys: mx.array, values: mx.array) -> list[Planes]:
        """Append each row's new keys and values to its cache; returns what all of them hold then."""
        bounds = zip(self.rows, self.lines.bounds, self.lines.bounds[1:], strict=False)
        for cache, first, end in bounds:
            if cache.keys is not None:
                cache.update_and_fetch(*(one[first:end].swapaxes(0, 1)[None] for one in (keys, values)))
        capacities = tuple(
            _capacity_with(cache, count) if cache.keys is None else cache.keys.shape[2]
            for cache, count in zip(self.rows, self.lines.counts, strict=True)
        )
        for at, cache in enumerate(self.rows):
            if cache.keys is None:
                planes = self.prompts.operations.new_planes(keys, values, self.lines, at, capacities)
                cache.keys, cache.values, cache.offset = *planes, self.lines.counts[at]
        return [(cache.keys, cache.values) for cache in self.rows]


def _capacity_with(cache: KVCache, count: int) -> int:
    """Return for how many tokens a cache will have room when so many were appended, as mlx-lm lets it grow."""
    grown: int = -(-count // cache.step) * cache.step
    if cache.keys is None:
        return grown
    capacity, offset = int(cache.keys.shape[2]), int(cache.offset)
    return capacity if offset + count <= capacity else offset + grown


def bind(
    model: nn.Module, products: BlockProducts, operations: type[PromptOperations] = PromptOperations
) -> RaggedPrompts | None:
    """Return a model's forward over prompts' lines, whose layers were bound for steps; None if one of its layers has none.

    None also if a line's product depends on its neighbours, which is tried for every shape of a weight.
    """
    layers, caches = model.layers, make_prompt_cache(model)
    found = [_prompt_layer(layer, own) for layer, own in zip(layers, caches, strict=True)]
    if None in found:
        return None
    is_independent = all(one is not None and all(map(products.try_sizes, one.weights)) for one in found)
    mx.clear_cache()  # of what the trials held
    if not is_independent:
        return None
    for layer, one in zip(layers, found, strict=True):
        layer.weft_prompt = one
    kinds = [one.kind for one in found if isinstance(one, PromptAttention)]
    return RaggedPrompts(products, operations, {kind.heads[0] // kind.heads[1] for kind in kinds}, _stack_of(model))


def _stack_of(model: nn.Module) -> Any:
    """Return the part of a model that is an embedding and its layers; None if there may be more between these."""
    stacks = [part for part in model.modules() if isinstance(part, STACKS) and len(part.layers) == len(model.layers)]
    is_whole = len(stacks) == 1 and all(own is one for own, one in zip(stacks[0].layers, model.layers, strict=True))
    return stacks[0] if is_whole and getattr(stacks[0], "pipeline_size", 1) == 1 else None


def try_layers(model: nn.Module, products: BlockProducts) -> None:
    """Find the sizes of blocks for the linear layers of a model that computes prompts, or some of them, as mlx-lm does."""
    for layer in model.modules():
        if isinstance(layer, tuple(INVARIANT_LAYERS.values())) and (weight := Weight.of(layer)) is not None:
            products.try_sizes(weight)
    mx.clear_cache()  # of what the trials held


def _prompt_layer(layer: nn.Module, own: Any) -> PromptDelta | PromptAttention | None:
    """Return a layer as prompts compute it; None if it or its cache is of another kind."""
    parts: BoundLayer | None = getattr(layer, "weft_parts", None)
    if parts is None or not ragged.can_gate(layer.mlp.up_proj.weight.shape[0] * 2):
        return None
    if isinstance(parts.kind, CudaDelta):
        is_known = type(own) is ArraysCache and ragged.can_apply(parts.kind.layout)
        return PromptDelta.of(parts.kind, parts.arrays) if is_known else None
    is_known = type(own) is KVCache and ragged.can_attend(parts.kind.dim)
    return PromptAttention.of(parts.kind, parts.arrays, parts.more, layer.self_attn) if is_known else None
