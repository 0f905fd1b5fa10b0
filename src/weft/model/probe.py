"""Tests at load whether a model's rows decoded together get the logits that each gets alone, to choose how to batch them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

from weft.errors import UnsupportedModel, WeftError
from weft.kernels import cpu
from weft.kernels.fused_model import FusedModel
from weft.memory.paged_views import AnyPool, make_batches
from weft.memory.slabs import Pool, RowState, refusal_by
from weft.memory.spec import MAX_STEP_TOKENS, RowContents, SlidingWindow
from weft.memory.transfer import ON_CUDA
from weft.memory.views import Batch, StepSpan

if TYPE_CHECKING:
    from weft.model.adapter import Adapter, Way

log = logging.getLogger("weft.model")

PROBE_LENGTHS = (9, 5, 9, 40)  # three rows that share a slab, so that one is padded, and one in a slab of its own
# State that a model keeps may be taken for another row of the same length. So the rows of equal length follow each other when
# all take turns, directly after a batch of that length, but not when each is decoded alone: that is what the others must match.
PROBE_TURNS = (0, 2, 1, 3)
PROBE_STEPS = 3
PROBE_ROUNDS = 2  # of turns
PROBE_CHUNK = 7  # no power of two: kernels that work in blocks would hide there that they do
PROBE_CHUNKS = ((2, 5), (3, PROBE_CHUNK))  # rows that are also prefilled in chunks, and of how many tokens
PROBE_KEPT = (1, 3, 2, 1)  # by row: tokens of a step of several that count; the others are given up
FUSED_KEPT = (1, 2, 2, 1)  # the same for weft's own operations; what comes behind is compared too
PROBE_GROUPS = ((0, 2), (1, 3))  # rows prefilled together: equally long from the start, then going on from different lengths
PROBE_TOGETHER = 3  # tokens of each
PROBE_RAGGED = (((1, 5), (3, 40)), ((3, 11), (0, 3)), ((2, 9), (1, 2), (3, 1)))  # rows, and how many of their last tokens
TRIAL_LENGTHS = (40, 300)  # tokens of prompts: less than a block of lines, and more
PREFILLED_ROWS = (1, 3)  # whose decoded tokens are prefilled too, to be compared bit for bit
# A way is refused when its logits differ from the row's own by more than this share of their spread, or by more than NOISE
# times what the mere width of a batch does to them; numbers of another row are off by several times the spread.
PROBE_TOLERANCE = 1e-3
PROBE_NOISE = 5.0
PROBE_LIMIT = 1.0
# In 16 bits another kernel rounds otherwise: tiny-hybrid on an H200 moves by 0.08 of its spread from chunks alone. What is
# looked for are the numbers of another row, or a prompt of which something is forgotten: several times the spread.
PROBE_ROUNDING = 0.3
ROUNDING_STEP = 2.0**-8  # of a number in bfloat16: half the distance to the next
# How prompts may be computed together: bit for bit as alone, rounded otherwise, or not at all.
Grouping = Literal["exact", "rounded", "none"]
PROBE_ERRORS = (WeftError, AttributeError, TypeError, ValueError, IndexError, RuntimeError)


class Findings(NamedTuple):
    """What the tests at load found: the way to batch rows, and which bits do not depend on how a row is computed."""

    way: Way
    refused: dict[Way, str]  # the ways that were tried before, and why each does not do
    cuts_freely: bool = False  # no bit depends on where a prompt is cut into chunks
    decodes_like_prefill: bool = False  # a token has the same logits in a decode step as in a prompt, bit for bit
    step_tokens: int = 1  # of a row in one step, with the logits of as many steps, and any number of them may be given up
    unverified: str | None = None  # why no more than one
    grouping: Grouping = "none"
    is_alone_in_a_crowd: bool = False  # a row that decodes has the same bits beside others as without them
    fused: FusedModel | None = None  # the model as weft's own operations, which have its bits
    starts_empty: bool = False  # a row with states of zeros has, from its first token on, the bits of one with new caches


def examine(adapter: Adapter) -> Findings:
    """Find the best way to batch rows (all at once, by slab, alone) that keeps each row's logits, and what is bit-equal.

    Raises UnsupportedModel if not even rows on caches of their own are independent of each other.
    """
    probe = Probe(adapter)
    try:
        reason = probe.find_leak() or probe.find_chunk_dependence()
    except PROBE_ERRORS as error:
        reason = f"it fails when rows take turns or a prompt comes in chunks ({type(error).__name__}: {error})"
    if reason is not None:
        raise UnsupportedModel(f"{adapter.name}: {reason}; its answers would depend on who else is served")
    grouping = probe.find_grouping()
    refused: dict[Way, str] = {}
    for way in ("seam", "plain"):
        try:
            reason = adapter.unreadable or probe.find_difference(way)
        except PROBE_ERRORS as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            unverified = probe.try_step_tokens(way)
            tokens = MAX_STEP_TOKENS if unverified is None else 1
            is_alone = adapter.is_row_invariant and (not ON_CUDA or probe.is_alone_in_a_crowd(way))  # CPU: by construction
            bits = (probe.cuts_freely, probe.decodes_like_prefill)
            fused = probe.try_fused() if way == "seam" and unverified is None else None
            starts_empty = probe.starts_empty(way, fused)
            return Findings(way, refused, *bits, tokens, unverified, grouping, is_alone, fused, starts_empty)
        refused[way] = reason
    return Findings("alone", refused, probe.cuts_freely, unverified="its rows decode alone", grouping=grouping)


def ragged_problem(adapter: Adapter) -> str | None:
    """Return how the forward of prompts of different lengths differs from the model's own of each; None if it does not."""
    prompts = [[(5 + 31 * n * (n + length)) % adapter.vocab_size for n in range(length)] for length in TRIAL_LENGTHS]
    try:
        own = [adapter.model(mx.array([prompt]), cache=make_prompt_cache(adapter.model))[0, -1] for prompt in prompts]
        found = adapter.last_logits(prompts)
        worst = max(_difference(one, wanted) for one, wanted in zip(found, own, strict=True))
    except PROBE_ERRORS as error:
        return f"{type(error).__name__}: {error}"
    allowed = PROBE_TOLERANCE if own[0].dtype == mx.float32 else adapter.rounding_share
    return None if worst <= allowed else f"logits differ by {worst:.2g} of their spread, {allowed:.2g} are allowed"


