"""Request fields shared by OpenAI's APIs, as msgspec structs, and their conversion to a `GenerationRequest`."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.api import field_table
from weft.api.dialect import ANY_OBJECT, SomeLabel, SomeText, StopText, StopTexts
from weft.api.fields import FieldRules
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.limits import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICE_TEXTS,
    MAX_ENTRIES,
    MAX_LABEL_CHARACTERS,
    MAX_STOP_TOKENS,
    MAX_TOKEN_IDS,
    Sampling,
)
from weft.ipc.messages import GrammarSpec
from weft.text.bodies import Entries, FormatType, Label
from weft.text.sampling import PENALTY_WINDOWS
from weft.text.schema import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar, structural_tag_grammar
from weft.text.types import GenerationRequest, Prompt

MAX_CHOICES = 128  # prompts × n of one request
TIERS = {"priority": 10, "flex": -10}  # the priorities of OpenAI's tiers; the others have none

TokenId = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Limit = Annotated[int, Meta(ge=-1, extra_json_schema={"not": {"const": 0}})]  # of tokens; -1: none but the context's
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
PromptLogprobs = Annotated[int, Meta(ge=0, le=20)]
BadWord = Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
Schema = dict[str, Any] | Annotated[bool, Meta(extra_json_schema={"const": True})]
SchemaOrText = Schema | SomeText
Off = Annotated[bool, Meta(extra_json_schema={"const": False})]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)]
ToolMode = Annotated[
    str, Meta(max_length=MAX_LABEL_CHARACTERS, extra_json_schema={"enum": ["auto", "none", "required"]})
]  # `read_tool_selection` checks it
# Takes a field's value, its place, and whether objects are closed (`json_schema_grammar`).
MakeGrammar = Callable[[Any, str, bool | None], GrammarSpec | None]

WRAPPERS = ("nvext", "extra_body")  # NIM's, and what clients mean to unpack and some send as it is
ALIASES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens"}  # llama.cpp's and LM Studio's
RULES = FieldRules({**field_table.OPENAI, **field_table.CHAT}, WRAPPERS, ALIASES)


class StreamOptions(msgspec.Struct, kw_only=True):
    """The `stream_options` field; with include_usage, a stream ends with a chunk that has the token usage."""

    include_usage: bool | None = None


class NamedSchema(msgspec.Struct, kw_only=True):
    """The `json_schema` object of a response_format. Name and description are not shown to the model."""

    schema: Schema
    strict: bool | None = None
    name: Label | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The `response_format` field. A JSON schema is in `json_schema` or, as some clients send it, in `schema`."""

    type: FormatType
    json_schema: NamedSchema | None = None
    schema: Schema | None = None
    strict: bool | None = None
    structures: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ENTRIES)] | None = None
    triggers: Annotated[list[SomeLabel], Meta(max_length=MAX_ENTRIES)] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs` field: a constraint on the answer, given by one of the first six fields."""

    json: SchemaOrText | None = None
    json_object: bool | None = None
    regex: SomeText | None = None
    choice: Choices | None = None
    grammar: SomeText | None = None
    structural_tag: dict[str, Any] | SomeText | None = None
    disable_fallback: bool | None = None  # there is nothing to fall back to
    disable_any_whitespace: Off | None = None
    disable_additional_properties: bool | None = None  # of each schema in the request; null: where it is not strict
    whitespace_pattern: None = None


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields shared by all OpenAI APIs. Null is treated as absent; further value ranges are checked by `Sampling`."""

    model: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None  # -1 and 0: all tokens
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # How far back penalties look. Here they look at everything, so these are refused while the penalty acts.
    repeat_last_n: int | None = None
    repetition_context_size: int | None = None
    presence_context_size: int | None = None
    frequency_context_size: int | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=MAX_BIASES)] | None = None
    seed: int | None = None
    stop: StopText | StopTexts | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    # What the answer must look like: at most one of these. The last two are llama.cpp's, `regex` is SGLang's.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: SomeText | None = None
    guided_choice: Choices | None = None
    guided_grammar: SomeText | None = None
    regex: SomeText | None = None
    json_schema: Schema | None = None
    grammar: SomeText | None = None
    # Who may share the computed prompt, and who comes again. The answer is the same in any case.
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    prompt_cache_key: Any = None  # Any: two hints, and any value is one
    session_id: Any = None
    # Who goes first where not all can be answered at once.
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    service_tier: Any = None  # Any: values other than OpenAI's two with a priority have no effect
    speculate: bool | None = None  # false: no draft tokens are verified. The answer is the same in any case.

    def read_generation(
        self, prompts: tuple[Prompt, ...], max_tokens: int | None, logprobs: int | None, **more: Any
    ) -> GenerationRequest:
        hint = self.prompt_cache_key or self.session_id
        tier = TIERS.get(self.service_tier, 0) if isinstance(self.service_tier, str) else 0
        return GenerationRequest(
            model=self.model,
            prompts=prompts,
            n=self.n or 1,
            sampling=self._read_sampling(max_tokens, logprobs),
            stops=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
            skip_special_tokens=self.skip_special_tokens is not False,
            cache_salt=self.cache_salt or "",
            session=hint if isinstance(hint, str) else msgspec.json.encode(hint).decode() if hint else "",
            priority=tier if self.priority is None else self.priority,
            speculate=self.speculate is not False,
            penalty_windows=tuple(name for name in PENALTY_WINDOWS if getattr(self, name, None) not in (None, -1)),
            **more,
        )

    def refuse_in_stream(self, *names: str) -> None:
        """Raise UnsupportedParameter for what whole answers alone tell."""
        if self.stream and (name := next((one for one in names if _is_asked(getattr(self, one))), None)):
            raise UnsupportedParameter(f"{name} is told in whole answers only; leave it out, or set stream to false", name)

    @staticmethod
    def read_limit(limit: int | None, name: str) -> int | None:
        """Return a limit of tokens, None for -1. Raises InvalidRequest for 0, which asks for nothing."""
        if limit == 0:
            raise InvalidRequest(f"{name} 0 asks for no answer; leave it out, or send -1 for no limit", name)
        return None if limit == -1 else limit

    def _read_sampling(self, max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
        same = [name for name in Sampling.__struct_fields__ if name in CommonRequest.__struct_fields__]
        fields = {name: getattr(self, name) for name in same} | {"max_tokens": max_tokens, "logprobs": logprobs}
        if self.top_k is not None:
            fields["top_k"] = max(self.top_k, 0)
        if self.logit_bias is not None:
            fields["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.stop_token_ids is not None:
            fields["stop_token_ids"] = tuple(self.stop_token_ids)
        return {name: value for name, value in fields.items() if value is not None}


def _is_asked(value: Any) -> bool:
    return value is not None and value is not False


class ConversationRequest(CommonRequest, kw_only=True):
    """Fields shared by the OpenAI APIs that take conversations: Chat Completions and Responses."""

    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None  # its other names are in `BUDGET_PLACES`; -1: no limit
    tool_choice: ToolMode | Entries | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Entries | None = None


def read_grammar(
    request: msgspec.Struct, makers: Mapping[str, MakeGrammar], place: str = "", closes: bool | None = None
) -> GrammarSpec | None:
    """Return the grammar that the fields in `makers` ask for; None if none does. Raises InvalidRequest if two of them differ."""
    given = {name: getattr(request, name) for name in makers}
    if outputs := given.get("structured_outputs"):
        closes = outputs.disable_additional_properties
    specs = {place + name: makers[name](value, place + name, closes) for name, value in given.items() if value is not None}
    names = [name for name, spec in specs.items() if spec is not None]
    if len({specs[name] for name in names}) > 1:  # two equal ones are one
        raise InvalidRequest(f"{names[0]} and {names[1]} can not both be honoured; send one of them", names[1])
    return specs[names[0]] if names else None


def read_format(form: ResponseFormat, place: str, closes: bool | None = None) -> GrammarSpec | None:
    """Return the grammar for a response_format; None for plain text. Raises InvalidRequest if a required field is missing."""
    match form:
        case ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="structural_tag", structures=list(), triggers=list()):
            return structural_tag_grammar({"structures": form.structures, "triggers": form.triggers}, place)
        case ResponseFormat(type="structural_tag"):
            raise InvalidRequest(f"{place} needs structures and triggers", place)
        case ResponseFormat(json_schema=NamedSchema(schema=schema, strict=strict)):
            if None not in (strict, form.strict) and strict != form.strict:
                raise InvalidRequest(f"{place}.strict and {place}.json_schema.strict differ; send one of them", f"{place}.strict")
            return json_schema_grammar(schema, bool(strict or form.strict), f"{place}.json_schema.schema", closes)
        case ResponseFormat(schema=None, type="json_object"):
            return ANY_OBJECT
        case ResponseFormat(schema=None):
            raise InvalidRequest(f"{place}.json_schema is required", f"{place}.json_schema")
    return json_schema_grammar(form.schema, bool(form.strict), f"{place}.schema", closes)


def _read_structured_outputs(wanted: StructuredOutputs, place: str, closes: bool | None) -> GrammarSpec | None:
    if wanted.disable_any_whitespace:
        where = f"{place}.disable_any_whitespace"
        raise UnsupportedParameter(f"{where} is not supported here; leave it out", where)
    spec = read_grammar(wanted, OUTPUT_FIELDS, f"{place}.", closes)
    if spec is None and closes is None:
        raise InvalidRequest(f"{place} is empty; it needs one of {', '.join(OUTPUT_FIELDS)}", place)
    return spec


def _read_schema(schema: Any, place: str, closes: bool | None) -> GrammarSpec:
    return json_schema_grammar(schema, False, place, closes)


def _plain(make: Callable[[Any, str], GrammarSpec]) -> MakeGrammar:
    return lambda value, place, _: make(value, place)


GRAMMAR_FIELDS: dict[str, MakeGrammar] = {
    "response_format": read_format,
    "structured_outputs": _read_structured_outputs,
    "guided_json": _read_schema,
    "guided_regex": _plain(regex_grammar),
    "guided_choice": _plain(choice_grammar),
    "guided_grammar": _plain(lark_grammar),
    "regex": _plain(regex_grammar),
    "json_schema": _read_schema,
    "grammar": _plain(lark_grammar),
}
OUTPUT_FIELDS: dict[str, MakeGrammar] = {
    "json": _read_schema,
    "json_object": lambda wanted, _place, _closes: ANY_OBJECT if wanted else None,
    "regex": _plain(regex_grammar),
    "choice": _plain(choice_grammar),
    "grammar": _plain(lark_grammar),
    "structural_tag": _plain(structural_tag_grammar),
}
