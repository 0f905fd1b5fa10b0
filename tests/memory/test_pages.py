"""Pages and slots of rows: what lies where, what a step's table says, and what is left when rows come and go."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from emulation.plain import PlainPages
from weft.memory import pages
from weft.memory.paged_views import PagedBatch, make_batches
from weft.memory.pages import FEWEST_PAGES, IDLE, PAGE, ROWS_AT_ONCE, PagedPool
from weft.memory.slabs import NewRow, RowState
from weft.memory.spec import FullAttention, KeyValues, Plane, Recurrent
from weft.memory.views import StepSpan

PLANE = Plane(2, 4, mx.float32)
KEPT, CHANNELS, STATE = 3, 5, (2, 4)
SPECS = [
    Recurrent((((KEPT, CHANNELS), mx.float32), (STATE, mx.float32))),
    FullAttention(PLANE, PLANE),
    Recurrent((((3,), mx.float32),)),
]


@pytest.fixture
def kernels() -> PlainPages:
    return PlainPages()


@pytest.fixture
def pool(kernels: PlainPages) -> PagedPool:
    return PagedPool(SPECS, {0}, kernels)


def contents(length: int, mark: float) -> list[Any]:
    """A row's contents: token t has keys of mark + t."""
    tokens = mx.broadcast_to((mark + mx.arange(length))[:, None], (length, PLANE.dim))
    keys = mx.broadcast_to(tokens, (1, PLANE.heads, length, PLANE.dim))
    states = (mx.full((1, KEPT, CHANNELS), mark), mx.full((1, *STATE), mark))
    return [states, KeyValues(keys, keys + 1), (mx.full((1, 3), mark),)]


def place(pool: PagedPool, length: int, mark: float) -> RowState:
    row = RowState()
    assert pool.refusal(contents(length, mark), length) is None
    pool.allocate(row, contents(length, mark), length)
    return row