class Probe:
    """Compares the logits of four short test rows decoded alone with those decoded in turns, after chunks, or in a batch."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        size, rows = adapter.vocab_size, range(len(PROBE_LENGTHS))
        self.prompts = [[(7 + 31 * row + 11 * n * (n + row)) % size for n in range(PROBE_LENGTHS[row])] for row in rows]
        self.fed = [[(3 + 17 * row + 5 * step) % size for step in range(PROBE_STEPS)] for row in rows]
        self.alone = [self._decode_alone(row) for row in rows]  # by row and step: the right logits
        self.is_invariant = cpu.is_bound(mx.float32)  # elsewhere kernels are chosen by shape: what is equal here may differ there
        self.prompts_are_invariant = self.is_invariant or adapter.ragged is not None
        self.cuts_freely = self.decodes_like_prefill = False
        rounding = PROBE_TOLERANCE if self.alone[0][0].dtype == mx.float32 else adapter.rounding_share
        self.allowed = min(PROBE_LIMIT, max(rounding, PROBE_NOISE * self._noise()))
        self.stepped: list[list[mx.array]] = []  # by row and step: logits of single steps in the pool
        self.prefilled: dict[int, RowContents] = {}  # by row, in the order of turns: its layers' contents after its prompt

    def find_leak(self) -> str | None:
        """Return how rows decoded in turns on their own caches disturb each other (by state on the model); None if not."""
        caches = {row: self.adapter.prefilled_caches(self.prompts[row]) for row in PROBE_TURNS}
        self.prefilled = {row: self.adapter.contents(own) for row, own in caches.items()}
        for step in range(PROBE_ROUNDS):
            for row, own in caches.items():
                logits = self.adapter.decode_alone(mx.array([[self.fed[row][step]]]), own)
                if reason := self._compare(logits[0], row, step):
                    return f"rows on caches of their own disturb each other ({reason})"
        return None

    def find_chunk_dependence(self) -> str | None:
        """Return how logits after a prompt in chunks differ from those after the prompt in one forward; None if they don't."""
        self.cuts_freely = self.prompts_are_invariant
        for row, chunk_tokens in PROBE_CHUNKS:
            caches = self.adapter.prefilled_caches(self.prompts[row], chunk_tokens)
            logits = self.adapter.decode_alone(mx.array([[self.fed[row][0]]]), caches)
            self.cuts_freely = self.cuts_freely and bool(mx.array_equal(logits[0], self.alone[row][0]))
            if reason := self._compare(logits[0], row, 0):
                return f"a prompt in chunks is not the prompt as a whole ({reason})"
        return None

    def find_grouping(self) -> Grouping:
        """Return whether prompts computed in one forward have the logits that each has alone, and whether bit for bit.

        Where only those of different lengths do not, the adapter loses its forward over them, unless it computes all prompts.
        """
        if self.adapter.unreadable is not None:
            return "none"
        equal, ragged = [self._equal_chunks(pair) for pair in PROBE_GROUPS], [dict(chunks) for chunks in PROBE_RAGGED]
        if self.adapter.ragged is None:
            return self._grouping_of(equal)
        found = self._grouping_of([*equal, *ragged])
        if found != "exact" and not self.adapter.is_always_ragged:  # then only equally long ones
            self.adapter.ragged = None
            return self._grouping_of(equal)
        return found

    def _grouping_of(self, groups: list[dict[int, int]]) -> Grouping:
        try:
            found = [logits for chunks in groups for logits in self._prefill_together(chunks)]
        except PROBE_ERRORS:
            return "none"
        if any(self._compare(logits, row, 0) for row, logits in found):
            return "none"
        is_equal = all(mx.array_equal(logits, self.alone[row][0]) for row, logits in found)
        return "exact" if is_equal and self.prompts_are_invariant and self.cuts_freely else "rounded"

    def _equal_chunks(self, pair: tuple[int, int]) -> dict[int, int]:
        """Return by row how many of its last tokens are computed together: all, if the rows are equally long."""
        lengths = {len(self.prompts[row]) for row in pair}
        return dict.fromkeys(pair, min(lengths) if len(lengths) == 1 else PROBE_TOGETHER)

    def _prefill_together(self, chunks: dict[int, int]) -> list[tuple[int, mx.array]]:
        """Return the first decoded logits of rows whose last tokens, so many of each, are computed together, the others alone."""
        prompts = [self.prompts[row] for row in chunks]
        starts = [len(prompt) - count for prompt, count in zip(prompts, chunks.values(), strict=True)]
        caches = [
            self.adapter.prefilled_caches(prompt[:start]) if start else self.adapter.new_caches(len(prompt))
            for prompt, start in zip(prompts, starts, strict=True)
        ]
        ends = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        self.adapter.prefill_together(ends, caches, starts).finish()
        fed = [mx.array([[self.fed[row][0]]]) for row in chunks]
        return [(row, self.adapter.decode_alone(token, own)[0]) for row, token, own in zip(chunks, fed, caches, strict=True)]

    def find_difference(self, way: Way) -> str | None:
        """Return how rows decoded together in this way differ from rows decoded alone; None if they do not.

        They begin with the contents of the caches that `find_leak` has prefilled and found right.
        """
        for index, contents in self.prefilled.items():
            if refusal := refusal_by(self.adapter.specs, contents, PROBE_LENGTHS[index]):
                return refusal.reason
        pool, states = self._pool(way)
        prefilled = {row: self._prefill_fed(row) for row in PREFILLED_ROWS if self.is_invariant}
        self.decodes_like_prefill = self.is_invariant
        self.stepped = [[] for _ in self.prompts]
        for step in range(PROBE_STEPS):
            for batch in make_batches(pool, states, seam=way == "seam", width=None):
                rows = [None if state is None else states.index(state) for state in batch.rows]
                tokens = mx.array([[0 if row is None else self.fed[row][step]] for row in rows])
                logits = self.adapter.decode(tokens, batch)[:, -1]
                batch.keep([1] * len(rows))
                for index, row in enumerate(rows):
                    if row is None:
                        continue
                    self.stepped[row].append(logits[index])
                    if reason := self._compare(logits[index], row, step):
                        return reason
                    if row in prefilled and not mx.array_equal(logits[index], prefilled[row][step]):
                        self.decodes_like_prefill = False
        return None

    def is_alone_in_a_crowd(self, way: Way) -> bool:
        """Return whether each row has, with the pool for itself, the bits that it had there beside the others."""
        for row, wanted in enumerate(self.stepped):
            pool, states = self._pool(way)
            for step, logits in enumerate(wanted):
                (batch,) = make_batches(pool, [states[row]], seam=way == "seam", width=None)
                tokens = [[self.fed[row][step] if state is states[row] else 0] for state in batch.rows]
                found = self.adapter.decode(mx.array(tokens), batch)[:, -1][batch.rows.index(states[row])]
                batch.keep([1] * len(batch.rows))
                if not mx.array_equal(found, logits):
                    return False
        return True

    def try_step_tokens(self, way: Way) -> str | None:
        """Return why a step of several tokens per row is not as many steps of one, or can not go back; None if it is and can.

        Every row has as many right tokens as PROBE_KEPT says, then wrong ones, which are given up; the next step goes on from
        there. Where bits do not depend on shapes they must be those of single steps.
        """
        if any(isinstance(spec, SlidingWindow) and spec.spare + 1 < MAX_STEP_TOKENS for spec in self.adapter.specs):
            return "its sliding windows have no room to go back"
        try:
            pool, states = self._pool(way)
            at = [0] * len(states)
            for kept, tokens in ((PROBE_KEPT, MAX_STEP_TOKENS), ((1,) * len(states), 2)):
                for batch in make_batches(pool, states, seam=way == "seam", width=None, span=StepSpan(tokens)):
                    if reason := self._verify(batch, states, at, kept):
                        return reason
                at = [begun + count for begun, count in zip(at, kept, strict=True)]
        except PROBE_ERRORS as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _verify(self, batch: Batch, states: list[RowState], at: list[int], kept: tuple[int, ...]) -> str | None:
        """Compute one batch of `try_step_tokens`, in which each row goes on at its step `at`; returns what is wrong with it."""
        rows = [None if state is None else states.index(state) for state in batch.rows]
        right = [[] if row is None else self.fed[row][at[row] : at[row] + kept[row]] for row in rows]
        wrong = [1] * batch.tokens
        logits = self.adapter.decode(mx.array([[*some, *wrong][: batch.tokens] for some in right]), batch)
        if layers := batch.last_only:
            return f"layer {layers[0]} keeps its state after the last token only"
        batch.keep([1 if row is None else kept[row] for row in rows])
        for index, row in enumerate(rows):
            for place in range(0 if row is None else min(kept[row], PROBE_STEPS - at[row])):
                assert row is not None
                found, wanted = logits[index, place], self.stepped[row][at[row] + place]
                if self.adapter.is_row_invariant and not mx.array_equal(found, wanted):
                    return f"logits of several tokens in one step differ from single steps' by {_difference(found, wanted):.2g}"
                if reason := self._compare(found, row, at[row] + place):
                    return f"several tokens in one step: {reason}"
        return None

    def try_fused(self) -> FusedModel | None:
        """Return the model as weft's own operations for decode steps, if its logits have the bits of the layers' own code."""
        fused = self.adapter.fuse()
        if fused is None:
            return None
        try:
            is_right = all(self._decode_fused(fused, kept) for kept in ((1,) * len(self.prompts), FUSED_KEPT))
        except PROBE_ERRORS as error:
            log.debug("%s is computed layer by layer: %s", self.adapter.name, error, exc_info=error)
            return None
        return fused if is_right else None

    def _decode_fused(self, fused: FusedModel, kept: tuple[int, ...]) -> bool:
        """Whether rows have the logits of single steps: each keeps so many tokens of the first step, then one of each."""
        pool, states = self._pool("seam")
        assert isinstance(pool, Pool)
        at, counts = [0] * len(states), kept
        while live := [row for row, begun in enumerate(at) if begun < PROBE_STEPS]:
            # What comes next, and, where several tokens are kept, one behind them that is not.
            drafts = {row: [*self.fed[row][at[row] + 1 : at[row] + counts[row]], *[0] * (counts[row] > 1)] for row in live}
            rows = fused.arrange(pool, {states[row]: 1 + len(drafts[row]) for row in live})
            order = [states.index(state) for state in rows.states]
            tokens = [token for row in order for token in (self.fed[row][at[row]], *drafts[row])]
            step = fused.decode(rows, mx.array(tokens, mx.int32), [1] * len(order), [tuple(drafts[row]) for row in order])
            lines = [(row, place) for row in order for place in range(1 + len(drafts[row]))]
            for line, (row, place) in enumerate(lines):
                if place < counts[row] and not mx.array_equal(step.logits[line], self.stepped[row][at[row] + place]):
                    return False
            if any(drafts.values()):
                step.keep(mx.array([[*drafts[row][:-1], 1, 1][place] for row, place in lines], mx.int32), 0, [])
            for row in live:
                states[row].advance(counts[row])
                at[row] += counts[row]
            counts = (1,) * len(states)
        return True

    def starts_empty(self, way: Way, fused: FusedModel | None) -> bool:
        """Whether a row may enter the pool before its first token: beside another it has the bits of new caches of its own."""
        if not self.is_invariant:
            return False
        caches = self.adapter.new_caches(1)
        wanted = [self.adapter.decode_alone(mx.array([[token]]), caches)[0] for token in self.fed[0]]
        try:
            found = [self._decode_empty(way, None), *([] if fused is None else [self._decode_empty(way, fused)])]
        except PROBE_ERRORS as error:
            log.debug("%s decodes the first token of a row alone: %s", self.adapter.name, error, exc_info=error)
            return False
        return all(mx.array_equal(one, right) for logits in found for one, right in zip(logits, wanted, strict=True))

    def _decode_empty(self, way: Way, fused: FusedModel | None) -> list[mx.array]:
        """Return the logits of row 0's steps if it has no prompt and row 1 steps beside it, by weft's own operations if given."""
        pool = self.adapter.make_pool(slab_tokens=256, max_rows=4, constant_shapes=True, way=way)
        states = [RowState(), RowState()]
        pool.allocate(states[0], self.adapter.empty_contents, 0)
        pool.allocate(states[1], self.prefilled[1], PROBE_LENGTHS[1])
        found: list[mx.array] = []
        for step in range(PROBE_STEPS):
            if fused is not None:
                assert isinstance(pool, Pool)
                rows = fused.arrange(pool, dict.fromkeys(states, 1))
                tokens = mx.array([self.fed[states.index(state)][step] for state in rows.states], mx.int32)
                found.append(fused.decode(rows, tokens, [1, 1], [(), ()]).logits[rows.states.index(states[0])])
                for state in states:
                    state.advance(1)
                continue
            for batch in make_batches(pool, states, seam=way == "seam", width=None):
                tokens = mx.array([[0 if state is None else self.fed[states.index(state)][step]] for state in batch.rows])
                logits = self.adapter.decode(tokens, batch)[:, -1]
                batch.keep([1] * len(batch.rows))
                if states[0] in batch.rows:
                    found.append(logits[batch.rows.index(states[0])])
        return found

    def _pool(self, way: Way) -> tuple[AnyPool, list[RowState]]:
        """Return a pool with the four rows, prefilled."""
        pool = self.adapter.make_pool(slab_tokens=256, max_rows=4, constant_shapes=True, way=way)
        states = [RowState() for _ in self.prompts]
        for index, contents in self.prefilled.items():
            pool.allocate(states[index], contents, PROBE_LENGTHS[index])
        return pool, states

    def _decode_alone(self, row: int) -> list[mx.array]:
        caches = self.adapter.prefilled_caches(self.prompts[row])
        return [self.adapter.decode_alone(mx.array([[token]]), caches)[0] for token in self.fed[row]]

    def _prefill_fed(self, row: int) -> mx.array:
        """Return the logits (steps, V) of a row's fed tokens computed as a further chunk of its prompt."""
        return self.adapter.prefill(self.fed[row], self.adapter.prefilled_caches(self.prompts[row]))[1][0]

    def _noise(self) -> float:
        """Return how much a row's logits differ between a batch of two copies, on mlx-lm's own caches, and decoding alone."""
        caches = make_prompt_cache(self.adapter.model)
        self.adapter.model(mx.array([self.prompts[0]] * 2), cache=caches)
        logits = self.adapter.model(mx.array([[self.fed[0][0]]] * 2), cache=caches)[:, -1]
        return _difference(logits[1], self.alone[0][0])

    def _compare(self, found: mx.array, row: int, step: int) -> str | None:
        """Return a message if a row's logits at a step differ too much from those decoded alone; None if they are right."""
        share = _difference(found, self.alone[row][step])
        return None if share <= self.allowed else f"logits differ by {share:.2g} of their spread, {self.allowed:.2g} are allowed"


