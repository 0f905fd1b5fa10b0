"""Questions about pictures with known answers, through every dialect of a running server, one by one and eight at once.

`python -m bench.pictures_asked FOLDER [URL]`: the folder has PNG files and an `index.json` as tests/pictures has. Prints how many
answers are right, by dialect and task, and how many are the same eight at once as one by one.
"""

from __future__ import annotations

import base64
import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

AT_ONCE = 8
TOKENS = 80

Example = dict[str, Any]
Turn = dict[str, Any]


class Asker:
    """A server and a folder of pictures."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send JSON and return the JSON that comes back."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return answer

    def turns(self, example: Example, image: Callable[[str], Turn], text: Callable[[str], Turn]) -> list[Turn]:
        """Return an example's messages with its pictures in a dialect's form."""
        waiting = iter(example["images"])
        messages = example.get("messages") or [{"role": "user", "content": example["content"]}]

        def part(given: Any) -> Turn:
            if given["type"] != "image":
                return text(given["text"])
            return image(base64.b64encode((self.folder / next(waiting)).read_bytes()).decode())

        return [
            {**one, "content": one["content"] if isinstance(one["content"], str) else [part(given) for given in one["content"]]}
            for one in messages
        ]

    def chat(self, example: Example) -> str:
        """Ask by Chat Completions."""
        turns = self.turns(example, lambda data: {"type": "image_url", "image_url": {"url": _url(data)}}, _text)
        body = {"messages": turns, "temperature": 0, "max_tokens": TOKENS, "reasoning_effort": "none"}
        return str(self.post("/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def responses(self, example: Example) -> str:
        """Ask by Responses."""
        turns = self.turns(
            example,
            lambda data: {"type": "input_image", "image_url": _url(data)},
            lambda words: {"type": "input_text", "text": words},
        )
        body = {"input": turns, "temperature": 0, "max_output_tokens": TOKENS, "reasoning": {"effort": "none"}}
        items = self.post("/v1/responses", body)["output"]
        return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])

    def messages(self, example: Example) -> str:
        """Ask by Anthropic's Messages."""
        source = {"type": "base64", "media_type": "image/png"}
        turns = self.turns(example, lambda data: {"type": "image", "source": {**source, "data": data}}, _text)
        body = {
            "model": "tiny-hybrid",
            "messages": turns,
            "temperature": 0,
            "max_tokens": TOKENS,
            "thinking": {"type": "disabled"},
        }
        blocks = self.post("/v1/messages", body)["content"]
        return "".join(block["text"] for block in blocks if block["type"] == "text")

    def ollama(self, example: Example) -> str | None:
        """Ask by Ollama's chat; None where a picture stands behind or between texts, which it can not say."""
        turns = []
        for one in self.turns(example, lambda data: {"type": "image", "data": data}, _text):
            parts = [_text(one["content"])] if isinstance(one["content"], str) else one["content"]
            images, texts = ([part for part in parts if part["type"] == kind] for kind in ("image", "text"))
            if parts != [*images, *texts]:
                return None
            words = "".join(part["text"] for part in texts)
            turns.append({"role": one["role"], "content": words, "images": [part["data"] for part in images]})
        body = {"model": "tiny-hybrid", "messages": turns, "stream": False, "think": False}
        return str(self.post("/api/chat", body | {"options": {"temperature": 0, "num_predict": TOKENS}})["message"]["content"])


def main() -> None:
    """Ask everything, and print what was right."""
    folder, url = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8400"
    examples: list[Example] = json.loads((folder / "index.json").read_text())
    asker = Asker(folder, url)
    ways: dict[str, Callable[[Example], str | None]] = {
        "Chat": asker.chat, "Responses": asker.responses, "Messages": asker.messages, "Ollama": asker.ollama,
    }  # fmt: skip
    for name, ask in ways.items():
        single = [ask(one) for one in examples]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            crowd = list(threads.map(partial(_asked, ask), examples))
        asked = [one for one, answer in zip(examples, single, strict=True) if answer is not None]
        right = Counter(one["task"] for one, answer in zip(examples, single, strict=True) if answer and _is_right(answer, one))
        tasks = Counter(one["task"] for one in asked)
        same = sum(one == other for one, other in zip(single, crowd, strict=True) if one is not None)
        by_task = ", ".join(f"{task} {right[task]}/{count}" for task, count in sorted(tasks.items()))
        print(f"{name}: {right.total()} of {len(asked)} right, {same} the same eight at once; {by_task}", flush=True)


def _asked(ask: Callable[[Example], str | None], example: Example) -> str | None:
    return ask(example)


def _is_right(answer: str, example: Example) -> bool:
    return answer.strip() == example["answer"]


def _url(data: str) -> str:
    return f"data:image/png;base64,{data}"


def _text(words: str) -> Turn:
    return {"type": "text", "text": words}


if __name__ == "__main__":
    main()
