"""`weft ls`, `pull`, `ps`, `load`, `unload` and `cache`: models here or on a running server, and the server's prefix cache."""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from cyclopts import App, Parameter
from rich.filesize import decimal

from weft.cli import AsJson, Switch, Url, write_columns, write_json
from weft.cli.client import SILENCE_SECONDS, ListedModel, ServerClient
from weft.errors import WeftError

STATUS_SECONDS = 5.0
CACHE_SECONDS = 10.0  # the server gives its engines five
POLL_SECONDS = 0.2  # between two questions how far a model is loaded
TAIL = 64  # characters shown of a conversation's end

CHUNKS_HELP = "Print what the server says as JSON: every chunk, not only the conversations' ends."
LIST_HELP = "Print a JSON list with name, kind, size_bytes, folder, needed_bytes, free_bytes and verdict."
Fetchable = Annotated[str, Parameter(help="A built-in name (smollm2, tiny-hybrid), a .gguf file, or a Hugging Face id.")]
AnyModel = Annotated[str, Parameter(help="A built-in name (smollm2, tiny-hybrid), a folder, a .gguf file, or a Hugging Face id.")]
Fetch = Annotated[Switch, Parameter(help="Let the server download it where it is not on its machine.")]
Force = Annotated[Switch, Parameter(help="Try it even if it does not seem to fit into memory.")]
OnlyModel = Annotated[str | None, Parameter(help="Only this model's.")]
RequestId = Annotated[str, Parameter(help="The id of the reply, or what the header x-request-id said.")]

cache_command = App(name="cache", help="What a running server keeps of computed prompts, and why it had to compute one.")


class ServerStatus(msgspec.Struct):
    """The JSON answer of GET /v1/status: the served models, weft's version and the server's uptime."""

    models: list[ListedModel]
    version: str = "unknown"
    uptime_seconds: float = 0.0


class CachedChunk(msgspec.Struct):
    """One chunk of a cached prompt (a node of the prefix tree) in the JSON answer of GET /v1/cache."""

    number: int
    parent: int | None
    length: int
    bytes: int
    hits: int
    pins: int
    idle_seconds: float
    is_on_disk: bool
    text: str | None = None


class CachedModel(msgspec.Struct):
    """The prefix cache of one model in the JSON answer of GET /v1/cache: bytes in use, budget, and its chunks."""

    model: str
    held_bytes: int
    budget_bytes: int
    disk_bytes: int
    num_nodes: int
    nodes: list[CachedChunk]


class CacheReport(msgspec.Struct):
    """The JSON answer of GET /v1/cache/requests/ID: token counts and times of a request, and why its prompt was not cached."""

    id: str
    model: str
    created: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    why: str = "the engine did not say how much of the prompt was known"
    before: str = ""
    token: str | None = None
    instead: str | None = None


def ls_command(*, as_json: Annotated[AsJson, Parameter(help=LIST_HELP)] = False) -> None:
    """List the models on this machine: built in, converted by weft, and in the Hugging Face cache.

    FITS says whether a server's engine would fit into the memory that is free
    now: the least it needs, and what it could have.

    For example:
      weft ls
      weft ls --json
    """
    from weft.model.resolve import local_models
    from weft.serving.fit import Fit, free_bytes, needed_bytes

    free = free_bytes()
    models = [(model, Fit(needed_bytes(model), free)) for model in local_models()]
    if as_json:
        write_json([asdict(model) | asdict(fit) | {"verdict": fit.verdict} for model, fit in models])
        return
    rows: list[tuple[str, ...]] = [("NAME", "SIZE", "FITS", "KIND", "FOLDER")]
    for model, fit in models:
        fits: str = fit.verdict
        if fit.needed_bytes is not None and fit.free_bytes is not None:
            fits += f" ({decimal(fit.needed_bytes)} of {decimal(fit.free_bytes)})"
        rows.append((model.name, decimal(model.size_bytes), fits, model.kind, str(model.folder or "not fetched yet")))
    write_columns(rows)