def rounding_share(model: nn.Module, vocab_size: int) -> float:
    """Return the share of their spread by which another kernel's logits in 16 bits may differ, PROBE_LIMIT at most.

    A deep model multiplies what its layers round. As much is allowed as the logits change by when the norms' weights are moved
    by a rounding step, up and down in turn: 0.37 for tiny-hybrid, 0.5 and 1.1 for 8 and 32 layers of random weights.
    """
    tokens = mx.array([[(7 + 11 * place * place) % vocab_size for place in range(PROBE_LENGTHS[0])]])
    vectors = [(name, value) for name, value in tree_flatten(model.parameters()) if _is_rounded_vector(value)]
    try:
        plain = model(tokens, cache=make_prompt_cache(model))[0, -1]
        model.update(tree_unflatten([(name, _moved(value)) for name, value in vectors]))
        change = _difference(model(tokens, cache=make_prompt_cache(model))[0, -1], plain)
    except PROBE_ERRORS:  # it fails again, and is refused with a reason, where rows take turns
        return PROBE_ROUNDING
    finally:
        model.update(tree_unflatten(vectors))
    return min(PROBE_LIMIT, max(PROBE_ROUNDING, change))


def _is_rounded_vector(value: mx.array) -> bool:
    return value.ndim == 1 and value.dtype in (mx.bfloat16, mx.float16)


def _moved(weights: mx.array) -> mx.array:
    """Return a vector with its numbers moved by a rounding step, every other one downwards."""
    signs = 1 - 2 * (mx.arange(weights.size) % 2)
    return (weights.astype(mx.float32) * (1 + ROUNDING_STEP * signs)).astype(weights.dtype)


def _difference(found: mx.array, wanted: mx.array) -> float:
    """Return the largest difference between two rows of logits, divided by the standard deviation of `wanted`."""
    worst = mx.max(mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)))
    return float(worst / mx.maximum(mx.std(wanted.astype(mx.float32)), 1e-6))
