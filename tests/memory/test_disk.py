"""The disk tier: what was stored comes back whole or not at all, damage is found and told, and the budget is kept."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from waiting import until
from weft.memory import disk_files
from weft.memory.disk import QUEUE_BYTES, DiskTier
from weft.memory.disk_files import CacheFolder, Damaged, Entry, Foreign, Packed, StoredArray, identity_of

IDENTITY, OTHER = "0123456789abcdef" * 2, "f" * 32
ROOT = bytes(16)
PLENTY = 1 << 30
SECONDS = 30.0  # for what happens in milliseconds


def key_of(name: object) -> bytes:
    return hashlib.sha256(str(name).encode()).digest()[:16]


def packed(name: object, nbytes: int = 1000) -> Packed:
    """Host data that only this name has."""
    data = random.Random(str(name)).randbytes(nbytes)
    planes = (
        StoredArray("0.keys", "F32", (nbytes // 4,), data[: nbytes // 4 * 4]),
        StoredArray("0.values", "BF16", (2, 3), memoryview(data[:12])),
        StoredArray("1.cache.0", "BOOL", (), b"\x01"),
        StoredArray("1.cache.1", "I32", (0, 4), b""),
    )
    return Packed(json.dumps([{"tuple": [{"array": "0.keys"}, {"array": "0.values"}]}, str(name)]), planes)


def make_entry(name: object, parent: bytes = ROOT, *, nbytes: int = 1000, checkpoint: bool = True) -> Entry:
    states = packed(f"states of {name}", nbytes) if checkpoint else None
    return Entry(key_of(name), parent, (1, 2, 40_000), packed(name, nbytes), states)


def contents(entry: Entry) -> object:
    return (entry.key, entry.parent, entry.tokens, entry.block, entry.checkpoint)


class House(logging.Handler):
    """A folder, the tiers that were opened on it, and the files that they logged as not used, each with the reason."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.reports: list[tuple[Path, str]] = []
        self._tiers: list[DiskTier] = []
        logging.getLogger("weft.memory").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg == "%s is not used: %s":
            path, reason = record.args  # type: ignore[misc]
            self.reports.append((path, str(reason)))  # type: ignore[arg-type]

    def make(self, budget: int = PLENTY, identity: str = IDENTITY) -> DiskTier:
        tier = DiskTier(self.folder, identity, budget)
        self._tiers.append(tier)
        return tier

    def open(self, budget: int = PLENTY, identity: str = IDENTITY) -> DiskTier:
        tier = self.make(budget, identity)
        tier.open()
        return tier

    def keep(self, *entries: Entry, identity: str = IDENTITY) -> None:
        """Store these, and close."""
        tier = self.open(identity=identity)
        for entry in entries:
            assert store(tier, entry)
        tier.close(SECONDS)
        assert tier.num_written == len(entries)

    def file(self, entry: Entry, identity: str = IDENTITY) -> Path:
        return self.folder / identity / f"{entry.key.hex()}.safetensors"

    def files(self) -> set[str]:
        return {path.name for path in self.folder.rglob("*") if path.is_file()}

    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*.safetensors"))

    def close(self) -> None:
        for tier in self._tiers:
            tier.close(SECONDS)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "cache")
    yield house
    house.close()
    logging.getLogger("weft.memory").removeHandler(house)


def store(tier: DiskTier, entry: Entry) -> bool:
    return tier.store(entry)


def num_entries(tier: DiskTier) -> int:
    """How many entries it knows on disk."""
    return len(tier._index)


def load(tier: DiskTier, entries: Iterable[Entry]) -> list[object]:
    return [contents(found) for found in tier.load([entry.key for entry in entries]).result(SECONDS)]


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


# --- what was stored comes back ---


def test_what_was_stored_comes_back_after_a_restart(house: House) -> None:
    first = make_entry("first")
    second = make_entry("second", first.key, checkpoint=False)
    house.keep(first, second)

    tier = house.open()

    assert num_entries(tier) == 2
    assert tier.has(first.key)
    assert tier.has_checkpoint(first.key)
    assert tier.has(second.key)
    assert not tier.has_checkpoint(second.key)
    assert not tier.has(key_of("third"))
    assert load(tier, [first, second]) == [contents(first), contents(second)]
    assert tier.num_loaded == 2
    assert tier.held_bytes == house.nbytes()
    assert house.reports == []


