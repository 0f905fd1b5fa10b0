"""Whatever is sent as a body costs its sender one clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request

from weft.api.http import LARGE_BYTES, Disconnected, read_json
from weft.api.problems import BorderError, status_of
from weft.config import ServerConfig
from weft.errors import InvalidRequest
from weft.ipc.limits import MAX_BODY_BRACKETS, MAX_BODY_COMMAS, MAX_BODY_DEPTH


class Sent:
    """A client that sends these chunks and then, unless it is complete, nothing more or its farewell."""

    def __init__(self, *chunks: bytes, then: str = "end", **headers: str) -> None:
        self.messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        if then == "end":
            self.messages.append({"type": "http.request", "body": b"", "more_body": False})
        elif then == "leave":
            self.messages.append({"type": "http.disconnect"})
        self.num_taken = 0
        names = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope = {"type": "http", "method": "POST", "path": "/", "headers": names}

    async def receive(self) -> dict[str, Any]:
        if self.num_taken == len(self.messages):
            await asyncio.Event().wait()  # a client that is slow for ever
        self.num_taken += 1
        return self.messages[self.num_taken - 1]

    def read(self, max_bytes: int = 2**24, seconds: float = 5.0) -> dict[str, Any]:
        config = ServerConfig(max_body_bytes=max_bytes, body_seconds=seconds)
        return asyncio.run(read_json(Request(self.scope, self.receive), config))


def refusal(sent: Sent, **limits: Any) -> Exception:
    with pytest.raises((BorderError, InvalidRequest)) as caught:
        sent.read(**limits)
    return caught.value


def test_a_body_in_pieces_is_one_object() -> None:
    assert Sent(b'{"a": [1, 2.5, ', b'null], "b"', b': "\xf0\x9f', b'\x98\x80"}').read() == {"a": [1, 2.5, None], "b": "😀"}


def test_a_large_body_is_read_and_refused_like_a_small_one() -> None:
    text = "x" * 2 * LARGE_BYTES

    assert Sent(b'{"a": "', text.encode(), b'"}').read() == {"a": text}
    assert "trailing comma" in str(refusal(Sent(b'{"a": "', text.encode(), b'",}')))


def test_of_a_key_given_twice_the_last_wins() -> None:
    assert Sent(b'{"a": 1, "a": 2}').read() == {"a": 2}


def test_a_nul_and_a_whole_surrogate_pair_are_ordinary_text() -> None:
    assert Sent(rb'{"a": "\u0000\ud83d\ude00"}').read() == {"a": "\0😀"}


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "text/plain", "application/x-www-form-urlencoded"])
def test_the_content_type_does_not_matter(kind: str) -> None:
    assert Sent(b"{}", content_type=kind).read() == {}


def test_form_data_and_compressed_bodies_are_refused_by_name() -> None:
    form = refusal(Sent(b"--x", content_type="Multipart/Form-Data; boundary=x"))
    packed = refusal(Sent(b"\x1f\x8b", content_encoding="gzip"))

    assert (status_of(form), status_of(packed)) == (415, 415)
    assert "not form data" in str(form)
    assert "'gzip'" in str(packed)


def test_a_body_announced_too_large_is_refused_unread() -> None:
    sent = Sent(b"{}", content_length="11")

    assert status_of(refusal(sent, max_bytes=10)) == 413
    assert sent.num_taken == 0


def test_a_body_that_grows_too_large_is_refused_at_once() -> None:
    sent = Sent(b"12345", b"67890", b"1", b"never read")

    assert status_of(refusal(sent, max_bytes=10)) == 413
    assert sent.num_taken == 3


def test_a_body_of_just_the_allowed_size_is_read() -> None:
    assert Sent(b'{"a":"bc"}', content_length="10").read(max_bytes=10) == {"a": "bc"}


def test_a_body_that_stops_coming_is_refused_in_time_and_its_connection_closed() -> None:
    error = refusal(Sent(b'{"a":', then="stall"), seconds=0.01)

    assert status_of(error) == 408
    assert isinstance(error, BorderError)
    assert error.headers == {"connection": "close"}


def test_a_client_that_leaves_is_noticed() -> None:
    error = refusal(Sent(b'{"a":', then="leave"))

    assert isinstance(error, Disconnected)
    assert status_of(error) == 499


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no body"),
        (b" \n", "no body"),
        (b"{", "ends too early"),
        (b'{"a": 1,}', "trailing comma in object (byte 8)"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 1} x', "trailing characters"),
        (b'{"a": NaN}', "invalid character"),
        (b'{"a": -Infinity}', "invalid character"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),
        (rb'{"a": "\ud800"}', "half of a surrogate pair"),
        (rb'{"a": "\ud800x"}', "half of a surrogate pair"),
        (rb'{"a": "\udc00\ud800"}', "surrogate"),
        (rb'{"\ud800": 1}', "half of a surrogate pair"),
        ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
        (b'{"a": "\x00"}', "invalid character"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"a": 18446744073709551616}', "more than 64 bits"),
        (b'{"a": [{"b": -9223372036854775809}]}', "more than 64 bits"),
        (b'{"a": ' + b"9" * 400 + b"}", "more than 64 bits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
    ],
)
def test_a_bad_body_is_a_400_that_says_what_is_wrong(body: bytes, words: str) -> None:
    error = refusal(Sent(body))

    assert status_of(error) == 400
    assert words in str(error)


def test_the_largest_integers_pass() -> None:
    assert Sent(b'{"a": [18446744073709551615, -9223372036854775808]}').read() == {"a": [2**64 - 1, -(2**63)]}


def nested_lists(levels: int) -> bytes:
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


def nested_objects(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize("nested", [nested_lists, nested_objects])
def test_nesting_is_allowed_up_to_the_limit(nested: Callable[[int], bytes]) -> None:
    assert Sent(nested(MAX_BODY_DEPTH)).read().keys() == {"a"}


@pytest.mark.parametrize("nested", [nested_lists, nested_objects])
@pytest.mark.parametrize("levels", [MAX_BODY_DEPTH + 1, 900, 10_000, MAX_BODY_BRACKETS])
def test_deeper_nesting_is_a_400_however_deep(nested: Callable[[int], bytes], levels: int) -> None:
    error = refusal(Sent(nested(levels)))

    assert status_of(error) == 400
    assert f"more than {MAX_BODY_DEPTH} levels" in str(error)


def test_a_million_brackets_are_refused_before_they_are_parsed() -> None:
    error = refusal(Sent(b"[" * 1_000_000))

    assert status_of(error) == 400
    assert "1000000 opening brackets" in str(error)


def test_more_values_than_can_be_decoded_at_once_are_refused_by_their_number() -> None:
    error = refusal(Sent(b'{"prompt":[' + b"1," * (MAX_BODY_COMMAS + 1) + b"1]}"))

    assert f"at most {MAX_BODY_COMMAS} are allowed" in str(error)
