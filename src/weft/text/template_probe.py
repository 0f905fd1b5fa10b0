"""What a chat template does with the shapes that clients send, found by trying.

At load tiny conversations with unmistakable words are rendered and looked at: did it render, is every word there once
and in its place, is JSON still JSON. Knows no model names. `normalise` acts on what was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from weft.errors import TemplateFailed
from weft.text.template import ChatTemplate

ArgumentsForm = Literal["object", "text"]
NoContent = Literal["empty", "null", "absent"]

# Words that no template says of its own accord. A trial says each of its words once.
_ONE, _TWO, _THREE, _FOUR, _FIVE = "zqoriolezq", "zqheronzq", "zqploverzq", "zqmerlinzq", "zqjackdawzq"
_KEY, _VALUE, _TOOL, _STRAY = "zqkeyzq", "zqvaluezq", "zqtoolzq", "zqstrayzq"
_ARGUMENTS: dict[ArgumentsForm, Any] = {"object": {_KEY: _VALUE}, "text": f'{{"{_KEY}": "{_VALUE}"}}'}
_BARE_TOOL: dict[str, Any] = {"type": "function", "function": {"name": _TOOL}}
_SCHEMA = {"type": "object", "properties": {}}
_FULL_TOOL = {"type": "function", "function": {"name": _TOOL, "description": "d", "parameters": _SCHEMA}}
# What must not come out: keys of a part, arguments encoded twice, arguments as Python prints them.
_SLIPS = (_STRAY, f'\\"{_KEY}', f"{{'{_KEY}")
_NO_CONTENTS: tuple[NoContent, ...] = ("empty", "null", "absent")
_ANY_ID, _NINE_ID, _NAMING_ID = "call_1", "call00001", "functions.{name}:0"  # the last: of templates that write only the id


@dataclass(frozen=True)
class Capabilities:
    """What the template takes as it is."""

    system: bool  # a system message at the front, and it stays there
    developer: bool  # a developer message at the front, as a role it knows
    late_system: bool  # system messages further on, each in its place
    text: frozenset[str]  # roles whose content may be a text
    parts: frozenset[str]  # roles whose content may be a list of text parts
    repeats: frozenset[str]  # roles that may speak twice in a row
    user_after_tool: bool  # a user may speak right after a tool's result, and what stands before does not change by it
    tools: bool  # tools are written down
    bare_tools: bool  # also those without description and parameters
    arguments: frozenset[ArgumentsForm]  # forms of a call's arguments that come out as they should; none: no calls
    several_calls: bool  # in one turn
    any_call_id: bool  # else nine letters or digits
    no_content: NoContent  # how a turn of nothing but calls is told
    text_and_reasoning: bool  # beside calls
    reasoning_key: str  # where the thinking of past turns is read
    thinking_switch: bool  # `enable_thinking` changes the prompt

    @staticmethod
    def probe(template: ChatTemplate, *, with_tools: bool = False) -> Capabilities:
        """Try the template, with or without a tool at hand. Never raises: what fails is what it does not take."""
        trial = _TemplateTrial(template, with_tools)
        system = trial.keeps_system()
        on, off = (trial.rendered(trial.asked, enable_thinking=switch) for switch in (True, False))
        return Capabilities(
            system=system,
            developer=trial.knows_developer(),
            late_system=system and trial.keeps_late_system(),
            text=frozenset(trial.text),
            parts=frozenset(trial.parts),
            repeats=trial.repeating_roles(),
            user_after_tool=trial.lets_user_follow_tool(),
            tools=trial.lists(_FULL_TOOL),
            bare_tools=trial.lists(_BARE_TOOL),
            arguments=frozenset(trial.arguments),
            several_calls=trial.writes_several_calls(),
            any_call_id=trial.call_id != _NINE_ID,
            no_content=trial.no_content,
            text_and_reasoning=trial.takes_text_and_reasoning(),
            reasoning_key=trial.reasoning_key,
            thinking_switch=on != off,
        )


class _TemplateTrial:
    """One template on trial. How contents and calls must look is learnt first; the other questions build on that."""

    def __init__(self, template: ChatTemplate, with_tools: bool) -> None:
        self.template = template
        self.tools = [_FULL_TOOL] if with_tools else None
        self.text: set[str] = set()
        self.parts: set[str] = set()
        self.arguments: list[ArgumentsForm] = []
        self.learn_content("user", [], [])
        self.learn_content("system", [], self.asked)
        self.learn_content("assistant", self.asked, [self.say("user", _FIVE)])
        self.learn_calls()
        self.reasoning_key = self.find_reasoning_key()

    @property
    def asked(self) -> list[dict[str, Any]]:
        """A user's question: what most trials begin with."""
        return [self.say("user", _THREE)]

    def say(self, role: str, word: str) -> dict[str, Any]:
        """A message in a form that the template takes."""
        return {"role": role, "content": _parts(word) if role in self.parts - self.text else word}

    def called(self, *names: str, form: ArgumentsForm | None = None, also: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """A question, calls of the functions named, and a result."""
        arguments = _ARGUMENTS[form or (self.arguments or ["object"])[0]]
        functions = [{"name": name, "arguments": arguments} for name in names or (_ONE,)]
        ids = [self.call_id.format(name=name) for name in names or (_ONE,)]
        calls = [{"id": one, "type": "function", "function": function} for one, function in zip(ids, functions, strict=True)]
        content = {"empty": self.say("assistant", ""), "null": {"content": None}, "absent": {}}[self.no_content]
        result = {"role": "tool", "content": _FOUR, "tool_call_id": ids[0]}
        return [*self.asked, {**content, "role": "assistant", "tool_calls": calls, **(also or {})}, result]

    def rendered(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """The prompt; nothing where the template refuses."""
        try:
            return self.template.render(messages, **{"tools": self.tools, **more})
        except TemplateFailed:
            return ""

    def shows(self, messages: list[dict[str, Any]], *words: str) -> bool:
        """Whether it renders with each word once, in this order, and without slips."""
        text = self.rendered(messages)
        places = [text.find(word) for word in words]
        once = all(text.count(word) == 1 for word in words)
        return once and places == sorted(places) and not any(slip in text for slip in _SLIPS)

    def learn_content(self, role: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        if self.shows([*before, {"role": role, "content": _ONE}, *after], _ONE):
            self.text.add(role)
        if self.shows([*before, {"role": role, "content": _parts(_ONE, _TWO)}, *after], _ONE, _TWO):
            self.parts.add(role)

    def learn_calls(self) -> None:
        """The simplest way to hand over calls that works."""
        for call_id, no_content in product((_ANY_ID, _NINE_ID, _NAMING_ID), _NO_CONTENTS):
            self.call_id, self.no_content = call_id, no_content
            self.arguments = [form for form in _ARGUMENTS if self.writes_call(form)]
            if self.arguments:
                self.text.add("tool")
                return

    def writes_call(self, form: ArgumentsForm) -> bool:
        """Name and key may come more than once: with the result, with a closing tag."""
        called = self.called(form=form)
        since_asked = self.rendered(called).partition(_THREE)[2]
        named = _ONE in since_asked and _KEY in since_asked
        return named and "None" not in since_asked and self.shows(called, _VALUE, _FOUR)

    def lists(self, tool: dict[str, Any]) -> bool:
        return _TOOL in self.rendered(self.asked, tools=[tool])

    def keeps_system(self) -> bool:
        """Also later on: some templates write it into the latest question, and lose it where a tool spoke last."""
        said = self.say("system", _FIVE)
        talk = [said, *self.asked, self.say("assistant", _ONE), self.say("user", _TWO)]
        in_tool_loop = not self.arguments or self.shows([said, *self.called()], _FIVE, _FOUR)
        return in_tool_loop and self.shows(talk, _FIVE, _THREE, _TWO)

    def find_reasoning_key(self) -> str:
        for key in ("reasoning_content", "thinking", "reasoning"):
            answered = [*self.asked, {**self.say("assistant", _ONE), key: _TWO}]
            if any(_TWO in self.rendered(said) for said in (self.called(also={key: _TWO}), answered)):
                return key
        return "reasoning_content"

    def knows_developer(self) -> bool:
        """A template that prints any role's name prints this one too; its model has not seen it."""
        said = self.say("system", _ONE)
        echo = self.rendered([{**said, "role": _STRAY}, *self.asked]).lower()
        return _STRAY not in echo and self.shows([{**said, "role": "developer"}, *self.asked], _ONE, _THREE)

    def keeps_late_system(self) -> bool:
        late = [self.say("system", _FOUR), self.say("system", _FIVE)]
        between = [self.say("user", _ONE), self.say("assistant", _TWO), *late, *self.asked]
        after_tool = not self.arguments or self.shows([*self.called(), self.say("system", _FIVE)], _FOUR, _FIVE)
        return after_tool and self.shows(between, _ONE, _TWO, _FOUR, _FIVE, _THREE)

    def repeating_roles(self) -> frozenset[str]:
        users = [*self.asked, self.say("assistant", _ONE), self.say("user", _TWO), self.say("user", _FOUR)]
        assistants = [*self.asked, self.say("assistant", _TWO), self.say("assistant", _FOUR), self.say("user", _ONE)]
        return frozenset(role for role, said in (("user", users), ("assistant", assistants)) if self.shows(said, _TWO, _FOUR))

    def lets_user_follow_tool(self) -> bool:
        """Some templates take a user's word for a new question, and drop the thinking since the last one."""
        called = self.called(also={self.reasoning_key: _TWO})
        followed = [*called, self.say("user", _FIVE)]
        before = self.rendered(called, add_generation_prompt=False)
        return self.shows(followed, _FOUR, _FIVE) and self.rendered(followed).startswith(before)

    def writes_several_calls(self) -> bool:
        text = self.rendered(self.called(_ONE, _TWO))
        return _ONE in text and _TWO in text

    def takes_text_and_reasoning(self) -> bool:
        both = {"content": self.say("assistant", _TWO)["content"], self.reasoning_key: _FIVE}
        return self.rendered(self.called(also=both)) != ""


def _parts(*words: str) -> list[dict[str, Any]]:
    """Text parts that also carry a word which is not to be shown: a list printed as it is gives itself away."""
    return [{"type": "text", "text": word, _STRAY: ""} for word in words]
