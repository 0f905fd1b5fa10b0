"""The zoo is worth testing against: its checkpoints load as saved, think with every layer, and do not stick."""

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

from zoo import ABSENT, ARCHITECTURES, EXAMINED, PACKED, PROMISED, VOCABULARY, greedy, is_in_mlx_lm, make_checkpoint

Checkpoint = Callable[[str], Path]
Load = Callable[[str], nn.Module]
Run = Callable[[str], mx.array]
each_architecture = pytest.mark.parametrize("name", [name for name in EXAMINED if name not in PACKED])

# fmt: off
# Families whose first layer keeps a state that is not just the last few tokens.
RECURRENT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "kimi_k3", "bailing_moe_v3", "bailing_hybrid",
    "bailing_moe_linear", "nemotron_h", "falcon_h1", "granitemoehybrid", "mamba", "falcon_mamba", "mamba2", "jamba",
    "plamo2", "rwkv7", "recurrent_gemma",
)
# fmt: on


def _random_tokens(count: int, length: int) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(0, VOCABULARY, (count, length)))


# Three random prompts, and the first once more with another token near its start.
PROMPTS = _random_tokens(4, 48)
PROMPTS[3] = PROMPTS[0]
PROMPTS[3, 1] = (PROMPTS[0, 1] + 17) % VOCABULARY


@pytest.fixture(scope="module")
def load(checkpoint: Checkpoint) -> Load:
    """A function from an architecture's name to its model, loaded once for this file."""
    return functools.cache(lambda name: load_model(checkpoint(name), strict=True)[0])


@pytest.fixture(scope="module")
def run(load: Load) -> Run:
    """A function from an architecture's name to its logits (24, B, V) for 24 greedy steps after each of PROMPTS."""
    return functools.cache(lambda name: _decode(load(name), PROMPTS, 24))


def test_the_zoo_has_the_families_weft_promises() -> None:
    assert set(PROMISED) <= ARCHITECTURES.keys()


def test_mlx_lm_has_every_architecture_of_the_zoo() -> None:
    assert [name for name in ARCHITECTURES if not is_in_mlx_lm(name)] == []  # what it lacks, other tests skip


def test_every_model_file_of_mlx_lm_is_in_the_zoo_or_excused() -> None:
    files = {path.stem for path in Path(mlx_lm.models.__path__[0]).glob("*.py") if _defines_model(path)}

    present = [config for name, config in ARCHITECTURES.items() if is_in_mlx_lm(name)]
    housed = {_get_classes(config)[0].__module__.rpartition(".")[2] for config in present}

    assert files - housed - ABSENT.keys() == set()
    assert not housed & ABSENT.keys()


@pytest.mark.parametrize("name", EXAMINED)
def test_loading_gives_back_every_saved_parameter_and_each_is_random(checkpoint: Checkpoint, load: Load, name: str) -> None:
    saved = mx.load(str(checkpoint(name) / "model.safetensors"))

    loaded = dict(tree_flatten(load(name).parameters()))

    assert loaded.keys() == saved.keys()
    assert [path for path in saved if not mx.array_equal(saved[path], loaded[path])] == []
    kinds = {mx.float32, mx.uint32, mx.uint8} if ":" in name else {mx.float32}  # packed weights, and scales of eight bits
    assert {array.dtype for array in saved.values()} <= kinds
    assert ":" not in name or mx.uint32 in {array.dtype for array in saved.values()}
    drawn = [path for path in saved if saved[path].size > 1 and not path.endswith("scales")]
    assert [path for path in drawn if _unique(saved[path]) < 2] == []


@each_architecture
def test_greedy_decoding_wanders_and_stays_finite(run: Run, name: str) -> None:
    logits = run(name)  # (24, B, V)

    tokens = mx.argmax(logits, axis=-1).T.tolist()

    assert mx.all(mx.isfinite(logits))
    assert min(len(set(row)) for row in tokens) >= 2, tokens
    assert len({token for row in tokens for token in row}) >= 16, tokens


@each_architecture
def test_an_early_token_changes_the_next_logits(run: Run, name: str) -> None:
    logits = run(name)[0]

    assert _distance(logits[-1], logits[0]) > 1e-2


@each_architecture
def test_mlx_lm_itself_answers_the_same_in_chunks(load: Load, run: Run, name: str) -> None:
    """Otherwise an architecture could not serve as a reference for any engine that cuts prompts elsewhere."""
    model, prompt = load(name), PROMPTS[:1]
    cache = make_prompt_cache(model)

    for start in range(0, prompt.shape[1] - 1, 9):
        model(prompt[:, :-1][:, start : start + 9], cache=cache)
    logits = model(prompt[:, -1:], cache=cache)[:, -1]

    assert _distance(logits, run(name)[0, :1]) < 1e-4


