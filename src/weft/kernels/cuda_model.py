"""Decode steps of whole models on CUDA over paged memory: seven launches for a gated delta layer, nine for an attention layer.

A layer hands the next one its residual sum and, already normalised, that one's input: so the addition behind an MLP and the norm
before the next layer are one kernel. A few layers at a time are one compiled function, traced once for all groups of the same
kinds and shapes. Prompts, and rows that decode on caches of their own, go through the layers one by one
(`kernels/cuda_layers.py`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3, qwen3_5

from weft.kernels import cuda, cuda_layers, cuda_paged, cuda_product
from weft.kernels.cuda_layers import Arrays, CudaAttention, CudaDelta, split_weights
from weft.kernels.cuda_paged import MAX_STATE_NUMBERS, DeltaArrays, DeltaKind, HeadsLayout, Rotation
from weft.memory.pages import PagedBatch, PagedView, SlottedView, StepTable
from weft.memory.spec import KeyValues

log = logging.getLogger("weft.kernels")

GROUP_LAYERS = 4  # in one compiled function
STACKS = (llama.LlamaModel, qwen3.Qwen3Model, qwen3_5.Qwen3_5TextModel)


class StepKernels:
    """The operations that a step is made of; tests put others in their place."""

    product = staticmethod(cuda_product.product)
    gated_product = staticmethod(cuda_product.gated_product)
    product_in_parts = staticmethod(cuda_product.product_in_parts)
    add_norm = staticmethod(cuda.add_norm)
    delta_step = staticmethod(cuda_paged.delta_step)
    place_heads = staticmethod(cuda_paged.place_heads)
    attend = staticmethod(cuda_paged.attend)


@dataclass(frozen=True)
class FusedDelta:
    """What a gated delta layer does before its output product."""

    kind: CudaDelta

    def __call__(
        self, kernels: type[StepKernels], keeps_states: bool, normed: mx.array, table: StepTable, held: Arrays, arrays: Arrays
    ) -> tuple[mx.array, Arrays]:
        """Return what the output product takes, and the states after each line if asked for."""
        own, kind = DeltaArrays(*arrays[:4]), DeltaKind(self.kind.layout, self.kind.eps[1])
        (inward,) = split_weights(arrays[4:], self.kind.bits[:1])
        projected = kernels.product(normed, inward)
        found, kept = kernels.delta_step(projected, own, (held[0], held[1]), table, kind, keeps_states=keeps_states)
        return found, [] if kept is None else [kept]


@dataclass(frozen=True)
class FusedAttention:
    """What an attention layer does before its output product."""

    kind: CudaAttention
    layout: HeadsLayout

    def __call__(
        self, kernels: type[StepKernels], _: bool, normed: mx.array, table: StepTable, held: Arrays, arrays: Arrays
    ) -> tuple[mx.array, Arrays]:
        """Return what the output product takes; there are no states."""
        layout, num_norms = self.layout, len(self.layout.eps)
        norms, rest = arrays[:num_norms], arrays[num_norms:]
        frequencies = rest.pop(0) if layout.rotation.frequencies else None
        (inward,) = split_weights(rest, self.kind.bits[:1])
        projected, memory = kernels.product(normed, inward), KeyValues(held[0], held[1])
        queries = kernels.place_heads(projected, norms, frequencies, memory, table, layout)
        gates = projected if layout.is_gated else None
        found = kernels.attend(queries, queries, memory, table, layout.scale, gates)
        return found.reshape(found.shape[0], -1), []


@dataclass(frozen=True)
class LayerStep:
    """One layer of a step, without its arrays: what it computes between two products, and the sizes of its weights."""

    mixer: FusedDelta | FusedAttention
    following_eps: float  # of the next layer's input norm, or of the model's last norm

    def __call__(
        self,
        kernels: type[StepKernels],
        keeps_states: bool,
        lines: tuple[mx.array, mx.array],
        table: StepTable,
        held: Arrays,
        arrays: "LayerArrays",
    ) -> tuple[tuple[mx.array, mx.array], Arrays]:
        """Return the residual sum and what the next layer takes, both (lines, width), and states after each line if asked for."""
        kind, (x, normed) = self.mixer.kind, lines
        mixed, kept = self.mixer(kernels, keeps_states, normed, table, held, arrays[0])
        (outward,) = split_weights(arrays[1], kind.bits[1:])
        post, following, *weights = arrays[2]
        inward, down = split_weights(weights, kind.mlp.bits)
        x, normed = kernels.add_norm(x, kernels.product_in_parts(mixed, outward), post, kind.mlp.eps)
        hidden = kernels.gated_product(normed, inward)
        return kernels.add_norm(x, kernels.product_in_parts(hidden, down), following, self.following_eps), kept


LayerArrays = list[Arrays]  # of the mixer, of the output product, and of the MLP with the norm before it and the one behind


@dataclass(frozen=True)
class GroupStep:
    """A few layers of a step, without their arrays: what is compiled."""

    kernels: type[StepKernels]
    layers: tuple[LayerStep, ...]
    keeps_states: bool

    def __call__(self, lines: Arrays, table: Arrays, held: list[Arrays], arrays: list[LayerArrays]) -> Arrays:
        """Return the residual sum, what the next layer takes, and states after each line if asked for."""
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
    arrays: list[LayerArrays]

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + len(self.layers))


@dataclass(frozen=True, eq=False)
class ModelStep:
    """The decode step of one model over a `PagedBatch`."""

    groups: list[LayerGroup]
    norm: tuple[mx.array, float]  # weight and eps of the first layer's input norm

    @property
    def slotted(self) -> frozenset[int]:
        """The layers whose states are in slots."""
        layers = [(number, layer) for group in self.groups for number, layer in zip(group.numbers, group.layers, strict=True)]
        return frozenset(number for number, layer in layers if isinstance(layer.mixer, FusedDelta))

    def __call__(self, embedded: mx.array, views: Sequence[PagedView | SlottedView]) -> tuple[mx.array, mx.array]:
        """Run the layers over embedded tokens (B, T, H); returns their sum, and behind the model's last norm."""
        batch: PagedBatch = views[0].batch
        keeps_states = batch.tokens > 1
        x = embedded.reshape(-1, embedded.shape[-1])
        lines, table = [x, mx.fast.rms_norm(x, *self.norm)], list(batch.step_table)
        for group in self.groups:
            held = [_held(views[number]) for number in group.numbers]
            first, second, *kept = group.runs[keeps_states](lines, table, held, group.arrays)
            lines = [first, second]
            slotted = [number for number in group.numbers if isinstance(views[number], SlottedView)]
            for number, states in zip(slotted, kept, strict=False):  # of steps of one token none are kept
                batch.keep_by_token(number, states)
        return lines[0].reshape(embedded.shape), lines[1].reshape(embedded.shape)


