"""Stores responses in an SQLite file limited in number, bytes (LRU) and age, and serves the endpoints that read them."""

import asyncio
import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft.api.access import tenant_of
from weft.api.admin import cancel_request
from weft.api.http import json_response, read_json
from weft.api.openai.response_items import Item, find_references
from weft.api.openai.responses import Past, translate
from weft.api.problems import BorderError
from weft.config import ServerConfig, cache_folder
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.serving.service import Service

log = logging.getLogger("weft.api")

DAY_SECONDS = 24 * 3600.0
PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100
FILE = "responses.sqlite"
MAX_BYTES = 256 * 2**20
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT, id TEXT, kept REAL, used REAL, nbytes INTEGER, response BLOB, items BLOB, PRIMARY KEY (owner, id)
)
"""
# Delete the least recently used responses beyond the maximum count or the maximum total of bytes, of all or of each owner.
SHRINK = """
DELETE FROM responses WHERE rowid IN (
    SELECT rowid FROM (
        SELECT rowid, row_number() OVER latest AS place, sum(nbytes) OVER latest AS total
        FROM responses WINDOW latest AS ({partition} ORDER BY used DESC, rowid DESC)
    ) WHERE place > ? OR total > ?
)
"""


@dataclass(frozen=True)
class StoredResponse:
    """A stored response, with the input items that it answers (the earlier conversation included)."""

    response: Item
    items: list[Item]

    @property
    def conversation(self) -> tuple[Item, ...]:
        return (*self.items, *self.response["output"])


@dataclass(eq=False)
class ResponseStore:
    """Stores responses in an SQLite file, or in memory if that fails. Finding one needs the owner it was stored for."""

    folder: Path
    max_count: int
    max_seconds: float
    max_bytes: int = MAX_BYTES
    clock: Callable[[], float] = time.time
    is_per_owner: bool = False  # whether the maxima are each owner's, so that none can push out another's responses

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weft-store")
        self._connection: sqlite3.Connection | None = None  # from its first use on, and used by the thread alone

    def keep(self, owner: str, response: Item, items: list[Item]) -> None:
        self._thread.submit(self._keep, owner, response, items).add_done_callback(_log_failure)

    async def find(self, owner: str, response_id: str) -> StoredResponse | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._find, owner, response_id)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._delete, owner, response_id)

    def _keep(self, owner: str, response: Item, items: list[Item]) -> None:
        output, given, now = msgspec.json.encode(response), msgspec.json.encode(items), self.clock()
        row = (owner, response["id"], now, now, len(output) + len(given), output, given)
        with self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute("DELETE FROM responses WHERE kept < ?", (now - self.max_seconds,))
            shrink = SHRINK.format(partition="PARTITION BY owner" if self.is_per_owner else "")
            connection.execute(shrink, (self.max_count, self.max_bytes))

    def _find(self, owner: str, response_id: str) -> StoredResponse | None:
        now = self.clock()
        with self._open() as connection:
            query = "UPDATE responses SET used = ? WHERE owner = ? AND id = ? AND kept >= ? RETURNING response, items"
            row = connection.execute(query, (now, owner, response_id, now - self.max_seconds)).fetchone()
        return None if row is None else StoredResponse(*map(msgspec.json.decode, row))

    def _delete(self, owner: str, response_id: str) -> bool:
        with self._open() as connection:
            return connection.execute("DELETE FROM responses WHERE owner = ? AND id = ?", (owner, response_id)).rowcount > 0

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            try:
                self._connection = _connect(self.folder if self.max_count else None)
            except (OSError, sqlite3.Error) as error:
                log.warning("responses are kept in memory only: %s can not be used (%s)", self.folder / FILE, error)
                self._connection = _connect(None)
            weakref.finalize(self, self._connection.close)
        return self._connection


def _connect(folder: Path | None) -> sqlite3.Connection:
    """Open or create the SQLite file in a folder, with access for this user only; a database in memory if `folder` is None."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder / FILE, os.O_CREAT | os.O_RDWR, 0o600))
    place = ":memory:" if folder is None else folder / FILE
    connection = sqlite3.connect(place, check_same_thread=False)  # another thread closes it
    try:
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(TABLE)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _log_failure(kept: Future[None]) -> None:
    if (error := kept.exception()) is not None:
        log.warning("a response could not be kept: %s", error)


class StoredResponses:
    """Handlers of the non-generating endpoints under /v1/responses; `recall` loads the history for the generating one."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.store = ResponseStore(cache_folder(), config.store_responses, config.store_days * DAY_SECONDS)
        self.store.is_per_owner = config.has_keys  # without keys a client could be any number of owners

    async def recall(self, body: dict[str, Any], owner: str) -> Past:
        """Load the stored responses that a body refers to. Raises BorderError (400) if previous_response_id is not stored."""
        items: tuple[Item, ...] = ()
        if isinstance(previous := body.get("previous_response_id"), str):
            if (stored := await self.store.find(owner, previous)) is None:
                raise BorderError(400, "previous_response_not_found", f"Previous response with id '{previous}' not found.")
            items = stored.conversation
        referred = {item["id"]: item for item in items}
        for item_id in find_references(body.get("input")):
            response_id = f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"  # an item's id is kind_response_index
            if item_id not in referred and (stored := await self.store.find(owner, response_id)) is not None:
                referred |= {item["id"]: item for item in stored.conversation}
        return Past(items, referred, partial(self.store.keep, owner) if self.store.max_count else None)

    async def get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedParameter("stream: a response that is finished can not be streamed again; leave it out", "stream")
        return json_response((await self._find(request)).response)

    async def list_items(self, request: Request) -> Response:
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
        if not await self.store.delete(tenant_of(request).owner, response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        cancel_request(self.service, request)
        return json_response({"id": request.path_params["id"], "object": "response", "status": "cancelled", "output": []})

    async def count_tokens(self, request: Request) -> Response:
        body = await read_json(request, self.config)
        parsed = await asyncio.to_thread(translate, body, await self.recall(body, tenant_of(request).owner))
        num_tokens = await self.service.count_tokens(parsed.generation)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    async def _find(self, request: Request) -> StoredResponse:
        stored = await self.store.find(tenant_of(request).owner, request.path_params["id"])
        if stored is None:
            raise _not_found(request.path_params["id"])
        return stored


def _not_found(response_id: str) -> BorderError:
    return BorderError(404, "response_not_found", f"Response with id '{response_id}' not found.")
