"""At load a model is tried before it is served: the way it is held must give the row's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

import zoo
from driver import adapter_for, answers, random_prompts
from weft.errors import UnsupportedModel
from weft.memory.spec import FullAttention, Recurrent, SlidingWindow
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load
from weft.model.probe import PROBE_LIMIT, PROBE_ROUNDING, rounding_share

Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize(
    ("name", "way", "words"),
    [
        ("llama", "seam", ""),
        ("qwen3_5", "seam", ""),
        ("gemma3n", "seam", ""),
        ("deepseek_v3", "plain", "mask as an array"),
        ("plamo2", "plain", "incompatible function arguments"),
        ("afm7", "alone", "logits differ"),
        ("llama4", "alone", "ChunkedKVCache"),
        ("internlm3", "alone", ""),
    ],
)
def test_a_model_is_held_the_best_way_that_is_right(checkpoint: Checkpoint, name: str, way: str, words: str) -> None:
    adapter = adapter_for(checkpoint(name))

    assert adapter.way == way
    assert words in "; ".join(adapter.refused.values())


def test_specs_are_read_off_the_model(checkpoint: Checkpoint) -> None:
    kinds = [type(spec) for spec in adapter_for(checkpoint("gear")).specs]

    assert kinds == [Recurrent, SlidingWindow, FullAttention, Recurrent]


class Disturbed:
    """A model whose rows disturb each other: what one row left behind is added to the next one's logits."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.inner = loaded.model
        self.left_behind = mx.zeros((1,))
        self.layers = loaded.model.layers
        self.modules = loaded.model.modules

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:
        logits = self.inner(tokens, cache=cache) + self.left_behind
        self.left_behind = mx.mean(tokens).astype(mx.float32) / 10 * mx.arange(logits.shape[-1])
        return logits


class ChunkCounting(Disturbed):
    """A model whose numbers depend on where chunks end."""

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:  # type: ignore[override]
        if tokens.shape[1] > 1 and getattr(cache[0], "offset", 0):
            tokens = tokens + 1
        return self.inner(tokens, cache=cache)


def test_a_model_that_depends_on_where_chunks_end_is_refused(checkpoint: Checkpoint) -> None:
    loaded = load(checkpoint("llama"))
    counting = LoadedModel(**{**vars(loaded), "model": ChunkCounting(loaded)})

    with pytest.raises(UnsupportedModel, match="in chunks is not the prompt as a whole"):
        Adapter(counting)


def test_a_model_that_keeps_state_between_requests_is_refused(checkpoint: Checkpoint) -> None:
    loaded = load(checkpoint("llama"))
    disturbed = LoadedModel(**{**vars(loaded), "model": Disturbed(loaded)})

    with pytest.raises(UnsupportedModel, match="disturb each other"):
        Adapter(disturbed)


class KeepsByLength(Disturbed):
    """A model that keeps what it read of a row (here its first token) and takes it for other rows of the same length.

    It keeps what it read last, or with `keeps_all` what it read first of each length.
    """

    def __init__(self, loaded: LoadedModel, *, keeps_all: bool) -> None:
        super().__init__(loaded)
        self.vocab_size = loaded.vocab_size
        self.keeps_all = keeps_all
        self.kept: dict[int, int] = {}

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:  # type: ignore[override]
        first = vars(cache[0]).setdefault("first", tokens[0, 0].item())
        length = int(cache[0].offset) + tokens.shape[1]
        if length not in self.kept:
            self.kept = (self.kept if self.keeps_all else {}) | {length: first}
        return self.inner((tokens + self.kept[length]) % self.vocab_size, cache=cache)


@pytest.mark.parametrize(
    ("keeps_all", "words"), [(False, "disturb each other"), (True, "in chunks is not the prompt as a whole")]
)
def test_a_model_that_keeps_state_for_rows_of_equal_length_is_refused(
    checkpoint: Checkpoint, keeps_all: bool, words: str
) -> None:
    loaded = load(checkpoint("llama"))
    keeping = LoadedModel(**{**vars(loaded), "model": KeepsByLength(loaded, keeps_all=keeps_all)})

    with pytest.raises(UnsupportedModel, match=words):
        Adapter(keeping)


