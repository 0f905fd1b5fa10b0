"""The ASGI app: the route table, and the handler of all generating endpoints, from parsing a body to sending the reply."""

import asyncio
import contextlib
import hashlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.api import ollama, openapi, problems
from weft.api.access import tenant_of
from weft.api.admin import Admin
from weft.api.anthropic import request as anthropic
from weft.api.dialect import ParsedRequest, Reply, ReplyHeader, pick_fields
from weft.api.http import STREAM_HEADERS, Deadline, Disconnected, Guard, Page, json_response, make_unique, read_json, until_gone
from weft.api.live import LiveEvents
from weft.api.openai import chat, completions, responses
from weft.api.openai.response_store import StoredResponses
from weft.config import ServerConfig
from weft.errors import ContextTooLong, RequestTimedOut, UnsupportedParameter, WeftError
from weft.ipc.limits import Sampling
from weft.log import RequestRecord, escape_unprintable, log_request
from weft.serving.active_request import ActiveRequest, Parts
from weft.serving.rate_limit import RateLimiter
from weft.serving.registry import ModelRegistry
from weft.serving.service import Service
from weft.serving.silence import Silence
from weft.serving.tenants import Keyring, Tenant

log = logging.getLogger("weft.api")

LARGE_BODY_BYTES = 1 << 16  # larger ones are translated in a thread: a large schema takes its time, and streams must not wait
MAX_LOGGED_FIELDS = 1000  # names of ignored fields; clients may make up any number
MEASURED = ("prompt_tokens", "cached_tokens", "completion_tokens", "queue_seconds", "prefill_seconds", "decode_seconds")
# Clients that send one of these come again with more of the same conversation.
DESCRIBED_TOOLS = {"x-weft-tools": "described"}  # the model was not made for tools
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "session_id", "session-id", "x-claude-code-session-id")

PartStream = AsyncGenerator[Parts]
Translate = Callable[..., ParsedRequest]  # takes a body, and where there is a Recall the past
Recall = Callable[[dict[str, Any], str], Awaitable[responses.Past]]  # takes a body, and who owns its stored responses


def make_app(service: Service, config: ServerConfig) -> Starlette:
    """Build the Starlette app: all routes and their handlers, with `Guard` as the only middleware. Raises WeftError."""
    keyring = Keyring(config)
    service.on_hangup = keyring.reload
    if not keyring.has_admin:
        log.warning(
            "no key is an admin's, so nobody can load or unload models: write :admin behind one, or role in the keys file"
        )
    registry = ModelRegistry(service, config.memory and config.memory * 2**20, config.drain_seconds)
    admin, models, page = Admin(service, config, registry), ollama.OllamaModels(service, config), Page()
    stored, limiter, unknown = StoredResponses(service, config), RateLimiter(), UnknownFields(config.strict_params)

    async def count_message_tokens(request: Request) -> Response:
        generation = await asyncio.to_thread(anthropic.translate_count, await read_json(request, config))
        return json_response({"input_tokens": await service.count_tokens(generation)})

    def generate(path: str, dialect: str, translate: Translate, recall: Recall | None = None) -> Route:
        return post(path, GeneratingEndpoint(service, config, dialect, translate, recall, limiter, unknown).handle)

    def post(path: str, endpoint: Callable[[Request], Any]) -> Route:
        return Route(path, endpoint, methods=["POST"])

    routes = [
        *(Route(path, page.serve_file) for path in page.files),  # Claude Code sends HEAD / to see whether a server is there
        generate("/v1/chat/completions", "chat", chat.translate),
        generate("/v1/completions", "completions", completions.translate),
        generate("/v1/responses", "responses", responses.translate, stored.recall),
        post("/v1/responses/input_tokens", stored.count_tokens),
        Route("/v1/responses/{id}", stored.get),
        Route("/v1/responses/{id}", stored.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", stored.list_items),
        post("/v1/responses/{id}/cancel", stored.cancel),
        generate("/v1/messages", "messages", anthropic.translate),
        post("/v1/messages/count_tokens", count_message_tokens),
        generate("/api/chat", "ollama", ollama.translate_chat),
        generate("/api/generate", "ollama", ollama.translate_generate),
        Route("/api/version", models.version),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        post("/api/show", models.show),
        post("/api/embed", models.embed),
        post("/api/embeddings", models.embed),
        Route("/v1/models", admin.list_models),
        Route("/v1/models/available", admin.list_available),
        post("/v1/models/load", admin.load),
        post("/v1/models/unload", admin.unload),
        Route("/v1/models/{id:path}", admin.show_model),
        post("/v1/requests/{id}/cancel", admin.cancel),
        Route("/v1/cache", admin.list_cache),
        post("/v1/cache/clear", admin.clear_cache),
        Route("/v1/cache/requests/{id}", admin.report_request),
        post("/v1/replicas/renew", admin.renew),
        Route("/v1/status", admin.status),
        Route("/v1/events", LiveEvents(service), methods=["GET"]),
        *(Route(path, admin.health) for path in ("/health", "/healthz", "/ping")),
        Route("/version", admin.version),
        Route("/tokenizer_info", admin.tokenizer_info),
        Route("/metrics", admin.metrics),
        Route("/openapi.json", openapi.serve_document),
        post("/tokenize", admin.tokenize),
        post("/detokenize", admin.detokenize),
    ]
    guard = Middleware(Guard, config=config, keyring=keyring, open_paths=page.files, on_response=service.metrics.http)
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: problems.handle})


