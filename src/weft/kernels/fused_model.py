"""A model's decode step on CPUs as two direct calls: tokens to logits, and keeping what counts of them (native/fused_model.h).

MLX takes some microseconds for each operation, and Python some for building it: for a small model that is half of a step. A model
is computed so if it is embeddings, fused decoder layers, a norm and a vocabulary, and if that gives its logits bit for bit when
tried (`model/probe.py`). Rows have as many tokens as they need: a row without a draft costs no more beside rows with one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from weft.errors import InternalError
from weft.kernels.blocks import AttentionMixer, BlockPlan, FusedBlock, is_plain_attention
from weft.kernels.cpu import FusedRMSNorm, FusedRotation, norm_of
from weft.kernels.delta_blocks import DeltaMixer
from weft.kernels.mtp_block import FusedHead
from weft.kernels.packed import KeptEmbedding, KeptLinear, weights_of
from weft.kernels.primitives import ops
from weft.memory.slabs import Pool, RowState, Slab, StateTable
from weft.memory.spec import KeyValues, LayerSpec, Recurrent
from weft.memory.views import make_room


class GuessSampling(NamedTuple):
    """How the MTP head's guesses for a row are drawn, with the random numbers of the row's next positions."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float
    numbers: list[float]


@dataclass(frozen=True)
class FusedModel:
    """A model as weft's operations take it: embeddings, decoder layers, norm and vocabulary; and its MTP head, if it has one."""

    model: "ops.FusedModel"
    plans: list[BlockPlan]
    made_of: list[tuple[nn.Module, type]]  # the modules that it stands for, as they were
    head: FusedHead | None = None

    @property
    def is_current(self) -> bool:
        """Whether the modules that it stands for are of the classes they had: a module that is changed must be asked itself."""
        return all(type(module) is kind for module, kind in self.made_of)

    def arrange(self, pool: Pool, tokens: dict[RowState, int]) -> "StepRows":
        """Make room for so many more tokens of each row, and return the rows in the order in which a step computes them."""
        for row, count in tokens.items():
            make_room(pool, row, count, seam=True)
        table = pool.table_for(None)
        place_of = {row: place for place, row in enumerate(table.rows)}
        states = sorted(tokens, key=lambda row: place_of.get(row, len(place_of)))  # whoever changes its slab moves no states
        table.arrange([*states])
        slabs = [slab for slab in pool.slabs if any(row in tokens for row in slab.occupied)]
        places = {id(slab): place for place, slab in enumerate(slabs)}
        return StepRows(slabs, [(places[id(row.slab)], row) for row in states], table)

    def skip(self, states: list[RowState]) -> None:
        """Let the MTP head not read what it has not read yet of these rows: their keys and values there become zeros."""
        for slab in {id(state.slab): state.slab for state in states}.values():
            assert slab is not None
            own = [state for state in states if state.slab is slab]
            ranges = [(state.slot, state.length - state.unread, state.length) for state in own]
            keys, values = ops.clear_places(_taken_slabs([slab], len(self.plans)), ranges)
            slab.layers[len(self.plans)] = KeyValues(keys, values)

    def decode(
        self,
        rows: "StepRows",
        tokens: mx.array,
        known: list[int],
        drafts: Sequence[tuple[int, ...]],
        *,
        keeps_hidden: bool = True,
    ) -> "FusedStep":
        """Compute the forward of each row's tokens, (lines,) all of them: known ones, then its draft.

        `keeps_hidden`: keep hidden states for the MTP head, if there is one.
        """
        places = [
            (slab, row.slot, row.length, row.length + row.shift, count, list(draft))
            for (slab, row), count, draft in zip(rows.rows, known, drafts, strict=True)
        ]
        fused_rows = ops.FusedRows(places)
        memory: list[mx.array] = []
        for layer, plan in enumerate(self.plans):
            memory += _taken(plan, rows, layer)
        keeps_hidden = keeps_hidden and self.head is not None
        table = _taken_states(rows, len(self.plans) + 1) if keeps_hidden else []
        logits, hidden, *memory = ops.decode_step(tokens, fused_rows, self.model, memory, table)
        if keeps_hidden:
            rows.table.states[len(self.plans) + 1] = [memory.pop(0)]
        at = 0
        for layer, plan in enumerate(self.plans):
            at = _leave(plan, rows, layer, memory, at)
        return FusedStep(self, rows, fused_rows, logits, hidden if keeps_hidden else None, memory[at:])


@dataclass(frozen=True)
class StepRows:
    """The rows of a step in the order of its lines, each with the place of its slab among those that have any."""

    slabs: list[Slab]
    rows: list[tuple[int, RowState]]
    table: StateTable

    @property
    def states(self) -> list[RowState]:
        return [row for _, row in self.rows]