def test_what_is_not_written_yet_comes_from_the_queue(house: House) -> None:
    tier, entry = house.make(), make_entry("queued")  # not opened: nobody writes

    assert store(tier, entry)

    assert tier.has(entry.key)
    assert tier.has_checkpoint(entry.key)
    assert load(tier, [entry]) == [contents(entry)]
    assert num_entries(tier) == 0


def test_the_sizes_of_what_may_follow_are_known(house: House) -> None:
    tier = house.make()
    for tokens in ((7,), (1, 2, 3), (4, 5, 6)):
        tier.store(Entry(key_of(tokens), ROOT, tokens, packed(tokens), None))
    assert tier.sizes_after(ROOT) == {1, 3}
    tier.open()
    tier.close(SECONDS)

    again = house.open()

    assert again.sizes_after(ROOT) == {1, 3}
    assert again.sizes_after(key_of("another")) == set()


def test_a_load_ends_before_the_first_that_is_missing(house: House) -> None:
    entries = [make_entry(number) for number in range(4)]
    house.keep(entries[0], entries[1], entries[3])

    assert load(house.open(), entries) == [contents(entries[0]), contents(entries[1])]


def test_a_checkpoint_that_comes_later_is_added_and_stays(house: House) -> None:
    bare, full = make_entry("one", checkpoint=False), make_entry("one")
    house.keep(bare)
    tier = house.open()

    assert store(tier, full)
    assert tier.has_checkpoint(full.key)
    until(lambda: tier.num_written == 1)
    assert store(tier, bare)
    tier.close(SECONDS)

    assert tier.num_written == 1
    assert tier.held_bytes == house.nbytes()
    assert load(house.open(), [full]) == [contents(full)]


def test_a_checkpoint_that_comes_while_the_chunk_is_queued_is_written_with_it(house: House) -> None:
    tier = house.make()
    store(tier, make_entry("one", checkpoint=False))
    store(tier, make_entry("one"))
    tier.open()
    tier.close(SECONDS)

    assert tier.num_written == 1
    assert load(house.open(), [make_entry("one")]) == [contents(make_entry("one"))]


def test_a_file_is_one_that_safetensors_reads(house: House) -> None:
    entry = make_entry("one")
    house.keep(entry)

    with safe_open(house.file(entry), framework="np") as file:
        names = set(file.keys())
        keys = file.get_tensor("block.0.keys")
        scalar = file.get_tensor("checkpoint.1.cache.0")
        metadata = file.metadata()

    assert names == {f"{part}.{plane.name}" for part in ("block", "checkpoint") for plane in entry.block.planes}
    assert keys.dtype == np.float32
    assert keys.tobytes() == entry.block.planes[0].data
    assert scalar.shape == ()
    assert metadata["identity"] == IDENTITY
    assert metadata["key"] == entry.key.hex()
    assert json.loads(metadata["tokens"]) == list(entry.tokens)
    assert metadata["block"] == entry.block.description


def test_prompts_are_for_their_owner_only(house: House) -> None:
    entry = make_entry("one")
    house.keep(entry)

    for folder in (house.folder, house.folder / IDENTITY):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(house.file(entry).stat().st_mode) == 0o600


# --- damage ---


@settings(max_examples=400)
@given(data=st.data(), mask=st.integers(1, 255))
def test_a_flip_anywhere_in_a_file_is_seen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, mask: int) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    pieces = b"".join(disk_files.encode_entry(make_entry("one"), IDENTITY))
    offset = data.draw(st.integers(0, len(pieces) - 1) | st.integers(0, 1600))  # the header more often
    path.write_bytes(pieces)
    assert contents(disk_files.read_entry(path, IDENTITY, key_of("one"))) == contents(make_entry("one"))

    flip(path, offset, mask)

    with pytest.raises(Damaged):
        disk_files.read_entry(path, IDENTITY, key_of("one"))
    with suppress(Damaged, Foreign):  # it may not be seen here, but nothing else may happen
        disk_files.read_metadata(path, IDENTITY, key_of("one"))


