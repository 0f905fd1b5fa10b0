"""Writes docs/parameters.md: every parameter of four API dialects, read from the structs that parse requests.

The accepted values and the dialects that support a parameter come from the code; WORDS describes what it does. Run
`python docs/parameters.py` to write the page; a test compares it with the code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.api.anthropic import request as anthropic
from weft.api.openai import chat, completions, responses
from weft.api.openai import request as openai
from weft.api.openapi import document

PAGE = Path(__file__).with_suffix(".md")
SCHEMAS = document("")["components"]["schemas"]

HEAD = """# Parameters

<!-- written by docs/parameters.py -->

Every request parameter of OpenAI's Chat Completions, Completions and Responses and of Anthropic's Messages.
[HTTP API](api.md) explains them; `/openapi.json` on a running server has the schemas.

| mark | meaning |
|---|---|
| ● | supported: the parameter is honoured, or the request is a 400 that names it |
| ○ | accepted, without effect on the answer |
| ✗ | refused: a 400 with the code `unsupported_parameter`, unless the value is one that would have no effect |
| – | unknown: listed in the reply's header `x-ignored-params` |

In all dialects null is the same as omitting a parameter.
"""

WORDS = {
    # Input
    "model": "Name of a served model. Optional if only one is served.",
    "messages": "The conversation. Chat: roles system, developer, user, assistant, tool. Messages: user, assistant, system. "
    "Control tokens written in it are text.",
    "prompt": "Completions: texts (control tokens written in them are tokens), or lists of token ids. Responses: would refer to "
    "a prompt stored at OpenAI.",
    "input": "The conversation, as a text or as items. Required unless there is a `previous_response_id`.",
    "instructions": "A system message before everything else.",
    "system": "The system message, as a text or as text blocks.",
    "previous_response_id": "Puts the conversation up to and including that response before the input.",
    "echo": "Returns the prompt first, with its log-probabilities if `logprobs` is given.",
    "chat_template_kwargs": "Variables for the model's chat template.",
    "add_generation_prompt": "false: the prompt ends after the last message, without the opening of an answer.",
    "continue_final_message": "true: continues the last message, which must be the assistant's.",
    # Output
    "stream": "Server-sent events while the answer is generated.",
    "stream_options": "`include_usage`: a last chunk with usage (Chat, Completions).",
    "n": "Number of answers; the prompt is computed once. Prompts × n is at most 128.",
    "logprobs": "Log-probabilities of the answer's tokens, before penalties and temperature: whether, or how many.",
    "top_logprobs": "Number of most likely tokens whose log-probabilities are returned at each position.",
    "include": "`message.output_text.logprobs`, `reasoning.encrypted_content`; others concern tools that weft does not have.",
    "skip_special_tokens": "false: special tokens are included in the text.",
    "store": "Responses: store the response for later requests (default true).",
    "metadata": "Messages: `user_id` identifies a returning client. Responses: returned unchanged.",
    "user": "A label. Responses: returned unchanged.",
    "safety_identifier": "A label. Responses: returned unchanged.",
    # Length
    "max_tokens": "Maximum length of the answer. Default: the rest of the context. Required in Messages; "
    "in Responses: `max_output_tokens`.",
    "max_completion_tokens": "Maximum length of the answer; overrides `max_tokens`. In Responses: `max_output_tokens`.",
    "max_output_tokens": "Maximum length of the answer, in tokens. Default: the rest of the context.",
    "min_tokens": "Minimum length of the answer, in tokens.",
    "stop": "Texts that end the answer and are not part of it. Not matched inside reasoning and calls.",
    "stop_sequences": "Texts that end the answer and are not part of it.",
    "stop_token_ids": "Token ids that end the answer, in addition to the model's own.",
    "ignore_eos": "true: the model's own end tokens do not end the answer.",
    "truncation": "Returned as disabled: nothing is ever truncated, an input that is too long is a 400.",
    "max_tool_calls": "Returned unchanged: it counts tools that a server runs, and weft runs none.",
    # Sampling
    "temperature": "0 is greedy. Default: the model's `generation_config.json`, else 1.",
    "top_p": "Sample from the most likely tokens that together have this probability.",
    "top_k": "Sample from this many most likely tokens; 0: all.",
    "min_p": "Sample from tokens at least this fraction as likely as the most likely one.",
    "repetition_penalty": "Above 1: tokens of prompt and answer become less likely.",
    "presence_penalty": "Subtracted from the logit of each token that the answer contains.",
    "frequency_penalty": "Subtracted from a token's logit once for each of its occurrences in the answer.",
    "logit_bias": "Added to the logits of these token ids.",
    "seed": "The same seed gives the same answer, regardless of concurrent requests.",
    # Constraints
    "response_format": "text, json_object, json_schema (enforced exactly with `strict`), structural_tag.",
    "text": "Responses: `format` as `response_format`; `verbosity` is a hint that weft does not use.",
    "structured_outputs": "vLLM's form of constraints: one of json, json_object, regex, choice, grammar, structural_tag.",
    "guided_json": "A schema for the answer (vLLM's older name).",
    "guided_regex": "A pattern that the whole answer matches.",
    "regex": "SGLang's name of `guided_regex`.",
    "ebnf": "SGLang's grammars; send `guided_grammar` in Lark.",
    "include_stop_str_in_output": "A stop string is never part of the answer.",
    "no_stop_trim": "SGLang's name of that.",
    "reasoning_format": "Where reasoning is shown: always in `reasoning_content`.",
    "min_keep": "Tokens that a sampler must leave.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "A grammar for the answer, in Lark or GBNF notation.",
    "json_schema": "A schema for the answer (llama.cpp's name).",
    "grammar": "A grammar for the answer (llama.cpp's name).",
    "output_config": "`format`: a schema, enforced exactly. `effort`: how much to reason.",
    "output_format": "The older name of `output_config.format`.",
    # Reasoning
    "reasoning_effort": "How much to reason: as a level of the chat template, or as a budget. In Responses: `reasoning.effort`.",
    "reasoning": "`effort`: how much to reason. `summary`: the reasoning is returned as a summary too.",
    "thinking": "enabled with `budget_tokens`, adaptive, between_tools or disabled; `display: omitted` hides the reasoning.",
    "thinking_token_budget": "Maximum number of reasoning tokens, -1: no limit. It has [other names](api.md#reasoning) too.",
    # Tools
    "tools": "What the model may call: functions; in Responses also custom tools and namespaces. Not in Completions.",
    "tool_choice": "auto, none, required (Messages: any), one tool, or some of them.",
    "parallel_tool_calls": "false: at most one call.",
    # Caching and scheduling
    "cache_salt": "The prompt's cache is shared only with requests that have the same salt.",
    "prompt_cache_key": "Identifies a returning client: its prompts stay cached longer, and it is scheduled as its own client.",
    "session_id": "Another name of `prompt_cache_key`.",
    "cache_control": "On the whole request without effect, because prompts are cached anyway; on a block it acts (see HTTP API).",
    "priority": "Higher values are scheduled first. Default 0.",
    "service_tier": "`priority` means priority 10, `flex` means −10, others nothing. In Messages without effect.",
    # Speed
    "speculate": "false: no draft tokens are verified for this request. The answer is the same in any case.",
    "prediction": "A text that much of the answer is expected to repeat: drafts are looked up there too.",
    # Refused
    "functions": "OpenAI's older form of `tools`: send that.",
    "function_call": "OpenAI's older form of `tool_choice`: send that.",
    "guided_whitespace_pattern": "The white space of a constrained answer is fixed.",
    "include_reasoning": "Reasoning is always returned, in a field of its own.",
    "modalities": "Answers are text.",
    "audio": "Answers are text.",
    "web_search_options": "The server does not search; give the model a tool of yours.",
    "suffix": "No fill-in-the-middle yet.",
    "best_of": "Every generated answer is returned: use `n`.",
    "xtc_probability": "This sampler is not available.",
    "dry_multiplier": "This sampler is not available.",
    "repetition_detection": "Answers that repeat themselves are not ended; use a penalty.",
    "draft_model": "Drafts come from grammar, prompt and answer, and the model's own MTP head: see `speculate`.",
    "logprobs_mode": "Log-probabilities are always those before penalties and temperature.",
    "return_progress": "The progress of the prefill is not reported in the stream.",
    "timings_per_token": "Timings are sent once, at the end.",
    "background": "Responses are generated while the client waits.",
    "conversation": "Conversations are not stored; `previous_response_id` refers to a response.",
    "context_management": "Nothing is removed from a prompt; one that is too long is a 400.",
    "moderation": "There is no moderation.",
    "mcp_servers": "The server calls no other servers; give the model a tool of yours.",
    # Without effect
    "verbosity": "A hint that weft does not use.",
    "prompt_cache_options": "Prompts are cached anyway.",
    "prompt_cache_retention": "The server's settings determine it.",
    "ttl": "Models stay loaded.",
    "request_id": "A label; the reply's id is in `x-request-id`.",
    "guided_decoding_backend": "There is only one.",
    "xtc_threshold": "Belongs to `xtc_probability`.",
    "dry_base": "Belongs to `dry_multiplier`.",
    "dry_allowed_length": "Belongs to `dry_multiplier`.",
    "dry_penalty_last_n": "Belongs to `dry_multiplier`.",
    "dry_sequence_breakers": "Belongs to `dry_multiplier`.",
    "client_metadata": "A label.",
    "access_programs": "A label.",
    "image": "A setting of a tool that weft does not have.",
    "speed": "There is only one.",
    "inference_geo": "Requests are computed on the machine of the server.",
    "user_profile_id": "A label.",
    "workspace_id": "A label.",
}


@dataclass(frozen=True)
class Dialect:
    """An API dialect: the struct of its requests, the parameters it refuses, and those without effect."""

    name: str
    kind: type[msgspec.Struct]
    refused: dict[str, tuple[Any, ...]]
    harmless: frozenset[str]

    def mark(self, name: str) -> str:
        """The mark of a parameter in this dialect."""
        if name in self.kind.__struct_fields__:
            return "●"
        if name in self.refused:
            values = ", ".join(f"`{json.dumps(value)}`" for value in self.refused[name])
            return f"✗ unless {values}" if values else "✗"
        return "○" if name in self.harmless else "–"


DIALECTS = (
    Dialect("Chat", chat.ChatRequest, openai.RULES.refused, openai.RULES.harmless),
    Dialect("Completions", completions.CompletionRequest, openai.RULES.refused, openai.RULES.harmless),
    Dialect("Responses", responses.ResponseRequest, responses.RULES.refused, responses.RULES.harmless),
    Dialect("Messages", anthropic.MessagesRequest, anthropic.RULES.refused, anthropic.RULES.harmless),
)


def page() -> str:
    """The page's text. Raises ValueError if WORDS lacks a parameter or has one too many."""
    known = {name for dialect in DIALECTS for name in (*dialect.kind.__struct_fields__, *dialect.refused, *dialect.harmless)}
    if known != WORDS.keys():
        raise ValueError(f"WORDS lacks {sorted(known - WORDS.keys())} and has without need {sorted(WORDS.keys() - known)}")
    acting = [name for name in WORDS if any(name in dialect.kind.__struct_fields__ for dialect in DIALECTS)]
    others = [name for name in WORDS if name not in acting]
    lines = [HEAD, "## Supported in at least one dialect\n", *_table(acting), "\n## Refused or without effect\n", *_table(others)]
    return "\n".join(lines) + "\n"