@each_architecture
def test_every_memory_of_every_layer_matters(load: Load, name: str) -> None:
    """A layer whose memory could be lost unseen would hide the bugs the zoo is there to find."""
    model, prompt = load(name), PROMPTS[:1]
    cache = make_prompt_cache(model)
    model(prompt[:, :-5], cache=cache)

    num_disturbed = _disturb_one_memory_per_row(cache)
    logits = model(mx.repeat(prompt[:, -5:], num_disturbed + 1, axis=0), cache=cache)

    effects = mx.max(mx.abs(logits[:-1] - logits[-1]), axis=(1, 2)) / mx.std(logits[-1])
    assert min(effects.tolist()) > 1e-5, effects.tolist()


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_state_still_holds_what_was_said_a_hundred_tokens_ago(load: Load, name: str) -> None:
    model, prompt = load(name), _random_tokens(1, 104)
    other = mx.concatenate([(prompt[:, :4] + 17) % VOCABULARY, prompt[:, 4:]], axis=1)

    states, changed = _first_states(model, prompt), _first_states(model, other)

    assert max(_norm(after - before) / _norm(before) for before, after in zip(states, changed, strict=True)) > 1e-2


@each_architecture
def test_forty_tokens_cross_every_window_several_times(load: Load, name: str) -> None:
    for cache in _leaves(make_prompt_cache(load(name))):
        if isinstance(cache, RotatingKVCache):
            assert cache.max_size <= 16
        if isinstance(cache, ChunkedKVCache):
            assert cache.chunk_size <= 16


def test_a_seed_always_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    first, again, other = (make_checkpoint("qwen3_5", tmp_path / str(i), seed) for i, seed in enumerate((1, 1, 2)))

    weights = [(folder / "model.safetensors").read_bytes() for folder in (first, again, other)]

    assert weights[0] == weights[1] != weights[2]


def test_greedy_agrees_with_a_forward_pass_without_a_cache(load: Load) -> None:
    model, prompt = load("llama"), [int(token) for token in PROMPTS[0]]

    tokens, logits = greedy(model, prompt, 3)

    whole = model(mx.array([prompt + tokens[:2]]))[0, -3:]
    assert _distance(logits, whole) < 1e-4
    assert tokens == mx.argmax(whole, axis=-1).tolist()


def test_greedy_starts_from_a_single_token(load: Load) -> None:
    model = load("qwen3_5")

    tokens, _ = greedy(model, [7], 1)

    assert tokens == mx.argmax(model(mx.array([[7]]))[0], axis=-1).tolist()


def _defines_model(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.ClassDef) and node.name == "Model" for node in tree.body)


def _decode(model: nn.Module, prompts: mx.array, steps: int) -> mx.array:
    """Logits (steps, B, V) of greedy decoding after prompts of one length, side by side: cheaper than one by one."""
    cache = make_prompt_cache(model)
    model(prompts[:, :-1], cache=cache)
    tokens, logits = prompts[:, -1:], []
    for _ in range(steps):
        logits.append(model(tokens, cache=cache)[:, -1])
        tokens = mx.argmax(logits[-1], axis=-1, keepdims=True)
        mx.eval(tokens)
    return mx.stack(logits)


def _distance(logits: mx.array, expected: mx.array) -> float:
    """The largest difference, in standard deviations of the expected logits."""
    return float(mx.max(mx.abs(logits - expected)) / mx.std(expected))


def _unique(array: mx.array) -> int:
    return len(np.unique(np.array(array)))


def _leaves(caches: list[Any]) -> Iterator[Any]:
    """The caches of a model, with lists of caches laid flat."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _slots(caches: list[Any]) -> Iterator[tuple[Any, Any]]:
    """Where the caches keep arrays: (container, key), the container being a list or an object's __dict__."""
    for cache in _leaves(caches):
        container = cache.cache if isinstance(cache, ArraysCache) else vars(cache)
        keys = range(len(container)) if isinstance(container, list) else list(container)
        yield from ((container, key) for key in keys if isinstance(container[key], mx.array))


def _disturb_one_memory_per_row(caches: list[Any]) -> int:
    """Widen caches of one row to n + 1 rows, of which row i has its memory i disturbed and the last none; return n."""
    slots = list(_slots(caches))
    used = [(container, key) for container, key in slots if mx.any(container[key])]
    for container, key in slots:
        container[key] = mx.repeat(container[key], len(used) + 1, axis=0)
    for row, (container, key) in enumerate(used):
        container[key][row] = _disturbed(container[key][row])
    return len(used)


def _disturbed(array: mx.array) -> mx.array:
    if mx.issubdtype(array.dtype, mx.integer):  # token ids
        return (array + 1) % VOCABULARY
    noise = np.random.default_rng(0).standard_normal(array.shape).astype(np.float32)
    return array + 3 * mx.std(array) * mx.array(noise)


def _norm(array: mx.array) -> float:
    return float(mx.linalg.norm(array.reshape(-1)))


def _first_states(model: nn.Module, prompt: mx.array) -> list[mx.array]:
    """The arrays of the first recurrent layer after a prompt."""
    cache = make_prompt_cache(model)
    model(prompt, cache=cache)
    first = next(leaf for leaf in _leaves(cache) if isinstance(leaf, ArraysCache))
    states: list[mx.array] = first.cache
    return states
