"""Decoder layers for CPUs as a handful of operations: norms, products, RoPE, attention over slabs, residuals, MLPs, experts.

A layer is replaced at load if it is built as the common ones are and gives the same bits when tried (`bind`); forwards it can not
take (other caches, other masks) go through the layer's own code. Gated delta layers (`delta_blocks.py`) take all
but padded rows.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import switch_layers
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from weft.kernels.cpu import FusedRMSNorm, FusedRotation, is_bound, norm_of
from weft.kernels.delta_blocks import delta_mixer
from weft.kernels.packed import KeptLinear, weights_of
from weft.kernels.primitives import ops
from weft.memory.grouped import GroupedKeyValues, LineKeyValues, LineStates, PromptLines, RowMasks
from weft.memory.spec import FullAttention, KeyValues, LayerSpec
from weft.memory.views import Batch, KeyValueView

log = logging.getLogger("weft.kernels")

HEADS = ("n_heads", "num_heads", "num_attention_heads")  # what attention layers call their numbers of heads
KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
TRIAL_ERRORS = (AttributeError, TypeError, ValueError, KeyError, RuntimeError)
TRIAL_TOKENS = (5, 1, 3)  # of the forwards in a row by which a layer is compared with its own code


MLPWeights = tuple["ops.Weights", "ops.Weights", "list[ops.Weights]"]  # gate, up, down


class Mixer(Protocol):
    """What mixes a decoder layer's tokens: attention, or a recurrence."""

    def mix(self, x: mx.array, norm: "ops.Norm", mask: Any, cache: Any) -> mx.array | None:
        """Norm x and return what the output product takes; None if only the layer's own code can take this forward."""


@dataclass(frozen=True)
class BlockPlan:
    """What a decoder layer's operations take; `mlp` is None where the layer's own code computes it."""

    input_norm: "ops.Norm"
    mixer: Mixer
    output: "list[ops.Weights]"
    mlp_norm: "ops.Norm"
    mlp: MLPWeights | None


class FusedBlock:
    """Mixin of decoder layers of norm, mixer, norm and MLP, the latter two with residuals: five to seven operations."""

    weft_plan: BlockPlan

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        plan: BlockPlan = self.weft_plan
        mixed = plan.mixer.mix(x, plan.input_norm, mask, cache) if x.dtype == mx.float32 else None
        if mixed is None:
            return super().__call__(x, mask, cache)  # type: ignore[misc,no-any-return]
        middle = ops.linear(mixed, plan.output, None, x)
        if plan.mlp is None:
            return middle + self.mlp(self.post_attention_layernorm(middle))  # type: ignore[no-any-return]
        gate, up, down = plan.mlp
        return ops.linear(ops.gated(middle, gate, up, plan.mlp_norm), down, None, middle)


@dataclass(frozen=True)
class AttentionMixer:
    """Attention: its weights, norms, and the layout of its heads."""

    joint: "list[ops.Weights]"  # of queries, keys and values
    heads: "ops.Heads"
    num_kv_heads: int
    dim: int
    rope: FusedRotation

    def mix(self, x: mx.array, norm: "ops.Norm", mask: Any, cache: Any) -> mx.array | None:
        """Attend over the cache, or the slabs of a step's rows."""
        if (target := _target(x, mask, cache)) is None:
            return None
        return target.attend(ops.linear(x, self.joint, norm), self._angles(cache, x.shape[1]), self)

    def _angles(self, cache: Any, tokens: int) -> mx.array:
        """Return the angles (B or 1, 1, T, dims) of a forward's tokens."""
        if isinstance(cache, LineKeyValues):  # every line is at a position of its own
            return self.rope.angles_for(cache.lines.positions, 1).reshape(1, 1, tokens, -1)
        return self.rope.angles_for(cache.offset, tokens)


class KeptMLP:
    """Mixin of gated MLPs: two operations."""

    weft_plan: MLPWeights

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return super().__call__(x)  # type: ignore[misc,no-any-return]
        gate, up, down = self.weft_plan
        return ops.linear(ops.gated(x, gate, up), down)


