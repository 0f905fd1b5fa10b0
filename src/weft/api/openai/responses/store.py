"""Responses stored for clients that come back to them: a SQLite file, bounded in number, bytes and age.

A response is found only with the API key it was requested with. One thread does it all, beside the event loop and in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sqlite3
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("weft.api")

FILE = "responses.sqlite"
MAX_BYTES = 256 * 2**20
TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    owner TEXT, id TEXT, kept REAL, used REAL, nbytes INTEGER, response BLOB, items BLOB, PRIMARY KEY (owner, id)
)
"""
# The least recently used responses go, as far as there are too many of them or too many bytes.
SHRINK = """
DELETE FROM responses WHERE rowid IN (
    SELECT rowid FROM (
        SELECT rowid, row_number() OVER latest AS place, sum(nbytes) OVER latest AS total
        FROM responses WINDOW latest AS (ORDER BY used DESC, rowid DESC)
    ) WHERE place > ? OR total > ?
)
"""

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the items it answers."""

    response: JsonObject
    items: list[JsonObject]

    @property
    def conversation(self) -> tuple[JsonObject, ...]:
        """The conversation up to the response's end."""
        return (*self.items, *self.response["output"])


@dataclass(eq=False)
class ResponseStore:
    """Stores responses in a folder, or in memory where nothing can be written there."""

    folder: Path
    max_count: int
    max_seconds: float
    max_bytes: int = MAX_BYTES
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "weft-store")
        self._connection: sqlite3.Connection | None = None  # from its first use on, and used by the thread alone

    def keep(self, api_key: bytes, response: JsonObject, items: list[JsonObject]) -> None:
        """Store a response without waiting for it; a failure is logged."""
        self._thread.submit(self._keep, _owner(api_key), response, items).add_done_callback(_log_failure)

    async def find(self, api_key: bytes, response_id: str) -> StoredResponse | None:
        """The response of this id, if it belongs to this key."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._find, _owner(api_key), response_id)

    async def delete(self, api_key: bytes, response_id: str) -> bool:
        """Delete a response; whether there was one."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._delete, _owner(api_key), response_id)

    def _keep(self, owner: str, response: JsonObject, items: list[JsonObject]) -> None:
        output, given, now = msgspec.json.encode(response), msgspec.json.encode(items), self.clock()
        row = (owner, response["id"], now, now, len(output) + len(given), output, given)
        with self._open() as connection:
            connection.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute("DELETE FROM responses WHERE kept < ?", (now - self.max_seconds,))
            connection.execute(SHRINK, (self.max_count, self.max_bytes))

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
                self._connection = _connect(_make_file(self.folder) if self.max_count else ":memory:")
            except (OSError, sqlite3.Error) as error:
                log.warning("responses are kept in memory only: %s can not be used (%s)", self.folder / FILE, error)
                self._connection = _connect(":memory:")
            weakref.finalize(self, self._connection.close)
        return self._connection


def _make_file(folder: Path) -> Path:
    """The file, readable for this user alone: it has what people wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    os.close(os.open(folder / FILE, os.O_CREAT | os.O_RDWR, 0o600))
    return folder / FILE


def _connect(place: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(place, check_same_thread=False)  # another thread closes it
    try:
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(TABLE)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _owner(api_key: bytes) -> str:
    """A hash of the key, because keys themselves are not written down."""
    return hashlib.blake2b(api_key, digest_size=16).hexdigest()


def _log_failure(kept: Future[None]) -> None:
    if (error := kept.exception()) is not None:
        log.warning("a response could not be kept: %s", error)
