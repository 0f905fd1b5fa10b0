"""A sequence: one prompt with one answer inside the engine; this object holds all of its state. Imports no mlx.

The runner and prefix sharing change it directly; all other modules call its methods.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from msgspec import structs

from weft.engine.draft_policy import RowDrafts
from weft.engine.lookup import LookUp
from weft.grammar.constraint import Constraint, TokenDemand
from weft.ipc.limits import Sampling
from weft.ipc.messages import DraftCounts, FinishReason, Submit, Timings, TokenLogprob
from weft.memory.prefix_tree import Node

DRAW_BITS = 32
LARGEST_DRAW = 1 - 2**-24  # the largest float32 below 1: samplers compute in float32


def number_of_bits(bits: int) -> float:
    """Return the random number that DRAW_BITS bits mean, above 0 and below 1 in float32 too.

    0 would draw the first possible token and 1 the last one, however unlikely they are.
    """
    return min(max(bits, 0.5) / (1 << DRAW_BITS), LARGEST_DRAW)


class LayerStates(Protocol):
    """Protocol of the runner's layer states of one sequence (`RowMemory`), as other modules see them."""

    @property
    def has_caches(self) -> bool: ...

    @property
    def is_amid_chunk(self) -> bool: ...


@dataclass
class PrefixCursor:
    """A sequence's pinned node in the prefix tree, and whether it shares its chunks or waits for the disk tier."""

    node: Node | None = None  # pinned: its prompt is computed up to here by whoever computed it first
    first_own_node: Node | None = None  # the first node that this sequence computed itself
    prompt_node: Node | None = None  # not pinned: where its prompt ended when it began to decode
    is_private: bool = False  # what it computes is not entered into the tree
    is_loading: bool = False  # it waits for the disk tier
    has_asked_disk: bool = False
    chunk_limit: int = 0  # a chunk that begins before it ends there at the latest
    cut_at: int | None = None  # the boundary at which it was last cut because other prompts diverge there
    looked_up: tuple[Node | None, int] | None = None  # the node it last looked for more from, and how much was cached then


@dataclass
class Drafting:
    """What a sequence's drafts are looked up in, and what they were worth so far."""

    record: RowDrafts = field(default_factory=RowDrafts)
    lookup: LookUp | None = None
    drafted: Counter[str] = field(default_factory=Counter)  # tokens verified, by source
    accepted: Counter[str] = field(default_factory=Counter)
    is_given_up: bool = False  # computing a draft of it failed

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(dict(self.drafted), dict(self.accepted))


@dataclass(frozen=True)
class Ending:
    """Why a sequence ended: the finish reason, an error message if it failed, the stop token if one ended it."""

    reason: FinishReason
    error: str | None = None
    stop_token: int | None = None  # the end token, which is no part of the answer


