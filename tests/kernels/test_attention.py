"""What models are made of on CPU: our product's way and the one written out give what the definition gives."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

import weft.kernels.blas
from weft.kernels import attention, cpu
from weft.kernels.cpu import swiglu
from weft.memory.slabs import Pool, RowState
from weft.memory.spec import FullAttention, KeyValues, Plane
from weft.memory.views import KeyValueView, make_batches

MASKS = ["causal", "none", "numbers", "one for each head"]


def by_definition(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None) -> mx.array:
    repeats = queries.shape[1] // keys.shape[1]
    keys, values = mx.repeat(keys, repeats, axis=1), mx.repeat(values, repeats, axis=1)
    scores = queries @ keys.swapaxes(-1, -2)
    return mx.softmax(scores if mask is None else scores + mask, axis=-1) @ values


@pytest.fixture(params=["fused", "written out"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways, where there are both."""
    is_fused = request.param == "fused"
    if is_fused and not cpu.is_bound(mx.float32):
        pytest.skip("the product that MLX calls here is not ours")
    monkeypatch.setattr(cpu, "is_bound", lambda _: is_fused)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("kind", MASKS)
def test_attention_is_what_its_definition_says(kind: str) -> None:
    for heads, groups, tokens, span in [(6, 2, 5, 40), (4, 4, 3, 3), (8, 1, 1, 17)]:
        queries, keys = mx.random.normal((1, heads, tokens, 16)), mx.random.normal((1, groups, span, 16))
        values = mx.random.normal((1, groups, span, 8))
        causal = mx.where(mx.arange(span)[None] <= mx.arange(span - tokens, span)[:, None], 0.0, -1e30)
        shape = (1, heads, tokens, span) if kind == "one for each head" else (1, 1, tokens, span)
        numbers = {"causal": causal, "none": None}.get(kind, mx.random.normal(shape))
        if tokens == 1 and kind == "one for each head":
            continue  # a step's rows have no mask of their own for each head

        found = attention.grouped_attention(queries, keys, values, 0.5, "causal" if kind == "causal" else numbers)

        assert mx.allclose(found, by_definition(queries * 0.5, keys, values, numbers), atol=1e-4)


def test_where_slots_lie_empty_between_rows_each_row_attends_to_its_own_tokens() -> None:
    plane, lengths = Plane(2, 8, mx.float32), (3, 5, 9, 4)
    pool = Pool([FullAttention(plane, plane)], slab_tokens=256, max_rows=4)
    rows, held = [RowState() for _ in lengths], [mx.random.normal((1, 2, length, 8)) for length in lengths]
    for row, length, tokens in zip(rows, lengths, held, strict=True):
        pool.allocate(row, [KeyValues(tokens, -tokens)], length, upcoming=lengths)
    pool.free(rows[1])
    left = [0, 2, 3]
    (batch,) = make_batches(pool, [rows[index] for index in left], seam=True, width=None)
    queries, new = mx.random.normal((3, 4, 1, 8)), mx.random.normal((3, 2, 1, 8))

    view = KeyValueView(batch, 0)
    view.update_and_fetch(new, -new)
    found = attention.attend(queries, view, 0.5, None)

    assert [row.slot for row in batch.parts[0].rows] == left
    for place, index in enumerate(left):
        keys = mx.concatenate([held[index], new[place][None]], axis=2)
        assert mx.allclose(found[place], by_definition(queries[place][None] * 0.5, keys, -keys, None)[0], atol=1e-5)


@pytest.mark.usefixtures("way")
def test_the_gate_of_an_mlp_is_what_its_definition_says() -> None:
    gate = mx.concatenate([mx.random.normal((1, 3, 21)) * 20, mx.array([[[0.0, -0.0, 300.0, -300.0]] * 3])], axis=-1)
    x = mx.random.normal(gate.shape)

    assert mx.allclose(swiglu(gate, x), gate * mx.sigmoid(gate) * x, atol=1e-4)
    assert mx.isnan(swiglu(mx.array([[mx.nan, 1.0]]), mx.ones((1, 2)))).tolist() == [[True, False]]


def test_what_our_product_can_do_is_used_where_it_is_bound() -> None:
    if weft.kernels.blas.already_bound().name != "weft+openblas":
        pytest.skip("the product that MLX calls here is not ours")

    assert cpu.is_bound(mx.float32)
    assert not cpu.is_bound(mx.bfloat16)


@pytest.mark.usefixtures("way")
def test_norms_and_positions_are_what_mlx_says() -> None:
    norm, plain = cpu.FusedRMSNorm(40, eps=1e-3), nn.RMSNorm(40, eps=1e-3)
    norm.weight = plain.weight = mx.random.normal((40,))
    x = mx.random.normal((2, 3, 40))
    assert mx.allclose(norm(x), plain(x), atol=1e-5)

    for traditional in (True, False):
        ours, theirs = cpu.FusedRoPE(16, traditional, 500.0, 0.5), nn.RoPE(16, traditional, 500.0, 0.5)
        ours.angles = cpu.RotaryAngles()
        for rows, tokens, offset in [(1, 5, 0), (1, 5, 1000), (3, 1, mx.array([7, 0, 300])), (3, 1, mx.array([8, 1, 301]))]:
            heads = mx.random.normal((rows, 4, tokens, 24))  # of which eight are left as they are
            assert mx.allclose(ours(heads, offset), theirs(heads, offset), atol=1e-5)


def test_angles_of_one_model_are_not_given_to_another() -> None:
    angles, slow, fast = cpu.RotaryAngles(), mx.array([10.0, 100.0]), mx.array([1.0, 2.0])

    first, second = (angles.at(3, 2, 4, None, 1.0, freqs) for freqs in (slow, fast))

    assert not mx.allclose(first, second)
    assert angles.at(3, 2, 4, None, 1.0, slow) is first


def test_the_layers_of_a_model_share_their_angles_and_two_models_do_not() -> None:
    models = [nn.Sequential(nn.RoPE(16), nn.RMSNorm(16), nn.RoPE(16)) for _ in range(2)]
    for model in models:
        cpu.bind(model)

    (first, norm, second), (other, *_) = (model.layers for model in models)
    assert (type(first), type(norm)) == (cpu.FusedRoPE, cpu.FusedRMSNorm)
    assert first.angles is second.angles
    assert first.angles is not other.angles
