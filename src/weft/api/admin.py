"""weft's own HTTP endpoints: health, models (list, load, unload), status, metrics, prefix cache, cancel, tokenize."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.api.access import note_action, require_admin, tenant_of
from weft.api.dialect import SomeLabel, pick_fields, request_ids, reused_fields
from weft.api.http import json_response, read_json
from weft.api.openai.request import TokenId
from weft.api.problems import BorderError
from weft.config import ServerConfig
from weft.errors import InvalidRequest
from weft.ipc.limits import MAX_MESSAGES, MAX_TOKEN_IDS
from weft.ipc.messages import Prefixes
from weft.metrics import CONTENT_TYPE
from weft.serving.active_request import MAX_REPORTS
from weft.serving.autoscaler import Autoscaler
from weft.serving.model import ServedModel
from weft.serving.registry import ModelRegistry
from weft.serving.replica import Replica
from weft.serving.service import Service
from weft.serving.tenants import Tenant
from weft.text.bodies import Body, Label, convert
from weft.text.chat_messages import ChatMessage, read_messages
from weft.text.tokenizer import Tokenizer
from weft.text.tools.described import NOTICE
from weft.text.types import Conversation

MAX_EXCERPT = 200  # characters shown of a cached chunk


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /tokenize; one of prompt, content and messages is required."""

    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    model: Label | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of POST /detokenize: the token ids to decode to text."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
    model: Label | None = None


class ClearRequest(msgspec.Struct, kw_only=True):
    """The optional body of POST /v1/cache/clear: the model whose prefix cache is cleared; absent: all models."""

    model: Label | None = None


class RenewRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/replicas/renew: the replica whose engine is replaced, and its model if there are several."""

    replica: SomeLabel
    model: Label | None = None


class UnloadRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/models/unload. The name is required: unloading cancels requests that do not finish in time."""

    model: SomeLabel


class LoadRequest(UnloadRequest, kw_only=True):
    """The body of POST /v1/models/load: the model's name, whether to download it, and whether to skip the memory check."""

    fetch: bool | None = None  # download it where it is not on this machine
    force: bool | None = None  # try it even if it does not fit


