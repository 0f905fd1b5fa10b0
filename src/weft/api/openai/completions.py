"""POST /v1/completions: parses a body into a `GenerationRequest`, and encodes deltas as a completion or its chunks."""

import codecs
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from weft.api import field_table
from weft.api.dialect import ParsedRequest, ReplyHeader, join_texts
from weft.api.fields import BUDGET_NAMES, FieldRules, refused
from weft.api.openai import request as openai
from weft.api.openai.reply import OpenAIReply, logprob_of, prompt_fields, tokens_of
from weft.api.openai.request import GRAMMAR_FIELDS, MAX_CHOICES, CommonRequest, PromptLogprobs, TokenId, read_grammar
from weft.errors import InvalidRequest
from weft.ipc.limits import MAX_TOKEN_IDS
from weft.text.types import Delta, Prompt, Token

# Reasoning is not split off here, so it can not be limited.
BUDGETS = dict.fromkeys(BUDGET_NAMES, refused("reasoning is not told from the answer in Completions", -1))
RULES = FieldRules({**field_table.OPENAI, **field_table.COMPLETIONS, **BUDGETS}, openai.WRAPPERS, openai.ALIASES)


TokenIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKEN_IDS)]


class CompletionRequest(CommonRequest, kw_only=True):
    """The body of POST /v1/completions."""

    # One text, several, one list of ids, or several; msgspec can not say that a list is all of one kind.
    prompt: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1, max_length=MAX_TOKEN_IDS)]
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None  # 0 only with echo; -1: no limit
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    prompt_logprobs: PromptLogprobs | None = None
    return_token_ids: bool | None = None


def translate(body: dict[str, Any]) -> ParsedRequest:
    """Parse a body of POST /v1/completions into a generation request and its reply type. Raises InvalidRequest."""
    request, ignored = RULES.read(body, CompletionRequest)
    prompts, n = _read_prompts(request.prompt), request.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts with n {n} make more than {MAX_CHOICES} choices; send fewer", "prompt")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens 0 asks for nothing; only with echo is there something to tell", "max_tokens")
    request.refuse_in_stream("prompt_logprobs", "return_token_ids")
    if request.echo and request.prompt_logprobs is not None:
        raise InvalidRequest("echo and prompt_logprobs both tell of the prompt; send one of them", "prompt_logprobs")
    # OpenAI stops after 16 tokens by default. Here, as in every dialect, the default is the rest of the context.
    own: dict[str, Any] = {"grammar": read_grammar(request, GRAMMAR_FIELDS), "echo": bool(request.echo), "split_thinking": False}
    own |= {"prompt_logprobs": request.prompt_logprobs, "returns_ids": bool(request.return_token_ids)}
    limit = None if request.max_tokens == -1 else request.max_tokens
    generation = request.read_generation(prompts, limit, request.logprobs, **own)
    return ParsedRequest(generation, bool(request.stream), ignored, partial(CompletionReply, request=request, prompts=prompts))


def _read_prompts(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return (tuple(prompt),)
    if kinds in ({str}, {list}):
        return tuple(item if isinstance(item, str) else tuple(item) for item in prompt)
    raise InvalidRequest("prompt must be a text, a list of texts, a list of token ids or a list of such lists", "prompt")


class CompletionReply(OpenAIReply):
    """Encodes a reply as a text completion, or as its stream chunks."""

    id_prefix = "cmpl"
    body_object = "text_completion"
    chunk_object = "text_completion"
    silence: ClassVar[dict[str, Any]] = {"text": "", "logprobs": None}

    def __init__(self, header: ReplyHeader, request: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        super().__init__(header, request, len(prompts), request.logprobs is not None)
        self._places = [TokenPlaces() for _ in self.choices]

    def show_run(self, choice: int, run: Sequence[Delta]) -> dict[str, Any]:
        return self.show_choice(choice, run) if join_texts(run) or tokens_of(run) else {}

    def show_choice(self, choice: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        return {"text": join_texts(deltas), "logprobs": self._logprobs(choice, deltas) if self.has_logprobs else None}

    def make_choice(self, choice: int) -> dict[str, Any]:
        return super().make_choice(choice) | prompt_fields(self.request, self.collected[choice])

    def _logprobs(self, choice: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        offsets = [offset for delta in deltas for offset in self._places[choice].find(join_texts([delta]), tokens_of([delta]))]
        return {
            "tokens": [token.text for token in tokens_of(deltas)],
            "token_logprobs": [logprob_of(token) for token in tokens_of(deltas)],
            "top_logprobs": [_top(token) for token in tokens_of(deltas)],
            "text_offset": offsets,
        }


class TokenPlaces:
    """Finds at which character of a choice's text each token begins; all tokens of one character begin where it does."""

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._begin = 0  # characters that belong to earlier tokens
        self._rest = ""  # shown behind them
        self._num_absent = 0  # characters of tokens since then that the text does not show, such as a marker of its beginning

    def find(self, text: str, tokens: Sequence[Token]) -> list[int]:
        """Return where these tokens begin, whose last characters are in `text`, the next piece of the choice's text."""
        self._rest += text
        offsets = [self._next(token) for token in tokens]
        if self._num_absent and tokens:  # the text is not that of its tokens: the next ones begin behind it
            self._skip(len(self._rest))
        return offsets

    def _next(self, token: Token) -> int:
        shown = self._decode(token.bytes)
        if not shown:  # no character ends with it
            return self._begin
        for piece in (shown, shown.removeprefix(" ")):  # some vocabularies put a space in front of a text
            at = self._rest.find(piece, 0, self._num_absent + len(piece))
            if at >= 0:
                earlier = max(len(piece) - len(token.text), 0)  # a broken character before it came to light with it
                offset = self._begin + at + (earlier if piece is shown else 0)
                self._skip(at + len(piece))
                return offset
        self._num_absent += len(shown)
        return self._begin

    def _skip(self, num_characters: int) -> None:
        self._begin, self._rest, self._num_absent = self._begin + num_characters, self._rest[num_characters:], 0


def _top(token: Token) -> dict[str, float | None] | None:
    """Return a dict from token text to log-probability, of the top tokens and the chosen one; None if there are no top tokens."""
    top: dict[str, float | None] = {}
    for other in (*token.top, token):
        top.setdefault(other.text, logprob_of(other))
    return top if token.top else None