def tokens_of(pool: PagedPool, row: RowState) -> list[float]:
    """The first number of each token's keys that a row holds, read through its pages."""
    keys = np.array(pool.pages[1].keys)
    return [float(keys[row.pages[token // PAGE], 0, token % PAGE, 0]) for token in range(row.length)]


def step(pool: PagedPool, rows: list[RowState], tokens: int = 1, width: int | None = None) -> PagedBatch:
    (batch,) = make_batches(pool, rows, seam=True, width=width, span=StepSpan(tokens))
    assert isinstance(batch, PagedBatch)
    return batch


def test_a_row_s_contents_lie_in_its_pages_and_its_slot(pool: PagedPool) -> None:
    row, other = place(pool, PAGE + 3, 1000.0), place(pool, 2, 5000.0)

    assert tokens_of(pool, row) == [1000.0 + token for token in range(PAGE + 3)]
    assert tokens_of(pool, other) == [5000.0, 5001.0]
    columns, state = pool.slots[0]
    assert np.array(state[row.slot]).tolist() == np.full(STATE, 1000.0).tolist()
    held = np.array(columns[row.slot, :, 0]).tolist()
    assert [held[(PAGE + token) % columns.shape[1]] for token in range(3)] == [1000.0] * 3
    assert len({IDLE, *row.pages, *other.pages}) == 4
    assert len({IDLE, row.slot, other.slot}) == 3


def test_rows_that_enter_together_have_their_own_and_memory_grows_once(pool: PagedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    grown, reserve = [], pool._reserve
    monkeypatch.setattr(pool, "_reserve", lambda *counts: (grown.append(counts), reserve(*counts)))
    lengths = [PAGE + 3, 2, *range(5, 5 + ROWS_AT_ONCE)]  # more than one launch takes
    new = [NewRow(RowState(), contents(length, 1000.0 * at), length) for at, length in enumerate(lengths)]
    pool.allocate_all(new)

    for at, one in enumerate(new):
        assert tokens_of(pool, one.row) == [1000.0 * at + token for token in range(one.length)]
        assert np.array(pool.slots[0][1][one.row.slot]).tolist() == np.full(STATE, 1000.0 * at).tolist()
    assert len([counts for counts in grown if counts[1]]) == 1
    assert len({one.row.slot for one in new}) == len(new)


def test_a_step_s_table_says_where_each_row_is(pool: PagedPool) -> None:
    row, other = place(pool, PAGE + 3, 1.0), place(pool, 2, 2.0)
    other.shift = -1
    table = step(pool, [other, row], width=3).step_table

    assert np.array(table.rows).tolist() == [[other.slot, 2, 1, 0], [row.slot, PAGE + 3, PAGE + 3, 1], [IDLE, 0, 0, 3]]
    entries = np.array(table.pages).tolist()
    assert entries[:4] == [[0, other.pages[0]], [1, row.pages[0]], [1, row.pages[1]], [2, IDLE]]
    assert entries[4:] == [[-1, IDLE]] * (len(entries) - 4)


def test_a_batch_s_positions_are_those_of_the_table(pool: PagedPool) -> None:
    row = place(pool, 5, 1.0)
    row.shift = 7

    assert np.array(step(pool, [row]).offsets).tolist() == [12]


def test_the_device_makes_the_table_as_long_as_rows_only_grow(pool: PagedPool, kernels: PlainPages) -> None:
    rows = [place(pool, PAGE - 3, 1.0), place(pool, 7, 2.0)]
    for number in range(5):
        batch = step(pool, rows)
        firsts = np.array(batch.step_table.rows)[:, 1].tolist()
        assert firsts == [PAGE - 3 + number, 7 + number]
        batch.keep([1, 1])

    assert kernels.num_advanced == 3  # the first is the host's, and the one after the first row took another page
    assert len(rows[0].pages) == 2


def test_another_row_makes_another_table(pool: PagedPool, kernels: PlainPages) -> None:
    rows = [place(pool, 4, 1.0), place(pool, 7, 2.0)]
    step(pool, rows).keep([1, 1])
    pool.free(rows[0])

    assert np.array(step(pool, rows[1:]).step_table.rows).tolist() == [[rows[1].slot, 8, 8, 0]]
    assert kernels.num_advanced == 0


def test_pages_and_slots_of_a_row_that_left_are_used_again(pool: PagedPool) -> None:
    row, stays = place(pool, PAGE + 1, 1.0), place(pool, 1, 2.0)
    numbers, slot = row.pages, row.slot
    pool.free(row)
    comes = place(pool, PAGE + 1, 3.0)

    assert (comes.pages, comes.slot) == (numbers, slot)
    assert not row.is_placed
    assert tokens_of(pool, stays) == [2.0]
    pool.free(row)  # again: nothing happens
    assert len(pool.rows) == 2


def test_more_rows_than_there_is_room_for_enlarge_the_arrays_and_keep_what_is_there(pool: PagedPool) -> None:
    rows = [place(pool, 2 * PAGE, 100.0 * number) for number in range(FEWEST_PAGES)]

    for number, row in enumerate(rows):
        assert tokens_of(pool, row)[:3] == [100.0 * number + token for token in range(3)]
        assert float(pool.slots[0][1][row.slot, 0, 0]) == 100.0 * number


def test_what_is_not_used_any_more_is_given_back(pool: PagedPool) -> None:
    rows = [place(pool, 4 * PAGE, 1000.0 * number) for number in range(1, 40)]
    held = pool.bytes_held
    for row in rows[:-1]:
        pool.free(row)
    pool.trim()

    assert pool.bytes_held < held / 8
    assert tokens_of(pool, rows[-1])[:2] == [39000.0, 39001.0]
    assert float(pool.slots[0][1][rows[-1].slot, 0, 0]) == 39000.0
    comes = place(pool, 3, 7.0)
    assert not {*comes.pages} & {IDLE, *rows[-1].pages}
    assert tokens_of(pool, rows[-1])[-1] == 39000.0 + 4 * PAGE - 1


def test_an_empty_pool_keeps_little(pool: PagedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "KEPT_BYTES", 0)
    row = place(pool, 3, 1.0)
    pool.free(row)

    assert pool.bytes_held == 0
    assert tokens_of(pool, place(pool, 3, 2.0)) == [2.0, 3.0, 4.0]


def test_a_row_that_keeps_fewer_tokens_gets_the_state_after_the_last_of_them(pool: PagedPool) -> None:
    rows = [place(pool, 4, 1.0), place(pool, 7, 2.0)]
    batch = step(pool, rows, tokens=3)
    kept = mx.arange(6.0)[:, None, None] + mx.zeros((6, *STATE))  # after each line
    for row in rows:
        pool.slots[0][1][row.slot] = mx.full(STATE, 99.0)  # after the last
    batch.keep_by_token(0, kept)
    batch.keep([2, 3])

    assert [float(pool.slots[0][1][row.slot, 0, 0]) for row in rows] == [1.0, 99.0]
    assert [row.length for row in rows] == [6, 10]


def test_states_that_are_not_in_slots_follow_their_rows(pool: PagedPool) -> None:
    rows = [place(pool, 4, float(number)) for number in (1, 2, 3)]
    step(pool, rows).keep([1] * 3)
    pool.free(rows[0])
    batch = step(pool, [rows[2], rows[1]])

    states = batch.table.states[2][0]
    assert states is not None
    assert np.array(states)[:, 0].tolist() == [3.0, 2.0]


def test_tokens_of_one_layer_can_be_zeroed(pool: PagedPool) -> None:
    row = place(pool, 6, 1.0)
    pool.scrub_tokens(row, 2, 4, (1,))

    assert tokens_of(pool, row) == [1.0, 2.0, 0.0, 0.0, 5.0, 6.0]


def test_a_table_has_one_of_few_sizes() -> None:
    sizes = {pages._padded(count) for count in range(1, 3000)}

    assert all(pages._padded(count) >= count for count in range(1, 3000))
    assert sizes == {32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072}
