"""`weft run`: one answer, or a chat, streamed to the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rich.console import Console

from weft.chat.tokenizer import Detokenizer
from weft.errors import RequestError
from weft.llm import BLAS, LLM
from weft.wire import Sampling

STORYTELLERS = frozenset({"tiny-hybrid"})  # by its card no assistant: it continues a text better than it answers one


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    model: str
    prompt: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    think: bool | None
    chat: bool | None


def run_command(options: Options) -> None:
    """Load the model, then answer once or chat."""
    notes = Console(stderr=True, highlight=False)
    if BLAS.warning:
        notes.print(f"weft: {BLAS.warning}", style="yellow")
    chat = Chat(LLM(options.model, progress=True), options, notes)
    if options.prompt is not None:
        chat.answer(options.prompt)
    else:
        chat.converse()


@dataclass
class Chat:
    """A conversation in the terminal."""

    llm: LLM
    options: Options
    notes: Console
    messages: list[dict[str, str]] = field(default_factory=list)

    def converse(self) -> None:
        """Ask and answer until Ctrl-D."""
        self.notes.print("Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
        while True:
            try:
                text = input("> ")
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                continue
            if text.strip():
                try:
                    self.answer(text)
                except RequestError as error:
                    self.messages.pop()
                    self.notes.print(f"weft: {error}", style="red")

    def answer(self, text: str) -> None:
        """Stream one answer; keep it in the conversation."""
        self.messages.append({"role": "user", "content": text})
        sequence = self.llm.submit(self._prompt(text), self._sampling())
        detokenizer, told = Detokenizer(self.llm.tokenizer), 0
        if self.continues:
            sys.stdout.write(text)
        with interrupts() as interrupted:
            while not sequence.is_finished:
                self.llm.turn()
                if interrupted:
                    self.llm.engine.cancel(sequence)
                for token in sequence.output[told:]:
                    sys.stdout.write(detokenizer.feed(token))
                told = len(sequence.output)
                sys.stdout.flush()
        sys.stdout.write(detokenizer.finish() + "\n")
        self.messages.append({"role": "assistant", "content": detokenizer.told})
        result = self.llm.result(sequence)
        if result.error:
            self.notes.print(f"weft: {result.error}", style="red")
        self.notes.print(self._summary(result.timings, len(result.token_ids), result.finish), style="dim")

    @property
    def continues(self) -> bool:
        """Whether the text is continued as it is."""
        if self.options.chat is not None:
            return not self.options.chat
        return self.llm.template is None or (self.options.prompt is not None and self.options.model in STORYTELLERS)

    def _prompt(self, text: str) -> list[int]:
        if self.continues:
            return self.llm.encode(text)
        template: dict[str, Any] = {} if self.options.think is None else {"enable_thinking": self.options.think}
        return self.llm.render(self.messages, **template)

    def _sampling(self) -> Sampling:
        names = ("temperature", "top_p", "top_k")
        given = {name: value for name in names if (value := getattr(self.options, name)) is not None}
        return self.llm.recommended(Sampling(max_tokens=self.options.max_tokens, seed=self.options.seed), given)

    @staticmethod
    def _summary(timings: Any, tokens: int, finish: str) -> str:
        first, end = timings.first_token, timings.finished
        if first is None or end is None or tokens < 2:
            return f"[{tokens} tokens, {finish}]"
        wait, rate = first - timings.submitted, (tokens - 1) / max(end - first, 1e-9)
        return f"[{tokens} tokens, {finish}; first after {wait:.2f} s, then {rate:.1f} tokens/s]"


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """A list that Ctrl-C fills. A KeyboardInterrupt inside a step would leave the engine between two states."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal protocol
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
