"""GGUF files written here byte by byte, by the format's description, and what `weft.model.gguf_convert` makes of them."""

import json
import math
import random
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from weft.errors import BadModel, ModelError, UnsupportedModel
from weft.kernels import primitives
from weft.model import gguf, gguf_convert
from weft.model.loader import load
from weft.text.sampling import recommended_sampling

F32, F16, Q4_0, Q4_1, Q8_0, BF16, Q6_K = 0, 1, 2, 3, 8, 30, 14
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
HEAD = HIDDEN // HEADS
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "12 3", "123 4", "h e", "l l", "he ll", "hell o", "Ġ hello"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"

Array = np.ndarray[Any, np.dtype[Any]]


# --- a small writer --------------------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(thing: Any) -> bytes:
    match thing:
        case bool():
            return struct.pack("<I?", 7, thing)
        case int():
            return struct.pack("<II", 4, thing)
        case float():
            return struct.pack("<If", 6, thing)
        case str():
            return struct.pack("<I", 8) + string(thing)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(thing)) + b"".join(map(string, thing))
        case [int(), *_]:
            return struct.pack("<IIQ", 9, 5, len(thing)) + struct.pack(f"<{len(thing)}i", *thing)
    raise TypeError(thing)


def encode(kind: int, values: Array) -> bytes:
    """Values as one of GGUF's types; the 4- and 8-bit ones are rounded as a simple quantiser would."""
    if kind == F32:
        return values.astype("<f4").tobytes()
    if kind == F16:
        return values.astype("<f2").tobytes()
    if kind == BF16:
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return b"".join(encode_block(kind, block) for block in values.reshape(-1, 32))


def encode_block(kind: int, block: Array) -> bytes:
    if kind == Q8_0:
        scale = np.float16(np.abs(block).max() / 127 or 1)
        return scale.tobytes() + np.clip(np.round(block / scale), -128, 127).astype(np.int8).tobytes()
    if kind == Q4_0:
        scale = np.float16(np.abs(block).max() / -8 or 1)
        codes, head = np.clip(np.round(block / scale) + 8, 0, 15), scale.tobytes()
    else:
        scale, least = np.float16(np.ptp(block) / 15 or 1), np.float16(block.min())
        codes, head = np.clip(np.round((block - least) / scale), 0, 15), scale.tobytes() + least.tobytes()
    codes = codes.astype(np.uint8)
    return head + (codes[:16] | codes[16:] << 4).tobytes()


def decode(kind: int, data: bytes) -> list[float]:
    """The same the other way round, one value at a time: the oracle."""
    values: list[float] = []
    size = {Q4_0: 18, Q4_1: 20, Q8_0: 34}[kind]
    for start in range(0, len(data), size):
        block = data[start : start + size]
        scale = np.float32(struct.unpack("<e", block[:2])[0])
        if kind == Q8_0:
            values += [float(scale * np.float32(code)) for code in struct.unpack("<32b", block[2:])]
            continue
        codes = [byte & 15 for byte in block[-16:]] + [byte >> 4 for byte in block[-16:]]
        if kind == Q4_0:
            values += [float(scale * np.float32(code - 8)) for code in codes]
        else:
            least = np.float32(struct.unpack("<e", block[2:4])[0])
            values += [float(scale * np.float32(code) + least) for code in codes]
    return values


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """`tensors`: name → (type, shape with the slowest axis first, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(thing) for key, thing in metadata.items())
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def vocabulary() -> list[str]:
    return [*SPECIAL, "<tool>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def facts(architecture: str) -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "general.architecture": architecture,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 512,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 100000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(tokens) - 4)],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def weights(seed: int = 0, biases: bool = False) -> dict[str, Array]:
    """Random weights under mlx-lm's names, of the shapes `facts` asks for."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (len(vocabulary()), HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for module, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * HEAD, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", INNER, HIDDEN),
            ("mlp.up_proj", INNER, HIDDEN),
            ("mlp.down_proj", HIDDEN, INNER),
        ):
            shapes[f"model.layers.{layer}.{module}.weight"] = (rows, columns)
            if biases and module[-6:] in ("q_proj", "k_proj", "v_proj"):
                shapes[f"model.layers.{layer}.{module}.bias"] = (rows,)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
    return {name: (rng.normal(size=shape) / 4).astype(np.float16).astype(np.float32) for name, shape in shapes.items()}


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def file_name(name: str) -> str:
    for ours, theirs in sorted(NAMES.items(), key=lambda pair: -len(pair[0])):
        name = name.replace(ours, theirs)
    return name


