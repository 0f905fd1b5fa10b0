"""Adapts mlx-lm's models to weft: reads the geometry of each layer's cache, and builds forwards over weft's memory."""

import functools
import itertools
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from weft.errors import UnsupportedModel
from weft.kernels import cpu, cuda_paged
from weft.kernels.attention import seam_over
from weft.kernels.block_product import BlockProducts
from weft.kernels.blocks import BlockPrompts, block_prompts
from weft.kernels.blocks import bind as bind_blocks
from weft.kernels.cpu import bind as bind_layers
from weft.kernels.cuda_model import bind as bind_cuda
from weft.kernels.cuda_model import bound_step
from weft.kernels.cuda_prompts import RaggedPrompts, try_layers
from weft.kernels.cuda_prompts import bind as bind_prompts
from weft.kernels.fused_model import FusedModel, fits, fused_model
from weft.kernels.gated_delta import bind as bind_gated_delta
from weft.kernels.primitives import ops
from weft.kernels.recurrent import bind as bind_recurrent
from weft.kernels.token_window import TokenWindow
from weft.memory.grouped import GroupedKeyValues, GroupedStates
from weft.memory.paged_views import AnyPool, PagedBatch, PagedView, SlottedView
from weft.memory.pages import PagedPool
from weft.memory.positions import ConvolutionInput, current_notes
from weft.memory.slabs import Pool
from weft.memory.spec import (
    MAX_STEP_TOKENS,
    FullAttention,
    KeyValues,
    LayerContents,
    LayerSpec,
    Plane,
    Recurrent,
    RowContents,
    SlidingWindow,
    empty,
)
from weft.memory.transfer import ON_CUDA
from weft.memory.views import Batch, KeyValueView, StateView
from weft.model.load_phases import LoadPhases
from weft.model.loader import LoadedModel
from weft.model.mtp import MTPHead, Trunk, load_head, states_from
from weft.model.probe import PROBE_CHUNK, PROBE_ERRORS, PROBE_ROUNDING, Findings, examine, ragged_problem, rounding_share
from weft.model.saved_state import LayerCaches, arrays_of, leaves
from weft.model.vision.vision import Seen, load_vision

log = logging.getLogger("weft.model")

Way = Literal["seam", "plain", "alone"]  # explained in memory/views.py; `probe` finds the best that gives each row's own numbers

DEFAULT_CONTEXT = 8192
SAMPLE_LENGTHS = (64, 192)
HIDDEN_STATES = 16  # of a row's last tokens, kept for an MTP head, which reads when it drafts, or when they become too many
STARTED_AT_ONCE = 2  # layers of a forward that is built while the device computes it
SPEC_TOKENS = 4  # of the forward off which the geometry of the layers is read; a shorter row may not have it yet


class RecurrentView(StateView, ArraysCache):  # type: ignore[misc]
    """A StateView that passes mlx-lm's `isinstance(cache, ArraysCache)`."""


class RecurrentRows(GroupedStates, ArraysCache):  # type: ignore[misc]
    """GroupedStates that pass mlx-lm's `isinstance(cache, ArraysCache)`."""


