"""A made-up agent's conversation, turn by turn: calls, results of some lines, short answers. Shared by tests and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SYSTEM = "You are a careful helper. You look into files, say what is in them, and never guess. "
WORDS = ["dog", "tree", "boat", "bird", "house", "frog", "river", "stone"]


def turns(count: int) -> Iterator[list[dict[str, Any]]]:
    """The messages that each turn adds: the answer before it, and in turns the result of a call or a new question."""
    yield [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Look at the first file."}]
    for turn in range(1, count):
        word = WORDS[turn % len(WORDS)]
        call = {"id": f"call{turn:05}", "type": "function", "function": {"name": "read", "arguments": f'{{"file": {turn}}}'}}
        if turn % 2:
            yield [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": f"One {word} and {turn} more."},
            ]
        else:
            yield [
                {"role": "assistant", "content": f"File {turn} has one {word}."},
                {"role": "user", "content": f"Please look at number {turn + 1} now."},
            ]


def in_words(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for a model whose chat template has no place for tools: calls and results as texts."""
    told = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            told.append({"role": "assistant", "content": f"{call['function']['name']} {call['function']['arguments']}"})
        if message["role"] == "tool":
            told.append({"role": "user", "content": f"Result: {message['content']}"})
        elif "tool_calls" not in message:
            told.append(message)
    return told


def title_request(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What agents send beside a turn: another system prompt, the last words, a short answer."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    return [{"role": "system", "content": "Give a title of three words."}, {"role": "user", "content": f"Title for: {said[-1]}"}]
