"""What goes over the wire on a real server; ids, times and versions are written as marks, and pieces of text that follow
each other as one, because how many tokens a piece has depends on how busy the machine is.

The transcripts stand in `transcripts/`. `python tests/server/test_transcripts.py` writes them anew; read the difference.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers import Server, running

FOLDER = Path(__file__).parent / "transcripts"
TASK = [{"role": "user", "content": "Reply with JSON. The marker is 7."}]
GREEDY: dict[str, Any] = {"model": "tiny-hybrid", "temperature": 0, "stream": True}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": CITY},
}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat-text": ("chat/completions", {"messages": TASK, **QUIET}),
    "chat-thinking": ("chat/completions", {"messages": TASK, "stream_options": {"include_usage": True}}),
    "chat-stop-string": ("chat/completions", {"messages": TASK, "stop": [": 7"], **QUIET}),
    "chat-length": ("chat/completions", {"messages": TASK, "max_tokens": 3, **QUIET}),
    "chat-two-choices": ("chat/completions", {"messages": TASK, "max_tokens": 1, "n": 2, **QUIET}),
    "chat-logprobs": ("chat/completions", {"messages": TASK, "max_tokens": 2, "logprobs": True, "top_logprobs": 1, **QUIET}),
    "chat-tool-call": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [WEATHER]},
    ),
    "chat-error": ("chat/completions", {"messages": [{"role": "system", "content": "nobody asks"}]}),
    "completions-text": ("completions", {"prompt": "Once upon a time", "max_tokens": 4}),
    "completions-echo": ("completions", {"prompt": "Once upon", "max_tokens": 1, "echo": True, "logprobs": 1}),
}


def marked(text: str) -> str:
    """The text without what differs from run to run; log-probabilities to two places."""
    text = re.sub(r'"id":"(\w+)-[0-9a-f]{32}"', r'"id":"\1-ID"', text)
    text = re.sub(r'"id":"call_[0-9a-f]{24}"', '"id":"call_ID"', text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    text = re.sub(r'"system_fingerprint":"[^"]*"', '"system_fingerprint":"VERSIONS"', text)
    text = re.sub(r'("\w+_(?:ms|per_second)"):[\d.e-]+', r"\1:0", text)
    text = re.sub(r'("(?:cache_n|prompt_n|cached_tokens)"):\d+', r"\1:0", text)  # what others asked before is no part of it
    text = re.sub(r'"draft_n":.*?"drafts":\{.*?\}\},', "", text)  # how many depends on the clock
    text = re.sub(r'"cache":\{"matched":.*?"why":"[^"\\]*(?:\\.[^"\\]*)*"\}', '"cache":"WHY"', text)
    return re.sub(r"(-?\d+\.\d+(?:e-\d+)?)", lambda number: f"{float(number[1]):.2f}".replace("-0.00", "0.00"), text)


def merged(stream: str, joined: Callable[[str, str], str | None] | None = None) -> str:
    """An event stream in which pieces of one text that follow each other are one event; `joined` is another wire's way."""
    frames: list[str] = []
    for frame in stream.split("\n\n"):
        if frames and (both := (joined or _joined)(frames[-1], frame)):
            frames[-1] = both
        else:
            frames.append(frame)
    return "\n\n".join(frames)


def _joined(first: str, second: str) -> str | None:
    if not (first.startswith("data: {") and second.startswith("data: {")):
        return None
    one, two = (json.loads(frame[6:]) for frame in (first, second))
    if [len(event.get("choices", [])) for event in (one, two)] != [1, 1]:
        return None
    here, there = one["choices"][0], two["choices"][0]
    into, added = here.get("delta", here), there.get("delta", there)
    if there["finish_reason"] is None and (call := _continued(into, added)) and here["index"] == there["index"]:
        call["function"]["arguments"] += added["tool_calls"][0]["function"]["arguments"]
        return "data: " + json.dumps(one, separators=(",", ":"), ensure_ascii=False)
    kind = next((name for name in ("content", "reasoning_content", "text") if into.get(name) and added.get(name)), None)
    if kind is None or here["index"] != there["index"] or there["finish_reason"]:
        return None
    into[kind] += added[kind]
    for name, entries in (here.get("logprobs") or {}).items():
        if entries is not None:
            entries.extend(there["logprobs"][name])
    return "data: " + json.dumps(one, separators=(",", ":"), ensure_ascii=False)


def _continued(into: dict[str, Any], added: dict[str, Any]) -> dict[str, Any] | None:
    """The call of one delta that the other has more arguments of; none where either opens one."""
    calls = [call for delta in (into, added) for call in delta.get("tool_calls", ())]
    return calls[0] if len(calls) == 2 and not any("id" in call for call in calls) else None


def transcript(server: Server, name: str) -> str:
    path, body = CASES[name]
    reply = server.post(f"/v1/{path}", {**GREEDY, **body})
    return f"{reply.status_code} {reply.headers['content-type']}\n\n{marked(merged(reply.text))}"


@pytest.mark.parametrize("name", CASES)
def test_the_wire_is_as_written(server: Server, name: str) -> None:
    assert transcript(server, name) == (FOLDER / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("error")])
def test_the_whole_reply_says_what_the_stream_said(server: Server, name: str) -> None:
    path, body = CASES[name]
    whole = server.post(f"/v1/{path}", {**GREEDY, **body, "stream": False, "stream_options": None}).json()
    lines = server.post(f"/v1/{path}", {**GREEDY, **body}).text.split("\n")
    said: dict[int, dict[str, Any]] = {}
    for line in lines:
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
            sum_up(said.setdefault(choice["index"], {}), choice)

    for choice in whole["choices"]:
        streamed = said[choice["index"]]
        message = choice.get("message", {})
        assert streamed.get("text", "") == (choice.get("text", message.get("content")) or "")
        assert streamed.get("calls", []) == [call["function"] for call in message.get("tool_calls", ())]
        assert streamed.get("reasoning", "") == message.get("reasoning_content", "")
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed.get("content", []) == ((choice["logprobs"] or {}).get("content") or [])
        assert streamed.get("tokens", []) == ((choice["logprobs"] or {}).get("tokens") or [])


def sum_up(said: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta", choice)
    said["text"] = said.get("text", "") + (delta.get("content") or delta.get("text") or "")
    said["reasoning"] = said.get("reasoning", "") + delta.get("reasoning_content", "")
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            said.setdefault("calls", []).append(call["function"])
        else:
            said["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    said["finish_reason"] = choice["finish_reason"] or said.get("finish_reason")
    for name, entries in (choice.get("logprobs") or {}).items():
        said[name] = said.get(name, []) + (entries or [])


def test_a_cancelled_stream_ends_with_an_error_and_no_clean_end(server: Server) -> None:
    body = {**GREEDY, "prompt": "Once upon a time", "ignore_eos": True}
    parts = ""
    with server.stream("/v1/completions", body, headers={"x-request-id": "end-me"}) as reply:
        for part in reply.iter_text():
            if not parts:
                cancelling = threading.Thread(target=server.post, args=("/v1/requests/end-me/cancel", {}))
                cancelling.start()
            parts += part
    cancelling.join()

    events = [line for line in parts.split("\n") if line.startswith("data: ")]
    assert "[DONE]" not in parts
    assert '"finish_reason":"stop"' not in parts
    assert json.loads(events[-1][6:])["error"]["code"] == "request_cancelled"
    assert sum('"error"' in event for event in events) == 1


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", "tiny-hybrid") as here:
        for case in sys.argv[1:] or CASES:
            (FOLDER / f"{case}.txt").write_text(transcript(here, case))
