"""tokenizer.json and tokenizer_config.json for the byte-level BPE vocabulary of a GGUF file.

It refuses every other kind of tokenizer and every cut of text that it does not know. It knows nothing of weights;
`convert` uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.errors import BadModel, UnsupportedModel
from weft.model.gguf.config import write_json
from weft.model.gguf.file import GgufFile, short

CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2  # token types that stand for themselves and are never cut


def write_tokenizer(file: GgufFile, config: dict[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json for a byte-level BPE vocabulary."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise UnsupportedModel(
            f"{file.path} has a tokenizer of kind {kind}; weft builds byte-level BPE (gpt2) tokenizers from GGUF "
            "files, so use a folder in mlx-lm's format for this model"
        )
    tokens = file.get("tokenizer.ggml.tokens", list)
    if len(tokens) > config["vocab_size"] or len(set(tokens)) != len(tokens):
        raise BadModel(f"{file.path} has {len(tokens)} tokens, some twice or more than its {config['vocab_size']} embeddings")
    named = {f"{name}_token": _token_named(file, tokens, key) for name, key in TOKEN_KEYS.items()}
    _build_tokenizer(file, tokens, named["bos_token"]).save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "add_bos_token": bool(file.metadata.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": file.metadata.get("tokenizer.chat_template"),
        **named,
    }
    write_json(folder / "tokenizer_config.json", {key: value for key, value in facts.items() if value is not None})


TOKEN_KEYS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _token_named(file: GgufFile, tokens: list[str], key: str) -> str | None:
    position = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if position is None:
        return None
    if not isinstance(position, int) or not 0 <= position < len(tokens):
        raise BadModel(f"{file.path} says its {key} token is {short(position)}, but it has {len(tokens)} tokens")
    return tokens[position]


def _build_tokenizer(file: GgufFile, tokens: list[str], bos: str | None) -> Any:
    """Any: the stubs of `tokenizers` know no setters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    merges = [_merge(file, text) for text in file.get("tokenizer.ggml.merges", list)]
    pre = file.get("tokenizer.ggml.pre", str)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in LLAMA3)
    except Exception as error:  # tokenizers raises nothing narrower
        raise BadModel(f"{file.path} has a vocabulary that does not fit its merges ({error}); download it again") from error
    tokenizer: Any = Tokenizer(model)
    if pre in QWEN2:
        from tokenizers.normalizers import NFC

        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]
    )
    return tokenizer


BEFORE_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SMOLLM, GPT2, QWEN2, LLAMA3 = ("smollm",), ("gpt-2", "default"), ("qwen2",), ("llama-bpe", "llama3", "llama-v3")


def _pre_tokenizer(file: GgufFile, pre: str) -> Any:
    """How text is cut before merging. A wrong cut gives wrong tokens without any error, so unknown ones are refused."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if pre in SMOLLM:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre in GPT2:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in QWEN2 + LLAMA3:
        pattern = BEFORE_DIGITS + (r"\p{N}" if pre in QWEN2 else r"\p{N}{1,3}") + AFTER_DIGITS
        return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    raise UnsupportedModel(
        f"{file.path} cuts its text with the pre-tokenizer {pre}; weft knows "
        f"{', '.join(SMOLLM + GPT2 + QWEN2 + LLAMA3)}, so use a folder in mlx-lm's format for this model"
    )


def _merge(file: GgufFile, text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    if not left or not right:
        raise BadModel(f"{file.path} has the merge {text!r}, which is not two parts; download it again")
    return left, right
