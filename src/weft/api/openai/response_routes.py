"""The endpoints around a response: read it again, list what it answers, forget it, end it, count what it would take.

Knows the store of responses and the service; what a request means is `responses`' matter. `app` has the routes.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.api.admin import Status, json_response
from weft.api.body import read_json
from weft.api.openai.response_items import Item, references
from weft.api.openai.responses import Past, translate
from weft.api.problems import BorderError
from weft.api.store import ResponseStore, StoredResponse
from weft.config import ServerConfig, cache_folder
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.serving.service import Service

DAY = 24 * 3600.0
PAGE, MAX_PAGE = 20, 100  # items in a list


class Responses:
    """The endpoints under /v1/responses, and what was said before for those who ask there."""

    def __init__(self, service: Service, config: ServerConfig, status: Status) -> None:
        self.service = service
        self.config = config
        self.status = status
        self.store = ResponseStore(cache_folder(), config.store_responses, config.store_days * DAY)

    async def recall(self, body: dict[str, Any], api_key: bytes) -> Past:
        """What this body refers to. Raises BorderError where its previous response is not kept."""
        items: tuple[Item, ...] = ()
        if isinstance(previous := body.get("previous_response_id"), str):
            kept = await self.store.find(api_key, previous)
            if kept is None:
                message = f"Previous response with id '{previous}' not found."
                raise BorderError(400, "previous_response_not_found", message)
            items = kept.conversation
        referred = {item["id"]: item for item in items}
        for item_id in references(body.get("input")):
            if item_id not in referred and (kept := await self.store.find(api_key, _response_of(item_id))) is not None:
                referred |= {item["id"]: item for item in kept.conversation}
        keep = partial(self.store.keep, api_key) if self.store.max_count else None
        return Past(items, referred, keep)

    async def get(self, request: Request) -> Response:
        """A response that was kept."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedParameter("stream: a response that is finished can not be streamed again; leave it out", "stream")
        return json_response((await self._kept(request)).response)

    async def items(self, request: Request) -> Response:
        """What it answers, the latest first unless asked otherwise."""
        items = (await self._kept(request)).items
        asked = request.query_params
        limit = asked.get("limit", str(PAGE))
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_PAGE:
            raise InvalidRequest(f"limit {limit} must be a number between 1 and {MAX_PAGE}", "limit")
        if asked.get("order", "desc") == "desc":
            items = items[::-1]
        names = [item["id"] for item in items]
        if (after := asked.get("after")) is not None:
            if after not in names:
                raise InvalidRequest(f"after {after!r} is the id of no item here", "after")
            items = items[names.index(after) + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})

    async def delete(self, request: Request) -> Response:
        """Forget one."""
        response_id = request.path_params["id"]
        if not await self.store.delete(request.state.api_key, response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End one that is being made."""
        await self.status.cancel(request)
        ended = {"id": request.path_params["id"], "object": "response", "status": "cancelled", "output": []}
        return json_response(ended)

    async def input_tokens(self, request: Request) -> Response:
        """How many tokens a request's prompt has."""
        body = await read_json(request, max_bytes=self.config.max_body_bytes, seconds=self.config.body_seconds)
        asked = await asyncio.to_thread(translate, body, await self.recall(body, request.state.api_key))
        return json_response(
            {"object": "response.input_tokens", "input_tokens": await self.service.count_tokens(asked.generation)}
        )

    async def _kept(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        kept = await self.store.find(request.state.api_key, response_id)
        if kept is None:
            raise _not_found(response_id)
        return kept


def _response_of(item_id: str) -> str:
    """The response that an item belongs to: kind_response_index."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def _not_found(response_id: str) -> BorderError:
    return BorderError(404, "response_not_found", f"Response with id '{response_id}' not found.")