@dataclass(frozen=True)
class Admin:
    """HTTP handlers of weft's own endpoints, such as /health, /metrics, /v1/models and /v1/cache."""

    service: Service
    config: ServerConfig
    registry: ModelRegistry
    started: float = field(default_factory=time.time)

    async def health(self, request: Request) -> Response:
        """Respond 503 if the server is stopping, no model is there, or one given at start is not ready, else 200; list models."""
        models = {model.name: visible_condition(model, tenant_of(request)) for model in self.service.models}
        states = {condition_of(model)["status"] for model in self.service.models if not model.is_guest}
        states |= {"stopping"} if self.service.is_stopping else set()
        states |= set() if models else {"empty"}
        status = next((state for state in ("failed", "stopping", "sick", "loading", "empty") if state in states), "ready")
        code, headers = (200, {}) if status == "ready" else (503, {"retry-after": "2"})
        return json_response({"status": status, "models": models}, code, headers)

    async def list_models(self, request: Request) -> Response:
        """Respond with all served models, ready ones first, as one list that OpenAI and Anthropic clients understand."""
        tenant, models = tenant_of(request), sorted(self.service.models, key=lambda model: not model.is_ready)
        rows = [self._model(model, tenant) for model in models]
        ends = {"first_id": rows[0]["id"], "last_id": rows[-1]["id"]} if rows else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": rows, "has_more": False, **ends})

    async def show_model(self, request: Request) -> Response:
        return json_response(self._model(self.service.find(request.path_params["id"]), tenant_of(request)))

    async def list_available(self, request: Request) -> Response:
        """Respond with the models that could be loaded; to a tenant who may not load any, with none."""
        if not tenant_of(request).is_admin:
            return json_response({"object": "list", "data": [], "free_bytes": None})
        rows = [
            {"id": model.name, "object": "model", "kind": model.kind, "size_bytes": model.size_bytes}
            | {"is_here": model.folder is not None, "is_loaded": is_loaded}
            | pick_fields(fit, "needed_bytes", "verdict")
            for model, fit, is_loaded in await self.registry.options()
        ]
        return json_response({"object": "list", "data": rows, "free_bytes": self.registry.free_bytes})

    async def load(self, request: Request) -> Response:
        """Start loading a model in the background; respond 202 if started, 200 if it was already loaded or loading."""
        wanted = await self._read(request, LoadRequest)
        require_admin(request, "loading a model", wanted.model)
        model, is_new = await self.registry.load(wanted.model, fetch=bool(wanted.fetch), force=bool(wanted.force))
        return json_response(self._model_status(model, tenant_of(request)), 202 if is_new else 200)

    async def unload(self, request: Request) -> Response:
        """Unload a model: let running requests finish for a limited time, cancel the rest, respond when its engine ended."""
        name = (await self._read(request, UnloadRequest)).model
        require_admin(request, "unloading a model", name)
        await self.registry.unload(name)
        return json_response({"id": name, "object": "model", "status": {"value": "unloaded"}})

    async def renew(self, request: Request) -> Response:
        """Replace the engine of one replica by a new one; its answers end within the drain time, or move to other replicas."""
        wanted = await self._read(request, RenewRequest)
        require_admin(request, "renewing a replica", wanted.replica)
        model = self.service.find(wanted.model)
        await model.pool.renew(wanted.replica, self.config.drain_seconds)
        return json_response(self._model_status(model, tenant_of(request)))

    async def status(self, request: Request) -> Response:
        """Respond with the state of server and engines; to a tenant who is no admin, with its own requests and no more."""
        tenant, models = tenant_of(request), [self._model_status(model, tenant_of(request)) for model in self.service.models]
        kinds = sorted({kind for model in models for kind in model["memory"]})
        return json_response(
            {
                "version": __version__,
                "uptime_seconds": round(time.time() - self.started, 1),
                "pid": os.getpid(),
                "engine_pid": models[0]["engine_pid"] if models else None,
                **{name: sum(model[name] for model in models) for name in ("engine_restarts", "rows_running", "rows_waiting")},
                "requests": len([one for one in self.service.submitted() if tenant.may_see(one.generation.tenant)]),
                "memory": {kind: sum(model["memory"].get(kind, 0) for model in models) for kind in kinds},
                "models": models,
            }
        )

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def tokenizer_info(self, request: Request) -> Response:
        """Respond with a model's tokenizer: its vocabulary's size, special tokens, and the chat template."""
        codec, ready = self.service.find(request.query_params.get("model")).require()
        tokenizer = codec.tokenizer
        special = {str(token): tokenizer.token_text(token) for token in sorted(tokenizer.special_ids)}
        template = None if codec.writer is None else codec.writer.template.source
        sizes = {"vocab_size": ready.limits.vocab_size, "model_max_length": ready.limits.context_length}
        return json_response({"tokenizer_class": "tokenizers", **sizes, "special_tokens": special, "chat_template": template})

    async def metrics(self, request: Request) -> Response:
        """Respond with the metrics of all tenants together, which are for admins."""
        if not tenant_of(request).is_admin:
            require_admin(request, "reading metrics")
        metrics = self.service.metrics
        for model in self.service.models:
            status = model.pool.status
            metrics.engine(model.name, model.is_ready, model.pool.restarts)
            metrics.rows(model.name, status.running, status.waiting)
            metrics.rows_alone(model.name, status.alone)
            metrics.images(model.name, status.images)
            metrics.memory(model.name, model.memory)
            metrics.prefixes(model.name, status.prefixes)
            model.count_drafts(metrics)
            metrics.forget_replicas(model.name)
            if (autoscaler := model.pool.autoscaler) is not None:
                metrics.scaling(model.name, autoscaler.target, autoscaler.load.queued_seconds)
            for replica in () if model.pool.dispatcher.is_lone else model.pool.replicas:
                metrics.replica(model.name, replica.name, replica.is_open, replica.status.running, len(replica.client.live))
                metrics.replica_hits(model.name, replica.name, replica.num_prompt_tokens, replica.num_cached_tokens)
            metrics.moved(model.name, model.pool.dispatcher.num_moved)
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    async def cancel(self, request: Request) -> Response:
        cancel_request(self.service, request)
        return json_response({"id": request.path_params["id"], "cancelled": True})

    async def list_cache(self, request: Request) -> Response:
        """Respond with the cached prompts: all of them to an admin, else the tenant's own."""
        tenant, ready = tenant_of(request), [model for model in self.service.models if model.is_ready]
        if tenant.hides_texts and not tenant.is_admin:
            require_admin(request, "listing prompts that tenants share")
        scope = None if tenant.is_admin else tenant.scope
        cached = await asyncio.gather(*(model.pool.prefixes(scope=scope) for model in ready))
        rows = [
            (model, name, one, model.require()[0].tokenizer)
            for model, answers in zip(ready, cached, strict=True)
            for name, one in answers
        ]
        # In a thread: there may be thousands of chunks.
        return json_response({"models": await asyncio.to_thread(lambda: [_show_cache(*row) for row in rows])})

    async def clear_cache(self, request: Request) -> Response:
        has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
        name = (await self._read(request, ClearRequest)).model if has_body else None
        require_admin(request, "clearing the cache", name or "all models")
        models = [model for model in self.service.models if model.failed is None and not model.is_leaving]
        models = models if name is None else [self.service.find(name)]
        for model in models:
            model.require()
        left = await asyncio.gather(*(model.pool.prefixes(clear=True) for model in models))
        cleared = {model.name: sum(one.num_cleared for _, one in answers) for model, answers in zip(models, left, strict=True)}
        return json_response({"cleared": cleared})

    async def report_request(self, request: Request) -> Response:
        given = request.path_params["id"]
        found = (self.service.report(request_id, tenant_of(request).may_see) for request_id in request_ids(given))
        report = next(filter(None, found), None)
        if report is None:
            message = f"Nothing is known of request {given!r}: it has no first token yet, or is not among the last {MAX_REPORTS}."
            raise BorderError(404, "request_not_found", message)
        usage, row = report.usage, pick_fields(report, "id", "model", "created")
        row |= pick_fields(usage, "prompt_tokens", "cached_tokens", "completion_tokens")
        row |= {name: round(getattr(usage, name), 6) for name in ("queue_seconds", "prefill_seconds", "decode_seconds")}
        return json_response(row | reused_fields(usage) | ({} if usage.reuse is None else {"before": usage.reuse.before}))

    async def tokenize(self, request: Request) -> Response:
        given = await self._read(request, TokenizeRequest)
        codec, ready = self.service.find(given.model).require()
        text = given.prompt if given.prompt is not None else given.content
        if given.messages is None and text is None:
            raise InvalidRequest("give a prompt, a content or messages to tokenize", "prompt")
        check = codec.length_check(ready.limits.context_length)

        def encode() -> list[int]:
            if given.messages is not None:
                return codec.encode(Conversation(read_messages(given.messages)), check=check).ids
            check.check(text or "")
            return codec.tokenizer.encode(text or "", add_special_tokens=given.add_special_tokens is not False)

        ids = await self.service.lanes.run(tenant_of(request).id, request.state.body_bytes, encode)
        return json_response({"count": len(ids), "max_model_len": ready.limits.context_length, "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        given = await self._read(request, DetokenizeRequest)
        codec, ready = self.service.find(given.model).require()
        if given.tokens and max(given.tokens) >= ready.limits.vocab_size:
            raise InvalidRequest(f"tokens must be below the vocabulary's size of {ready.limits.vocab_size}", "tokens")
        text = await asyncio.to_thread(codec.tokenizer.decode, given.tokens)
        return json_response({"prompt": text, "content": text})

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        return convert(await read_json(request, self.config), kind)

    def _model(self, model: ServedModel, tenant: Tenant) -> dict[str, Any]:
        """Return a model's JSON row with OpenAI's and Anthropic's fields, its status and, once known, its context length."""
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started))
        row: dict[str, Any] = {"id": model.name, "object": "model", "created": int(self.started), "owned_by": "weft"}
        row |= {"type": "model", "display_name": model.name, "created_at": created, "root": model.name}
        condition, ready, codec = visible_condition(model, tenant), model.ready, model.codec
        value = condition["status"]
        if value not in ("failed", "unloading"):
            value = "loaded" if model.is_ready else "loading"
        row["status"] = {"value": value} | ({"message": condition["message"]} if model.failed else {})
        if ready is not None:
            context = ready.limits.context_length
            row |= dict.fromkeys(("max_model_len", "context_length", "max_input_tokens", "max_tokens"), context)
            row["meta"] = {"context_length": context, "size_bytes": model.memory.get("weights", 0)}
            found = {} if codec is None else {"tools": codec.calls, "thinking": codec.markers, "vision": model.image_writer}
            row["capabilities"] = [name for name, way in found.items() if way is not None]
            if codec is not None and codec.calls is not None:
                notice = {"notice": NOTICE} if codec.describes_tools else {}
                row["tools"] = {"shown_by": "weft" if codec.describes_tools else "template", **notice}
            row["speculation"] = {"sources": ready.speculation, "unused": model.unused_sources}
        return row if model.notice is None else row | {"notice": model.notice}

    def _model_status(self, model: ServedModel, tenant: Tenant) -> dict[str, Any]:
        engine = model.pool
        process = {"engine_pid": engine.pid, "engine_restarts": engine.restarts}
        if not tenant.is_admin:  # how often engines die may be others' doing, like the memory they use
            process = {"engine_pid": None, "engine_restarts": 0}
        memory, rows = model.memory if tenant.is_admin else {}, count_rows(self.service, model, tenant)
        row = self._model(model, tenant) | {"condition": visible_condition(model, tenant), **process, **rows, "memory": memory}
        return row | (show_replicas(model) if tenant.is_admin else {})


