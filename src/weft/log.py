"""Logging to stderr as text or JSON lines. Unprintable characters are escaped before printing; prompts are never logged."""

import json
import logging
import textwrap
import time
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Status, token counts and durations of one finished request, for its log line and for the metrics."""

    request_id: str
    client: str
    dialect: str
    model: str
    status: int
    finish: str | None = None  # None: there was no answer
    total_seconds: float = 0.0
    first_token_seconds: float | None = None
    prompt_tokens: int | None = None  # None: it never reached the engine
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    miss_cause: str | None = None  # what ended the cached part of its prompt
    tenant: str = ""  # the name of its key


def setup(format: Literal["text", "json"] = "text", level: str = "INFO") -> None:  # noqa: A002  the option's name
    """Send the whole process's log to stderr: weft's records from `level` on, other libraries' from warnings on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("weft").setLevel(level.upper())
    # uvicorn looks at its logger's own level, so the root's is not enough. Its access log has no fields; ours has.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").propagate = False
    logging.getLogger("uvicorn.access").handlers.clear()


def log_request(record: RequestRecord) -> None:
    """Log one finished request in a line: ids, client, status, finish reason, token counts and times."""
    fields: dict[str, Any] = {"id": record.request_id, "client": record.client, "wire": record.dialect}
    fields |= {"model": record.model, "status": record.status, "finish": record.finish}
    text = f"{record.request_id} {record.client} {record.dialect} {record.model} {record.status} {record.finish or '-'}"
    if record.tenant:
        fields["tenant"] = record.tenant
        text += f" tenant={record.tenant}"
    if record.prompt_tokens is not None:
        decoded = max(record.completion_tokens - 1, 0)  # the first token belongs to the prefill
        fields |= {"prompt_tokens": record.prompt_tokens, "cached_tokens": record.cached_tokens}
        fields |= {"new_tokens": record.completion_tokens, "queue_ms": round(record.queue_seconds * 1000)}
        fields |= {"prefill_ms": round(record.prefill_seconds * 1000), "decode_ms": round(record.decode_seconds * 1000)}
        fields["tokens_per_second"] = round(decoded / record.decode_seconds, 1) if record.decode_seconds > 0 else 0.0
        text += (
            " prompt={prompt_tokens} cached={cached_tokens} new={new_tokens} queue={queue_ms}ms prefill={prefill_ms}ms "
            "decode={decode_ms}ms {tokens_per_second} tok/s"
        ).format(**fields)
    logging.getLogger("weft.request").info("%s", text, extra={"fields": fields})


def log_action(fields: dict[str, str], level: int = logging.INFO) -> None:
    """Write a line of the audit log (logger `weft.audit`): an admin's action with who asked for it, and its outcome."""
    text = "audit: {action} {subject} by {tenant} from {client}, request {id}: {outcome}".format(**fields)
    logging.getLogger("weft.audit").log(level, "%s", text, extra={"fields": fields})


class TextLines(logging.Formatter):
    """Formats records as `12:34:56 INFO  message`; a traceback follows indented, so that nothing in it looks like a record."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname:<5} {escape_unprintable(record.getMessage())}"
        if record.exc_info:
            trace = "\n".join(escape_unprintable(each) for each in self.formatException(record.exc_info).split("\n"))
            line += "\n" + textwrap.indent(trace, "    ")
        return line


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: time, level, logger, message, the dict extra["fields"], and any exception."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{clock}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage()} | getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def escape_unprintable(text: str) -> str:
    """Return the text with unprintable characters (newlines, terminal codes, lone surrogates) written as escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
