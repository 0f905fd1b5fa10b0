"""How much a model thinks, in OpenAI's words → the variables of its template, and a budget of tokens.

What a model has is found from its template and markers, not from its name. A word that can not act is refused.
"""

from __future__ import annotations

from typing import Any

from weft.errors import UnsupportedParameter
from weft.text.types import Effort

# Tokens of thinking where the template has no words of its own for it. None: as many as it likes.
BUDGETS: dict[Effort, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 4096,
    "high": 16384,
    "xhigh": None,
    "max": None,
}
# gpt-oss and its kin read `reasoning_effort` and know three words.
TEMPLATE_WORDS: dict[Effort, str] = {"minimal": "low", "xhigh": "high", "max": "high"}


def meaning(effort: Effort, *, reads_effort: bool, has_switch: bool, thinks: bool) -> tuple[dict[str, Any], int | None]:
    """The template's variables and the budget for this effort. Raises UnsupportedParameter when it can not act."""
    if reads_effort and effort != "none":
        return {"reasoning_effort": TEMPLATE_WORDS.get(effort, effort)}, None
    if has_switch:
        return {"enable_thinking": effort != "none"}, None if effort == "none" else BUDGETS[effort]
    if thinks:
        return {}, BUDGETS[effort]
    if effort == "none":
        return {}, None
    message = f"reasoning_effort {effort}: this model does not think before it answers; leave it out or set it to none"
    raise UnsupportedParameter(message, "reasoning_effort")
