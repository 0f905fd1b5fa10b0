"""Messages → prompt text, by the model's own chat template, caught and explained when it fails.

A template is Jinja from an unknown hand, so it runs in a sandbox, with the helpers its author tested it with. When it
fails the caller is told its words; raw text is never used instead. Knows nothing of what clients send: `normalise` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.errors import BadModel, TemplateFailed

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's way of writing a conversation down. Some models have a second template for requests with tools."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None) -> None:
        self.source = source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            read = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise BadModel(f"the model's chat template is broken at line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self.with_tools = self if tool_use is None else ChatTemplate(tool_use, special_tokens)
        own = frozenset(read - environment.globals.keys())
        self.variables: frozenset[str] = own if tool_use is None else own | self.with_tools.variables

    @staticmethod
    def of(folder: Path) -> ChatTemplate | None:
        """The template of a model folder; None for a model that has none."""
        settings = _read_json(folder / "tokenizer_config.json")
        sources = _named(_read_json(folder / "chat_template.json").get("chat_template", settings.get("chat_template")))
        files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
        for file in filter(Path.is_file, files):
            sources["default" if file is files[0] else file.stem] = _read_text(file)
        if "default" not in sources:
            return None
        special = {name: text for name in settings if name.endswith("_token") and (text := _token_text(settings[name]))}
        return ChatTemplate(sources["default"], special, sources.get("tool_use"))

    def render(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **more: Any) -> str:
        """Messages → prompt text. Raises TemplateFailed with the template's own words."""
        values = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **more,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        template = self.with_tools._template if values["tools"] else self._template
        try:
            return template.render(values)
        except Exception as error:  # a template is a foreign program: it can fail in any way, and costs this request only
            words = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise TemplateFailed(f"the model's chat template refuses these messages: {words}", "messages") from error


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the model's own words for training; here its body is just written."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> jinja2.Environment:
    extensions: list[str | type[Extension]] = [_GenerationTag, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes what HTML would mistake; a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise BadModel(f"{path} is not UTF-8 text: {error}; fetch the file again") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadModel(f"{path} is not JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise BadModel(f"{path} is not a JSON object; fetch the file again")
    return value


def _named(source: Any) -> dict[str, str]:
    """Template sources by name. One alone is the default; several come as a list of names and templates."""
    if isinstance(source, str):
        return {"default": source}
    if not isinstance(source, list):
        return {}
    try:
        return {entry["name"]: entry["template"] for entry in source}
    except (KeyError, TypeError) as error:
        raise BadModel("chat_template is a list in which not every entry has a name and a template") from error


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