def _held(view: PagedView | SlottedView) -> Arrays:
    held = view.held
    return [held.keys, held.values] if isinstance(held, KeyValues) else [*held]


class StepOfModel:
    """Mixin of a model's stack of layers: decode steps over paged memory go through its fused step."""

    weft_model_step: ModelStep

    def __call__(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None) -> mx.array:
        if not cache or not isinstance(cache[0], PagedView | SlottedView):
            return super().__call__(inputs, cache, input_embeddings)  # type: ignore[misc,no-any-return]
        embedded = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        total, normed = self.weft_model_step(embedded, cache)
        return normed if isinstance(self.norm, nn.RMSNorm) else total  # type: ignore[no-any-return]  # an MTP head may ask for states before the norm


def bind(model: nn.Module) -> bool:
    """Let a model use weft's kernels for CUDA; returns whether the numbers of a line depend on that line alone then."""
    is_bound = cuda_layers.bind(model)
    if is_bound:
        bind_model(model)
    return is_bound


def bind_model(
    model: nn.Module, kernels: type[StepKernels] = StepKernels, compiled: Callable[[Any], Any] = mx.compile
) -> ModelStep | None:
    """Let a model whose layers are all bound take fused steps; returns its step, None if it can not."""
    for stack in list(model.modules()):
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
    mixers = [_mixer(layer) for layer in stack.layers]
    if type(stack.norm) is not nn.RMSNorm or getattr(stack, "pipeline_size", 1) > 1:
        return None
    found = [mixer for mixer in mixers if mixer is not None]
    if len(found) < len(mixers):
        return None
    norms = [*(layer.input_layernorm for layer in stack.layers), stack.norm]
    layers = [LayerStep(mixer, norm.eps) for (mixer, _), norm in zip(found, norms[1:], strict=True)]
    arrays = [_with_norm(own, norm.weight) for (_, own), norm in zip(found, norms[1:], strict=True)]
    made: dict[tuple[LayerStep, ...], tuple[Callable[..., Arrays], Callable[..., Arrays]]] = {}
    groups = []
    for first in range(0, len(layers), GROUP_LAYERS):
        kinds = tuple(layers[first : first + GROUP_LAYERS])
        if kinds not in made:
            one, keeping = (compiled(GroupStep(kernels, kinds, keeps)) for keeps in (False, True))
            made[kinds] = one, keeping
        groups.append(LayerGroup(first, kinds, made[kinds], arrays[first : first + GROUP_LAYERS]))
    return ModelStep(groups, (norms[0].weight, norms[0].eps))


def _mixer(layer: Any) -> tuple[FusedDelta | FusedAttention, LayerArrays] | None:
    """Return what a bound layer does, and its arrays; None if the kernels can not do it."""
    kind = getattr(layer, "weft_kind", None)
    if isinstance(kind, CudaDelta):
        layout = kind.layout
        if layout.key_dim * layout.value_dim > MAX_STATE_NUMBERS:
            return None
        _, *own = layer.weft_step[3]  # the input norm's weight belongs to the layer before
        return FusedDelta(kind), _divided(own, 4, kind.bits)
    if isinstance(kind, CudaAttention):
        rotation, own = Rotation.of(layer.self_attn.rope), layer.self_attn
        if rotation is None or getattr(layer, "use_sliding", False):
            return None
        heads = HeadsLayout(kind.heads[0], kind.heads[1], kind.dim, kind.is_gated, kind.eps[1:], rotation, own.scale)
        if not heads.is_supported:
            return None
        (_, *before), after = layer.weft_step[2:]
        num_norms = len(heads.eps)
        frequencies = [mx.array(rotation.frequencies)] if rotation.frequencies else []
        return FusedAttention(kind, heads), _divided([*before[:num_norms], *frequencies, *before[num_norms:], *after],
                                                     num_norms + len(frequencies), kind.bits)  # fmt: skip
    return None


def _divided(arrays: Arrays, num_own: int, bits: tuple[int, int]) -> LayerArrays:
    """Divide a layer's arrays: the mixer's own and its input product's, the output product's, and the MLP's."""
    counts = [1 if number == 16 else 3 for number in bits]
    inward, outward = num_own + counts[0], num_own + sum(counts)
    return [arrays[:inward], arrays[inward:outward], arrays[outward:]]


def _with_norm(arrays: LayerArrays, following: mx.array) -> LayerArrays:
    mixer, outward, (post, *weights) = arrays
    return [mixer, outward, [post, following, *weights]]
