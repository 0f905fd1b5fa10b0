"""`weft top`: what a running server does, drawn anew with every event that it sends.

Shows the events of GET /v1/events: numbers and states, never text. Where there is no terminal one picture is printed.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weft.cli.client import ServerClient
from weft.errors import WeftError

LINGER_SECONDS = 5.0  # a request that has its end is shown so long
BAR, NAME = 48, 12  # characters; ids are longer
MEMORY = {"weights": "blue", "rows": "green", "prefixes": "cyan", "reserve": "yellow"}
STATES = {"queued": "yellow", "following": "magenta", "prefill": "cyan", "decode": "green", "finished": "dim"}


class TopRequest(msgspec.Struct):
    """One request, as a server tells it. Before its model has taken it there is only an id."""

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


class TopModel(msgspec.Struct):
    """One model, as a server tells it."""

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


class News(msgspec.Struct):
    """What one event says."""

    time: float
    models: list[TopModel]
    requests: list[TopRequest]


def top_command(url: str | None, api_key: str | None) -> None:
    """Watch until Ctrl-C, or until the server goes."""
    client, console, board = ServerClient(url, api_key), Console(), Board()
    try:
        with closing(client.stream("/v1/events", None)) as events:
            if not console.is_terminal:
                board.hear(_read(next(events)))
                console.print(board.drawn(client.url))
                return
            with Live(console=console, screen=True, auto_refresh=False) as live:
                for event in events:
                    board.hear(_read(event))
                    live.update(board.drawn(client.url), refresh=True)
    except KeyboardInterrupt:
        return


def _read(event: dict[str, Any]) -> News:
    try:
        return msgspec.convert(event, News)
    except msgspec.ValidationError as error:
        raise WeftError(f"what the server tells is not understood ({error}); is it another version of weft?") from error


class Board:
    """Knows the last that was said of each model and each request."""

    def __init__(self) -> None:
        self.models: list[TopModel] = []
        self.requests: dict[str, TopRequest] = {}
        self._ended: dict[str, float] = {}
        self._time = 0.0

    def hear(self, news: News) -> None:
        """Take in an event. What ended some seconds ago is forgotten."""
        self._time, self.models = news.time, news.models
        for request in news.requests:
            self.requests[request.id] = request
            if request.state == "finished":
                self._ended[request.id] = news.time
        for name in [name for name, ended in self._ended.items() if news.time - ended > LINGER_SECONDS]:
            self.requests.pop(name, None)
            del self._ended[name]

    def drawn(self, url: str) -> RenderableType:
        """Everything, as a terminal shows it."""
        clock = time.strftime("%H:%M:%S", time.localtime(self._time))
        living = sum(request.state != "finished" for request in self.requests.values())
        head = Text(f"weft at {url}  {clock}  {living} requests  (Ctrl-C leaves)", style="bold")
        return Group(head, self._models(), *map(_memory, self.models), self._requests())

    def _models(self) -> Table:
        table = _table("model", "state", "rows", "waiting", "tok/s", "prefill", "gap p50/p95", "restarts")
        for model in self.models:
            gaps = f"{model.gaps['p50'] * 1000:.0f}/{model.gaps['p95'] * 1000:.0f} ms" if model.gaps else "-"
            rows, speeds = f"{model.rows_running}/{model.max_rows}", (model.tokens_per_second, model.prompt_tokens_per_second)
            speed = [f"{each:.0f}" for each in speeds]
            table.add_row(
                escape(model.name), model.status, rows, str(model.rows_waiting), *speed, gaps, str(model.restarts),
            )  # fmt: skip
        return table

    def _requests(self) -> Table:
        models = ["model"] if len(self.models) > 1 else []
        table = _table("request", "wire", "state", "prompt", "cached", "answer", "seconds", "notes", *models)
        for request in sorted(self.requests.values(), key=lambda each: each.arrived or self._time):
            style = STATES.get(request.state, "")
            seconds = "-" if request.arrived is None else f"{self._ended.get(request.id, self._time) - request.arrived:.1f}"
            state = request.finish or request.state
            prompt = f"{request.computed}/{request.prompt_tokens}" if request.state == "prefill" else str(request.prompt_tokens)
            table.add_row(
                escape(request.id), request.wire, Text(state, style=style), prompt, str(request.cached_tokens),
                str(request.tokens), seconds, _notes(request), *[escape(request.model) for _ in models],
            )  # fmt: skip
        return table


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, no_wrap=True, overflow="ellipsis", max_width=NAME if head == "request" else None)
    return table


def _memory(model: TopModel) -> Text:
    """A bar of the whole budget, or where there is none of what was in use at most."""
    used = {kind: model.memory.get(kind, 0) for kind in MEMORY}
    whole = max(model.memory.get("budget", 0) or model.memory.get("peak", 0), sum(used.values()), 1)
    bar = Text()
    for kind, size in used.items():
        bar.append("█" * round(BAR * size / whole), style=MEMORY[kind])
    bar.append("░" * max(0, BAR - len(bar)), style="dim")
    words = ", ".join(f"{kind} {decimal(size)}" for kind, size in used.items() if size)
    return bar.append(f"\n{words} of {decimal(whole)}")


def _notes(request: TopRequest) -> str:
    notes = [f"×{request.choices}"] if request.choices > 1 else []
    notes += ["constrained"] if request.constrained else []
    notes += ["resumed"] if request.resumed else []
    notes += [f"cache: {request.cause}"] if request.cause not in (None, "whole") else []
    return " ".join(notes)