def _table(names: list[str]) -> list[str]:
    heads = ["parameter", "takes", "meaning, or why not", *(dialect.name for dialect in DIALECTS)]
    rows = [[f"`{name}`", _takes(name), WORDS[name], *(dialect.mark(name) for dialect in DIALECTS)] for name in names]
    if not any(row[1] for row in rows):
        heads, rows = [head for head in heads if head != "takes"], [[row[0], *row[2:]] for row in rows]
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _takes(name: str) -> str:
    """The accepted values, by dialect if they differ."""
    found: dict[str, list[str]] = {}
    for dialect in DIALECTS:
        if name in dialect.kind.__struct_fields__:
            found.setdefault(_values(SCHEMAS[dialect.kind.__name__]["properties"][name]), []).append(dialect.name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(dialects)}: {words}" for words, dialects in found.items())


def _values(schema_node: dict[str, Any]) -> str:
    """A short description of a JSON schema."""
    if "$ref" in schema_node:
        fields = SCHEMAS[schema_node["$ref"].rpartition("/")[2]].get("properties", {})
        return f"object with {', '.join(fields)}"
    if "anyOf" in schema_node:
        return " or ".join(dict.fromkeys(_values(one) for one in schema_node["anyOf"] if one.get("type") != "null"))
    if "enum" in schema_node:
        return ", ".join(str(value) for value in schema_node["enum"] if value is not None)
    if "const" in schema_node:
        return json.dumps(schema_node["const"])
    match schema_node.get("type"):
        case "array":
            count = (
                f"{schema_node['minItems']} or more "
                if "minItems" in schema_node
                else f"up to {schema_node['maxItems']} "
                if "maxItems" in schema_node
                else ""
            )
            return f"list of {count}{_values(schema_node.get('items', {}))}"
        case str(kind):
            return kind + _bounds(schema_node.get("minimum"), schema_node.get("maximum"))
    return "object" if "properties" in schema_node else "anything"


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" {low} to {high}"
    return f" ≥ {low}" if low is not None else f" ≤ {high}" if high is not None else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
