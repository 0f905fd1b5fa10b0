"""The gated delta rule, by tokens and in chunks, against the rule as it is written, in float64, and against mlx-lm's models."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as stock
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from weft.kernels import gated_delta
from weft.kernels.gated_delta import bind, gated_delta_rule, gated_delta_update, skip_tokens

# Largest error over the largest number of the right answer. mlx-lm's own loop in float32 is at 2e-7 for ordinary
# numbers; keys that repeat while each write turns the state over (beta = 2, no fading) cost it 4e-6 and us 1e-4.
ORDINARY, EXTREME = 2e-6, 2e-4
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear", "kimi_k3", "bailing_moe_v3")


class Tokens(NamedTuple):
    """Arguments of the rule, in their order."""

    query: mx.array
    key: mx.array
    value: mx.array
    gate: mx.array
    beta: mx.array
    state: mx.array

    def between(self, start: int, stop: int) -> "Tokens":
        return Tokens(*(array[:, start:stop] for array in self[:-1]), self.state)

    def row(self, index: int) -> "Tokens":
        return Tokens(*(array[index : index + 1] for array in self))


@pytest.fixture(autouse=True, params=["by token", "in chunks"])
def _on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    if request.param == "in chunks":
        monkeypatch.setattr(gated_delta, "_goes_by_token", lambda: False)
    else:
        assert gated_delta._goes_by_token()
    yield
    mx.set_default_device(before)


@pytest.fixture(autouse=True)
def _stock_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins and ends with mlx-lm's own function in its modules."""
    for family in FAMILIES:
        module = importlib.import_module(f"mlx_lm.models.{family}")
        if hasattr(module, "gated_delta_update"):
            monkeypatch.setattr(module, "gated_delta_update", stock.gated_delta_update)


def make_tokens(length: int, rows: int = 1, vector: bool = False, seed: int = 0) -> Tokens:
    """Two key heads of 32, four value heads of 16, gates between 0.1 and 1, keys of length one."""
    rng = np.random.default_rng(seed)

    def directions(*shape: int) -> np.ndarray:
        array = rng.standard_normal(shape)
        return array / np.linalg.norm(array, axis=-1, keepdims=True)

    arrays = (
        directions(rows, length, 2, 32),
        directions(rows, length, 2, 32),
        rng.standard_normal((rows, length, 4, 16)),
        rng.uniform(0.1, 1, (rows, length, 4, 32) if vector else (rows, length, 4)),
        rng.uniform(0, 1, (rows, length, 4)),
        rng.standard_normal((rows, 4, 16, 32)),
    )
    return Tokens(*(mx.array(array.astype(np.float32)) for array in arrays))


def as_written(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """The rule token by token in float64."""
    query, key, value, gate, beta, state = (np.array(array.astype(mx.float32), np.float64) for array in tokens)
    query, key = np.repeat(query, 2, axis=2), np.repeat(key, 2, axis=2)
    outputs = []
    for at in range(key.shape[1]):
        state = state * (gate[:, at, :, None] if gate.ndim == 4 else gate[:, at, :, None, None])
        write = beta[:, at, :, None] * (value[:, at] - np.einsum("bhvk,bhk->bhv", state, key[:, at]))
        state = state + np.einsum("bhv,bhk->bhvk", write, key[:, at])
        outputs.append(np.einsum("bhvk,bhk->bhv", state, query[:, at]))
    return np.stack(outputs, axis=1), state


def worst_error(got: tuple[mx.array, mx.array], right: tuple[np.ndarray, np.ndarray]) -> float:
    """The larger of the two errors (outputs, state), each relative to the largest number there."""
    errors = [np.abs(np.array(a) - b).max() / max(np.abs(b).max(), 1e-30) for a, b in zip(got, right, strict=True)]
    return float(np.max(errors))  # np.max, for it does not lose a NaN


def are_equal(first: tuple[mx.array, mx.array], second: tuple[mx.array, mx.array]) -> bool:
    """Bit for bit."""
    return all(mx.array_equal(a, b).item() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 31, 32, 33, 64, 100, 257])
def test_any_length_gives_what_the_rule_says(length: int, vector: bool) -> None:
    tokens = make_tokens(length, vector=vector)

    assert worst_error(gated_delta_rule(*tokens), as_written(tokens)) < ORDINARY


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("vector", [False, True])
def test_the_way_of_a_gpu_gives_what_the_rule_says(size: int, vector: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "_on_cpu", lambda: False)
    monkeypatch.setattr(gated_delta, "_chunk_size", lambda _tokens: size)
    tokens = make_tokens(200, vector=vector)

    assert worst_error(gated_delta_rule(*tokens), as_written(tokens)) < ORDINARY


