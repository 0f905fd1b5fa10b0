"""One request inside the engine: everything about it lives on this object and nowhere else.

Ids, sampling, memory, timings, and why it ended. Leaving the batch is dropping one object. Imports no mlx: what it holds
for the runner (states, a chunk under way) is opaque here.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

from weft.grammar.constraint import Constraint, TokenDemand
from weft.ipc.messages import FinishReason, PrefixReuse, Sampling, Timings, TokenLogprob


class Sequence:
    """A prompt, its answer so far, and what the engine needs to continue it."""

    def __init__(
        self,
        number: int,
        prompt: list[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
    ) -> None:
        self.id = number
        self.prompt = prompt
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.output: list[int] = []
        self.prefill_ids = prompt  # what is computed as a prompt is, in chunks
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.forks: list[Sequence] = []  # same prompt: they wait for its states, and have no place in a queue till then
        self.num_computed = 0  # tokens whose states are in memory (or on their way)
        self.num_in_flight = 0  # tokens chosen on the device but not yet read
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.stop: int | None = None  # the end token, which is no part of the answer
        self.timings = Timings()
        self.seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(8), "little")
        self.counts: Counter[int] | None = Counter() if sampling.has_penalties else None  # of the answer's tokens
        self.constraint: Constraint | None = None  # what its tokens must be
        self.boundaries: tuple[int, ...] = ()  # of its prompt, in order: chunks end there
        self.cut_at: int | None = None  # where it was last cut because others go another way
        self.prefix_node: Any = None  # the node of the prefix tree it stands on
        self.first_own_node: Any = None  # the first node it computed itself
        self.num_cached = 0  # tokens of its prompt that it did not compute itself
        self.reuse: PrefixReuse | None = None  # why it were no more
        self.client = ""  # who asked for it
        self.priority = 0
        self.is_suspect = False  # a step it was in failed
        self.is_preempted = False  # it ran before, and had to make room
        self.salt = ""  # it shares what was computed only with those that have the same one
        self.is_retained = False  # its client will come again
        self.is_shared = True  # what it computes is kept; there may be no room for that
        self.is_loading = False  # it waits for the disk
        self.is_following = False  # it waits for another to compute a chunk that it needs too
        self.has_asked_disk = False
        self.memory: Any = None  # the runner's: layer states, and the chunk under way

    @property
    def num_tokens(self) -> int:
        """Prompt and answer, tokens in flight included."""
        return len(self.prompt) + len(self.output) + self.num_in_flight

    @property
    def is_at_its_end(self) -> bool:
        """Whether the next step gives a new token; else it reads one again that was given before."""
        return self.num_computed + 1 == self.num_tokens

    def token_at(self, place: int) -> int:
        """A token of the prompt or of the answer."""
        return self.prompt[place] if place < len(self.prompt) else self.output[place - len(self.prompt)]

    @property
    def is_finished(self) -> bool:
        """Whether it has its end."""
        return self.finish is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for it, nor for the prompt it computes."""
        return self.is_finished and all(fork.is_finished for fork in self.forks)

    @property
    def is_prefilled(self) -> bool:
        """Whether all but the newest token are in memory."""
        return self.num_computed >= len(self.prefill_ids) - 1

    @property
    def wants_token(self) -> bool:
        """Whether another token may be asked for, given those in flight."""
        return not self.is_finished and len(self.output) + self.num_in_flight < self.max_tokens

    @property
    def demand(self) -> TokenDemand | None:
        """What its next token must be."""
        if self.constraint is None or self.is_finished:
            return None
        return self.constraint.demand(tuple(self.stop_ids), is_endless=self.sampling.ignore_eos)

    def append(self, token: int, logprob: TokenLogprob | None) -> None:
        """Take a token that was in flight; decide whether it is the last. Raises RowFailed when its constraint fails."""
        self.num_in_flight -= 1
        if token in self.stop_ids and len(self.output) >= self.sampling.min_tokens:
            self.finish, self.stop = "stop", token
            return
        self.output.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.counts is not None:
            self.counts[token] += 1
        if self.constraint is not None:
            self.constraint.accept(token)
            if self.constraint.is_finished:
                self.finish = "stop"
                return
        if len(self.output) >= self.max_tokens:
            self.finish = "length"

    def restart(self, given: Iterable[int], max_replayed_tokens: int) -> None:
        """Be as new, but for the tokens that were given: a few are stepped through again, many are computed as a prompt.

        Stepping gives the very bits the answer had; a long answer would take as long as it took the first time.
        """
        self.output = list(given)
        self.prefill_ids = self.prompt if len(self.output) <= max_replayed_tokens else [*self.prompt, *self.output]
        if len(self.prefill_ids) > len(self.prompt):  # chunks ended there before
            self.boundaries = tuple(sorted({*self.boundaries, len(self.prompt) - 1} - {0}))
        if self.counts is not None:
            self.counts = Counter(self.output)
        self.num_computed = self.num_in_flight = 0
        self.memory = self.prefix_node = self.first_own_node = None
        self.is_loading = self.has_asked_disk = False
        self.is_shared = True

    def hand_over_prompt(self) -> Sequence:
        """Hand the prompt's work over to the first fork that still wants it; this sequence is finished."""
        successor, *others = [fork for fork in self.forks if not fork.is_finished]
        successor.forks, self.forks = others, []
        successor.num_computed, successor.memory, self.memory = self.num_computed, self.memory, None
        successor.prefix_node, successor.num_cached, self.prefix_node = self.prefix_node, self.num_cached, None
        successor.reuse, successor.first_own_node, successor.is_shared = self.reuse, self.first_own_node, self.is_shared
        successor.timings.admitted, successor.prompt_logprobs = self.timings.admitted, self.prompt_logprobs
        return successor

    def uniform(self, position: int) -> float:
        """The random number in [0, 1) for the token at `position`: from seed and position, and nothing else."""
        key = (self.seed & (2**64 - 1)).to_bytes(8, "little") + position.to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") / 2**32
