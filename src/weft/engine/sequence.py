"""A sequence: one prompt with one answer inside the engine; this object holds all of its state. Imports no mlx.

The runner and prefix sharing change it directly; all other modules call its methods.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, Self

from msgspec import structs

from weft.grammar.constraint import Constraint, TokenDemand
from weft.ipc.limits import Sampling
from weft.ipc.messages import FinishReason, Submit, Timings, TokenLogprob
from weft.memory.prefix_tree import Node


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
    is_private: bool = False  # what it computes is not entered into the tree
    is_loading: bool = False  # it waits for the disk tier
    has_asked_disk: bool = False
    looked_up: tuple[Node | None, int] | None = None  # the node it last looked for more from, and how much was cached then


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
        self.prefill_ids = request.prompt  # what is computed in chunks: the prompt, after a restart maybe the answer too
        self.boundaries = tuple(sorted({at for at in request.boundaries if 0 < at < len(request.prompt) - 1}))
        self.cut_at: int | None = None  # the boundary at which it was last cut because other prompts diverge there
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
        self.memory: LayerStates | None = None
        self.is_preempted = False  # it ran before and had to make room

    @property
    def prompt(self) -> list[int]:
        return self.request.prompt

    @property
    def client(self) -> str:
        return self.request.client

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
    def is_replaying(self) -> bool:
        """Whether the next step recomputes the state of a token emitted before, instead of sampling a new one."""
        return self.num_computed + 1 < self.num_tokens

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens to prefill but the last are computed, so that the sequence can decode."""
        return self.num_computed >= len(self.prefill_ids) - 1

    @property
    def wants_token(self) -> bool:
        """Whether the sequence is unfinished and has fewer than max_tokens output tokens, counting those in flight."""
        return not self.is_finished and len(self.output) + self.num_in_flight < self.max_tokens

    @property
    def must_read_prompt(self) -> bool:
        """Whether every prompt token must be computed, cached or not, because prompt log-probabilities were requested."""
        return self.sampling.prompt_logprobs is not None

    @property
    def has_caches(self) -> bool:
        """Whether the sequence has KV caches of its own, so that prefill continues without restoring a cached prefix."""
        return self.memory is not None and self.memory.has_caches

    @property
    def is_amid_chunk(self) -> bool:
        return self.memory is not None and self.memory.is_amid_chunk

    @property
    def demand(self) -> TokenDemand | None:
        """The conditions on the next token from grammar and reasoning budget; None if any token may come or it has finished."""
        if self.constraint is None or self.is_finished:
            return None
        return self.constraint.demand(tuple(self.stop_ids), is_endless=self.sampling.ignore_eos)

    def token_at(self, position: int) -> int:
        return self.prompt[position] if position < len(self.prompt) else self.output[position - len(self.prompt)]

    def uniform(self, position: int) -> float:
        """Return the random number in [0, 1) for the token at `position`, derived from the seed and the position alone."""
        key = (self.seed & (2**64 - 1)).to_bytes(8, "little") + position.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") / 2**32

    def admit(self, now: float) -> None:
        self.timings.admitted = self.timings.admitted or now

    def cut(self, position: int) -> None:
        """Add a chunk boundary at this position, where other prompts diverge from this one."""
        self.cut_at = position
        self.boundaries = tuple(sorted((*self.boundaries, position)))

    def append(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append a sampled token (a stop token is not appended) and set `ending` if it is the last; may raise RowFailed."""
        self.num_in_flight -= 1
        if token in self.stop_ids and len(self.output) >= self.sampling.min_tokens:
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
        self.prefill_ids = self.prompt if len(self.output) <= max_replayed_tokens else [*self.prompt, *self.output]
        if len(self.prefill_ids) > len(self.prompt):  # a chunk ended there the first time
            self.boundaries = tuple(sorted({*self.boundaries, len(self.prompt) - 1} - {0}))
        if self.token_counts is not None:
            self.token_counts = Counter(self.output)
        self.num_computed = self.num_in_flight = 0
        self.memory = None
        self.prefix = PrefixCursor(first_own_node=self.prefix.first_own_node)  # if it fails later, what it computed goes too

    def preempt(self, max_replayed_tokens: int) -> None:
        """Mark the sequence as preempted and drop its computed states; its emitted tokens are kept."""
        self.is_preempted = True
        self.restart(self.output, max_replayed_tokens)

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
