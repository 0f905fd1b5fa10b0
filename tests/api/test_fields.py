"""What requests' fields do, at every level of every dialect: they act, are refused by name, are harmless, or are told."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

import anthropic.types.beta as beta_types
import anthropic.types.message_create_params as message_params
import msgspec
import openai.types.chat as chat_types
import openai.types.completion_create_params as completion_params
import openai.types.responses.response_create_params as response_params
import pytest
from anthropic.types.beta import message_create_params as beta_params
from openai.types.chat import completion_create_params as chat_params

from dialect_kit import refused
from weft.api import ollama
from weft.api.anthropic import request as anthropic
from weft.api.app import UnknownFields
from weft.api.dialect import ParsedRequest
from weft.api.fields import BUDGET_HOLDERS, BUDGET_NAMES, BUDGET_PLACES, FieldRules
from weft.api.openai import chat, completions, responses
from weft.api.openai import request as openai
from weft.api.problems import anthropic_body
from weft.errors import InvalidRequest, UnsupportedParameter
from weft.ipc.limits import Sampling
from weft.text.bodies import Shape, shape_of
from weft.text.sampling import PENALTIES, PENALTY_WINDOWS, check_windows

TEXT = {"type": "text", "text": "Hi"}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "p"}]}
CLOSED = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}


class Wire(typing.NamedTuple):
    """A dialect: its translation, its rules, its struct, and a body that has every nested object at least once."""

    translate: Callable[[dict[str, Any]], ParsedRequest]
    rules: FieldRules
    kind: type[msgspec.Struct]
    body: dict[str, Any]


WIRES = {
    "chat": Wire(
        chat.translate,
        chat.RULES,
        chat.ChatRequest,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "1", "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}, {"type": "custom", "custom": {"name": "patch"}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            "stream": True,
            "stream_options": {"include_usage": True},
            "prediction": {"type": "content", "content": [TEXT]},
            "thinking": {"type": "enabled"},
            "reasoning": {"enabled": True},
        },
    ),
    "completions": Wire(
        completions.translate,
        completions.RULES,
        completions.CompletionRequest,
        {
            "model": "m",
            "prompt": "Hi",
            "stream": True,
            "stream_options": {},
            "structured_outputs": {"regex": "a+"},
            "response_format": {"type": "text"},
        },
    ),
    "responses": Wire(
        responses.translate,
        responses.RULES,
        responses.ResponseRequest,
        {
            "model": "m",
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [{"type": "output_text", "text": "Hm"}]},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"role": "user", "content": "More"},
            ],
            "tools": [
                {"type": "function", **FUNCTION},
                {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "p"}]},
            ],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
            "reasoning": {"effort": "low"},
            "stream": True,
            "stream_options": {},
            "response_format": {"type": "text"},
        },
    ),
    "messages": Wire(
        anthropic.translate,
        anthropic.RULES,
        anthropic.MessagesRequest,
        {
            "model": "m",
            "max_tokens": 9,
            "system": [TEXT],
            "messages": [
                {"role": "user", "content": [TEXT, {"type": "document", "source": {"type": "text", "data": "D"}}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [TEXT]}]},
            ],
            "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "low"},
            "metadata": {"user_id": "u"},
        },
    ),
    "ollama": Wire(
        ollama.translate_chat,
        ollama.RULES,
        ollama.OllamaChatRequest,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
                {"role": "tool", "content": "1", "tool_name": "add"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "options": {"temperature": 1},
        },
    ),
}


def objects(value: Any, shape: Shape, pattern: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object within a body whose fields are read by name, with its path."""
    if isinstance(value, list) and shape.entries is not None:
        for entry in value:
            yield from objects(entry, shape.entries, f"{pattern}[]")
    elif isinstance(value, dict) and shape.kinds is not None:
        if (kind := value.get("type", "")) in shape.kinds:
            yield from objects(value, shape.kinds[kind], pattern)
    elif isinstance(value, dict) and shape.fields is not None:
        yield pattern, value
        for name, inner in shape.inner:
            if name in value:
                yield from objects(value[name], inner, f"{pattern}.{name}".lstrip("."))


