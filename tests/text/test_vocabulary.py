"""One reading of a vocabulary: weft's bytes are what the tokenizers library decodes, or the model is served without grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders

from vocabularies import END, KINDS, METASPACE, REPLACE, write
from weft.errors import GrammarRejected, UnsupportedModel
from weft.grammar.compiler import Compiler
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec
from weft.model.resolve import TINY_HYBRID
from weft.vocabulary import Vocabulary

CHOICE = GrammarSpec("choice", '["New York"]')
# Decoders whose steps the library takes in an order, or over a whole text, where weft's bytes are a token's own.
READ_OTHERWISE = {
    "blanks are written after the bytes": ("gpt2", decoders.Sequence([decoders.ByteLevel(), decoders.Replace(" ", "_")])),
    "the whole text loses its blanks": ("metaspace", decoders.Sequence([decoders.Fuse(), METASPACE])),
    "two tokens are one word": ("metaspace", decoders.Sequence([REPLACE, decoders.Fuse(), decoders.Replace("o w", "o-w")])),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_decodes_every_token_to_its_bytes(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path)
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")

    assert vocabulary.difference(1024) is None
    assert Vocabulary(TINY_HYBRID / "tokenizer.json").difference(4096) is None


def rewritten(kind: str, folder: Path, change: Callable[[Any], None]) -> Compiler:
    """A compiler for a vocabulary of a kind whose tokenizer.json was changed."""
    write(kind, folder)
    inner: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    change(inner)
    inner.save(str(folder / "tokenizer.json"))
    return Compiler(folder / "tokenizer.json", 1024, (END,))


@pytest.mark.parametrize("name", READ_OTHERWISE)
def test_a_vocabulary_that_the_library_decodes_otherwise_is_used_for_no_grammar(name: str, tmp_path: Path) -> None:
    kind, decoder = READ_OTHERWISE[name]
    compiler = rewritten(kind, tmp_path, lambda inner: setattr(inner, "decoder", decoder))

    assert "the tokenizers library decodes" in str(compiler.tokenizer.problem)
    with pytest.raises(GrammarRejected, match="answers of this model can not be constrained: its tokenizer"):
        compiler.constraint(ConstraintSpec(CHOICE))


def test_without_grammars_reasoning_is_still_limited(tmp_path: Path) -> None:
    kind, decoder = READ_OTHERWISE["blanks are written after the bytes"]
    compiler = rewritten(kind, tmp_path, lambda inner: setattr(inner, "decoder", decoder))
    thinking = compiler.constraint(ConstraintSpec(None, ReasoningSpec("<think>", "</think>", True, False, budget=2)))
    for token in compiler.tokenizer.tokenize_str("ab"):
        assert not thinking.forced()
        thinking.accept(token)

    assert thinking.forced() == tuple(compiler.tokenizer.tokenize_str("</think>", parse_special=True))


def test_a_token_more_than_the_tokenizer_knows_is_no_text(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    known = Vocabulary(tmp_path / "tokenizer.json").inner.get_vocab_size()
    compiler = Compiler(tmp_path / "tokenizer.json", 2 * known, (END,))
    matcher = compiler.compile(GrammarSpec("regex", "(?s:.*)"))

    assert not matcher.mask()[known:].any()
    assert compiler.tokenizer.decode_bytes(range(known, 2 * known)) == b""


def test_a_vocabulary_without_an_end_token_ends_where_nothing_may_follow(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    compiler = Compiler(tmp_path / "tokenizer.json", 1024, ())
    constraint = compiler.constraint(ConstraintSpec(CHOICE))
    while not constraint.is_finished:
        assert constraint.matcher is not None
        (token,) = constraint.matcher.mask().nonzero()[0].tolist()
        constraint.accept(token)

    assert constraint.may_end


def test_a_decoder_that_weft_does_not_know_is_an_unsupported_model(tmp_path: Path) -> None:
    compiler = rewritten("gpt2", tmp_path, lambda inner: setattr(inner, "decoder", decoders.WordPiece()))

    with pytest.raises(UnsupportedModel, match="by the decoder"):
        assert compiler.tokenizer


def test_added_words_and_white_space_are_text_and_markers_are_not(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    vocabulary = Vocabulary(tmp_path / "tokenizer.json")
    plain = {json.dumps(vocabulary.added[token].content) for token in vocabulary.added.keys() - vocabulary.reserved_ids}

    assert plain == {'"\\u00f5"', '"covid"', '"\\n\\n"', '"    "'}
