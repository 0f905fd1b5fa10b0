"""The engine is killed amid a streamed, thought-over, strictly shaped answer: OpenAI's own client does not notice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import jsonschema_rs

from servers import running
from waiting import HANG_SECONDS

SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "minLength": 10, "maxLength": 30}, "minItems": 8, "maxItems": 8},
        "count": {"type": "integer"},
    },
    "required": ["names", "count"],
    "additionalProperties": False,
}


def test_a_strict_answer_with_a_thinking_budget_is_one_whole_stream(tmp_path: Path) -> None:
    with running(tmp_path / "log", "tiny-hybrid") as server:
        asked: dict[str, Any] = {
            "model": "tiny-hybrid",
            "messages": [{"role": "user", "content": "Remember the names and count them."}],
            "temperature": 0,
            "max_tokens": 600,
            "response_format": {"type": "json_schema", "json_schema": {"name": "names", "strict": True, "schema": SCHEMA}},
            "extra_body": {"thinking_token_budget": 40, "chat_template_kwargs": {"enable_thinking": True}},
        }
        client = server.client(timeout=HANG_SECONDS)

        def streamed(kill_at: set[int]) -> tuple[str, str | None]:
            text, finish = "", None
            for number, chunk in enumerate(client.chat.completions.create(**asked, stream=True)):
                if number in kill_at:
                    os.kill(server.status()["engine_pid"], signal.SIGKILL)
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    finish = choice.finish_reason or finish
            return text, finish

        undisturbed = streamed(set())
        killed = streamed({12, 60})

        assert killed == undisturbed
        assert killed[1] == "stop"
        assert jsonschema_rs.is_valid(SCHEMA, json.loads(killed[0]))
        assert server.status()["engine_restarts"] == 2
