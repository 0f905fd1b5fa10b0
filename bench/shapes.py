"""Random models in the shapes of real ones, and the loops they are measured with."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from weft.config import EngineConfig
from weft.engine.engine import Engine
from weft.ipc.limits import Sampling
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel

TOKENIZER = Path(__file__).parent.parent / "src" / "weft" / "model" / "tiny-hybrid"
END_TOKEN = 4082  # of that tokenizer
LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "vocab_size": 128256,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "max_position_embeddings": 131072,
}  # fmt: skip
GEMMA3_SMALL = {  # five layers with a window to one without
    "model_type": "gemma3_text", "hidden_size": 320, "num_hidden_layers": 12, "intermediate_size": 1024,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "vocab_size": 4096,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window": 512, "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 64, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN35_4B = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 9216,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
        "vocab_size": 248320, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "tie_word_embeddings": True, "max_position_embeddings": 262144, "attention_bias": False,
        "rope_parameters": {"type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip


def random_model(config: dict[str, Any], dtype: mx.Dtype, *, layers: int | None = None) -> LoadedModel:
    """A model of this shape with random weights."""
    text = dict(config.get("text_config", config))
    if layers:
        text["num_hidden_layers"] = layers
    config = {**config, "text_config": text} if "text_config" in config else text
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.eval()
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    mx.eval(model.parameters())
    return LoadedModel(
        model=model, config=config, folder=Path(config["model_type"]),
        extra_tensors={}, eos_token_ids=(), context_length=text["max_position_embeddings"], vocab_size=text["vocab_size"],
        weights_bytes=0,
    )  # fmt: skip


def with_words(loaded: LoadedModel, folder: Path) -> LoadedModel:
    """Return a random model with the vocabulary of tiny-hybrid, filled up to its size, written to this folder."""
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocabulary, added = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    known = {*vocabulary.values(), *added}  # a token without text would not be seen by a client
    vocabulary.update({f"w{token}": token for token in range(loaded.vocab_size) if token not in known})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return dataclasses.replace(loaded, folder=folder, eos_token_ids=(END_TOKEN,))


def median_ms(step: Callable[[], None], count: int, warm: int = 3) -> float:
    """Median milliseconds of a call."""
    for _ in range(warm):
        step()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def bare_step(model: Any, caches: list[Any], rows: int) -> Callable[[], None]:
    """The rival: `model(tokens, cache)` and argmax, pipelined as mlx-lm pipelines it."""
    token = mx.argmax(model(mx.zeros((rows, 1), mx.int32), cache=caches)[:, -1], axis=-1)
    mx.async_eval(token)

    def step() -> None:
        nonlocal token
        following = mx.argmax(model(token[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(following)
        token.tolist()
        token = following

    return step


def dense_caches(model: Any, rows: int, tokens: int) -> list[Any]:
    """mlx-lm's caches of `rows` equal prompts, prefilled as one batch."""
    caches = make_prompt_cache(model)
    model(mx.ones((rows, tokens), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


def merged_caches(lengths: list[int], adapter: Adapter) -> list[Any]:
    """mlx-lm's own padded batch over rows of these lengths, each prefilled alone."""
    rows = []
    for length in lengths:
        caches = adapter.new_caches(length)
        for start in range(0, length, 1024):
            adapter.prefill([1] * min(1024, length - start), caches)[0].finish()
        rows.append(caches)
    merged = [type(row[0]).merge(list(row)) for row in zip(*rows, strict=True)]
    mx.eval([cache.state for cache in merged])
    return merged


def engine_at(adapter: Adapter, config: EngineConfig, lengths: list[int], tokens: int = 100_000) -> Engine:
    """An engine whose rows have these lengths and are all decoding."""
    engine = Engine(adapter, dataclasses.replace(config, gap_factor=1e6))  # prompts first; the steps are what is measured
    for length in lengths:
        engine.submit(
            [1] * (length + 1),
            Sampling(temperature=0.0, max_tokens=min(tokens, adapter.context_length - length - 2), ignore_eos=True),
        )
    while len(engine.runner.pool.rows) < len(lengths):
        engine.turn()
    return engine
