"""`weft cache ls`, `clear`, `why`: which computed prompts a running server keeps, and why it had to compute one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from cyclopts import App, Parameter
from rich.filesize import decimal

from weft.cli import AsJson, Url, write_columns, write_json
from weft.cli.client import ServerClient

ASK_SECONDS = 10.0  # the server gives its engines five
TAIL = 64  # characters shown of a conversation's end
CHUNKS_HELP = "Print what the server says as JSON: every chunk, not only the conversations' ends."
OnlyModel = Annotated[str | None, Parameter(help="Only this model's.")]
RequestId = Annotated[str, Parameter(help="The id of the reply, or what the header x-request-id said.")]

cache_command = App(name="cache", help="What a running server keeps of computed prompts, and why it had to compute one.")


class CachedChunk(msgspec.Struct):
    """One chunk of a computed prompt in GET /v1/cache."""

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
    """One model of GET /v1/cache, with what its engine keeps."""

    model: str
    held_bytes: int
    budget_bytes: int
    disk_bytes: int
    num_nodes: int
    nodes: list[CachedChunk]


class _CacheListing(msgspec.Struct):
    models: list[CachedModel]


class _CacheCleared(msgspec.Struct):
    cleared: dict[str, int]


class CacheReport(msgspec.Struct):
    """What GET /v1/cache/requests/ID says."""

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


@cache_command.command(name="ls")
def ls_command(*, url: Url = None, as_json: Annotated[AsJson, Parameter(help=CHUNKS_HELP)] = False) -> None:
    """List the conversations whose computed prompts a running server keeps, the latest used first.

    For example:
      weft cache ls
      weft cache ls --url http://127.0.0.1:9000 --json
    """
    client = ServerClient(url)
    if as_json:
        write_json(client.fetch("/v1/cache", dict[str, Any], ASK_SECONDS))
        return
    for kept in client.fetch("/v1/cache", _CacheListing, ASK_SECONDS).models:
        disk = f", {decimal(kept.disk_bytes)} on disk" if kept.disk_bytes else ""
        held = f"{decimal(kept.held_bytes)} of {decimal(kept.budget_bytes)} in memory{disk}"
        sys.stdout.write(f"{kept.model}: {kept.num_nodes} chunks, {held}\n")
        if kept.nodes:
            write_columns([("TOKENS", "SIZE", "HITS", "IN USE", "IDLE", "ENDS IN"), *_conversation_rows(kept.nodes)])


@cache_command.command(name="clear")
def clear_command(model: OnlyModel = None, /, *, url: Url = None) -> None:
    """Make a running server forget its computed prompts, on disk too; those of running requests stay.

    For example:
      weft cache clear
      weft cache clear smollm2
    """
    body = {"model": model} if model else {}
    for name, count in ServerClient(url).fetch("/v1/cache/clear", _CacheCleared, ASK_SECONDS, body).cleared.items():
        sys.stdout.write(f"{name}: {count} chunks forgotten\n")


@cache_command.command(name="why")
def why_command(request_id: RequestId, /, *, url: Url = None, as_json: AsJson = False) -> None:
    """Say how much of a request's prompt was known, why no more, and where its time went.

    For example:
      weft cache why chatcmpl-0123456789abcdef0123456789abcdef
    """
    client, path = ServerClient(url), f"/v1/cache/requests/{quote(request_id, safe='')}"
    if as_json:
        write_json(client.fetch(path, dict[str, Any], ASK_SECONDS))
        return
    report = client.fetch(path, CacheReport, ASK_SECONDS)
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
    """One table row for each conversation, the latest used first; its size is that of all chunks from the first to the last."""
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
    """A text on one line with its control characters escaped: a terminal obeys what it is sent."""
    return repr(text)[1:-1]