def pull_command(model: Fetchable, /) -> None:
    """Fetch a model, and convert it if need be, so that it is there when it is wanted. Prints its folder.

    For example:
      weft pull smollm2
      weft pull mlx-community/Qwen3-4B-4bit
    """
    from weft.engine.process import keeps_packed
    from weft.model.resolve import resolve

    sys.stdout.write(f"{resolve(model, quantized=keeps_packed())}\n")


def ps_command(*, url: Url = None, as_json: AsJson = False) -> None:
    """Show what a running server serves, and how busy it is.

    For example:
      weft ps
      weft ps --url http://127.0.0.1:9000 --json
    """
    client = ServerClient(url)
    if as_json:
        write_json(client.fetch("/v1/status", dict[str, Any], STATUS_SECONDS))
        return
    server = client.fetch("/v1/status", ServerStatus, STATUS_SECONDS)
    sys.stdout.write(f"{client.url}: weft {server.version}, up for {timedelta(seconds=round(server.uptime_seconds))}\n")
    rows: list[tuple[str, ...]] = [("MODEL", "STATUS", "CONTEXT", "RUNNING", "WAITING", "PID", "RESTARTS", "MEMORY")]
    for model in server.models:
        memory = ", ".join(f"{kind} {decimal(size)}" for kind, size in model.memory.items())
        numbers = (model.context_length, model.rows_running, model.rows_waiting, model.engine_pid, model.engine_restarts)
        shown = ("-" if number is None else str(number) for number in numbers)
        rows.append((model.id, model.status.get("value", "-"), *shown, memory))
        for one in model.replicas:
            numbers = (None, one.rows_running, one.rows_waiting, one.engine_pid, one.engine_restarts)
            rows.append(
                (f"  replica {one.name}", one.status, *("-" if number is None else str(number) for number in numbers), one.hits)
            )
    write_columns(rows)


def load_command(model: AnyModel, /, *, fetch: Fetch = False, force: Force = False, url: Url = None) -> None:
    """Have a running server load one more model, and wait until it answers.

    For example:
      weft load tiny-hybrid
      weft load mlx-community/Qwen3-4B-4bit --fetch
    """
    from weft.model.download import shown

    client = ServerClient(url)
    name = _name_on_server(client, model)
    body = {"model": name, "fetch": fetch, "force": force}
    found = client.fetch("/v1/models/load", ListedModel, SILENCE_SECONDS, body)
    with shown(None) as report:
        while found.status.get("value") == "loading":
            if (progress := found.condition.get("progress")) is not None:
                report(f"{name}: {progress['what']}", progress.get("done", 0), progress.get("total") or None)
            time.sleep(POLL_SECONDS)
            models = client.fetch("/v1/status", ServerStatus, STATUS_SECONDS).models
            found = next((one for one in models if one.id == name), ListedModel(name, status={"value": "unloaded"}))
    if found.status.get("value") != "loaded":
        raise WeftError(f"{name} is not loaded: {found.status.get('message') or found.status.get('value')}")
    sys.stdout.write(f"{name} is loaded\n")


def unload_command(model: Annotated[str, Parameter(help="Its name, as `weft ps` has it.")], /, *, url: Url = None) -> None:
    """Have a running server end a model, and wait until its memory is free.

    Answers that it is giving may end first, for as long as the server's
    --drain-seconds.

    For example:
      weft unload tiny-hybrid
      weft unload smollm2 --url http://127.0.0.1:9000
    """
    client = ServerClient(url)
    name = _name_on_server(client, model)
    client.fetch("/v1/models/unload", dict[str, Any], SILENCE_SECONDS, {"model": name})
    sys.stdout.write(f"{name} is unloaded\n")


def _name_on_server(client: ServerClient, name: str) -> str:
    """Return the absolute path if `name` is an existing path and no known model's name; otherwise return `name` as it is."""
    from weft.model.resolve import ALIASES

    path, server = Path(name).expanduser(), client.fetch("/v1/status", ServerStatus, STATUS_SECONDS)
    is_known = name in ALIASES or any(model.id == name for model in server.models)
    return name if is_known or not path.exists() else str(path.absolute())  # the server's working directory is another