def interleaved(array: Array, heads: int) -> Array:
    """q and k as llama files have them: the two halves of a head's rows in turn."""
    halves = array.reshape(heads, 2, HEAD // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def tensors(architecture: str, arrays: dict[str, Array], kind: int = F32, **kinds: int) -> dict[str, Any]:
    """`arrays` as the file's tensors: matrices of `kind`, unless `kinds` names them; vectors as F32."""
    found = {}
    for name, array in arrays.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleaved(array, HEADS if "q_proj" in name else KV_HEADS)
        chosen = kinds.get(name.split(".")[-2], kind) if array.ndim == 2 else F32
        found[file_name(name)] = (chosen, array.shape, encode(chosen, array))
    return found


def tiny(path: Path, changes: dict[str, Any] | None = None, kind: int = F32) -> Path:
    return write_gguf(path, facts("llama") | (changes or {}), tensors("llama", weights(), kind))


def converted(path: Path, folder: Path, quantized: bool = False) -> Path:
    folder.mkdir()
    gguf_convert.convert(path, folder, quantized=quantized, progress=lambda *_: None)
    return folder


def stored(folder: Path) -> dict[str, mx.array]:
    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    return loaded


def config_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())
    assert isinstance(found, dict)
    return found


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [F32, F16, BF16])
def test_plain_values_come_out_as_they_went_in(tmp_path: Path, kind: int) -> None:
    arrays = weights()
    if kind == BF16:
        arrays = {name: (array.view(np.uint32) >> 16 << 16).view(np.float32) for name, array in arrays.items()}
    path = write_gguf(tmp_path / "m.gguf", facts("llama"), tensors("llama", arrays, kind))

    found = stored(converted(path, tmp_path / "m"))

    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == mx.float32
        assert np.array_equal(np.array(found[name]), array), name


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_quantised_values_are_those_the_format_describes(tmp_path: Path, kind: int) -> None:
    arrays = weights()
    written = tensors("llama", arrays, kind)
    path = write_gguf(tmp_path / "m.gguf", facts("llama"), written)

    found = stored(converted(path, tmp_path / "m"))

    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
    ):
        expected = np.array(decode(kind, written[file_name(name)][2]), np.float32).reshape(arrays[name].shape)
        assert np.array_equal(np.array(found[name]), expected), name
        assert np.abs(expected - arrays[name]).max() < 0.2  # and the writer's own rounding is sane


def test_biases_of_qwen2_are_kept_and_nothing_is_reordered(tmp_path: Path) -> None:
    arrays = weights(biases=True)
    path = write_gguf(tmp_path / "m.gguf", facts("qwen2"), tensors("qwen2", arrays))

    folder = converted(path, tmp_path / "m")

    found = stored(folder)
    assert all(np.array_equal(np.array(found[name]), array) for name, array in arrays.items())
    assert load(folder).config["model_type"] == "qwen2"