def cancel_request(service: Service, request: Request) -> None:
    """Cancel the running request that a path names (a reply's id also works). Raises BorderError (404) if none is running.

    To a tenant who is no admin, requests of others do not exist.
    """
    given, tenant = request.path_params["id"], tenant_of(request)
    found = next(filter(None, (service.cancel(request_id, tenant.may_see) for request_id in request_ids(given))), [])
    if not found:
        raise BorderError(404, "request_not_found", f"No request {given!r} is running; it may have ended already.")
    if any(one.generation.tenant != tenant.id for one in found):
        note_action(request, "cancelling another tenant's request", given, "allowed")


def count_rows(service: Service, model: ServedModel, tenant: Tenant) -> dict[str, int]:
    """Return how many answers are computed and how many wait; of a tenant who is no admin, only its own are counted."""
    if tenant.is_admin:
        return {"rows_running": model.pool.status.running, "rows_waiting": model.pool.status.waiting}
    own = [one for one in service.submitted(model) if tenant.may_see(one.generation.tenant)]
    unfinished = [choice for one in own for choice in one.choices if choice.finish is None]
    running = sum(choice.timings is not None for choice in unfinished)
    return {"rows_running": running, "rows_waiting": len(unfinished) - running}


def visible_condition(model: ServedModel, tenant: Tenant) -> dict[str, Any]:
    """Return a model's condition as a tenant may see it: why one failed names files of this machine, which is for admins."""
    condition = condition_of(model)
    if condition["status"] == "failed" and not tenant.is_admin:
        condition["message"] = "it can not be served; the server's log says why"
    return condition


