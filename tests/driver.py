"""Drives an engine turn by turn for tests: who is submitted when, and every logit it decided on."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models import activations, bailing_hybrid, base, gated_delta, ssm

from weft.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.faults import InjectedFault
from weft.engine.runner import RowFailure, Step
from weft.engine.sequence import Line, Sequence
from weft.ipc.limits import Sampling
from weft.memory.disk import DiskTier
from weft.model.adapter import Adapter, Way
from weft.model.loader import load

SMALL = EngineConfig(max_rows=8, slab_tokens=256, chunk_tokens=16, unsliced_tokens=0, exact=True, settle_first=True)


class Clock:
    """A clock that only moves when told, or by a fixed tick at each look."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@dataclasses.dataclass
class Run:
    """An engine under test, with the logits of every token it gave."""

    adapter: Adapter
    config: EngineConfig = SMALL
    keep_logits: bool = False
    disk: DiskTier | None = None
    clock: Callable[[], float] = dataclasses.field(default_factory=lambda: Clock(tick=1.0))  # every slice is one layer
    expected: type[Exception] | tuple[type[Exception], ...] = InjectedFault  # errors that the test asked for

    def __post_init__(self) -> None:
        self.engine = Engine(self.adapter, self.config, self.clock, self.disk)
        self.logits: dict[tuple[int, int], np.ndarray] = {}  # by sequence and tokens up to the one they decide
        self._sample = self.engine.sample
        if self.keep_logits:
            self.engine.sample = self._keep_and_sample  # type: ignore[method-assign]

    def _keep_and_sample(self, step: Step) -> None:
        for line, row in zip(step.lines, np.array(step.logits.astype(mx.float32)), strict=True):
            sequence = line.sequence if isinstance(line, Line) else line
            if sequence in step.new:  # one behind a draft token that is not accepted is decided again later
                self.logits[sequence.id, line.num_tokens] = row
        self._sample(step)

    def submit(self, prompt: list[int], tokens: int, **sampling: object) -> Sequence:
        """Queue a prompt that answers with `tokens` tokens unless told otherwise."""
        return self.engine.submit(prompt, Sampling(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling}))  # type: ignore[arg-type]

    def turn(self) -> None:
        """One turn; whatever fails in it must have been asked for."""
        self.engine.turn()
        failure = self.engine.last_failure
        if isinstance(failure, RowFailure):
            failure = failure.__cause__
        assert failure is None or isinstance(failure, self.expected), f"an error that no test asked for: {failure!r}"

    def finish(self) -> None:
        """Turn until nothing is left; nothing may stay behind."""
        for _ in range(100_000):
            if self.engine.idle:
                break
            if self.engine.is_waiting_for_disk:
                time.sleep(0.001)
            self.turn()
        assert self.engine.idle
        assert self.engine.runner.pool.slabs == []
        assert self.engine.runner.pool.tables == {}

    def logits_of(self, sequence: Sequence, start: int = 0) -> np.ndarray:
        """(tokens, V) the logits that decided each token of an answer, from the token `start` on."""
        places = range(start, len(sequence.output))
        return np.stack([self.logits[sequence.id, len(sequence.prompt) + 1 + place] for place in places])


def adapter_for(folder: Path, way: Way | None = None) -> Adapter:
    """A model folder, loaded by the real loader."""
    return Adapter(load(folder), way=way)


def answers(adapter: Adapter, prompts: Iterable[list[int]], tokens: int, config: EngineConfig = SMALL) -> list[list[int]]:
    """Greedy answers of prompts that are submitted together."""
    run = Run(adapter, config)
    sequences = [run.submit(prompt, tokens) for prompt in prompts]
    run.finish()
    return [sequence.output for sequence in sequences]


def have_same_contents(adapter: Adapter, one: list[Any], other: list[Any]) -> bool:
    """Whether two rows' caches hold the same, bit for bit."""
    found, wanted = (
        [arrays if isinstance(arrays, tuple) else (arrays.keys, arrays.values) for arrays in adapter.contents(row) if arrays]
        for row in (one, other)
    )
    pairs = [pair for arrays in zip(found, wanted, strict=True) for pair in zip(*arrays, strict=True)]
    return bool(pairs) and all(mx.array_equal(*pair) for pair in pairs)


class FloatEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """MLX's packed embedding with float32 numbers: of four-bit floats it gives these in bfloat16, and Gemma 4 scales them."""

    def __call__(self, tokens: mx.array) -> mx.array:
        return super().__call__(tokens).astype(mx.float32)


@contextmanager
def stock_mlx_lm(model: Any) -> Iterator[None]:
    """The model with nothing of ours bound into its modules: a referee must not play for either side."""
    stock = {
        "scaled_dot_product_attention": base.scaled_dot_product_attention,
        "gated_delta_update": gated_delta.gated_delta_update,
        "ssm_update": ssm.ssm_update,
        "recurrent_gla": getattr(bailing_hybrid.recurrent_gla, "weft_original", bailing_hybrid.recurrent_gla),
        "swiglu": activations.swiglu,
        "precise_swiglu": activations.precise_swiglu,
        "nn": nn,
    }
    modules = {sys.modules[kind.__module__] for layer in model.modules() for kind in type(layer).__mro__}
    ours = [(module, name, getattr(module, name)) for module in modules for name in stock if hasattr(module, name)]
    for module, name, _ in ours:
        setattr(module, name, stock[name])
    swapped = [(layer, type(layer)) for layer in model.modules()]
    for layer, kind in swapped:
        base_class = next(base for base in kind.__mro__ if not base.__module__.startswith("weft."))
        layer.__class__ = FloatEmbedding if base_class is nn.QuantizedEmbedding else base_class
    try:
        yield
    finally:
        for layer, kind in swapped:
            layer.__class__ = kind
        for module, name, function in ours:
            setattr(module, name, function)


def random_prompts(vocab_size: int, lengths: Iterable[int], seed: int = 0) -> list[list[int]]:
    """Prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def restored(run: Run) -> list[int]:
    """Return a list that gets the tokens of a prefix each time one is copied out of the tree from now on."""
    counts: list[int] = []
    caches = run.engine.runner._restored_caches

    def counting(sequence: Sequence) -> object:
        counts.append(sequence.num_computed)
        return caches(sequence)

    run.engine.runner._restored_caches = counting  # type: ignore[method-assign,assignment]
    return counts
