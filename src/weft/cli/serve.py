"""`weft serve`: what the operator sees while a server starts. The server itself is `weft.serving.server`'s.

Bars while models load, a line when each is ready, and at the end three lines to copy. All on stderr; stdout stays free.
"""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack

from rich.console import Console
from rich.filesize import decimal

from weft.cli.settings import dump
from weft.config import ServerConfig
from weft.model.download import Progress, shown


def serve_command(config: ServerConfig, *, dump_config: bool) -> int:
    """Check the settings, then show them or serve. Gives the exit status."""
    config.check()
    if dump_config:
        sys.stdout.write(dump(config))
        return 0
    from weft.api.app import make_app
    from weft.serving.server import serve

    with Terminal(has_key=bool(config.api_keys)) as screen:
        return serve(config, screen, make_app)


class Terminal:
    """The terminal of a server that starts. The server tells it what happens; nothing here waits."""

    def __init__(self, *, has_key: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._has_key = has_key
        self._bars = ExitStack()
        self._report: Progress | None = None
        self._url: str | None = None
        self._model: str | None = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def loading(self, model: str, what: str, done: int, total: int) -> None:
        """`done` bytes of `total` (0: unknown) are fetched, converted or read."""
        if self._report is None:
            self._report = self._bars.enter_context(shown(None))
        self._report(what if model in what else f"{model}: {what}", done, total or None)

    def ready(self, model: str, context: int, device: str, memory: dict[str, int], notice: str | None = None) -> None:
        """The model answers from now on."""
        self._end_bars()
        plan = ", ".join(f"{name} {decimal(size)}" for name, size in memory.items())
        self._print(f"{model}: context {context:,} tokens, on {device}; memory: {plan}", style="green")
        if notice:
            self._print(f"{model}: {notice}", style="yellow")
        self._model = self._model or model
        self._invite()

    def failed(self, model: str, message: str) -> None:
        """The model can not be served."""
        self._end_bars()
        self._print(f"weft: {model}: {message}", style="red")

    def serving(self, url: str) -> None:
        """The server answers at `url`, be it that models are still being loaded."""
        self._print(f"weft listens at {url} (Ctrl-C ends it)", style="bold")
        self._url = url
        self._invite()

    def _end_bars(self) -> None:
        self._bars.close()
        self._report = None

    def _invite(self) -> None:
        """Three lines to copy, once there is an address and a model."""
        if self._url is None or self._model is None:
            return
        url, model, self._url = self._url, json.dumps(self._model), None
        messages = '[{"role": "user", "content": "Hello!"}]'
        body = shlex.quote(f'{{"model": {model}, "messages": {messages}}}')
        header = '-H "Authorization: Bearer $WEFT_API_KEY" ' if self._has_key else ""
        code = (
            f'import openai, os; client = openai.OpenAI(base_url="{url}/v1", api_key=os.getenv("WEFT_API_KEY", "none")); '
            f"print(client.chat.completions.create(model={model}, messages={messages}).choices[0].message.content)"
        )
        self._print(f"curl {url}/v1/chat/completions {header}-H 'content-type: application/json' -d {body}")
        self._print(f"python -c {shlex.quote(code)}")
        self._print(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'$WEFT_API_KEY' if self._has_key else 'none'}")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style)
