"""Reshapes turns into those that a chat template takes: places system texts, merges neighbours, places texts beside calls."""

from collections.abc import Iterator
from functools import reduce
from typing import Any

from weft.text.template import Capabilities
from weft.text.types import LateSystem

Turn = dict[str, Any]  # a message as templates read it
Content = str | list[dict[str, Any]]

INSTRUCTING = ("system", "developer")
BLANK_LINE = "\n\n"


def place_instructions(turns: list[Turn], capabilities: Capabilities, late_system: LateSystem) -> list[Turn]:
    """Merge leading system turns; hoist later ones if `late_system` says so; fold any the template rejects into user turns."""
    first = next((index for index, turn in enumerate(turns) if turn["role"] not in INSTRUCTING), len(turns))
    leading, rest = turns[:first], _behind_results(turns[first:])
    if late_system == "hoist":
        leading += [turn for turn in rest if turn["role"] in INSTRUCTING]
        rest = [turn for turn in rest if turn["role"] not in INSTRUCTING]
    front = [reduce(_merge, leading)] if leading else []
    for turn in rest:
        turn["role"] = "system" if turn["role"] in INSTRUCTING else turn["role"]
    if not any(turn["role"] == "user" for turn in rest):
        return [*front, *rest]  # a user's turn is never invented: the template takes this as it is or says why not
    if not capabilities.system:
        return _fold(rest, [text for turn in front if (text := as_text(turn["content"]))], capabilities)
    return [*front, *(rest if capabilities.late_system else _fold(rest, [], capabilities))]


def _behind_results(turns: list[Turn]) -> list[Turn]:
    """Move system turns that stand between calls and their results, or between two results, behind the last result.

    Some templates take the results that follow calls up to the first turn of another role. No prompt changes in its middle,
    because calls without results are not answered.
    """
    placed: list[Turn] = []
    waiting: list[Turn] = []
    for turn in turns:
        if turn["role"] in INSTRUCTING and placed and (placed[-1]["role"] == "tool" or "tool_calls" in placed[-1]):
            waiting.append(turn)
            continue
        if turn["role"] != "tool":
            placed += waiting
            waiting = []
        placed.append(turn)
    return placed + waiting


def _fold(turns: list[Turn], waiting: list[str], capabilities: Capabilities) -> list[Turn]:
    """Move system texts into the next user turn; if none comes before the next answer, into the tool result or a new turn.

    System texts never move past an answer to a later user turn: the previous request may have lacked that turn, and the prompt
    would change in its middle. Only a tool's result is placed before them, because it belongs to its call.
    """
    folded: list[Turn] = []
    for turn in [*turns, {"role": "end"}]:
        text = BLANK_LINE.join(waiting)
        match turn["role"]:
            case "system":
                reminder = as_text(turn["content"])
                waiting = [*waiting, f"<system-reminder>\n{reminder}\n</system-reminder>"] if reminder else waiting
                continue
            case "user" if waiting:
                turn["content"] = join(text, turn["content"])
            case "assistant" | "end" if waiting and folded and folded[-1]["role"] == "tool" and not capabilities.user_after_tool:
                folded[-1]["content"] = join(folded[-1]["content"], text)
            case "assistant" | "end" if waiting:
                folded.append({"role": "user", "content": text})
        waiting = waiting if turn["role"] == "tool" else []
        folded.append(turn)
    return folded[:-1]


def merge_neighbours(turns: list[Turn], capabilities: Capabilities) -> list[Turn]:
    """Merge turns of one role where the template takes no two of them, and place the texts beside calls where it keeps them."""
    merged: list[Turn] = []
    for turn in _with_texts_placed(turns, capabilities):
        last = merged[-1] if merged else {}
        if last.get("role") == "tool" and turn["role"] == "user" and not capabilities.user_follows_tool:
            spoken = turn["content"] if "tool" in capabilities.images else as_text(turn["content"])
            merged[-1] = {**last, "content": join(last["content"], spoken)}
            continue
        if _belongs_to(last, turn, capabilities):
            merged[-1] = _merge(last, turn)
        else:
            merged.append(turn)
    if capabilities.call_text != "lost":
        return merged
    return [without_content(turn, capabilities) if "tool_calls" in turn else turn for turn in merged]


def _belongs_to(last: Turn, turn: Turn, capabilities: Capabilities) -> bool:
    """Whether two neighbours are one turn."""
    alike = all(last.get(key) == turn.get(key) for key in ("role", "name"))
    if not alike or "tool_calls" in last or turn["role"] not in ("user", "assistant"):
        return False
    if "tool_calls" in turn and capabilities.call_text == "before":
        return False
    is_bare_call = "tool_calls" in turn and not turn.get("content") and capabilities.reasoning_key not in turn
    return turn["role"] not in capabilities.repeats or (is_bare_call and capabilities.text_stays_beside_calls)


def _with_texts_placed(turns: list[Turn], capabilities: Capabilities) -> Iterator[Turn]:
    """Yield the turns; a text beside calls is a turn of its own before them where the template keeps it only there.

    The reasoning goes with the text, unless the template keeps none there.
    """
    for turn in turns:
        if "tool_calls" not in turn or not turn.get("content") or capabilities.call_text != "before":
            yield turn
            continue
        shared = {"tool_calls"} if capabilities.reasons_before_calls else {"tool_calls", capabilities.reasoning_key}
        spoken = {key: value for key, value in turn.items() if key not in shared}
        yield spoken
        own = {key: value for key, value in turn.items() if key not in spoken or key in ("role", "name")}
        yield without_content(own, capabilities)


def without_content(turn: Turn, capabilities: Capabilities) -> Turn:
    """Return a turn of nothing but calls, with the content that the template takes for none."""
    match capabilities.no_content:
        case "absent":
            return {key: value for key, value in turn.items() if key != "content"}
        case "null":
            return {**turn, "content": None}
        case "empty":
            return {**turn, "content": ""}


def _merge(first: Turn, second: Turn) -> Turn:
    joined = {key: join(first[key], second[key]) for key in first.keys() & second.keys() - {"role", "name"}}
    return {**second, **first, **joined}


def join(first: Content, second: Content) -> Content:
    """Return two contents as one, with a blank line between them."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + BLANK_LINE + second
    return [*as_parts(first), *as_parts(BLANK_LINE), *as_parts(second)]


def as_parts(content: Content) -> list[dict[str, Any]]:
    """Return a content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_text(content: Content) -> str:
    """Return the texts of a content as one."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