def bodies_with(wire: Wire, path: str, value: Any) -> Iterator[dict[str, Any]]:
    """The wire's body with a field at a path, once for each object that has this place."""
    outer, _, name = path.rpartition(".")
    if outer in BUDGET_HOLDERS - (shape_of(wire.kind).fields or {}).keys():
        yield {**wire.body, outer: {name: value}}
        return
    count = sum(pattern == outer for pattern, _ in objects(wire.body, shape_of(wire.kind)))
    assert count, f"the body has nothing at {outer!r}"
    for index in range(count):
        body = msgspec.json.decode(msgspec.json.encode(wire.body))
        places = [one for pattern, one in objects(body, shape_of(wire.kind)) if pattern == outer]
        places[index][name] = value
        yield body


def cases(*, acting: bool) -> list[tuple[str, str]]:
    return [
        (name, path)
        for name, wire in WIRES.items()
        for path, fate in wire.rules.fates.items()
        if (fate.idle is not None) == acting and path not in wire.kind.__struct_fields__
    ]


@pytest.mark.parametrize(("name", "path"), cases(acting=True))
def test_a_field_that_would_act_is_refused_with_its_path_and_its_reason(name: str, path: str) -> None:
    wire = WIRES[name]
    fate = wire.rules.fates[path]
    for body in bodies_with(wire, path, {"would": "act"}):
        error = refused(wire.translate, body)

        assert isinstance(error, UnsupportedParameter)
        assert re.sub(r"\[\d+\]", "[]", error.param or "") == path
        assert fate.why in str(error)
    for idle in (*(fate.idle or ()), None):
        for body in bodies_with(wire, path, idle):
            assert path not in wire.translate(body).ignored


@pytest.mark.parametrize(("name", "path"), cases(acting=False))
def test_a_field_without_effect_is_accepted_and_told_only_where_the_table_says_so(name: str, path: str) -> None:
    wire = WIRES[name]
    for body in bodies_with(wire, path, "anything"):
        assert (path in wire.translate(body).ignored) == wire.rules.fates[path].is_reported


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        (name, pattern)
        for name, wire in WIRES.items()
        for pattern in sorted({one for one, _ in objects(wire.body, shape_of(wire.kind))})
    ],
)
def test_a_field_that_nobody_knows_is_told_with_its_path_wherever_it_stands(name: str, pattern: str) -> None:
    wire, path = WIRES[name], f"{pattern}.zebra".lstrip(".")
    closed = {"structured_outputs"}  # its struct refuses what it does not know
    for body in bodies_with(wire, path, 1):
        if pattern in closed:
            refused(wire.translate, body)
        else:
            assert wire.translate(body).ignored == (path,)
    assert wire.translate(wire.body).ignored == ()


# --- what others name


def names_of(kind: Any) -> set[str]:
    members = typing.get_args(kind) or (kind,)
    return {
        name for member in members for base in member.__mro__ if base is not dict for name in getattr(base, "__annotations__", {})
    }