class Chunk:
    """The forward of one or several prompts' chunks: each layer's states, lazy, to be evaluated in order.

    Layers may be built as they are asked for, by an iterator: then the device computes one while the host builds the next.
    """

    def __init__(self, layers: Iterable[list[mx.array]], count: int) -> None:
        self._layers, self._is_built = iter(layers), isinstance(layers, list)
        self._started: deque[list[mx.array]] = deque()  # layers that the device may be computing
        self.num_waiting = count  # layers that were not started
        self.seconds = 0.0  # that were spent on it
        self.ends: mx.array | None = None  # logits (rows, V) behind the prompts that end with it, where they were asked for

    def before(self, states: list[mx.array]) -> None:
        """Evaluate these states first, one after the other."""
        self._layers = itertools.chain(([state] for state in states), self._layers)
        self.num_waiting += len(states)

    def also(self, arrays: list[mx.array]) -> None:
        self._layers = itertools.chain(self._layers, [arrays])
        self.num_waiting += 1

    @property
    def is_done(self) -> bool:
        return not self.num_waiting and not self._started

    def advance(self, *, is_ahead: bool = False) -> bool:
        """Evaluate the next layer of the chunk, waiting for the device; returns whether any layers are left.

        `is_ahead`: the layer behind it is started before, so that the device need not wait for the host.
        """
        if not self._started:
            self._start()
        if is_ahead and self.num_waiting:
            self._start()
        mx.eval(self._started[0])  # sync: a slice's end must be felt by the clock
        self._started.popleft()
        return not self.is_done

    def finish(self) -> None:
        """Evaluate all that is left; layers that are not built yet are started as they are."""
        while self.num_waiting:
            self._start(is_built=self._is_built or self.num_waiting % STARTED_AT_ONCE != 1)
        mx.eval(list(self._started))  # sync: the chunk's end
        self._started.clear()

    def _start(self, *, is_built: bool = False) -> None:
        """Build the next layer and start it; with `is_built` it is only built."""
        self._started.append(next(self._layers))
        self.num_waiting -= 1
        if not is_built:
            mx.async_eval(self._started[-1])  # type: ignore[no-untyped-call]