@cache_command.command(name="ls")
def list_cache(*, url: Url = None, as_json: Annotated[AsJson, Parameter(help=CHUNKS_HELP)] = False) -> None:
    """List the conversations whose computed prompts a running server keeps, the latest used first.

    For example:
      weft cache ls
      weft cache ls --url http://127.0.0.1:9000 --json
    """
    client = ServerClient(url)
    if as_json:
        write_json(client.fetch("/v1/cache", dict[str, Any], CACHE_SECONDS))
        return
    for kept in client.fetch_field("/v1/cache", "models", list[CachedModel], CACHE_SECONDS):
        disk = f", {decimal(kept.disk_bytes)} on disk" if kept.disk_bytes else ""
        held = f"{decimal(kept.held_bytes)} of {decimal(kept.budget_bytes)} in memory{disk}"
        sys.stdout.write(f"{kept.model}: {kept.num_nodes} chunks, {held}\n")
        if kept.nodes:
            write_columns([("TOKENS", "SIZE", "HITS", "IN USE", "IDLE", "ENDS IN"), *_conversation_rows(kept.nodes)])


@cache_command.command(name="clear")
def clear_cache(model: OnlyModel = None, /, *, url: Url = None) -> None:
    """Make a running server forget its computed prompts, on disk too; those of running requests stay.

    For example:
      weft cache clear
      weft cache clear smollm2
    """
    body = {"model": model} if model else {}
    cleared = ServerClient(url).fetch_field("/v1/cache/clear", "cleared", dict[str, int], CACHE_SECONDS, body)
    for name, count in cleared.items():
        sys.stdout.write(f"{name}: {count} chunks forgotten\n")


@cache_command.command(name="why")
def explain_miss(request_id: RequestId, /, *, url: Url = None, as_json: AsJson = False) -> None:
    """Say how much of a request's prompt was known, why no more, and where its time went.

    For example:
      weft cache why chatcmpl-0123456789abcdef0123456789abcdef
    """
    client, path = ServerClient(url), f"/v1/cache/requests/{quote(request_id, safe='')}"
    if as_json:
        write_json(client.fetch(path, dict[str, Any], CACHE_SECONDS))
        return
    report = client.fetch(path, CacheReport, CACHE_SECONDS)
    lines = [f"{report.id}: {report.model}, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(report.created))}", report.why]
    if report.token is not None and report.instead is not None:  # the two texts under each other, up to where they differ
        before = _escape(report.before)
        lines.append(f"  this prompt    …{before}⟨{_escape(report.token)}⟩")
        lines.append(f"  nearest known  …{before}⟨{_escape(report.instead)}⟩")
    computed = f"{report.prompt_tokens - report.cached_tokens} of {report.prompt_tokens} prompt tokens computed"
    lines.append(f"queue    {report.queue_seconds:8.3f} s")
    lines.append(f"prefill  {report.prefill_seconds:8.3f} s  {computed}")
    lines.append(f"decode   {report.decode_seconds:8.3f} s  {report.completion_tokens} tokens")
    sys.stdout.write("\n".join(lines) + "\n")


def _conversation_rows(chunks: list[CachedChunk]) -> Iterator[tuple[str, ...]]:
    """Yield a table row per conversation (leaf chunk), latest used first; the size is that of the leaf and its ancestors."""
    by_number = {chunk.number: chunk for chunk in chunks}
    parents = {chunk.parent for chunk in chunks}
    for leaf in sorted((chunk for chunk in chunks if chunk.number not in parents), key=lambda chunk: chunk.idle_seconds):
        path = [leaf]
        while (parent := path[-1].parent) is not None and parent in by_number:
            path.append(by_number[parent])
        text = "".join(chunk.text or "" for chunk in reversed(path))
        tail = "(salted)" if leaf.text is None else _escape(text[-TAIL:])
        size = decimal(sum(chunk.bytes for chunk in path)) + (" (on disk)" if leaf.is_on_disk else "")
        idle = str(timedelta(seconds=round(leaf.idle_seconds)))
        yield str(leaf.length), size, str(leaf.hits), "yes" if leaf.pins else "-", idle, tail


def _escape(text: str) -> str:
    """Return the text on one line with control characters escaped, so that printing it can not control the terminal."""
    return repr(text)[1:-1]
