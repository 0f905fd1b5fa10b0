"""What our own answers thought, for clients that send the answers back without it: so the next prompt begins as the last went on.

Bounded in bytes and in number; what was not used for longest goes first. Knows answers by what their clients send back of
them, under whatever owner it is told; `Choice` notes them down, the service keeps and recalls.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from weft.chat.conversation import CallArguments, CallOpened, Conversation, Delta, Message, Reasoning, Text, ToolCall

MAX_BYTES = 64 << 20
MAX_COUNT = 8192


class Turn:
    """One answer as its client may send it back, and what was thought before it."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[tuple[CallOpened, list[str]]] = []
        self._is_mixed = False  # it thought again after it had spoken: no message can say that

    def take(self, deltas: Sequence[Delta]) -> None:
        """Note down what is new."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    self._is_mixed = self._is_mixed or bool(self._texts or self._calls)
                    self._thoughts.append(text)
                case Text(text):
                    self._texts.append(text)
                case CallOpened():
                    self._calls.append((delta, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)

    @property
    def message(self) -> Message | None:
        """All of it; None for an answer without a thought, or with nothing to know it by."""
        if not self._thoughts or self._is_mixed or not (self._texts or self._calls):
            return None
        calls = tuple(ToolCall(opened.name, "".join(pieces), opened.id) for opened, pieces in self._calls)
        return Message("assistant", "".join(self._texts), "".join(self._thoughts), calls)


class Memory:
    """Thoughts by the answers that followed them. Used from several threads."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_count: int = MAX_COUNT) -> None:
        self.max_bytes, self.max_count = max_bytes, max_count
        self.num_bytes = 0
        self._kept: OrderedDict[bytes, str] = OrderedDict()  # what was not used for longest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: str, before: Message, answer: Message) -> None:
        """Remember what an answer thought; `before` is the message that it answered."""
        key, thought = _key(owner, before, answer), answer.reasoning or ""
        with self._lock:
            self._forget(key)
            self._kept[key] = thought
            self.num_bytes += _size(thought)
            while self.num_bytes > self.max_bytes or len(self._kept) > self.max_count:
                self._forget(next(iter(self._kept)))

    def recalled(self, owner: str, conversation: Conversation, *, beside_text: bool) -> Conversation:
        """The conversation with what its answers thought. As it is where the client itself sends what was thought.

        `beside_text`: the template takes thoughts also where text and calls stand together.
        """
        messages = conversation.messages
        if not self._kept or any(message.reasoning is not None for message in messages):
            return conversation
        pairs = zip([Message("user", ""), *messages], messages, strict=False)
        return replace(conversation, messages=tuple(self._completed(owner, before, one, beside_text) for before, one in pairs))

    def _completed(self, owner: str, before: Message, message: Message, beside_text: bool) -> Message:
        if message.role != "assistant" or (message.tool_calls and message.content and not beside_text):
            return message
        key = _key(owner, before, message)
        with self._lock:
            if key not in self._kept:
                return message
            self._kept.move_to_end(key)
            return replace(message, reasoning=self._kept[key])

    def _forget(self, key: bytes) -> None:
        self.num_bytes -= _size(self._kept.pop(key)) if key in self._kept else 0


def _key(owner: str, before: Message, answer: Message) -> bytes:
    """By its calls an answer is known; by words alone it might be that to another question too."""
    calls = [(call.id, call.name, _plain(call.arguments)) for call in answer.tool_calls]
    asked = [] if calls else [before.role, _bare(before)]
    return hashlib.sha256(msgspec.json.encode([owner, asked, _bare(answer), calls])).digest()


def _bare(message: Message) -> str:
    """What a message says, without the white space that clients and templates trim."""
    content = message.content or ""
    texts = [content] if isinstance(content, str) else [str(part.get("text", "")) for part in content]
    return "".join("".join(texts).split()).encode(errors="replace").decode()


def _plain(arguments: str) -> str:
    """Arguments whichever way a client writes them."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return "".join(arguments.split())


def _size(thought: str) -> int:
    return len(thought.encode(errors="replace")) + 256  # what its key and its place take
