"""What `weft doctor` tries on a server of its own: an answer, a schema, a kept prompt, a tool call. Each ends in a verdict.

The server is `weft serve` on the model that comes with the package, in processes of its own, as a user would have it; nothing
here loads mlx.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from weft.cli.client import ServerClient
from weft.errors import WeftError

MODEL = "tiny-hybrid"
START_SECONDS = 120.0
ASK_SECONDS = 60.0
SLOW_TOKENS = 40.0  # a second, of a model of 12 M parameters: one old core does hundreds
STORY, STORY_GOES_ON = "Once upon a time", ", there was"  # what every device says when asked greedily
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"type": "integer", "minimum": 0, "maximum": 8}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
TOOL = {
    "type": "object",
    "properties": {"file": {"type": "string", "enum": ["one", "two"]}},
    "required": ["file"],
    "additionalProperties": False,
}

Grade = Literal["ok", "slow", "wrong"]


@dataclass(frozen=True)
class Finding:
    """What was found of one thing, and where it is not well what to do."""

    grade: Grade
    what: str
    found: str
    advice: str = ""

    def __str__(self) -> str:
        """One line."""
        return f"{self.grade:<6} {self.what:<12} {self.found}{f'; {self.advice}' if self.advice else ''}"


def trials(log: Path) -> Iterator[Finding]:
    """Start the server and try it. Its log is written to `log`."""
    try:
        with own_server(log) as (client, seconds):
            yield Finding("ok", "server", f"{MODEL} was served after {seconds:.1f} s")
            for what, trial in TRIALS.items():
                yield _guarded(what, trial, client)
    except WeftError as error:
        yield Finding("wrong", "server", str(error), "see the log in a --bundle, and run `weft serve tiny-hybrid` yourself")


@contextmanager
def own_server(log: Path) -> Iterator[tuple[ServerClient, float]]:
    """A server on a free port with none of the user's settings, and how long it took to be ready. Raises WeftError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_") or name == "WEFT_CACHE"}
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as errors:
        settings = Path(folder, "empty.toml")
        settings.touch()
        options = ["--port", "0", "--store-responses", "0", "--config", str(settings)]
        command = [sys.executable, "-m", "weft", "serve", MODEL, *options]
        start = time.monotonic()
        with subprocess.Popen(command, stdout=errors, stderr=errors, env=environment, cwd=folder) as process:
            try:
                client = _when_ready(process, log, start + START_SECONDS)
                yield client, time.monotonic() - start
            finally:
                process.terminate()
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    process.kill()


def _when_ready(process: subprocess.Popen[bytes], log: Path, deadline: float) -> ServerClient:
    while time.monotonic() < deadline:
        told = log.read_text(encoding="utf-8", errors="replace")
        if process.poll() is not None:
            last = told.strip().splitlines()[-1:] or ["without a word"]
            raise WeftError(f"the server ended with status {process.returncode}: {last[0]}")
        if found := re.search(r"listens at (http://\S+)", told):
            client = ServerClient(found[1], key="none")
            try:
                client.get("/health", msgspec.Raw, ASK_SECONDS)  # says 503 while it loads
            except WeftError:
                pass
            else:
                return client
        time.sleep(0.05)
    raise WeftError(f"the server was not ready after {START_SECONDS:.0f} s")


def _guarded(what: str, trial: Callable[[ServerClient], Finding], client: ServerClient) -> Finding:
    try:
        return trial(client)
    except (WeftError, ValueError, LookupError, TypeError) as error:  # an answer of another shape is wrong as well
        advice = "run again; if it stays, report it with the file of --bundle"
        return Finding("wrong", what, f"{type(error).__name__}: {error}", advice)


def _generation(client: ServerClient) -> Finding:
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", body, dict[str, Any], ASK_SECONDS)
    text, speed = answer["choices"][0]["text"], answer["timings"]["predicted_per_second"]
    if not text.startswith(STORY_GOES_ON):
        advice = "the numbers are not the model's; reinstall mlx, and look at the line `products`"
        return Finding("wrong", "generation", f"{STORY!r} went on with {text[:40]!r}", advice)
    found = f"{answer['usage']['completion_tokens']} tokens, {speed:.0f} tokens/s"
    if speed < SLOW_TOKENS:
        return Finding("slow", "generation", found, "look at the line `products`, and at what else runs on this machine")
    return Finding("ok", "generation", found)


def _schema(client: ServerClient) -> Finding:
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    message = _chat(client, "Tell me of an animal.", response_format=form)["choices"][0]["message"]
    animal = json.loads(message["content"])
    if animal.keys() != {"name", "legs"} or type(animal["name"]) is not str or animal["legs"] not in range(9):
        raise ValueError(f"{message['content']!r} does not fit the schema")
    return Finding("ok", "schema", f"strict: {json.dumps(animal)}")


def _cache(client: ServerClient) -> Finding:
    question = " ".join(f"Number {number} is a dog." for number in range(60)) + " Which is a dog?"
    first, second = (_chat(client, question, max_tokens=1)["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    found = f"{cached} of {second['prompt_tokens']} prompt tokens were known the second time"
    if first["prompt_tokens"] != second["prompt_tokens"] or not cached:
        return Finding("wrong", "cache", found, "run again; if it stays, report it with the file of --bundle")
    return Finding("ok", "cache", found)


def _tool_call(client: ServerClient) -> Finding:
    tool = {"type": "function", "function": {"name": "look", "parameters": TOOL, "strict": True}}
    choice = {"type": "function", "function": {"name": "look"}}
    answer = _chat(client, "Look into a file.", tools=[tool], tool_choice=choice)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name != "look" or arguments not in ({"file": "one"}, {"file": "two"}):
        raise ValueError(f"{call['function']} is not the call that was forced")
    return Finding("ok", "tool call", f"{name}({json.dumps(arguments)})")


def _chat(client: ServerClient, question: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200}
    return client.post("/v1/chat/completions", {**body, "reasoning_effort": "none", **more}, dict[str, Any], ASK_SECONDS)


TRIALS: dict[str, Callable[[ServerClient], Finding]] = {
    "generation": _generation,
    "schema": _schema,
    "cache": _cache,
    "tool call": _tool_call,
}
