"""A model's way with text: prompts become ids, ids become deltas. One per served model, made from its folder.

Knows the model's own files (tokenizer, template, advice on sampling) and nothing of engines or wires.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.chat.conversation import Conversation, Generation, LateSystem, Prompt, Token
from weft.chat.normalise import PromptWriter
from weft.chat.reader import Reader, shown
from weft.chat.template import ChatTemplate
from weft.chat.thinking import find_markers, opens_in
from weft.chat.tokenizer import Tokenizer
from weft.errors import BadModel, InvalidRequest
from weft.wire import Sampling, TokenLogprob

ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what generation_config.json may recommend
WIRE_DEFAULTS = {"temperature": 1.0}  # OpenAI's, where the model's makers say nothing


@dataclass(frozen=True)
class Written:
    """A prompt as the engine takes it; `opened` when it ends inside the thinking."""

    ids: list[int]
    opened: bool = False


class Scribe:
    """Reads and writes for one model."""

    def __init__(self, folder: Path, late_system: LateSystem = "fold") -> None:
        self.tokenizer = Tokenizer(folder)
        template = ChatTemplate.of(folder)
        self.writer = None if template is None else PromptWriter(template, late_system)
        self.markers = None if template is None else find_markers(template.source, self.tokenizer)
        self.advice = _advice(folder)

    def write(self, prompt: Prompt) -> Written:
        """A prompt → ids. Raises InvalidRequest with the template's own words."""
        match prompt:
            case Conversation():
                return self._write_conversation(prompt)
            case str():
                return Written(self.tokenizer.encode(prompt, add_special_tokens=True))
            case _:
                return Written(list(prompt))

    def _write_conversation(self, conversation: Conversation) -> Written:
        if self.writer is None:
            message = "this model has no chat template, so it can not take messages; use /v1/completions with a prompt"
            raise InvalidRequest(message, "messages")
        text = self.writer.write(conversation)
        opened = self.markers is not None and opens_in(text, self.markers)
        return Written(self.tokenizer.encode(text, add_special_tokens=False), opened)

    def sampling(self, given: dict[str, Any]) -> Sampling:
        """What the client gave; where it gave nothing the makers' advice, else the wire's own default."""
        return Sampling(**{**WIRE_DEFAULTS, **self.advice, **given})

    def reader(self, generation: Generation, written: Written) -> Reader:
        """A reader for one choice."""
        return Reader(
            self.tokenizer,
            stops=generation.stops,
            markers=self.markers if generation.split_thinking else None,
            opened=written.opened,
            skip_special_tokens=generation.skip_special_tokens,
            logprobs=generation.sampling.get("logprobs") is not None,
        )

    def tokens(self, ids: list[int], logprobs: list[TokenLogprob | None]) -> tuple[Token, ...]:
        """Ids as the wires show them."""
        return tuple(shown(self.tokenizer, one, logprob) for one, logprob in zip(ids, logprobs, strict=True))


def _advice(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return {name: settings[name] for name in ADVICE if isinstance(settings.get(name), int | float)}
    except (ValueError, AttributeError) as error:
        raise BadModel(f"{path} is not a JSON object: {error}; fetch the file again") from error