def show_replicas(model: ServedModel) -> dict[str, Any]:
    """Return each replica's state, load and cache hits, and how many answers were moved; {} for a model with one replica here."""
    placement, autoscaler = model.pool.placement, model.pool.autoscaler
    if model.pool.dispatcher.is_lone and placement is None:
        return {}
    rows = [
        {
            "name": replica.name,
            "status": _replica_status(replica),
            **pick_fields(replica.status, "seconds_per_token", "queued_tokens"),
            "engine_pid": replica.pid,
            "engine_restarts": replica.restarts,
            "rows_running": replica.status.running,
            "rows_waiting": replica.status.waiting,
            "requests": len(replica.client.live),
            "prompt_tokens": replica.num_prompt_tokens,
            "cached_tokens": replica.num_cached_tokens,
            **({"message": replica.condition.failed} if replica.condition.failed else {}),
        }
        for replica in model.pool.replicas
    ]
    placed = {} if placement is None else {"placement": {"can_place": placement.problem is None, "message": placement.problem}}
    scaled = {} if autoscaler is None else {"scaling": _show_scaling(autoscaler)}
    return {"replicas": rows, "moved": model.pool.dispatcher.num_moved, **placed, **scaled}


def _show_scaling(autoscaler: Autoscaler) -> dict[str, Any]:
    load = {"queued_seconds": round(autoscaler.load.queued_seconds, 3), "replicas_used": round(autoscaler.load.num_used, 3)}
    return {"least": autoscaler.least, "most": autoscaler.most, "wanted": autoscaler.target, **load}