class Adapter:
    """Wraps a loaded model for the runner: makes caches, builds forwards, and knows the memory layout of its layers."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        way: Way | None = None,
        with_head: bool = True,
        with_vision: bool = True,
        phases: LoadPhases | None = None,
    ) -> None:
        phases = phases or LoadPhases()
        self.model: Callable[..., mx.array] = loaded.model
        self.name = loaded.folder.name
        self.vocab_size = loaded.vocab_size
        self.context_length = loaded.context_length or DEFAULT_CONTEXT
        self.eos_token_ids = frozenset(loaded.eos_token_ids)
        self.weights_bytes = loaded.weights_bytes
        phases.begin("kernels")
        # How far logits in 16 bits may be from another kernel's, measured on the model's own code.
        self.rounding_share = rounding_share(loaded.model, self.vocab_size) if mx.default_device() == mx.gpu else PROBE_ROUNDING
        self.gated_delta_modules = bind_gated_delta(loaded.model)
        bind_recurrent(loaded.model)
        bind_layers(loaded.model)
        products = BlockProducts()  # of prompts on CUDA
        # Whether the numbers of a row are the same in a batch of any size.
        self.is_row_invariant = bind_cuda(loaded.model, products) if ON_CUDA else cpu.is_bound(mx.float32)
        self.model_step = bound_step(loaded.model) if ON_CUDA else None  # its fused decode step, over pages instead of slabs
        _bind_seam(loaded.model)
        self.fused_layers = bind_blocks(loaded.model) if loaded.num_shards == 1 else []  # a block would not add up its slices
        self.head: MTPHead | None = None
        self._trunk: Trunk | None = None
        # Its forward over prompts of any lengths; None: they must be equally long.
        self.ragged: RaggedPrompts | BlockPrompts | None = block_prompts(loaded.model) if self.fused_layers else None
        if ON_CUDA and self.is_row_invariant:
            phases.begin("products")
            self.use_ragged(bind_prompts(loaded.model, products))
            if self.ragged is None:
                try_layers(loaded.model, products)
        phases.begin("MTP head")
        self.head, self.no_head = load_head(loaded) if with_head else (None, None)  # its MTP head, or why it is not used
        phases.begin("trying rows")
        self._examine(way)
        if self.head is not None and self.step_tokens == 1:
            self.head, self.no_head = None, f"its guesses can not be verified: {self.unverified}"
            self._examine(way)
        if self.head is not None:
            self.weights_bytes += self.head.weights_bytes
        phases.begin("vision")
        self.vision, self.no_vision = (
            load_vision(loaded, self.head) if with_vision else (None, None)
        )  # what it sees with, or why not
        if self.vision is not None and self.is_always_ragged:  # chunks with images are computed as in mlx-lm
            try_layers(loaded.model, products)
        phases.end()
        if self.vision is not None:
            self.weights_bytes += self.vision.weights_bytes
        if self.refused and self.way == "alone":
            why = "; ".join(f"{refused}: {reason}" for refused, reason in self.refused.items())
            log.warning("%s decodes each row alone, so rows do not share the cost of a step (%s)", self.name, why)

    @property
    def cuts_freely(self) -> bool:
        """Whether no bit depends on where a prompt is cut; beside a forward over ragged rows chunks with images have another."""
        return self._cuts_freely and (not self.is_always_ragged or self.vision is None)

    @property
    def is_always_ragged(self) -> bool:
        """Whether the forward over ragged rows computes every prompt, because its bits are not those of the model's own."""
        return self.ragged is not None and not self.ragged.has_own_bits

    def use_ragged(self, ragged: RaggedPrompts | None) -> None:
        """Compute prompts by this forward, if it finds what the model's own finds."""
        self.ragged = ragged
        if ragged is not None and (problem := ragged_problem(self)) is not None:
            log.warning("%s: prompts of different lengths are computed one by one (%s)", self.name, problem)
            self.ragged = None

    def _examine(self, way: Way | None) -> None:
        """Read the memory layout of the layers, and find out how rows can be batched."""
        self.specs: list[LayerSpec] = []
        self.layout: list[int | tuple[int, ...]] = []  # by layer: the place of its spec, or of those of a CacheList
        self.unreadable: str | None = None  # why the memory of the layers can not be read
        self._read_specs()
        self.can_be_saved = self.unreadable is None  # a row's states can be copied out and put back
        # A prompt's states after any of its tokens are the first of its keys and values: other layers keep none.
        self.is_positional = self.can_be_saved and all(type(s) is FullAttention or s == Recurrent(()) for s in self.specs)
        found = Findings(way, {}) if way else self._found_by_trying()
        self.way, self.refused = found.way, found.refused
        self._cuts_freely, self.decodes_like_prefill = found.cuts_freely, found.decodes_like_prefill
        self.grouping = found.grouping  # of prompts in one forward
        if ON_CUDA:  # what a model does beside its linear layers is not known
            self.is_row_invariant = found.is_alone_in_a_crowd
        self.step_tokens = found.step_tokens  # most that a row may have in a step
        self.unverified = found.unverified  # why several tokens of a row in one step are not what one after the other are
        self.fused = found.fused  # the model as weft's own operations, where these have its bits
        self.starts_empty = found.starts_empty  # before its first token a row may be in the pool, with `empty_contents`

    def fuse(self) -> FusedModel | None:
        """Return the model as weft's own operations for decode steps, if it can be; whether it has its bits is to be tried."""
        if not self.fused_layers:
            return None
        try:
            trunk = self._trunk = Trunk(self.model)
        except UnsupportedModel:
            return None
        is_normed = self.head is None or self.head.after_norm
        made = fused_model(trunk.model, trunk.stack, trunk.embed, trunk.vocabulary, is_normed=is_normed)
        if made is not None and self.head is not None:
            made = None if self.head.fused is None else replace(made, head=self.head.fused)
        return made if made is not None and fits(made, self.specs) else None

    def _found_by_trying(self) -> Findings:
        """Find out how rows can be batched; a fused step that does not give rows their own numbers, bit for bit, is not used."""
        found = examine(self)
        if self.model_step is None or (found.way == "seam" and found.is_alone_in_a_crowd and found.unverified is None):
            return found
        reason = found.refused.get("seam") or found.unverified or "a row's bits depend on the others"
        log.warning("%s: its fused step is not used, it decodes layer by layer, which is slower (%s)", self.name, reason)
        self.model_step = None
        return examine(self)

    def make_pool(
        self,
        *,
        slab_tokens: int,
        max_rows: int,
        coarse_tokens: int | None = None,
        constant_shapes: bool = False,
        handover_tokens: int | None = None,
        way: Way | None = None,
    ) -> AnyPool:
        """Make an empty pool for rows that decode together, of pages where the step is fused; `way`: the model's own if None."""
        if self.model_step is not None and (way or self.way) == "seam":
            return PagedPool(self.specs, self.model_step.slotted, cuda_paged)
        return Pool(
            self.specs,
            slab_tokens=slab_tokens,
            max_rows=max_rows,
            coarse_tokens=coarse_tokens,
            constant_shapes=constant_shapes,
            handover_tokens=handover_tokens,
        )

    def new_caches(self, prompt_tokens: int) -> LayerCaches:
        """Make fresh mlx-lm caches for one row; the first write allocates the whole prompt, so no chunk copies earlier ones.

        A model with an MTP head has two more: of the head's layer, and of the last token's hidden state.
        """
        return self.reset_growth(self._make_caches(), prompt_tokens)

    def _make_caches(self) -> LayerCaches:
        caches: LayerCaches = make_prompt_cache(self.model)
        return caches if self.head is None else [*caches, self.head.new_cache(), ArraysCache(1)]

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

    def prefill(self, tokens: list[int], caches: LayerCaches, seen: Seen | None = None) -> tuple[Chunk, mx.array]:
        """Return a prompt chunk's lazy forward for one row: a `Chunk` to evaluate layer by layer, and its logits (1, T, V)."""
        tokens = tokens if seen is None or seen.tokens is None else seen.tokens
        if self.ragged is not None and self.is_always_ragged and seen is None:
            logits = self._forward_ragged(self.ragged, [tokens], [caches])[:, : len(tokens)]
        else:
            logits = self._forward(mx.array([tokens], mx.int32), caches, seen=seen)
        return _built_chunk([caches]), logits

    def prefill_together(
        self, chunks: list[list[int]], rows: list[LayerCaches], starts: list[int], whole: Sequence[int] = ()
    ) -> Chunk:
        """Return the lazy forward of chunks of prompts, each on its row's own caches, with the logits behind those in `whole`.

        `starts`: how many tokens each row has. If the model has no forward over ragged rows, the chunks must be equally long, and
        all rows new, or none. `whole`: chunks that go to the end of their prompts, where there is a `trunk`.
        """
        if whole:
            return self._forward_to_ends(chunks, rows, whole)
        if isinstance(self.ragged, RaggedPrompts) and self.head is None and self.ragged.stack is not None:
            return Chunk(self.ragged.layers_of(rows, chunks), len(rows[0]))
        if self.ragged is not None and (self.is_always_ragged or not is_even([*map(len, chunks)], starts)):
            self._forward_ragged(self.ragged, chunks, rows)
        else:
            offset = starts[0] if len({*starts}) == 1 else mx.array(starts, mx.int32)
            self._forward(mx.array(chunks, mx.int32), [_grouped(layer, offset) for layer in zip(*rows, strict=True)])
        return _built_chunk(rows)

    @property
    def trunk(self) -> Trunk | None:
        """The model in two parts, where a prompt's last token may be computed with its other ones for its logits; else None.

        The logits must have the bits of a step's, and caches must be able to end one token earlier again: keys and values only.
        """
        is_like_steps = self.decodes_like_prefill and self.fused is not None and self.fused.is_current
        is_possible = is_like_steps and self.is_positional and self.head is None and self.ragged is not None
        return self._trunk if is_possible and not self.is_always_ragged else None

    def _forward_to_ends(self, chunks: list[list[int]], rows: list[LayerCaches], whole: Sequence[int]) -> Chunk:
        assert self.ragged is not None
        assert self.trunk is not None
        lines, caches = self.ragged.forward_of(rows, chunks)
        states = self.trunk.states(lines.tokens, caches)
        chunk = _built_chunk(rows)
        chunk.ends = self.trunk.logits(states[:, mx.array([lines.bounds[at + 1] - 1 for at in whole])])[0]
        chunk.also([chunk.ends])
        return chunk

    def joins_states(self, counts: list[int], starts: list[int]) -> bool:
        """Whether chunks of so many tokens, of rows that have so many, leave the rows' states as parts of common arrays."""
        is_joint = self.is_always_ragged or is_even(counts, starts)
        return len(counts) > 1 and not self.is_positional and is_joint

    def last_logits(self, prompts: list[list[int]]) -> list[mx.array]:
        """Return the logits (V,) behind each of several prompts, computed together by the forward over ragged rows."""
        assert self.ragged is not None
        logits = self._forward_ragged(self.ragged, prompts, [self.new_caches(len(prompt)) for prompt in prompts])
        return [logits[0, end - 1] for end in itertools.accumulate(map(len, prompts))]

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

    def saved_bytes(self, start: int, count: int) -> int:
        """Return how many bytes a saved chunk of so many tokens takes, at least: its keys and values, and all other states."""
        return sum(spec.bytes_at(count if type(spec) is FullAttention else start + count) for spec in self.specs)

    @functools.cached_property
    def _sample_bytes(self) -> list[tuple[int, int]]:
        """Two measured points (tokens, bytes of a row), for a linear estimate of row sizes where layers are unreadable."""
        return [(n, self.bytes_of(self.prefilled_caches([1] * n, PROBE_CHUNK))) for n in SAMPLE_LENGTHS]

    def contents(self, caches: LayerCaches) -> list[LayerContents | None]:
        """Read the contents of one row's caches: an entry per cache, those inside a CacheList singly; None where unreadable."""
        return [_contents(cache) for cache in leaves(caches)]

    @functools.cached_property
    def empty_contents(self) -> RowContents:
        """What a row's layers hold before its first token where that is states of zeros: no keys, no values, and these."""
        return [empty(spec) for spec in self.specs]

    def decode(self, tokens: mx.array, batch: Batch) -> mx.array:
        """Build the lazy forward of a step's tokens over a batch's cache views, (B, T) → logits (B, T, V)."""
        with batch.noting():
            return self._forward(tokens, [self._view(batch, place) for place in self.layout], reads=False)

    def _forward(self, tokens: mx.array, caches: LayerCaches, *, reads: bool = True, seen: Seen | None = None) -> mx.array:
        """Build the model's forward, (B, T) → logits (B, T, V); its MTP head, if any, reads the tokens too, or will later.

        `seen`: embeddings and positions, where they are not those of the tokens alone.
        """
        embeddings = None if seen is None else seen.embeddings
        if seen is not None:
            caches = seen.placed(caches)
        if self.head is None:
            return self.model(tokens, cache=caches, **({} if embeddings is None else {"input_embeddings": embeddings}))
        *own, keys_and_values, last = caches
        hidden, logits = self.head.trunk(tokens, own, embeddings)
        self._keep_hidden(self.head, hidden, last, (tokens, keys_and_values, embeddings) if reads else None)
        return logits

    def _forward_ragged(self, ragged: RaggedPrompts | BlockPrompts, chunks: list[list[int]], rows: list[LayerCaches]) -> mx.array:
        """Build the model's forward over chunks of rows, one behind the other and filled up: logits (1, lines, V).

        An MTP head, if any, reads each row's tokens by themselves.
        """
        own = rows if self.head is None else [row[:-2] for row in rows]
        lines, caches = ragged.forward_of(own, chunks)
        if self.head is None:
            return self.model(lines.tokens, cache=caches)
        hidden, logits = self.head.trunk(lines.tokens, caches)
        for row, (first, end) in zip(rows, itertools.pairwise(lines.bounds), strict=True):
            self._keep_hidden(self.head, hidden[:, first:end], row[-1], (lines.tokens[:, first:end], row[-2], None))
        return logits

    @staticmethod
    def _keep_hidden(head: MTPHead, hidden: mx.array, last: Any, reading: tuple[mx.array, Any, mx.array | None] | None) -> None:
        """Keep the last of rows' hidden states (B, T, H) in their cache `last`, for the MTP head.

        `reading`: the tokens, cache and embeddings with which the head reads now; None: it will later.
        """
        rows, count, size = hidden.shape
        earlier = mx.zeros((rows, HIDDEN_STATES, size), hidden.dtype) if last[0] is None else last[0]
        if count == 1 and reading is None and cpu.is_bound(hidden.dtype):
            last[0] = ops.shift(earlier, hidden)
            return
        columns = mx.concatenate([earlier, hidden], axis=1)
        if reading is not None:
            tokens, keys_and_values, embeddings = reading
            head.read(tokens, columns[:, HIDDEN_STATES - 1 : -1], keys_and_values, embeddings)
        last[0] = kept = columns[:, count:] if count == 1 else mx.contiguous(columns[:, count:])
        if (notes := current_notes()) is not None:  # a row that goes back has other last states
            kind = TokenWindow if cpu.is_bound(columns.dtype) else ConvolutionInput
            notes.note(kept, kind(columns, HIDDEN_STATES))

    def read(self, tokens: mx.array, starts: list[int], batch: Batch) -> mx.array:
        """Let the MTP head read tokens (B, T) and return its own states (B, T, H).

        `starts`: by row, where in its kept hidden states the one before its first token is.
        """
        assert self.head is not None
        hidden = self._view(batch, self.layout[-1])[0]
        return self.head.read(tokens, states_from(hidden, starts, tokens.shape[1]), self._view(batch, self.layout[-2]))

    def guess(
        self, tokens: mx.array, starts: list[int], batch: Batch, chosen: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Let the MTP head read tokens (B, T), and guess behind one of each row: its states (B, 1, H) and logits (B, V).

        `starts`: as for `read`. `chosen` (B,): the token that is guessed from; None: the last.
        """
        assert self.head is not None
        hidden = self._view(batch, self.layout[-1])[0]
        return self.head.guess(tokens, hidden, starts, self._view(batch, self.layout[-2]), chosen)

    def guess_on(self, tokens: mx.array, states: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """Let the MTP head read one token (B,) that it guessed itself, from its own states (B, 1, H), and guess the next."""
        assert self.head is not None
        return self.head.guess(tokens, states, [0] * len(batch.rows), self._view(batch, self.layout[-2]))

    @property
    def guesses_ahead(self) -> bool:
        """Whether the MTP head can guess behind a step before its tokens are read."""
        return self.fused is not None and self.fused.head is not None

    def decode_alone(self, tokens: mx.array, caches: LayerCaches, position: int | None = None) -> mx.array:
        """Build and start, without waiting, the forward of one token of one row on its own caches, (1, 1) → logits (1, V).

        `position`: of the token, where it is not its number in the row.
        """
        logits = self._forward(tokens, caches, seen=None if position is None else Seen(None, position))[:, -1]
        mx.async_eval(logits, [arrays_of(cache) for cache in leaves(caches)])  # type: ignore[no-untyped-call]
        return logits

    def _view(self, batch: Batch, place: int | tuple[int, ...]) -> Any:
        if isinstance(place, tuple):
            return tuple(self._view(batch, inner) for inner in place)
        is_recurrent = isinstance(self.specs[place], Recurrent)
        if isinstance(batch, PagedBatch) and (place in batch.paged_pool.slotted or not is_recurrent):
            return (SlottedView if is_recurrent else PagedView)(batch, place)
        return (RecurrentView if is_recurrent else KeyValueView)(batch, place)

    def _read_specs(self) -> None:
        """Build (not run) a short forward and record the geometry of every layer's cache in `specs` and `layout`."""
        caches = self._make_caches()
        try:
            self._forward(mx.zeros((1, SPEC_TOKENS), mx.int32), caches)
        except PROBE_ERRORS as error:
            raise UnsupportedModel(f"{self.name}: its own forward fails ({error}); the model can not be served") from error
        for index, cache in enumerate(caches):
            first = len(self.specs)
            for leaf in leaves([cache]):
                if (spec := _spec(leaf)) is None:
                    self.unreadable = f"layer {index} keeps its memory in a {type(leaf).__name__}"
                self.specs.append(spec or Recurrent(()))
            self.layout.append(tuple(range(first, len(self.specs))) if type(cache) is CacheList else first)


def is_even(counts: list[int], starts: list[int]) -> bool:
    """Whether chunks of so many tokens, of rows that have so many, are equally long, and all rows are new or none is."""
    return len({*counts}) == 1 and len({start == 0 for start in starts}) == 1


def _bind_seam(model: Any) -> None:
    """Replace `scaled_dot_product_attention` by weft's (the seam) in the modules of a model's layers, once per process."""
    for name in sorted({type(module).__module__ for module in model.modules()}):
        module = sys.modules[name]
        original = getattr(module, "scaled_dot_product_attention", None)
        if original is not None and not hasattr(original, "weft_seam"):
            module.scaled_dot_product_attention = seam_over(original)  # type: ignore[attr-defined]


def _grouped(rows: Sequence[Any], offset: int | mx.array) -> Any:
    """Return one layer's cache for a forward of several rows, over the rows' own caches."""
    if type(rows[0]) is CacheList:
        return tuple(_grouped(inner, offset) for inner in zip(*(row.caches for row in rows), strict=True))
    return RecurrentRows(rows) if type(rows[0]) is ArraysCache else GroupedKeyValues(rows, offset)


def _spec(cache: Any) -> LayerSpec | None:
    """Return a layer's spec, read from its cache after a short forward; None for a kind of cache slabs can not hold."""
    contents = _contents(cache)
    if contents is None:
        return None
    if not isinstance(contents, KeyValues):
        return Recurrent(tuple(None if array is None else (tuple(array.shape[1:]), array.dtype) for array in contents))
    keys, values = (Plane(array.shape[1], array.shape[3], array.dtype) for array in (contents.keys, contents.values))
    if type(cache) is not RotatingKVCache:
        return FullAttention(keys, values)
    # Kernels on a GPU read a ring that is no larger than its window; there steps of several tokens are left to other models.
    return SlidingWindow(keys, values, cache.max_size, spare=MAX_STEP_TOKENS - 1 if mx.default_device() == mx.cpu else 0)


def _built_chunk(rows: list[LayerCaches]) -> Chunk:
    """Return a forward that was built whole: the states that rows' caches have by it, layer by layer."""
    by_layer = zip(*(leaves(caches) for caches in rows), strict=True)
    layers = [[array for cache in layer for array in arrays_of(cache)] for layer in by_layer]
    return Chunk(layers, len(layers))


def _contents(cache: Any) -> LayerContents | None:
    """Return the states in a cache, keys and values in token order; None for a kind of cache that slabs can not hold."""
    if type(cache) is ArraysCache:
        return tuple(cache.cache)
    if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", False):
        return None
    if cache.keys is None:
        return ()  # a layer that never touches its cache remembers nothing
    if type(cache) is KVCache:
        planes = cache.keys, cache.values
        return KeyValues(planes[0][..., : cache.offset, :], planes[1][..., : cache.offset, :], planes)
    keys, values = (cache._temporal_order(array) for array in (cache.keys, cache.values))
    held = min(cache.offset, cache.max_size)
    return KeyValues(keys[..., keys.shape[2] - held :, :], values[..., values.shape[2] - held :, :])
