"""Between mlx-lm's models and our rows: reads what each layer remembers, and runs forwards over our memory.

At load the model is tried in three ways, best first. *seam*: all rows in one forward, attention answered from the slabs.
*plain*: one forward per slab, the model reads one slab's arrays under a length mask. *alone*: every row on its own
caches. A way is taken only if its numbers equal the row's own; nothing here is a table of model names.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from weft.errors import UnsupportedModel, WeftError
from weft.kernels.attention import seam_over
from weft.kernels.cpu import bind as bind_layers
from weft.kernels.gated_delta import bind as bind_gated_delta
from weft.memory.slabs import Pool, RowState
from weft.memory.spec import FullAttention, KeyValues, LayerContents, LayerSpec, Plane, Recurrent, SlidingWindow
from weft.memory.views import Batch, CompositeView, KeyValueView, StateView, make_batches
from weft.model.loader import LoadedModel

Way = Literal["seam", "plain", "alone"]
LayerCaches = list[Any]  # mlx-lm's own cache objects, one per layer, for one row

DEFAULT_CONTEXT = 8192
PROBE_LENGTHS = (9, 5, 40)  # two rows that share a slab, so that one is padded, and one in a slab of its own
PROBE_STEPS = 3
SAMPLE_LENGTHS = (64, 192)
PROBE_CHUNK = 16
# A way is refused when its logits leave the row's own by more than this share of their spread, or by more than NOISE times
# what the mere width of a batch does to them; numbers of another row are off by several times the spread.
PROBE_TOLERANCE = 1e-3
PROBE_NOISE = 5.0
PROBE_LIMIT = 1.0
# In 16 bits another kernel rounds otherwise: tiny-hybrid on an H200 moves by 0.08 of its spread from chunks alone. What is
# looked for are the numbers of another row, or a prompt of which something is forgotten: several times the spread.
PROBE_ROUNDING = 0.3
PROBE_ERRORS = (WeftError, AttributeError, TypeError, ValueError, IndexError, RuntimeError, NotImplementedError)


class RecurrentView(StateView, ArraysCache):  # type: ignore[misc]
    """A StateView that passes mlx-lm's `isinstance(cache, ArraysCache)`."""


class Chunk:
    """A prompt chunk's forward, built but not yet run: the states of each layer, to be evaluated in order."""

    def __init__(self, layers: list[list[mx.array]]) -> None:
        self._layers = layers
        self._next = 0

    def also(self, arrays: list[mx.array]) -> None:
        """Evaluate these too, after the layers."""
        self._layers.append(arrays)

    @property
    def is_done(self) -> bool:
        """Whether all layers are in memory."""
        return self._next >= len(self._layers)

    def advance(self) -> bool:
        """Run one more layer; False when none is left."""
        if not self.is_done:
            mx.eval(self._layers[self._next])  # sync: a slice's end must be felt by the clock
            self._layers[self._next] = []
            self._next += 1
        return not self.is_done

    def finish(self) -> None:
        """Run what is left."""
        mx.eval(self._layers[self._next :])  # sync: the chunk's end
        self._next = len(self._layers)


@dataclass(frozen=True)
class Saved:
    """Layer states of one row, copied: contiguous and evaluated, so that nothing else is kept alive by them."""

    layers: list[Any]  # a block: (keys, values) or None; a checkpoint: a cache object or None

    @property
    def arrays(self) -> list[mx.array]:
        """All of them, in order."""
        present = [layer for layer in self.layers if layer is not None]
        return [array for layer in present for array in (layer if isinstance(layer, tuple) else _arrays(layer))]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays)


