"""`make bench-gpu`: decode steps and prefill on a GPU against mlx-lm's own ways, random bf16 weights, one run."""

from __future__ import annotations

import dataclasses
import sys
import time

import mlx.core as mx
from mlx_lm.models import gated_delta
from mlx_lm.models.cache import make_prompt_cache

from bench.shapes import LLAMA_1B, QWEN35_4B, bare_step, engine_at, median_ms, merged_caches, random_model
from weft.config import EngineConfig
from weft.model.adapter import Adapter
from weft.model.loader import LoadedModel

SHORT = [512] * 16
LONG = [512] * 15 + [16384]


def decode(name: str, loaded: LoadedModel, steps: int = 40) -> Adapter:
    """Steps of 16 rows: mlx-lm's padded batch, ours, ours exact, ours with one long row; and one row, exact or not."""
    adapter = Adapter(loaded)
    exact = EngineConfig.for_device("cuda", exact=True)
    free = dataclasses.replace(exact, width=None)
    rival = median_ms(bare_step(loaded.model, merged_caches(SHORT, adapter), 16), steps)
    print(f"{name}: one padded mlx-lm batch, 16 × 512: {rival:.2f} ms a step", flush=True)
    results = {}
    for label, config, lengths in (
        ("16 × 512", free, SHORT),
        ("16 × 512 exact", exact, SHORT),
        ("15 × 512 + 16k", free, LONG),
        ("15 × 512 + 16k exact", exact, LONG),
        ("1 × 512", free, [512]),
        ("1 × 512 exact", exact, [512]),
    ):
        engine = engine_at(adapter, config, lengths)
        results[label] = median_ms(engine.turn, steps)
        print(f"{name}: {label}: {results[label]:.2f} ms, {results[label] / rival:.3f} × the padded batch", flush=True)
        del engine
        mx.clear_cache()
    print(f"{name}: a 16k row beside 15 short ones costs {results['15 × 512 + 16k'] / results['16 × 512']:.3f} × 16 short ones")
    return adapter


def prefill(name: str, loaded: LoadedModel, adapter: Adapter, tokens: int = 2048) -> None:
    """A prompt of 2,048 tokens through ours, and through mlx-lm's loop over tokens."""
    ours = _prefill_seconds(loaded.model, tokens, rounds=3)
    modules = [sys.modules[module] for module in adapter.gated_delta_modules]
    kept = [module.gated_delta_update for module in modules]
    for module in modules:
        module.gated_delta_update = gated_delta.gated_delta_update
    stock = _prefill_seconds(loaded.model, tokens, rounds=1)
    for module, function in zip(modules, kept, strict=True):
        module.gated_delta_update = function
    print(
        f"{name}: prefill {tokens / ours:.0f} tok/s against stock {tokens / stock:.0f}: {stock / ours:.1f} ×",
        flush=True,
    )


def _prefill_seconds(model: object, tokens: int, rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        caches = make_prompt_cache(model)
        start = time.perf_counter()
        model(mx.ones((1, tokens), mx.int32), cache=caches)  # type: ignore[operator]
        mx.eval([cache.state for cache in caches])
        times.append(time.perf_counter() - start)
    return min(times[1:] or times)


def main() -> None:
    """Run all; figures go to docs/log.md."""
    if mx.default_device() != mx.gpu:
        sys.exit("this needs a GPU build of MLX and a GPU: pip install 'weft[cuda]'")
    decode("llama-1B", random_model(LLAMA_1B, mx.bfloat16))
    mx.clear_cache()
    loaded = random_model(QWEN35_4B, mx.bfloat16)
    adapter = decode("Qwen3.5-4B", loaded)
    prefill("Qwen3.5-4B", loaded, adapter)


if __name__ == "__main__":
    main()
