"""Adapts mlx-lm's models to weft: reads the geometry of each layer's cache, and builds forwards over weft's memory."""

import functools
import logging
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from weft.errors import UnsupportedModel
from weft.kernels.attention import seam_over
from weft.kernels.cpu import bind as bind_layers
from weft.kernels.gated_delta import bind as bind_gated_delta
from weft.kernels.recurrent import bind as bind_recurrent
from weft.memory.spec import FullAttention, KeyValues, LayerContents, LayerSpec, Plane, Recurrent, SlidingWindow
from weft.memory.views import Batch, KeyValueView, StateView
from weft.model.loader import LoadedModel
from weft.model.probe import PROBE_CHUNK, PROBE_ERRORS, Findings, examine
from weft.model.saved_state import LayerCaches, arrays_of, leaves

log = logging.getLogger("weft.model")

Way = Literal["seam", "plain", "alone"]  # explained in memory/views.py; `probe` finds the best that gives each row's own numbers

DEFAULT_CONTEXT = 8192
SAMPLE_LENGTHS = (64, 192)
SPEC_TOKENS = 4  # of the forward off which the geometry of the layers is read; a shorter row may not have it yet


class RecurrentView(StateView, ArraysCache):  # type: ignore[misc]
    """A StateView that passes mlx-lm's `isinstance(cache, ArraysCache)`."""


class Chunk:
    """The forward of a prompt chunk as a lazy graph: each layer's states, to be evaluated layer by layer in order."""

    def __init__(self, layers: list[list[mx.array]]) -> None:
        self._left = deque(layers)

    def also(self, arrays: list[mx.array]) -> None:
        self._left.append(arrays)

    @property
    def is_done(self) -> bool:
        return not self._left

    def advance(self) -> bool:
        """Evaluate the next layer of the chunk, waiting for the device; returns whether any layers are left."""
        mx.eval(self._left[0])  # sync: a slice's end must be felt by the clock
        self._left.popleft()
        return not self.is_done

    def finish(self) -> None:
        mx.eval(list(self._left))  # sync: the chunk's end
        self._left.clear()


