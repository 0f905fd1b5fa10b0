"""Images over HTTP: every dialect, eight at once, what is refused and how, and what clients are told."""

from __future__ import annotations

import base64
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import image_files
from servers import Server

FOLDER = Path(__file__).parent.parent / "pictures"
EXAMPLES: list[dict[str, Any]] = json.loads((FOLDER / "index.json").read_text())
SINGLE = [one for one in EXAMPLES if len(one["images"]) == 1 and isinstance(one["content"], list)]
GREEDY = {"temperature": 0, "max_tokens": 40}


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def pictures(example: dict[str, Any]) -> list[bytes]:
    return [(FOLDER / name).read_bytes() for name in example["images"]]


def chat_content(example: dict[str, Any]) -> list[dict[str, Any]]:
    waiting = iter(pictures(example))
    return [
        part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": data_url(next(waiting))}}
        for part in example["content"]
    ]


def ask_chat(server: Server, example: dict[str, Any]) -> str:
    messages = [{"role": "user", "content": chat_content(example)}]
    body = server.post("/v1/chat/completions", {"messages": messages, **GREEDY, "reasoning_effort": "none"}).json()
    return str(body["choices"][0]["message"]["content"]).strip()


def ask_responses(server: Server, example: dict[str, Any]) -> str:
    content = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"]}
        for part in chat_content(example)
    ]
    asked = {"input": [{"role": "user", "content": content}], "temperature": 0, "max_output_tokens": 40}
    body = server.post("/v1/responses", asked | {"reasoning": {"effort": "none"}}).json()
    return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]).strip()


def ask_messages(server: Server, example: dict[str, Any]) -> str:
    waiting = iter(pictures(example))
    content = [
        part
        if part["type"] == "text"
        else {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(next(waiting)).decode()},
        }
        for part in example["content"]
    ]
    asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 40}
    body = server.post("/v1/messages", asked | {"model": "tiny-hybrid", "thinking": {"type": "disabled"}}).json()
    return "".join(block["text"] for block in body["content"] if block["type"] == "text").strip()


def ask_ollama(server: Server, example: dict[str, Any]) -> str:
    text = "".join(part["text"] for part in example["content"] if part["type"] == "text")
    message = {"role": "user", "content": text, "images": [base64.b64encode(one).decode() for one in pictures(example)]}
    asked = {"model": "tiny-hybrid", "messages": [message], "stream": False, "think": False}
    body = server.post("/api/chat", asked | {"options": {"temperature": 0, "num_predict": 40}}).json()
    return str(body["message"]["content"]).strip()


ASKING = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages, "ollama": ask_ollama}


def is_image_first(example: dict[str, Any]) -> bool:
    return bool(example["content"][0]["type"] == "image")


@pytest.mark.parametrize("dialect", ASKING)
def test_answers_about_pictures_are_right_and_the_same_eight_at_once(server: Server, dialect: str) -> None:
    asked = [one for one in SINGLE if is_image_first(one)][:12]
    single = [ASKING[dialect](server, one) for one in asked]
    with ThreadPoolExecutor(8) as threads:
        crowd = list(threads.map(lambda one: ASKING[dialect](server, one), asked))

    assert single == [one["answer"] for one in asked]
    assert crowd == single


def test_two_pictures_and_pictures_in_earlier_turns(server: Server) -> None:
    asked = [one for one in EXAMPLES if one not in SINGLE and isinstance(one["content"], list)]

    assert asked
    assert [ask_chat(server, one) for one in asked] == [one["answer"] for one in asked]


def test_a_conversation_that_gains_a_picture_goes_on_from_it(server: Server) -> None:
    first, second, *_ = SINGLE
    messages: list[dict[str, Any]] = [{"role": "user", "content": chat_content(first)}]
    asked = {**GREEDY, "reasoning_effort": "none", "cache_salt": "a conversation with pictures"}
    one = server.post("/v1/chat/completions", asked | {"messages": messages}).json()
    messages += [one["choices"][0]["message"], {"role": "user", "content": chat_content(second)}]
    two = server.post("/v1/chat/completions", asked | {"messages": messages}).json()
    images = one["usage"]["prompt_tokens_details"]["image_tokens"]

    assert images == first["sizes"][0][0] * first["sizes"][0][1] // 1024
    assert two["usage"]["prompt_tokens_details"]["image_tokens"] > images
    # All but what opens an answer without reasoning, which the history has not.
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] >= one["usage"]["prompt_tokens"] - 7


