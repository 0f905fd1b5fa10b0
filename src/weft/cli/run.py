"""`weft run`: one answer, or a chat, streamed to the terminal, by a running server or by the model loaded here.

The answer goes to stdout, everything else to stderr. mlx is loaded only where the model is.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec
from rich.console import Console

from weft.cli.client import DEFAULT_URL, ServerClient
from weft.errors import RequestError, WeftError
from weft.text.codec import Codec
from weft.text.types import Conversation, Delta, Finish, GenerationRequest, Message, Reasoning, Text, Usage

STORYTELLERS = frozenset({"tiny-hybrid"})  # by its card no assistant: it continues a text better than it answers one

Prompt = str | list[Message]  # a text to be continued, or a conversation


@dataclass(frozen=True)
class RunOptions:
    """What the command line said."""

    model: str
    prompt: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    think: bool | None = None
    chat: bool | None = None
    local: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """How to sample, as far as it was said."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def template(self) -> dict[str, Any]:
        """What the chat template is told."""
        return {} if self.think is None else {"enable_thinking": self.think}


def run_command(options: RunOptions) -> None:
    """Find who answers, then answer once or chat."""
    notes = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    options = replace(options, prompt=_with_piped(options.prompt))
    teller = None if options.local else find_server(options, notes)
    chat = Chat(teller or Local(options, notes), options, notes)
    if options.prompt is not None:
        chat.answer(options.prompt)
    else:
        chat.converse()


