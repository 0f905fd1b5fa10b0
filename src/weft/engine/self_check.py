"""Checks with a user's own model and machine that an answer does not depend on how it was computed; for `weft doctor --check`.

Every check answers the same prompts in two ways and compares tokens, and the bits of the logits that decided them. What the
engine's settings claim (`is_promised`) must be equal; elsewhere the first difference is worth knowing.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

import mlx.core as mx
import numpy as np
from msgspec import structs

from weft.config import EngineConfig
from weft.engine.draft_policy import DraftPolicy
from weft.engine.engine import Engine
from weft.engine.runner import Step
from weft.engine.sequence import Line, Sequence
from weft.errors import WeftError
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.model.adapter import Adapter

NUM_TOKENS = 32  # of an answer
NUM_ROWS = 8
CACHE_BYTES = 1 << 30
SHORT_CHUNK = 13  # tokens; no power of two: kernels that work in blocks would hide there that they do
WRONG_EVERY = 11  # one in so many predicted tokens is wrong: drafts are accepted, and refused
TIMED_TOKENS = 48
TIMED_PROMPT = 512


@dataclass(frozen=True)
class Comparison:
    """What came of one check: the first token of an answer that differs, and the first whose logits do; None: all are equal."""

    referee: str  # what it was compared with
    is_promised: bool
    token_at: int | None = None
    bits_at: int | None = None
    note: str = ""

    @property
    def is_equal(self) -> bool:
        return self.token_at is None and self.bits_at is None

    def __str__(self) -> str:
        if self.is_equal:
            return f"= {self.referee}, tokens and bits; {self.note}"
        places = {"bits of logits": self.bits_at, "tokens": self.token_at}
        differences = [f"{what} differ from token {at} on" for what, at in places.items() if at is not None]
        return f"≠ {self.referee}: {', '.join(differences)}; {self.note}"


class NotChecked(WeftError):
    """Raised where a check has nothing to compare, such as drafts of a model that verifies none; says why."""


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and a digest of the logits behind each."""

    tokens: list[int]
    digests: list[bytes]

    def __getitem__(self, part: slice) -> "Answer":
        return Answer(self.tokens[part], self.digests[part])


class NotingEngine(Engine):
    """An engine that notes a digest of the logits of every token."""

    def __init__(self, adapter: Adapter, config: EngineConfig) -> None:
        super().__init__(adapter, config)
        self.digests: dict[tuple[int, int], bytes] = {}  # by sequence, and tokens up to the one that was decided

    def sample(self, step: Step) -> None:
        for line, logits in zip(step.lines, np.array(step.logits.astype(mx.float32)), strict=True):  # sync: for comparing
            sequence = line.sequence if isinstance(line, Line) else line
            if sequence in step.new:  # one behind a draft token that is not accepted is decided again later
                self.digests[sequence.id, line.num_tokens] = hashlib.blake2b(logits.tobytes(), digest_size=16).digest()
        super().sample(step)

    def answer_of(self, sequence: Sequence, start: int = 0) -> Answer:
        """Return a finished answer from its token `start` on; raises WeftError if it failed."""
        if sequence.error is not None:
            raise WeftError(sequence.error)
        first = len(sequence.prompt) + 1
        return Answer(
            sequence.output[start:], [self.digests[sequence.id, first + at] for at in range(start, sequence.num_output)]
        )