@pytest.mark.parametrize("seed", range(5))
def test_of_ten_flipped_files_none_is_used_and_all_are_reported_once(house: House, seed: int) -> None:
    random_numbers = random.Random(seed)
    entries = [make_entry(number) for number in range(14)]
    house.keep(*entries)
    damaged = entries[:10]
    for place, entry in enumerate(damaged):
        path = house.file(entry)
        size = path.stat().st_size
        offset = (0, 7, random_numbers.randrange(8, 600), size - 1)[place] if place < 4 else random_numbers.randrange(size)
        flip(path, offset, random_numbers.randrange(1, 256))

    tier = house.open()
    until(lambda: len(house.reports) >= 10)  # nobody asks for them

    assert sorted(path for path, _ in house.reports) == sorted(map(house.file, damaged))
    assert all(reason for _, reason in house.reports)
    assert tier.num_damaged + tier.num_foreign == 10
    assert not any(tier.has(entry.key) or load(tier, [entry]) for entry in damaged)
    assert load(tier, entries[10:]) == [contents(entry) for entry in entries[10:]]
    assert num_entries(tier) == 4


def test_ten_flipped_files_that_are_asked_for_at_once_are_not_used(house: House) -> None:
    entries = [make_entry(number, nbytes=50_000) for number in range(10)]
    house.keep(*entries)
    for number, entry in enumerate(entries):
        flip(house.file(entry), -1 - 1000 * number)

    tier = house.open()
    loads = [tier.load([entry.key]) for entry in entries]

    assert [future.result(SECONDS) for future in loads] == [[]] * 10
    until(lambda: len(house.reports) >= 10)
    assert sorted(path for path, _ in house.reports) == sorted(map(house.file, entries))
    assert tier.num_damaged == 10


def test_a_damaged_file_is_gone_and_not_reported_at_the_next_start(house: House) -> None:
    entry = make_entry("one")
    house.keep(entry)
    flip(house.file(entry), -1)
    house.open()
    until(lambda: bool(house.reports))
    house.close()

    tier = house.open()
    tier.close(SECONDS)

    assert not house.file(entry).exists()
    assert len(house.reports) == 1
    assert tier.num_damaged == 0


def test_damage_after_the_start_is_seen_at_the_load(house: House) -> None:
    entries = [make_entry(number) for number in range(3)]
    tier = house.open()
    for entry in entries:
        store(tier, entry)
    until(lambda: tier.num_written == 3)
    flip(house.file(entries[1]), 3000)

    assert load(tier, entries) == [contents(entries[0])]
    assert [path for path, _ in house.reports] == [house.file(entries[1])]
    assert not tier.has(entries[1].key)
    assert store(tier, entries[1])  # it may be written again
    until(lambda: tier.num_written == 4)
    assert load(tier, entries) == [contents(entry) for entry in entries]


def huge_header(data: bytes) -> bytes:
    return (1 << 62).to_bytes(8, "little") + data[8:]


def long_header(data: bytes) -> bytes:
    return (len(data) - 7).to_bytes(8, "little") + data[8:]


def other_header(_: bytes) -> bytes:
    text = b'{"__metadata__":{"format":"pt"}}'
    return len(text).to_bytes(8, "little") + text


WRECKS: list[Callable[[bytes], bytes]] = [
    lambda _: b"",
    lambda data: data[:5],
    lambda data: data[:8],
    lambda data: data[:300],
    lambda data: data[:-1],
    lambda data: data + b"\0",
    lambda data: b"\0" * len(data),
    lambda data: data[8:],
    lambda _: b"this is no safetensors file, but a letter" * 9,
    lambda _: (9).to_bytes(8, "little") + b"[1,2,3,4]",
    lambda data: data[:8] + b"\xff" + data[9:],
    huge_header,
    long_header,
    other_header,
]


@pytest.mark.parametrize("wreck", WRECKS)
def test_what_is_no_whole_file_is_reported_and_deleted(house: House, wreck: Callable[[bytes], bytes]) -> None:
    entry = make_entry("one")
    house.keep(entry)
    path = house.file(entry)
    path.write_bytes(wreck(path.read_bytes()))

    tier = house.open()
    until(lambda: bool(house.reports))

    assert [reported for reported, _ in house.reports] == [path]
    assert tier.num_damaged == 1
    assert load(tier, [entry]) == []
    assert not path.exists()


def test_a_file_under_the_name_of_another_key_is_foreign(house: House) -> None:
    entry, other = make_entry("one"), make_entry("other")
    house.keep(entry)
    house.file(entry).rename(house.file(other))

    tier = house.open()

    assert [(path, "its key is" in reason) for path, reason in house.reports] == [(house.file(other), True)]
    assert (tier.num_foreign, tier.num_damaged, num_entries(tier)) == (1, 0, 0)
    assert load(tier, [other]) == []
    assert house.file(other).exists()


