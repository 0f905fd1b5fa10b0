"""Tool runners and agent libraries as they are, against a model that was not made for tools: no request of theirs fails.

The files in `clients/` are what the newest versions sent to the default model with nothing set, turn by turn; ids and the
model's name are not those of the recording. Here a model of random answers has a template without a place for tools.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from recordings import expanded

from servers import Server, running
from weft.model.resolve import TINY_HYBRID

FOLDER = Path(__file__).parent / "clients"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
TEMPLATE = Path(__file__).parent.parent / "text" / "templates" / "chatml.jinja"
LIMITS = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_completion_tokens", "/v1/messages": "max_tokens"}
MAX_TOKENS = 60
MARKUP = ("<tool_call", '"arguments"', '{"name"')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-hybrid with a template that has no place for tools."""
    folder = tmp_path_factory.mktemp("clients") / "model"
    shutil.copytree(TINY_HYBRID, folder)
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with running(folder / "log", str(model), environment={"WEFT_CACHE": str(folder)}) as server:
        yield server


def shortened(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same request for a short answer."""
    if path == "/api/chat":
        return {**body, "options": {"num_predict": MAX_TOKENS}}
    return {name: value for name, value in body.items() if name != "max_tokens"} | {LIMITS[path]: MAX_TOKENS}


def schemas(body: dict[str, Any]) -> dict[str, Any]:
    """The schema of each tool's arguments, in whatever dialect."""
    tools = [tool.get("function", tool) for tool in body.get("tools", ())]
    return {tool["name"]: tool.get("parameters", tool.get("input_schema")) for tool in tools}


def must_call(body: dict[str, Any]) -> bool:
    choice = body.get("tool_choice", "auto")
    return choice not in ("auto", "none") and not (isinstance(choice, dict) and choice.get("type") in ("auto", "none"))


def answer(path: str, reply: dict[str, Any]) -> tuple[str, list[tuple[str, Any]], bool]:
    """An answer's text, its calls, and whether it was cut."""
    match path:
        case "/v1/messages":
            blocks = reply["content"]
            calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
            return "".join(block.get("text", "") for block in blocks), calls, reply["stop_reason"] == "max_tokens"
        case "/v1/responses":
            calls = [(item["name"], item["arguments"]) for item in reply["output"] if item["type"] == "function_call"]
            texts = [part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"]]
            return "".join(texts), calls, reply["status"] == "incomplete"
    message = reply["message"] if path == "/api/chat" else reply["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    reason = reply["done_reason"] if path == "/api/chat" else reply["choices"][0]["finish_reason"]
    return message["content"] or "", calls, reason == "length"


@pytest.mark.parametrize("name", NAMES)
def test_every_turn_is_answered_and_a_call_that_must_come_fits_its_schema(server: Server, model: Path, name: str) -> None:
    told = expanded(json.loads((FOLDER / f"{name}.json").read_text()), str(model))
    before: dict[str, Any] = {}
    for turn in told["turns"]:
        path, body = turn["path"], shortened(turn["path"], turn["body"])
        if "previous_response_id" in body:
            (called,) = (item for item in before["output"] if item["type"] == "function_call")
            body |= {"previous_response_id": before["id"], "input": [{**body["input"][0], "call_id": called["call_id"]}]}
        reply = server.post(path, {**body, "stream": False}, headers=turn["headers"])

        assert reply.status_code == turn["status"], reply.text
        if turn["status"] != 200:  # what the client asks for again, otherwise
            assert reply.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
            continue
        assert reply.headers.get("x-weft-tools") == ("described" if body.get("tools") else None)
        before = reply.json()
        text, calls, is_cut = answer(path, before)
        if must_call(body):
            assert text == ""
            assert calls
        assert not any(mark in text for mark in MARKUP)
        for tool, arguments in calls if not is_cut else calls[:-1]:
            given = json.loads(arguments) if isinstance(arguments, str) else arguments
            assert jsonschema_rs.is_valid(schemas(body)[tool], given), (tool, given)
        if body.get("stream"):
            streamed = server.post(path, body, headers=turn["headers"])
            assert streamed.status_code == 200
            assert streamed.text.rstrip().endswith(ENDINGS[path]) or path == "/v1/responses", streamed.text[-300:]


ENDINGS = {"/v1/chat/completions": "[DONE]", "/v1/messages": '{"type":"message_stop"}'}
