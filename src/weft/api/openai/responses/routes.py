"""The endpoints around a response: read it again, list what it answers, delete it, cancel it, count the tokens of its prompt.

Knows the store of responses and the service; `request` knows what a body means.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.api.admin import cancel_request
from weft.api.http import json_response, read_json
from weft.api.openai.responses.items import Item, find_references
from weft.api.openai.responses.request import Past, translate
from weft.api.openai.responses.store import ResponseStore, StoredResponse
from weft.api.problems import BorderError
from weft.config import ServerConfig, cache_folder
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.serving.service import Service

DAY_SECONDS = 24 * 3600.0
PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100


class StoredResponses:
    """The endpoints under /v1/responses beside the generating one, and the past for that one."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.store = ResponseStore(cache_folder(), config.store_responses, config.store_days * DAY_SECONDS)

    async def recall(self, body: dict[str, Any], api_key: bytes) -> Past:
        """What is stored of the responses that a body refers to. Raises BorderError where the previous one is not stored."""
        items: tuple[Item, ...] = ()
        if isinstance(previous := body.get("previous_response_id"), str):
            stored = await self.store.find(api_key, previous)
            if stored is None:
                message = f"Previous response with id '{previous}' not found."
                raise BorderError(400, "previous_response_not_found", message)
            items = stored.conversation
        referred = {item["id"]: item for item in items}
        for item_id in find_references(body.get("input")):
            response_id = f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"  # an item's id is kind_response_index
            if item_id not in referred and (stored := await self.store.find(api_key, response_id)) is not None:
                referred |= {item["id"]: item for item in stored.conversation}
        return Past(items, referred, partial(self.store.keep, api_key) if self.store.max_count else None)

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedParameter("stream: a response that is finished can not be streamed again; leave it out", "stream")
        return json_response((await self._find(request)).response)

    async def list_items(self, request: Request) -> Response:
        """List the items that a response answers, the latest first unless the query says otherwise."""
        items, query = (await self._find(request)).items, request.query_params
        limit = query.get("limit", str(PAGE_ITEMS))
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_PAGE_ITEMS:
            raise InvalidRequest(f"limit {limit} must be a number between 1 and {MAX_PAGE_ITEMS}", "limit")
        if query.get("order", "desc") == "desc":
            items = items[::-1]
        ids = [item["id"] for item in items]
        if (after := query.get("after")) is not None:
            if after not in ids:
                raise InvalidRequest(f"after {after!r} is the id of no item here", "after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        if not await self.store.delete(request.state.api_key, response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        cancel_request(self.service, request.path_params["id"])
        return json_response({"id": request.path_params["id"], "object": "response", "status": "cancelled", "output": []})

    async def count_tokens(self, request: Request) -> Response:
        body = await read_json(request, self.config)
        parsed = await asyncio.to_thread(translate, body, await self.recall(body, request.state.api_key))
        num_tokens = await self.service.count_tokens(parsed.generation)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def _find(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        stored = await self.store.find(request.state.api_key, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _not_found(response_id: str) -> BorderError:
    return BorderError(404, "response_not_found", f"Response with id '{response_id}' not found.")