def _replica_status(replica: Replica) -> str:
    condition = replica.condition
    if condition.failed is not None:
        return "failed"
    if condition.ready is None:
        return "loading"
    if condition.is_sick:
        return "sick"
    return "leaving" if replica.is_leaving or replica.is_retired else "ready"


def condition_of(model: ServedModel) -> dict[str, Any]:
    """Return a model's status (ready, loading, failed, …) as a dict, with an error message or loading progress if any."""
    condition = model.pool.condition
    if model.is_leaving:
        return {"status": "unloading"}
    if model.failed is not None:
        return {"status": "failed", "message": model.failed}
    if model.is_stopping:
        return {"status": "stopping"}
    if model.is_ready:
        return {"status": "ready"}
    if condition.is_sick:
        return {"status": "sick", "message": "its engine is silent; it is replaced if that goes on"}
    loading = condition.loading
    progress = {"what": "reading the tokenizer"} if loading is None else pick_fields(loading, "what", "done", "total")
    return {"status": "loading", "progress": progress}


def _show_cache(model: ServedModel, replica: str, prefixes: Prefixes, tokenizer: Tokenizer) -> dict[str, Any]:
    which = {"model": model.name} if model.pool.dispatcher.is_lone else {"model": model.name, "replica": replica}
    sizes = pick_fields(prefixes, "held_bytes", "budget_bytes", "disk_bytes", "num_nodes")
    nodes = [
        {
            **pick_fields(node, "number", "parent", "length"),
            "tokens": len(node.tokens),
            "bytes": node.nbytes,
            **pick_fields(node, "has_checkpoint", "pins", "hits"),
            "idle_seconds": round(node.idle_seconds, 3),
            **pick_fields(node, "is_salted", "is_on_disk"),
            "text": None if node.is_salted else _excerpt(node.tokens, tokenizer),
        }
        for node in prefixes.nodes
    ]
    return {**which, **sizes, "nodes": nodes}


def _excerpt(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of a cached chunk of tokens; of a text over MAX_EXCERPT characters only the beginning and the end."""
    parts = [tokens] if len(tokens) <= MAX_EXCERPT else [tokens[:MAX_EXCERPT], tokens[-MAX_EXCERPT:]]
    text = "".join(tokenizer.decode(part, skip_special_tokens=False) for part in parts)
    half = MAX_EXCERPT // 2
    return text if len(text) <= MAX_EXCERPT else f"{text[: half - 1]}…{text[-half:]}"