def _with_piped(prompt: str | None) -> str | None:
    """The prompt, followed by what is piped in. None: there is somebody at the terminal who will ask."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    try:
        piped = sys.stdin.buffer.read().decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise WeftError(f"what is piped in is no UTF-8 text: {error.reason} at byte {error.start}") from error
    whole = "\n\n".join(part for part in (prompt, piped) if part)
    if not whole:
        raise WeftError("nothing is piped in and no prompt was given; give one, or chat in a terminal")
    return whole


class Teller(Protocol):
    """Who answers. Ctrl-C ends what is being told."""

    has_template: bool

    def tell(self, prompt: Prompt) -> Iterator[Delta]:
        """The answer, piece by piece, and last its Finish. Raises WeftError."""


@dataclass
class Chat:
    """A conversation in the terminal."""

    teller: Teller
    options: RunOptions
    notes: Console
    messages: list[Message] = field(default_factory=list)

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
                except WeftError as error:
                    self.messages.pop()
                    self.notes.print(f"weft: {error}", style="red")

    def answer(self, text: str) -> None:
        """Stream one answer; keep it in the conversation."""
        self.messages.append(Message("user", text))
        continues = self._continues()
        told, thought, summary, first, start = "", "", "", 0.0, time.perf_counter()
        try:
            for piece in self.teller.tell(text if continues else self.messages):
                if not first:
                    first = time.perf_counter()
                    self._write(text if continues else "")
                match piece:
                    case Reasoning():
                        self.notes.print(piece.text, style="dim", end="")
                        thought += piece.text
                    case Text():
                        if thought and not told:
                            self.notes.print("\n")
                        self._write(piece.text)
                        told += piece.text
                    case Finish():
                        summary = _summary(piece, start, first)
        finally:
            if first:
                self._write("\n")
        self.notes.print(summary, style="dim")
        self.messages.append(Message("assistant", told))

    def _continues(self) -> bool:
        """Whether the text is continued as it is."""
        if self.options.chat is not None:
            return not self.options.chat
        return not self.teller.has_template or (self.options.prompt is not None and self.options.model in STORYTELLERS)

    @staticmethod
    def _write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _summary(finish: Finish, start: float, first: float) -> str:
    if finish.usage is None:
        return f"[{finish.reason}]"
    tokens, rest = finish.usage.completion_tokens, ""
    if tokens > 1:
        rate = (tokens - 1) / max(time.perf_counter() - first, 1e-9)
        rest = f"; first after {first - start:.2f} s, then {rate:.1f} tokens/s"
    return f"[{tokens} tokens, {finish.reason}{rest}]"


# --- by a server -----------------------------------------------------------------------------------------------------


class _ServedName(msgspec.Struct):
    id: str
    root: str | None = None


class _ServedNames(msgspec.Struct):
    data: list[_ServedName]


def find_server(options: RunOptions, notes: Console) -> Remote | None:
    """The server that runs and serves the model, if there is one."""
    client = ServerClient()
    names = {options.model, str(Path(options.model).expanduser().absolute())}
    try:
        client.get("/health", msgspec.Raw)  # says 503 while it loads
        rows = client.get("/v1/models", _ServedNames).data
    except RequestError as error:  # it is there and does not want us, for the lack of a key, say
        notes.print(f"[{client.url}: {error}]", style="yellow")
        return None
    except WeftError:
        rows = []
    for row in rows:
        if names & {row.id, row.root}:
            notes.print(f"[answered by {client.url}]", style="dim")
            return Remote(client, row.id, options)
    if client.url != DEFAULT_URL:
        notes.print(f"[no server at {client.url} is ready to serve {options.model}: loading it here]", style="dim")
    return None


@dataclass
class Remote:
    """A model that a server has loaded."""

    client: ServerClient
    model: str
    options: RunOptions
    has_template: bool = True  # the server says so when there is none

    def tell(self, prompt: Prompt) -> Iterator[Delta]:
        """Ask over the OpenAI wire; hanging up is how an answer is cancelled."""
        finish = Finish("cancelled")
        with interrupts(self.client.hang_up), closing(self.client.stream(*self._request(prompt))) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    delta = choice.get("delta") or {"content": choice.get("text")}
                    if thought := delta.get("reasoning_content"):
                        yield Reasoning(thought)
                    if text := delta.get("content"):
                        yield Text(text)
                    finish = replace(finish, reason=choice.get("finish_reason") or finish.reason)
                if usage := event.get("usage"):
                    finish = replace(finish, usage=Usage(usage["prompt_tokens"], usage["completion_tokens"]))
        yield finish

    def _request(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **self.options.sampling}
        if isinstance(prompt, str):
            return "/v1/completions", {**body, "prompt": prompt}
        messages = [{"role": message.role, "content": message.content} for message in prompt]
        return "/v1/chat/completions", {**body, "messages": messages, "chat_template_kwargs": self.options.template}


# --- by the model loaded here ----------------------------------------------------------------------------------------


class Local:
    """A model in this process."""

    def __init__(self, options: RunOptions, notes: Console) -> None:
        from weft.llm import BLAS, LLM

        if BLAS.warning:
            notes.print(f"weft: {BLAS.warning}", style="yellow")
        self.options = options
        self.llm = LLM(options.model, progress=True)
        self.codec = Codec(self.llm.loaded.folder)
        self.has_template = self.codec.writer is not None

    def tell(self, prompt: Prompt) -> Iterator[Delta]:
        """Drive the engine until the answer is there."""
        asked = prompt if isinstance(prompt, str) else Conversation(tuple(prompt), template_kwargs=self.options.template)
        generation = GenerationRequest(model=None, prompts=(asked,), sampling=self.options.sampling)
        written = self.codec.encode(asked)
        reader, told = self.codec.reader(generation, written), 0
        sequence = self.llm.submit(written.ids, self.codec.sampling(generation.sampling))
        # A KeyboardInterrupt inside a step would leave the engine between two states.
        with interrupts() as interrupted:
            while not sequence.is_finished:
                self.llm.turn()
                if interrupted:
                    self.llm.engine.cancel(sequence)
                for token in sequence.output[told:]:
                    yield from reader.feed(token)
                told = len(sequence.output)
        if sequence.error:
            raise WeftError(sequence.error)
        yield from reader.finish()
        yield Finish(sequence.finish or "cancelled", usage=Usage(len(written.ids), told))


@contextmanager
def interrupts(then: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """A list that Ctrl-C fills instead of raising; `then` is called as well."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signal protocol
        seen.append(number)
        then()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
