"""The order in which steps are built, started, settled and sampled: one small class per way of running a device.

All three give the same tokens; `PlainOrder` is the oracle for the other two. The engine picks one by its settings.
"""

from __future__ import annotations

from typing import Protocol

from weft.config import EngineConfig
from weft.engine.runner import Step
from weft.engine.scheduler import Plan
from weft.engine.sequence import Sequence


class StepActions(Protocol):
    """What an engine does with one step."""

    def forward(self, plan: Plan, last: Step | None) -> Step | None:
        """Build the step of a plan."""

    def start(self, step: Step) -> None:
        """Start computing a step."""

    def sample(self, step: Step) -> None:
        """Start sampling a step's tokens; those of the step before it are settled."""

    def settle(self, step: Step) -> None:
        """Read a step's tokens and append them to their sequences."""

    def flush_events(self) -> None:
        """Send what was emitted so far, before the turn goes on."""


class PlainOrder:
    """Run each step to its end before anything else."""

    def __init__(self, actions: StepActions) -> None:
        self.actions = actions
        self.pending: Step | None = None  # started and not settled

    def run(self, plan: Plan) -> None:
        """Run the step of a plan."""
        step = self.actions.forward(plan, None)
        if step is not None:
            self.actions.start(step)
            self.actions.sample(step)
            self.actions.settle(step)

    def flush(self) -> None:
        """Settle the pending step and send its tokens."""
        last, self.pending = self.pending, None
        if last is not None:
            self.actions.settle(last)
            self.actions.flush_events()

    def forget(self, sequence: Sequence) -> None:
        """Drop the token in flight of a preempted sequence."""
        if self.pending is not None:
            self.pending.forget(sequence)


class OverlappedOrder(PlainOrder):
    """Start a step while the last one is not settled, so that the device never waits for the host: for GPUs."""

    def run(self, plan: Plan) -> None:
        """Build and start this step, then settle the last one while this one runs."""
        last, self.pending = self.pending, None
        try:
            self.pending = self.actions.forward(plan, last)
            if self.pending is not None:
                self.actions.start(self.pending)
        finally:
            if last is not None:
                self.actions.settle(last)
        if self.pending is not None:
            self.actions.sample(self.pending)


class SettleFirstOrder(PlainOrder):
    """Settle the last step and send its tokens before the next is started: for CPU.

    MLX's CPU queue holds ten operations, so starting a step takes nearly as long as the step.
    """

    def run(self, plan: Plan) -> None:
        """Build this step while the last one ends, settle that, then start this one; before prefill settle it too."""
        last, self.pending = self.pending, None
        try:
            self.pending = self.actions.forward(plan, last)
        finally:
            if last is not None:
                self.actions.settle(last)
        self.actions.flush_events()
        if self.pending is not None:
            self.actions.start(self.pending)
            self.actions.sample(self.pending)
        if plan.chunk is not None:
            self.flush()


def make_order(config: EngineConfig, actions: StepActions) -> PlainOrder:
    """The order that these settings ask for."""
    if not config.pipelined:
        return PlainOrder(actions)
    return SettleFirstOrder(actions) if config.settle_first else OverlappedOrder(actions)
