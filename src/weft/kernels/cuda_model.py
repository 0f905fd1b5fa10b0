"""Decode steps of whole models on CUDA over paged memory: seven launches for a gated delta layer, eight for an attention layer.

A layer hands the next one its residual sum and what is still to be added to it, so that one kernel adds and normalises; with one
or two lines the product behind it does, and there are five launches or six. A few layers at a time are one compiled function,
traced once for all groups of the same kinds and shapes. Prompts, and rows that decode on caches of their own, go through the
layers one by one (`kernels/cuda_layers.py`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3, qwen3_5

from weft.kernels import cuda, cuda_layers, cuda_paged, cuda_product
from weft.kernels.cuda_layers import Arrays, CudaAttention, CudaDelta, split_weights
from weft.kernels.cuda_paged import MAX_STATE_NUMBERS, DeltaArrays, DeltaKind, HeadsLayout, Rotation
from weft.kernels.cuda_product import Weight
from weft.kernels.cuda_sizes import ProductEnding
from weft.memory.paged_views import PagedBatch, PagedView, SlottedView
from weft.memory.pages import StepTable
from weft.memory.spec import KeyValues

FUSES_STEPS = True  # else models decode layer by layer, over slabs
GROUP_LAYERS = 4  # in one compiled function
Lines = tuple[mx.array, mx.array]  # (M, width) each: a residual sum, and what the last product adds to it, in parts perhaps
STACKS = (llama.LlamaModel, qwen3.Qwen3Model, qwen3_5.Qwen3_5TextModel)


class StepKernels:
    """The operations that a step is made of; tests put others in their place."""

    embed = staticmethod(cuda_product.embed)
    normed_product = staticmethod(cuda_product.normed_product)
    product_in_parts = staticmethod(cuda_product.product_in_parts)
    add_norm = staticmethod(cuda.add_norm)
    delta_step = staticmethod(cuda_paged.delta_step)
    place_heads = staticmethod(cuda_paged.place_heads)
    attend = staticmethod(cuda_paged.attend)


@dataclass(frozen=True)
class FusedDelta:
    """What a gated delta layer does between its two products."""

    kind: CudaDelta

    def __call__(
        self, kernels: type[StepKernels], keeps_states: bool, projected: mx.array, table: StepTable, held: Arrays, arrays: Arrays
    ) -> tuple[mx.array, Arrays]:
        """Return what the output product takes, and the states after each line if asked for."""
        own, kind = DeltaArrays(*arrays), DeltaKind(self.kind.layout, self.kind.eps[1])
        found, kept = kernels.delta_step(projected, own, (held[0], held[1]), table, kind, keeps_states=keeps_states)
        return found, [] if kept is None else [kept]


@dataclass(frozen=True)
class FusedAttention:
    """What an attention layer does between its two products."""

    kind: CudaAttention
    layout: HeadsLayout

    def __call__(
        self, kernels: type[StepKernels], _: bool, projected: mx.array, table: StepTable, held: Arrays, arrays: Arrays
    ) -> tuple[mx.array, Arrays]:
        """Return what the output product takes; there are no states."""
        layout, memory = self.layout, KeyValues(held[0], held[1])
        norms, frequencies = arrays[: len(layout.eps)], arrays[len(layout.eps) :]
        queries = kernels.place_heads(projected, norms, frequencies[0] if frequencies else None, memory, table, layout)
        gates = projected if layout.is_gated else None
        found = kernels.attend(queries, queries, memory, table, layout.scale, gates)
        return found.reshape(found.shape[0], -1), []


@dataclass(frozen=True)
class LayerStep:
    """One layer of a step, without its arrays: what it computes between two products, and the sizes of its weights."""

    mixer: FusedDelta | FusedAttention

    def __call__(
        self, kernels: type[StepKernels], keeps_states: bool, lines: Lines, table: StepTable, held: Arrays, arrays: list[Arrays]
    ) -> tuple[Lines, Arrays]:
        """Return the lines behind the layer, and the states after each line if asked for."""
        kind, own = self.mixer.kind, LayerArrays(*arrays)
        (inward, outward), mlp = split_weights([*own.inward, *own.outward], kind.bits), kind.mlp
        gate_and_up, down = split_weights(own.mlp, mlp.bits)
        total, projected = kernels.normed_product(lines, (own.norms[0], kind.eps[0]), inward)
        mixed, kept = self.mixer(kernels, keeps_states, projected, table, held, own.mixer)
        lines = total, kernels.product_in_parts(mixed, outward)
        total, hidden = kernels.normed_product(lines, (own.norms[1], mlp.eps), gate_and_up, ProductEnding.GATED)
        return (total, kernels.product_in_parts(hidden, down)), kept


class LayerArrays(NamedTuple):
    """The arrays of one layer, by where they are used."""

    norms: Arrays  # before the mixer, before the MLP
    inward: Arrays
    mixer: Arrays
    outward: Arrays
    mlp: Arrays


@dataclass(frozen=True)
class GroupStep:
    """A few layers of a step, without their arrays: what is compiled."""

    kernels: type[StepKernels]
    layers: tuple[LayerStep, ...]
    keeps_states: bool

    def __call__(self, lines: Arrays, table: Arrays, held: list[Arrays], arrays: list[list[Arrays]]) -> Arrays:
        """Return the lines behind these layers, and the states after each line if asked for."""
        pair, states = (lines[0], lines[1]), []
        for layer, own_held, own in zip(self.layers, held, arrays, strict=True):
            pair, kept = layer(self.kernels, self.keeps_states, pair, StepTable(*table), own_held, own)
            states += kept
        return [*pair, *states]


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """A few layers of one model, compiled: the function for steps of one token, the one that keeps states, and their arrays."""

    first: int
    layers: tuple[LayerStep, ...]
    runs: tuple[Callable[..., Arrays], Callable[..., Arrays]]
    arrays: list[list[Arrays]]  # of each layer those of `LayerArrays`

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.layers))


@dataclass(frozen=True, eq=False)
class ModelStep:
    """The decode step of one model over a `PagedBatch`."""

    kernels: type[StepKernels]
    groups: list[LayerGroup]
    norm: tuple[mx.array, float]  # weight and epsilon of the last norm

    @property
    def slotted(self) -> frozenset[int]:
        """The layers whose states are in slots."""
        layers = [(number, layer) for group in self.groups for number, layer in zip(group.numbers, group.layers, strict=True)]
        return frozenset(number for number, layer in layers if isinstance(layer.mixer, FusedDelta))

    def __call__(self, embedded: mx.array, views: Sequence[PagedView | SlottedView]) -> tuple[mx.array, mx.array]:
        """Run the layers over embedded tokens (B, T, H); returns their sum, and behind the model's last norm."""
        batch: PagedBatch = views[0].batch
        x = embedded.reshape(-1, embedded.shape[-1])
        lines, table = [x, zeros_like(x)], list(batch.step_table)
        for group in self.groups:
            held = [_held(views[number]) for number in group.numbers]
            first, second, *kept = group.runs[batch.tokens > 1](lines, table, held, group.arrays)
            lines = [first, second]
            slotted = [number for number in group.numbers if isinstance(views[number], SlottedView)]
            for number, states in zip(slotted, kept, strict=False):  # of steps of one token none are kept
                batch.keep_by_token(number, states)
        total, normed = self.kernels.add_norm(lines[0], lines[1], *self.norm)
        return total.reshape(embedded.shape), normed.reshape(embedded.shape)


