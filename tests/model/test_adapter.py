"""At load a model is tried before it is served: the way it is held must give the row's own numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from driver import adapter_for
from weft.errors import UnsupportedModel
from weft.memory.spec import FullAttention, Recurrent, SlidingWindow
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel, load

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
