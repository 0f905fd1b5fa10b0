"""Speculation: draft tokens that a decode step verifies beside each row's next token.

Every line of a step is sampled as it would be in a step of its own; a draft token counts only where the sampler chose it.
So drafts change how many tokens a step gives, and never which. They come from four sources, in this order: tokens that a
grammar or the end of reasoning forces, text that was there before (prompt, answer, the client's prediction), and guesses of
the model's MTP head. How many are verified is the policy's affair (`draft_policy.py`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from weft.config import EngineConfig
from weft.engine.draft_policy import FEW_ROWS, FORCED, HEAD, DraftPolicy
from weft.engine.lookup import LookUp
from weft.engine.runner import Runner, Step
from weft.engine.sequence import Sequence
from weft.engine.step_costs import CPU_COSTS, USUAL_COSTS
from weft.ipc.messages import DraftCounts
from weft.kernels import cpu

log = logging.getLogger("weft.engine")

LOOKED_AT_EVERY = 4  # tokens, in a crowd: searching the text of every row for every token costs more than it finds there
MAX_UNASKED = 8  # steps of a crowd without drafts, one after the other, in which nobody is asked for any
SHORT_DRAFT = 4  # tokens: a copy of fewer is a worse guess than the MTP head's
LOOKUP, PREDICTION = "lookup", "prediction"

Found = TypeVar("Found")


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next in a sequence, and where they come from."""

    source: str
    tokens: tuple[int, ...]


class Source(Protocol):
    """A source that needs no model."""

    name: str

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        """Return up to `count` tokens that may come next; None if it knows of none."""


class ForcedTokens:
    """Drafts what a grammar, or the end of a spent reasoning budget, leaves no choice about."""

    name = FORCED

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        if sequence.constraint is None or not (tokens := sequence.constraint.forced()):
            return None
        return Draft(FORCED, tokens[:count])


class EarlierText:
    """Drafts what followed the last tokens when they occurred before, in prompt, answer or prediction."""

    name = LOOKUP

    def draft(self, sequence: Sequence, count: int) -> Draft | None:
        drafting = sequence.drafting
        if drafting.lookup is None:
            drafting.lookup = LookUp(sequence.prompt, sequence.request.prediction)
        tokens, is_predicted = drafting.lookup.draft(sequence.output, count)
        return Draft(PREDICTION if is_predicted else LOOKUP, tuple(tokens)) if tokens else None


