"""What is kept of computed prompts: listed, cleared, and why a request found no more of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.api.admin import json_response
from weft.api.body import read_json
from weft.api.dialect import request_ids, reused_fields
from weft.api.openai.schema import ClearRequest, converted
from weft.api.problems import BorderError
from weft.config import ServerConfig
from weft.ipc.messages import Prefixes, PrefixNode
from weft.serving.active_request import MAX_REPORTS, RequestReport
from weft.serving.service import Service
from weft.text.tokenizer import Tokenizer

MAX_TEXT = 200  # characters shown of a chunk


class Cache:
    """The endpoints under /v1/cache."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.config = config

    async def list(self, request: Request) -> Response:  # noqa: ARG002 - the endpoints' signature
        """Every model that answers, and the chunks it keeps."""
        ready = [served for served in self.service.models if served.is_ready]
        kept = await asyncio.gather(*(served.supervisor.client.prefixes() for served in ready))
        rows = [(served.name, one, served.require()[0].tokenizer) for served, one in zip(ready, kept, strict=True)]
        return json_response({"models": await asyncio.to_thread(lambda: [_shown(*row) for row in rows])})

    async def clear(self, request: Request) -> Response:
        """Forget what no running request stands on: of one model, or of all."""
        asked = converted(await self._body(request), ClearRequest)
        models = [served for served in self.service.models if served.failed is None and not served.is_leaving]
        models = models if asked.model is None else [self.service.find(asked.model)]
        for served in models:
            served.require()
        left = await asyncio.gather(*(served.supervisor.client.prefixes(clear=True) for served in models))
        return json_response({"cleared": {served.name: one.num_cleared for served, one in zip(models, left, strict=True)}})

    async def report(self, request: Request) -> Response:
        """How much of a request's prompt was known, and why no more."""
        given = request.path_params["id"]
        for report in filter(None, map(self.service.report, request_ids(given))):
            return json_response(_report(report))
        message = f"Nothing is known of request {given!r}: it has no first token yet, or is not among the last {MAX_REPORTS}."
        raise BorderError(404, "request_not_found", message)

    async def _body(self, request: Request) -> dict[str, Any]:
        headers = request.headers
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return {}
        return await read_json(request, max_bytes=self.config.max_body_bytes, seconds=self.config.body_seconds)


def _shown(model: str, prefixes: Prefixes, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "model": model,
        "held_bytes": prefixes.held_bytes,
        "budget_bytes": prefixes.budget_bytes,
        "disk_bytes": prefixes.disk_bytes,
        "num_nodes": prefixes.num_nodes,
        "nodes": [_node(node, tokenizer) for node in prefixes.nodes],
    }


def _node(node: PrefixNode, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "number": node.number,
        "parent": node.parent,
        "length": node.length,
        "tokens": len(node.tokens),
        "bytes": node.nbytes,
        "has_checkpoint": node.has_checkpoint,
        "pins": node.pins,
        "hits": node.hits,
        "idle_seconds": round(node.idle_seconds, 3),
        "is_salted": node.is_salted,
        "is_on_disk": node.is_on_disk,
        "text": None if node.is_salted else _excerpt(node.tokens, tokenizer),
    }


def _excerpt(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """A chunk's text; of a long one its beginning and its end."""
    parts = [tokens] if len(tokens) <= MAX_TEXT else [tokens[:MAX_TEXT], tokens[-MAX_TEXT:]]
    text = "".join(tokenizer.decode(part, skip_special_tokens=False) for part in parts)
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[: half - 1]}…{text[-half:]}"


def _report(report: RequestReport) -> dict[str, Any]:
    usage = report.usage
    return {
        "id": report.id,
        "model": report.model,
        "created": report.created,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_seconds": round(usage.queue_seconds, 6),
        "prefill_seconds": round(usage.prefill_seconds, 6),
        "decode_seconds": round(usage.decode_seconds, 6),
        **({} if usage.reuse is None else reused_fields(usage.reuse) | {"before": usage.reuse.before}),
    }
