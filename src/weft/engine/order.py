"""The order in which steps are built, started, settled and sampled: one small class per way of running a device.

All three give the same tokens; `PlainOrder` is the oracle for the other two. The engine's settings choose one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.engine.runner import Step
from weft.engine.scheduler import Plan
from weft.engine.sequence import Sequence

if TYPE_CHECKING:
    from weft.engine.engine import Engine


class PlainOrder:
    """Runs each step to its end before anything else."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pending: Step | None = None  # started and not settled

    def run(self, plan: Plan) -> None:
        step = self.engine.runner.forward(plan, None)
        if step is not None:
            self.engine.runner.start(step)
            self.engine.sample(step)
            self.engine.settle(step)

    def flush(self) -> None:
        """Settle the pending step and send its tokens."""
        last, self.pending = self.pending, None
        if last is not None:
            self.engine.settle(last)
            self.engine.on_events()

    def forget(self, sequence: Sequence) -> None:
        """Drop the token in flight of a preempted sequence: it is sampled once more."""
        if self.pending is not None:
            self.pending.new.discard(sequence)


class OverlappedOrder(PlainOrder):
    """Starts a step before the last one is settled, so that the device never waits for the host: for GPUs."""

    def run(self, plan: Plan) -> None:
        last, self.pending = self.pending, None
        try:
            self.pending = self.engine.runner.forward(plan, last)
            if self.pending is not None:
                self.engine.runner.start(self.pending)
        finally:
            if last is not None:
                self.engine.settle(last)
        if self.pending is not None:
            self.engine.sample(self.pending)


class SettleFirstOrder(PlainOrder):
    """Settles the last step and sends its tokens before the next is started: for CPU.

    MLX's CPU queue holds ten operations, so starting a step takes nearly as long as the step.
    """

    def run(self, plan: Plan) -> None:
        last, self.pending = self.pending, None
        try:
            self.pending = self.engine.runner.forward(plan, last)  # built while the last one ends
        finally:
            if last is not None:
                self.engine.settle(last)
        self.engine.on_events()
        if self.pending is not None:
            self.engine.runner.start(self.pending)
            self.engine.sample(self.pending)
        if plan.chunk is not None:
            self.flush()  # its tokens are sent before the prefill


def make_order(config: EngineConfig, engine: Engine) -> PlainOrder:
    """The order of execution that these settings ask for."""
    if not config.pipelined:
        return PlainOrder(engine)
    return SettleFirstOrder(engine) if config.settle_first else OverlappedOrder(engine)