SDK_BODIES = {
    "chat": names_of(chat_params.CompletionCreateParamsNonStreaming),
    "completions": names_of(completion_params.CompletionCreateParamsNonStreaming),
    "responses": names_of(response_params.ResponseCreateParamsNonStreaming),
    "messages": names_of(message_params.MessageCreateParamsNonStreaming) | names_of(beta_params.MessageCreateParamsNonStreaming),
}
SDK_OBJECTS = [
    ("chat", "messages[]", chat_types.ChatCompletionUserMessageParam),
    ("chat", "messages[]", chat_types.ChatCompletionSystemMessageParam),
    ("chat", "messages[]", chat_types.ChatCompletionDeveloperMessageParam),
    ("chat", "messages[]", chat_types.ChatCompletionAssistantMessageParam),
    ("chat", "messages[]", chat_types.ChatCompletionToolMessageParam),
    ("chat", "messages[].tool_calls[]", chat_types.ChatCompletionMessageFunctionToolCallParam),
    ("chat", "messages[].content[]", chat_types.ChatCompletionContentPartTextParam),
    ("chat", "tools[]", chat_types.ChatCompletionFunctionToolParam),
    ("chat", "stream_options", chat_types.ChatCompletionStreamOptionsParam),
    ("messages", "messages[]", beta_types.BetaMessageParam),
    ("messages", "messages[].content[]", beta_types.BetaTextBlockParam),
    ("messages", "messages[].content[]", beta_types.BetaRequestDocumentBlockParam),
    ("messages", "messages[].content[]", beta_types.BetaToolUseBlockParam),
    ("messages", "messages[].content[]", beta_types.BetaToolResultBlockParam),
    ("messages", "tools[]", beta_types.BetaToolParam),
    ("messages", "output_config", beta_types.BetaOutputConfigParam),
]
# As their documentation and sources named them in November 2026.
VLLM = """
    use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
    skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids
    allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text
    return_assistant_tokens_mask cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
    thinking_token_budget include_reasoning lora_request logits_processors guided_json guided_regex guided_choice guided_grammar
"""
SGLANG = """
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details return_spec_tokens_details
    return_prompt_token_ids return_token_ids return_meta_info return_sampling_mask task top_k min_p min_tokens regex ebnf
    repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path
    session_id session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch
    use_audio_in_video images_config video_config custom_logit_processor custom_params input_ids rid extra_key cache_salt priority
    bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank custom_labels
"""
LLAMA_CPP = """
    dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep n_cmpl n_cache_reuse typical_p repeat_penalty
    repeat_last_n presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta grammar json_schema seed ignore_eos
    logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers timings_per_token return_progress
    sse_ping_interval post_sampling_probs response_fields lora chat_template_kwargs reasoning_format reasoning_control
    generation_prompt parse_tool_calls reasoning_budget_tokens reasoning_budget_message thinking_budget_tokens
"""
LM_STUDIO = "ttl draft_model repeat_penalty top_k response_format"
MLX_LM = """
    draft_model adapters min_p top_k repetition_penalty repetition_context_size presence_context_size frequency_context_size
    xtc_probability xtc_threshold chat_template_kwargs
"""
OTHERS = "thinking_tokens thinking_budget enable_thinking think bad_words allowed_token_ids banned_tokens keep_alive"


def is_known(wire: Wire, path: str) -> bool:
    rules, body = wire.rules, msgspec.json.decode(msgspec.json.encode(wire.body))
    if path in rules.fates or path in rules.aliases or path in BUDGET_NAMES:
        return True
    outer, _, name = path.rpartition(".")
    shapes = [shape for shape in found_shapes(body, shape_of(wire.kind)) if shape[0] == outer]
    return any(name in (shape.fields or {}) for _, shape in shapes)


def found_shapes(value: Any, shape: Shape, pattern: str = "") -> Iterator[tuple[str, Shape]]:
    if isinstance(value, list) and shape.entries is not None:
        for entry in value:
            yield from found_shapes(entry, shape.entries, f"{pattern}[]")
    elif isinstance(value, dict) and shape.kinds is not None:
        if (kind := value.get("type", "")) in shape.kinds:
            yield from found_shapes(value, shape.kinds[kind], pattern)
    elif isinstance(value, dict) and shape.fields is not None:
        yield pattern, shape
        for name, inner in shape.inner:
            if name in value:
                yield from found_shapes(value[name], inner, f"{pattern}.{name}".lstrip("."))


@pytest.mark.parametrize("name", SDK_BODIES)
def test_every_field_of_the_makers_libraries_is_in_the_table(name: str) -> None:
    assert {field for field in SDK_BODIES[name] if not is_known(WIRES[name], field)} == set()


@pytest.mark.parametrize(("name", "place", "kind"), SDK_OBJECTS)
def test_so_is_every_field_of_their_messages_parts_and_tools(name: str, place: str, kind: Any) -> None:
    assert {field for field in names_of(kind) if not is_known(WIRES[name], f"{place}.{field}")} == set()


@pytest.mark.parametrize("names", [VLLM, SGLANG, LLAMA_CPP, LM_STUDIO, MLX_LM, OTHERS])
def test_every_field_of_other_servers_is_in_the_table(names: str) -> None:
    assert {name for name in names.split() if not is_known(WIRES["chat"], name)} == set()


# --- what is acted on under another name, or a level further up


