"""The store of responses: what is kept, for whom, how much of it and for how long."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft.api.openai.response_store import FILE, ResponseStore
from weft.serving.tenants import owner_of

ITEMS = [{"id": "item_1", "type": "message", "role": "user", "content": "Hi"}]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def response(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": text}]}


def store(
    folder: Path, clock: Callable[[], float] = lambda: 1000.0, max_count: int = 10, max_bytes: int = 2**20
) -> ResponseStore:
    return ResponseStore(folder, max_count, 60.0, max_bytes, clock)


def found(kept: ResponseStore, *numbers: int, owner: str = "") -> list[int]:
    """Those of the numbers that are there."""

    async def look() -> list[int]:
        return [number for number in numbers if await kept.find(owner, f"resp_{number}") is not None]

    return asyncio.run(look())


def test_a_response_is_there_for_who_asks_right_after_it_was_given_away(tmp_path: Path) -> None:
    kept = store(tmp_path)

    async def keep_and_find() -> Any:
        for number in range(5):
            kept.keep("key", response(number, "é"), ITEMS)
        return await kept.find("key", "resp_4")

    one = asyncio.run(keep_and_find())
    assert one.response == response(4, "é")
    assert one.items == ITEMS
    assert one.conversation == (*ITEMS, *response(4, "é")["output"])
    assert found(kept, 5, owner="key") == []


def test_a_response_of_another_key_is_not_there(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.keep("mine", response(1), ITEMS)
    kept.keep("yours", response(1, "yours"), ITEMS)

    assert found(kept, 1, owner="mine") == [1]
    assert found(kept, 1, owner="") == []
    assert not asyncio.run(kept.delete("", "resp_1"))
    assert asyncio.run(kept.delete("mine", "resp_1"))
    assert found(kept, 1, owner="mine") == []
    assert found(kept, 1, owner="yours") == [1]


def test_keys_are_not_written_down_and_nobody_else_may_read(tmp_path: Path) -> None:
    kept = store(tmp_path / "new")
    kept.keep(owner_of(b"my secret key"), response(1, "what was said"), ITEMS)
    found(kept, 1)

    files = list((tmp_path / "new").iterdir())
    assert any(b"what was said" in file.read_bytes() for file in files)
    assert not any(b"my secret key" in file.read_bytes() for file in files)
    assert {file.stat().st_mode & 0o077 for file in files} == {0}


def test_the_least_recently_used_goes_when_there_are_too_many(tmp_path: Path) -> None:
    clock = Clock()
    kept = store(tmp_path, clock, max_count=3)
    for number in range(3):
        clock.now += 1
        kept.keep("", response(number), ITEMS)
        assert found(kept, number) == [number]
    clock.now += 1
    assert found(kept, 0) == [0]  # now 1 is the oldest
    kept.keep("", response(3), ITEMS)

    assert found(kept, 0, 1, 2, 3) == [0, 2, 3]


def test_there_are_never_more_bytes_than_allowed(tmp_path: Path) -> None:
    kept = store(tmp_path, max_bytes=1000)
    for number in range(6):
        kept.keep("", response(number, "x" * 200), ITEMS)
    assert found(kept, *range(6)) == [3, 4, 5]

    kept.keep("", response(6, "x" * 2000), ITEMS)
    assert found(kept, 6) == []


def test_the_old_are_forgotten_also_where_nobody_keeps_new_ones(tmp_path: Path) -> None:
    clock = Clock()
    kept = store(tmp_path, clock)
    kept.keep("", response(1), ITEMS)
    clock.now += 59
    assert found(kept, 1) == [1]
    clock.now += 2
    assert found(kept, 1) == []

    kept.keep("", response(2), ITEMS)
    found(kept, 2)
    with sqlite3.connect(tmp_path / FILE) as file:
        assert file.execute("SELECT id FROM responses").fetchall() == [("resp_2",)]
    file.close()


def test_what_is_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.keep("", response(1), ITEMS)
    found(first, 1)
    del first

    assert found(store(tmp_path), 1) == [1]


def test_a_response_that_comes_again_takes_its_place(tmp_path: Path) -> None:
    kept = store(tmp_path)
    for text in ("first", "second"):
        kept.keep("", response(1, text), ITEMS)

    one = asyncio.run(kept.find("", "resp_1"))
    assert one is not None
    assert one.response == response(1, "second")


@pytest.mark.parametrize("is_damaged", [True, False])
def test_where_the_file_can_not_be_used_memory_is(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_damaged: bool) -> None:
    if is_damaged:
        (tmp_path / FILE).write_bytes(b"not a database" * 100)
        kept = store(tmp_path)
    else:
        (tmp_path / "file").touch()
        kept = store(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        kept.keep("", response(1), ITEMS)
        assert found(kept, 1) == [1]

    assert "kept in memory only" in caplog.text


def test_a_response_that_can_not_be_kept_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = store(tmp_path)
    with caplog.at_level(logging.WARNING):
        kept.keep("", response(1) | {"bad": {1, 2j}}, ITEMS)
        assert found(kept, 1) == []

    assert "could not be kept" in caplog.text


def test_a_store_for_none_makes_no_file(tmp_path: Path) -> None:
    assert found(store(tmp_path, max_count=0), 1) == []
    assert list(tmp_path.iterdir()) == []


def test_with_keys_nobody_pushes_out_another_s_responses(tmp_path: Path) -> None:
    kept = store(tmp_path, max_count=2)
    kept.is_per_owner = True
    kept.keep("mine", response(1), ITEMS)
    for number in range(5):
        kept.keep("yours", response(number), ITEMS)

    assert found(kept, 1, owner="mine") == [1]
    assert found(kept, *range(5), owner="yours") == [3, 4]
