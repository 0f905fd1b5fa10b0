"""How a request's body is read: bounded in bytes, in seconds and in depth, and turned from JSON into plain values.

Whatever a client sends, it costs that client one clear error. Knows no field; every endpoint that takes JSON uses it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from weft.api.problems import BorderError
from weft.errors import InvalidRequest

MAX_DEPTH = 100  # tools' schemas nest some thirty levels; what walks over them recursively has a thousand frames
MAX_BRACKETS = 500_000  # 16 MiB of "[]" keep the event loop busy for seconds; source code of that size has fewer
LARGE_BYTES = 2**20
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1


class Disconnected(BorderError):
    """The client went away; nobody reads the answer, the log shows 499."""

    def __init__(self) -> None:
        super().__init__(499, "client_disconnected", "The client closed the connection before its request was complete.")


async def read_json(request: Request, *, max_bytes: int, seconds: float) -> dict[str, Any]:
    """The body's JSON object. Of keys given twice the last one wins."""
    _check_headers(request, max_bytes)
    try:
        async with asyncio.timeout(seconds):
            body = await _read(request, max_bytes)
    except TimeoutError:
        message = f"The request's body did not arrive within {seconds:g} seconds."
        raise BorderError(408, "request_timeout", message, {"connection": "close"}) from None
    except ClientDisconnect:
        raise Disconnected from None
    # The check of eight million numbers takes a second; in a thread it gives way to the event loop.
    return await asyncio.to_thread(_parse, body) if len(body) > LARGE_BYTES else _parse(body)


def _check_headers(request: Request, max_bytes: int) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":  # others are let in: curl says "form" when it sends JSON
        raise BorderError(415, "unsupported_media_type", "The body must be JSON (content-type application/json), not form data.")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise BorderError(415, "unsupported_media_type", f"The body must be sent plain, not with content-encoding {coding!r}.")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> BorderError:
    return BorderError(413, "request_too_large", f"The request's body is larger than the {max_bytes} bytes allowed.")


def _parse(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise InvalidRequest("The request has no body; send a JSON object.")
    if (brackets := body.count(b"[") + body.count(b"{")) > MAX_BRACKETS:
        raise InvalidRequest(f"The body has {brackets} opening brackets; at most {MAX_BRACKETS} are allowed.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.") from None
    except msgspec.DecodeError as error:
        # The decoder calls half a surrogate pair at the end of a string "truncated" too.
        hint = "; it ends too early, or a string ends in half of a surrogate pair" if "truncated" in str(error) else ""
        raise InvalidRequest(f"The body is not valid JSON: {error}{hint}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object: {…}.")
    _check_values(value)
    return value


def _check_values(value: dict[str, Any]) -> None:
    """Refuse what is valid JSON but would break somebody further in: deep nesting, and integers that no float can hold."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = [child for parent in level for child in (parent.values() if type(parent) is dict else parent)]
        if any(type(child) is int and not MIN_INTEGER <= child <= MAX_INTEGER for child in children):
            raise InvalidRequest("The body has an integer of more than 64 bits.")
        level = [child for child in children if type(child) is dict or type(child) is list]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"The body's JSON is nested more than {MAX_DEPTH} levels deep.")