class Adapter:
    """Wraps a loaded model for the runner: makes caches, builds forwards, and knows the memory layout of its layers."""

    def __init__(self, loaded: LoadedModel, *, way: Way | None = None) -> None:
        self.model: Callable[..., mx.array] = loaded.model
        self.name = loaded.folder.name
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length or DEFAULT_CONTEXT
        self.eos_token_ids = frozenset(loaded.eos_token_ids)
        self.weights_bytes = loaded.weights_bytes
        self.gated_delta_modules = bind_gated_delta(loaded.model)
        bind_recurrent(loaded.model)
        bind_layers(loaded.model)
        _bind_seam(loaded.model)
        self.specs: list[LayerSpec] = []
        self.layout: list[int | tuple[int, ...]] = []  # by layer: the place of its spec, or of those of a CacheList
        self.unreadable: str | None = None  # why the memory of the layers can not be read
        self._read_specs()
        self.can_be_saved = self.unreadable is None  # a row's states can be copied out and put back
        # A prompt's states after any of its tokens are the first of its keys and values: other layers keep none.
        self.is_positional = self.can_be_saved and all(type(s) is FullAttention or s == Recurrent(()) for s in self.specs)
        found = Findings(way, {}) if way else examine(self)
        self.way, self.refused = found.way, found.refused
        self.cuts_freely, self.decodes_like_prefill = found.cuts_freely, found.decodes_like_prefill
        if self.refused and self.way == "alone":
            why = "; ".join(f"{refused}: {reason}" for refused, reason in self.refused.items())
            log.warning("%s decodes each row alone, so rows do not share the cost of a step (%s)", self.name, why)

    def new_caches(self, prompt_tokens: int) -> LayerCaches:
        """Make fresh mlx-lm caches for one row; the first write allocates the whole prompt, so no chunk copies earlier ones."""
        return self.reset_growth(make_prompt_cache(self.model), prompt_tokens)

    @staticmethod
    def reset_growth(caches: LayerCaches, num_tokens: int = 1) -> LayerCaches:
        """Let KV caches grow in steps of `num_tokens`, rounded up to mlx-lm's own step; changes and returns the caches."""
        for cache in leaves(caches):
            if type(cache) is KVCache:
                cache.step = -(-num_tokens // KVCache.step) * KVCache.step
        return caches

    @staticmethod
    def bytes_of(caches: LayerCaches) -> int:
        return sum(array.nbytes for cache in leaves(caches) for array in arrays_of(cache))

    def prefill(self, tokens: list[int], caches: LayerCaches) -> tuple[Chunk, mx.array]:
        """Return a prompt chunk's lazy forward for one row: a `Chunk` to evaluate layer by layer, and its logits (1, T, V)."""
        logits = self.model(mx.array([tokens], mx.int32), cache=caches)
        return Chunk([arrays_of(cache) for cache in leaves(caches)]), logits

    def prefilled_caches(self, prompt: list[int], chunk_tokens: int | None = None) -> LayerCaches:
        """Prefill a prompt into fresh caches, in chunks of `chunk_tokens` (None: in one forward), and return them; blocks."""
        caches, size = self.new_caches(len(prompt)), chunk_tokens or len(prompt)
        for start in range(0, len(prompt), size):
            self.prefill(prompt[start : start + size], caches)[0].finish()
        return caches

    def row_bytes(self, tokens: int) -> int:
        if self.unreadable is None:
            return sum(spec.bytes_at(tokens) for spec in self.specs)
        (short, less), (long, more) = self._sample_bytes
        return int(less + (tokens - short) * (more - less) / (long - short))

    @functools.cached_property
    def _sample_bytes(self) -> list[tuple[int, int]]:
        """Two measured points (tokens, bytes of a row), for a linear estimate of row sizes where layers are unreadable."""
        return [(n, self.bytes_of(self.prefilled_caches([1] * n, PROBE_CHUNK))) for n in SAMPLE_LENGTHS]

    def contents(self, caches: LayerCaches) -> list[LayerContents | None]:
        """Read the contents of one row's caches: an entry per cache, those inside a CacheList singly; None where unreadable."""
        return [_contents(cache) for cache in leaves(caches)]

    def decode(self, tokens: mx.array, batch: Batch) -> mx.array:
        """Build the lazy forward of one token per row over a batch's cache views, (B, 1) → logits (B, V)."""
        return self.model(tokens, cache=[self._view(batch, place) for place in self.layout])[:, -1]

    def decode_alone(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        """Build and start, without waiting, the forward of one token of one row on its own caches, (1, 1) → logits (1, V)."""
        logits = self.model(tokens, cache=caches)[:, -1]
        mx.async_eval(logits, [arrays_of(cache) for cache in leaves(caches)])  # type: ignore[no-untyped-call]
        return logits

    def _view(self, batch: Batch, place: int | tuple[int, ...]) -> Any:
        if isinstance(place, tuple):
            return tuple(self._view(batch, inner) for inner in place)
        return (RecurrentView if isinstance(self.specs[place], Recurrent) else KeyValueView)(batch, place)

    def _read_specs(self) -> None:
        """Build (not run) a short forward and record the geometry of every layer's cache in `specs` and `layout`."""
        caches: LayerCaches = make_prompt_cache(self.model)
        try:
            self.model(mx.zeros((1, SPEC_TOKENS), mx.int32), cache=caches)
        except PROBE_ERRORS as error:
            raise UnsupportedModel(f"{self.name}: its own forward fails ({error}); the model can not be served") from error
        for index, cache in enumerate(caches):
            first = len(self.specs)
            for leaf in leaves([cache]):
                if (spec := _spec(leaf)) is None:
                    self.unreadable = f"layer {index} keeps its memory in a {type(leaf).__name__}"
                self.specs.append(spec or Recurrent(()))
            self.layout.append(tuple(range(first, len(self.specs))) if type(cache) is CacheList else first)


def _bind_seam(model: Any) -> None:
    """Replace `scaled_dot_product_attention` by weft's (the seam) in the modules of a model's layers, once per process."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module = sys.modules[name]
        original = getattr(module, "scaled_dot_product_attention", None)
        if original is not None and not hasattr(original, "weft_seam"):
            module.scaled_dot_product_attention = seam_over(original)  # type: ignore[attr-defined]


def _spec(cache: Any) -> LayerSpec | None:
    """Return a layer's spec, read from its cache after a short forward; None for a kind of cache slabs can not hold."""
    contents = _contents(cache)
    if contents is None:
        return None
    if not isinstance(contents, KeyValues):
        return Recurrent(tuple(None if array is None else (tuple(array.shape[1:]), array.dtype) for array in contents))
    keys, values = (Plane(array.shape[1], array.shape[3], array.dtype) for array in (contents.keys, contents.values))
    return SlidingWindow(keys, values, cache.max_size) if type(cache) is RotatingKVCache else FullAttention(keys, values)


def _contents(cache: Any) -> LayerContents | None:
    """Return the states in a cache, keys and values in token order; None for a kind of cache that slabs can not hold."""
    if type(cache) is ArraysCache:
        return tuple(cache.cache)
    if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", False):
        return None
    if cache.keys is None:
        return ()  # a layer that never touches its cache remembers nothing
    if type(cache) is KVCache:
        return KeyValues(cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :])
    keys, values = (cache._temporal_order(array) for array in (cache.keys, cache.values))
    held = min(cache.offset, cache.max_size)
    return KeyValues(keys[..., keys.shape[2] - held :, :], values[..., values.shape[2] - held :, :])
