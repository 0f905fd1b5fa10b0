"""The log on stderr, as text for people or as one JSON object a line, and the line that every finished request leaves.

What clients send is never trusted to be printable, and what they ask the model is never logged.
"""

from __future__ import annotations

import json
import logging
import textwrap
import time
from typing import Any, Literal

from weft.text.types import Usage

LogFormat = Literal["text", "json"]

_requests = logging.getLogger("weft.request")


def setup(format: LogFormat = "text", level: str = "INFO") -> None:  # noqa: A002  the option's name
    """Send the whole process' log to stderr. Of other libraries only warnings are shown."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("weft").setLevel(level.upper())
    # uvicorn looks at its logger's own level, so the root's is not enough. Its access log has no fields; ours has.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").propagate = False
    logging.getLogger("uvicorn.access").handlers.clear()


def request_line(
    *, request_id: str, client: str, wire: str, model: str, status: int, finish: str | None, usage: Usage | None
) -> None:
    """Say that a request ended. `usage` is absent when it never reached the engine, `finish` when there was no answer."""
    fields: dict[str, Any] = {
        "id": request_id,
        "client": client,
        "wire": wire,
        "model": model,
        "status": status,
        "finish": finish,
    }
    text = f"{request_id} {client} {wire} {model} {status} {finish or '-'}"
    if usage is not None:
        fields |= _counts(usage)
        text += (
            " prompt={prompt_tokens} cached={cached_tokens} new={new_tokens} queue={queue_ms}ms prefill={prefill_ms}ms "
            "decode={decode_ms}ms {tokens_per_second} tok/s"
        ).format(**fields)
    _requests.info("%s", text, extra={"fields": fields})


def _counts(usage: Usage) -> dict[str, Any]:
    # The first token belongs to the prefill; the others came in the time of decoding.
    decoded = max(usage.completion_tokens - 1, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "new_tokens": usage.completion_tokens,
        "queue_ms": round(usage.queue_seconds * 1000),
        "prefill_ms": round(usage.prefill_seconds * 1000),
        "decode_ms": round(usage.decode_seconds * 1000),
        "tokens_per_second": round(decoded / usage.decode_seconds, 1) if usage.decode_seconds > 0 else 0.0,
    }


class TextLines(logging.Formatter):
    """`12:34:56 INFO  message`; a traceback follows indented, so that nothing in it looks like a line of ours."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback's."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname:<5} {escaped(record.getMessage())}"
        if record.exc_info:
            trace = "\n".join(escaped(each) for each in self.formatException(record.exc_info).split("\n"))
            line += "\n" + textwrap.indent(trace, "    ")
        return line


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, and the fields given as `extra={"fields": …}`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line of ASCII; whatever is not printable is escaped by JSON itself."""
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{clock}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage()} | getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def escaped(text: str) -> str:
    """The text with everything unprintable written as an escape: line ends, terminal codes, half characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
