"""`weft cache ls`, `weft cache clear`, `weft cache why`: what a running server keeps of computed prompts, and why it had to
compute one.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import msgspec
from rich.filesize import decimal

from weft.cli.client import ServerClient
from weft.cli.models import write_columns

ASK_SECONDS = 10.0  # the server gives its engines five
TAIL = 64  # characters shown of a conversation's end


class CachedChunk(msgspec.Struct):
    """A chunk of a prompt, as a server tells it."""

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
    """What one model's engine keeps."""

    model: str
    held_bytes: int
    budget_bytes: int
    disk_bytes: int
    num_nodes: int
    nodes: list[CachedChunk]


class Listing(msgspec.Struct):
    """What GET /v1/cache says."""

    models: list[CachedModel]


class Cleared(msgspec.Struct):
    """What POST /v1/cache/clear says."""

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


def ls_command(url: str | None, as_json: bool) -> None:
    """Print the conversations that are kept: every chunk that no other one follows is the end of one."""
    client = ServerClient(url)
    if as_json:
        sys.stdout.write(json.dumps(client.get("/v1/cache", dict[str, Any], ASK_SECONDS), indent=2) + "\n")
        return
    for kept in client.get("/v1/cache", Listing, ASK_SECONDS).models:
        disk = f", {decimal(kept.disk_bytes)} on disk" if kept.disk_bytes else ""
        held = f"{decimal(kept.held_bytes)} of {decimal(kept.budget_bytes)} in memory{disk}"
        sys.stdout.write(f"{kept.model}: {kept.num_nodes} chunks, {held}\n")
        if kept.nodes:
            write_columns([("TOKENS", "SIZE", "HITS", "IN USE", "IDLE", "ENDS IN"), *_conversations(kept.nodes)])


def clear_command(model: str | None, url: str | None) -> None:
    """Make the server forget, and say how much it was."""
    body = {"model": model} if model else {}
    for name, count in ServerClient(url).post("/v1/cache/clear", body, Cleared, ASK_SECONDS).cleared.items():
        sys.stdout.write(f"{name}: {count} chunks forgotten\n")


def why_command(request_id: str, url: str | None, as_json: bool) -> None:
    """Print how much of a request's prompt was known, why no more, and where its time went."""
    client, path = ServerClient(url), f"/v1/cache/requests/{quote(request_id, safe='')}"
    if as_json:
        sys.stdout.write(json.dumps(client.get(path, dict[str, Any], ASK_SECONDS), indent=2) + "\n")
        return
    report = client.get(path, CacheReport, ASK_SECONDS)
    computed = report.prompt_tokens - report.cached_tokens
    lines = [
        f"{report.id}: {report.model}, {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(report.created))}",
        report.why,
        *_difference(report),
        f"queue    {report.queue_seconds:8.3f} s",
        f"prefill  {report.prefill_seconds:8.3f} s  {computed} of {report.prompt_tokens} prompt tokens computed",
        f"decode   {report.decode_seconds:8.3f} s  {report.completion_tokens} tokens",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _conversations(nodes: list[CachedChunk]) -> list[tuple[str, ...]]:
    """One line for each leaf, the latest used first; its size is that of the whole way to it."""
    by_number = {node.number: node for node in nodes}
    parents = {node.parent for node in nodes}
    leaves = sorted((node for node in nodes if node.number not in parents), key=lambda node: node.idle_seconds)
    return [_line(leaf, by_number) for leaf in leaves]


def _line(leaf: CachedChunk, by_number: dict[int, CachedChunk]) -> tuple[str, ...]:
    size, text = 0, ""
    node: CachedChunk | None = leaf
    while node is not None:
        size += node.bytes
        text = (node.text or "") + text if len(text) < TAIL else text
        node = by_number.get(node.parent) if node.parent is not None else None
    tail = "(salted)" if leaf.text is None else _line_of(text[-TAIL:])
    where = " (on disk)" if leaf.is_on_disk else ""
    idle = str(timedelta(seconds=round(leaf.idle_seconds)))
    return str(leaf.length), decimal(size) + where, str(leaf.hits), "yes" if leaf.pins else "-", idle, tail


def _difference(report: CacheReport) -> list[str]:
    """The two texts under each other, where they part."""
    if report.token is None or report.instead is None:
        return []
    before = _line_of(report.before)
    return [
        f"  this prompt    …{before}⟨{_line_of(report.token)}⟩",
        f"  nearest known  …{before}⟨{_line_of(report.instead)}⟩",
    ]


def _line_of(text: str) -> str:
    """A text on one line, whatever it has in it; a terminal obeys what it is sent."""
    return repr(text)[1:-1]