def test_a_tensor_converted_in_pieces_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny(tmp_path / "m.gguf", kind=Q4_1)
    whole = [(converted(path, tmp_path / f"whole{q}", q) / "model.safetensors").read_bytes() for q in (False, True)]
    monkeypatch.setattr(gguf_convert, "PIECE_VALUES", 5 * HIDDEN)
    pieces = [(converted(path, tmp_path / f"pieces{q}", q) / "model.safetensors").read_bytes() for q in (False, True)]

    assert pieces == whole


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_repacked_model_is_exactly_the_float32_one(tmp_path: Path, architecture: str) -> None:
    arrays = weights(biases=architecture == "qwen2")
    kinds = {"embed_tokens": Q8_0, "v_proj": Q4_0, "down_proj": F16, "gate_proj": Q8_0}
    written = tensors(architecture, arrays, Q4_1, **kinds)
    path = write_gguf(tmp_path / "m.gguf", facts(architecture), written)
    tokens = mx.array([[1, 5, 9, 77, 200, 3]])

    plain_model = load(converted(path, tmp_path / "plain")).model
    packed_folder = converted(path, tmp_path / "packed", quantized=True)
    packed_model = load(packed_folder).model
    plain, packed = plain_model(tokens), packed_model(tokens)

    assert config_of(packed_folder)["quantization"]["model.embed_tokens"]["bits"] == 8
    assert config_of(packed_folder)["quantization"]["model.layers.0.self_attn.q_proj"]["bits"] == 4
    assert "model.layers.0.mlp.down_proj" not in config_of(packed_folder)["quantization"]
    assert mx.abs(plain).max().item() > 0.1
    if primitives.missing is None:
        assert mx.array_equal(plain, packed)
    else:
        assert mx.abs(plain - packed).max().item() < 1e-4  # the two matrix products add in their own orders


def test_quantised_folder_keeps_plain_tensors_in_its_dtype_when_nothing_is_lost(tmp_path: Path) -> None:
    arrays = weights()
    arrays["model.norm.weight"] = np.full(HIDDEN, 1 + 2.0**-20, np.float32)  # float16 can not hold it
    path = write_gguf(tmp_path / "m.gguf", facts("llama"), tensors("llama", arrays, Q4_0))

    found = stored(converted(path, tmp_path / "m", quantized=True))

    assert found["model.layers.0.input_layernorm.weight"].dtype == mx.float16
    assert found["model.layers.0.self_attn.q_proj.scales"].dtype == mx.float16
    assert found["model.norm.weight"].dtype == mx.float32
    assert found["model.norm.weight"][0].item() == 1 + 2.0**-20


def test_bfloat16_file_stays_bfloat16_when_asked_for_its_own_weights(tmp_path: Path) -> None:
    arrays = {name: np.round(array * 64) / 64 for name, array in weights().items()}
    path = write_gguf(tmp_path / "m.gguf", facts("llama"), tensors("llama", arrays, BF16))

    folder = converted(path, tmp_path / "m", quantized=True)

    found = stored(folder)
    assert {array.dtype for array in found.values()} == {mx.bfloat16}
    assert np.array_equal(np.array(found["model.norm.weight"].astype(mx.float32)), arrays["model.norm.weight"])
    assert "quantization" not in config_of(folder)


def test_separate_output_matrix_unties_the_embeddings(tmp_path: Path) -> None:
    arrays = weights() | {"lm_head.weight": weights(seed=1)["model.embed_tokens.weight"]}
    untied = write_gguf(tmp_path / "untied.gguf", facts("llama"), tensors("llama", arrays))

    folder = converted(untied, tmp_path / "untied")

    assert config_of(folder)["tie_word_embeddings"] is False
    assert np.array_equal(np.array(stored(folder)["lm_head.weight"]), arrays["lm_head.weight"])
    assert config_of(converted(tiny(tmp_path / "tied.gguf"), tmp_path / "tied"))["tie_word_embeddings"] is True


# --- config.json -----------------------------------------------------------------------------------------------------


