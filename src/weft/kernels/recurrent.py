"""Mamba 2 and lightning attention on a CPU, token by token in weft's own operation: no bit depends on where a prompt is cut.

mlx-lm computes both in steps of up to 256 tokens, as products of square matrices; `bind` replaces them in a model on a CPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import ssm as stock

from weft.kernels import cpu, cuda, modules_behind
from weft.memory.positions import current_notes, note_states
from weft.memory.transfer import ON_CUDA


def bind(model: nn.Module) -> list[str]:
    """Replace mlx-lm's recurrent functions in a model's modules; returns the modules' names, [] without weft's operations.

    Its convolutions note their input on every device, for steps that go back to an earlier token.
    """
    for layer in model.modules():
        if type(layer) is nn.Conv1d:
            layer.__class__ = NotingConv1d
    if not cpu.is_bound(mx.float32):
        return []
    changed = []
    for module in modules_behind(model):
        names = vars(module)
        if names.get("ssm_update") is stock.ssm_update:
            names["ssm_update"] = ssm_update
            changed.append(module.__name__)
        if callable(original := names.get("recurrent_gla")) and not hasattr(original, "weft_original"):
            names["recurrent_gla"] = lightning_over(original)
            changed.append(module.__name__)
    return changed


class NotingConv1d(nn.Conv1d):  # type: ignore[misc]
    """An `nn.Conv1d` whose input is noted while notes are taken: in a recurrent layer it begins with the layer's state."""

    def __call__(self, x: mx.array) -> mx.array:
        if (notes := current_notes()) is not None:
            notes.note_convolution(x)
        if ON_CUDA and cuda.can_convolve(x, self):
            return cuda.convolve(x, self["weight"])
        return super().__call__(x)  # type: ignore[no-any-return]


def ssm_update(
    hidden_states: mx.array,  # (B, T, H, V)
    log_rate: mx.array,  # (H,)
    key: mx.array,  # (B, T, groups, K)
    query: mx.array,  # (B, T, groups, K)
    skip: mx.array,  # (H,)
    dt: mx.array,  # (B, T, H)
    dt_bias: mx.array,
    state: mx.array | None = None,  # (B, H, V, K)
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Drop-in for mlx-lm's function, to which padded rows are left."""
    if mask is not None or lengths is not None:
        arguments = (hidden_states, log_rate, key, query, skip, dt, dt_bias, state, time_step_limit)
        return stock.ssm_update(*arguments, mask=mask, lengths=lengths)  # type: ignore[no-any-return]
    (rows, _, heads, height), width = hidden_states.shape, key.shape[3]
    if state is None:
        state = mx.zeros((rows, heads, height, width))
    x = hidden_states.astype(mx.float32)
    seconds = mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), *time_step_limit)
    gate = mx.exp(seconds * -mx.exp(log_rate.astype(mx.float32)))
    key, query = key.astype(mx.float32), query.astype(mx.float32)
    found = cpu.recurrence(state.astype(mx.float32), x * seconds[..., None], key, query, gate[..., None])
    note_states(found.last, found.states)
    output = found.output + x * skip[:, None]
    return output.astype(hidden_states.dtype), found.last


def lightning_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's `recurrent_gla`, lightning attention with one gate per head; padded rows are left to it."""

    @functools.wraps(original)
    def recurrent_gla(
        q: mx.array,  # (B, H, T, K)
        k: mx.array,
        v: mx.array,  # (B, H, T, V)
        g: mx.array,  # (H,), logarithms of the gates
        *,
        scale: float,
        h: mx.array | None = None,  # (B, H, K, V)
        mask: mx.array | None = None,
        **options: Any,
    ) -> tuple[mx.array, mx.array]:
        if mask is not None:
            return original(q, k, v, g, scale=scale, h=h, mask=mask, **options)  # type: ignore[no-any-return]
        (rows, heads, tokens, width), height = q.shape, v.shape[-1]
        state = mx.zeros((rows, heads, height, width)) if h is None else h.astype(mx.float32).swapaxes(-1, -2)
        gate = mx.broadcast_to(mx.exp(g.astype(mx.float32))[None, None, :, None], (rows, tokens, heads, 1))
        value, key, query = (array.astype(mx.float32).swapaxes(1, 2) for array in (v, k, q * scale))
        found = cpu.recurrence(state, value, key, query, gate)
        last = found.last.swapaxes(-1, -2)
        note_states(last, None if found.states is None else found.states.swapaxes(-1, -2))
        return found.output.swapaxes(1, 2).astype(q.dtype), last

    recurrent_gla.weft_original = original  # type: ignore[attr-defined]
    return recurrent_gla
