"""Where a later prompt may part from this one, with templates of every kind."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.model.resolve import TINY_HYBRID
from weft.text.codec import BoundaryFinder
from weft.text.normalise import PromptWriter
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Message

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
FILES["tiny-hybrid"] = TINY_HYBRID / "chat_template.jinja"
# What marks a turn in these templates is one token in their models' vocabularies.
MARKS = """<s> </s> <|turn> <turn|> <start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> <|start|> <|message|> <|end|>
<|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST] <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜>""".split()  # noqa: SIM905 - a list would fill a page
RULES = "You weave cloth from many threads, and every thread stays itself. You never tear one. " * 2


def vocabulary() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))
    inner.add_special_tokens(MARKS)
    with tempfile.TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        return Tokenizer(Path(folder))


TOKENIZER = vocabulary()


class Writing:
    """One template's prompts, cut at their places."""

    def __init__(self, source: str) -> None:
        self.writer = PromptWriter(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))
        self.turns = BoundaryFinder(self.writer, TOKENIZER)

    def places(self, *messages: Message, **more: Any) -> tuple[list[int], tuple[int, ...]]:
        conversation = Conversation(messages, **more)
        return self.turns.encode(conversation, self.writer.write(conversation))

    def pieces(self, *messages: Message, **more: Any) -> list[str]:
        ids, places = self.places(*messages, **more)
        cuts = [0, *places, len(ids)]
        return [TOKENIZER.decode(ids[start:end], skip_special_tokens=False) for start, end in pairwise(cuts)]


@cache
def writing(name: str) -> Writing:
    return Writing(FILES[name].read_text(encoding="utf-8"))


def user(text: Any, *breakpoints: int) -> Message:
    return Message("user", text, breakpoints=breakpoints)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_a_prompt_is_cut_where_the_first_user_speaks_and_where_answers_begin() -> None:
    pieces = writing("tiny-hybrid").pieces(
        Message("system", RULES), user("Hello"), Message("assistant", "Hi."), user("More"), Message("assistant", "\n\nYes."),
        user("And more"),
    )  # fmt: skip

    assert pieces == [
        f"<|im_start|>system\n{RULES.strip()}<|im_end|>\n",
        "<|im_start|>user\nHello<|im_end|>\n",
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n",
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nAnd more<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n",
    ]


@pytest.mark.parametrize("name", FILES)
def test_the_same_instructions_are_a_piece_of_their_own_whoever_asks(name: str) -> None:
    """Also where the template writes them into the user's turn, and whatever white space the question begins with."""
    first, second = (
        writing(name).places(Message("system", RULES), user(text), Message("assistant", "Ok"), user("More"))
        for text in ("hi", "\n\n  Which?")
    )

    place = first[1][0]
    assert second[1][0] == place
    assert first[0][:place] == second[0][:place]
    assert RULES.strip() in TOKENIZER.decode(first[0][:place], skip_special_tokens=False)
    assert "hi" not in TOKENIZER.decode(first[0][place - 4 : place], skip_special_tokens=False)


def test_an_answer_that_begins_with_empty_lines_begins_where_it_was_asked_for() -> None:
    asked, answered = ([user("Hello")], [user("Hello"), Message("assistant", "\n\nHi."), user("More")])
    (_, earlier), (ids, places) = writing("chatml").places(*asked), writing("chatml").places(*answered)

    assert earlier[-1] in places
    assert TOKENIZER.decode(ids[earlier[-1] :], skip_special_tokens=False).startswith("<|im_start|>assistant\n\n\nHi.")


def test_tools_belong_to_the_instructions() -> None:
    tool = {"type": "function", "function": {"name": "look", "description": "which hi", "parameters": {"type": "object"}}}
    pieces = writing("tiny-hybrid").pieces(user("hi"), tools=(tool,))

    assert '"look"' in pieces[0]
    assert pieces[1] == "<|im_start|>user\nhi<|im_end|>\n"