class SelfCheck:
    """Compares answers of one model computed in different ways, under the settings it is served with.

    There are prompts of different lengths; the first, which is the longest, and the second have `shared` tokens in common.
    """

    def __init__(self, adapter: Adapter, config: EngineConfig, prompts: list[list[int]], shared: int) -> None:
        self.adapter = adapter
        self.prompts = prompts
        self.shared = shared
        self.plain = replace(config, cache_bytes=0, speculate=())
        self.cached = replace(self.plain, cache_bytes=CACHE_BYTES)
        self.drafting = replace(self.plain, speculate=config.speculate)
        self.alone = cache(self._alone)
        self.checks: dict[str, Callable[[], Comparison]] = {
            "batched": self.check_batched,
            "cached": self.check_cached,
            "chunked": self.check_chunked,
            "drafted": self.check_drafted,
            "resumed": self.check_resumed,
        }

    def _request(self, number: int, num_tokens: int = NUM_TOKENS) -> Submit:
        """Return the request of a prompt, as a front sends it: with the place at which later prompts may diverge."""
        return Submit((number,), self.prompts[number], (greedy(num_tokens),), boundaries=(self.shared,))

    def _alone(self, number: int) -> Answer:
        engine = NotingEngine(self.adapter, self.plain)
        (sequence,) = engine.submit_all(self._request(number))
        finish(engine)
        return engine.answer_of(sequence)

    def check_batched(self) -> Comparison:
        """Compare rows that come and go beside each other with each of them alone."""
        engine = NotingEngine(self.adapter, self.plain)
        lengths = [max(NUM_TOKENS - 3 * number, 4) for number in range(len(self.prompts))]
        requests = [self._request(number, length) for number, length in enumerate(lengths)]
        half = len(requests) // 2
        early = [engine.submit_all(request)[0] for request in requests[:half]]
        run_until(engine, lambda: any(sequence.num_output > 2 for sequence in early))
        sequences = [*early, *(engine.submit_all(request)[0] for request in requests[half:])]
        finish(engine)
        wanted = [self.alone(number)[:length] for number, length in enumerate(lengths)]
        note = f"{len(sequences)} rows that come and go"
        return compare(map(engine.answer_of, sequences), wanted, Comparison("alone", self.plain.exact, note=note))

    def check_cached(self) -> Comparison:
        """Compare a prompt that was computed before, and one that shares its beginning, with both computed from their start."""
        if not self.adapter.can_be_saved:
            raise NotChecked(f"no prefix of it is cached: {self.adapter.unreadable}")
        engine = NotingEngine(self.adapter, self.cached)
        engine.submit_all(structs.replace(self._request(0, 2), numbers=(len(self.prompts),)))
        finish(engine)
        sequences = [*engine.submit_all(self._request(0)), *engine.submit_all(self._request(1))]
        finish(engine)
        counts = " and ".join(f"{one.timings.cached_tokens} of {len(one.prompt)}" for one in sequences)
        form = Comparison("cold", self.plain.exact, note=f"{counts} prompt tokens were cached")
        return compare(map(engine.answer_of, sequences), [self.alone(0), self.alone(1)], form)

    def check_chunked(self) -> Comparison:
        """Compare a prompt computed in short chunks with the same prompt in chunks of the usual length."""
        engine = NotingEngine(self.adapter, replace(self.plain, chunk_tokens=SHORT_CHUNK))
        (sequence,) = engine.submit_all(self._request(0))
        finish(engine)
        form = Comparison("whole", self.plain.exact and self.adapter.cuts_freely, note=f"chunks of {SHORT_CHUNK} tokens")
        return compare([engine.answer_of(sequence)], [self.alone(0)], form)

    def check_drafted(self) -> Comparison:
        """Compare an answer with draft tokens, most of them right, with the same answer without any."""
        engine = NotingEngine(self.adapter, self.drafting)
        if not engine.speculation.names:
            raise NotChecked("; ".join(dict.fromkeys(engine.speculation.unused.values())) or "drafts are off")
        # By counts, not by the clock: here a draft is worth verifying even where it does not pay.
        engine.speculation.policy = DraftPolicy(by_clock=False, max_tokens=engine.speculation.max_draft)
        wanted = self.alone(0)
        predicted = list(wanted.tokens)
        for at in range(WRONG_EVERY - 1, len(predicted), WRONG_EVERY):
            predicted[at] = (predicted[at] + 1) % self.adapter.vocab_size
        (sequence,) = engine.submit_all(structs.replace(self._request(0), prediction=tuple(predicted)))
        finish(engine)
        counts = engine.speculation.counts
        drafted, accepted = sum(counts.drafted.values()), sum(counts.accepted.values())
        note = f"{accepted} of {drafted} draft tokens accepted" if drafted else "no draft was worth verifying"
        return compare([engine.answer_of(sequence)], [wanted], Comparison("plain", self.plain.exact, note=note))

    def check_resumed(self) -> Comparison:
        """Compare an answer that goes on after its first half was emitted by another engine with the uninterrupted one."""
        engine, half, wanted = NotingEngine(self.adapter, self.plain), NUM_TOKENS // 2, self.alone(0)
        (sequence,) = engine.submit_all(structs.replace(self._request(0), emitted=(tuple(wanted.tokens[:half]),)))
        finish(engine)
        form = Comparison("uninterrupted", self.plain.exact, note=f"went on after {half} tokens")
        return compare([engine.answer_of(sequence, half)], [wanted[half:]], form, first=half)


