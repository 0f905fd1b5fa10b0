"""How a model writes its reasoning is found by letting its template write some: templates after the manner of five families."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.messages import GrammarSpec
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.types import Conversation, Delta, Effort, GenerationRequest, Message, Reasoning, Text

LOOP = "{% for m in messages %}{% if m.role != 'assistant' %}[U]{{ m.content }}{% else %}ASSISTANT{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}GENERATION{% endif %}"
THOUGHT = "m.reasoning_content"
XML = "<|open|>{}<|sep|>"
FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {  # template, what the model writes, special tokens
    "of tags that open and close": (  # as Kimi-K3 does; the prompt opens the reasoning
        LOOP.replace(
            "ASSISTANT",
            "<|open|>msg<|sep|><|open|>think<|sep|>{{ m.reasoning_content }}<|close|>think<|sep|>"
            "<|open|>response<|sep|>{{ m.content }}",
        )
        + PROMPT.replace("GENERATION", "<|open|>msg<|sep|><|open|>think<|sep|>"),
        "hm<|close|>think<|sep|><|open|>response<|sep|>Hi",
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "of a tag with a prefix": (  # MiniMax-M3
        LOOP.replace(
            "ASSISTANT",
            "[A]{% if m.reasoning_content %}<mm:think>{{ m.reasoning_content }}{% endif %}</mm:think>{{ m.content }}",
        )
        + PROMPT.replace("GENERATION", "[A]"),
        "<mm:think>hm</mm:think>Hi",
        ("<mm:think>", "</mm:think>"),
    ),
    "of a tag that is put together": (  # Hy3, which does not reason unless it is told to
        "{% set t = '<think{}>'.format(':open') %}{% set e = '</think{}>'.format(':open') %}"
        + LOOP.replace("ASSISTANT", "[A]{{ t }}{{ m.reasoning_content }}{{ e }}{{ m.content }}")
        + "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high', 'no_think'] %}"
        "{{ raise_exception('reasoning_effort error') }}{% endif %}"
        + PROMPT.replace("GENERATION", "[A]{{ t }}{% if reasoning_effort not in ['low', 'high'] %}{{ e }}{% endif %}"),
        "hm</think:open>Hi",
        ("<think:open>", "</think:open>"),
    ),
    "of messages with a kind": (  # Solar-Open
        LOOP.replace(
            "ASSISTANT",
            "{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}"
            "<|begin|>assistant<|content|>{{ m.content }}<|end|>",
        )
        + PROMPT.replace("GENERATION", "<|begin|>assistant"),
        "<|think|>hm<|end|><|begin|>assistant<|content|>Hi",
        ("<|begin|>", "<|end|>", "<|think|>", "<|content|>"),
    ),
    "of messages with a recipient": (  # muse
        LOOP.replace(
            "ASSISTANT",
            "{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}"
            "<|start|>assistant to=user<|message|>{{ m.content }}<|eot|>",
        )
        + PROMPT.replace("GENERATION", "<|start|>assistant"),
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hi",
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    ),
}
EFFORTS: tuple[Effort, ...] = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
TALK = Conversation((Message("user", "Why?"),))
PLAIN = GenerationRequest(model=None, prompts=(TALK,), sampling={})


def codec_of(folder: Path, template: str, *special: str) -> Codec:
    """A model with this template, and the tiny vocabulary but for its own markers."""
    text = (TINY_HYBRID / "tokenizer.json").read_text()
    for mark in ("<think>", "</think>"):
        text = text.replace(f'"{mark}"', f'"{mark[:-1]}_other>"')
    (folder / "tokenizer.json").write_text(text)
    inner: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(list(special))
    inner.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return Codec(folder)


def told(one: Codec, generation: GenerationRequest, text: str) -> tuple[str, str, int]:
    """Reasoning, answer, and the number of reasoning tokens."""
    (prompt,) = one.encode_request(generation)
    reader = one.reader(generation, prompt)
    deltas: list[Delta] = []
    for token in one.tokenizer.encode(text, add_special_tokens=False):
        deltas += reader.feed(token)
    deltas += reader.finish()
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    return thought, "".join(delta.text for delta in deltas if isinstance(delta, Text)), reader.num_reasoning_tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_comes_as_reasoning_where_only_the_template_says_how_it_is_written(tmp_path: Path, family: str) -> None:
    template, text, special = FAMILIES[family]
    one = codec_of(tmp_path, template, *special)

    thinking = replace(PLAIN, effort="high")

    assert told(one, thinking, text)[:2] == ("hm", "Hi")


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_effort_acts_where_reasoning_is_found(tmp_path: Path, family: str, effort: Effort) -> None:
    template, _, special = FAMILIES[family]
    one = codec_of(tmp_path, template, *special)

    (prompt,) = one.encode_request(replace(PLAIN, effort=effort))

    has_words = bool(one.efforts.words)
    budget = None if prompt.constraint is None or prompt.constraint.reasoning is None else prompt.constraint.reasoning.budget
    if effort == "none":
        assert prompt.closed or budget == 0
    elif has_words:
        assert not prompt.closed
    else:
        assert budget is not None or effort in ("xhigh", "max")


def test_a_model_that_writes_its_reasoning_in_channels_refuses_to_leave_it_out_by_name(tmp_path: Path) -> None:
    shutil.copy(TINY_HYBRID / "tokenizer.json", tmp_path)
    shutil.copy(Path(__file__).parent / "templates" / "gpt-oss.jinja", tmp_path / "chat_template.jinja")
    one = Codec(tmp_path)
    none = replace(PLAIN, effort="none")

    with pytest.raises(UnsupportedParameter, match="reasoning_effort none") as caught:
        one.encode_request(none)

    assert caught.value.param == "reasoning_effort"
    assert one.fitted(replace(none, is_flexible=True)).effort is None  # agents that switch it off get an answer all the same
    for effort in EFFORTS[1:]:
        assert one.encode_request(replace(PLAIN, effort=effort))


@pytest.mark.parametrize("stop", ["</think>", "\n</think>", "<think>"])
def test_a_stop_string_that_is_a_marker_acts_in_a_chat(stop: str) -> None:
    one = Codec(TINY_HYBRID)
    asked = replace(PLAIN, stops=(stop,))

    thought, answer, _ = told(one, asked, "hm</think>Hi <think> there")

    assert (thought, answer) == ("hm", "" if "/" in stop else "Hi ")


@pytest.mark.parametrize("stop", ["x</think>", "<think>y", "</think>\n\nHi"])
def test_a_stop_string_with_a_marker_in_it_is_refused_before_anything_is_generated(stop: str) -> None:
    with pytest.raises(UnsupportedParameter, match="stop") as caught:
        Codec(TINY_HYBRID).encode_request(replace(PLAIN, stops=(stop,)))

    assert caught.value.param == "stop"


BEGUN = [  # the message that is continued, whether it is within the reasoning
    ("<think>\nLet me see. The user", True),
    ("<think>", True),
    ("\n<think>\n", True),
    ("<think>hm</think>So", False),
    ("Use <think> to", False),
    ("Use </think> to", False),
    ("Hello", False),
]


@pytest.mark.parametrize(("begun", "opened"), BEGUN)
def test_reasoning_that_is_continued_is_reasoning_until_it_closes(begun: str, opened: bool) -> None:
    one = Codec(TINY_HYBRID)
    talk = Conversation(
        (Message("user", "Why <think>?"), Message("assistant", begun)), add_generation_prompt=False, continue_final_message=True
    )
    asked = replace(PLAIN, prompts=(talk,), grammar=GrammarSpec("choice", '["\\nYes"]'))

    (prompt,) = one.encode_request(asked)

    assert prompt.constraint is not None
    assert prompt.constraint.reasoning is not None
    assert prompt.constraint.reasoning.opened == opened
    assert not prompt.constraint.reasoning.may_open
    shaped = told(one, asked, f"goes on</think>{one.reasoning.gap if one.reasoning else ''}\nYes" if opened else "\nYes")
    assert shaped[:2] == (("goes on", "\nYes") if opened else ("", "\nYes"))
    free = told(one, replace(asked, grammar=None), " goes on</think>\n\nYes <think>")
    assert free[:2] == ((" goes on", "Yes <think>") if opened else ("", " goes on</think>\n\nYes <think>"))


@pytest.mark.parametrize("decoder", ["strip", "metaspace"])
def test_the_first_blank_is_kept_where_a_text_goes_on_or_was_asked_for(tmp_path: Path, decoder: str) -> None:
    vocabulary = {"▁": 0, "▁Yes": 1, "Yes": 2, "▁Hello": 3, "<s>": 4, "a": 5}
    inner: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="a"))
    steps = tokenizers.decoders
    spaced = steps.Sequence([steps.Replace("▁", " "), steps.Fuse(), steps.Strip(" ", 1, 0)])
    inner.decoder = spaced if decoder == "strip" else steps.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    one = Codec(tmp_path)
    continued = Conversation((Message("user", "a"), Message("assistant", "a")), (), {}, False, True)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("a", {}, " Yes Yes"),
        ("", {}, "Yes Yes"),
        ((3,), {}, " Yes Yes"),
        (continued, {}, " Yes Yes"),
        (TALK, {}, "Yes Yes"),
        (TALK, {"grammar": GrammarSpec("choice", '[" Yes Yes"]')}, " Yes Yes"),
        (TALK, {"grammar": GrammarSpec("regex", " Yes Yes")}, " Yes Yes"),
    ]
    for prompt, more, text in cases:
        asked = replace(PLAIN, prompts=(prompt,), **more)
        (encoded,) = one.encode_request(asked)
        reader = one.reader(asked, encoded)
        assert "".join(delta.text for token in (1, 1) for delta in reader.feed(token) if isinstance(delta, Text)) == text


WORDS: dict[str, tuple[str, dict[Effort, str], dict[Effort, int | None]]] = {  # template, what is in the prompt, the budgets
    "whose strongest is what it writes for any other": (  # GLM-5.2
        "{% if enable_thinking is not defined or enable_thinking %}Effort: {{ 'High' if reasoning_effort == 'high' else 'Max' }}"
        "{% endif %}",
        {"minimal": "High", "low": "High", "medium": "High", "high": "High", "xhigh": "Max", "max": "Max"},
        {"minimal": 256, "low": 1024, "medium": 4096, "high": None, "max": None},
    ),
    "that acts only when the switch is on": (  # DeepSeek-V4
        "{% if thinking %}[on]{% if reasoning_effort == 'max' %}[most]{% endif %}{% endif %}",
        {"minimal": "[on]", "low": "[on]", "medium": "[on]", "high": "[on]", "xhigh": "[on][most]", "max": "[on][most]"},
        {"minimal": 256, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None, "max": None},
    ),
    "that only knows none": (  # Cohere's
        "{% if reasoning_effort == 'none' %}[off]{% endif %}",
        dict.fromkeys(("low", "medium", "high", "max"), ""),
        {"low": 1024, "medium": 4096, "high": 16384, "max": None},
    ),
    "whose default is its strongest": (  # Kimi-K3
        "{% if thinking_effort in ['low', 'high', 'max'] %}effort={{ thinking_effort }}{% else %}effort=max{% endif %}",
        {"minimal": "effort=low", "low": "effort=low", "medium": "effort=high", "high": "effort=high", "max": "effort=max"},
        {"minimal": None, "low": None, "medium": 4096, "high": None, "max": None},
    ),
    "with a switch of two words": (  # MiniMax-M3
        "{% if thinking_mode is defined %}mode={{ thinking_mode }}{% endif %}",
        dict.fromkeys(("low", "high", "max"), "mode=enabled") | {"none": "mode=disabled"},
        {"none": 0, "low": 1024, "high": 16384, "max": None},
    ),
    "that writes any word": (  # gpt-oss
        "Reasoning: {{ reasoning_effort | default('medium') }}.",
        {"low": "g: low.", "medium": "g: medium.", "high": "g: high.", "xhigh": "g: high.", "max": "g: high."},
        dict.fromkeys(("low", "medium", "high", "xhigh", "max")),
    ),
}
REASONING = LOOP.replace("ASSISTANT", "<think>{{ m.reasoning_content }}</think>{{ m.content }}") + PROMPT.replace(
    "GENERATION", "[A]"
)


@pytest.mark.parametrize("kind", WORDS)
def test_an_effort_is_a_word_that_changes_the_prompt_or_else_a_budget(tmp_path: Path, kind: str) -> None:
    lead, shown, budgets = WORDS[kind]
    one = codec_of(tmp_path, lead + REASONING)

    for effort in shown.keys() & budgets.keys():
        (prompt,) = one.encode_request(replace(PLAIN, effort=effort))
        text = one.tokenizer.decode(prompt.ids, skip_special_tokens=False).partition("[U]")[0]
        spec = None if prompt.constraint is None else prompt.constraint.reasoning

        assert text.endswith(shown[effort]) if shown[effort] else not text, effort
        assert (None if spec is None else spec.budget) == budgets[effort], effort


SWITCHES = {"enable_thinking": "enable_thinking", "thinking": "thinking", "thinking_mode": "thinking_mode == 'enabled'"}
ON: tuple[dict[str, Any], ...] = ({"effort": "low"}, {"effort": "max"}, {"thinking_budget": 5}, {"reasons": True})


@pytest.mark.parametrize("asked", ON)
@pytest.mark.parametrize("switch", SWITCHES)
def test_reasoning_that_is_asked_for_opens_a_prompt_that_the_template_closes(tmp_path: Path, switch: str, asked: Any) -> None:
    closing = REASONING.replace("[A]", f"[A]{{% if not ({SWITCHES[switch]}) %}}<think></think>{{% endif %}}")
    one = codec_of(tmp_path, closing)

    (left,), (prompt,) = one.encode_request(PLAIN), one.encode_request(replace(PLAIN, **asked))

    assert (left.closed, prompt.closed) == (True, False)


@pytest.mark.parametrize("asked", ON)
def test_reasoning_for_which_a_closed_prompt_leaves_no_room_is_refused_by_the_name_of_its_field(
    tmp_path: Path, asked: Any
) -> None:
    one = codec_of(tmp_path, REASONING.replace("[A]", "[A]<think></think>"))
    places = {"effort_place": "reasoning.effort", "budget_place": "thinking.budget_tokens"}
    place = "thinking.budget_tokens" if "thinking_budget" in asked else "reasoning.effort"

    with pytest.raises(UnsupportedParameter, match=place) as caught:
        one.encode_request(replace(PLAIN, **asked, **places))

    assert caught.value.param == place
    assert one.encode_request(replace(PLAIN, **asked, is_flexible=True))


@pytest.mark.parametrize(("effort", "value"), [("none", True), ("low", False), ("max", False)])
@pytest.mark.parametrize("name", ["enable_thinking", "thinking"])
def test_a_template_variable_that_says_the_opposite_of_the_effort_is_refused_with_both_names(
    name: str, effort: Effort, value: bool
) -> None:
    talk = replace(TALK, template_kwargs={name: value})

    with pytest.raises(InvalidRequest, match=f"reasoning_effort {effort} and chat_template_kwargs.{name} contradict"):
        Codec(TINY_HYBRID).encode_request(replace(PLAIN, prompts=(talk,), effort=effort))
