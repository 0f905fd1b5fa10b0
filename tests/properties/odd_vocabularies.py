"""Model folders with odd tokenizers: six kinds of vocabulary, metaspace in every decoder shape, over a tiny random model.

Each vocabulary has control tokens, added tokens that are not special (markers, tags, a plain word, blanks), byte tokens or bytes,
pieces of UTF-8 characters, blanks, line breaks, quotes and what JSON is made of. Imports neither weft nor mlx.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TEXTS = Path(__file__).parent.parent / "text" / "templates"
HERMES = Path(__file__).parent.parent.parent / "src" / "weft" / "model" / "tiny-hybrid" / "chat_template.jinja"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "[INST]")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "   ", "<é>", "yes!", "\n\n\n", "<|user|>")
END = "<|im_end|>"
# fmt: off
WORDS = (
    "Yes", " Yes", "No", " No", " New", " York", "the", " the", "null", "true", "false", '{"', '":', '": ', '",', '"}',
    '" }', ' "', '\\"', "\\n", "\\\\", "\n\n", "\t\t", "</", "</think", "<think", "think>", "<tool_call", "_call>",
    "<|", "|>", "im_end", "<|im", "0.", "10", "00", "1e", "-1", "é", "字", "日本", "🙂", "e\u0301", "abc", "bcd", "  ",
    "    ", "\r\n", "name", "arguments", "color", "</parameter", "parameter>", "<function=", "function>", "red", " red",
    "green", "\u00a0", "\u2028", '{"a":', ".\n", "\n- ", "get", "_weather", "user", "<0x", "0A>", "system", "\\u", "[",
    "]", "INST",
)
# fmt: on
MARK = "▁"
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in VISIBLE]
LETTER_OF = {byte: chr(byte) for byte in VISIBLE} | {byte: chr(256 + place) for place, byte in enumerate(HIDDEN)}
# What an incomplete vocabulary can write beside its words; no control character, no letter of most scripts.
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEINOSTUY0123456789 \n\t\r{}[]()<>|/\\\"'`,.:;!?=+-*_#@&%$^~é字日本🙂\u0301\u00a0\u2028"
Json = dict[str, Any]

BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTE_FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
REPLACE: Json = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
STRIP: Json = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def metaspace(scheme: str) -> Json:
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": True}


def sequence(*decoders: Json) -> Json:
    return {"type": "Sequence", "decoders": list(decoders)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of vocabulary: how words are split and spelled before, joined after, and what the model is told of tools."""

    name: str
    is_byte_level: bool
    has_byte_tokens: bool
    decoder: Json
    normalizer: Json | None = None
    pre_tokenizer: Json | None = None
    post_processor: Json | None = None
    is_unigram: bool = False
    template: Path = HERMES
    is_in_test: bool = True  # looked at by `make test` too, not only by `make conformance`
    num_beyond: int = 0  # added tokens for which the model has no embedding

    @property
    def is_complete(self) -> bool:
        """Whether every text can be spelled."""
        return self.is_byte_level or self.has_byte_tokens


MARKED: Json = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
LLAMA2: Json = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, MARKED]}
TIKTOKEN: Json = {
    "type": "Sequence",
    "pretokenizers": [
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
        BYTE_LEVEL | {"use_regex": False},
    ],
}
BEGIN: Json = {  # as Llama 3 has it: a text of its own begins with a control token
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
}
QWEN_CODER = TEXTS / "qwen3-coder.jinja"

KINDS = (
    Kind("byte-level", True, False, BYTE_LEVEL, pre_tokenizer=BYTE_LEVEL),
    Kind("tiktoken", True, False, BYTE_LEVEL, pre_tokenizer=TIKTOKEN, post_processor=BEGIN, template=QWEN_CODER, num_beyond=2),
    Kind("byte-fallback", False, True, sequence(REPLACE, BYTE_FALLBACK, FUSE), normalizer=MARKED, template=QWEN_CODER),
    Kind("strip", False, True, sequence(REPLACE, BYTE_FALLBACK, FUSE, STRIP), normalizer=LLAMA2),
    Kind("fallback-metaspace", False, True, sequence(BYTE_FALLBACK, metaspace("always")), pre_tokenizer=metaspace("always")),
    Kind("metaspace", False, False, metaspace("always"), pre_tokenizer=metaspace("always"), is_unigram=True),
    Kind(
        "metaspace-fallback", False, True, sequence(metaspace("first"), BYTE_FALLBACK), None, metaspace("first"), is_in_test=False
    ),
    Kind("metaspace-never", False, True, sequence(BYTE_FALLBACK, metaspace("never")), None, metaspace("never"), is_in_test=False),
    Kind("metaspace-fuse", False, False, sequence(metaspace("always"), FUSE), None, metaspace("always"), is_in_test=False),
    Kind("replace-fuse-strip", False, False, sequence(REPLACE, FUSE, STRIP), LLAMA2, is_unigram=True, is_in_test=False),
    Kind("fuse", False, False, FUSE, is_in_test=False),
    Kind("replace-byte-level", True, False, sequence(REPLACE, BYTE_LEVEL), None, BYTE_LEVEL, is_in_test=False),
)


