"""Text ⇄ ids with the shipped model's own files, and templates that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import BadModel, InvalidRequest
from weft.model.resolve import TINY_HYBRID
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Detokenizer, Tokenizer

TOKENIZER = Tokenizer(TINY_HYBRID)


@settings(max_examples=150)
@given(st.text(max_size=60))
def test_streamed_pieces_are_the_whole_text_and_never_half_a_character(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed(token) for token in ids]

    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_gives_no_text() -> None:
    ids = TOKENIZER.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = Detokenizer(TOKENIZER)

    assert detokenizer.feed(ids[0]) == TOKENIZER.decode(ids[:1]) == ""


def test_the_shipped_template_renders_a_conversation() -> None:
    template = ChatTemplate.of(TINY_HYBRID)
    assert template is not None

    text = template.render([{"role": "user", "content": "Hello"}], enable_thinking=False)

    assert text.startswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) < len(text)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "No messages provided"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "System message must be at the beginning"),
        ([{"role": "wizard", "content": "a"}], "No user query"),
    ],
)
def test_a_template_that_refuses_is_quoted(messages: list[dict[str, str]], words: str) -> None:
    template = ChatTemplate.of(TINY_HYBRID)
    assert template is not None

    with pytest.raises(InvalidRequest, match=words):
        template.render(messages)


def test_a_template_can_not_reach_out_of_its_sandbox() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})

    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "a"}])


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(BadModel, match="line 2"):
        ChatTemplate("{% if a %}\n{% endfor %}", {})


def test_templates_are_found_by_name_in_a_list(tmp_path: Path) -> None:
    settings = {"chat_template": [{"name": "default", "template": "{{ bos_token }}hi"}], "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    template = ChatTemplate.of(tmp_path)

    assert template is not None
    assert template.render([]) == "<s>hi"


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)

    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModel, match=r"tokenizer\.json can not be read"):
        Tokenizer(tmp_path)