class Adapter:
    """One loaded model, as the runner uses it."""

    def __init__(self, loaded: LoadedModel, *, way: Way | None = None) -> None:
        self.model: Callable[..., mx.array] = loaded.model
        self.name = loaded.folder.name
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length or DEFAULT_CONTEXT
        self.eos_token_ids = frozenset(loaded.eos_token_ids)
        self.weights_bytes = loaded.weights_bytes
        self.gated_delta_modules = bind_gated_delta(loaded.model)
        bind_layers(loaded.model)
        _bind_seam(loaded.model)
        self.specs, self.layout = self._read_specs()
        self.refused: dict[Way, str] = {}
        self.way: Way = way or self._choose_way()

    def new_caches(self, prompt_tokens: int) -> LayerCaches:
        """Fresh caches for one row, sized for its prompt so that no chunk copies the ones before it."""
        caches: LayerCaches = make_prompt_cache(self.model)
        for cache in _leaves(caches):
            if type(cache) is KVCache:
                cache.step = -(-prompt_tokens // KVCache.step) * KVCache.step
        return caches

    def regrown(self, caches: LayerCaches) -> LayerCaches:
        """Caches of a prompt that was longer than expected: from now on they grow by little."""
        for cache in _leaves(caches):
            if type(cache) is KVCache:
                cache.step = KVCache.step
        return caches

    @staticmethod
    def bytes_of(caches: LayerCaches) -> int:
        """Bytes that a row's own caches hold."""
        return sum(array.nbytes for cache in _leaves(caches) for array in _arrays(cache))

    def prefill(self, tokens: list[int], caches: LayerCaches) -> tuple[Chunk, mx.array]:
        """Build the forward of a prompt chunk for one row; its logits (1, T, V) are not computed unless they are used."""
        logits = self.model(mx.array([tokens], mx.int32), cache=caches)
        return Chunk([_arrays(cache) for cache in _leaves(caches)]), logits

    def row_bytes(self, tokens: int) -> int:
        """Bytes a row of so many tokens needs."""
        if self.unreadable is None:
            return sum(spec.bytes_at(tokens) for spec in self.specs)
        (short, less), (long, more) = self._sample_bytes
        return int(less + (tokens - short) * (more - less) / (long - short))

    @functools.cached_property
    def _sample_bytes(self) -> list[tuple[int, int]]:
        """What rows of two lengths hold, for a model whose layers can not be read: a line through them is an honest guess."""
        found = []
        for tokens in SAMPLE_LENGTHS:
            caches = self.new_caches(tokens)
            for _ in range(tokens // PROBE_CHUNK):
                self.prefill([1] * PROBE_CHUNK, caches)[0].finish()
            found.append((tokens, self.bytes_of(caches)))
        return found

    @property
    def can_be_saved(self) -> bool:
        """Whether a row's states can be taken out and put back: every layer's memory is of a known kind."""
        return self.unreadable is None

    def save_block(self, caches: LayerCaches, start: int, end: int) -> Saved:
        """Keys and values of a row's tokens `start` to `end`."""
        return _evaluated(Saved([_block(cache, start, end) for cache in _leaves(caches)]))

    def save_checkpoint(self, caches: LayerCaches) -> Saved:
        """The states of all layers that have no keys and values for each token."""
        return _evaluated(Saved([None if type(cache) is KVCache else _copied(cache) for cache in _leaves(caches)]))

    def new_leaves(self) -> list[Any]:
        """Fresh caches without what bundles them, as saved layers have them."""
        return list(_leaves(self.new_caches(1)))

    def restore(self, blocks: Sequence[object], checkpoint: object | None, prompt_tokens: int) -> LayerCaches:
        """Caches of a row as they were after these blocks, which with the checkpoint are `Saved` states."""
        caches = self.new_caches(prompt_tokens)
        saved = [block for block in blocks if isinstance(block, Saved)]
        if not blocks:
            return caches
        assert isinstance(checkpoint, Saved)
        assert len(saved) == len(blocks)
        fresh = iter(range(len(checkpoint.layers)))

        def fill(cache: Any) -> Any:
            place = next(fresh)
            if checkpoint.layers[place] is not None:
                return copy.deepcopy(checkpoint.layers[place])  # shares the arrays; whoever writes gets his own
            pairs = [block.layers[place] for block in saved]
            if pairs[0] is not None:
                cache.offset = sum(keys.shape[2] for keys, _ in pairs)
                cache.keys, cache.values = (_joined(planes, cache.step) for planes in zip(*pairs, strict=True))
            return cache

        for index, cache in enumerate(caches):
            if type(cache) is CacheList:
                cache.caches = type(cache.caches)(fill(inner) for inner in cache.caches)
            else:
                caches[index] = fill(cache)
        return caches

    def contents(self, caches: LayerCaches) -> list[LayerContents | None]:
        """What one row's own caches hold, layer by layer; None where a layer can not be read."""
        return [_contents(cache) for cache in _leaves(caches)]

    def decode(self, tokens: mx.array, batch: Batch) -> mx.array:
        """One token per row, (B, 1) → (B, V)."""
        return self.model(tokens, cache=self._views(batch))[:, -1]

    def decode_alone(self, tokens: mx.array, caches: LayerCaches) -> mx.array:
        """One token of one row on its own caches, (1, 1) → (1, V)."""
        logits = self.model(tokens, cache=caches)[:, -1]
        mx.async_eval(logits, [_arrays(cache) for cache in _leaves(caches)])  # type: ignore[no-untyped-call]
        return logits

    def _views(self, batch: Batch) -> list[Any]:
        return [self._view(batch, place) for place in self.layout]

    def _view(self, batch: Batch, place: int | tuple[int, ...]) -> Any:
        if isinstance(place, tuple):
            return CompositeView([self._view(batch, inner) for inner in place])
        if isinstance(self.specs[place], Recurrent):
            return RecurrentView(batch, place)
        return KeyValueView(batch, place)

    def _read_specs(self) -> tuple[list[LayerSpec], list[int | tuple[int, ...]]]:
        """Build (not run) a short forward on fresh caches and read the geometry off them."""
        caches: LayerCaches = make_prompt_cache(self.model)
        try:
            self.model(mx.zeros((1, 4), mx.int32), cache=caches)
        except PROBE_ERRORS as error:
            raise UnsupportedModel(f"{self.name}: its own forward fails ({error}); the model can not be served") from error
        specs: list[LayerSpec] = []
        layout: list[int | tuple[int, ...]] = []
        self.unreadable: str | None = None
        for index, cache in enumerate(caches):
            inner = cache.caches if type(cache) is CacheList else (cache,)
            places = []
            for leaf in inner:
                spec = _spec(leaf)
                if spec is None:
                    self.unreadable = f"layer {index} keeps its memory in a {type(leaf).__name__}"
                    spec = Recurrent(())
                places.append(len(specs))
                specs.append(spec)
            layout.append(tuple(places) if type(cache) is CacheList else places[0])
        return specs, layout

    def _choose_way(self) -> Way:
        probe = Probe(self)
        if reason := probe.leak() or probe.chunk_dependence():
            raise UnsupportedModel(f"{self.name}: {reason}; its answers would depend on who else is served")
        if self.unreadable is not None:
            self.refused = {"seam": self.unreadable, "plain": self.unreadable}
            return "alone"
        for way in ("seam", "plain"):
            if reason := probe.differs(way):
                self.refused[way] = reason
            else:
                return way
        return "alone"


class Probe:
    """Three short rows, decoded on their own and then together: does together give the same numbers?"""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        vocab_size = adapter.vocab_size
        self.prompts = [
            [(7 + 31 * row + 11 * place * (place + row)) % vocab_size for place in range(length)]
            for row, length in enumerate(PROBE_LENGTHS)
        ]
        self.fed = [[(3 + 17 * row + 5 * step) % vocab_size for step in range(PROBE_STEPS)] for row in range(3)]
        self.alone = [self._decode_alone(row) for row in range(3)]  # one after the other
        rounding = PROBE_TOLERANCE if self.alone[0][0].dtype == mx.float32 else PROBE_ROUNDING
        self.allowed = min(PROBE_LIMIT, max(rounding, PROBE_NOISE * self._noise()))

    def leak(self) -> str | None:
        """Whether a row on its own caches is changed by another between its steps: state on the model itself."""
        caches = [self._prefilled(row) for row in range(3)]
        for step in range(PROBE_STEPS):
            for row in range(3):
                logits = self.adapter.decode_alone(mx.array([[self.fed[row][step]]]), caches[row])
                if reason := self._differs(logits[0], self.alone[row][step]):
                    return f"rows on caches of their own disturb each other ({reason})"
        return None

    def chunk_dependence(self) -> str | None:
        """Whether a prompt computed in chunks gives other numbers than the whole."""
        row, caches = len(PROBE_LENGTHS) - 1, self.adapter.new_caches(PROBE_LENGTHS[-1])
        for start in range(0, PROBE_LENGTHS[-1], PROBE_CHUNK):
            self.adapter.prefill(self.prompts[row][start : start + PROBE_CHUNK], caches)[0].finish()
        logits = self.adapter.decode_alone(mx.array([[self.fed[row][0]]]), caches)
        reason = self._differs(logits[0], self.alone[row][0])
        return reason and f"a prompt in chunks is not the prompt as a whole ({reason})"

    def differs(self, way: Way) -> str | None:
        """Why this way can not be taken, or None."""
        self.adapter.way = way
        try:
            return self._run_together(way)
        except PROBE_ERRORS as error:
            return f"{type(error).__name__}: {error}"

    def _run_together(self, way: Way) -> str | None:
        pool = Pool(self.adapter.specs, slab_tokens=256, max_rows=4, constant_shapes=True)
        states = [RowState() for _ in self.prompts]
        for row, state in enumerate(states):
            contents = self.adapter.contents(self._prefilled(row))
            if reason := pool.refusal(contents, len(self.prompts[row])):
                return reason
            pool.allocate(state, contents, len(self.prompts[row]))
        number = {id(state): row for row, state in enumerate(states)}
        for step in range(PROBE_STEPS):
            for batch in make_batches(pool, states, seam=way == "seam", width=None):
                rows = [-1 if state is None else number[id(state)] for state in batch.rows]
                tokens = mx.array([[0 if row < 0 else self.fed[row][step]] for row in rows])
                logits = self.adapter.decode(tokens, batch)
                for index, row in enumerate(rows):
                    if row >= 0 and (reason := self._differs(logits[index], self.alone[row][step])):
                        return reason
            for state in states:
                state.length += 1
        return None

    def _prefilled(self, row: int) -> LayerCaches:
        caches = self.adapter.new_caches(len(self.prompts[row]))
        self.adapter.prefill(self.prompts[row], caches)[0].finish()
        return caches

    def _decode_alone(self, row: int) -> list[mx.array]:
        caches = self._prefilled(row)
        return [self.adapter.decode_alone(mx.array([[token]]), caches)[0] for token in self.fed[row]]

    def _noise(self) -> float:
        """How far a row's logits move when the same row, twice, is a batch of two on mlx-lm's own caches."""
        caches = make_prompt_cache(self.adapter.model)
        self.adapter.model(mx.array([self.prompts[0]] * 2), cache=caches)
        logits = self.adapter.model(mx.array([[self.fed[0][0]]] * 2), cache=caches)[:, -1]
        return _share(logits[1], self.alone[0][0])

    def _differs(self, found: mx.array, wanted: mx.array) -> str | None:
        share = _share(found, wanted)
        return None if share <= self.allowed else f"logits differ by {share:.2g} of their spread, {self.allowed:.2g} are allowed"


def _share(found: mx.array, wanted: mx.array) -> float:
    """The largest difference between two rows of logits, as a share of their spread."""
    worst = mx.max(mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)))
    return float(np.array(worst / mx.maximum(mx.std(wanted.astype(mx.float32)), 1e-6)))