def test_a_file_of_another_model_is_foreign(house: House) -> None:
    entry = make_entry("one")
    house.keep(entry, identity=OTHER)
    (house.folder / IDENTITY).mkdir()
    shutil.copy(house.file(entry, OTHER), house.file(entry))

    tier = house.open()

    assert [(path, "its identity is" in reason) for path, reason in house.reports] == [(house.file(entry), True)]
    assert (tier.num_foreign, num_entries(tier)) == (1, 0)
    assert load(tier, [entry]) == []
    assert load(house.open(identity=OTHER), [entry]) == [contents(entry)]


def test_a_file_that_turns_into_another_is_not_loaded(house: House) -> None:
    entry, other = make_entry("one"), make_entry("other")
    tier = house.open()
    store(tier, entry)
    store(tier, other)
    until(lambda: tier.num_written == 2)
    shutil.copy(house.file(other), house.file(entry))

    assert load(tier, [entry]) == []
    assert tier.num_foreign == 1


def test_parents_in_a_circle_do_no_harm(house: House) -> None:
    one, two = make_entry("one", key_of("two")), make_entry("two", key_of("one"))
    house.keep(one, two)
    tier = house.open()

    assert load(tier, [one, two]) == [contents(one), contents(two)]
    tier.forget([one.key])
    tier.close(SECONDS)
    assert house.files() == set()


# --- the folder ---


def age(house: House, *entries: Entry, identity: str = IDENTITY) -> None:
    """As if these had been used long ago, the first the longest."""
    for place, entry in enumerate(entries):
        os.utime(house.file(entry, identity), (1000 + place, 1000 + place))


def size_of(entry: Entry) -> int:
    return sum(map(len, disk_files.encode_entry(entry, IDENTITY)))


def test_the_longest_unused_go_first(house: House) -> None:
    entries = [make_entry(number, nbytes=40_000) for number in range(8)]
    house.keep(*entries)
    age(house, *entries)
    tier = house.open(budget=int(8.9 * size_of(entries[0])))
    assert num_entries(tier) == 8

    assert load(tier, entries[:2]) != []  # the oldest two are used
    store(tier, make_entry("new", nbytes=40_000))
    tier.close(SECONDS)

    assert [tier.has(entry.key) for entry in entries] == [True, True, False, *[True] * 5]
    assert tier.has(key_of("new"))
    assert tier.num_evicted == 1
    assert tier.held_bytes == house.nbytes()


def test_the_budget_is_kept_while_writing(house: House) -> None:
    entries = [make_entry(number, nbytes=20_000) for number in range(60)]
    budget = 10 * size_of(entries[-1])
    tier = house.open(budget)
    for count, entry in enumerate(entries, 1):
        store(tier, entry)
        until(lambda count=count: tier.num_written == count)  # type: ignore[misc]
        assert house.nbytes() <= budget
        assert tier.held_bytes == house.nbytes()
    tier.close(SECONDS)

    assert house.nbytes() > budget * 0.7
    assert [tier.has(entry.key) for entry in entries[-8:]] == [True] * 8
    assert num_entries(tier) == len(house.files())


def test_a_smaller_budget_is_kept_from_the_start_on(house: House) -> None:
    entries = [make_entry(number, nbytes=40_000) for number in range(8)]
    house.keep(*entries)
    age(house, *entries)

    tier = house.open(budget=3 * size_of(entries[0]) + 1000)

    assert house.nbytes() <= 3 * size_of(entries[0]) + 1000
    assert [tier.has(entry.key) for entry in entries] == [*[False] * 6, True, True]
    assert num_entries(tier) == 2


def test_files_of_older_versions_count_and_go_too(house: House) -> None:
    old, mine = make_entry("old", nbytes=40_000), make_entry("mine", nbytes=40_000)
    house.keep(old, identity=OTHER)
    age(house, old, identity=OTHER)
    house.keep(mine)
    tier = house.open(budget=int(2.5 * size_of(mine)))
    assert tier.held_bytes == house.nbytes() == size_of(mine) + size_of(old)

    store(tier, make_entry("new", nbytes=40_000))
    tier.close(SECONDS)

    assert not house.file(old, OTHER).exists()
    assert house.file(mine).exists()
    assert house.reports == []


