"""A model's chat template: renders messages into prompt text, and is probed for the message shapes that it accepts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, Self, get_args

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment

from weft.errors import BadModel, TemplateFailed, TemplateTooCostly
from weft.ipc.limits import MAX_RENDERED_CHARACTERS, MAX_TEMPLATE_CHARACTERS

ArgumentsForm = Literal["object", "text"]
NoContent = Literal["empty", "null", "absent"]
CallText = Literal["beside", "before", "lost"]

# Words that no template writes by itself. A probe uses each of its words once.
_ONE, _TWO, _THREE, _FOUR, _FIVE = "zqoriolezq", "zqheronzq", "zqploverzq", "zqmerlinzq", "zqjackdawzq"
_KEY, _VALUE, _TOOL, _STRAY = "zqkeyzq", "zqvaluezq", "zqtoolzq", "zqstrayzq"
_ARGUMENTS: dict[ArgumentsForm, Any] = {"object": {_KEY: _VALUE}, "text": f'{{"{_KEY}": "{_VALUE}"}}'}
_BARE_TOOL: dict[str, Any] = {"type": "function", "function": {"name": _TOOL}}
_FULL_TOOL = {**_BARE_TOOL, "function": {"name": _TOOL, "description": "d", "parameters": {"type": "object", "properties": {}}}}
# What must not be in a prompt: keys of a part, arguments encoded twice, arguments as Python prints them.
_SLIPS = (_STRAY, f'\\"{_KEY}', f"{{'{_KEY}")
RESULT_ROLES = ("tool", "observation", "function", "ipython")
# Ids of a probe's calls; the last is for templates that write only the id.
_ANY_ID, _NINE_ID, _NAMING_ID = "call_{number}", "call0000{number}", "functions.{name}:{index}"


class TemplateRunner(Protocol):
    """What compiles and runs templates, which are foreign programs: here, or in a process that can be killed."""

    def compile(self, source: str) -> None:
        """Compile a template; raise BadModel if it is broken."""

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Render a template; raise TemplateFailed if it refuses, TemplateTooCostly if it takes or writes too much."""


class ChatTemplate:
    """A model's Jinja chat template, with the second template that some models have for requests with tools."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_use: str | None = None,
        runner: TemplateRunner | None = None,
    ) -> None:
        self.source = source
        self._runner = runner or LocalTemplates()
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise BadModel(f"the model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are taken")
        with _as_bad_model():
            environment = _environment()
            read = meta.find_undeclared_variables(environment.parse(source))
        self._runner.compile(source)
        self._special_tokens = dict(special_tokens)
        self.with_tools = self if tool_use is None else ChatTemplate(tool_use, special_tokens, None, self._runner)
        own = frozenset(read - environment.globals.keys())
        self.variables: frozenset[str] = own if tool_use is None else own | self.with_tools.variables

    @classmethod
    def of(cls, folder: Path, runner: TemplateRunner | None = None) -> Self | None:
        """Load the chat template of a model folder; None if the folder has none. Raises BadModel for unreadable files."""
        settings = read_json_object(folder / "tokenizer_config.json")
        sources = _sources(read_json_object(folder / "chat_template.json").get("chat_template", settings.get("chat_template")))
        files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
        for file in filter(Path.is_file, files):
            try:
                sources["default" if file is files[0] else file.stem] = file.read_text(encoding="utf-8")
            except ValueError as error:
                raise BadModel(f"{file} is not UTF-8 text: {error}; fetch the file again") from error
        if "default" not in sources:
            return None
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in settings.items()}
        special = {name: text for name, text in texts.items() if name.endswith("_token") and isinstance(text, str) and text}
        return cls(sources["default"], special, sources.get("tool_use"), runner)

    def render(self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **more: Any) -> str:
        """Render messages into prompt text. Raises TemplateFailed, with the template's own error message, if rendering fails."""
        values = {"tools": None, "documents": None, **self._special_tokens, **more}
        values |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        template = self.with_tools if values["tools"] else self
        try:
            return self._runner.render(template.source, values)
        except TemplateFailed:
            if values.pop("tools") is not None:
                raise
            with suppress(TemplateFailed):  # some templates count the tools wherever the variable is there
                return self._runner.render(template.source, values)
            raise


