"""Folders whole and broken, and what `weft.model.loader` says of them."""

import gc
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_model

from weft.config import EngineSettings
from weft.engine.process import bring_up
from weft.errors import BadModel, ModelError, UnsupportedModel
from weft.kernels import blas, primitives
from weft.model import loader
from weft.model.loader import load
from weft.model.resolve import TINY_HYBRID

Weights = dict[str, mx.array]
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
}
PROMPT = mx.array([[1, 2, 3, 50, 100]])


def fresh_weights(dtype: mx.Dtype = mx.float32) -> Weights:
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    return {name: array.astype(dtype) for name, array in tree_flatten(model.parameters())}


def write_folder(folder: Path, weights: Weights, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny", fresh_weights())


# --- what is loaded --------------------------------------------------------------------------------------------------


def test_tiny_hybrid_loads_with_its_mtp_head_and_its_tower_remembered() -> None:
    loaded = load(TINY_HYBRID)
    heads = {name: file for name, file in loaded.extra_tensors.items() if name.startswith("mtp.")}
    tower = {name: file for name, file in loaded.extra_tensors.items() if name.startswith("model.visual.")}

    assert (len(heads), len(tower), len(loaded.extra_tensors)) == (15, 81, 96)
    assert set(heads.values()) == {TINY_HYBRID / "model.safetensors"}
    assert set(tower.values()) == {TINY_HYBRID / "model-vision.safetensors"}
    assert (loaded.eos_token_ids, loaded.context_length, loaded.vocab_size) == ((4082, 4080), 2048, 4096)
    assert loaded.config["model_type"] == "qwen3_5"
    assert loaded.config["text_config"]["num_hidden_layers"] == 8


def test_on_a_cpu_half_precision_weights_compute_in_float32_and_those_of_products_stay_as_they_are() -> None:
    assert mx.default_device() == mx.cpu
    ours = load(TINY_HYBRID).model
    theirs, _ = load_model(TINY_HYBRID)
    theirs.set_dtype(mx.float32)

    logits = ours(PROMPT)

    halves = {name.rpartition(".")[2] for name, array in tree_flatten(ours.parameters()) if array.dtype != mx.float32}
    assert halves == ({"weight"} if primitives.missing is None else set())
    assert logits.dtype == mx.float32
    assert mx.array_equal(logits, theirs(PROMPT)).item()


def test_quantised_weights_stay_packed_and_so_do_their_scales_where_the_product_is_wefts(tmp_path: Path) -> None:
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    weights = dict(tree_flatten(model.parameters()))
    folder = write_folder(tmp_path / "packed", weights, quantization={"group_size": 32, "bits": 4})

    loaded = dict(tree_flatten(load(folder).model.parameters()))

    assert loaded["model.layers.0.mlp.up_proj.weight"].dtype == mx.uint32
    is_kept = primitives.missing is None
    assert loaded["model.layers.0.mlp.up_proj.scales"].dtype == (mx.bfloat16 if is_kept else mx.float32)
    assert mx.array_equal(loaded["model.layers.0.mlp.up_proj.weight"], weights["model.layers.0.mlp.up_proj.weight"]).item()


def test_weights_are_those_of_the_file_also_when_brought_in_bit_by_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STEP_BYTES", 10_000)
    heard: list[tuple[int, int | None]] = []

    loaded = load(folder, progress=lambda _, done, total: heard.append((done, total)))

    weights = fresh_weights()
    found = dict(tree_flatten(loaded.model.parameters()))
    assert all(mx.array_equal(found[name], array).item() for name, array in weights.items())
    assert len(heard) > 3
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1] == sum(array.nbytes for array in weights.values())


@pytest.fixture
def folder_with_eyes(tmp_path: Path) -> Path:
    """A vision model's checkpoint: more bytes for eyes, which the text model does not have, than for the text model."""
    eyes = {f"vision_tower.blocks.{index}.weight": mx.ones((64, 512)) for index in range(8)}
    return write_folder(tmp_path / "with-eyes", fresh_weights() | eyes, vision_config={"depth": 8})


