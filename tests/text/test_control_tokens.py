"""Control tokens that clients write are text; those that a template writes are tokens. For every family of templates."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InvalidRequest
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.control_tokens import ControlTokens, Hiding
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Message, ToolCall

TEMPLATES = sorted(path.stem for path in (Path(__file__).parent / "templates").glob("*.jinja"))
# How the control tokens of these templates look.
CONTROL = re.compile(r"<\|[\w/]+\|?>|<\w+\|>|<｜[^｜>]+｜>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_\w+>|<sop>")
ALWAYS = ["<s>", "</s>", "<|endoftext|>"]


def source_of(family: str) -> str:
    return (Path(__file__).parent / f"templates/{family}.jinja").read_text(encoding="utf-8")


def control_texts(family: str) -> list[str]:
    return sorted({*ALWAYS, *CONTROL.findall(source_of(family))})


def model(folder: Path, family: str) -> Path:
    """The tiny vocabulary, with this family's control tokens and template."""
    inner = tokenizers.Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in control_texts(family)])
    inner.save(str(folder / "tokenizer.json"))
    shutil.copy(Path(__file__).parent / f"templates/{family}.jinja", folder / "chat_template.jinja")
    return folder


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Codec, Codec]:
    """A template's name, its codec, and one that takes all control tokens for tokens."""
    folder = model(tmp_path_factory.mktemp(request.param), request.param)
    return request.param, Codec(folder), Codec(folder, parse_special=True)


def asked(*messages: Message, **more: Any) -> Conversation:
    return Conversation(messages, **more)


def talk(word: str) -> Conversation:
    system, user, answer = (
        Message("system", f"Be {word}."),
        Message("user", f"Say {word}, {word}"),
        Message("assistant", f"It is {word}"),
    )
    return asked(system, user, answer, Message("user", word))


def in_parts(word: str) -> Conversation:
    """A word cut into two parts, which templates join."""
    half = len(word) // 2
    parts = [{"type": "text", "text": text} for text in ("Say ", word[:half], word[half:], " now")]
    return asked(Message("user", parts))


def with_tools(word: str) -> Conversation:
    """Everywhere in calls, results, definitions and reasoning; in JSON also as escapes."""
    escaped = "".join(f"\\u{ord(letter):04x}" if ord(letter) < 1 << 16 else letter for letter in word)
    call = ToolCall("look", f'{{"{escaped}": "{escaped}", "b": {json.dumps(word)}}}', "call00001")
    schema = {"type": "object", "properties": {word: {"type": "string", "description": word, "enum": [word]}}}
    tool = {"type": "function", "function": {"name": "look", "description": word, "parameters": schema}}
    result = Message("tool", f"found {word}", tool_call_id="call00001")
    messages = (Message("user", "Look"), Message("assistant", None, reasoning=f"so {word}", tool_calls=(call,)), result)
    return asked(*messages, tools=(tool,))


def specials(codec: Codec, conversation: Conversation) -> list[int]:
    return [token for token in codec.encode(conversation).ids if token in codec.tokenizer.special_ids]


@pytest.mark.parametrize("write", [talk, in_parts, with_tools])
def test_what_a_client_writes_is_never_a_control_token(
    family: tuple[str, Codec, Codec], write: Callable[[str], Conversation]
) -> None:
    name, codec, parsing = family
    try:
        own = specials(codec, write("harmless"))
    except InvalidRequest:
        pytest.skip(f"{name} has no place for this")
    for word in control_texts(name):
        written = write(word)
        ids = codec.encode(written).ids

        assert [token for token in ids if token in codec.tokenizer.special_ids] == own, word
        if (name, word) == ("gpt-oss", "<|channel|>"):
            continue  # where it is a token, the template refuses it
        assert len(specials(parsing, written)) > len(own) or write is not talk, word
        # The prompt's text is what it was: nothing is lost, replaced or written twice. This template sorts by characters.
        both = [one.tokenizer.decode(one.encode(written).ids, skip_special_tokens=False) for one in (codec, parsing)]
        assert both[0] == both[1] or (name == "gemma4" and sorted(both[0]) == sorted(both[1]))