class UnknownFields:
    """Tells of request fields that nobody knows: in a header of the reply, and once a name in the log; or refuses them."""

    def __init__(self, is_strict: bool) -> None:
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def headers(self, ignored: tuple[str, ...]) -> dict[str, str]:
        """Return the reply's header that lists the ignored fields. Raises UnsupportedParameter under --strict-params."""
        if not ignored:
            return {}
        if self._is_strict:
            message = f"{ignored[0]} is not known here, and this server was started with --strict-params; leave it out"
            raise UnsupportedParameter(message, ignored[0])
        for name in ignored:
            if name not in self._logged and len(self._logged) < MAX_LOGGED_FIELDS:
                self._logged.add(name)
                log.info("requests have the field %s, which is ignored; this is said once", escape_unprintable(name[:100]))
        return {"x-ignored-params": quote(", ".join(ignored), safe=", []")[:1000]}


@dataclass(frozen=True)
class GeneratingEndpoint:
    """Handler of one generating endpoint; the steps are shared, the dialect's `translate` parses the body."""

    service: Service
    config: ServerConfig
    dialect: str
    translate: Translate
    recall: Recall | None
    limiter: RateLimiter
    unknown: "UnknownFields"

    async def handle(self, request: Request) -> Any:
        """Parse the body, start generation, and return a stream or a whole reply; errors are logged, then raised to `Guard`."""
        account, request_id = RequestAccount(request, self.dialect, self.service, self.limiter), request.state.request_id
        # A stored response is found by its id, and a client may send the same x-request-id twice.
        reply_id = request_id if self.recall is None else make_unique(request_id, request.headers)
        try:
            deadline = Deadline.of(request.headers, self.config.request_timeout)
            self.limiter.take_request(tenant_of(request))
            parsed = await self._parse(request)
            model = self.service.find(parsed.generation.model)
            account.model = model.name
            headers = self.unknown.headers(parsed.ignored)

            def make_reply(read_sampling: Callable[[], Sampling | None] = lambda: None) -> Reply:
                ready = next((one.ready for one in self.service.models), None)
                fingerprint = ready.versions if ready is not None else "weft"
                return parsed.reply(ReplyHeader(reply_id, int(time.time()), model.name, fingerprint, read_sampling))

            if not parsed.generation.prompts:  # the client wants the model loaded and nothing else
                await deadline.hold(model.settled.wait())
                model.require()
                account.close(None)
                return json_response(make_reply().make_body(), headers=headers)
            active = account.active = ActiveRequest(request_id, parsed.generation, may_wait=parsed.stream)
            silence = Silence(self.config.heartbeat_seconds if parsed.stream else math.inf)
            parts = self.service.generate(active, silence)
            watch = asyncio.create_task(_abandon_when_gone(active, request.receive, deadline))
            try:
                first = await _begin(parts, silence, deadline)
            except ContextTooLong as error:
                if not (parsed.stream and parsed.streams_overflow):
                    raise
                account.close(error)
                reply = make_reply()
                return Response(reply.frame_opening() + reply.frame_error(error), headers=headers, media_type=parsed.media_type)
            finally:
                watch.cancel()
            account.charge()
            headers |= self.limiter.headers(tenant_of(request))
            reply = make_reply(lambda: active.sampling)
            if parsed.stream:
                headers |= _described(active) | {"content-type": parsed.media_type}
                return EventStream(reply, active, parts, first, silence, account.close, deadline, headers)
            body = await collect_body(reply, active, parts, request.receive, deadline)
            account.close(None)
            return json_response(body, headers=headers | _described(active))
        except Exception as error:  # the guard replies to it; here it is only counted
            account.close(error)
            raise

    async def _parse(self, request: Request) -> ParsedRequest:
        body = await read_json(request, self.config)
        tenant = tenant_of(request)
        past = {} if self.recall is None else {"past": await self.recall(body, tenant.owner)}
        is_large = self.recall is not None or request.state.body_bytes > LARGE_BODY_BYTES
        translate = partial(self.translate, body, **past)
        lanes, size = self.service.lanes, request.state.body_bytes
        parsed = await lanes.run(tenant.id, size, translate) if is_large else translate()
        session = parsed.generation.session or next(filter(None, map(request.headers.get, SESSION_HEADERS)), "")
        generation = replace(parsed.generation, dialect=self.dialect, session=session, **_whose(tenant, session))
        if tenant.id and tenant.is_admin:  # an admin's priority counts among all tenants
            generation = replace(generation, rank=generation.priority)
        return replace(parsed, generation=generation)