def test_names_of_other_servers_act_as_their_own() -> None:
    def sampling(**fields: Any) -> dict[str, Any]:
        return chat.translate({**WIRES["chat"].body, **fields}).generation.sampling

    assert sampling(repeat_penalty=1.2) == sampling(repetition_penalty=1.2)
    assert sampling(n_predict=7) == sampling(max_tokens=7) == sampling(n_predict=7, max_tokens=7)
    assert refused(chat.translate, {**WIRES["chat"].body, "n_predict": 7, "max_tokens": 8}).param == "n_predict"


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"enable_thinking": False}, "none"),
        ({"enable_thinking": True}, None),
        ({"think": False}, "none"),
        ({"think": True}, None),
        ({"think": "low"}, "low"),
        ({"think": "low", "reasoning_effort": "low"}, "low"),
    ],
)
def test_whether_to_think_is_understood_at_the_top(fields: dict[str, Any], effort: str | None) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}

    assert chat.translate(body).generation.effort == effort
    assert refused(chat.translate, {**body, "reasoning_effort": "high", "enable_thinking": False}).param in fields.keys() | {
        "enable_thinking"
    }


@pytest.mark.parametrize("wrapper", openai.WRAPPERS)
def test_null_beside_a_wrapped_field_counts_as_absent_and_another_value_is_refused(wrapper: str) -> None:
    def temperature(outer: object, inner: object) -> object:
        body = {**WIRES["chat"].body, "temperature": outer, wrapper: {"temperature": inner}}
        return chat.translate(body).generation.sampling.get("temperature")

    assert [temperature(*both) for both in ((None, 0.3), (0.3, None), (0.3, 0.3), (None, None))] == [0.3, 0.3, 0.3, None]
    assert refused(temperature, 0.3, 0.4).param == f"{wrapper}.temperature"


@pytest.mark.parametrize("name", ["chat", "responses", "messages"])
def test_special_tokens_that_are_not_added_change_nothing_where_a_template_writes_them(name: str) -> None:
    wire = WIRES[name]

    assert wire.translate({**wire.body, "add_special_tokens": False}).ignored == ()
    assert refused(wire.translate, {**wire.body, "add_special_tokens": True}).param == "add_special_tokens"


@pytest.mark.parametrize("name", ["chat", "completions", "responses", "messages"])
@pytest.mark.parametrize("field", ["timings_per_token", "return_progress"])
def test_what_only_changes_what_is_told_of_an_answer_is_reported(name: str, field: str) -> None:
    assert WIRES[name].translate({**WIRES[name].body, field: True}).ignored == (field,)


@pytest.mark.parametrize("window", PENALTY_WINDOWS)
def test_a_window_of_penalties_is_refused_only_while_one_of_them_acts(window: str) -> None:
    wire = WIRES["ollama" if "." in window else "chat"]
    for value, windows in ((64, (window,)), (0, (window,)), (-1, ()), (None, ())):
        (body,) = bodies_with(wire, window, value)
        parsed = wire.translate(body)
        assert (parsed.generation.penalty_windows, parsed.ignored) == (windows, ())

    check_windows([window], {}, Sampling(temperature=0.5))
    for name, value in dict.fromkeys(PENALTIES, 0.5).items():
        acting = Sampling(**{name: value})
        if name not in PENALTY_WINDOWS[window]:
            check_windows([window], {}, acting)
            continue
        for given, says_default in (({name: value}, False), ({}, True)):
            error = refused(check_windows, [window], given, acting)
            assert error.param == window
            assert "0.5" in str(error)
            assert ("default" in str(error)) == says_default


@pytest.mark.parametrize("strict", [True, False])
def test_strict_acts_beside_what_it_belongs_to(strict: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}

    def lenient(where: dict[str, Any]) -> bool:
        grammar = chat.translate({"messages": [{"role": "user", "content": "Hi"}], "response_format": where}).generation.grammar
        assert grammar is not None
        return grammar.lenient

    def is_strict(translate: Any, tool: dict[str, Any]) -> bool:
        choice = translate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi", "tools": [tool]})
        assert choice.generation.tool_choice is not None
        return bool(choice.generation.tool_choice.tools[0].strict)

    assert lenient({**form, "strict": strict}) == (not strict)
    assert is_strict(chat.translate, {"type": "function", "strict": strict, "function": CLOSED}) == strict
    assert is_strict(responses.translate, {"type": "function", "strict": strict, "function": CLOSED}) == strict
    message = {"messages": [{"role": "user", "content": "Hi"}]}
    torn = {"type": "function", "strict": strict, "function": {**CLOSED, "strict": not strict}}
    assert refused(chat.translate, {**message, "tools": [torn]}).param == "tools[0].strict"
    inner = {"type": "json_schema", "strict": strict, "json_schema": {"schema": {}, "strict": not strict}}
    assert refused(chat.translate, {**message, "response_format": inner}).param == "response_format.strict"