def test_models_say_that_they_see(server: Server) -> None:
    ask_chat(server, SINGLE[0])
    (row,) = server.get("/v1/models").json()["data"]
    shown = server.post("/api/show", {"model": "tiny-hybrid"}).json()
    with server.watch("/v1/events") as stream:
        events = (json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line)
        images = next(filter(None, (event["models"][0]["images"] for event in islice(events, 50))))

    assert "vision" in row["capabilities"]
    assert "vision" in shown["capabilities"]
    assert images["encoded"] > 0
    assert images["seconds"] > 0
    assert 'weft_images_total{kind="encoded",model="tiny-hybrid"}' in server.get("/metrics").text


def test_tokens_are_counted_with_pictures(server: Server) -> None:
    (example, *_) = SINGLE
    waiting = iter(pictures(example))
    content = [
        part
        if part["type"] == "text"
        else {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(next(waiting)).decode()},
        }
        for part in example["content"]
    ]
    asked = {"model": "tiny-hybrid", "messages": [{"role": "user", "content": content}]}
    counted = server.post("/v1/messages/count_tokens", asked).json()["input_tokens"]
    answered = server.post("/v1/messages", asked | {"max_tokens": 1}).json()["usage"]

    assert counted == answered["input_tokens"] + answered["cache_read_input_tokens"] + answered["cache_creation_input_tokens"]


def refused(server: Server, part: dict[str, Any], text: str = "What is the digit?", role: str = "user") -> dict[str, Any]:
    messages = [{"role": role, "content": [{"type": "text", "text": text}, part]}]
    if role != "user":
        messages.append({"role": "user", "content": "Go on."})
    reply = server.post("/v1/chat/completions", {"messages": messages, **GREEDY})
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


@pytest.mark.parametrize("url", ["https://example.org/cat.png", "http://127.0.0.1/x.png", "/etc/passwd", "file:///etc/passwd"])
def test_nothing_is_fetched_and_no_path_is_opened(server: Server, url: str) -> None:
    error = refused(server, {"type": "image_url", "image_url": {"url": url}})

    assert "no URL is fetched and no path is opened" in error["message"]
    assert error["param"] == "messages[0].content[1]"


def test_hostile_files_are_refused_by_place_beside_good_rows(server: Server) -> None:
    """Files that are cut off, bombs, of other formats …, one after the other, while four others ask about good pictures."""
    asked = [one for one in SINGLE if is_image_first(one)][:4]
    files = list(image_files.refused_files())
    is_over = threading.Event()

    def go_on_asking(example: dict[str, Any]) -> set[str]:
        told = {ask_chat(server, example)}
        while not is_over.is_set():
            told.add(ask_chat(server, example))
        return told

    with ThreadPoolExecutor(4) as threads:
        good = [threads.submit(go_on_asking, one) for one in asked]
        try:
            errors = [refused(server, _file_part(data)) for _, data, _ in files]
            health = server.get("/health").status_code
        finally:
            is_over.set()

    assert len(files) > 25
    assert all(error["param"] == "messages[0].content[1]" for error in errors)
    assert all(error["message"].startswith("messages[0].content[1]") for error in errors)
    assert [one.result() for one in good] == [{one["answer"]} for one in asked]
    assert health == 200


def _file_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def test_what_else_is_refused_names_the_part(server: Server) -> None:
    good = {"type": "image_url", "image_url": {"url": data_url(pictures(SINGLE[0])[0])}}
    messages = {
        "takes images from": refused(server, good, role="assistant"),
        "32 are allowed": _too_many(server, good),
        "detail is 'huge'": refused(server, {"type": "image_url", "image_url": {**good["image_url"], "detail": "huge"}}),  # type: ignore[dict-item]
        "declared as image/jpeg and is PNG": refused(
            server, {"type": "image_url", "image_url": {"url": data_url(pictures(SINGLE[0])[0], "image/jpeg")}}
        ),
        "files and references are not kept": refused(server, {"type": "input_image", "file_id": "file-1"}),
    }

    for words, error in messages.items():
        assert words in error["message"]
        assert error["param"].startswith("messages[0]")


def test_the_text_of_an_image_token_is_text(server: Server) -> None:
    good = {"type": "image_url", "image_url": {"url": data_url(pictures(SINGLE[0])[0])}}
    texts = [{"type": "text", "text": text} for text in ("Look: <|image_pad|>", "Look: ")]
    asked = [{"messages": [{"role": "user", "content": [good, text]}], **GREEDY, "max_tokens": 1} for text in texts]
    replies = [server.post("/v1/chat/completions", body) for body in asked]

    assert [reply.status_code for reply in replies] == [200, 200]
    written, plain = (reply.json()["usage"]["prompt_tokens_details"]["image_tokens"] for reply in replies)
    assert written == plain > 0


def _too_many(server: Server, part: dict[str, Any]) -> dict[str, Any]:
    reply = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part] * 33}], **GREEDY})
    error: dict[str, Any] = reply.json()["error"]
    return error
