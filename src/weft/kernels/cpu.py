"""Fused softmax, SiLU, RMSNorm, RoPE and recurrences for CPUs (weft's own operations), and the layers that use them.

MLX has up to twenty small operations for each there. Where weft's are not there (`primitives`), mlx's own run.
"""

import functools
import math
from collections import deque
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations
from mlx_lm.models.rope_utils import Llama3RoPE

from weft.kernels import modules_behind, packed, primitives
from weft.kernels.primitives import ops
from weft.memory.positions import current_notes

LANES, STATE_ROWS = 16, 4  # as in native/weft.h: numbers are read in lanes, and rows of a state are taken four at a time


def attention_weights(queries: mx.array, keys: mx.array, mask: mx.array | str | None, tokens: int) -> mx.array:
    """Fused softmax(queries @ keysᵀ), (…, heads · tokens, dim) by (…, span, dim); `mask`: additive bias, "causal" or None."""
    bias = mask if isinstance(mask, mx.array) else None
    return ops.attention_weights(queries, keys, bias, tokens if isinstance(mask, str) else 0)


def rotate(x: mx.array, angles: mx.array, *, is_traditional: bool) -> mx.array:
    """Apply RoPE to the first dims of x (B, heads, T, dim), fused; `angles` (B or 1, 1, T, dims): cosines, then sines."""
    # is_traditional: the numbers of a pair are neighbours, else half of the rotated numbers apart
    return ops.rotate(x, angles, is_traditional)


class Recurred(NamedTuple):
    """What a recurrence over T tokens gives: outputs (B, T, H, V), the last state (B, H, V, K), all states (B, T, H, V, K)."""

    output: mx.array
    last: mx.array
    states: mx.array | None  # after each token, where they are asked for


def recurrence(
    state: mx.array, value: mx.array, key: mx.array, query: mx.array, gate: mx.array, beta: mx.array | None = None
) -> Recurred:
    """Run a linear recurrence over tokens as one operation, also with the delta rule.

    state (B, H, V, K); of every token value (B, T, H, V), key and query (B, T, H or fewer, K), gate (B, T, H, K or 1), beta
    (B, T, H, 1). Per token: S ← S · gate; u = value, with `beta` under the delta rule beta · (value − S key); S ← S + u keyᵀ;
    output = S query. Tokens are taken one by one, so no bit depends on where a prompt is cut into chunks. The states after
    each token are kept while notes are taken (memory/positions.py).
    """
    height, width = state.shape[2:]
    missing_height, missing_width = -height % STATE_ROWS, -width % LANES
    if missing_height or missing_width:
        state = mx.pad(state, [(0, 0), (0, 0), (0, missing_height), (0, missing_width)])
        value, key, query = _longer(value, missing_height), _longer(key, missing_width), _longer(query, missing_width)
        gate = gate if gate.shape[-1] == 1 else _longer(gate, missing_width)
    keeps_states = current_notes() is not None
    output, states = ops.recur(state, value, key, query, gate, beta, keeps_states)
    output, states = output[..., :height], states[..., :height, :width]
    return Recurred(output, states[:, -1], states) if keeps_states else Recurred(output, states, None)


def _longer(x: mx.array, count: int) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, count)])