def test_examples_of_a_tools_input_are_shown_behind_its_description() -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"], "input_examples": [{"a": 1}, {"a": 2}]}
    (prompt,) = anthropic.translate({**WIRES["messages"].body, "tools": [tool]}).generation.prompts

    shown = prompt.tools[0]["function"]["description"]  # type: ignore[union-attr]
    assert shown == 'Adds.\n\nExamples of its input:\n{"a":1}\n{"a":2}'


@pytest.mark.parametrize("kind", [{"type": "document", "source": {"type": "text", "data": "D"}}])
def test_citations_are_refused_where_they_are_asked_for_and_read_over_in_an_earlier_answer(kind: dict[str, Any]) -> None:
    def asked(block: dict[str, Any]) -> dict[str, Any]:
        return {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}

    error = refused(anthropic.translate, asked({**kind, "citations": {"enabled": True}}))
    assert error.param == "messages[0].content[0].citations"
    for idle in ({"enabled": False}, None):
        assert anthropic.translate(asked({**kind, "citations": idle})).ignored == ()
    assert anthropic.translate(asked({**TEXT, "citations": [{"type": "page_location"}]})).ignored == ()


def test_a_budget_within_an_object_that_has_nothing_else_is_not_told_as_ignored() -> None:
    for fields in ({"reasoning": {"max_tokens": 9}}, {"chat_template_kwargs": {"thinking_budget": 9}}):
        parsed = anthropic.translate({**WIRES["messages"].body, **fields})
        assert (parsed.generation.thinking_budget, parsed.ignored) == (9, ())


BUDGET_IN_OBJECT = [
    (name, outer, place)
    for name in ("chat", "responses", "messages", "ollama")
    for outer, dot, place in (one.rpartition(".") for one in BUDGET_PLACES)
    if dot and (name, outer) != ("messages", "thinking")  # Anthropic's own, which binds the budget to the type beside it
]


@pytest.mark.parametrize(("name", "outer", "place"), BUDGET_IN_OBJECT)
def test_beside_a_budget_an_objects_other_fields_are_told_or_refused_as_without_it(name: str, outer: str, place: str) -> None:
    wire = WIRES[name]
    body = {field: value for field, value in wire.body.items() if field not in ("thinking", "reasoning")}
    neighbours: list[dict[str, Any]] = [{"type": "disabled"}, {"effort": "none"}, {"enabled": False}, {"enable_thinking": False}]
    for beside in (*neighbours, {"stop": ["e"]}, {"zebra": 1}, {"type": "enabled", "zebra": [1]}, {"zebra": None}):
        found: list[object] = []
        for held in (beside, {**beside, place: 9}):
            try:
                parsed = wire.translate({**body, outer: held})
                found.append(parsed.ignored)
                assert parsed.generation.thinking_budget == held.get(place)
            except InvalidRequest as error:
                found.append(error.param)
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "field", "inner"),
    [
        ("responses", "thinking", {"type": "disabled"}),
        ("responses", "reasoning", {"enabled": False}),
        ("messages", "reasoning", {"effort": "none"}),
        ("messages", "reasoning", {"enabled": False}),
        ("ollama", "thinking", {"type": "disabled"}),
        ("ollama", "reasoning", {"effort": "none"}),
        ("ollama", "reasoning", {"enabled": False}),
        ("ollama", "chat_template_kwargs", {"enable_thinking": False}),
        ("ollama", "chat_template_kwargs", {"thinking": False}),
    ],
)
@pytest.mark.parametrize("budget", [{}, {"budget_tokens": 50}, {"max_tokens": 50}, {"thinking_budget": 50}])
def test_what_switches_reasoning_off_on_another_wire_is_refused_by_name(
    name: str, field: str, inner: dict[str, Any], budget: dict[str, int]
) -> None:
    assert refused(WIRES[name].translate, {**WIRES[name].body, field: inner | budget}).param == f"{field}.{next(iter(inner))}"