class FusedExperts:
    """Mixin of mixtures of gated MLPs: one operation, which reads the weights of the chosen experts only."""

    weft_plan: "tuple[ops.Weights, ops.Weights, ops.Weights]"

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if x.dtype != mx.float32 or indices.dtype not in (mx.int32, mx.uint32):
            return super().__call__(x, indices)  # type: ignore[misc,no-any-return]
        return ops.experts(x, indices, *self.weft_plan)


# ---- where keys and values are


@dataclass(frozen=True)
class CacheTarget:
    """mlx-lm's cache of a prompt, or of rows of one length."""

    cache: Any

    def attend(self, lines: mx.array, angles: mx.array, plan: AttentionMixer) -> mx.array:
        """Append keys and values to the cache, then attend: lines of the joint product → lines of heads."""
        cache, (num_rows, tokens, _) = self.cache, lines.shape
        self.make_room((num_rows, plan.num_kv_heads, tokens, plan.dim))
        if num_rows > 1:
            angles = mx.broadcast_to(angles, (num_rows, *angles.shape[1:]))
        rows = ops.StepRows([(0, row, cache.offset, tokens, row * tokens) for row in range(num_rows)])
        cache.keys = ops.append(cache.keys, lines, angles, rows, plan.heads, 0, False)
        cache.values = ops.append(cache.values, lines, None, rows, plan.heads, 0, True)
        cache.offset += tokens
        return ops.attend(lines, [cache.keys], [cache.values], angles, rows, plan.heads)

    def make_room(self, shape: tuple[int, int, int, int]) -> None:
        """Let the cache grow as its own `update_and_fetch` does."""
        cache, (rows, heads, tokens, dim) = self.cache, shape
        if cache.keys is not None and cache.offset + tokens <= cache.keys.shape[2]:
            return
        more = mx.zeros((rows, heads, -(-tokens // cache.step) * cache.step, dim))
        if cache.keys is None:
            cache.keys = cache.values = more
            return
        held = [array[..., : cache.offset, :] for array in (cache.keys, cache.values)]
        cache.keys, cache.values = (mx.concatenate([array, more], axis=2) for array in held)


@dataclass(frozen=True)
class SlabTarget:
    """The slabs of a step's rows."""

    view: KeyValueView

    def attend(self, lines: mx.array, angles: mx.array, plan: AttentionMixer) -> mx.array:
        """Append keys and values to the rows' slabs, then attend over all of them in one operation."""
        if angles.shape[0] != lines.shape[0]:
            angles = mx.broadcast_to(angles, (lines.shape[0], *angles.shape[1:]))
        keys, values = self.append(lines, angles, plan.heads)
        return ops.attend(lines, keys, values, angles, step_rows(self.view.batch), plan.heads)

    def append(self, lines: mx.array, angles: mx.array, heads: "ops.Heads") -> tuple[list[mx.array], list[mx.array]]:
        """Append keys and values to the rows' slabs; returns those of each slab."""
        batch, layer, rows = self.view.batch, self.view.layer, step_rows(self.view.batch)
        keys, values = [], []
        for index, part in enumerate(batch.parts):
            held = part.slab.layers[layer]
            keys.append(ops.append(held.keys, lines, angles, rows, heads, index, False))
            values.append(ops.append(held.values, lines, None, rows, heads, index, True))
            part.slab.layers[layer] = KeyValues(keys[-1], values[-1])
        return keys, values


@dataclass(frozen=True)
class GroupTarget:
    """mlx-lm's caches of several prompts, whose chunks are computed together."""

    caches: tuple[Any, ...]
    counts: tuple[int, ...]  # new tokens of each, which are lines one behind the other

    def attend(self, lines: mx.array, angles: mx.array, plan: AttentionMixer) -> mx.array:
        """Append keys and values to each prompt's cache, then attend over all of them in one operation."""
        if angles.shape[0] != lines.shape[0]:
            angles = mx.broadcast_to(angles, (lines.shape[0], *angles.shape[1:]))
        chunks = list(zip(self.caches, self.counts, itertools.accumulate(self.counts), strict=True))
        for cache, count, _ in chunks:
            CacheTarget(cache).make_room((1, plan.num_kv_heads, count, plan.dim))
        rows = ops.StepRows([(at, 0, cache.offset, count, end - count) for at, (cache, count, end) in enumerate(chunks)])
        for at, (cache, count, _) in enumerate(chunks):
            cache.keys = ops.append(cache.keys, lines, angles, rows, plan.heads, at, False)
            cache.values = ops.append(cache.values, lines, None, rows, plan.heads, at, True)
            cache.offset += count
        keys, values = [cache.keys for cache in self.caches], [cache.values for cache in self.caches]
        return ops.attend(lines, keys, values, angles, rows, plan.heads)


def _target(x: mx.array, mask: Any, cache: Any) -> CacheTarget | SlabTarget | GroupTarget | None:
    """Return where this forward's keys and values are; None if only the layer's own code can take it."""
    if type(cache) is KVCache:
        return CacheTarget(cache) if _is_plain_prompt(x, mask, cache) else None
    if type(cache) is GroupedKeyValues:
        masks = mask.masks if isinstance(mask, RowMasks) else [mask] * len(cache.rows)
        rows = zip(masks, cache.rows, strict=True)
        is_plain = all(type(row) is KVCache and _is_plain_prompt(x, its_mask, row) for its_mask, row in rows)
        return GroupTarget(tuple(cache.rows), (x.shape[1],) * len(cache.rows)) if is_plain else None
    if type(cache) is LineKeyValues:
        return GroupTarget(tuple(cache.rows), cache.lines.counts)
    return None if mask is not None else slab_target(cache)


def slab_target(cache: Any) -> SlabTarget | None:
    """Return the slabs behind a step's view; None for other caches, or where only the layer's own code can take them."""
    if type(cache) is not KeyValueView or not cache.batch.seam:
        return None
    return SlabTarget(cache) if is_plain_attention(cache.spec) and None not in cache.batch.rows else None


def is_plain_attention(spec: LayerSpec) -> bool:
    """Whether a layer's keys and values are such as weft's operations take: float32, of all tokens."""
    return type(spec) is FullAttention and spec.keys.dtype == spec.values.dtype == mx.float32


def step_rows(batch: Batch) -> "ops.StepRows":
    """Return the rows of a step with their places in the slabs, made once for all layers."""

    def make() -> "ops.StepRows":
        by_part = [zip(part.rows, part.first, strict=True) for part in batch.parts]
        places = [(index, row.slot, first) for index, rows in enumerate(by_part) for row, first in rows]
        return ops.StepRows([(*place, batch.tokens, line * batch.tokens) for line, place in enumerate(places)])

    found: ops.StepRows = batch.once(("step rows",), make)
    return found


def _is_plain_prompt(x: mx.array, mask: Any, cache: KVCache) -> bool:
    """Whether a prompt's cache has numbers that weft's operations take, and its mask is nothing but causal."""
    is_causal = mask is None if x.shape[1] == 1 else isinstance(mask, str)
    return is_causal and (cache.keys is None or cache.keys.dtype == mx.float32)


# ---- prompts of any lengths


class BlockPrompts:
    """A model's forward over several prompts' chunks of any lengths, where all its layers are fused blocks.

    Its bits are those of the model's own forward of each chunk. Lines lie one behind the other, and nothing is filled up.
    """

    has_own_bits = True

    @staticmethod
    def forward_of(
        rows: Sequence[Sequence[Any]], chunks: Sequence[Sequence[int]]
    ) -> tuple[PromptLines, list[LineKeyValues | LineStates]]:
        """Return the lines of a forward of each row's chunk, and its caches by layer over the rows' own."""
        by_layer = list(zip(*rows, strict=True))
        held = next((layer for layer in by_layer if type(layer[0]) is KVCache), None)  # all layers hold as much
        lines = PromptLines(chunks, [0] * len(rows) if held is None else [cache.offset for cache in held])
        return lines, [(LineKeyValues if type(layer[0]) is KVCache else LineStates)(lines, layer) for layer in by_layer]


def block_prompts(model: nn.Module) -> BlockPrompts | None:
    """Return the forward over prompts of any lengths of a model with these layers and caches; None for another model."""
    caches = make_prompt_cache(model)
    is_known = len(caches) == len(model.layers) and all(type(cache) in (KVCache, ArraysCache) for cache in caches)
    return BlockPrompts() if is_known and all(isinstance(layer, FusedBlock) for layer in model.layers) else None


# ---- which layers are replaced


def bind(model: nn.Module) -> list[str]:
    """Replace a model's layers on a CPU by those here, where a trial gives the same bits; returns the names of their classes.

    To be called after all other bindings: what is compared with is what would run otherwise.
    """
    if not is_bound(mx.float32):
        return []
    kinds = (
        LayerKind(FusedBlock, _attention_plan, _trial_attention),
        LayerKind(FusedBlock, _delta_plan, _trial_delta, is_exact=False),
        LayerKind(KeptMLP, _mlp_plan, _trial_mlp),
        LayerKind(FusedExperts, _experts_plan, _trial_experts),
    )
    return [type(layer).__name__ for layer in model.modules() if any(_replace(layer, kind) for kind in kinds)]


@dataclass(frozen=True)
class LayerKind:
    """A kind of layer that is replaced: what its operations take, and the trial in which it must give the same numbers."""

    mixin: type
    plan_of: Callable[[Any], Any]  # None: the layer is of another kind
    trial: Callable[[Any], list[mx.array]]
    is_exact: bool = True  # to the bit; else closely, for layers that take every forward of a model from then on

    def agrees(self, found: list[mx.array], right: list[mx.array]) -> bool:
        """Whether a layer's numbers are those of its own code."""
        is_same = mx.array_equal if self.is_exact else functools.partial(mx.allclose, rtol=1e-4, atol=1e-5)
        return all(is_same(one, other) for one, other in zip(found, right, strict=True))


def _replace(layer: nn.Module, kind: LayerKind) -> bool:
    own = type(layer)
    if issubclass(own, kind.mixin):
        return True  # bound before, by another adapter over the same model
    try:
        plan = kind.plan_of(layer)
        if plan is None:
            return False
        right = kind.trial(layer)
        layer.__dict__["weft_plan"] = plan
        layer.__class__ = _with(kind.mixin, own)  # type: ignore[arg-type]
        if kind.agrees(kind.trial(layer), right):
            return True
        reason = "its bits differ" if kind.is_exact else "its numbers differ"
    except TRIAL_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
    log.debug("%s is computed by its own code: %s", own.__name__, reason)
    layer.__class__ = own
    layer.__dict__.pop("weft_plan", None)
    return False


@functools.cache
def _with(mixin: type, own: type) -> type:
    return type(f"Fused{own.__name__}", (mixin, own), {})


def _attention_plan(block: Any) -> BlockPlan | None:
    if "self_attn" not in block or (mixer := _attention_mixer(block.self_attn)) is None:
        return None
    attention = block.self_attn
    parts = [attention.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    return _plan_around(block, mixer, attention.o_proj, [part for part in parts if part is not None])


def _delta_plan(block: Any) -> BlockPlan | None:
    if "linear_attn" not in block or (mixer := delta_mixer(block.linear_attn)) is None:
        return None
    return _plan_around(block, mixer, block.linear_attn.out_proj, [block.linear_attn])


def _plan_around(block: Any, mixer: Mixer, output: Any, parts: list[Any]) -> BlockPlan | None:
    """Return the plan of a decoder layer with this mixer, whose parameters are those of `parts`; None for other layers."""
    if not all(name in block for name in ("input_layernorm", "post_attention_layernorm", "mlp")):
        return None
    norms = [block.input_layernorm, block.post_attention_layernorm]
    is_known = all(isinstance(norm, FusedRMSNorm) for norm in norms) and isinstance(output, KeptLinear)
    if not is_known or not _is_all(block, [*parts, *norms, block.mlp]):
        return None
    return BlockPlan(norm_of(norms[0]), mixer, [weights_of(output)], norm_of(norms[1]), _mlp_plan(block.mlp))


def _attention_mixer(attention: Any) -> AttentionMixer | None:
    projections = [attention.get(f"{name}_proj") for name in "qkvo"]
    head_norms = [attention.get("q_norm"), attention.get("k_norm")]
    if not all(isinstance(one, KeptLinear) for one in projections):
        return None
    if not all(isinstance(norm, FusedRMSNorm) for norm in head_norms if norm is not None):
        return None
    if not isinstance(rope := attention.get("rope"), FusedRotation):
        return None
    num_heads, num_kv_heads = (
        next(getattr(attention, name) for name in names if hasattr(attention, name)) for names in (HEADS, KV_HEADS)
    )
    joint = [weights_of(projection) for projection in projections[:3]]
    dim = weights_of(projections[3]).num_inputs // num_heads
    is_gated = joint[0].num_outputs == 2 * num_heads * dim
    q_norm, k_norm = (None if norm is None else norm_of(norm) for norm in head_norms)
    layout = (num_heads, num_kv_heads, dim, attention.scale, rope.traditional)  # type: ignore[attr-defined]
    heads = ops.Heads(*layout, q_norm=q_norm, k_norm=k_norm, is_gated=is_gated)
    return AttentionMixer(joint, heads, num_kv_heads, dim, rope)


def _mlp_plan(mlp: Any) -> MLPWeights | None:
    projections = [mlp.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(one, KeptLinear) for one in projections) or not _is_all(mlp, projections):
        return None
    if any("bias" in one for one in projections[:2]):
        return None
    gate, up, down = (weights_of(one) for one in projections)
    return gate, up, [down]


def _experts_plan(layer: Any) -> "tuple[ops.Weights, ops.Weights, ops.Weights] | None":
    if type(layer) is not switch_layers.SwitchGLU or any("bias" in layer[name] for name in ("gate_proj", "up_proj")):
        return None
    gate, up, down = (weights_of(layer[name]) for name in ("gate_proj", "up_proj", "down_proj"))
    return gate, up, down


def _is_all(layer: nn.Module, known: list[Any]) -> bool:
    """Whether a layer has no other parameters than these parts of it."""
    of_known = {id(array) for part in known for _, array in tree_flatten(part.parameters())}
    return {id(array) for _, array in tree_flatten(layer.parameters())} == of_known


def _noise(shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(7))


def _trial_attention(block: Any) -> list[mx.array]:
    cache, found = KVCache(), []
    for tokens in TRIAL_TOKENS:
        x = _noise((1, tokens, block.input_layernorm.weight.shape[0]))
        found.append(block(x, "causal" if tokens > 1 else None, cache))
    mx.eval(found, cache.keys, cache.values)  # sync: at load
    return [*found, *cache.keys_and_values()]


def _trial_delta(block: Any) -> list[mx.array]:
    cache, found = ArraysCache(2), []
    for tokens in TRIAL_TOKENS:
        found.append(block(_noise((1, tokens, block.input_layernorm.weight.shape[0])), None, cache))
    mx.eval(found, *cache.cache)  # sync: at load
    return [*found, *cache.cache]


def _trial_mlp(mlp: Any) -> list[mx.array]:
    return [mlp(_noise((1, tokens, weights_of(mlp.gate_proj).num_inputs))) for tokens in TRIAL_TOKENS]


def _trial_experts(layer: Any) -> list[mx.array]:
    indices = mx.array([[[0, layer.gate_proj.num_experts - 1]] * 40], mx.uint32)
    return [layer(_noise((1, tokens, layer.gate_proj.input_dims)), indices[:, :tokens]) for tokens in (1, 3, 40)]