GATES: dict[str, Callable[[tuple[int, ...]], np.ndarray]] = {
    "open": np.ones,
    "shut": np.zeros,
    "nearly shut": lambda shape: np.full(shape, np.exp(-30.0)),
    "nearly open": lambda shape: np.full(shape, np.exp(-1e-3)),
    "open or nearly shut": lambda shape: np.where(np.random.default_rng(1).random(shape) < 0.3, np.exp(-30.0), 0.99),
    "of every size": lambda shape: np.exp(-np.exp(np.random.default_rng(2).uniform(-8, 5, shape))),
}


@pytest.mark.parametrize("alike", [False, True], ids=["any keys", "one key"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("vector", [False, True])
def test_extreme_gates_and_betas_stay_exact(vector: bool, gates: str, beta: float, alike: bool) -> None:
    tokens = make_tokens(131, vector=vector)
    tokens = tokens._replace(
        key=mx.broadcast_to(tokens.key[:, :1], tokens.key.shape) if alike else tokens.key,
        gate=mx.array(GATES[gates](tokens.gate.shape).astype(np.float32)),
        beta=mx.full(tokens.beta.shape, beta),
    )

    tolerance = EXTREME if beta == 2.0 else ORDINARY
    assert worst_error(gated_delta_rule(*tokens), as_written(tokens)) < tolerance


def test_the_inverse_by_doubling_survives_keys_that_are_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "_on_cpu", lambda: False)
    lower = mx.tril(mx.ones((128, 128)), -1)

    inverse = gated_delta._inverse_of_one_plus(lower)

    right = np.eye(128) - np.eye(128, k=-1)
    assert np.abs(np.array(inverse) - right).max() == 0


def test_equal_gates_over_the_key_are_one_gate_for_the_head() -> None:
    tokens = make_tokens(70)
    spread = mx.broadcast_to(tokens.gate[..., None], (*tokens.gate.shape, 32))

    right = tuple(np.array(array) for array in gated_delta_rule(*tokens))
    assert worst_error(gated_delta_rule(*tokens._replace(gate=spread)), right) < ORDINARY


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 199), max_size=6, unique=True).map(sorted), vector=st.booleans())
def test_a_prompt_in_pieces_gives_what_the_whole_gives(cuts: list[int], vector: bool) -> None:
    tokens = make_tokens(200, vector=vector)
    outputs, state = [], tokens.state
    for start, stop in zip([0, *cuts], [*cuts, 200], strict=True):
        output, state = gated_delta_rule(*tokens._replace(state=state).between(start, stop))
        outputs.append(output)

    whole = tuple(np.array(array) for array in gated_delta_rule(*tokens))
    assert worst_error((mx.concatenate(outputs, axis=1), state), whole) < ORDINARY


@pytest.mark.parametrize("vector", [False, True])
def test_pieces_of_whole_chunks_give_the_same_bits(vector: bool) -> None:
    tokens = make_tokens(150, vector=vector)
    first, state = gated_delta_rule(*tokens.between(0, 96))
    second, state = gated_delta_rule(*tokens._replace(state=state).between(96, 150))

    assert are_equal((mx.concatenate([first, second], axis=1), state), gated_delta_rule(*tokens))


@pytest.mark.parametrize("length", [1, 3, 75])
@pytest.mark.parametrize("vector", [False, True])
def test_a_row_among_others_gets_the_same_bits_as_alone(length: int, vector: bool) -> None:
    tokens = make_tokens(length, rows=3, vector=vector)
    outputs, states = gated_delta_rule(*tokens)

    for row in range(3):
        assert are_equal(gated_delta_rule(*tokens.row(row)), (outputs[row : row + 1], states[row : row + 1]))


@pytest.mark.parametrize("length", [1, 4, 40])
@pytest.mark.parametrize("vector", [False, True])
def test_masked_tokens_leave_the_state_alone(length: int, vector: bool) -> None:
    tokens = make_tokens(length + 3, rows=2, vector=vector)
    mask = mx.array([[False] * 3 + [True] * length, [True] * length + [False] * 3])
    gate, beta = skip_tokens(tokens.gate, tokens.beta, mask)
    output, state = gated_delta_rule(*tokens._replace(gate=gate, beta=beta))

    for row, start in enumerate((3, 0)):
        right = as_written(tokens.row(row).between(start, start + length))
        assert worst_error((output[row, start : start + length][None], state[row][None]), right) < ORDINARY