class KeepsItsBatch(Disturbed):
    """A model that keeps an array as wide as its last batch of prompts and takes it for prompts of the same length."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self.kept = mx.zeros((0, 0))

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:  # type: ignore[override]
        if tokens.shape[1] > 1:
            if tokens.shape[1] != self.kept.shape[1]:
                self.kept = mx.zeros(tokens.shape, mx.int32)
            tokens = mx.concatenate([tokens, self.kept], axis=-1)[:, : tokens.shape[1]]
        return self.inner(tokens, cache=cache)


def test_a_model_that_fails_on_a_row_of_the_last_batch_s_length_is_refused(checkpoint: Checkpoint) -> None:
    loaded = load(checkpoint("llama"))
    keeping = LoadedModel(**{**vars(loaded), "model": KeepsItsBatch(loaded)})

    with pytest.raises(UnsupportedModel, match="fails when rows take turns"):
        Adapter(keeping)


class MergesRowsOfEqualLength(Disturbed):
    """A model that gives all rows of a batch that have the same length the numbers of the last one of them."""

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:  # type: ignore[override]
        logits = self.inner(tokens, cache=cache)
        if not isinstance(offsets := cache[0].offset, mx.array):
            return logits
        last = {length: row for row, length in enumerate(offsets.tolist())}
        return logits[mx.array([last[length] for length in offsets.tolist()])]


def test_a_model_that_mixes_up_rows_of_equal_length_decodes_them_alone(checkpoint: Checkpoint) -> None:
    loaded = load(checkpoint("llama"))
    merging = LoadedModel(**{**vars(loaded), "model": MergesRowsOfEqualLength(loaded)})

    adapter = Adapter(merging)

    assert adapter.way == "alone"
    assert "logits differ" in adapter.refused["seam"]


class OwnKVCache(KVCache):  # type: ignore[misc]
    """A cache that may keep more than keys and values, for all that can be known of it."""


@pytest.mark.parametrize(("kind", "name"), [(lambda: QuantizedKVCache(32, 8), "QuantizedKVCache"), (OwnKVCache, "OwnKVCache")])
def test_a_cache_that_is_not_exactly_mlx_lms_own_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], object], name: str
) -> None:
    monkeypatch.setitem(zoo.ARCHITECTURES, "wide", {**zoo.ARCHITECTURES["llama"], "head_dim": 32})  # 32 numbers share a scale
    loaded = load(zoo.make_checkpoint("wide", tmp_path / "wide"))
    loaded.model.make_cache = lambda: [KVCache(), kind()]

    adapter = Adapter(loaded)

    assert adapter.way == "alone"
    assert adapter.unreadable == f"layer 1 keeps its memory in a {name}"
    assert not adapter.can_be_saved
    prompts = random_prompts(adapter.vocab_size, (20, 7))
    assert answers(adapter, prompts, 5) == [answers(adapter, [prompt], 5)[0] for prompt in prompts]


class Stack(nn.Module):
    """Layers that each multiply what the ones before have rounded."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)
        self.norms = [nn.RMSNorm(64) for _ in range(depth)]
        self.set_dtype(mx.bfloat16)

    def make_cache(self) -> list[object]:
        return []

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:
        assert cache == []
        hidden = self.embedding(tokens)
        for norm in self.norms:
            hidden = mx.sin(4 * norm(hidden))
        return hidden


def test_a_deep_model_in_16_bits_may_round_as_far_as_its_own_layers_do() -> None:
    models = [Stack(1), Stack(12)]
    before = [dict(tree_flatten(model.parameters())) for model in models]

    shallow, deep = (rounding_share(model, 64) for model in models)

    assert shallow == PROBE_ROUNDING < deep <= PROBE_LIMIT
    for model, weights in zip(models, before, strict=True):
        after = dict(tree_flatten(model.parameters()))
        assert all(mx.array_equal(after[name], value) for name, value in weights.items())