def test_a_load_builds_the_model_once_and_reads_its_file_once(folder_with_eyes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[llama.Model] = []
    read: list[str] = []
    really_build, really_read = llama.Model.__init__, mx.load

    def build(model: llama.Model, args: llama.ModelArgs) -> None:
        built.append(model)
        really_build(model, args)

    def read_file(file: str, *given: Any, **named: Any) -> Any:
        read.append(file)
        return really_read(file, *given, **named)

    monkeypatch.setattr(llama.Model, "__init__", build)
    monkeypatch.setattr(mx, "load", read_file)

    engine, loaded = bring_up(EngineSettings(model=str(folder_with_eyes)), blas.bind(), lambda *_: None)

    assert read == [str(folder_with_eyes / "model.safetensors")]
    assert len(built) == 1
    assert built[0] is loaded.model is engine.adapter.model


def test_a_load_takes_no_more_memory_than_the_weights_of_the_model(folder_with_eyes: Path) -> None:
    gc.collect()  # what earlier tests left would be freed meanwhile
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    loaded = load(folder_with_eyes)

    # On a busy machine 34 KB more were counted once, about a tensor; not traced, maybe one that MLX's thread had not freed yet.
    largest = max(tensor.nbytes for _, tensor in tree_flatten(loaded.model.parameters()))
    assert loaded.weights_bytes <= mx.get_peak_memory() - before <= 1.1 * loaded.weights_bytes + largest
    assert largest < 0.3 * loaded.weights_bytes


def test_model_keeps_no_trace_of_having_been_watched(folder: Path) -> None:
    model = load(folder).model

    assert type(model) is llama.Model
    assert not {"sanitize", "load_weights"} & vars(model).keys()


def test_shards_named_by_an_index_are_loaded(folder: Path) -> None:
    weights = list(fresh_weights().items())
    (folder / "model.safetensors").unlink()
    parts = {
        "model-00001-of-00002.safetensors": dict(weights[:5]),
        "model-00002-of-00002.safetensors": dict(weights[5:]),
    }
    for name, part in parts.items():
        mx.save_safetensors(str(folder / name), part)
    places = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))

    found = dict(tree_flatten(load(folder).model.parameters()))
    assert all(mx.array_equal(found[name], array).item() for name, array in weights)

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(BadModel, match=r"model-00002-of-00002\.safetensors is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (7,)), ({}, (7,)), ({"eos_token_id": 9}, (9, 7)), ({"eos_token_id": [9, 7, 3]}, (9, 7, 3))],
)
def test_eos_ids_come_from_generation_config_and_config(
    folder: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))

    assert load(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    ("configured", "end", "expected"),
    [
        (7, "<end>", (7, 5)),
        (None, "<end>", (5,)),
        (None, {"content": "<end>"}, (5,)),
        (5, "<end>", (5,)),
        (7, "<gone>", (7,)),
        (7, None, (7,)),
        ([7, 9, 200, -1], "<end>", (7, 5)),  # the last token is 7
    ],
)
def test_the_tokenizer_s_own_end_counts_and_ids_that_no_token_has_do_not(
    folder: Path, configured: Any, end: Any, expected: tuple[int, ...]
) -> None:
    write_folder(folder, fresh_weights(), eos_token_id=configured)
    vocabulary = {f"t{index}": index for index in (0, 1, 2, 3, 4, 6, 7)}
    written = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 5, "content": "<end>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))

    assert load(folder).eos_token_ids == expected


# --- tensors the model does not take ---------------------------------------------------------------------------------


def test_tensors_of_parts_the_model_lacks_are_remembered(tmp_path: Path) -> None:
    extra = {"mtp.fc.weight": mx.ones((4, 4)), "vision_tower.blocks.0.weight": mx.ones((2,))}
    past_the_end = {"model.layers.2.mlp.up_proj.weight": mx.ones((96, 64))}
    folder = write_folder(tmp_path / "extra", fresh_weights() | extra | past_the_end)
    mx.save_safetensors(str(folder / "mtp.safetensors"), {"head.weight": mx.ones((3,))})

    loaded = load(folder)

    expected = dict.fromkeys(extra | past_the_end, folder / "model.safetensors")
    assert loaded.extra_tensors == expected | {"head.weight": folder / "mtp.safetensors"}


def test_tensors_that_a_sanitizer_drops_are_told_from_those_it_changes(tmp_path: Path) -> None:
    folder = tmp_path / "with-eyes"
    shutil.copytree(TINY_HYBRID, folder)
    (folder / "model-vision.safetensors").unlink()
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    eyes = {"model.visual.blocks.0.norm.weight": mx.ones((4,)), "model.visual.merger.weight": mx.ones((4, 4))}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights | eyes)

    extra = load(folder).extra_tensors

    # Norms and convolutions are changed on the way in, so they do not come through as they were; still they are taken.
    assert {name for name in extra if not name.startswith("mtp.")} == set(eyes)
    assert len(extra) == 15 + len(eyes)