@pytest.mark.parametrize("length", [1, 50])
def test_half_precision_goes_in_and_out_around_a_float32_state(length: int) -> None:
    tokens = make_tokens(length)
    halves = Tokens(*(array.astype(mx.bfloat16) for array in tokens[:3]), *tokens[3:])
    output, state = gated_delta_rule(*halves)

    assert (output.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    assert worst_error((output.astype(mx.float32), state), as_written(halves)) < 4e-3  # half a unit in the last place


def test_without_a_state_it_starts_from_nothing() -> None:
    tokens = make_tokens(40)

    nothing = tokens._replace(state=mx.zeros(tokens.state.shape))
    assert are_equal(gated_delta_rule(*tokens[:-1]), gated_delta_rule(*nothing))


class Projections(NamedTuple):
    """Arguments of mlx-lm's update between the value and the state, in their order."""

    fading: mx.array
    writing: mx.array
    log_rate: mx.array
    bias: mx.array


def make_projections(tokens: Tokens) -> Projections:
    """What a layer would compute its gates and betas from."""
    vector = tokens.gate.ndim == 4
    log_rate = mx.array([-1.0, 0.5, 1.0, 2.5])
    return Projections(
        fading=3 * mx.random.normal(tokens.gate.shape, key=mx.random.key(1)),
        writing=3 * mx.random.normal(tokens.beta.shape, key=mx.random.key(2)),
        log_rate=log_rate[:, None] if vector else log_rate,
        bias=mx.random.normal((4, 32) if vector else (4,), key=mx.random.key(3)),
    )


OPTIONS = pytest.mark.parametrize("options", [{}, {"lower_bound": -5.0}, {"allow_neg_eigval": True}], ids=str)


@OPTIONS
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("length", [1, 40])
def test_projections_mean_what_they_mean_to_mlx_lm(length: int, vector: bool, options: dict[str, float]) -> None:
    tokens = make_tokens(length, rows=2, vector=vector)
    arguments = (*tokens[:3], *make_projections(tokens), tokens.state)

    right = tuple(np.array(array) for array in stock.gated_delta_update(*arguments, use_kernel=False, **options))
    assert worst_error(gated_delta_update(*arguments, **options), right) < ORDINARY


@OPTIONS
def test_a_gpu_takes_few_tokens_in_the_steps_of_mlx_lm(options: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "_on_cpu", lambda: False)
    tokens = make_tokens(gated_delta.MAX_STEPS_ON_GPU)
    arguments = (*tokens[:3], *make_projections(tokens), tokens.state)

    assert are_equal(gated_delta_update(*arguments, **options), stock.gated_delta_update(*arguments, **options))


def logits_of(model: nn.Module) -> mx.array:
    """A prompt in two unequal pieces, then two single tokens."""
    cache = make_prompt_cache(model)
    ids = mx.array(np.random.default_rng(3).integers(0, 128, (1, 80)))
    pieces = [model(ids[:, start:stop], cache=cache) for start, stop in ((0, 45), (45, 78), (78, 79), (79, 80))]
    return mx.concatenate(pieces, axis=1).astype(mx.float32)


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal the models keep mlx-lm's kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bound_model_answers_like_mlx_lm(family: str, checkpoint: Callable[[str], Path]) -> None:
    model, _ = load_model(checkpoint(family))
    right = logits_of(model)
    bound = bind(model)
    got = logits_of(model)

    assert f"mlx_lm.models.{family.removesuffix('_moe')}" in bound
    assert all(sys.modules[name].gated_delta_update is gated_delta_update for name in bound)
    assert not mx.array_equal(got, right).item()  # ours has run: other roundings
    assert mx.abs(got - right).max().item() < 1e-4 * mx.abs(right).max().item()


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal the models keep mlx-lm's kernels")
def test_binding_twice_is_binding_once(checkpoint: Callable[[str], Path]) -> None:
    model, _ = load_model(checkpoint("qwen3_5"))

    first = bind(model)

    assert "mlx_lm.models.qwen3_5" in first
    assert bind(model) == first


def test_a_model_without_the_rule_is_left_alone(checkpoint: Callable[[str], Path]) -> None:
    model, _ = load_model(checkpoint("llama"))

    assert bind(model) == []


@pytest.mark.skipif(mx.metal.is_available(), reason="with Metal the models keep mlx-lm's kernels")
def test_a_layer_that_inherits_the_rule_is_bound_where_it_was_written(checkpoint: Callable[[str], Path]) -> None:
    class Heir(qwen3_5.GatedDeltaNet):
        pass

    model, _ = load_model(checkpoint("qwen3_5"))
    layer = next(layer for layer in model.modules() if isinstance(layer, qwen3_5.GatedDeltaNet))
    layer.__class__ = Heir

    assert "mlx_lm.models.qwen3_5" in bind(layer)