def zeros_like(lines: mx.array) -> mx.array:
    """Return zeros of the shape of lines (M, width), as a part of an array that is made once."""
    return _zeros(1 << (lines.shape[0] - 1).bit_length(), lines.shape[1], lines.dtype)[: lines.shape[0]]


@functools.lru_cache(16)
def _zeros(count: int, width: int, dtype: mx.Dtype) -> mx.array:
    found = mx.zeros((count, width), dtype)
    mx.eval(found)  # sync: it has no part in anybody's graph
    return found


def _held(view: PagedView | SlottedView) -> Arrays:
    held = view.held
    return [held.keys, held.values] if isinstance(held, KeyValues) else [*held]


class StepOfModel:
    """Mixin of a model's stack of layers: decode steps over paged memory go through its fused step."""

    weft_model_step: ModelStep

    def __call__(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        if not cache or not isinstance(cache[0], PagedView | SlottedView):
            return super().__call__(inputs, cache, input_embeddings)  # type: ignore[misc,no-any-return]
        step, weight = self.weft_model_step, Weight.of(self.embed_tokens)
        if input_embeddings is None:
            input_embeddings = self.embed_tokens(inputs) if weight is None else step.kernels.embed(inputs, weight)
        total, normed = step(input_embeddings, cache)
        return normed if isinstance(self.norm, nn.RMSNorm) else total  # type: ignore[no-any-return]  # an MTP head may ask for states before the norm


def bind(model: nn.Module, in_prompts: cuda_product.Product = cuda_product.prompt_product) -> bool:
    """Let a model use weft's kernels for CUDA; returns whether the numbers of a line depend on that line alone then.

    `in_prompts`: the product of prompts' lines.
    """
    is_bound = cuda_layers.bind(model, in_prompts)
    if is_bound:
        bind_model(model)
    return is_bound


def bind_model(
    model: nn.Module, kernels: type[StepKernels] = StepKernels, compiled: Callable[[Any], Any] = mx.compile
) -> ModelStep | None:
    """Let a model whose layers are all bound take fused steps; returns its step, None if it can not."""
    for stack in list(model.modules()) if FUSES_STEPS else ():
        if type(stack) in STACKS and (step := step_of(stack, kernels, compiled)) is not None:
            stack.weft_model_step = step
            stack.__class__ = type(f"Stepped{type(stack).__name__}", (StepOfModel, type(stack)), {})
            return step
    return None


def bound_step(model: nn.Module) -> ModelStep | None:
    """Return the fused step of a model, if it has one."""
    found = [stack for stack in model.modules() if isinstance(stack, StepOfModel)]
    return found[0].weft_model_step if len(found) == 1 else None


def step_of(stack: Any, kernels: type[StepKernels], compiled: Callable[[Any], Any]) -> ModelStep | None:
    """Return the fused step of a stack of layers; None if one of them is of another kind."""
    found = [one for layer in stack.layers if (one := _step_and_arrays(layer)) is not None]
    is_whole = len(found) == len(stack.layers) and getattr(stack, "pipeline_size", 1) == 1
    if not is_whole or not isinstance(stack.norm, nn.RMSNorm):
        return None
    made: dict[tuple[LayerStep, ...], tuple[Callable[..., Arrays], Callable[..., Arrays]]] = {}
    groups = []
    for first in range(0, len(found), GROUP_LAYERS):
        members = found[first : first + GROUP_LAYERS]
        kinds = tuple(layer for layer, _ in members)
        if kinds not in made:
            one, keeping = (compiled(GroupStep(kernels, kinds, keeps)) for keeps in (False, True))
            made[kinds] = one, keeping
        groups.append(LayerGroup(first, kinds, made[kinds], [[*arrays] for _, arrays in members]))
    return ModelStep(kernels, groups, (stack.norm.weight, stack.norm.eps))


def _step_and_arrays(layer: Any) -> tuple[LayerStep, LayerArrays] | None:
    """Return the step of a bound layer and its arrays; None if the kernels can not do it."""
    kind = getattr(layer, "weft_kind", None)
    if isinstance(kind, CudaDelta):
        norm, *rest = layer.weft_step[3]
        if kind.layout.key_dim * kind.layout.value_dim > MAX_STATE_NUMBERS:
            return None
        return LayerStep(FusedDelta(kind)), _divided(norm, rest[:4], rest[4:], kind)
    if isinstance(kind, CudaAttention):
        rotation = Rotation.of(layer.self_attn.rope)
        if rotation is None or getattr(layer, "use_sliding", False):
            return None
        sizes = (*kind.heads, kind.dim, kind.is_gated, kind.eps[1:])
        if not (heads := HeadsLayout(*sizes, rotation, layer.self_attn.scale)).is_supported:
            return None
        (norm, *before), after = layer.weft_step[2:]
        num_norms = len(heads.eps)
        own = [*before[:num_norms], *([mx.array(rotation.frequencies)] if rotation.frequencies else [])]
        return LayerStep(FusedAttention(kind, heads)), _divided(norm, own, [*before[num_norms:], *after], kind)
    return None


def _divided(norm: mx.array, mixer: Arrays, arrays: Arrays, kind: CudaDelta | CudaAttention) -> LayerArrays:
    """Divide a layer's further arrays: those of its input product, of its output product, and of its MLP with its norm."""
    inward, outward = (1 if bits == 16 else 3 for bits in kind.bits)
    post, *mlp = arrays[inward + outward :]
    return LayerArrays([norm, post], arrays[:inward], mixer, arrays[inward : inward + outward], mlp)
