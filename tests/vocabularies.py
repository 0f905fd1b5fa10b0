"""Small vocabularies of every kind that models come with, each a folder with a tokenizer.json; all have the same odd tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]"]
END = SPECIAL.index("<|im_end|>")
# Added tokens that are not special: markers, words, and white space, as Qwen, DeepSeek-Coder and Gemma have them.
ADDED = ["<think>", "</think>", "<tool_call>", "]<]x[>[", "õ", "covid", "\n\n", "    "]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = ["▁", "\n", "\t", *map(chr, range(0x21, 0x7F)), "é", "ï", "字"]
WORDS = [
    "▁a",
    "▁the",
    "▁New",
    "▁York",
    "▁Yes",
    "▁No",
    "▁▁",
    "▁▁▁▁",
    "st",
    "ri",
    "ag",
    "im",
    "end",
    "think",
    "<b>",
    "</b>",
    "|>",
    "<|",
]
REPLACE, FALLBACK, FUSE, STRIP = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
METASPACE = decoders.Metaspace()
DECODERS: dict[str, Any] = {
    "fallback, metaspace": decoders.Sequence([FALLBACK, METASPACE]),
    "metaspace, fallback": decoders.Sequence([METASPACE, FALLBACK]),
    "metaspace": METASPACE,
    "metaspace, fuse": decoders.Sequence([METASPACE, FUSE]),
    "replace, fuse, strip": decoders.Sequence([REPLACE, FUSE, STRIP]),
    "fuse": FUSE,
    "replace, fallback, fuse": decoders.Sequence([REPLACE, FALLBACK, FUSE]),
    "replace, fallback, fuse, strip": decoders.Sequence([REPLACE, FALLBACK, FUSE, STRIP]),
}
GPT4_WORDS = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"


def _add(inner: Any) -> Any:
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens([AddedToken(text, normalized=False) for text in ADDED])
    return inner


def _sentencepiece(decoder: Any) -> Any:
    """A Unigram vocabulary after Metaspace, as sentencepiece writes it; it has bytes where the decoder knows them."""
    blank = " " if decoder is FUSE else "▁"
    texts = [*SPECIAL, *(BYTES if "ByteFallback" in str(decoder) else []), *LETTERS, *WORDS]
    pieces = [(text.replace("▁", blank), -8.0 / len(text)) for text in texts]
    inner: Any = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback="ByteFallback" in str(decoder)))
    if decoder is not FUSE:
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoder
    return _add(inner)


def _merges(texts: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a BPE vocabulary with these texts, and the merges that build each of them from the left."""
    merges = [(text[:size], text[size]) for text in texts for size in range(1, len(text))]
    merges = list(dict.fromkeys(merges))
    letters = [*SPECIAL, *BYTES, *sorted(pre_tokenizers.ByteLevel.alphabet()), *LETTERS, *WORDS]
    return {text: at for at, text in enumerate(dict.fromkeys([*letters, *map("".join, merges)]))}, merges


def _llama() -> Any:
    """A BPE vocabulary that begins every text with a blank and drops it again, as Llama 2 and Mistral 7B do."""
    vocabulary, merges = _merges(WORDS)
    inner: Any = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = DECODERS["replace, fallback, fuse, strip"]
    return _add(inner)


def _byte_level(decoder: Any, pre_tokenizer: Any, *, ignore_merges: bool) -> Any:
    vocabulary, merges = _merges([text.replace("▁", "Ġ") for text in WORDS])
    inner: Any = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    inner.pre_tokenizer, inner.decoder = pre_tokenizer, decoder
    return _add(inner)


def _tiktoken() -> Any:
    split = pre_tokenizers.Split(Regex(GPT4_WORDS), "isolated")
    steps = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return _byte_level(decoders.ByteLevel(), steps, ignore_merges=True)


def _gpt2() -> Any:
    return _byte_level(decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=True), ignore_merges=False)


def _replaced_byte_level() -> Any:
    """A byte-level vocabulary that has words of a sentencepiece one too."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteLevel()])
    return _byte_level(decoder, pre_tokenizers.ByteLevel(add_prefix_space=False), ignore_merges=False)


KINDS: dict[str, Callable[[], Any]] = {
    **{name: lambda decoder=decoder: _sentencepiece(decoder) for name, decoder in DECODERS.items()},
    "llama": _llama,
    "gpt2": _gpt2,
    "tiktoken": _tiktoken,
    "replace, byte level": _replaced_byte_level,
}


def write(kind: str, folder: Path) -> None:
    """Write the tokenizer.json of a kind into a folder."""
    KINDS[kind]().save(str(folder / "tokenizer.json"))
