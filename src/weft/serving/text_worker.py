"""Runs chat templates, and checks answers against schemas, in a process of its own with limits on memory, time and files.

Both are foreign programs: a template is the model's, a schema with patterns the client's. `text_processes.py` starts this module
and `child_pool.py` speaks to it.
"""

import os
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from weft.errors import BadModel, TemplateFailed, TemplateTooCostly
from weft.ipc.messages import GrammarSpec
from weft.memory.heap import bound_heap, collect_and_trim
from weft.serving.child_pool import READY
from weft.serving.image_worker import REPLY, limit_process, renew_cpu_seconds
from weft.text.schema import find_schema_errors
from weft.text.template import LocalTemplates

LENGTH = struct.Struct("<Q")  # of a job
DONE, FAILED, BROKEN, COSTLY = b"=", b"!", b"x", b"+"  # the result; or a sentence: of TemplateFailed, BadModel, TemplateTooCostly
NICENESS = 10  # others' tokens do not wait for the core that a costly template or pattern has
LARGE_BYTES = 1 << 18  # of a job or its result: what it took is given back
REFUSALS: dict[type[Exception], bytes] = {TemplateFailed: FAILED, BadModel: BROKEN, TemplateTooCostly: COSTLY}


class CompileJob(msgspec.Struct, tag=True):
    """A template to compile; the answer is empty."""

    source: str


class RenderJob(msgspec.Struct, tag=True):
    """A template to render; the answer is its text."""

    source: str
    values: dict[str, Any]  # Any: JSON, which templates read as they like


class CheckJob(msgspec.Struct, tag=True):
    """An answer to check against a schema; the answer is a JSON list of what is wrong with it."""

    schema: str
    text: str


TextJob = CompileJob | RenderJob | CheckJob


def main() -> None:
    """Answer jobs from standard input until it ends; arguments are bytes of memory and CPU seconds per job."""
    max_bytes, cpu_seconds = map(int, sys.argv[1:])
    templates, decoder = LocalTemplates(), msgspec.msgpack.Decoder(TextJob)
    limit_process(max_bytes)
    os.nice(NICENESS)
    bound_heap()
    jobs, replies = sys.stdin.buffer, sys.stdout.buffer
    replies.write(REPLY.pack(READY, 0))
    replies.flush()
    while (data := _read_job(jobs)) is not None:
        renew_cpu_seconds(cpu_seconds)
        kind, body = _answer(decoder.decode(data), templates)
        replies.write(REPLY.pack(kind, len(body)) + body)
        replies.flush()
        if len(data) > LARGE_BYTES or len(body) > LARGE_BYTES:
            del data, body
            collect_and_trim()


def _read_job(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _answer(job: TextJob, templates: LocalTemplates) -> tuple[bytes, bytes]:
    try:
        return DONE, _run(job, templates)
    except (TemplateFailed, BadModel, TemplateTooCostly) as error:
        return REFUSALS[type(error)], str(error).encode(errors="replace")
    except MemoryError:
        return COSTLY, b"it needs more memory than a job may have"


def _run(job: TextJob, templates: LocalTemplates) -> bytes:
    match job:
        case CompileJob(source):
            templates.compile(source)
            return b""
        case RenderJob(source, values):
            return templates.render(source, values).encode()
        case CheckJob(schema, text):
            return msgspec.json.encode(find_schema_errors(GrammarSpec("json_schema", schema), text))


if __name__ == "__main__":
    main()
