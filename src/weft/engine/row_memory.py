"""What one sequence holds of the model's layer states, from its first prompt chunk to its last decode step."""

from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

from weft.engine.sampler import Logprobs
from weft.engine.scheduler import Row
from weft.memory.slabs import RowState, Slab
from weft.model.adapter import Chunk
from weft.model.saved_state import LayerCaches

# Why a row decodes alone. model: no way to batch this model gives each row its own logits. short: the row is too young to have
# the specs' geometry (after a prompt of one token nothing is computed yet; some states grow over the first tokens), so it joins
# the batch a step or two later. geometry: it should have the specs' geometry by now and has not.
AloneCause = Literal["model", "short", "geometry"]


@dataclass(frozen=True)
class PromptEnd:
    """A prompt's last token, computed with its last chunk: its keys and values lie behind the end of the row's own caches."""

    token: int
    place: int
    logits: mx.array  # (1, V)


@dataclass
class RowMemory:
    """One sequence's layer states: its own KV caches until it has a slot in the pool, and the prompt chunk in progress."""

    own: LayerCaches | None = None
    state: RowState = field(default_factory=RowState)
    retained: tuple[LayerCaches, int] | None = None  # its own caches once it has a slot, and how many tokens they hold
    handed_over: Slab | None = None  # what the arrays of its retained caches are now, until its steps do without them
    chunk: Chunk | None = None
    together: tuple[Row, ...] = ()  # the prompts' chunks that the chunk's forward computes, where it is not this one's alone
    shares_arrays: bool = False  # its own states are parts of arrays that hold those of other rows too
    alone: AloneCause | None = None  # why it last decoded on its own caches, if it did
    logprobs: Logprobs | None = None  # of the chunk under way, where those of the prompt were requested
    end: PromptEnd | None = None  # computed with the chunk under way
    has_end: bool = False  # its own caches hold the prompt's last token, as they do after a first step without a forward
    encoding: dict[tuple[str, str, bytes], mx.array] = field(default_factory=dict)  # features that the chunk under way encodes

    @property
    def has_caches(self) -> bool:
        return self.own is not None

    @property
    def is_amid_chunk(self) -> bool:
        return self.chunk is not None