def _bind_seam(model: Any) -> None:
    """Bind attention in the modules this model is made of, in this process only, once."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module = sys.modules[name]
        original = getattr(module, "scaled_dot_product_attention", None)
        if original is not None and not hasattr(original, "weft_seam"):
            module.scaled_dot_product_attention = seam_over(original)  # type: ignore[attr-defined]


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from cache.caches
        else:
            yield cache


def _block(cache: Any, start: int, end: int) -> tuple[mx.array, mx.array] | None:
    if type(cache) is not KVCache or cache.keys is None:
        return None
    return _own(cache.keys[..., start:end, :]), _own(cache.values[..., start:end, :])


def _joined(planes: Sequence[mx.array], tokens: int) -> mx.array:
    """Blocks in a row, with room for so many tokens in all: what is computed next is written there, and nothing copied again."""
    batch, heads, _, width = planes[0].shape
    left = tokens - sum(plane.shape[2] for plane in planes)
    return mx.concatenate([*planes, mx.zeros((batch, heads, left, width), planes[0].dtype)], axis=2)


def _copied(cache: Any) -> Any:
    """A cache of its own, down to the arrays."""
    other = copy.copy(cache)
    if type(cache) is ArraysCache:
        other.cache = [None if array is None else _own(array) for array in cache.cache]
    elif cache.keys is not None:
        other.keys, other.values = _own(cache.keys), _own(cache.values)
    return other


def _evaluated(saved: Saved) -> Saved:
    mx.eval(saved.arrays)  # sync: a lazy slice would keep the whole buffer
    return saved


def _own(array: mx.array) -> mx.array:
    """The same numbers in a buffer of their own; `contiguous` would leave a slice that is contiguous where it is."""
    return mx.where(mx.array(True), array, array)


def _arrays(cache: Any) -> list[mx.array]:
    """Every array a cache of any class holds."""
    match cache:
        case ArraysCache():
            return [array for array in cache.cache if array is not None]
        case KVCache() | RotatingKVCache():
            return [] if cache.keys is None else [cache.keys, cache.values]
        case _:
            return [value for value in vars(cache).values() if isinstance(value, mx.array)]


def _spec(cache: Any) -> LayerSpec | None:
    """The spec of a cache after a short forward; None when its class is not known to be held exactly."""
    if type(cache) is ArraysCache:
        return Recurrent(tuple(None if a is None else (tuple(a.shape[1:]), a.dtype) for a in cache.cache))
    if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", False):
        return None
    if cache.keys is None:
        return Recurrent(())  # a layer that never touches its cache remembers nothing
    keys, values = (Plane(array.shape[1], array.shape[3], array.dtype) for array in (cache.keys, cache.values))
    if type(cache) is RotatingKVCache:
        return SlidingWindow(keys, values, cache.max_size)
    return FullAttention(keys, values)


def _contents(cache: Any) -> LayerContents | None:
    if type(cache) is ArraysCache:
        return tuple(cache.cache)
    if type(cache) not in (KVCache, RotatingKVCache):
        return None
    if cache.keys is None:
        return ()
    if type(cache) is KVCache:
        return KeyValues(cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :])
    keys, values = (cache._temporal_order(array) for array in (cache.keys, cache.values))
    held = min(cache.offset, cache.max_size)
    return KeyValues(keys[..., keys.shape[2] - held :, :], values[..., values.shape[2] - held :, :])
