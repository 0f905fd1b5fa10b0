"""Layer states become host data and come back bit for bit, for every kind of cache there is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from driver import adapter_for, random_prompts
from weft.errors import UnsupportedModel
from weft.memory.disk_files import Damaged, Entry, Packed, StoredArray, encode_entry, read_entry, write_file
from weft.model.adapter import Adapter
from weft.model.saved_state import NAMES, TYPES, SavedState, pack, restore, save_block, save_checkpoint, unpack
from zoo import VOCABULARY

# Attention beside a delta rule, composite layers, windows, recurrent alone, mixed, chunked, windows, convolutions, dense.
ARCHITECTURES = ["qwen3_5", "falcon_h1", "gemma3", "mamba2", "nemotron_h", "llama4", "gpt_oss", "lfm2", "llama"]
PROMPT, MORE = random_prompts(VOCABULARY, (37, 9), seed=3)


@pytest.fixture(scope="module")
def build(checkpoint: Callable[[str], Path]) -> Callable[[str], Adapter]:
    return functools.cache(lambda name: adapter_for(checkpoint(name), way="alone"))


def saved_states(adapter: Adapter, dtype: mx.Dtype | None = None) -> tuple[SavedState, SavedState]:
    """The block and the checkpoint of a prompt, in another type if told."""
    caches = adapter.new_caches(len(PROMPT))
    adapter.prefill(PROMPT, caches)[0].finish()
    block, checkpoint = save_block(caches, 0, len(PROMPT)), save_checkpoint(caches)
    if dtype is not None:
        block = SavedState([None if pair is None else tuple(array.astype(dtype) for array in pair) for pair in block.layers])
    return block, checkpoint


def through_a_file(packed: Packed, folder: Path) -> Packed:
    """The same, written and read again."""
    path = folder / "entry.safetensors"
    write_file(path, encode_entry(Entry(b"key", b"parent", (1, 2), packed, packed), "identity"))
    found = read_entry(path, "identity", b"key")
    assert found.checkpoint == found.block
    return found.block


def bits(array: mx.array) -> bytes:
    return b"" if array.size == 0 else memoryview(mx.contiguous(array)).cast("B").tobytes()  # type: ignore[arg-type]


def same(found: Any, wanted: Any) -> bool:
    """Equal in class, attributes, shapes, types and bits."""
    if type(found) is not type(wanted):
        return False
    match wanted:
        case mx.array():
            return found.dtype == wanted.dtype and found.shape == wanted.shape and bits(found) == bits(wanted)
        case list() | tuple():
            return len(found) == len(wanted) and all(map(same, found, wanted))
        case None | bool() | int() | float() | str():
            return repr(found) == repr(wanted)
        case _:
            return vars(found).keys() == vars(wanted).keys() and all(
                same(vars(found)[name], vars(wanted)[name]) for name in vars(wanted)
            )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_come_back_bit_for_bit(build: Callable[[str], Adapter], tmp_path: Path, name: str) -> None:
    adapter = build(name)
    like = adapter.new_caches(1)
    for saved in saved_states(adapter):
        back = unpack(through_a_file(pack(saved), tmp_path), like)

        assert same(back.layers, saved.layers)
        assert back.nbytes == saved.nbytes


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama4"])  # its chunks are not restored
def test_a_row_goes_on_from_them_with_the_same_logits(build: Callable[[str], Adapter], tmp_path: Path, name: str) -> None:
    adapter = build(name)
    assert adapter.can_be_saved
    block, checkpoint = saved_states(adapter)
    like = adapter.new_caches(1)
    back = [unpack(through_a_file(pack(saved), tmp_path), like) for saved in (block, checkpoint)]

    logits = []
    for blocks, states in (([block], checkpoint), ([back[0]], back[1])):
        caches = restore(adapter.new_caches(len(PROMPT) + len(MORE)), blocks, states)
        logits.append(bits(adapter.prefill(MORE, caches)[1]))
    assert logits[0] == logits[1]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_blocks_of_half_width_come_back(build: Callable[[str], Adapter], tmp_path: Path, dtype: mx.Dtype) -> None:
    block, _ = saved_states(build("llama"), dtype)

    packed = pack(block)

    assert {plane.dtype for plane in packed.planes} == {NAMES[dtype]}
    assert same(unpack(through_a_file(packed, tmp_path), build("llama").new_caches(1)).layers, block.layers)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_every_type_and_shape_comes_back(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    with mx.stream(mx.cpu):
        array = mx.arange(int(np.prod(shape))).reshape(shape).astype(TYPES[name])
        cache = ArraysCache(1)
        cache[0] = array
        back = unpack(through_a_file(pack(SavedState([cache])), tmp_path), [ArraysCache(1)])

        assert same(back.layers, [cache])


@settings(max_examples=50)
@given(numbers=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64), name=st.sampled_from(["BF16", "F16", "U16"]))
def test_any_sixteen_bits_come_back(numbers: list[int], name: str) -> None:
    """Payloads of NaN too, which arithmetic would not keep."""
    array = mx.array(numbers, mx.uint16).view(TYPES[name]).reshape(1, 1, -1, 1)

    (back,) = unpack(pack(SavedState([(array, array)])), [KVCache()]).layers

    assert np.array(back[0].view(mx.uint16)).flatten().tolist() == numbers


def test_an_array_that_is_not_contiguous_comes_back() -> None:
    array = mx.arange(24).reshape(1, 2, 3, 4).transpose(0, 3, 1, 2)[:, 1:]
    mx.eval(array)

    (back,) = unpack(pack(SavedState([(array, array)])), [KVCache()]).layers

    assert same(back, (array, array))


def test_attributes_of_all_plain_kinds_come_back() -> None:
    cache = RotatingKVCache(max_size=8)
    cache.extra = [None, True, 3, -0.5, float("inf"), "text", (1, [mx.array(2)]), []]

    (back,) = unpack(pack(SavedState([cache])), [RotatingKVCache(max_size=9)]).layers

    assert same(back, cache)


def test_coming_back_leaves_the_pattern_as_it_was() -> None:
    cache, pattern = ArraysCache(2), ArraysCache(2)
    cache[0] = mx.ones((1, 3))

    unpack(pack(SavedState([cache])), [pattern])

    assert pattern.cache == [None, None]


def test_nothing_of_the_pattern_but_its_class_comes_back() -> None:
    pattern = ArraysCache(2)
    pattern.step = 512

    (back,) = unpack(pack(SavedState([ArraysCache(1)])), [pattern]).layers

    assert same(back, ArraysCache(1))


def test_the_device_is_read_without_a_copy() -> None:
    array = mx.arange(1000, dtype=mx.float32)
    mx.eval(array)

    first, second = (np.frombuffer(pack(SavedState([(array,)])).planes[0].data, np.uint8) for _ in range(2))

    assert first.__array_interface__["data"][0] == second.__array_interface__["data"][0]


def test_what_was_packed_does_not_change_when_the_array_does() -> None:
    array = mx.zeros((1000,), mx.int32)
    mx.eval(array)
    packed = pack(SavedState([(array,)]))

    for _ in range(3):
        array[10:20] = 7
        mx.eval(array)
    del array
    clutter = [mx.full((1000,), number, mx.int32) for number in range(20)]
    mx.eval(clutter)

    assert bytes(packed.planes[0].data) == bytes(4000)


def test_another_thread_may_read_it_and_let_it_go() -> None:
    wrong = []

    def use(packed: list[Packed], number: int) -> None:
        one = packed.pop()
        if bytes(one.planes[0].data) != np.full(5000, number, np.int32).tobytes():
            wrong.append(number)

    for number in range(200):
        waiting = [pack(SavedState([(mx.full((5000,), number, mx.int32),)]))]
        thread = threading.Thread(target=use, args=(waiting, number))
        thread.start()
        mx.eval(mx.full((5000,), -1, mx.int32) + 1)
        thread.join()

    assert wrong == []


@pytest.mark.parametrize("value", [{"a": 1}, object(), np.float32(1), mx.float32, {1, 2}, b"bytes"])
def test_a_state_of_another_kind_is_refused_by_name(value: object) -> None:
    cache = ArraysCache(1)
    cache.strange = value

    with pytest.raises(UnsupportedModel, match=f"0.strange is a {type(value).__name__}"):
        pack(SavedState([cache]))


def test_a_state_of_another_class_is_not_put_back() -> None:
    packed = pack(SavedState([RotatingKVCache(max_size=8)]))

    class Rotating(RotatingKVCache):  # type: ignore[misc]
        pass

    for pattern in (KVCache(), ChunkedKVCache(8), Rotating(max_size=8)):
        with pytest.raises(Damaged, match="RotatingKVCache where the model has"):
            unpack(packed, [pattern])


def test_states_of_another_number_of_layers_are_not_put_back() -> None:
    with pytest.raises(Damaged, match="1 layers where the model has 2"):
        unpack(pack(SavedState([None])), [KVCache(), KVCache()])


@pytest.mark.parametrize(
    "plane",
    [
        StoredArray("0.0", "F32", (2,), bytes(7)),
        StoredArray("0.0", "F32", (3,), bytes(8)),
        StoredArray("0.0", "F99", (2,), bytes(8)),
    ],
)
def test_bytes_that_are_no_array_are_not_put_back(plane: StoredArray) -> None:
    packed = pack(SavedState([(mx.zeros((2,)),)]))

    with pytest.raises(Damaged, match=r"0\.0 is no"):
        unpack(Packed(packed.description, (plane,)), [KVCache()])


@pytest.mark.parametrize(
    "shapes", [((1, 2, 3), (1, 2, 3)), ((2, 2, 3, 4), (2, 2, 3, 4)), ((1, 2, 3, 4), (1, 2, 5, 4)), ((1, 2, 3, 4),)]
)
def test_a_block_of_another_rank_is_damaged(tmp_path: Path, shapes: tuple[tuple[int, ...], ...]) -> None:
    packed = pack(SavedState([tuple(mx.zeros(shape) for shape in shapes)]))

    with pytest.raises(Damaged, match="layer 0 has no keys and values"):
        unpack(through_a_file(packed, tmp_path), [KVCache()])
