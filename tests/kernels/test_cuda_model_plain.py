"""Fused steps of whole models with plain operations in place of the kernels: what mlx-lm's own layers compute, in float32."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from test_cuda_layers import LLAMA, QWEN, QWEN3, PlainKernels, model_of, steps

from emulation.plain import PlainPages
from weft.kernels import cuda_layers, cuda_model, cuda_product
from weft.kernels.cuda_paged import DeltaArrays, DeltaKind, HeadsLayout
from weft.kernels.cuda_product import Weight
from weft.kernels.cuda_sizes import ProductEnding
from weft.memory.paged_views import PagedView, SlottedView, make_batches
from weft.memory.pages import PAGE, PagedPool, StepTable
from weft.memory.slabs import RowState
from weft.memory.spec import FullAttention, KeyValues, Plane, Recurrent
from weft.memory.views import StepSpan


class PlainStepKernels(cuda_model.StepKernels):
    """The operations of a step in mlx's own; memory changes in place."""

    product_in_parts = staticmethod(PlainKernels.product)
    add_norm = staticmethod(PlainKernels.add_norm)

    @staticmethod
    def embed(tokens: mx.array, weight: Weight) -> mx.array:
        if weight.scales is None:
            return weight.array[tokens]
        group = weight.array.shape[1] * 32 // weight.bits // weight.scales.shape[1]
        return mx.dequantize(weight.array[tokens], weight.scales[tokens], weight.biases[tokens], group, weight.bits)  # type: ignore[index]

    @staticmethod
    def normed_product(
        lines: tuple[mx.array, mx.array],
        norm: tuple[mx.array, float],
        weight: Weight,
        ending: ProductEnding = ProductEnding.PLAIN,
    ) -> tuple[mx.array, mx.array]:
        total, normed = PlainKernels.add_norm(*lines, *norm)
        found = PlainKernels.product(normed, weight)
        if ending is ProductEnding.GATED:
            gate, up = mx.split(found, 2, axis=-1)
            found = nn.silu(gate) * up
        return total, found

    @staticmethod
    def delta_step(
        projected: mx.array,
        arrays: DeltaArrays,
        held: tuple[mx.array, mx.array],
        table: StepTable,
        kind: DeltaKind,
        *,
        keeps_states: bool,
    ) -> tuple[mx.array, mx.array | None]:
        (taps, rate, bias, norm), (layout, eps), (ring, state) = arrays, kind, held
        rows, kept = np.array(table.rows).tolist(), taps.shape[1] - 1
        before = mx.stack([mx.stack([ring[slot, (length - kept + at) % ring.shape[1]] for at in range(kept)])
                           for slot, length, *_ in rows])  # fmt: skip
        spans: Any = None
        mixed, _ = PlainKernels.delta_inputs(projected, before, taps, spans, layout)
        own = mx.stack([state[slot] for slot, *_ in rows])
        by_token = (mixed, mixed, mixed, projected, projected)
        found, last, states = PlainKernels.delta_rule(by_token, (rate, bias, own), spans, layout, keeps_states=keeps_states)
        tokens = projected.shape[0] // len(rows)
        for row, (slot, length, *_) in enumerate(rows):
            state[slot] = last[row]
            for token in range(tokens):
                ring[slot, (length + token) % ring.shape[1]] = projected[row * tokens + token, : ring.shape[2]]
        return PlainKernels.gated_norm(found, projected, ring.shape[2], norm, eps), states

    @staticmethod
    def place_heads(
        projected: mx.array,
        norms: list[mx.array],
        frequencies: mx.array | None,
        held: KeyValues,
        table: StepTable,
        layout: HeadsLayout,
    ) -> mx.array:
        rows, dim, rotation = table.rows.shape[0], layout.dim, layout.rotation
        wide = dim * (2 if layout.is_gated else 1)
        asked, keys, values = mx.split(projected, [layout.heads * wide, layout.heads * wide + layout.key_heads * dim], axis=1)
        asked = asked.reshape(rows, -1, layout.heads, wide)[..., :dim]
        keys, values = (one.reshape(rows, -1, layout.key_heads, dim) for one in (keys, values))
        if norms:
            asked, keys = (
                mx.fast.rms_norm(one, *norm) for one, norm in zip((asked, keys), zip(norms, layout.eps, strict=True), strict=True)
            )
        base = None if frequencies is not None else 2.0**rotation.base
        options = {"traditional": rotation.is_traditional, "base": base, "scale": rotation.scale, "freqs": frequencies}
        turned = [
            mx.fast.rope(one.transpose(0, 2, 1, 3), rotation.rotated, offset=table.rows[:, 2], **options) for one in (asked, keys)
        ]
        PlainPages().place_tokens(turned[1], values.transpose(0, 2, 1, 3), held, table)
        return turned[0].transpose(0, 2, 1, 3).reshape(-1, layout.heads, dim)

    @staticmethod
    def attend(
        queries: mx.array, after: mx.array, held: KeyValues, table: StepTable, scale: float, gates: mx.array | None = None
    ) -> mx.array:
        assert after is queries
        entries, found = np.array(table.pages)[:, 1].tolist(), []
        tokens, heads, dim = queries.shape[0] // table.rows.shape[0], *queries.shape[1:]
        for row, (_, length, _, first) in enumerate(np.array(table.rows).tolist()):
            own = entries[first : first + -(-(length + tokens) // PAGE)]
            planes = [mx.concatenate([plane[page] for page in own], axis=1)[None] for plane in (held.keys, held.values)]
            for token in range(tokens):
                keys, values = (plane[:, :, : length + token + 1] for plane in planes)
                line = queries[row * tokens + token][None, :, None]
                found.append(mx.fast.scaled_dot_product_attention(line, keys, values, scale=scale)[0, :, 0])
        output = mx.stack(found)
        if gates is None:
            return output
        return output * mx.sigmoid(gates[:, : 2 * heads * dim].reshape(-1, heads, 2, dim)[:, :, 1])


@pytest.fixture(autouse=True)
def float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits rounding would hide a fault."""
    monkeypatch.setattr(cuda_product, "can_multiply", lambda *_: True)


def pool_of(caches: list[Any], step: cuda_model.ModelStep) -> tuple[PagedPool, list[Any]]:
    """A pool for rows with the geometry of these caches, and what the caches hold."""
    contents: list[Any] = []
    specs: list[Any] = []
    for cache in caches:
        if isinstance(cache, ArraysCache):
            contents.append(tuple(cache.cache))
            specs.append(Recurrent(tuple((tuple(array.shape[1:]), array.dtype) for array in cache.cache)))
        else:
            keys, values = (array[..., : cache.offset, :] for array in (cache.keys, cache.values))
            contents.append(KeyValues(keys, values))
            plane = Plane(keys.shape[1], keys.shape[3], keys.dtype)
            specs.append(FullAttention(plane, plane))
    return PagedPool(specs, step.slotted, PlainPages()), contents


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("config", [QWEN, LLAMA, QWEN3], ids=lambda config: config["model_type"])
def test_fused_steps_are_the_steps_of_the_plain_layers(config: dict[str, Any], bits: int) -> None:
    model, prompt, tokens = model_of(config, bits), list(range(1, 20)), [[5], [9], [2, 3, 4], [7]]
    caches = make_prompt_cache(model)
    steps(model, caches, [prompt])
    plain = steps(model, copy.deepcopy(caches), tokens)

    cuda_layers.bind_steps(model, PlainKernels, PlainKernels)
    step = cuda_model.bind_model(model, PlainStepKernels, compiled=lambda function: function)
    assert step is not None
    pool, contents = pool_of(caches, step)
    row, other = RowState(), RowState()
    for state in (other, row):
        pool.allocate(state, contents, len(prompt))
    found = []
    for own in tokens:
        (batch,) = make_batches(pool, [row], seam=True, width=None, span=StepSpan(len(own)))
        views = [(SlottedView if layer in step.slotted else PagedView)(batch, layer) for layer in range(len(contents))]  # type: ignore[arg-type]
        found.append(np.array(model(mx.array([own]), cache=views)))
        batch.keep([len(own)])

    for right, one in zip(plain, found, strict=True):
        assert np.abs(right - one).max() < 1e-4 * (right.max() - right.min())