@pytest.mark.parametrize(
    "word", ["harmless", "a | b || c", "<think>", "</think>x", "<", "<|", "[IN", "ends in <|im_", "｜", "\ue000 \ue001 | \uf8ff"]
)
@pytest.mark.parametrize("write", [talk, in_parts, with_tools])
def test_prompts_without_typed_control_tokens_have_the_ids_they_had(
    family: tuple[str, Codec, Codec], write: Callable[[str], Conversation], word: str
) -> None:
    name, codec, parsing = family
    try:
        before = parsing.encode(write(word))
    except InvalidRequest:
        pytest.skip(f"{name} has no place for this")

    assert codec.encode(write(word)) == before


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def codec_of(folder: Path, template: str) -> Codec:
    shutil.copy(TINY_HYBRID / "tokenizer.json", folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Codec(folder)


def test_no_control_token_is_made_of_what_a_template_takes_out_of_a_text(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, CHATML.replace("m.content", "m.content | replace('/no_think', '')"))

    assert len(specials(codec, asked(Message("user", "<|im_/no_thinkend|><|im_end/no_think|>")))) == 2


def test_no_control_token_is_made_of_a_name_and_the_brackets_around_it(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, CHATML.replace("{{ m.role }}", "{{ m.role }}<{{ m.name }}>"))

    assert len(specials(codec, asked(Message("user", "Hi", name="|im_end|")))) == 2


def test_json_that_a_template_writes_in_ascii_is_whole(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, CHATML.replace("m.content", "m.content | tojson(ensure_ascii=True)"))
    ids = codec.encode(asked(Message("user", "a|b <|im_end|> c"))).ids

    assert codec.tokenizer.decode(ids, skip_special_tokens=False) == '<|im_start|>user\n"a|b <|im_end|> c"<|im_end|>\n'


def test_boundaries_are_where_they_are_without_control_tokens(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, CHATML)
    texts = [f"{word} is the first part. " * 3 for word in ("<|im_end|>", "harmless")]
    found = []
    for text in texts:
        parts = [{"type": "text", "text": text}, {"type": "text", "text": "the second"}]
        encoded = codec.encode(asked(Message("user", parts, breakpoints=(0,))))
        found.append([codec.tokenizer.decode(encoded.ids[:at], skip_special_tokens=False) for at in encoded.boundaries])

    assert [[text.replace("<|im_end|>", "harmless", 9) for text in found[0]]] == [found[1]]
    assert found[1]


def test_a_word_of_the_vocabulary_that_is_a_control_token_is_spelt_out(tmp_path: Path) -> None:
    """Unigram vocabularies have their control tokens among their words."""
    words = [("<unk>", 0.0), ("<s>", 0.0), *((letter, -3.0) for letter in "<s>abc▁")]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(words, 0, byte_fallback=False))
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.add_special_tokens([tokenizers.AddedToken("<s>", special=True, normalized=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    control = ControlTokens(Tokenizer(tmp_path))
    hiding = Hiding(control)
    own, text = hiding.settle("<s>{}".format(*hiding.hide(["a<s>b"])))
    ids, _ = control.encode(text, own, [])

    assert text == "<s>a<s>b"
    assert ids.count(1) == 1
    assert "".join(map(control.tokenizer.token_text, ids)) == text


@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<|", "|", "x", " ", "é", "<", ">", "\n", "🎈", "\ue000"]), max_size=12
    )
)
def test_whatever_is_written_the_text_stays_and_no_control_token_comes(pieces: list[str]) -> None:
    control = ControlTokens(TOKENIZER)
    text = "".join(pieces)
    hiding = Hiding(control)
    own, settled = hiding.settle("<|im_start|>{}<|im_end|>".format(*hiding.hide([text]) or [text]))
    ids, _ = control.encode(settled, own, [])

    assert settled == f"<|im_start|>{text}<|im_end|>"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == settled
    assert [token for token in ids if token in TOKENIZER.special_ids] == [ids[0], ids[-1]]


TOKENIZER = Tokenizer(TINY_HYBRID)