class RotaryAngles:
    """Memoised cosines and sines for RoPE, computed once for all layers of a step; each model has one."""

    def __init__(self) -> None:  # a model has one or two kinds of positions, asked for by every layer of a step
        self._known: deque[tuple[int | mx.array, mx.array | None, tuple[object, ...], mx.array]] = deque(maxlen=4)
        self._rates: dict[tuple[object, ...], tuple[mx.array, mx.array | None]] = {}

    def at(
        self, offset: int | mx.array, tokens: int, dims: int, base: float | None, scale: float, freqs: mx.array | None
    ) -> mx.array:
        """Return one array (B or 1, 1, T, dims), cosines then sines, for `tokens` positions from each row's offset; memoised."""
        kind = (tokens, dims, base, scale)
        for known, its_freqs, its_kind, angles in self._known:
            is_here = known is offset or (isinstance(known, int) and isinstance(offset, int) and known == offset)
            if is_here and its_freqs is freqs and its_kind == kind:
                return angles
        found = self._compute(offset, tokens, scale, self.rates_of(dims, base, freqs))
        self._known.appendleft((offset, freqs, kind, found))
        return found

    def rates_of(self, dims: int, base: float | None, freqs: mx.array | None) -> mx.array:
        """Return the angle by which each frequency turns from one position to the next, (dims / 2,); made once."""
        kind = (dims, base, None if freqs is None else id(freqs))
        if kind not in self._rates:
            rates = rotary_rates(dims, base or 1.0) if freqs is None else 1.0 / freqs.astype(mx.float32)
            self._rates[kind] = rates, freqs  # held too, or another array might have its id
            mx.eval(rates)  # sync: once for each kind of layer
        return self._rates[kind][0]

    @staticmethod
    def _compute(offset: int | mx.array, tokens: int, scale: float, rates: mx.array) -> mx.array:
        if not has_operations():
            return angles_at(mx.array(offset).reshape(-1, 1, 1, 1) + mx.arange(tokens).reshape(-1, 1), scale, rates)
        offsets = mx.array([offset], mx.int32) if isinstance(offset, int) else offset.reshape(-1).astype(mx.int32)
        return ops.angles_from(offsets, tokens, rates, scale)