class LocalTemplates:
    """Compiles and runs templates in this process: their output is limited, their time is not."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def compile(self, source: str) -> None:
        with _as_bad_model():
            self._compiled[source] = self._environment.from_string(source)

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        if source not in self._compiled:
            self.compile(source)
        try:
            return _join_limited(self._compiled[source].generate(_as_given(dict(values))))
        except TemplateTooCostly:
            raise
        except Exception as error:  # a template is a foreign program: it can fail in any way, and costs this request only
            words = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise TemplateFailed(f"the model's chat template refuses these messages: {words}", "messages") from error


@contextmanager
def _as_bad_model() -> Iterator[None]:
    """Turn what a broken template raises when it is read into BadModel."""
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        raise BadModel(f"the model's chat template is broken at line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, OverflowError) as error:
        raise BadModel(f"the model's chat template can not be compiled: {type(error).__name__}") from error


def _join_limited(pieces: Iterator[str]) -> str:
    """Join what a template writes, until it is too much."""
    kept, size = [], 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            message = f"the model's chat template writes more than {MAX_RENDERED_CHARACTERS} characters for these messages"
            raise TemplateTooCostly(f"{message}; shorten them", "messages")
    return "".join(kept)


class Capabilities:
    """The message shapes that a template renders correctly, found by rendering small conversations, with or without a tool."""

    def __init__(self, template: ChatTemplate, *, with_tools: bool = False) -> None:
        self._template = template
        self._tools = [_FULL_TOOL] if with_tools else None
        # The forms of contents and calls are learnt first: the other probes build on them.
        self.text: set[str] = set()  # roles whose content may be a text
        self.parts: set[str] = set()  # roles whose content may be a list of text parts
        self.one_part: set[str] = set()  # roles whose content must be a list of one text part
        self._learn_content("user", [], [])
        question = self._question = self._talk(("user", _THREE))
        self._learn_content("system", [], question)
        self._learn_content("assistant", question, self._talk(("user", _FIVE)))
        self.arguments: frozenset[ArgumentsForm] = frozenset()  # forms of a call's arguments that come out right; none: no calls
        self.why_no_calls = ""  # what becomes of a call, where there are none
        self.result_role = ""  # the role of a tool's result; "" if there is none that comes out
        self.no_content: NoContent  # the content of a turn of nothing but calls
        self._learn_calls()
        self.result_role = "tool" if self.arguments else next(filter(self._shows_result, RESULT_ROLES), "")
        self.several_calls = self._takes_several_calls()  # in one turn, followed by their results
        self.any_call_id = self._call_id != _NINE_ID  # else nine letters or digits
        self.reasoning_key = self._find_reasoning_key()  # the key under which the reasoning of past turns is read
        text_and_reasoning = {"content": self._message("assistant", _TWO)["content"], self.reasoning_key: _FIVE}
        self.text_and_reasoning = self._render(self._call(also=text_and_reasoning)) != ""  # beside calls
        self.system = self._keeps_system()  # a system message at the front, and it stays there
        self.developer = self._knows_developer()  # a developer message at the front, as a role it knows
        self.late_system = self.system and self._keeps_late_system()  # system messages further on, each in its place
        users = self._talk(("user", _THREE), ("assistant", _ONE), ("user", _TWO), ("user", _FOUR))
        assistants = self._talk(("user", _THREE), ("assistant", _TWO), ("assistant", _FOUR), ("user", _ONE))
        talks = {"user": users, "assistant": assistants}
        self.repeats = {role for role in talks if self._shows(talks[role], _TWO, _FOUR)}  # roles that may have two turns in a row
        self.call_text: CallText = self._find_call_text()  # where a text stays: beside calls, in a turn before them, nowhere
        self.reasons_before_calls = self.call_text == "before" and self._keeps_reasoning_before_calls()  # in that turn
        self.text_stays_beside_calls = self.call_text == "beside" and self._keeps_text_beside_calls()  # when the talk goes on
        followed = [*self._call(), self._message("user", _FIVE)]
        self.user_follows_tool = not self.arguments or self._shows(followed, _FOUR, _FIVE)  # without an answer between them
        self.user_after_tool = self.user_follows_tool and self._keeps_reasoning_before_user()
        instructed = [self._message("system", _ONE), *question]
        self.tools_in_system = _TOOL not in self._render(question, tools=[_FULL_TOOL])  # only beside a system message, if at all
        asked = instructed if self.tools_in_system else question
        self.tools = _TOOL in self._render(asked, tools=[_FULL_TOOL])  # tools are written down
        self.bare_tools = _TOOL in self._render(asked, tools=[_BARE_TOOL])  # also those without description and parameters
        self.image = self._write_image()  # what is written for an image in a user's turn; "" for nothing
        self.images = {role for role in ("user", "tool") if self.image and self._takes_images(role)}  # roles that may send some

    def _talk(self, *turns: tuple[str, str]) -> list[dict[str, Any]]:
        return [self._message(role, word) for role, word in turns]

    @property
    def only_parts(self) -> set[str]:
        """Roles whose content can not be a string."""
        return (self.parts | self.one_part) - self.text

    def _message(self, role: str, word: str) -> dict[str, Any]:
        return {"role": role, "content": _parts(word) if role in self.only_parts else word}

    def _call(self, *names: str, form: ArgumentsForm | None = None, also: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return a conversation with calls of these tools in one turn, answered with _FOUR and _FIVE."""
        names = names or (_ONE,)
        arguments = _ARGUMENTS[form or ("text" if self.arguments == {"text"} else "object")]
        ids = [self._call_id.format(name=name, index=index, number=index + 1) for index, name in enumerate(names)]
        functions = [{"name": name, "arguments": arguments} for name in names]
        calls = [{"id": one, "type": "function", "function": function} for one, function in zip(ids, functions, strict=True)]
        content = {"empty": self._message("assistant", ""), "null": {"content": None}, "absent": {}}[self.no_content]
        results = [
            {"role": "tool", "content": word, "tool_call_id": one, "name": name}
            for word, one, name in zip((_FOUR, _FIVE), ids, names, strict=False)
        ]
        return [*self._question, {**content, "role": "assistant", "tool_calls": calls, **(also or {})}, *results]

    def _render(self, messages: list[dict[str, Any]], **more: Any) -> str:
        """Return the rendered prompt, or "" if the template refuses these messages."""
        try:
            return self._template.render(messages, **{"tools": self._tools, **more})
        except TemplateFailed:
            return ""

    def _shows(self, messages: list[dict[str, Any]], *words: str) -> bool:
        """Whether the rendered prompt has each word exactly once, in this order, and no text of `_SLIPS` (rendering errors)."""
        text = self._render(messages)
        places = [text.find(word) for word in words]
        once = all(text.count(word) == 1 for word in words)
        return once and places == sorted(places) and not any(slip in text for slip in _SLIPS)

    def _learn_content(self, role: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        if self._shows([*before, {"role": role, "content": _ONE}, *after], _ONE):
            self.text.add(role)
        if self._shows([*before, {"role": role, "content": _parts(_ONE, _TWO)}, *after], _ONE, _TWO):
            self.parts.add(role)
        if self._shows([*before, {"role": role, "content": _parts(_ONE)}, *after], _ONE):
            self.one_part.add(role)

    def _learn_calls(self) -> None:
        for call_id, no_content in product((_ANY_ID, _NINE_ID, _NAMING_ID), get_args(NoContent)):
            self._call_id, self.no_content = call_id, no_content
            self.arguments = frozenset(form for form in _ARGUMENTS if self._writes_call(form))
            if self.arguments:
                self.text.add("tool")
                return
        try:
            self._template.render(self._call(), tools=self._tools)
            self.why_no_calls = "it leaves them out"
        except TemplateFailed as error:
            self.why_no_calls = str(error)

    def _writes_call(self, form: ArgumentsForm) -> bool:
        called = self._call(form=form)
        called[-1]["name"] = _TWO  # so that the first name is that of the call
        after_question = self._render(called).partition(_THREE)[2]
        # Name and key may be there more than once: with the result, with a closing tag.
        is_named = _ONE in after_question and _KEY in after_question
        return is_named and "None" not in after_question and self._shows(called, _VALUE, _FOUR)

    def _find_call_text(self) -> CallText:
        spoken = self._message("assistant", _TWO)
        text = self._render(beside := self._call(also={"content": spoken["content"]}))
        if not self.arguments or (self._shows(beside, _TWO, _FOUR) and _VALUE in text and _ONE in text.partition(_THREE)[2]):
            return "beside"
        # An answer comes later: it must not make the text one answer too many.
        before = [*self._question, spoken, *self._call()[1:], self._message("assistant", _FIVE)]
        return "before" if self._shows(before, _TWO, _VALUE, _FOUR, _FIVE) else "lost"

    def _keeps_reasoning_before_calls(self) -> bool:
        spoken = {**self._message("assistant", _TWO), self.reasoning_key: _FIVE}
        return self._shows([*self._question, spoken, *self._call()[1:]], _FIVE, _TWO, _FOUR)

    def _keeps_text_beside_calls(self) -> bool:
        called = self._call(also={"content": self._message("assistant", _TWO)["content"]}) if self.arguments else []
        return bool(called) and self._shows([*called, *self._talk(("assistant", _FIVE), ("user", _TOOL))], _TWO, _FOUR, _FIVE)

    def _shows_result(self, role: str) -> bool:
        result = {"role": role, "content": _FOUR, "name": _TWO, "tool_call_id": self._call_id}
        return self._shows([*self._question, self._message("assistant", _ONE), result], _THREE, _ONE, _FOUR)

    def _takes_several_calls(self) -> bool:
        called = self._call(_ONE, _TWO)
        after_question = self._render(called).partition(_THREE)[2]
        return _ONE in after_question and _TWO in after_question and self._shows(called, _FOUR, _FIVE)

    def _write_image(self) -> str:
        """Return what the template writes for an image between two texts of a user; "" if it takes none."""
        content = [*_parts(_ONE), {"type": "image"}, *_parts(_TWO)]
        turn = [{"role": "user", "content": content}]
        return self._render(turn).partition(_ONE)[2].partition(_TWO)[0] if self._shows(turn, _ONE, _TWO) else ""

    def _takes_images(self, role: str) -> bool:
        content = [*_parts(_FIVE), {"type": "image"}, *_parts(_TWO)]
        before = [] if role == "user" else self._call()[:-1] if self.arguments else None
        if before is None:
            return False
        messages = [*before, {**self._call()[-1], "role": role, "content": content}]
        return self._shows(messages, _FIVE, _TWO) and self._render(messages).count(self.image) == 1

    def _find_reasoning_key(self) -> str:
        for key in ("reasoning_content", "thinking", "reasoning"):
            answered = [*self._question, {**self._message("assistant", _ONE), key: _TWO}]
            if any(_TWO in self._render(messages) for messages in (self._call(also={key: _TWO}), answered)):
                return key
        return "reasoning_content"

    def _keeps_system(self) -> bool:
        # Some templates write it into the last question, and lose it after a tool's result.
        system = self._message("system", _FIVE)
        talk = [system, *self._talk(("user", _THREE), ("assistant", _ONE), ("user", _TWO))]
        in_tool_loop = not self.arguments or self._shows([system, *self._call()], _FIVE, _FOUR)
        return in_tool_loop and self._shows(talk, _FIVE, _THREE, _TWO)

    def _keeps_late_system(self) -> bool:
        between = self._talk(("user", _ONE), ("assistant", _TWO), ("system", _FOUR), ("system", _FIVE), ("user", _THREE))
        after_tool = not self.arguments or self._shows([*self._call(), self._message("system", _FIVE)], _FOUR, _FIVE)
        return after_tool and self._shows(between, _ONE, _TWO, _FOUR, _FIVE, _THREE)

    def _knows_developer(self) -> bool:
        # A template that prints any role's name prints this one too, though its model has not seen it.
        system = self._message("system", _ONE)
        echo = self._render([{**system, "role": _STRAY}, *self._question]).lower()
        return _STRAY not in echo and self._shows([{**system, "role": "developer"}, *self._question], _ONE, _THREE)

    def _keeps_reasoning_before_user(self) -> bool:
        # Some templates take a user after a tool for a new question, and drop the reasoning since the last one: the prompt before
        # it must stay.
        called = self._call(also={self.reasoning_key: _TWO})
        before = self._render(called, add_generation_prompt=False)
        return self._render([*called, self._message("user", _FIVE)]).startswith(before)


def _parts(*words: str) -> list[dict[str, Any]]:
    """Build text parts with a stray key, which becomes visible if a template prints the list itself instead of its texts."""
    return [{"type": "text", "text": word, _STRAY: ""} for word in words]


class _GenerationTag(Extension):
    """Jinja extension that renders the body of `{% generation %}` blocks (they mark assistant text for training) unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _GivenList(list[Any]):
    """A list that was handed to the template, in contrast to those that it makes itself."""


class _GivenDict(dict[Any, Any]):
    """An object that was handed to the template, in contrast to those that it makes itself."""


for kind, shown in ((_GivenList, list), (_GivenDict, dict)):  # in error messages
    kind.__module__, kind.__name__ = shown.__module__, shown.__name__


def _as_given(value: Any) -> Any:
    if isinstance(value, dict):
        return _GivenDict((key, _as_given(one)) for key, one in value.items())
    return _GivenList(map(_as_given, value)) if isinstance(value, list | tuple) else value


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox in which a template may change the lists and dicts that it made itself, and nothing else."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) in (list, dict):
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        if isinstance(obj, _GivenList | _GivenDict):
            message = f"it calls {attribute!r} on a list or an object of the request, which is unsafe: it may change its own only"
            return self.undefined(message, name=attribute, obj=obj, exc=SecurityError)
        return super().unsafe_undefined(obj, attribute)


def _environment() -> jinja2.Environment:  # a sandbox: the template's author is unknown
    extensions: list[str | type[Extension]] = [_GenerationTag, "jinja2.ext.loopcontrols"]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json  # Jinja's own filter escapes for HTML; a prompt is not HTML
    environment.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _sources(given: Any) -> dict[str, str]:
    """Return template sources by name from a chat_template setting: a string is "default", a list names each; else {}."""
    if isinstance(given, str):
        return {"default": given}
    try:
        return {entry["name"]: entry["template"] for entry in given} if isinstance(given, list) else {}
    except (KeyError, TypeError) as error:
        raise BadModel("chat_template is a list in which not every entry has a name and a template") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a model's file; {} if the file is missing. Raises BadModel if it holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise BadModel(f"{path} is not JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise BadModel(f"{path} is not a JSON object; fetch the file again")
    return value