class Speeds:
    """Measures how many times as fast a model is in a batch, with a cached prompt, and with drafts."""

    def __init__(self, adapter: Adapter, config: EngineConfig, prompt: list[int]) -> None:
        self.adapter = adapter
        self.config = replace(config, cache_bytes=0, speculate=())
        self.drafting = replace(self.config, speculate=config.speculate)
        size = min(TIMED_PROMPT, adapter.context_length // 2 - TIMED_TOKENS)
        self.prompt = list(itertools.islice(itertools.cycle(prompt), size))
        self.plain_rate = cache(lambda: self._rate(self.config, 1))

    def measure_batch(self) -> str:
        rate, one = self._rate(self.config, NUM_ROWS), self.plain_rate()
        return f"{NUM_ROWS} rows {rate:.1f} tokens/s, {rate / one:.2f} × one row's {one:.1f}"

    def measure_cache(self) -> str:
        engine = Engine(self.adapter, replace(self.config, cache_bytes=CACHE_BYTES))
        cold, cached = self._first_token(engine), self._first_token(engine)
        ratio = f"{cold / cached:.1f} × sooner than after {cold:.3f} s"
        return f"first token of {len(self.prompt)} cached tokens after {cached:.3f} s, {ratio}"

    def measure_drafts(self) -> str:
        rate, one = self._rate(self.drafting, 1), self.plain_rate()
        return f"{rate:.1f} tokens/s, {rate / one:.2f} × one row's {one:.1f} without"

    def _rate(self, config: EngineConfig, num_rows: int) -> float:
        """Return tokens a second of rows that all decode; the first tokens, before everything was used once, do not count."""
        engine = Engine(self.adapter, config)
        sequences = [engine.submit(self.prompt[: 64 + number], greedy(TIMED_TOKENS)) for number in range(num_rows)]
        run_until(engine, lambda: all(sequence.num_output > 2 for sequence in sequences))
        began, earlier = time.monotonic(), sum(sequence.num_output for sequence in sequences)
        run_until(engine, lambda: any(sequence.is_finished for sequence in sequences))
        rate = (sum(sequence.num_output for sequence in sequences) - earlier) / (time.monotonic() - began)
        finish(engine)
        return rate

    def _first_token(self, engine: Engine) -> float:
        sequence = engine.submit(self.prompt, greedy(1))
        finish(engine)
        if sequence.timings.first_token is None:
            raise WeftError(sequence.error or "no token came")
        return sequence.timings.first_token - sequence.timings.submitted


def greedy(max_tokens: int) -> Sampling:
    """Return the sampling parameters of a greedy answer of exactly so many tokens."""
    return Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def run_until(engine: Engine, is_done: Callable[[], bool]) -> None:
    """Run an engine until a condition holds or nothing is left to do; what it emits is dropped."""
    while not engine.idle and not is_done():
        engine.turn()
        engine.take_events()
        engine.take_prompt_events()


def finish(engine: Engine) -> None:
    """Run an engine until nothing is left to do."""
    run_until(engine, lambda: False)


def compare(found: Iterable[Answer], wanted: Iterable[Answer], form: Comparison, first: int = 0) -> Comparison:
    """Fill in a comparison of answers with those that are wanted; `first`: the number of their first token."""
    pairs = list(zip(found, wanted, strict=True))
    token_at = _first_difference([(one.tokens, other.tokens) for one, other in pairs], first)
    bits_at = _first_difference([(one.digests, other.digests) for one, other in pairs], first)
    return replace(form, token_at=token_at, bits_at=bits_at)


def _first_difference(pairs: Iterable[tuple[list[int], list[int]] | tuple[list[bytes], list[bytes]]], first: int) -> int | None:
    """Return the smallest place at which the lists of a pair differ; None if all are equal."""
    places = [
        first + next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in pairs
        if one != other
    ]
    return min(places, default=None)
