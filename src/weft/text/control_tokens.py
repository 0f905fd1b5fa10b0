"""Control tokens (the vocabulary's special tokens) that clients write in their texts, kept apart from the template's own.

A template writes its control tokens as text into the prompt, among texts of the client that may look the same. So before it
renders, characters of the client's texts that control tokens are made of are replaced by others that occur nowhere, one for one;
in what it writes, whatever still reads as a control token is its own. The replaced characters are put back, and if a control
token of the client's is among the text now, a tokenizer is used that takes only the template's for tokens.
"""

import re
import secrets
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from weft.errors import InvalidRequest
from weft.text.tokenizer import Tokenizer

_PRIVATE = range(0xE000, 0xF900)  # characters that Unicode leaves to everybody's own use
_PRIVATE_LETTER = re.compile("[\ue000-\uf8ff]")
# Letters, digits and what markup is made of are in texts all the time, and templates look for them; anything else is rare.
_COMMON = re.compile(r"[A-Za-z0-9\s<>/\[\]{}()=_.,:;'\"!?#*@+-]")


class ControlTokens:
    """The control tokens of one vocabulary; finds them in texts and encodes prompts in which some of them are text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.texts = frozenset(filter(None, map(tokenizer.inner.id_to_token, tokenizer.special_ids)))
        self.rare = frozenset(letter for text in self.texts for letter in text if not _COMMON.match(letter))
        self.beginnings = frozenset(text[:size] for text in self.texts for size in range(1, len(text)))
        self.replaced = sorted(self.rare | {text[0] for text in self.texts})
        self.max_length = max(map(len, self.texts), default=0)
        self._lengths = sorted({len(text) for text in self.texts}, reverse=True)
        self._first = re.compile(
            "[" + re.escape("".join(sorted({text[0] for text in self.texts}))) + "]" if self.texts else "(?!)"
        )

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the places of control tokens in a text, start and end; of two that begin at one place the longer."""
        end = 0
        for match in self._first.finditer(text):
            start = match.start()
            size = next((size for size in self._lengths if text[start : start + size] in self.texts), 0)
            if size and start >= end:
                end = start + size
                yield start, end

    def encode(self, prompt: str, own: str, offsets: Sequence[int]) -> tuple[list[int], list[int]]:
        """Encode a prompt in which only the control tokens of `own` are tokens; as `Tokenizer.encode_with_offsets`.

        `own` is the prompt with characters of the client's texts replaced, so that no text of theirs is found in it.
        """
        pieces, places, last = list[str](), [(0, 0)], 0  # places: an end of a control token in the prompt, and among the pieces
        for start, end in self.find(own):
            mark = self._marks[own[start:end]]
            pieces += [prompt[last:start], mark]
            places.append((end, places[-1][1] + start - last + len(mark)))
            last = end
        moved = [offset + _shift(places, offset) for offset in offsets]
        encoding = self._guarded.encode_batch(["".join([*pieces, prompt[last:]])], add_special_tokens=False)[0]
        ids, ends = self._own_ids(encoding.ids, [end for _, end in encoding.offsets])
        return ids, [bisect_right(ends, offset) for offset in moved]

    def _own_ids(self, ids: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
        """Return the vocabulary's ids of the guarded tokenizer's; a control token that a text became by itself is spelt out."""
        found: list[tuple[int, int]] = []
        for token, end in zip(ids, ends, strict=True):
            if token in self._ids or token not in self.tokenizer.special_ids:
                found.append((self._ids.get(token, token), end))
            else:  # it is a word of the vocabulary too, as in Unigram ones
                text = self.tokenizer.inner.id_to_token(token) or ""
                parts = [self._guarded.encode(part, add_special_tokens=False).ids for part in (text[:1], text[1:])]
                found += [(one, end) for part in parts for one in part]
        return [one for one, _ in found], [end for _, end in found]

    @cached_property
    def _marks(self) -> dict[str, str]:
        nonce = secrets.token_hex(16)  # no client can write it
        return {text: f"{chr(_PRIVATE[0])}{nonce}{number:x}{chr(_PRIVATE[-1])}" for number, text in enumerate(sorted(self.texts))}

    @cached_property
    def _guarded(self) -> tokenizers.Tokenizer:
        """The same tokenizer, except that control tokens are found by their marks, and their own texts are text."""
        inner = self.tokenizer.inner
        made = tokenizers.Tokenizer(inner.model)
        if inner.normalizer is not None:
            made.normalizer = inner.normalizer
        if inner.pre_tokenizer is not None:
            made.pre_tokenizer = inner.pre_tokenizer
        for _, token in sorted(inner.get_added_tokens_decoder().items()):
            text = self._marks.get(token.content, token.content) if token.special else token.content
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            made.add_tokens([tokenizers.AddedToken(text, normalized=token.normalized and not token.special, **flags)])
        return made

    @cached_property
    def _ids(self) -> dict[int, int]:
        """The vocabulary's id of each added token, by the guarded tokenizer's."""
        added = self.tokenizer.inner.get_added_tokens_decoder().items()
        texts = {token: self._marks.get(one.content, one.content) if one.special else one.content for token, one in added}
        guarded = {token: self._guarded.token_to_id(text) for token, text in texts.items()}
        return {one: token for token, one in guarded.items() if one is not None}


class Hiding:
    """Hides one conversation's control tokens from its template, by replacing characters of the client's texts."""

    def __init__(self, control: ControlTokens) -> None:
        self.control = control
        self._private: dict[str, str] = {}  # by character that is replaced: what stands for it
        self._tails: set[str] = set()  # beginnings of control tokens with which a text ends and another may go on

    def hide(self, value: Any) -> Any:
        """Return the client's texts (in lists and objects, keys too) with characters replaced; None if there is no need to.

        To be called once.
        """
        every = set(_strings(value))
        suspects = [one for one in every if self._may_matter(one)]
        if not suspects:
            return None
        heads = [head for one in every if (head := one.lstrip())]
        self._tails = {tail for one in suspects if (tail := self._open_tail(one.rstrip(), heads))}
        used = {letter for one in every for letter in _PRIVATE_LETTER.findall(one)}
        unused = (chr(code) for code in _PRIVATE if chr(code) not in used)
        self._private = dict(zip(self.control.replaced, unused, strict=False))
        if len(self._private) < len(self.control.replaced):
            raise InvalidRequest("messages use all of Unicode's private characters; leave some of them out", "messages")
        return self._hidden(value)

    def settle(self, rendered: str) -> tuple[str, str]:
        """Return a rendered prompt with the replaced characters, and the same with the client's own back in their places."""
        own = rendered
        for private in self._private.values():  # a template may write JSON in ASCII alone
            own = own.replace(f"\\u{ord(private):04x}", private)
        text = own
        for letter, private in self._private.items():
            text = text.replace(private, letter)
        return own, text

    def has_typed(self, prompt: str, own: str) -> bool:
        """Whether a prompt, rendered without hiding, has control tokens beside the template's own."""
        found, known = ([text[start:end] for start, end in self.control.find(text)] for text in (prompt, own))
        return found != known

    def _may_matter(self, text: str) -> bool:
        control, body = self.control, text.rstrip()
        if any(letter in text for letter in control.rare) or next(control.find(text), None) is not None:
            return True
        return any(body[-size:] in control.beginnings for size in range(1, control.max_length))

    def _open_tail(self, text: str, heads: list[str]) -> str:
        """Return the beginning of a control token that ends a text, if another text could complete it; else ""."""
        for size in range(min(self.control.max_length - 1, len(text)), 0, -1):
            if (tail := text[-size:]) in self.control.beginnings:
                rests = [one[size:] for one in self.control.texts if one.startswith(tail)]
                if any(head.startswith(rest) or rest.startswith(head) for rest in rests for head in heads):
                    return tail
        return ""

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hidden_text(value)
        if isinstance(value, dict):
            return {self._hidden(key): self._hidden(one) for key, one in value.items()}
        return [self._hidden(one) for one in value] if isinstance(value, list | tuple) else value

    def _hidden_text(self, text: str) -> str:
        body = text.rstrip()
        starts = {start for start, _ in self.control.find(text)}
        starts |= {len(body) - len(tail) for tail in self._tails if body.endswith(tail)}
        pieces, last = list[str](), 0
        for start in sorted(starts):
            pieces += [text[last:start], self._private[text[start]]]
            last = start + 1
        text = "".join([*pieces, text[last:]])
        for letter in self.control.rare:
            text = text.replace(letter, self._private[letter])
        return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _strings(key)
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


def _shift(places: list[tuple[int, int]], offset: int) -> int:
    """Return how far a place of the prompt moved, from the last place before it of which both positions are known."""
    before, after = places[bisect_right(places, (offset, 1 << 62)) - 1]
    return after - before