def test_config_carries_the_metadata(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", {"tokenizer.ggml.eot_token_id": 0})

    folder = converted(path, tmp_path / "m")

    expected = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 512,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-05,
        "vocab_size": len(vocabulary()),
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    assert expected.items() <= config_of(folder).items()
    assert "rope_scaling" not in config_of(folder)
    assert load(folder).eos_token_ids == (2, 0)


def test_recommended_sampling_is_carried_over(tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05}
    folder = converted(tiny(tmp_path / "m.gguf", said), tmp_path / "m")

    found = recommended_sampling(folder)
    assert found == {"temperature": pytest.approx(0.6), "top_k": 20, "repetition_penalty": pytest.approx(1.05)}


def llama3_divisors(factor: float, base: float = 100000.0) -> Array:
    found = []
    for step in range(0, HEAD, 2):
        wavelength = 2 * math.pi * base ** (step / HEAD)
        smooth = (8192 / wavelength - 1) / 3
        found.append(factor if wavelength > 8192 else 1 if wavelength < 2048 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def test_rope_scaling_of_llama3_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    divisors = llama3_divisors(32)
    written = tensors("llama", weights()) | {"rope_freqs.weight": (F32, divisors.shape, encode(F32, divisors))}
    path = write_gguf(tmp_path / "m.gguf", facts("llama"), written)

    folder = converted(path, tmp_path / "m")

    scaling = config_of(folder)["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 32)
    rope = load(folder).model.layers[0].self_attn.rope
    plain = 100000.0 ** (np.arange(0, HEAD, 2) / HEAD)
    assert np.allclose(np.array(rope._freqs) / plain, divisors, rtol=1e-4)


def test_unknown_rope_divisors_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 32, HEAD // 2, dtype=np.float32)
    written = tensors("llama", weights()) | {"rope_freqs.weight": (F32, divisors.shape, encode(F32, divisors))}
    path = write_gguf(tmp_path / "m.gguf", facts("llama"), written)

    with pytest.raises(UnsupportedModel, match="rope"):
        converted(path, tmp_path / "m")


def test_linear_and_yarn_rope_scaling_reach_the_config(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 128}

    found = [
        config_of(converted(tiny(tmp_path / f"{name}.gguf", extra), tmp_path / name))["rope_scaling"]
        for name, extra in (("linear", linear), ("yarn", yarn))
    ]

    assert found[0] == {"rope_type": "linear", "factor": 4.0}
    assert found[1] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert load(tmp_path / "yarn").context_length == 512


# --- tokenizer -------------------------------------------------------------------------------------------------------


def pieces_of(folder: Path, text: str) -> list[str]:
    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens)


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["1234"]),
        ("default", ["1234"]),
    ],
)
def test_each_pre_tokenizer_cuts_digits_its_own_way(tmp_path: Path, pre: str, digits: list[str]) -> None:
    folder = converted(tiny(tmp_path / "m.gguf", {"tokenizer.ggml.pre": pre}), tmp_path / "m")

    assert pieces_of(folder, "hello hello1234") == ["hello", "Ġhello", *digits]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_any_text_survives_encoding_and_decoding(tmp_path: Path, pre: str) -> None:
    folder = converted(tiny(tmp_path / "m.gguf", {"tokenizer.ggml.pre": pre}), tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    for text in (
        "Hello, wörld!",
        "  two\n\n\tthree  ",
        "日本語 🙂 1234",
        "<|im_start|>hello<|im_end|>",
        "it's <tool> x",
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_token_and_only_control_tokens_are_hidden(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted(tiny(tmp_path / "m.gguf"), tmp_path / "m") / "tokenizer.json"))

    encoded = tokenizer.encode("<|im_start|>hello<tool><|im_end|>")

    assert encoded.tokens == ["<|im_start|>", "hello", "<tool>", "<|im_end|>"]
    assert encoded.ids[0] == 1
    assert encoded.ids[2:] == [3, 2]
    assert tokenizer.decode(encoded.ids) == "hello<tool>"


def test_bos_is_added_only_when_the_file_says_so(tmp_path: Path) -> None:
    without = converted(tiny(tmp_path / "without.gguf"), tmp_path / "without")
    added = converted(tiny(tmp_path / "with.gguf", {"tokenizer.ggml.add_bos_token": True}), tmp_path / "with")

    assert pieces_of(without, "hello") == ["hello"]
    assert pieces_of(added, "hello") == ["<|im_start|>", "hello"]


def test_tokenizer_config_names_the_special_tokens_and_the_chat_template(tmp_path: Path) -> None:
    folder = converted(tiny(tmp_path / "m.gguf"), tmp_path / "m")

    found = json.loads((folder / "tokenizer_config.json").read_text())

    assert found["chat_template"] == TEMPLATE
    assert (found["bos_token"], found["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert found["pad_token"] == "<|endoftext|>"
    assert found["add_bos_token"] is False


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer of kind llama"),
        ({"tokenizer.ggml.pre": "tekken"}, "tekken"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 128}, "sliding_window"),
        ({"llama.rope.dimension_count": 8}, "rotated"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, "longrope"),
        ({"llama.attention.head_count": [4, 4]}, "head_count"),
        ({"split.count": 3}, "parts"),
    ],
)
def test_what_can_not_be_honoured_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", facts("llama") | changes, tensors("llama", weights()))

    with pytest.raises(UnsupportedModel, match=words) as caught:
        converted(path, tmp_path / "m")

    assert str(path) in str(caught.value)