def test_tensor_of_a_layer_the_model_has_is_refused_when_it_has_no_place(tmp_path: Path) -> None:
    bias = {"model.layers.1.self_attn.q_proj.bias": mx.ones((64,))}
    folder = write_folder(tmp_path / "biased", fresh_weights() | bias)

    with pytest.raises(UnsupportedModel, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(folder)


# --- what is broken --------------------------------------------------------------------------------------------------


def test_missing_folder_and_missing_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="nowhere is not a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(BadModel, match=r"has no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "could not be read as JSON"),
        ("[1]", "no JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        ('{"model_type": "llama"}', "could not be built"),
        (b"\xff\xfe", "could not be read as JSON"),
    ],
)
def test_broken_config_is_one_sentence(folder: Path, content: str | bytes, words: str) -> None:
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(BadModel, match=words) as caught:
        load(folder)

    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("model_type", ["no_such_thing", "base", "../utils", "switch_layers"])
def test_unknown_architecture_is_unsupported(folder: Path, model_type: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))

    with pytest.raises(UnsupportedModel, match=r"model_type .* which mlx-lm"):
        load(folder)


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_file": "evil.py"}))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")

    with pytest.raises(UnsupportedModel, match=r"evil\.py"):
        load(folder)

    assert not (folder / "ran").exists()


def test_broken_neighbours_of_the_config_are_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("nonsense")
    with pytest.raises(BadModel, match=r"generation_config\.json"):
        load(folder)

    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(BadModel, match="eos_token_id 'end'"):
        load(folder)

    (folder / "generation_config.json").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadModel, match="weight_map"):
        load(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(BadModel, match=r"no model\*\.safetensors"):
        load(folder)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = fresh_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]

    with pytest.raises(BadModel, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight \(1 of 20"):
        load(write_folder(tmp_path / "gap", weights))


def test_wrong_shape_and_wrong_sort_are_named(tmp_path: Path) -> None:
    weights = fresh_weights()

    with pytest.raises(BadModel, match=r"model\.norm\.weight of shape \(65,\) .* \(64,\)"):
        load(write_folder(tmp_path / "shape", weights | {"model.norm.weight": mx.ones((65,))}))
    with pytest.raises(BadModel, match=r"model\.norm\.weight as mlx\.core\.int32"):
        load(write_folder(tmp_path / "sort", weights | {"model.norm.weight": mx.ones((64,), mx.int32)}))


def test_one_tensor_in_two_files_is_refused(folder: Path) -> None:
    mx.save_safetensors(str(folder / "model-copy.safetensors"), {"model.norm.weight": mx.ones((64,))})

    with pytest.raises(BadModel, match=r"both hold model\.norm\.weight"):
        load(folder)


def rebuilt(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A safetensors file with its header changed."""
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


NORM = "model.norm.weight"
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "four bytes": lambda data: data[:4],
    "cut in the header": lambda data: data[:100],
    "cut in the data": lambda data: data[:-1],
    "something at the end": lambda data: data + b"x",
    "zeros": lambda data: bytes(len(data)),
    "a web page": lambda _: b"<!DOCTYPE html><html>not found</html>" * 100,
    "endless header": lambda data: struct.pack("<Q", 2**63) + data[8:],
    "header is a list": lambda _: struct.pack("<Q", 2) + b"[]",
    "deep header": lambda _: struct.pack("<Q", 200_000) + b"[" * 200_000,
    "entry is a number": lambda data: rebuilt(data, lambda header: header.update({NORM: 3})),
    "no offsets": lambda data: rebuilt(data, lambda header: header[NORM].pop("data_offsets")),
    "shape of words": lambda data: rebuilt(data, lambda header: header[NORM].update(shape=["a"])),
    "negative shape": lambda data: rebuilt(data, lambda header: header[NORM].update(shape=[-64])),
    "shape too large": lambda data: rebuilt(data, lambda header: header[NORM].update(shape=[2**40])),
    "offsets beyond the file": lambda data: rebuilt(data, lambda header: header[NORM].update(data_offsets=[2**40, 2**40 + 256])),
    "offsets of another": lambda data: rebuilt(data, lambda header: header[NORM].update(data_offsets=[0, 256])),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_weight_file_is_one_sentence(folder: Path, kind: str) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(BROKEN[kind](file.read_bytes()))

    with pytest.raises(BadModel, match=r"model\.safetensors .*download it again"):
        load(folder)


def test_dtype_that_mlx_can_not_read_is_unsupported(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(rebuilt(file.read_bytes(), lambda header: header[NORM].update(dtype="F64")))

    with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight as F64"):
        load(folder)


def test_damaged_headers_give_model_errors_and_nothing_else(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header_bytes = 8 + int(np.frombuffer(whole[:8], "<u8")[0])
    refused = 0

    for seed in range(100):
        draw, damaged = random.Random(seed), bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(header_bytes)] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            load(folder)
        except ModelError:
            refused += 1

    assert refused > 50