def make_folder(kind: Kind, folder: Path, seed: int = 0) -> Path:
    """Write a model folder with this kind of vocabulary and random weights; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(kind)
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    num_tokens = max(ids.values()) + 1 - kind.num_beyond
    config = _config(num_tokens, ids[END])
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [ids[END], ids["<|endoftext|>"]]},
        "tokenizer_config.json": {"eos_token": END},
        "tokenizer.json": tokenizer,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(kind.template.read_text())
    save_file(_weights(config, np.random.default_rng(seed)), folder / "model.safetensors", {"format": "mlx"})
    return folder


def _tokenizer(kind: Kind) -> Json:
    pieces = _pieces(kind)
    vocabulary = {text: place for place, text in enumerate(dict.fromkeys(pieces))}
    beyond = [f"<|beyond {number}|>" for number in range(kind.num_beyond)]
    texts = [*SPECIAL, *ADDED, *beyond]
    first = len(vocabulary) - len(SPECIAL)  # the special ones are the first of the vocabulary
    places = {text: vocabulary.get(text, first + place) for place, text in enumerate(texts)}
    added = [
        {"id": places[text], "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": text in SPECIAL}
        for text in texts
    ]
    processor = kind.post_processor
    if processor is not None:
        begin = {"id": "<s>", "ids": [places["<s>"]], "tokens": ["<s>"]}
        processor = processor | {"special_tokens": {"<s>": begin}}
    model = _unigram(vocabulary) if kind.is_unigram else _bpe(kind, vocabulary)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": kind.normalizer,
        "pre_tokenizer": kind.pre_tokenizer, "post_processor": processor, "decoder": kind.decoder, "model": model,
    }  # fmt: skip


def _pieces(kind: Kind) -> Iterable[str]:
    """The vocabulary's own words: control tokens, bytes or letters, then every beginning of every word."""
    yield from SPECIAL
    if kind.is_byte_level:
        yield from LETTER_OF.values()
        if kind.decoder["type"] == "Sequence":  # words with the mark that the decoder replaces, beside those with bytes
            yield from (MARK, MARK * 2, MARK + "Yes")
    else:
        yield "<unk>"
        if kind.has_byte_tokens:
            yield from (f"<0x{byte:02X}>" for byte in range(256))
        yield from (_spelled(kind, letter) for letter in LETTERS)
    for word in WORDS:
        spelled = _spelled(kind, word)
        yield from (spelled[:end] for end in range(2, len(spelled) + 1))


def _spelled(kind: Kind, text: str) -> str:
    if kind.is_byte_level:
        return "".join(LETTER_OF[byte] for byte in text.encode())
    return text if kind.decoder == FUSE else text.replace(" ", MARK)


def _bpe(kind: Kind, vocabulary: dict[str, int]) -> Json:
    letters = set(SPECIAL)
    merges = [[text[:-1], text[-1]] for text in vocabulary if len(text) > 1 and text not in letters and text[:-1] in vocabulary]
    merges = [pair for pair in merges if pair[1] in vocabulary]
    return {
        "type": "BPE", "dropout": None, "unk_token": None if kind.is_byte_level else "<unk>", "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": kind.has_byte_tokens, "ignore_merges": False,
        "vocab": vocabulary, "merges": merges,
    }  # fmt: skip


def _unigram(vocabulary: dict[str, int]) -> Json:
    words = [[text, -8.0 if len(text) == 1 else -6.0] for text in vocabulary]
    return {"type": "Unigram", "unk_id": vocabulary["<unk>"], "vocab": words, "byte_fallback": False}


def _config(num_tokens: int, end: int) -> Json:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": num_tokens, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": True,
        "eos_token_id": end, "dtype": "float32",
    }  # fmt: skip


def _weights(config: Json, rng: np.random.Generator) -> dict[str, np.ndarray]:
    width, inner, heads = config["hidden_size"], config["intermediate_size"], 16

    def random_of(*shape: int) -> np.ndarray:
        return (2.0 * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    found = {"model.embed_tokens.weight": 0.25 * rng.standard_normal((config["vocab_size"], width)).astype(np.float32)}
    found["model.norm.weight"] = np.ones(width, np.float32)
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (2 * heads, width), "self_attn.k_proj": (heads, width), "self_attn.v_proj": (heads, width),
            "self_attn.o_proj": (width, 2 * heads), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }  # fmt: skip
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}.weight"] = random_of(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = np.ones(width, np.float32)
    return found


def fragments(kind: Kind) -> tuple[str, ...]:
    """Texts to make literals of, drawn from the vocabulary's own odd tokens, and from what only looks like one."""
    odd = [*SPECIAL, *ADDED, *WORDS, *(f"<|beyond {number}|>" for number in range(kind.num_beyond))]
    odd += [
        "<0x0A>",
        "<0xE2>",
        MARK,
        "▁Yes",
        "Ġ",
        "Ċ",
        "</parameter>",
        "</function>",
        "<unk>",
        "</s>",
        '"}',
        "'",
        '"',
        "\\",
        "\n",
        " ",
    ]
    odd += ["\n\n", "  ", "\t", "a", "b", "x y", "1", "true", "{", "}", "</tool_call>\n"]
    if kind.is_complete:
        odd += ["\x1b", "\x7f", "\x01", "\x85", "ß", "漢", "👩‍👩‍👧", "\ufeff", "\ufffd", "\u200b"]
    return tuple(dict.fromkeys(odd))


def literal(rng: random.Random, kind: Kind) -> str:
    """One to three fragments; never empty."""
    return "".join(rng.choices(fragments(kind), k=rng.choice((1, 1, 2, 3))))
