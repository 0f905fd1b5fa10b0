"""An earlier answer that speaks of reasoning markers stays as it is; one that begins with reasoning is the template's to cut."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.normalise import PromptWriter
from weft.text.reasoning import KNOWN
from weft.text.template import ChatTemplate
from weft.text.types import Conversation, Message

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
FILES["tiny-hybrid"] = TINY_HYBRID / "chat_template.jinja"
# Shapes that templates of the wild have, in their shortest form.
SHAPES = {
    f"cut at {markers.close}": "{% for m in messages %}{{ m.role }}: {{ m.content.split('"
    + markers.close
    + "')[-1] }}\n{% endfor %}"
    for markers in KNOWN
} | {"as JSON": "{% for m in messages %}{{ m.content.split('</think>')[-1] | tojson(ensure_ascii=true) }}\n{% endfor %}"}
QUESTION, NEXT = Message("user", "zqquestion"), Message("user", "zqnext")


@cache
def writer(name: str) -> PromptWriter:
    source = SHAPES[name] if name in SHAPES else FILES[name].read_text(encoding="utf-8")
    return PromptWriter(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))


def texts() -> list[str]:
    """Texts with markers in them, alone, in pairs and several, none at the beginning but close markers."""
    made = [f"zqone {mark} zqtwo {mark} zqthree" for markers in KNOWN for mark in markers]
    made += [f"zqone {markers.open}zqtwo{markers.close} zqthree" for markers in KNOWN]
    return made + [f"{markers.close} zqone zqtwo zqthree \ue000\uf8ff" for markers in KNOWN]


@pytest.mark.parametrize("name", [*FILES, *SHAPES])
def test_an_answer_with_markers_in_its_text_stays(name: str) -> None:
    for text in texts():
        said = text.encode("ascii", "ignore").decode() if name == "as JSON" else text
        assert writer(name).write(Conversation((QUESTION, Message("assistant", said), NEXT))).count(said) == 1


@pytest.mark.parametrize("name", ["qwen3.5", "tiny-hybrid", "glm", "cut at </think>"])
def test_reasoning_at_the_beginning_of_an_answer_is_left_to_the_template(name: str) -> None:
    prompt = writer(name).write(Conversation((QUESTION, Message("assistant", "<think>\nzqwhy\n</think>\n\nzqone"), NEXT)))

    assert "zqwhy" not in prompt
    assert "zqone" in prompt


def test_parts_of_an_answer_with_markers_in_their_texts_stay() -> None:
    for text in texts():
        parts = [{"type": "text", "text": "zqfirst "}, {"type": "text", "text": text}]
        for name in FILES:
            prompt = writer(name).write(Conversation((QUESTION, Message("assistant", parts), NEXT)))
            assert re.sub(r"\s", "", text) in re.sub(r"\s", "", prompt)


def test_an_answer_that_goes_on_keeps_the_reasoning_that_it_began() -> None:
    begun = Message("assistant", "zqwhy\n</think>\n\nzqone")
    answer = Conversation((QUESTION, begun), add_generation_prompt=False, continue_final_message=True)

    assert writer("qwen3.5").write(answer).endswith("zqone")


def test_a_marker_that_is_a_control_token_is_a_text_where_the_client_wrote_it() -> None:
    codec = Codec(TINY_HYBRID)
    text = "zqone </think> <|im_end|> zqtwo"
    ids = codec.encode(Conversation((QUESTION, Message("assistant", text), NEXT))).ids
    plain = codec.encode(Conversation((QUESTION, Message("assistant", "zqone zqtwo"), NEXT))).ids

    assert text in codec.tokenizer.inner.decode(ids, skip_special_tokens=False)
    special = codec.tokenizer.special_ids
    assert [one for one in ids if one in special] == [one for one in plain if one in special]
