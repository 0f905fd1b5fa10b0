"""Execution orders of decode steps (build, start, sample, settle), from fully synchronous to overlapped with the device.

All three classes give the same tokens; `PlainOrder` is the oracle for the other two. The engine's settings choose one. Of a step
with several tokens per row it is known only when it is read how many of them count, so every order runs it in the plain one.

MLX reports an error of the device once, to whoever asks for anything next. So when `run` raises, the step before may be the one
that failed, and the engine computes both again: neither is settled.
"""

from typing import TYPE_CHECKING

from weft.config import EngineConfig
from weft.engine.runner import Step
from weft.engine.scheduler import Plan
from weft.engine.sequence import Sequence

if TYPE_CHECKING:
    from weft.engine.engine import Engine


class PlainOrder:
    """Synchronous order: each decode step is built, run and sampled, and its tokens are read, before anything else happens."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.pending: Step | None = None  # started and not settled

    def is_whole_step(self, plan: Plan, last: Step | None) -> bool:
        """Whether a turn that ran this plan took as long as one step takes; `last`: the step that was pending before it."""
        return bool(plan.steps) and last is None

    def run(self, plan: Plan) -> None:
        """Run a plan's decode step; `pending` must be settled where the step has several tokens per row."""
        step = self.engine.runner.forward(plan, None)
        if step is not None:
            self.engine.runner.start(step)
            self.engine.sample(step)
            if plan.step_tokens > 1:
                self.engine.speculation.follow(step)  # built while the step runs
            self.engine.settle(step)
            self.engine.on_events()

    def flush(self) -> None:
        """Settle the pending step, if any, and send its tokens."""
        last, self.pending = self.pending, None
        if last is not None:
            self.engine.settle(last)
            self.engine.on_events()

    def await_step(self) -> bool:
        """Wait until the pending step, if any, is computed; returns whether there is one. Its tokens are not read yet."""
        if self.pending is None:
            return False
        self.engine.runner.wait(self.pending)
        return True

    def forget(self, sequence: Sequence) -> None:
        """Discard a preempted sequence's token in flight, if any; it will be sampled again."""
        if self.pending is not None:
            self.pending.new.discard(sequence)


class OverlappedOrder(PlainOrder):
    """For GPUs: starts a step before the previous one's tokens are read, so that the device never waits for the host."""

    def is_whole_step(self, plan: Plan, last: Step | None) -> bool:
        return bool(plan.steps) and (plan.step_tokens > 1 if last is None else self.pending is not None)

    def run(self, plan: Plan) -> None:
        if plan.step_tokens > 1:
            super().run(plan)
            return
        last, self.pending = self.pending, None
        self.pending = self.engine.runner.forward(plan, last)
        if self.pending is not None:
            self.engine.runner.start(self.pending)
        if last is not None:
            self.engine.settle(last)
        if self.pending is not None:
            self.engine.sample(self.pending)


class SettleFirstOrder(OverlappedOrder):
    """For CPUs: reads and sends the previous step's tokens before it starts the next step, which is already built.

    MLX's CPU queue holds ten operations, so starting a step takes nearly as long as the step.
    """

    def run(self, plan: Plan) -> None:
        if plan.step_tokens > 1:
            PlainOrder.run(self, plan)
            return
        last, self.pending = self.pending, None
        self.pending = self.engine.runner.forward(plan, last)  # built while the last one ends
        if last is not None:
            self.engine.settle(last)
        self.engine.on_events()
        if self.pending is not None:
            self.engine.runner.start(self.pending)
            self.engine.sample(self.pending)
        if plan.chunk is not None:
            self.flush()  # its tokens are sent before the prefill


def make_order(config: EngineConfig, engine: "Engine") -> PlainOrder:
    """Return the execution order for these settings: plain if not pipelined, settle-first if set, else overlapped.

    Steps that are weft's own operations are computed at once by the thread that asks for them: nothing can overlap with them.
    """
    if not config.pipelined or engine.runner.has_fused_steps:
        return PlainOrder(engine)
    return SettleFirstOrder(engine) if config.settle_first else OverlappedOrder(engine)