def _whose(tenant: Tenant, session: str) -> dict[str, Any]:
    """Return what a request says of whose it is; clients, known by their key and session, take turns within their tenant's."""
    who = f"{tenant.owner}\0{session}".encode()
    client = "" if tenant == Keyring.anybody([]) and not session else hashlib.blake2b(who, digest_size=8).hexdigest()
    return {"tenant": tenant.id, "client": client, "scope": tenant.scope, "hides_texts": tenant.hides_texts}


def _described(active: ActiveRequest) -> dict[str, str]:
    return DESCRIBED_TOOLS if active.has_described_tools else {}


async def _begin(parts: PartStream, silence: Silence, deadline: Deadline) -> asyncio.Task[Parts]:
    """Start a request and return the task of its first part, done unless the client's silence is over before.

    Raises the error of a request that is refused by then.
    """
    first = asyncio.ensure_future(anext(parts))
    try:
        await deadline.hold(asyncio.wait((first,), timeout=silence.seconds_left))
    except BaseException:
        await _cancel(first)
        raise
    if first.done():
        first.result()
    return first


async def _cancel(task: asyncio.Task[Parts]) -> None:
    """Cancel a task that is not done, and wait for its end; its error is not raised."""
    if task.cancel():
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


@dataclass
class EventStream:
    """ASGI response that streams a reply's frames, with heartbeats; a disconnect or the deadline ends the request."""

    reply: Reply
    active: ActiveRequest
    parts: PartStream
    first: asyncio.Task[Parts]  # of the first of the parts, which is empty
    silence: Silence
    on_close: Callable[[BaseException | None], None]  # called once, with what ended the stream
    deadline: Deadline
    headers: dict[str, str]
    has_started: bool = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        error: BaseException | None = asyncio.CancelledError()  # where the server ends this task
        headers = STREAM_HEADERS + [(name.encode(), value.encode()) for name, value in self.headers.items()]
        watch = asyncio.create_task(_abandon_when_gone(self.active, receive, self.deadline))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self.silence.end()
            await self._send(send, self.reply.frame_opening())
            await self._until_begun(send)
            async with contextlib.aclosing(self.parts):
                async for news in self.parts:
                    await self._send(send, self._frames(news))
            await send({"type": "http.response.body", "body": self.reply.frame_closing()})
            error = None
        except Exception as caught:  # the border of a stream: whatever it is, the client gets an error and no regular end
            error = caught
            if not isinstance(caught, WeftError):
                log.exception("a stream failed")
            await send({"type": "http.response.body", "body": self.reply.frame_error(caught)})
        finally:
            watch.cancel()
            self.on_close(error)

    async def _until_begun(self, send: Send) -> None:
        """Send heartbeats until the engine has accepted the request, or it waits for its model. Raises its error."""
        is_here = asyncio.Event()
        self.first.add_done_callback(lambda _: is_here.set())
        try:
            while not self.first.done():
                await self.active.wait_for(is_here, self.silence.seconds_left)
                await self._send(send, self._heartbeat())
            self.first.result()
        finally:
            await _cancel(self.first)

    def _frames(self, news: Parts) -> bytes:
        """Return the frames of new deltas, or, if they have none, a heartbeat when one is due."""
        if not news:
            return self._heartbeat()
        start = b"" if self.has_started else self.reply.frame_start(self.active.usage)
        self.has_started = True
        frames = start + b"".join([self.reply.frame_deltas(choice, deltas) for choice, deltas in news])
        return frames or self._heartbeat()

    def _heartbeat(self) -> bytes:
        if not self.silence.is_over:
            return b""
        return self.reply.frame_heartbeat(self.active.num_computed, self.active.num_prompt_tokens)

    async def _send(self, send: Send, frames: bytes) -> None:
        if frames:
            await send({"type": "http.response.body", "body": frames, "more_body": True})
            self.silence.end()


