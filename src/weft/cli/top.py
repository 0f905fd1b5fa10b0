"""`weft top`: live view of a running server, redrawn at every event of GET /v1/events; without a terminal, a single frame."""

import time
from contextlib import closing, suppress
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weft.cli import ApiKey, Url
from weft.cli.client import ListedReplica, ServerClient
from weft.errors import WeftError

LINGER_SECONDS = 5.0  # how long a finished request is still shown
BAR, NAME = 48, 12  # characters; ids are longer
MEMORY = {"weights": "blue", "rows": "green", "prefixes": "cyan", "reserve": "yellow"}
STATES = {"queued": "yellow", "following": "magenta", "prefill": "cyan", "decode": "green", "finished": "dim"}


class TopRequest(msgspec.Struct):
    """State and token counts of one request in an event; while its model is being loaded, only its id and state are set."""

    id: str
    state: str
    model: str = "-"
    wire: str = "-"
    arrived: float | None = None
    choices: int = 1
    prompt_tokens: int = 0
    computed: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    constrained: bool = False
    resumed: int = 0
    cause: str | None = None
    finish: str | None = None
    replica: str | None = None


class TopDrafts(msgspec.Struct):
    """Drafts and draft tokens that a model's engines have verified so far, and how many of the tokens were accepted."""

    verified: int
    tokens: int
    accepted: int

    @property
    def words(self) -> str:
        return f"{self.accepted / self.tokens:.0%} {1 + self.accepted / self.verified:.1f}/step"


class TopModel(msgspec.Struct):
    """State, rows, memory and speed of one model in an event of GET /v1/events."""

    name: str
    status: str
    rows_running: int = 0
    rows_waiting: int = 0
    max_rows: int = 0
    restarts: int = 0
    memory: dict[str, int] = {}
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    gaps: dict[str, float] | None = None
    drafts: TopDrafts | None = None
    replicas: list[ListedReplica] = []
    moved: int = 0


class TopEvent(msgspec.Struct):
    """One event of GET /v1/events: the time, all models, and the requests that changed since the last event or are queued."""

    time: float
    models: list[TopModel]
    requests: list[TopRequest]


def top_command(*, url: Url = None, api_key: ApiKey = None) -> None:
    """Watch a running server: requests and their states, rows, memory, tokens per second. Ctrl-C leaves.

    For example:
      weft top
      weft top --url http://127.0.0.1:9000
    """
    client, console, board = ServerClient(url, api_key), Console(), Board()
    with suppress(KeyboardInterrupt), closing(client.stream("/v1/events", None)) as events:
        if not console.is_terminal:
            board.update(read_event(next(events)))
            console.print(board.render(client.url))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for event in events:
                board.update(read_event(event))
                live.update(board.render(client.url), refresh=True)


def read_event(event: dict[str, Any]) -> TopEvent:
    """Convert the JSON of an event to a TopEvent; raise WeftError if the fields do not fit, as from another version."""
    try:
        return msgspec.convert(event, TopEvent)
    except msgspec.ValidationError as error:
        raise WeftError(f"what the server tells is not understood ({error}); is it another version of weft?") from error


class Board:
    """The last known state of each model and request, updated by events and rendered as tables."""

    def __init__(self) -> None:
        self.models: list[TopModel] = []
        self.requests: dict[str, TopRequest] = {}
        self._ended: dict[str, float] = {}
        self._time = 0.0

    def update(self, event: TopEvent) -> None:
        self._time, self.models = event.time, event.models
        for request in event.requests:
            self.requests[request.id] = request
            if request.state == "finished":
                self._ended[request.id] = event.time
        for name in [name for name, ended in self._ended.items() if event.time - ended > LINGER_SECONDS]:
            del self.requests[name], self._ended[name]

    def render(self, url: str) -> RenderableType:
        clock = time.strftime("%H:%M:%S", time.localtime(self._time))
        num_running = sum(request.state != "finished" for request in self.requests.values())
        head = Text(f"weft at {url}  {clock}  {num_running} requests  (Ctrl-C leaves)", style="bold")
        return Group(head, self._model_table(), *map(_memory_bar, self.models), self._request_table())

    def _model_table(self) -> Table:
        heads = ("model", "state", "rows", "waiting", "tok/s", "prefill", "gap p50/p95", "restarts")
        has_drafts = any(model.drafts for model in self.models)
        table = _empty_table(*heads, *(["accepted"] if has_drafts else []))
        for model in self.models:
            gaps = f"{model.gaps['p50'] * 1000:.0f}/{model.gaps['p95'] * 1000:.0f} ms" if model.gaps else "-"
            rows = (f"{model.rows_running}/{model.max_rows}", str(model.rows_waiting))
            speeds = (f"{model.tokens_per_second:.0f}", f"{model.prompt_tokens_per_second:.0f}")
            accepted = [model.drafts.words if model.drafts else "-"] if has_drafts else []
            table.add_row(escape(model.name), model.status, *rows, *speeds, gaps, str(model.restarts), *accepted)
            for one in model.replicas:
                table.add_row(f"  {escape(one.name)}", one.status, str(one.rows_running), str(one.rows_waiting), "", one.hits)
            if model.moved:
                table.add_row("", f"{model.moved} answers moved")
        return table

    def _request_table(self) -> Table:
        models = ["model"] if len(self.models) > 1 else []
        table = _empty_table("request", "wire", "state", "prompt", "cached", "answer", "seconds", "notes", *models)
        for request in sorted(self.requests.values(), key=lambda each: each.arrived or self._time):
            state = Text(request.finish or request.state, style=STATES.get(request.state, ""))
            seconds = "-" if request.arrived is None else f"{self._ended.get(request.id, self._time) - request.arrived:.1f}"
            prompt = f"{request.computed}/{request.prompt_tokens}" if request.state == "prefill" else str(request.prompt_tokens)
            table.add_row(
                escape(request.id), request.wire, state, prompt, str(request.cached_tokens),
                str(request.tokens), seconds, _notes(request), *[escape(request.model) for _ in models],
            )  # fmt: skip
        return table


def _empty_table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis", max_width=NAME if head == "request" else None)
    return table


def _memory_bar(model: TopModel) -> Text:
    """Return a bar of a model's memory use by kind, relative to its budget, or to its peak use if it has no budget."""
    used = {kind: model.memory.get(kind, 0) for kind in MEMORY}
    total = max(model.memory.get("budget", 0) or model.memory.get("peak", 0), sum(used.values()), 1)
    bar = Text()
    for kind, size in used.items():
        bar.append("█" * round(BAR * size / total), style=MEMORY[kind])
    bar.append("░" * max(0, BAR - len(bar)), style="dim")
    sizes = ", ".join(f"{kind} {decimal(size)}" for kind, size in used.items() if size)
    return bar.append(f"\n{sizes} of {decimal(total)}")


def _notes(request: TopRequest) -> str:
    choices = f"×{request.choices}" if request.choices > 1 else ""
    cause = "" if request.cause in (None, "whole") else f"cache: {request.cause}"
    place = "" if request.replica is None else f"at {request.replica}"
    notes = (choices, place, "constrained" if request.constrained else "", "resumed" if request.resumed else "", cause)
    return " ".join(filter(None, notes))
