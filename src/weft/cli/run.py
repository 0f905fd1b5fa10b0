"""`weft run`: one answer, or a chat, from a running server or a model loaded here; answers go to stdout, the rest to stderr."""

import base64
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console

from weft.cli import Switch
from weft.cli.client import DEFAULT_URL, ServerClient, read_delta
from weft.cli.models import AnyModel
from weft.errors import ImageProblem, RequestError, WeftError
from weft.text.images import sniff
from weft.text.types import Conversation, Delta, Finish, GenerationRequest, Message, Reasoning, Text, Usage

STORYTELLERS = frozenset({"tiny-hybrid"})  # by its card no assistant: it continues a text better than it answers one

ModelInput = str | list[Message]  # a text to be continued, or a conversation
Prompt = Annotated[str | None, Parameter(help="What to ask. Without it a chat opens; Ctrl-D leaves it.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Command-line options of `weft run`; the string under each field is the help text of its flag."""

    max_tokens: int | None = None
    """The longest answer, in tokens. Default: the rest of the context."""
    temperature: float | None = None
    """0 is greedy. Default: what the model's makers recommend."""
    top_p: float | None = None
    """Sample from the likeliest tokens that make up this share."""
    top_k: int | None = None
    """Sample from this many likeliest tokens; 0 for all."""
    seed: int | None = None
    """The same seed gives the same answer."""
    think: bool | None = None
    """Ask the model to think first, or not to; where its template can."""
    chat: bool | None = None
    """Ask through the model's chat template, or let it continue the text: the default without a template, and for tiny-hybrid."""
    image: tuple[Path, ...] = ()
    """An image file (PNG, JPEG, WebP, GIF) to ask about, for models that see; may be given several times."""
    local: Switch = False
    """Load the model here even if a server has it."""

    @property
    def sampling(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return {} if self.think is None else {"enable_thinking": self.think}


Options = Annotated[RunOptions, Parameter(name="*")]


def run_command(model: AnyModel, prompt: Prompt = None, /, *, options: Options = RunOptions()) -> None:  # noqa: B008 - frozen
    """Answer a prompt in the terminal, or open a chat when there is none. Ctrl-C stops the answer, not the program.

    A running server that serves the model is asked (at WEFT_URL, else on this
    machine's port 8400); without one the model is loaded here. What is piped in
    is the prompt, or follows the prompt that is given.

    For example:
      weft run smollm2 "Why is the sky blue?"
      weft run tiny-hybrid "Once upon a time" --seed 7
      weft run smollm2 "Sum this up:" < notes.txt
      weft run tiny-hybrid --image digit.png "What is the digit?"
    """
    notes = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    prompt, images = _append_piped(prompt), [_image_part(file) for file in options.image]
    backend = (None if options.local else find_server(model, options, notes)) or InProcessModel(model, options, notes)
    continues = not images and (not backend.has_template or (prompt is not None and model in STORYTELLERS))
    chat = TerminalChat(backend, notes, continues if options.chat is None or images else not options.chat, images)
    if prompt is not None:
        chat.answer(prompt)
    else:
        chat.converse()


def _image_part(file: Path) -> dict[str, Any]:
    """Read an image file into a part of a message; raises WeftError if it can not be read or is no image."""
    try:
        data = file.expanduser().read_bytes()
    except OSError as error:
        raise WeftError(f"{file} could not be read: {error.strerror}") from error
    try:
        kind = sniff(data).format.lower()
    except ImageProblem as error:
        raise WeftError(f"{file}: {error}") from error
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(data).decode()}"}}


def _append_piped(prompt: str | None) -> str | None:
    """Return the prompt followed by text piped to stdin; None only if stdin is a terminal and there is no prompt."""
    if sys.stdin is None or sys.stdin.isatty():
        return prompt
    try:
        piped = sys.stdin.buffer.read().decode().rstrip("\n")
    except UnicodeDecodeError as error:
        raise WeftError(f"what is piped in is no UTF-8 text: {error.reason} at byte {error.start}") from error
    joined = "\n\n".join(part for part in (prompt, piped) if part)
    if not joined:
        raise WeftError("nothing is piped in and no prompt was given; give one, or chat in a terminal")
    return joined


@dataclass
class RemoteModel:
    """A model on a running server, queried through its OpenAI-compatible endpoints."""

    client: ServerClient
    model: str
    options: RunOptions
    has_template: bool = True  # the server says so when there is none

    def stream(self, prompt: ModelInput) -> Iterator[Delta]:
        """Yield the answer delta by delta, then a Finish; Ctrl-C closes the connection, which cancels the request."""
        finish = Finish("cancelled")
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **self.options.sampling}
        if isinstance(prompt, str):
            path, body["prompt"] = "/v1/completions", prompt
        else:
            path, body["chat_template_kwargs"] = "/v1/chat/completions", self.options.template_kwargs
            body["messages"] = [{"role": message.role, "content": message.content} for message in prompt]
        with interrupts(self.client.hang_up), closing(self.client.stream(path, body)) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    reasoning, text = read_delta(choice)
                    if reasoning:
                        yield Reasoning(reasoning)
                    if text:
                        yield Text(text)
                    finish = replace(finish, reason=choice.get("finish_reason") or finish.reason)
                if usage := event.get("usage"):
                    finish = replace(finish, usage=Usage(usage["prompt_tokens"], usage["completion_tokens"]))
        yield finish


class InProcessModel:
    """A model loaded into this process, with an engine of its own."""

    def __init__(self, model: str, options: RunOptions, notes: Console) -> None:
        from weft.engine.process import import_mlx_lm
        from weft.llm import BLAS, LLM

        import_mlx_lm()
        if BLAS.warning:
            notes.print(f"weft: {BLAS.warning}", style="yellow")
        self.options = options
        self.llm = LLM(model, progress=True)
        self.codec = self.llm.codec
        self.has_template = self.codec.writer is not None

    def stream(self, prompt: ModelInput) -> Iterator[Delta]:
        """Yield the answer delta by delta, then a Finish; iterating runs the engine, and Ctrl-C cancels the request."""
        kwargs = self.options.template_kwargs
        content = prompt if isinstance(prompt, str) else Conversation(tuple(prompt), template_kwargs=kwargs)
        generation = GenerationRequest(model=None, prompts=(content,), sampling=self.options.sampling)
        encoded = self.codec.encode(self.llm.see(content) if isinstance(content, Conversation) else content)
        reader, num_read = self.codec.reader(generation, encoded), 0
        sequence = self.llm.submit_ids(encoded.ids, self.codec.sampling(generation), encoded.images)
        # A KeyboardInterrupt inside a step would leave the engine between two states.
        with interrupts() as interrupted:
            while not sequence.is_finished:
                self.llm.turn()
                if interrupted:
                    self.llm.engine.cancel(sequence)
                for token in sequence.output[num_read:]:
                    yield from reader.feed(token)
                num_read = len(sequence.output)
        if sequence.error:
            raise WeftError(sequence.error)
        yield from reader.finish()
        yield Finish(sequence.finish or "cancelled", usage=Usage(len(encoded.ids), num_read))


def find_server(model: str, options: RunOptions, notes: Console) -> RemoteModel | None:
    """Return the model on the server at WEFT_URL or the default address; None if no server there is ready to serve it."""
    client = ServerClient()
    names = {model, str(Path(model).expanduser().absolute())}
    try:
        client.fetch("/health", msgspec.Raw)  # says 503 while it loads
        listed = client.models()
    except RequestError as error:  # a server is there and refuses us, for lack of a key, say
        notes.print(f"[{client.url}: {error}]", style="yellow")
        return None
    except WeftError:
        listed = []
    for one in listed:
        if names & {one.id, one.root}:
            notes.print(f"[answered by {client.url}]", style="dim")
            return RemoteModel(client, one.id, options)
    if client.url != DEFAULT_URL:
        notes.print(f"[no server at {client.url} is ready to serve {model}: loading it here]", style="dim")
    return None


@dataclass
class TerminalChat:
    """A chat in the terminal: reads prompts, prints the streamed answers, and keeps the conversation's messages."""

    backend: RemoteModel | InProcessModel
    notes: Console
    continues: bool  # whether the model continues the text it is given instead of answering
    images: list[dict[str, Any]] = field(default_factory=list)  # that go with the first message
    messages: list[Message] = field(default_factory=list)

    def converse(self) -> None:
        self.notes.print("Ctrl-C stops an answer, Ctrl-D leaves.", style="dim")
        while True:
            try:
                text = input("> ")
            except (EOFError, KeyboardInterrupt) as error:
                sys.stdout.write("\n")
                if isinstance(error, EOFError):
                    return
                continue
            if text.strip():
                try:
                    self.answer(text)
                except WeftError as error:
                    self.messages.pop()
                    self.notes.print(f"weft: {error}", style="red")

    def answer(self, text: str) -> None:
        images = [] if self.messages else self.images
        self.messages.append(Message("user", [*images, {"type": "text", "text": text}] if images else text))
        answer, has_reasoned, summary, first, start = "", False, "", 0.0, time.perf_counter()
        try:
            for delta in self.backend.stream(text if self.continues else self.messages):
                if not first:
                    first = time.perf_counter()
                    _write(text if self.continues else "")
                match delta:
                    case Reasoning():
                        self.notes.print(delta.text, style="dim", end="")
                        has_reasoned = True
                    case Text():
                        if has_reasoned and not answer:
                            self.notes.print("\n")
                        _write(delta.text)
                        answer += delta.text
                    case Finish():
                        summary = _summary(delta, start, first)
        finally:
            if first:
                _write("\n")
        self.notes.print(summary, style="dim")
        self.messages.append(Message("assistant", answer))


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


@contextmanager
def interrupts(then: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Context manager: Ctrl-C appends to the yielded list and calls `then`, instead of raising KeyboardInterrupt."""
    seen: list[int] = []

    def note(number: int, *_: object) -> None:
        seen.append(number)
        then()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