async def collect_body(
    reply: Reply, active: ActiveRequest, parts: PartStream, receive: Receive, deadline: Deadline
) -> dict[str, Any]:
    """Run the request to its end; return the reply's JSON body as a dict. Raises the request's error, or Disconnected."""
    watch = asyncio.create_task(_abandon_when_gone(active, receive, deadline))
    try:
        async with contextlib.aclosing(parts):
            async for news in parts:
                for choice, deltas in news:
                    reply.collect_deltas(choice, deltas)
    finally:
        watch.cancel()
    return reply.make_body()


async def _abandon_when_gone(active: ActiveRequest, receive: Receive, deadline: Deadline) -> None:
    try:
        await deadline.hold(until_gone(receive))
    except RequestTimedOut as error:
        active.abandon(error)
    else:
        active.abandon(Disconnected())


@dataclass
class RequestAccount:
    """Bookkeeping of one HTTP request; `close` logs it and, if an engine had received it, adds it to the metrics."""

    request: Request
    dialect: str
    service: Service
    limiter: RateLimiter
    model: str = "-"
    active: ActiveRequest | None = None
    arrived: float = field(default_factory=time.monotonic)
    num_charged: int = 0  # tokens so far

    def charge(self) -> None:
        """Charge the tenant for the tokens that were used since the last call."""
        if self.active is not None and self.active.is_submitted:
            usage = self.active.usage
            num_used = usage.prompt_tokens + usage.completion_tokens
            self.limiter.charge_tokens(tenant_of(self.request), num_used - self.num_charged)
            self.num_charged = num_used

    def close(self, error: BaseException | None) -> None:
        path, address = self.request.scope["path"], self.request.client
        status = 200 if error is None else problems.status_of(error, path) if isinstance(error, Exception) else 499
        active = self.active if self.active is not None and self.active.is_submitted else None
        self.charge()
        finish = "cancelled" if status == 499 else "error" if error is not None else active.finish if active else None
        measured: dict[str, Any] = {}
        if active is not None:
            measured = pick_fields(active.usage, *MEASURED) | {"first_token_seconds": active.first_token_seconds}
            measured["miss_cause"] = active.usage.reuse and active.usage.reuse.cause
        record = RequestRecord(
            request_id=self.request.state.request_id,
            client=f"{address.host}:{address.port}" if address else "-",
            dialect=self.dialect,
            model=self.model,
            status=status,
            finish=finish,
            total_seconds=time.monotonic() - self.arrived,
            tenant=tenant_of(self.request).name,
            **measured,
        )
        log_request(record)
        if active is not None and finish is not None:
            self.service.metrics.finished(record)