def rotary_rates(dims: int, base: float) -> mx.array:
    """Return the angle by which each frequency of RoPE turns from one position to the next, (dims / 2,)."""
    return mx.exp(mx.arange(0, -(dims // 2), -1) * (math.log(base) / (dims // 2)))


def angles_at(places: mx.array, scale: float, rates: mx.array) -> mx.array:
    """Return the cosines, then the sines, of RoPE at these positions."""
    if has_operations():
        return ops.angles(places, rates, scale)
    turns = places * scale * rates
    return mx.concatenate([mx.cos(turns), mx.sin(turns)], axis=-1)


def has_operations() -> bool:
    """Whether weft's own operations are there, and the device is theirs."""
    return primitives.missing is None and mx.default_device() != mx.gpu


@functools.cache
def is_bound(dtype: mx.Dtype) -> bool:
    """Whether weft's own operations compute on this dtype here, found by trying them; cached."""
    if dtype != mx.float32 or not has_operations():
        return False
    queries, keys = mx.arange(12).reshape(1, 3, 4) / 12, mx.arange(20).reshape(1, 5, 4) / 20
    causal = mx.where(mx.arange(5)[None] <= mx.arange(2, 5)[:, None], 0.0, -1e30)
    norm = ops.Norm(queries[0, 0], 0.1)
    rotated = rotate(queries[None], RotaryAngles().at(7, 3, 4, 100.0, 1.0, None), is_traditional=False)
    scores = queries @ keys.swapaxes(-1, -2)
    pairs = [
        (attention_weights(queries, keys, None, 3), mx.softmax(scores, axis=-1)),
        (attention_weights(queries, keys, "causal", 3), mx.softmax(scores + causal, axis=-1)),
        (attention_weights(queries, keys, causal, 3), mx.softmax(scores + causal, axis=-1)),
        (ops.silu(queries - 0.5), (queries - 0.5) * mx.sigmoid(queries - 0.5)),
        (ops.norm(queries, norm), mx.fast.rms_norm(queries, queries[0, 0], 0.1)),
        (rotated, mx.fast.rope(queries[None], 4, traditional=False, base=100.0, scale=1.0, offset=7)),
    ]
    return all(bool(mx.allclose(found, right, atol=1e-5)) for found, right in pairs)


class FusedRMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """An `nn.RMSNorm` that runs as one fused operation where weft's operations are there."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.ndim > 1 and is_bound(x.dtype):
            return ops.norm(x, norm_of(self))
        return super().__call__(x)  # type: ignore[no-any-return]


def norm_of(layer: Any) -> "ops.Norm":
    """Return the weight of an RMSNorm as weft's operations take it, made once for each weight that the layer has."""
    held = layer.__dict__.get("weft_norm")
    if held is None or held[0] is not layer["weight"]:
        held = (layer["weight"], ops.Norm(layer["weight"], layer.eps))
        layer.__dict__["weft_norm"] = held
    found: ops.Norm = held[1]
    return found


class FusedRotation:
    """Mixin of the fused RoPE layers: one operation on x (B, heads, T, dim), with angles shared by all layers of a step."""

    angles: RotaryAngles  # the model's

    def __call__(self: Any, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if x.ndim != 4 or not is_bound(x.dtype):
            return super().__call__(x, offset)  # type: ignore[misc,no-any-return]
        return rotate(x, self.angles_for(offset, x.shape[2]), is_traditional=self.traditional)

    def angles_for(self: Any, offset: int | mx.array, tokens: int) -> mx.array:
        """Return the angles (B or 1, 1, T, dims) of `tokens` positions from each row's offset, cosines then sines."""
        base, scale, freqs = self._kind()
        found: mx.array = self.angles.at(offset, tokens, self.dims, base, scale, freqs)
        return found

    def rates(self: Any) -> tuple[mx.array, float]:
        """Return the angle by which each frequency turns from one position to the next, and what positions are scaled by."""
        base, scale, freqs = self._kind()
        return self.angles.rates_of(self.dims, base, freqs), scale

    def is_like(self: Any, other: "FusedRotation") -> bool:
        """Whether another layer's angles are this one's at every position."""
        base, scale, freqs = self._kind()
        its_base, its_scale, its_freqs = other._kind()
        is_same = freqs is its_freqs or (freqs is not None and its_freqs is not None and bool(mx.array_equal(freqs, its_freqs)))
        return (self.dims, base, scale) == (other.dims, its_base, its_scale) and is_same  # type: ignore[attr-defined]

    def _kind(self: Any) -> tuple[float | None, float, mx.array | None]:
        freqs = getattr(self, "_freqs", None)
        return (self.base, self.scale, None) if freqs is None else (None, 1.0, freqs)


class FusedRoPE(FusedRotation, nn.RoPE):  # type: ignore[misc]
    """An `nn.RoPE` that runs as one fused operation where weft's operations are there."""


class FusedLlama3RoPE(FusedRotation, Llama3RoPE):  # type: ignore[misc]
    """A `Llama3RoPE` (RoPE with scaled frequencies) that runs as one fused operation where weft's operations are there."""


FUSED_LAYERS = {nn.RMSNorm: FusedRMSNorm, nn.RoPE: FusedRoPE, Llama3RoPE: FusedLlama3RoPE}


def silu(x: mx.array) -> mx.array:
    """Compute x · sigmoid(x), fused where weft's operations are there; zero where e^−x overflows, as it should be."""
    return ops.silu(x) if x.ndim > 1 and is_bound(x.dtype) else x / (1.0 + mx.power(math.e, -x))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Compute silu(gate) · x."""
    return silu(gate) * x


def precise_swiglu(like: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Compute silu(gate) · x in float32 and return it in the dtype of `like`."""
    return swiglu(gate.astype(mx.float32), x.astype(mx.float32)).astype(like.dtype)


class NNWithOurSilu(ModuleType):
    """A stand-in for the module `mlx.nn` with weft's silu; every other name is looked up in `mlx.nn`."""

    silu = staticmethod(silu)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)


def bind(model: Any) -> list[str]:
    """Replace layers and functions of a model on a CPU by fused ones; returns the changed modules' names, [] on a GPU.

    Functions that mlx and mlx-lm compile stay uncompiled there: MLX would call the C++ compiler for seconds at the first request
    that needs one, and where there is none that request would fail; compiled they are no faster (docs/log.md).
    """
    if mx.default_device() == mx.gpu:
        return []
    mx.disable_compile()
    packed.bind(model)
    angles = RotaryAngles()
    for layer in model.modules():
        layer.__class__ = FUSED_LAYERS.get(type(layer), type(layer))
        if isinstance(layer, FusedRotation):
            layer.angles = angles
    return [module.__name__ for module in modules_behind(model) if _bind_functions(module)]


def _bind_functions(module: ModuleType) -> bool:
    if module is activations or not module.__name__.startswith("mlx_lm."):
        return False
    found, ours = vars(module), {"swiglu": swiglu, "precise_swiglu": precise_swiglu}
    changed: dict[str, Any] = {name: own for name, own in ours.items() if found.get(name) is getattr(activations, name)}
    if found.get("nn") is nn:
        changed["nn"] = NNWithOurSilu("mlx.nn")
    found.update(changed)
    return bool(changed)
