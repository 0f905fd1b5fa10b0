"""Runs one model's chat template, and checks answers by its clients' schemas, in child processes that can be killed.

The front never runs either itself: a template that loops, or a pattern that backtracks for minutes, costs its own request.
Checks have a child and a thread of their own, so that slow ones hold up neither templates nor what else the front's threads do.
"""

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.errors import BadModel, TemplateFailed, TemplateTooCostly
from weft.fair_pool import FairPool
from weft.ipc.limits import MAX_RENDERED_CHARACTERS
from weft.ipc.messages import GrammarSpec
from weft.serving.child_pool import ChildLimits, ChildLost, ChildPool
from weft.serving.text_worker import BROKEN, COSTLY, DONE, FAILED, LENGTH, CheckJob, CompileJob, RenderJob, TextJob

COMMAND = (sys.executable, "-P", "-m", "weft.serving.text_worker")
NUM_CHILDREN = 2  # so that one request's slow job does not hold up the model's others
START_SECONDS = 60.0
LIMITS = ChildLimits(seconds=10.0, cpu_seconds=2, memory_bytes=1 << 30)
MAX_ANSWER_BYTES = 4 * MAX_RENDERED_CHARACTERS
UNCHECKED = "the answer was not checked, because that took longer than {limits}; use simpler patterns"


class TextProcesses:
    """A `TemplateRunner` whose templates run in child processes, which also check answers against schemas."""

    def __init__(self, limits: ChildLimits = LIMITS) -> None:
        self.templates = ChildPool(COMMAND, limits, NUM_CHILDREN, "run chat templates", start_seconds=START_SECONDS)
        self.checks = ChildPool(COMMAND, limits, 1, "check answers", start_seconds=START_SECONDS)
        self.check_threads = FairPool(1, "check")

    def compile(self, source: str) -> None:
        self._ask(self.templates, CompileJob(source))

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        return self._ask(self.templates, RenderJob(source, dict(values))).decode()

    def find_schema_errors(self, spec: GrammarSpec, text: str) -> tuple[str, ...]:
        """Validate an answer against a non-strict schema as `weft.text.schema` does; one message if it takes too long."""
        try:
            return msgspec.json.decode(self._ask(self.checks, CheckJob(spec.text, text)), type=tuple[str, ...])
        except TemplateTooCostly:
            return (UNCHECKED.format(limits=self.checks.limits),)

    def close(self) -> None:
        for pool in (self.templates, self.checks):
            pool.close()

    @staticmethod
    def _ask(pool: ChildPool, job: TextJob) -> bytes:
        """Let a child do a job and return its result. Raises BadModel, TemplateFailed or TemplateTooCostly."""
        data = msgspec.msgpack.encode(job)
        try:
            kind, body = pool.ask(LENGTH.pack(len(data)) + data, _is_expected)
        except ChildLost as lost:
            message = f"the model's chat template takes more than {pool.limits} for these messages ({lost}); send fewer"
            raise TemplateTooCostly(message, "messages") from None
        if kind == DONE:
            return body
        words = body.decode(errors="replace")
        if kind == BROKEN:
            raise BadModel(words)
        raise (TemplateFailed if kind == FAILED else TemplateTooCostly)(words, "messages")


def _is_expected(kind: bytes, length: int) -> bool:
    return kind in (DONE, FAILED, BROKEN, COSTLY) and length <= MAX_ANSWER_BYTES