@dataclass(frozen=True)
class FusedStep:
    """A step's forward: logits of the lines that are sampled, and what is needed to keep the tokens that count."""

    model: FusedModel
    rows: StepRows
    places: "ops.FusedRows"
    logits: mx.array  # (sampled lines, V)
    hidden: mx.array | None  # (lines, H), where they are kept
    lines: list[mx.array]  # of gated delta layers, where rows have drafts

    def keep(self, sampled: mx.array, count: int, sampling: list[GuessSampling]) -> tuple[mx.array, list[mx.array]]:
        """Build what follows when the lines' tokens (lines,) are sampled: rows keep the draft tokens that these confirm.

        Returns how many each row keeps, (B,), and the MTP head's next `count` guesses, (B,) each.
        """
        model, slabs, table = self.model, self.rows.slabs, self.rows.table
        head_layer, last = len(model.plans), len(model.plans) + 1
        delta_layers = [layer for layer, plan in enumerate(model.plans) if self.lines and isinstance(plan.mixer, DeltaMixer)]
        states: list[mx.array] = []
        for layer, lines in zip(delta_layers, self.lines, strict=True):
            states += [lines, *_taken_states(self.rows, layer)]
        held: list[mx.array] = _taken_slabs(slabs, head_layer) if count else []
        accepted, *found = ops.keep_step(
            sampled,
            self.places,
            model.model,
            states,
            self.hidden,
            [] if self.hidden is None else _taken_states(self.rows, last),
            model.head.head if model.head is not None and count else None,
            held,
            sampling,
            count,
        )
        for layer in delta_layers:
            table.states[layer] = [found.pop(0), found.pop(0)]
        if self.hidden is not None:
            table.states[last] = [found.pop(0)]
        if count:
            _leave_slabs(slabs, head_layer, found, 0)
            del found[: 2 * len(slabs)]
        return accepted, found


def fused_model(model: nn.Module, stack: Any, embedding: nn.Module, vocabulary: Any, *, is_normed: bool) -> FusedModel | None:
    """Return a model whose steps are two calls, if it is built as the common ones are; its logits are still to be compared.

    `stack`: the module with its layers and last norm. `is_normed`: an MTP head takes hidden states behind that norm.
    """
    layers, norm = stack.layers, stack.norm
    is_known = isinstance(embedding, KeptEmbedding) and isinstance(vocabulary, KeptEmbedding | KeptLinear)
    if not is_known or not isinstance(norm, FusedRMSNorm) or "bias" in vocabulary:
        return None
    if not all(isinstance(layer, FusedBlock) and layer.weft_plan.mlp is not None for layer in layers):
        return None
    plans: list[BlockPlan] = [layer.weft_plan for layer in layers]
    ropes: list[FusedRotation] = []
    parts = [_parts(plan, ropes) for plan in plans]
    turns = [rope.rates() for rope in ropes]
    made = ops.FusedModel(weights_of(embedding), parts, norm_of(norm), weights_of(vocabulary), turns, is_normed)
    return FusedModel(made, plans, [(one, type(one)) for one in (model, stack, embedding, norm, vocabulary, *layers)])


def fits(model: FusedModel, specs: Sequence[LayerSpec]) -> bool:
    """Whether a model's layers have the memory that its operations take."""
    kinds = [is_plain_attention if isinstance(plan.mixer, AttentionMixer) else _is_recurrent for plan in model.plans]
    kinds += [] if model.head is None else [is_plain_attention, _is_recurrent]
    return len(specs) == len(kinds) and all(is_right(spec) for is_right, spec in zip(kinds, specs, strict=True))


def _is_recurrent(spec: LayerSpec) -> bool:
    return isinstance(spec, Recurrent)


def _parts(plan: BlockPlan, ropes: list[FusedRotation]) -> tuple[Any, ...]:
    """Return a layer as the operations take it; its kind of rotary positions is added to `ropes` if it is not there."""
    assert plan.mlp is not None
    mixer, (gate, up, (down,)), (output,) = plan.mixer, plan.mlp, plan.output
    heads, delta, turns = None, None, 0
    if isinstance(mixer, AttentionMixer):
        heads = mixer.heads
        turns = next((place for place, rope in enumerate(ropes) if rope.is_like(mixer.rope)), len(ropes))
        if turns == len(ropes):
            ropes.append(mixer.rope)
    elif isinstance(mixer, DeltaMixer):
        delta = mixer.layer
    else:
        raise InternalError(f"no operation computes a {type(mixer).__name__}")
    return plan.input_norm, mixer.joint, heads, delta, turns, output, plan.mlp_norm, gate, up, down


# What a layer holds is taken out of its place while it is computed with: memory that nobody else holds is changed in place.


def _taken(plan: BlockPlan, rows: StepRows, layer: int) -> list[mx.array]:
    """Take a layer's slabs of keys, then those of values; or its channels and states."""
    if isinstance(plan.mixer, DeltaMixer):
        rows.table.states[layer] = list(plan.mixer.states_of(rows.table.states[layer], len(rows.rows)))
        return _taken_states(rows, layer)
    return _taken_slabs(rows.slabs, layer)


def _taken_states(rows: StepRows, layer: int) -> list[mx.array]:
    states, rows.table.states[layer] = rows.table.states[layer], []
    return [state for state in states if state is not None]


def _taken_slabs(slabs: list[Slab], layer: int) -> list[mx.array]:
    held = [slab.layers.pop(layer) for slab in slabs]
    return [*(one.keys for one in held), *(one.values for one in held)]


def _leave(plan: BlockPlan, rows: StepRows, layer: int, memory: list[mx.array], at: int) -> int:
    """Put a layer's memory, from place `at` on, where `_taken` found it; returns the next layer's place."""
    if isinstance(plan.mixer, DeltaMixer):
        rows.table.states[layer] = [*memory[at : at + 2]]
        return at + 2
    return _leave_slabs(rows.slabs, layer, memory, at)


def _leave_slabs(slabs: list[Slab], layer: int, memory: list[mx.array], at: int) -> int:
    for place, slab in enumerate(slabs, at):
        slab.layers[layer] = KeyValues(memory[place], memory[place + len(slabs)])
    return at + 2 * len(slabs)
