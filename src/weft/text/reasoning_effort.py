"""How much a model reasons: the template's switch and its words for an effort, found by trying which of them change a prompt."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from weft.errors import InvalidRequest, TemplateFailed
from weft.text.normalise import PromptWriter
from weft.text.reasoning import BUDGETS
from weft.text.types import Effort, ReasoningAsked

EFFORT_VARIABLES = ("reasoning_effort", "thinking_effort", "reasoning_strength")
# Template variables that switch reasoning, each with its values for on and off.
SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
}
# Words for an effort, the best first: gpt-oss and its kin know three words, others have only one that acts.
NEAREST: dict[Effort, tuple[str, ...]] = {
    "none": ("none", "no_think"),
    "minimal": ("low", "high"),
    "low": ("low", "high"),
    "medium": ("medium", "high"),
    "high": ("high",),
    "xhigh": ("max", "xhigh", "high"),
    "max": ("max", "xhigh", "high"),
}
COMMON = ("low", "medium", "high")  # what a model knows whose template writes any word
STRONGER = {("minimal", "high"), ("low", "high"), ("medium", "high")}  # words that are more than was asked for
NONSENSE, QUESTION = "zqword", "zq three?"


@dataclass(frozen=True)
class EffortSettings:
    """The template variables that switch reasoning on and off, and the one that says how much, with the words that act."""

    on: dict[str, Any] = field(default_factory=dict)
    off: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    words: dict[Effort, str] = field(default_factory=dict)  # an effort without a word is held by a budget

    @classmethod
    def of(cls, writer: PromptWriter, close: str | None) -> Self:
        """Try the switches and words that the template has variables for; `close` is the close marker of the reasoning."""
        on, off = _switch(writer)
        name = next((name for name in EFFORT_VARIABLES if name in writer.template.variables), "")
        words = _words(writer, on, name) if name else {}
        if close is not None and name and not on:
            closing = next((word for word in NEAREST["none"] if _is_closed(writer, {name: word}, close)), None)
            off = {} if closing is None else {name: closing}
            on = {name: words["high"]} if "high" in words and _is_closed(writer, {}, close) else {}
        return cls(on, off, name, words)

    @property
    def acts(self) -> bool:
        """Whether the template takes a switch or words."""
        return bool(self.on or self.off or self.words)

    def variables(self, effort: Effort | None) -> dict[str, Any]:
        """Return the variables of an effort; None: reasoning is on, as much of it as the model likes."""
        if effort == "none":
            return self.off
        word = None if effort is None else self.words.get(effort)
        return self.on if word is None else {**self.on, self.name: word}

    def budget(self, effort: Effort | None) -> int | None:
        """Return the tokens that hold an effort for which the template has no word, or only one for more."""
        if effort is None:
            return None
        word = self.words.get(effort)
        return BUDGETS[effort] if word is None or (effort, word) in STRONGER else None


def check_switches(asked: ReasoningAsked, variables: Mapping[str, Any]) -> None:
    """Raise InvalidRequest if the client's own template variables say the opposite of what is asked for."""
    is_off = asked.effort == "none"
    for name, (on, off) in SWITCHES.items():
        if name in variables and variables[name] == (on if is_off else off):
            place = f"chat_template_kwargs.{name}"
            raise InvalidRequest(f"{asked.words} and {place} contradict each other; send one of them", place)


def is_told(variables: Mapping[str, Any]) -> bool:
    """Whether template variables of the client say whether to reason."""
    return any(name in variables for name in (*SWITCHES, *EFFORT_VARIABLES))


def _switch(writer: PromptWriter) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables that switch reasoning on and off: those whose values change the prompt; {} if there are none."""
    for name, (on, off) in SWITCHES.items():
        if name in writer.template.variables and _prompt(writer, {name: on}) != _prompt(writer, {name: off}):
            return {name: on}, {name: off}
    return {}, {}


def _words(writer: PromptWriter, on: dict[str, Any], name: str) -> dict[Effort, str]:
    """Return the nearest word of each effort that acts: its prompt is not that of a word without sense, or says it by itself."""
    words = {word for effort, words in NEAREST.items() if effort != "none" for word in words}
    prompts = {word: _prompt(writer, {**on, name: word}) for word in words}
    unknown = _prompt(writer, {**on, name: NONSENSE})
    others = [prompt for prompt in prompts.values() if prompt not in ("", unknown)]

    def acts(word: str) -> bool:
        # A template that writes its strongest effort for all that it does not know says that word, and the others not.
        is_default = bool(others) and _says(unknown, word) and not any(_says(one, word) for one in others)
        is_known = word in COMMON or NONSENSE not in unknown
        return is_known and prompts[word] != "" and (prompts[word] != unknown or is_default)

    found = {effort: next(filter(acts, words), "") for effort, words in NEAREST.items() if effort != "none"}
    return {effort: word for effort, word in found.items() if word}


def _says(prompt: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", prompt.lower()) is not None


def _is_closed(writer: PromptWriter, variables: dict[str, Any], close: str) -> bool:
    return _prompt(writer, variables).rstrip().endswith(close)


def _prompt(writer: PromptWriter, variables: dict[str, Any]) -> str:
    """Return the prompt of a question; "" if the template refuses the variables."""
    question: Any = QUESTION if "user" in writer.capabilities.text else [{"type": "text", "text": QUESTION}]
    try:
        return writer.template.render([{"role": "user", "content": question}], **variables)
    except TemplateFailed:
        return ""
