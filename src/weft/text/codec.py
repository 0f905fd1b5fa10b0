"""A model's way with text: prompts become ids, ids become deltas. One per served model, made from its folder.

Knows the model's own files (tokenizer, template, advice on sampling) and nothing of engines or wires.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import BadModel, InvalidRequest, RequestError, UnsupportedParameter
from weft.ipc.messages import ConstraintSpec, GrammarSpec, ReasoningSpec, Sampling, TokenLogprob
from weft.text.boundaries import BoundaryFinder
from weft.text.normalise import PromptWriter
from weft.text.reasoning import find_markers, opens_in
from weft.text.reasoning_effort import meaning
from weft.text.stream import Reader, shown
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.text.tools import CallFormat, ToolSelection
from weft.text.types import Conversation, Effort, GenerationRequest, LateSystem, Message, Prompt, Token

log = logging.getLogger("weft.text")

ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what generation_config.json may recommend
WIRE_DEFAULTS = {"temperature": 1.0}  # OpenAI's, where the model's makers say nothing


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine takes it."""

    ids: list[int]
    opened: bool = False  # it ends inside the thinking
    closed: bool = False  # it ends right after a thinking that was cut short: the model is not to think
    budget: int | None = None  # tokens of thinking that were asked for
    boundaries: tuple[int, ...] = ()  # where a later prompt may part from this one


class Codec:
    """Reads and writes for one model."""

    def __init__(self, folder: Path, late_system: LateSystem = "fold") -> None:
        self.tokenizer = Tokenizer(folder)
        template = ChatTemplate.of(folder)
        self.writer = None if template is None else PromptWriter(template, late_system)
        self.markers = None if template is None else find_markers(template.source, self.tokenizer)
        self.calls = None if self.writer is None else CallFormat.of(self.writer, self.tokenizer)
        self.gap = self._gap()
        self.turns = BoundaryFinder(self.writer, self.tokenizer)
        self.advice = _advice(folder)

    def fitted(self, generation: GenerationRequest) -> GenerationRequest:
        """The same without what it says of thinking, where that is no more than a wish and the model does not think."""
        if not generation.is_flexible or self.markers is not None or self.writer is None:
            return generation
        has_words = self.writer.capabilities.thinking_switch or "reasoning_effort" in self.writer.template.variables
        return replace(generation, effort=generation.effort if has_words else None, thinking_budget=None)

    def write(self, prompt: Prompt, effort: Effort | None = None) -> EncodedPrompt:
        """A prompt → ids. Raises InvalidRequest with the template's own words."""
        match prompt:
            case Conversation():
                return self._write_conversation(prompt, effort)
            case str():
                return EncodedPrompt(self.tokenizer.encode(prompt, add_special_tokens=True))
            case _:
                return EncodedPrompt(list(prompt))

    def _write_conversation(self, conversation: Conversation, effort: Effort | None) -> EncodedPrompt:
        if self.writer is None:
            message = "this model has no chat template, so it can not take messages; use /v1/completions with a prompt"
            raise InvalidRequest(message, "messages")
        budget = None
        if effort is not None:
            asked, budget = meaning(
                effort,
                reads_effort="reasoning_effort" in self.writer.template.variables,
                has_switch=self.writer.capabilities.thinking_switch,
                thinks=self.markers is not None,
            )
            conversation = replace(conversation, template_kwargs=asked | conversation.template_kwargs)
        text = self.writer.write(conversation)
        ids, boundaries = self.turns.encode(conversation, text)
        if self.markers is None:
            return EncodedPrompt(ids, boundaries=boundaries)
        closed = text.rstrip().endswith(self.markers.close)
        return EncodedPrompt(ids, opens_in(text, self.markers), closed, budget, boundaries)

    def _gap(self) -> str:
        """What the template writes after a thinking it cuts short: the model was taught to write the same."""
        if self.writer is None or self.markers is None or not self.writer.capabilities.thinking_switch:
            return ""
        asked = Conversation((Message("user", "Hello"),), template_kwargs={"enable_thinking": False})
        after = self.writer.write(asked).rpartition(self.markers.close)[2]
        return after if not after.strip() else ""

    def constraint(self, generation: GenerationRequest, written: EncodedPrompt) -> ConstraintSpec | None:
        """What the answer's tokens must be. Many tools take their time.

        Raises UnsupportedParameter for a budget that has nothing to act on, InvalidRequest for tools that can not be held to.
        """
        budget = generation.thinking_budget if generation.thinking_budget is not None else written.budget
        if self.markers is None and generation.thinking_budget is not None:
            message = "thinking_token_budget: this model does not think before it answers; leave it out"
            raise UnsupportedParameter(message, "thinking_token_budget")
        grammar, thinking = self._grammar(generation), None
        if self.markers is not None and generation.split_thinking and (grammar is not None or budget is not None):
            may_open = not written.opened and not written.closed
            trigger = self.calls.trigger if self.calls is not None and generation.tool_choice is not None else ""
            thinking = ReasoningSpec(self.markers.open, self.markers.close, written.opened, may_open, budget, self.gap, trigger)
        return None if grammar is None and thinking is None else ConstraintSpec(grammar, thinking)

    def _grammar(self, generation: GenerationRequest) -> GrammarSpec | None:
        """What the answer must look like, calls included. Where answers have channels, a shape stands inside one."""
        choice, answer = generation.tool_choice, generation.grammar
        if self.calls is None or (choice is None and (answer is None or not self._has_channels(generation))):
            return answer
        return self.calls.grammar(choice or ToolSelection("none", ()), answer)

    def _has_channels(self, generation: GenerationRequest) -> bool:
        """Whether the answer is one of gpt-oss's, in which thinking and words are messages of their own."""
        return self.calls is not None and self.calls.family.is_harmony and generation.split_thinking

    def sampling(self, given: dict[str, Any]) -> Sampling:
        """What the client gave; where it gave nothing the makers' advice, else the wire's own default."""
        return Sampling(**{**WIRE_DEFAULTS, **self.advice, **given})

    def reader(self, generation: GenerationRequest, written: EncodedPrompt) -> Reader:
        """A reader for one choice."""
        choice = generation.tool_choice
        tools = choice.tools if choice is not None and choice.mode != "none" else ()
        calls = self.calls if tools or self._has_channels(generation) else None
        return Reader(
            self.tokenizer,
            stops=generation.stops,
            markers=self.markers if generation.split_thinking else None,
            opened=written.opened,
            calls=None if calls is None else calls.reader(tools),
            shown=frozenset() if calls is None else calls.shown,
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
        given = {name: settings[name] for name in ADVICE if isinstance(settings.get(name), int | float)}
    except (ValueError, AttributeError) as error:
        raise BadModel(f"{path} is not a JSON object: {error}; fetch the file again") from error
    if "top_k" in given:
        given["top_k"] = max(0, int(given["top_k"]))  # some say 50.0, or -1 for all
    try:
        Sampling(**given).check(1)
    except RequestError as error:
        log.warning("%s advises what can not be followed, so nothing of it is: %s", path, error)
        return {}
    return given