def test_unknown_tensor_type_names_the_tensor_and_the_type(tmp_path: Path) -> None:
    written = tensors("llama", weights())
    written["blk.1.ffn_up.weight"] = (Q6_K, (INNER, HIDDEN), b"")

    with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_up\.weight as Q6_K"):
        converted(write_gguf(tmp_path / "m.gguf", facts("llama"), written), tmp_path / "m")


def test_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    norm = np.ones(HEAD, np.float32)
    written = tensors("llama", weights()) | {"blk.0.attn_q_norm.weight": (F32, norm.shape, encode(F32, norm))}

    with pytest.raises(UnsupportedModel, match="attn_q_norm"):
        converted(write_gguf(tmp_path / "m.gguf", facts("llama"), written), tmp_path / "m")


def test_missing_tensor_and_wrong_shape_are_named(tmp_path: Path) -> None:
    written = tensors("llama", weights())
    del written["blk.1.attn_v.weight"]
    with pytest.raises(BadModel, match=r"lacks the tensor blk\.1\.attn_v\.weight"):
        converted(write_gguf(tmp_path / "m.gguf", facts("llama"), written), tmp_path / "m")

    written["blk.1.attn_v.weight"] = (F32, (HIDDEN, HIDDEN), bytes(HIDDEN * HIDDEN * 4))
    with pytest.raises(BadModel, match=r"blk\.1\.attn_v\.weight of shape"):
        converted(write_gguf(tmp_path / "n.gguf", facts("llama"), written), tmp_path / "n")


@pytest.mark.parametrize("key", ["llama.block_count", "tokenizer.ggml.tokens", "tokenizer.ggml.pre", "tokenizer.ggml.merges"])
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    metadata = facts("llama")
    del metadata[key]

    with pytest.raises(BadModel, match=key):
        converted(write_gguf(tmp_path / "m.gguf", metadata, tensors("llama", weights())), tmp_path / "m")


def test_merges_that_do_not_fit_the_vocabulary_are_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", {"tokenizer.ggml.merges": ["x yz"]})

    with pytest.raises(BadModel, match="merges"):
        converted(path, tmp_path / "m")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "could not be read"),
        (b"GGU", "ends in the middle"),
        (b"PK\3\4" + bytes(100), "not a GGUF file"),
        (struct.pack("<4sI", b"GGUF", 1) + bytes(100), "version 1"),
        (struct.pack(">4sI", b"GGUF", 3) + bytes(100), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1, 2**60) + bytes(64), "BadModel"),
    ],
)
def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError) as caught:
        gguf.read(path)

    assert words in f"{type(caught.value).__name__}: {caught.value}"
    assert str(path) in str(caught.value)


def test_a_file_cut_off_anywhere_is_reported_and_never_converted(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "m.gguf", kind=Q4_0).read_bytes()
    path = tmp_path / "cut.gguf"
    draw = random.Random(0)

    for length in [1, 8, 24, len(whole) // 2, len(whole) - 1, *draw.sample(range(len(whole)), 40)]:
        path.write_bytes(whole[:length])
        with pytest.raises(BadModel, match="download it again"):
            gguf.read(path)


def test_damaged_headers_give_model_errors_and_nothing_else(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "m.gguf", kind=Q4_0).read_bytes()
    header_bytes = whole.index(b"blk.1.ffn_norm.weight") + 60
    path, refused = tmp_path / "damaged.gguf", 0

    for seed in range(150):
        draw, damaged = random.Random(seed), bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            damaged[draw.randrange(header_bytes)] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        path.write_bytes(damaged)
        try:
            converted(path, tmp_path / str(seed))
        except ModelError:
            refused += 1

    assert refused > 20
