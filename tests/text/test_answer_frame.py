"""What a model writes around its answer is found by letting its template write some, after the manner of five families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from weft.grammar.compiler import Compiler
from weft.ipc.messages import TokenLogprob
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.tools import read_tool_selection, read_tools
from weft.text.types import CallOpened, Conversation, Delta, GenerationRequest, Message, Reasoning, Text

SENT: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("add", "sub")
)
TOOLS = read_tools(SENT)
TALK = Conversation((Message("user", "Why?"),), SENT)
PLAIN = GenerationRequest(model=None, prompts=(replace(TALK, tools=()),), sampling={})
CALLING = replace(PLAIN, prompts=(TALK,), tool_choice=read_tool_selection(None, TOOLS))
SHOWN = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
LOOP = (
    SHOWN
    + "{% for m in messages %}{% if m.role == 'assistant' %}ASSISTANT{% elif m.role == 'tool' %}[T]{{ m.content }}{% else %}[U]"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}PROMPT{% endif %}"
)
SOLAR = "<|tool_call:begin|>abcdefghi{{ loop.index0 }}<|tool_call:name|>NAME<|tool_call:args|>ARGS<|tool_call:end|>"
HERMES = '<tool_call>\\n{"name": "NAME", "arguments": ARGS}\\n</tool_call>'


def template(assistant: str, prompt: str, call: str, around: tuple[str, str] = ("", "")) -> str:
    one = (
        call.replace("NAME", "{{ c.function.name }}").replace("ARGS", "{{ c.function.arguments | tojson }}").replace("\\n", "\n")
    )
    calls = f"{{% if m.tool_calls %}}{around[0]}{{% for c in m.tool_calls %}}{one}{{% endfor %}}{around[1]}{{% endif %}}"
    return LOOP.replace("ASSISTANT", assistant.replace("CALLS", calls)).replace("PROMPT", prompt)


def hermes(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>'


def solar(name: str) -> str:
    return f'<|tool_call:begin|>abcdefghij<|tool_call:name|>{name}<|tool_call:args|>{{"a": 1}}<|tool_call:end|>'


THINK = "<|open|>think<|sep|>{{ m.reasoning_content or '' }}<|close|>think<|sep|>"
FAMILIES: dict[str, tuple[str, tuple[str, ...], dict[str, tuple[str, str, list[str]]]]] = {
    "whose answer without reasoning begins with the close marker": (  # MiniMax-M3
        template(
            "[A]{% if m.reasoning_content %}<mm:think>{{ m.reasoning_content }}{% endif %}</mm:think>"
            "{{ m.content or '' }}CALLS<eot>",
            "[A]",
            HERMES,
        ),
        ("<mm:think>", "</mm:think>", "<tool_call>", "</tool_call>"),
        {
            "</mm:think>Hi": ("", "Hi", []),
            "<mm:think>hm</mm:think>Hi": ("hm", "Hi", []),
            "</mm:think>" + hermes("add"): ("", "", ["add"]),
            "Hi</mm:think>": ("", "Hi</mm:think>", []),
        },
    ),
    "with a frame around the answer": (  # Kimi-K3
        template(
            f"<|open|>msg<|sep|>{THINK}<|open|>response<|sep|>{{{{ m.content or '' }}}}<|close|>response<|sep|>CALLS"
            "<|close|>msg<|sep|><|eot|>",
            "<|open|>msg<|sep|><|open|>think<|sep|>",
            HERMES,
        ),
        ("<|open|>", "<|close|>", "<|sep|>", "<|eot|>", "<tool_call>", "</tool_call>"),
        {
            "hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>": ("hm", "Hi", []),
            "hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|close|>msg<|sep|>": ("hm", "Hi", []),
            "hm<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>" + hermes("add"): ("hm", "", ["add"]),
            "hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>" + hermes("sub"): ("hm", "Hi", ["sub"]),
            "hm<|close|>think<|sep|><|open|>response<|sep|>a<|close|>b": ("hm", "a<|close|>b", []),
        },
    ),
    "of messages with a recipient": (  # muse
        template(
            "{% if m.reasoning_content %}<|start|>assistant to=self<|message|>{{ m.reasoning_content }}<|eom|>{% endif %}"
            "{% if not m.tool_calls %}<|start|>assistant to=user<|message|>{{ m.content }}{% endif %}CALLS<|eot|>",
            "<|start|>assistant",
            "{% if not loop.first %}<|eom|>{% endif %}<|start|>assistant to={{ c.function.name }}<|message|>"
            "<atem:function_calls>\\n"
            '<atem:invoke name="NAME">\\n{% for k, v in c.function.arguments.items() %}<atem:parameter name="{{ k }}">{{ v }}'
            "</atem:parameter>\\n{% endfor %}</atem:invoke>\\n</atem:function_calls>",
        ),
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        {
            " to=add<|message|>MUSEadd": ("", "", ["add"]),
            " to=self<|message|>hm<|eom|><|start|>assistant to=add<|message|>MUSEadd": ("hm", "", ["add"]),
            " to=user<|message|>Hi<|eom|><|start|>assistant to=sub<|message|>MUSEsub": ("", "Hi", ["sub"]),
            " to=add<|message|>MUSEadd<|eom|><|start|>assistant to=sub<|message|>MUSEsub": ("", "", ["add", "sub"]),
            " to=user<|message|>Go to=add now": ("", "Go to=add now", []),
        },
    ),
    "of messages with a kind": (  # Solar-Open
        template(
            "{% if m.reasoning %}<|begin|>assistant<|think|>{{ m.reasoning }}<|end|>{% endif %}"
            "{% if m.tool_calls %}<|begin|>assistantCALLS{% endif %}"
            "{% if not m.tool_calls %}<|begin|>assistant<|content|>{{ m.content }}<|end|>{% endif %}",
            "<|begin|>assistant",
            SOLAR,
            ("<|tool_calls|>", "<|calls|>"),
        ),
        ("<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>"),
        {
            "<|content|>Hi<|end|>": ("", "Hi", []),
            "<|think|>hm<|end|><|begin|>assistant<|content|>Hi<|end|>": ("hm", "Hi", []),
            f"<|think|>hm<|end|><|begin|>assistant<|tool_calls|>{solar('add')}<|calls|>": ("hm", "", ["add"]),
            "<|content|>a<|end|>b": ("", "a<|end|>b", []),
        },
    ),
    "whose prompt asks for the answer in tags": (  # Granite 3.3
        "{% if thinking %}Write thoughts between <think></think> and the answer between <response></response>.{% endif %}"
        + template("[A]{{ m.content or '' }}CALLS<eot>", "[A]", HERMES),
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        {
            "<think>hm</think><response>Hi</response>": ("hm", "Hi", []),
            "<think>hm</think>Hi": ("hm", "Hi", []),
            "<think>hm</think><response>a</response> b": ("hm", "a</response> b", []),
        },
    ),
}
CASES = [(family, text) for family, (_, _, texts) in FAMILIES.items() for text in texts]


def codec_of(folder: Path, family: str) -> Codec:
    source, special, _ = FAMILIES[family]
    text = (TINY_HYBRID / "tokenizer.json").read_text()
    for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        text = text.replace(f'"{mark}"', f'"{mark[:-1]}_other>"')
    (folder / "tokenizer.json").write_text(text)
    inner: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(list(special))
    inner.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(source)
    return Codec(folder)


def muse(text: str) -> str:
    for name in ("add", "sub"):
        call = (
            f'<atem:function_calls>\n<atem:invoke name="{name}">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
        )
        text = text.replace(f"MUSE{name}", call + "</atem:function_calls>")
    return text


def read(one: Codec, generation: GenerationRequest, text: str) -> list[Delta]:
    (prompt,) = one.encode_request(generation)
    reader = one.reader(generation, prompt)
    deltas: list[Delta] = []
    for token in one.tokenizer.encode(text, add_special_tokens=False):
        deltas += reader.feed(token, TokenLogprob(token, -1.0) if generation.sampling else None)
    return deltas + reader.finish()


def parts(deltas: list[Delta]) -> tuple[str, str, list[str]]:
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    text = "".join(delta.text for delta in deltas if isinstance(delta, Text))
    return thought, text, [delta.name for delta in deltas if isinstance(delta, CallOpened)]


@pytest.mark.parametrize(("family", "text"), CASES)
def test_the_frame_of_an_answer_is_no_part_of_it(tmp_path: Path, family: str, text: str) -> None:
    one, wanted = codec_of(tmp_path, family), FAMILIES[family][2][text]
    switched = replace(CALLING.prompts[0], template_kwargs={"thinking": True})  # type: ignore[type-var]

    deltas = read(one, replace(CALLING, prompts=(switched,)), muse(text))  # type: ignore[arg-type]

    assert parts(deltas) == wanted
    if not wanted[2]:
        assert parts(read(one, PLAIN, muse(text))) == wanted


@pytest.mark.parametrize(("family", "text"), [case for case in CASES if not FAMILIES[case[0]][2][case[1]][2]])
def test_log_probabilities_are_those_of_the_answer_without_its_frame(tmp_path: Path, family: str, text: str) -> None:
    one, wanted = codec_of(tmp_path, family), FAMILIES[family][2][text]

    deltas = read(one, replace(PLAIN, sampling={"logprobs": 0}), text)

    tokens = [token for delta in deltas if isinstance(delta, Text) for token in delta.tokens]
    assert "".join(token.text for token in tokens).endswith(wanted[1])
    assert sum(len(token.text) for token in tokens) <= len(wanted[1]) + 1


REQUIRED = replace(CALLING, tool_choice=read_tool_selection("required", TOOLS))


@pytest.mark.parametrize(("family", "text"), [case for case in CASES if FAMILIES[case[0]][2][case[1]][2]])
def test_a_required_call_may_come_as_the_template_writes_it(tmp_path: Path, family: str, text: str) -> None:
    one, wanted = codec_of(tmp_path, family), FAMILIES[family][2][text]
    if wanted[1]:
        return  # with text in front of the call
    (prompt,) = one.encode_request(REQUIRED)
    assert prompt.constraint is not None
    assert prompt.constraint.grammar is not None
    spec = prompt.constraint.reasoning
    answer = text if spec is None or not wanted[0] else text.partition(spec.close)[2]
    answer = answer.removeprefix("" if one.reasoning is None else one.reasoning.begin)
    gap = "" if spec is None or not wanted[0] else spec.gap

    matcher = Compiler(tmp_path / "tokenizer.json", 4200, (4082,)).compile(prompt.constraint.grammar)
    ids = one.tokenizer.encode(muse(answer.removeprefix(gap)), add_special_tokens=False)

    for place, token in enumerate(ids):
        assert matcher.allows(token), one.tokenizer.decode(ids[place:], skip_special_tokens=False)
        matcher.accept(token)
    assert matcher.is_finished or matcher.allows(4082)
    assert parts(read(one, REQUIRED, muse(text))) == (wanted[0], "", wanted[2])