class Speculation:
    """Drafts tokens for decoding sequences, and counts what was accepted."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self.runner = runner
        adapter = runner.adapter
        self.unused = self._unused(config)  # by source that was asked for and is not in use: why
        has_head = adapter.head is not None  # a model without one is no reason to say anything
        self.names = tuple(name for name in config.speculate if name not in self.unused and (name != HEAD or has_head))
        self.max_draft = 0 if config.width is not None else adapter.step_tokens - 1
        self.is_ragged = runner.has_fused_steps  # rows of a step may have different numbers of tokens
        self.few_rows = min(FEW_ROWS, runner.guesses.max_rows)  # in larger batches rows are asked for drafts now and then
        table = CPU_COSTS if cpu.has_operations() else USUAL_COSTS
        most = max(1, self.max_draft)
        self.policy = DraftPolicy(by_clock=config.exact, max_tokens=most, table=table, is_ragged=self.is_ragged)
        # Forced tokens need not be verified; but where all rows have as many tokens it must be asked whether they pay.
        self.emits_forced = self.is_ragged and FORCED in self.names
        sources = (ForcedTokens(), EarlierText())
        self.sources: list[Source] = [
            one for one in sources if one.name in self.names and not (self.emits_forced and one.name == FORCED)
        ]
        self.uses_head = HEAD in self.names
        self.drafted: Counter[str] = Counter()  # tokens verified so far, by source
        self.accepted: Counter[str] = Counter()
        self.num_drafts = 0
        self.accepted_at = [0] * self.max_draft  # by place in a draft
        self._drafts: dict[Sequence, Draft] = {}  # of the step under way
        self._did_guess = False  # the head took part in the step under way
        self._is_beginning = False  # it had to read first what it had left unread
        self._pause = self._num_unasked = 0  # steps of a crowd in which nobody is asked, and how many of them are over

    def _unused(self, config: EngineConfig) -> dict[str, str]:
        adapter = self.runner.adapter
        if config.width is not None:
            return dict.fromkeys(config.speculate, "steps of constant width have no room for drafts")
        if adapter.step_tokens == 1:
            return dict.fromkeys(config.speculate, f"drafts can not be verified: {adapter.unverified}")
        return {HEAD: adapter.no_head} if HEAD in config.speculate and adapter.no_head is not None else {}

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(dict(self.drafted), dict(self.accepted))

    def affordable_tokens(self, num_rows: int, room: float | None) -> int:
        """Return how many tokens per row a step may have that takes no more than `room` times a plain one; None: any number."""
        if room is None or not num_rows:
            return self.max_draft + 1
        return sum(self.policy.cost(num_rows, tokens, self.uses_head) <= room for tokens in range(1, self.max_draft + 2))

    def may_draft(self, sequences: tuple[Sequence, ...], *, is_settled: bool) -> bool:
        """Whether a step of these sequences may have several tokens per row: drafts, or known ones that are replayed.

        For drafts the pending step must be settled first, which costs time, so it is asked whether they pay, if there is one.
        """
        self._did_guess = self._is_beginning = False
        if not self.max_draft or not sequences or any(one.drafting.is_given_up for one in sequences):
            return False  # beside other rows' drafts its own tokens would be followed by ones that do not count
        if any(one.is_replaying for one in sequences):
            return True
        if len(sequences) > self.few_rows and self._num_unasked < self._pause and not any(map(_is_copying, sequences)):
            self._num_unasked += 1
            return False
        if is_settled and len(sequences) <= self.few_rows:
            return True
        found = self._would_pay(sequences)
        self._pause, self._num_unasked = 0 if found else min(MAX_UNASKED, 1 + 2 * self._pause), 0
        return found

    def _would_pay(self, sequences: tuple[Sequence, ...]) -> bool:
        """Whether drafts of these sequences, as far as they can be told before the pending step is settled, are worth it."""
        able = [one for one in sequences if one.may_have_drafts and self._room(one) > 0]
        if self._asks_head(sequences) and any(self.policy.depths([one.drafting.record for one in able], HEAD, len(sequences))):
            return True
        if len(sequences) > self.few_rows:
            able = [one for one in able if _is_looked_at(one)]
        found = [(one, draft) for one in able if (draft := self._expected(one)) is not None]
        return self.policy.pays([(one.drafting.record, draft.source, len(draft.tokens)) for one, draft in found], len(sequences))

    def _asks_head(self, sequences: Rows[Sequence]) -> bool:
        """Whether the MTP head may guess for these sequences; on a CPU for two at most: of more a line costs as much as a row."""
        return self.uses_head and (not self.is_ragged or len(sequences) <= self.few_rows)

    def _expected(self, sequence: Sequence) -> Draft | None:
        """Return the draft behind a sequence's token in flight, if any, as far as it can be told without that token."""
        for source in self.sources:
            draft = self._guarded(source.name, sequence, partial(source.draft, count=self.max_draft))
            if draft is not None and (tokens := draft.tokens[sequence.num_in_flight :]):
                return Draft(draft.source, tokens)
        return None

    def drafts(self, sequences: tuple[Sequence, ...], most: int) -> dict[Sequence, tuple[int, ...]]:
        """Return the drafts to verify in a step of these sequences, whose tokens are all known and whose rows are allocated.

        None is longer than `most` tokens.
        """
        found = {one: draft for one in sequences if (draft := self._known_draft(one, most)) is not None}
        if self._asks_head(sequences):
            self._add_guesses(sequences, found, most)
        rows = [(one, found[one]) for one in sequences if one in found]
        entries = [(one.drafting.record, draft.source, len(draft.tokens)) for one, draft in rows]
        counts = self.policy.choose(entries, len(sequences)) if entries else []
        chosen = [(one, Draft(draft.source, draft.tokens[:count])) for (one, draft), count in zip(rows, counts, strict=True)]
        self._drafts = {one: draft for one, draft in chosen if draft.tokens}
        return {one: draft.tokens for one, draft in self._drafts.items()}

    def note(self, accepted: Mapping[Sequence, int]) -> None:
        """Learn how many tokens each sequence of a step emitted behind its first one: of its draft, if it had one."""
        for sequence, count in accepted.items():
            self.policy.advance(sequence.drafting.record, 1 + count)
        for sequence, draft in self._drafts.items():
            count, size = accepted.get(sequence, 0), len(draft.tokens)
            self.policy.note(sequence.drafting.record, draft.source, size, count)
            for drafted, taken in ((self.drafted, self.accepted), (sequence.drafting.drafted, sequence.drafting.accepted)):
                drafted[draft.source] += size
                taken[draft.source] += count
            sequence.timings.drafts = sequence.drafting.counts
            self.num_drafts += 1
            for place in range(count):
                self.accepted_at[place] += 1
        self._drafts = {}

    def note_forced(self, sequence: Sequence, count: int) -> None:
        """Count tokens of a sequence that its constraint forced, and that were not sampled."""
        for counter in (self.drafted, self.accepted, sequence.drafting.drafted, sequence.drafting.accepted):
            counter[FORCED] += count
        sequence.timings.drafts = sequence.drafting.counts
        self.policy.advance(sequence.drafting.record, count)

    def measure(self, num_rows: int, num_further: int, seconds: float) -> None:
        """Learn how long a turn with a step of so many rows took, and of so many tokens beside one of each row."""
        if not self._is_beginning:  # which costs more, once
            self.policy.measure(num_rows, num_further / num_rows, seconds, self._did_guess)

    def _add_guesses(self, sequences: tuple[Sequence, ...], found: dict[Sequence, Draft], most: int) -> None:
        """Add the MTP head's guesses for the rows that have no better draft, as many as pay."""

        def has_better(one: Sequence) -> bool:
            return one in found and (found[one].source == FORCED or len(found[one].tokens) >= SHORT_DRAFT)

        rows = [one for one in sequences if not has_better(one) and self._room(one) > 0 and one.may_have_drafts]
        guessed = self.runner.guesses.take_ahead(rows)
        if guessed is None:
            depths = self.policy.depths([one.drafting.record for one in rows], HEAD, len(sequences))
            if not any(depths):
                return
            self._is_beginning = True
            guess = partial(self.runner.guesses.guess, sequences, min(most, max(depths)))
            tokens_of = self._ask_head(sequences, guess) or {}
            guessed = {one: tokens_of.get(one, ())[:depth] for one, depth in zip(rows, depths, strict=True)}
        for one in rows:
            if tokens := self._usable(one, guessed[one][: min(most, self._room(one))]):
                found[one] = Draft(HEAD, tokens)

    def follow(self, step: Step) -> None:
        """Start what comes behind a step whose tokens are sampled and not read: the MTP head's guesses too, if these will pay."""
        count = 0
        if self._asks_head(step.sequences) and not any(one.is_replaying for one in step.sequences):
            records = [one.drafting.record if one.may_have_drafts else None for one in step.sequences]
            count = min(self.max_draft, max(self.policy.depths(records, HEAD, len(records)), default=0))
        guessed = self._ask_head(tuple(step.sequences), partial(self.runner.follow, step, count)) if count else None
        if guessed is None:
            self.runner.follow(step, 0)  # rows keep their tokens all the same
        self._did_guess |= bool(guessed)

    def _ask_head(self, sequences: tuple[Sequence, ...], ask: Callable[[], Found]) -> Found | None:
        """Ask the MTP head; if it fails, these sequences go on without drafts, computed anew if it failed on the device."""
        try:
            self.runner.faults.at("guess", *sequences)
            return ask()
        except Exception as error:  # a border: a draft is never worth an answer
            log.warning("%d sequences go on without drafts: the MTP head failed", len(sequences), exc_info=error)
            for sequence in sequences:
                sequence.give_up_drafts()
            if isinstance(error, RuntimeError):  # as MLX reports what failed on the device
                raise
            return None

    def _known_draft(self, sequence: Sequence, most: int) -> Draft | None:
        """Return a draft of the first source that needs no model and has one."""
        room = min(most, self._room(sequence))
        if room <= 0 or not sequence.may_have_drafts:
            return None
        for source in self.sources:
            draft = self._guarded(source.name, sequence, partial(source.draft, count=room))
            if draft and (tokens := self._usable(sequence, draft.tokens[:room])):
                return Draft(draft.source, tokens)
        return None

    def _room(self, sequence: Sequence) -> int:
        """Return how many draft tokens a sequence may have: at least one token must be left to sample behind them."""
        left = min(sequence.max_tokens - sequence.num_output, self.runner.adapter.context_length - sequence.num_tokens) - 1
        return 0 if sequence.is_replaying else min(self.max_draft, left)

    def _guarded(self, source: str, sequence: Sequence, ask: Callable[[Sequence], Found]) -> Found | None:
        """Ask a source; whatever it raises costs the draft, not the answer."""
        try:
            self.runner.faults.at("draft", sequence)
            return ask(sequence)
        except Exception as error:  # a border: a draft is never worth an answer
            log.warning("sequence %d goes on without a draft (%s)", sequence.id, source, exc_info=error)
            return None

    def _usable(self, sequence: Sequence, draft: tuple[int, ...]) -> tuple[int, ...]:
        """Cut a draft before the first token that can not count: no token at all, an end, or one its constraint refuses."""
        size, ends = self.runner.adapter.vocab_size, sequence.stop_ids
        end = next((at for at, token in enumerate(draft) if not 0 <= token < size or token in ends), len(draft))
        if sequence.constraint is not None:
            end = sum(1 for _ in sequence.constraint.ahead(draft[:end]))
        return draft[:end]


def _is_looked_at(sequence: Sequence) -> bool:
    """Whether a row of a crowd is asked for drafts: under a constraint, amid a copy, and now and then."""
    return _is_copying(sequence) or (sequence.num_output + sequence.id) % LOOKED_AT_EVERY == 0


def _is_copying(sequence: Sequence) -> bool:
    """Whether a draft is likely at any time: under a constraint, or amid a copy of earlier text."""
    lookup = sequence.drafting.lookup
    return sequence.constraint is not None or (lookup is not None and lookup.is_following)
