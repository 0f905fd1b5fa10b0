"""Conversation → prompt text, by the model's own chat template, caught and explained when it fails.

A template is Jinja from an unknown hand, so it runs in a sandbox. When it fails the caller is told its words; raw text
is never used instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.errors import BadModel, InvalidRequest

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's way of writing a conversation down."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise BadModel(f"the model's chat template is broken at line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def of(folder: Path) -> ChatTemplate | None:
        """The template of a model folder; None for a model that has none."""
        settings: dict[str, Any] = {}
        path = folder / "tokenizer_config.json"
        if path.is_file():
            try:
                settings = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise BadModel(f"{path} is not JSON: {error}; fetch the file again") from error
        source = settings.get("chat_template")
        if isinstance(source, list):  # several by name
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        if (own := folder / "chat_template.jinja").is_file():
            source = own.read_text(encoding="utf-8")
        if not isinstance(source, str):
            return None
        special = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return ChatTemplate(source, {name: text for name, text in special.items() if text is not None})

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **more: Any) -> str:
        """Messages → prompt text. Raises InvalidRequest with the template's own words."""
        values = {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            **self._special_tokens,
            **more,
        }
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from error


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