def test_short_instructions_are_not_worth_a_cut() -> None:
    ids, places = writing("tiny-hybrid").places(Message("system", "Be brief."), user("Hello"))

    (place,) = places
    assert TOKENIZER.decode(ids[place:], skip_special_tokens=False).startswith("<|im_start|>assistant")


def test_a_marked_part_ends_a_piece() -> None:
    pieces = writing("tiny-hybrid").pieces(user(parts("A long document. ", "What is it about?"), 0))

    assert pieces[0] == "<|im_start|>user\nA long document."
    assert pieces[1] == " What is it about?<|im_end|>\n"


def test_a_text_that_is_there_twice_is_found_at_its_own_place() -> None:
    plain = [user("yes"), Message("assistant", "yes"), user("yes"), Message("assistant", "no"), user("yes")]
    marked = [*plain[:2], user("yes", 0), *plain[3:]]
    ids, places = writing("tiny-hybrid").places(*marked)
    (place,) = set(places) - set(writing("tiny-hybrid").places(*plain)[1])

    assert TOKENIZER.decode(ids[:place], skip_special_tokens=False).count("yes") == 3


def test_a_mark_that_ends_amid_a_token_is_put_before_it() -> None:
    pieces = Writing("{% for message in messages %}{{ message.content }}{% endfor %}").pieces(
        Message("user", parts("Once upon a ti", "me there was"), breakpoints=(0,))
    )

    assert pieces == ["Once upon a ti", "\nme there was"]
    joined = Writing("{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}")
    assert joined.pieces(Message("user", parts("Once upon a ti", "me there was"), breakpoints=(0,))) == [
        "Once upon a",
        " time there was",
    ]


def test_a_mark_on_what_the_template_rewrites_is_not_used() -> None:
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content | replace('\\n', ' ') }}\n{% endfor %}"
    with_mark, without = (
        Writing(template).places(user("two\nlines", *mark), Message("assistant", "Ok."), user("More")) for mark in ((0,), ())
    )

    assert with_mark == without


def test_a_mark_at_the_very_end_and_one_without_a_text_are_no_places() -> None:
    bare = Writing("{% for message in messages %}{{ message.content or '' }}{% endfor %}")

    assert bare.places(user("All of it", 0))[1] == ()
    assert bare.places(Message("tool", None, breakpoints=(0,)), user("Hello"))[1] == ()


def test_a_model_without_a_template_has_no_turns() -> None:
    turns = BoundaryFinder(None, TOKENIZER)

    assert turns.encode(Conversation((user("Hello"),)), "Hello there")[1] == ()


def test_a_template_that_refuses_the_simplest_talk_has_no_turns() -> None:
    template = (
        "{% if messages | length == 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content + messages[1].content }}"
    )

    assert Writing(template).places(user("a"), Message("assistant", "b"))[1] == ()


_words = st.text("ab \n.é", max_size=12).map(lambda text: f"x{text}")
_asked = st.tuples(_words, st.booleans()).map(lambda drawn: Message("user", drawn[0], breakpoints=(0,) if drawn[1] else ()))
_turns = st.tuples(_asked, _words.map(lambda text: Message("assistant", text)))


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=20)
@given(instructions=st.sampled_from(["", "x", RULES]), talk=st.lists(_turns, min_size=2, max_size=4))
def test_what_was_a_place_is_one_still_when_the_conversation_has_grown(
    name: str, instructions: str, talk: list[tuple[Message, Message]]
) -> None:
    """As far as the prompt is the same; a template may forget what the model thought."""
    said = [Message("system", instructions)] if instructions else []
    said += [message for turn in talk for message in turn]
    earlier_ids, earlier = writing(name).places(*said[:-1])
    ids, places = writing(name).places(*said, user("And now?"))
    common = next((at for at, (one, other) in enumerate(zip(earlier_ids, ids, strict=False)) if one != other), len(earlier_ids))

    assert list(places) == sorted(set(places))
    assert all(0 < place < len(ids) for place in places)
    assert {place for place in earlier if place <= common} == {
        place for place in places if place <= min(common, max(earlier, default=0))
    }