class Sequence:
    """One prompt with one answer: output so far, prefill progress, sampling parameters, constraint and layer states."""

    def __init__(self, request: Submit, index: int, max_tokens: int, eos_token_ids: frozenset[int], now: float) -> None:
        sampling = request.samplings[index]
        self.id = request.numbers[index]
        self.request = request
        self.sampling: Sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
        self.output: list[int] = []
        # What is computed in chunks: the prompt, with keys at the places of images; after a restart maybe the answer too.
        self.prefill_ids = request.keyed_prompt
        self.boundaries = tuple(sorted({at for at in request.boundaries if 0 < at < len(request.prompt) - 1}))
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.forks: list[Self] = []  # answers to the same prompt: they wait for its states, outside of the queues
        self.num_computed = 0  # tokens whose states are in memory, or on their way there
        self.num_in_flight = 0  # tokens sampled on the device but not read yet
        self.ending: Ending | None = None
        self.timings = Timings(submitted=now)
        self.seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(8), "little")
        self.token_counts: Counter[int] | None = Counter() if sampling.has_penalties else None  # of the answer
        self.constraint: Constraint | None = None
        self.prefix = PrefixCursor()
        self.drafting = Drafting()
        self.memory: LayerStates | None = None
        self.is_preempted = False  # it ran before and had to make room

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def turn(self) -> tuple[str, str]:
        """Whose turn it takes: a client's of a tenant."""
        return self.request.tenant, self.request.client

    @property
    def finish(self) -> FinishReason | None:
        return None if self.ending is None else self.ending.reason

    @property
    def error(self) -> str | None:
        return None if self.ending is None else self.ending.error

    @property
    def is_finished(self) -> bool:
        return self.ending is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether this sequence has finished and no unfinished fork needs the prompt it computes."""
        return self.is_finished and all(fork.is_finished for fork in self.forks)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens, including those sampled on the device but not read yet."""
        return len(self.prompt) + len(self.output) + self.num_in_flight

    @property
    def num_output(self) -> int:
        return len(self.output)

    @property
    def num_known(self) -> int:
        """Number of tokens whose states are not computed yet: one, or more while tokens emitted before are replayed."""
        return self.num_tokens - self.num_computed

    @property
    def is_replaying(self) -> bool:
        """Whether the next token to compute is one emitted before, after which others are known."""
        return self.num_known > 1

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens to prefill but the last are computed, so that the sequence can decode."""
        return self.num_computed >= len(self.prefill_ids) - 1

    @property
    def wants_token(self) -> bool:
        """Whether the sequence is unfinished and has fewer than max_tokens output tokens, counting those in flight."""
        return not self.is_finished and len(self.output) + self.num_in_flight < self.max_tokens

    @property
    def may_have_drafts(self) -> bool:
        """Whether draft tokens may be verified for it."""
        return self.request.speculate and not self.drafting.is_given_up

    @property
    def must_read_prompt(self) -> bool:
        """Whether every prompt token must be computed, cached or not, because prompt log-probabilities were requested."""
        return self.sampling.prompt_logprobs is not None

    def has_images_in(self, start: int, count: int) -> bool:
        """Whether any of these tokens of the prompt are an image's."""
        return any(image.start < start + count and image.end > start for image in self.request.images)

    @property
    def has_caches(self) -> bool:
        """Whether the sequence has KV caches of its own, so that prefill continues without restoring a cached prefix."""
        return self.memory is not None and self.memory.has_caches

    @property
    def is_amid_chunk(self) -> bool:
        return self.memory is not None and self.memory.is_amid_chunk

    def demands(self, draft: tuple[int, ...] = ()) -> list[TokenDemand | None]:
        """Return the conditions on the next token and on the one behind each draft token; None where any token may come."""
        if self.constraint is None or self.is_finished:
            return [None] * (1 + len(draft))
        states = [self.constraint, *self.constraint.ahead(draft)]
        ends, is_endless, early = tuple(self.stop_ids), self.sampling.ignore_eos, self.sampling.min_tokens - self.num_output
        found = [one.demand(ends, is_endless=is_endless, is_early=place < early) for place, one in enumerate(states)]
        return found + [None] * (1 + len(draft) - len(found))  # behind a token that the constraint refuses nothing counts

    def token_at(self, position: int) -> int:
        return self.prompt[position] if position < len(self.prompt) else self.output[position - len(self.prompt)]

    def known_tokens(self, count: int) -> list[int]:
        """Return the next `count` tokens whose states are not computed yet."""
        return [self.token_at(position) for position in range(self.num_computed, self.num_computed + count)]

    def random_bits(self, position: int) -> int:
        """Return DRAW_BITS random bits for the token at `position`, derived from the seed and the position alone."""
        key = (self.seed & (2**64 - 1)).to_bytes(8, "little") + position.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(key, digest_size=DRAW_BITS // 8).digest(), "little")

    def uniform(self, position: int) -> float:
        """Return the random number for the token at `position`, above 0 and below 1 in float32 too."""
        return number_of_bits(self.random_bits(position))

    def admit(self, now: float) -> None:
        self.timings.admitted = self.timings.admitted or now

    def cut(self, position: int) -> None:
        """Add a chunk boundary at this position, where other prompts diverge from this one."""
        self.prefix.cut_at = position
        self.boundaries = tuple(sorted((*self.boundaries, position)))

    def limit_chunk(self, position: int) -> None:
        """Let the next chunk end at this position, if it does not end before."""
        self.prefix.chunk_limit = position

    def begin_step(self, num_known: int) -> bool:
        """Count tokens that a step computes, the known ones for certain; returns whether it samples a new token."""
        is_new = num_known == self.num_known
        self.num_computed += num_known
        self.num_in_flight += is_new
        return is_new

    def forced_token(self) -> int | None:
        """Return the one token that its constraint leaves; None where there is a choice, an end, or something to say about it."""
        if self.constraint is None or self.is_finished or not self.may_have_drafts or self.sampling.logprobs is not None:
            return None
        token = self.constraint.forced_token()
        return None if token is None or token in self.stop_ids or token in self.sampling.logit_bias else token

    def expect_token(self) -> None:
        """Count a token that is appended next without having been sampled by a step."""
        self.num_in_flight += 1

    def accept_draft_token(self) -> None:
        """Count a draft token that the sampler chose: its state is computed, and one more token was sampled."""
        self.num_computed += 1
        self.num_in_flight += 1

    def append(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append a sampled token (the one that stops is not appended) and set `ending` if it is the last; may raise RowFailed."""
        self.num_in_flight -= 1
        if self._is_stopped_by(token):
            self.ending = Ending("stop", stop_token=token)
            return
        if self.constraint is not None:
            self.constraint.accept(token)  # or else it is not emitted
        self.output.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.token_counts is not None:
            self.token_counts[token] += 1
        if self.constraint is not None and self.constraint.is_finished:
            self.ending = Ending("stop")
        elif len(self.output) >= self.max_tokens:
            self.ending = Ending("length")

    def _is_stopped_by(self, token: int) -> bool:
        """Whether a token ends the answer. Where the constraint lets no answer end, a stop token is a part of it."""
        is_stop = token in self.stop_ids and len(self.output) >= self.sampling.min_tokens
        return is_stop and (self.constraint is None or self.constraint.may_end)

    def end(self, reason: FinishReason, error: str | None, now: float) -> Ending:
        """Record the finish time; set this ending unless the last token already set one. Returns the ending in force."""
        self.ending = self.ending or Ending(reason, error)
        self.timings.finished = now
        return self.ending

    def note_first_token(self, now: float) -> None:
        self.timings.first_token = now

    def constrain(self, constraint: Constraint) -> None:
        """Attach a fork of a constraint, its reasoning budget cut to fit max_tokens, and replay the output so far through it."""
        self.constraint = constraint.fork()
        self.constraint.limit_to(self.max_tokens)
        self.constraint.replay(self.output)

    def restart(self, emitted: Iterable[int], max_replayed_tokens: int) -> None:
        """Drop all computed states but keep the `emitted` tokens: a few are decoded again, many are prefilled like the prompt.

        Decoding tokens again always gives bit-identical states, but takes as long as the first time.
        """
        self.output = list(emitted)
        prompt = self.request.keyed_prompt
        self.prefill_ids = prompt if len(self.output) <= max_replayed_tokens else [*prompt, *self.output]
        if len(self.prefill_ids) > len(self.prompt):  # a chunk ended there the first time
            self.boundaries = tuple(sorted({*self.boundaries, len(self.prompt) - 1} - {0}))
        if self.token_counts is not None:
            self.token_counts = Counter(self.output)
        self.num_computed = self.num_in_flight = 0
        self.memory = None
        # If it fails later, what it computed goes too; the cut stays among its boundaries.
        self.prefix = PrefixCursor(first_own_node=self.prefix.first_own_node, cut_at=self.prefix.cut_at)

    def preempt(self, max_replayed_tokens: int) -> None:
        """Mark the sequence as preempted and drop its computed states; its emitted tokens are kept."""
        self.is_preempted = True
        self.restart(self.output, max_replayed_tokens)

    def give_up_drafts(self) -> None:
        """Have no drafts from now on, because a step that computed one failed or gave numbers that are not finite."""
        self.drafting.is_given_up = True

    def take_timings(self, broken: Self) -> None:
        """Take over the timings of the sequence whose answer this one continues, because its grammar broke."""
        self.timings = broken.timings

    def lead(self, forks: list[Self]) -> None:
        self.forks = forks

    def release_forks(self) -> list[Self]:
        """Detach and return the unfinished forks, once the prompt they share with this sequence is computed."""
        forks, self.forks = [fork for fork in self.forks if not fork.is_finished], []
        for fork in forks:
            fork.timings.admitted = self.timings.admitted
        return forks

    def hand_over_prompt(self) -> Self:
        """Move a finished sequence's prompt states, progress and other forks to its first unfinished fork; returns that fork."""
        successor, *others = [fork for fork in self.forks if not fork.is_finished]
        successor.forks, self.forks = others, []
        successor.num_computed, successor.memory, self.memory = self.num_computed, self.memory, None
        successor.prefix, self.prefix = replace(self.prefix, is_loading=False, has_asked_disk=False), PrefixCursor()
        successor.timings, successor.prompt_logprobs = structs.replace(self.timings, finished=None), self.prompt_logprobs
        return successor


@dataclass(frozen=True)
class Line:
    """One of the tokens that a step samples for a sequence: the sequence as it is if the draft tokens `ahead` are accepted.

    To the sampler it is a sequence like others.
    """

    sequence: Sequence
    ahead: tuple[int, ...]
    beyond: int = 0  # further tokens that are not known, for one that guesses on from guesses

    @property
    def sampling(self) -> Sampling:
        return self.sequence.sampling

    @property
    def prompt(self) -> list[int]:
        return self.sequence.prompt

    @property
    def stop_ids(self) -> frozenset[int]:
        return self.sequence.stop_ids

    @property
    def constraint(self) -> Constraint | None:
        return self.sequence.constraint

    @property
    def num_tokens(self) -> int:
        return self.sequence.num_tokens + len(self.ahead) + self.beyond

    @property
    def num_output(self) -> int:
        return self.num_tokens - 1 - len(self.prompt)

    @property
    def token_counts(self) -> Counter[int] | None:
        counts = self.sequence.token_counts
        return None if counts is None else counts + Counter(self.ahead)

    def uniform(self, position: int) -> float:
        return self.sequence.uniform(position)