def test_files_that_are_not_named_as_ours_are_never_deleted(house: House) -> None:
    strangers = ["notes.txt", f"{IDENTITY}/notes.txt", f"{IDENTITY}/model.safetensors", f"models/{'a' * 32}.safetensors"]
    for name in strangers:
        (house.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (house.folder / name).write_bytes(bytes(100_000))
    (house.folder / IDENTITY / f"{'b' * 32}.safetensors").symlink_to(house.folder / "notes.txt")

    tier = house.open(budget=10_000)
    store(tier, make_entry("one"))
    tier.clear()
    tier.close(SECONDS)

    assert all((house.folder / name).stat().st_size == 100_000 for name in strangers)
    assert house.reports == []


def test_a_trunk_outlives_its_branches(house: House) -> None:
    """It is written once and then used from memory; what is stored on top of it says that it is still needed."""
    trunk = make_entry("trunk", nbytes=40_000)
    stem = make_entry("stem", trunk.key, nbytes=40_000)
    budget = 6 * size_of(trunk) + 1000
    tier = house.open(budget)
    for count, entry in enumerate([trunk, stem, *(make_entry(number, stem.key, nbytes=40_000) for number in range(20))], 1):
        store(tier, entry)
        until(lambda count=count: tier.num_written == count)  # type: ignore[misc]
    tier.close(SECONDS)

    assert tier.num_evicted >= 16
    assert tier.has(trunk.key)
    assert tier.has(stem.key)


def test_of_one_path_the_end_goes_first(house: House) -> None:
    path: list[Entry] = []
    for number in range(5):
        path.append(make_entry(number, path[-1].key if path else ROOT, nbytes=40_000))
    house.keep(*path)

    tier = house.open(budget=3 * size_of(path[0]) + 1000)

    assert [tier.has(entry.key) for entry in path] == [True, True, False, False, False]


def test_room_is_not_made_among_the_ancestors_of_what_is_written(house: House) -> None:
    trunk, *others = [make_entry(number, nbytes=40_000) for number in range(6)]
    house.keep(trunk, *others)
    age(house, trunk, *others)
    tier = house.open(budget=6 * size_of(trunk) + 1000)

    store(tier, make_entry("branch", trunk.key, nbytes=40_000))
    tier.close(SECONDS)

    assert tier.has(key_of("branch"))
    assert tier.has(trunk.key)
    assert not tier.has(others[0].key)


def test_an_entry_larger_than_the_budget_is_skipped_and_drives_nobody_out(house: House) -> None:
    tier = house.open(budget=20_000)
    store(tier, make_entry("small"))
    store(tier, make_entry("large", nbytes=30_000))
    tier.close(SECONDS)

    assert tier.num_skipped == 1
    assert tier.has(key_of("small"))
    assert not tier.has(key_of("large"))


def test_a_full_queue_refuses(house: House) -> None:
    tier = house.make()  # not opened: nobody writes
    third = Packed("[]", (StoredArray("0", "U8", (QUEUE_BYTES // 3 + 1,), bytes(QUEUE_BYTES // 3 + 1)),))

    taken = [tier.store(Entry(key_of(number), ROOT, (1,), third, None)) for number in range(4)]

    assert taken == [True, True, False, False]
    assert tier.num_skipped == 2
    assert not tier.has(key_of(2))


def test_one_entry_larger_than_the_queue_is_taken_alone(house: House) -> None:
    tier = house.make()
    large = Packed("[]", (StoredArray("0", "U8", (QUEUE_BYTES + 1,), bytes(QUEUE_BYTES + 1)),))

    assert tier.store(Entry(key_of(0), ROOT, (1,), large, None))
    assert not tier.store(Entry(key_of(1), ROOT, (1,), large, None))


def test_after_a_clear_nothing_is_left(house: House) -> None:
    entries = [make_entry(number) for number in range(5)]
    house.keep(*entries[:3])
    house.keep(make_entry("theirs"), identity=OTHER)
    tier = house.make()
    for entry in entries[3:]:
        store(tier, entry)  # still in the queue
    tier.open()
    house.keep(make_entry("of a neighbour"))

    tier.clear()

    assert not any(tier.has(entry.key) for entry in entries)
    assert load(tier, entries) == []
    tier.close(SECONDS)
    assert house.files() == {house.file(make_entry("theirs"), OTHER).name}
    assert tier.held_bytes == house.nbytes()
    assert num_entries(house.open()) == 0


def test_what_is_stored_after_a_clear_stays(house: House) -> None:
    tier = house.open()
    for number in range(30):
        store(tier, make_entry(number, nbytes=100_000))
    tier.clear()
    store(tier, make_entry(3))
    tier.close(SECONDS)

    assert house.files() == {house.file(make_entry(3)).name}
    assert load(house.open(), [make_entry(3)]) == [contents(make_entry(3))]


class Slow(tuple[StoredArray, ...]):
    """Planes at which the writer stops until it may go on."""

    def __new__(cls, planes: Iterable[StoredArray]) -> Slow:
        slow = super().__new__(cls, planes)
        slow.reached, slow.may_go_on = threading.Event(), threading.Event()
        return slow

    reached: threading.Event
    may_go_on: threading.Event

    def __iter__(self) -> Iterator[StoredArray]:
        if threading.current_thread().name.startswith("weft-disk-write"):
            self.reached.set()
            assert self.may_go_on.wait(SECONDS)
        return super().__iter__()


@pytest.fixture
def writing(house: House) -> Iterator[tuple[DiskTier, Entry, threading.Event]]:
    """A tier in the midst of writing an entry without a checkpoint; it goes on when the event is set."""
    entry = make_entry("slow", checkpoint=False)
    slow = Slow(entry.block.planes)
    tier = house.open()
    tier.store(Entry(entry.key, entry.parent, entry.tokens, Packed(entry.block.description, slow), None))
    assert slow.reached.wait(SECONDS)
    yield tier, entry, slow.may_go_on
    slow.may_go_on.set()


@pytest.mark.parametrize("forget", [lambda tier, _: tier.clear(), lambda tier, key: tier.forget([key])])
def test_what_is_forgotten_while_it_is_written_is_gone(
    house: House, writing: tuple[DiskTier, Entry, threading.Event], forget: Callable[[DiskTier, bytes], None]
) -> None:
    tier, entry, may_go_on = writing

    forget(tier, entry.key)
    may_go_on.set()
    tier.close(SECONDS)

    assert tier.num_written == 1
    assert not tier.has(entry.key)
    assert house.files() == set()


def test_a_checkpoint_that_comes_while_the_chunk_is_written_is_written_after_it(
    house: House, writing: tuple[DiskTier, Entry, threading.Event]
) -> None:
    tier, _, may_go_on = writing

    store(tier, make_entry("slow"))
    may_go_on.set()
    tier.close(SECONDS)

    assert tier.num_written == 2
    assert load(house.open(), [make_entry("slow")]) == [contents(make_entry("slow"))]


def test_what_is_forgotten_takes_along_what_was_computed_on_top_of_it(house: House) -> None:
    trunk, side = make_entry("trunk"), make_entry("side")
    branch = make_entry("branch", trunk.key)
    twig = make_entry("twig", branch.key)
    house.keep(trunk, side, branch)
    tier = house.make()
    store(tier, twig)  # still in the queue
    tier.open()

    tier.forget([trunk.key])

    assert [tier.has(entry.key) for entry in (trunk, branch, twig, side)] == [False, False, False, True]
    tier.close(SECONDS)
    assert house.files() == {house.file(side).name}


def test_a_load_that_was_asked_for_before_a_clear_gives_nothing(house: House) -> None:
    entries = [make_entry(number, nbytes=200_000) for number in range(20)]
    house.keep(*entries)
    tier = house.open()

    blocked, go_on = threading.Event(), threading.Event()
    tier._loader.submit(lambda: (blocked.set(), go_on.wait(SECONDS)))  # the load waits behind this
    assert blocked.wait(SECONDS)
    future = tier.load([entry.key for entry in entries])
    tier.clear()
    go_on.set()

    assert future.result(SECONDS) == []
    assert house.reports == []


def test_a_load_that_has_read_what_is_forgotten_meanwhile_gives_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    trunk, branch = make_entry(1), make_entry(2)
    house.keep(trunk, branch)
    tier = house.open()
    until(lambda: not tier._unverified)
    read_entry, has_read, go_on = disk_files.read_entry, threading.Event(), threading.Event()

    def slowly(path: Path, identity: str, key: bytes) -> Entry:
        entry = read_entry(path, identity, key)
        has_read.set()
        assert go_on.wait(SECONDS)
        return entry

    monkeypatch.setattr(disk_files, "read_entry", slowly)
    future = tier.load([trunk.key])
    assert has_read.wait(SECONDS)
    tier.forget([trunk.key])
    go_on.set()

    assert future.result(SECONDS) == []
    assert load(tier, [branch]) == [contents(branch)]


def test_a_file_that_vanished_is_a_miss(house: House) -> None:
    entries = [make_entry(number) for number in range(3)]
    tier = house.open()
    for entry in entries:
        store(tier, entry)
    until(lambda: tier.num_written == 3)
    house.file(entries[1]).unlink()

    assert load(tier, entries) == [contents(entries[0])]
    assert not tier.has(entries[1].key)
    shutil.rmtree(house.folder)
    assert load(tier, entries) == []
    assert (house.reports, tier.num_damaged) == ([], 0)
    store(tier, entries[1])  # the folder is made again
    tier.close(SECONDS)
    assert load(house.open(), [entries[1]]) == [contents(entries[1])]


def test_a_folder_that_can_not_be_written_costs_only_the_entries(house: House, caplog: pytest.LogCaptureFixture) -> None:
    house.folder.write_text("a file where the folder should be")
    tier = house.open()

    with caplog.at_level(logging.WARNING, "weft.memory"):
        for number in range(5):
            assert store(tier, make_entry(number))
        tier.close(SECONDS)

    assert tier.num_skipped == 5
    assert not any(tier.has(key_of(number)) for number in range(5))
    assert len(caplog.records) == 1  # said once in a while, not five times
    assert str(house.folder) in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_still_read(house: House) -> None:
    entry = make_entry("one")
    house.keep(entry)
    (house.folder / IDENTITY).chmod(0o500)
    tier = house.open()

    assert load(tier, [entry]) == [contents(entry)]
    store(tier, make_entry("two"))
    tier.close(SECONDS)
    (house.folder / IDENTITY).chmod(0o700)
    assert tier.num_skipped == 1


def test_a_disk_that_fills_up_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / f"{key_of('one').hex()}.safetensors"

    def pieces() -> Iterator[bytes]:
        yield bytes(100_000)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        disk_files.write_file(path, pieces())

    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_the_dead_are_removed_and_of_the_living_kept(house: House) -> None:
    house.keep(make_entry("one"))
    dead, living = (house.folder / identity / f"{'a' * 32}.x1_y2.tmp" for identity in (IDENTITY, OTHER))
    living.parent.mkdir()
    dead.write_bytes(b"half a file")
    living.write_bytes(b"half a file")

    with living.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        house.open()
        assert not dead.exists()
        assert living.exists()
    house.open()
    assert not living.exists()


def test_a_writer_holds_the_lock_until_its_file_has_its_name(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, IDENTITY, PLENTY)
    folder.make()
    path = folder.file(key_of("one"))
    seen: list[Path] = []

    def pieces() -> Iterator[bytes]:
        seen.extend(path.parent.iterdir())
        folder.sweep()
        yield b"whole"

    disk_files.write_file(path, pieces())

    assert [temporary.suffix for temporary in seen] == [".tmp"]
    assert path.read_bytes() == b"whole"


def test_two_engines_hammer_one_folder(house: House) -> None:
    """The same identity twice, a third beside them, a budget that is too small, clears in between."""
    entries = [make_entry(number, key_of(number // 2), nbytes=5_000) for number in range(24)]
    wanted = {entry.key: contents(entry) for entry in entries}
    budget = 12 * size_of(entries[0])
    tiers = [house.open(budget), house.open(budget), house.open(budget, OTHER)]
    wrong: list[object] = []
    num_loaded = [0] * 6

    def hammer(number: int) -> None:
        tier, numbers = tiers[number // 2], random.Random(number)
        for step in range(120):
            chosen = numbers.sample(entries, 4)
            for entry in chosen[:2]:
                store(tier, entry)
            for found in tier.load([entry.key for entry in chosen[::-1]]).result(SECONDS):
                num_loaded[number] += 1
                if contents(found) != wanted[found.key]:
                    wrong.append(found.key)
            if step % 50 == 49:
                tier.clear() if number % 2 else tier.forget([chosen[0].key])

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    house.close()

    assert wrong == []
    assert house.reports == []
    assert all(num_loaded)
    assert sum(tier.num_evicted for tier in tiers) > 0
    last = house.open(budget)
    assert house.nbytes() <= budget
    assert all(name.endswith(".safetensors") for name in house.files())
    assert all(load(last, [entry]) in ([], [contents(entry)]) for entry in entries)
    assert last.num_damaged == 0


def test_a_closed_tier_takes_nothing_more(house: House) -> None:
    tier = house.open()
    tier.close(SECONDS)

    assert not store(tier, make_entry("late"))
    assert house.files() == set()


def test_closing_waits_only_so_long(house: House) -> None:
    tier = house.make()
    store(tier, make_entry("one"))

    tier.close(0.0)  # never opened: there is nobody to wait for

    assert house.files() == set()


# --- the identity ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(bytes(200_000))
    (folder / "model-2.safetensors").write_bytes(b"weights")
    return folder


FACTS = ("weft 1", "float32")


def test_an_identity_is_32_hex_digits_and_stays(model: Path, tmp_path: Path) -> None:
    first = identity_of(model, FACTS, tmp_path / "remembered.json")

    assert len(bytes.fromhex(first)) == 16
    assert identity_of(model, FACTS, tmp_path / "remembered.json") == first
    assert identity_of(model, FACTS, tmp_path / "elsewhere.json") == first


def swap_names(folder: Path) -> None:
    (folder / "model-1.safetensors").rename(folder / "x")
    (folder / "model-2.safetensors").rename(folder / "model-1.safetensors")
    (folder / "x").rename(folder / "model-2.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text("{ }"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: flip(folder / "model-1.safetensors", 100_000),
        lambda folder: (folder / "model-2.safetensors").unlink(),
        lambda folder: (folder / "more.gguf").write_bytes(b""),
        swap_names,
    ],
)
def test_another_model_has_another_identity(model: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    before = identity_of(model, FACTS, tmp_path / "remembered.json")
    os.utime(model / "model-1.safetensors", ns=(1, 1))
    identity_of(model, FACTS, tmp_path / "remembered.json")

    change(model)

    assert identity_of(model, FACTS, tmp_path / "remembered.json") != before


@pytest.mark.parametrize("facts", [(), ("weft 1",), ("weft 2", "float32"), ("weft 1float32",), ("weft 1", "float32", "")])
def test_other_facts_give_another_identity(model: Path, tmp_path: Path, facts: tuple[str, ...]) -> None:
    remembered = tmp_path / "remembered.json"

    assert identity_of(model, facts, remembered) != identity_of(model, FACTS, remembered)


def test_weights_are_read_once(model: Path, tmp_path: Path) -> None:
    remembered, weights = tmp_path / "remembered.json", model / "model-1.safetensors"
    before = identity_of(model, FACTS, remembered)
    found = weights.stat()
    weights.write_bytes(b"\1" * 200_000)
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))  # only reading them would tell

    assert identity_of(model, FACTS, remembered) == before
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    assert identity_of(model, FACTS, remembered) != before


def test_links_to_the_same_weights_share_what_is_remembered(model: Path, tmp_path: Path) -> None:
    remembered = tmp_path / "remembered.json"
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)

    assert identity_of(linked, FACTS, remembered) == identity_of(model, FACTS, remembered)
    assert sorted(json.loads(remembered.read_text())["files"]) == [str(model / f"model-{n}.safetensors") for n in (1, 2)]


def wrong_digest(text: str) -> str:
    memory = json.loads(text)
    next(iter(memory["files"].values()))["digest"] = "0" * 64
    return json.dumps(memory)


@pytest.mark.parametrize(
    "damage", [lambda _: "", lambda text: text[:-5], lambda _: "[1]", lambda _: '{"files":{"a":1}}', wrong_digest]
)
def test_damaged_memories_are_not_believed(model: Path, tmp_path: Path, damage: Callable[[str], str]) -> None:
    remembered = tmp_path / "remembered.json"
    before = identity_of(model, FACTS, remembered)
    remembered.write_text(damage(remembered.read_text()))

    assert identity_of(model, FACTS, remembered) == before


def test_an_identity_needs_no_place_to_remember(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    nowhere = identity_of(model, FACTS, tmp_path / "file" / "remembered.json")

    assert nowhere == identity_of(model, FACTS, tmp_path / "remembered.json")