def test_a_hosted_tool_whose_results_a_model_would_invent_is_refused() -> None:
    error = refused(
        responses.translate, {"input": "Hi", "tools": [{"type": "mcp", "server_label": "x", "server_url": "http://x"}]}
    )

    assert error.param == "tools[0]"


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CODE = {"type": "code_execution_20250522", "name": "code_execution"}


@pytest.mark.parametrize("name", ["messages", "responses"])
@pytest.mark.parametrize("hosted", [[SEARCH], [CODE, SEARCH]])
def test_a_choice_among_tools_of_kinds_that_are_missing_is_refused_by_their_kinds(
    name: str, hosted: list[dict[str, str]]
) -> None:
    def kinds_named(choice: object, *more: object) -> set[str]:
        error = refused(WIRES[name].translate, {**WIRES[name].body, "tools": [*hosted, *more], "tool_choice": choice})
        assert error.param == "tool_choice"
        return {tool["type"] for tool in (SEARCH, CODE) if tool["type"] in str(error)}

    kinds = {tool["type"] for tool in hosted}
    if name == "messages":
        assert kinds_named({"type": "any"}) == kinds
        for more in ((), ({"name": "add", "input_schema": FUNCTION["parameters"]},)):
            assert kinds_named({"type": "tool", "name": "web_search"}, *more) == {SEARCH["type"]}
    else:
        assert kinds_named("required") == kinds
        for more in ((), ({"type": "function", **FUNCTION},)):
            assert kinds_named({"type": "allowed_tools", "mode": "required", "tools": hosted}, *more) == kinds


def test_a_thread_is_refused_with_the_code_that_anthropics_clients_recover_from() -> None:
    error = refused(anthropic.translate, {**WIRES["messages"].body, "thread": {"id": "t"}})

    assert anthropic_body(error, "r")["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize("field", ["system", "images", "think"])
def test_a_raw_prompt_is_taken_as_it_is_or_refused(field: str) -> None:
    values: dict[str, Any] = {"system": "Be brief.", "images": ["aGk="], "think": True}

    assert refused(ollama.translate_generate, {"prompt": "Hi", "raw": True, field: values[field]}).param == field


# --- what nobody knows


def test_an_ignored_field_is_logged_once_a_name(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields(is_strict=False)
    with caplog.at_level("INFO", "weft.api"):
        for _ in range(3):
            assert unknown.headers(("zebra", "messages[].apple")) == {"x-ignored-params": "zebra, messages[].apple"}

    assert [name in caplog.text for name in ("zebra", "messages[].apple")] == [True, True]
    assert len(caplog.records) == 2
    assert unknown.headers(()) == {}


def test_under_strict_params_an_unknown_field_is_refused() -> None:
    with pytest.raises(UnsupportedParameter, match=r"zebra.*--strict-params"):
        UnknownFields(is_strict=True).headers(("zebra",))


@pytest.mark.parametrize("wrapper", ["", "extra_body", "nvext"])
@pytest.mark.parametrize("place", [*BUDGET_PLACES])
def test_a_budget_keeps_the_place_that_the_client_gave_it(place: str, wrapper: str) -> None:
    path = f"{wrapper}.{place}".lstrip(".")
    body: Any = 7
    for name in reversed(path.split(".")):
        body = {name: body}

    generation = chat.translate({"messages": [{"role": "user", "content": "Hi"}], **body}).generation

    assert (generation.thinking_budget, generation.budget_place) == (7, path)


@pytest.mark.parametrize(
    ("parse", "body", "place"),
    [
        (chat.translate, {"reasoning_effort": "low"}, "reasoning_effort"),
        (chat.translate, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (chat.translate, {"think": "low"}, "think"),
        (chat.translate, {"thinking": {"type": "enabled"}}, "thinking.type"),
        (chat.translate, {"enable_thinking": True}, "enable_thinking"),
        (ollama.translate_chat, {"think": True}, "think"),
        (ollama.translate_chat, {"think": "low"}, "think"),
    ],
)
def test_a_wish_for_reasoning_keeps_the_place_that_the_client_gave_it(
    parse: Callable[[Any], ParsedRequest], body: dict[str, Any], place: str
) -> None:
    asked = parse({"messages": [{"role": "user", "content": "Hi"}], "model": "m", **body}).generation.reasoning_asked

    assert asked is not None
    assert asked.place == place
    assert asked.words.startswith(place)
