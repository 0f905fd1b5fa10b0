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

from weft.api import ollama
from weft.api.anthropic import request as anthropic
from weft.api.fields import BUDGET, BUDGET_NAMES, FieldRules, is_constraint
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
| ● | it acts, or the request is a 400 that names it |
| ○ | accepted; it changes no answer, for the reason given |
| ✗ | a 400 that names it, unless the value is one that would change nothing |
| – | accepted, and listed in the reply's header `x-ignored-params` as every unknown field is; `--strict-params` refuses it |

On OpenAI's wires a refused parameter has the code `unsupported_parameter`.
A field that nobody knows and whose name speaks of a constraint, such as `max_new_tokens`, is refused with the nearest known name.
In all dialects null is the same as omitting a parameter.
"""

NESTED = "`[]` stands for any entry of a list. What is not listed and not read is in `x-ignored-params` with its path.\n"

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
    "echo": "Returns the prompt as it was sent first, with its log-probabilities if `logprobs` is given.",
    "chat_template_kwargs": "Variables for the model's chat template.",
    "add_generation_prompt": "false: the prompt ends after the last message, without the opening of an answer.",
    "continue_final_message": "true: continues the last message, which must be the assistant's.",
    # Output
    "stream": "Server-sent events while the answer is generated.",
    "stream_options": "`include_usage`: a last chunk with usage (Chat, Completions).",
    "n": "Number of answers; the prompt is computed once. Prompts × n is at most 128.",
    "logprobs": "Log-probabilities of the answer's tokens, before penalties, temperature and constraints: whether, or how many.",
    "top_logprobs": "Number of most likely tokens whose log-probabilities are returned at each position.",
    "prompt_logprobs": "vLLM's: log-probabilities of the prompt's tokens and of so many likeliest ones, in whole answers. "
    "`rank` is null for a token that is none of these.",
    "return_token_ids": "vLLM's: `prompt_token_ids` and each choice's `token_ids`, the end token included, in whole answers.",
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
    "n_predict": "llama.cpp's name of `max_tokens`; -1: no limit.",
    "min_tokens": "Minimum length of the answer, in tokens, at most `max_tokens`; no stop string ends it before.",
    "stop": "Texts that end the answer and are not part of it. Not matched inside reasoning and calls.",
    "stop_sequences": "Texts that end the answer and are not part of it.",
    "stop_token_ids": "Token ids that end the answer, in addition to the model's own.",
    "ignore_eos": "true: the model's own end tokens do not end the answer.",
    "truncation": "Returned as disabled: nothing is ever truncated, an input that is too long is a 400.",
    "max_tool_calls": "Returned unchanged: it counts tools that a server runs, and weft runs none.",
    # Sampling
    "temperature": "0 to 2; 0 is greedy. Default: the model's `generation_config.json`, else 1.",
    "top_p": "Sample from the most likely tokens that together have this probability, above 0 and at most 1.",
    "top_k": "Sample from this many most likely tokens; 0: all.",
    "min_p": "Sample from tokens at least this fraction (0 to 1) as likely as the most likely one.",
    "repetition_penalty": "0.01 to 100. Above 1: tokens of prompt and answer become less likely.",
    "repeat_penalty": "llama.cpp's and LM Studio's name of `repetition_penalty`.",
    "presence_penalty": "Subtracted from the logit of each token that the answer contains.",
    "frequency_penalty": "Subtracted from a token's logit once for each of its occurrences in the answer.",
    "repeat_last_n": "Accepted while no penalty acts, or with -1: penalties look at the whole prompt and answer.",
    "repetition_context_size": "As `repeat_last_n`, for `repetition_penalty`.",
    "presence_context_size": "As `repeat_last_n`, for `presence_penalty`.",
    "frequency_context_size": "As `repeat_last_n`, for `frequency_penalty`.",
    "logit_bias": "Added to the logits of these token ids: −100 to 100.",
    "allowed_token_ids": "Only these tokens are sampled, within a grammar too. The model's end tokens are not added: list one "
    "to let the answer end. Markers that end a reasoning budget come in any case.",
    "bad_words": "Texts that never occur in the output, reasoning and tool calls included. Upper and lower case differ, and "
    "parts of words count, however they are spread over tokens.",
    "seed": "The same seed gives the same answer, regardless of concurrent requests.",
    # Constraints
    "response_format": "text, json_object, json_schema (enforced exactly with `strict`), structural_tag.",
    "text": "Responses: `format` as `response_format`; `verbosity` is a hint that weft does not use.",
    "structured_outputs": "vLLM's form of constraints: one of json, json_object, regex, choice, grammar, structural_tag.",
    "guided_json": "A schema for the answer (vLLM's older name).",
    "guided_regex": "A pattern that the whole answer matches.",
    "regex": "SGLang's name of `guided_regex`.",
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
    "thinking_token_budget": "Maximum number of reasoning tokens, -1: no limit. Within [objects](api.md#reasoning) too.",
    **dict.fromkeys(BUDGET_NAMES[1:], "Another name of `thinking_token_budget`."),
    "enable_thinking": "false: no reasoning. true: reasoning, or a 400 where the model has none.",
    "think": "Ollama's word: false is `reasoning_effort` none, a level is that effort, true: reasoning.",
    # Tools
    "tools": "What the model may call: functions; in Responses also custom tools and namespaces. Not in Completions.",
    "tool_choice": "auto, none, required (Messages: any), one tool, or some of them.",
    "parallel_tool_calls": "false: at most one call.",
    # Caching and scheduling
    "cache_salt": "The prompt's cache is shared only with requests that have the same salt.",
    "prompt_cache_key": "Identifies a returning client: its prompts stay cached longer, and it is scheduled as its own client.",
    "session_id": "Another name of `prompt_cache_key`.",
    "priority": "Higher values are scheduled first. Default 0.",
    "service_tier": "`priority` means priority 10, `flex` means −10, others nothing. In Messages without effect.",
    # Speed
    "speculate": "false: no draft tokens are verified for this request. The answer is the same in any case.",
    "prediction": "A text that much of the answer is expected to repeat: drafts are looked up there too.",
}


@dataclass(frozen=True)
class Dialect:
    """An API dialect: the struct of its requests, and its rules for fields that the struct lacks."""

    name: str
    kind: type[msgspec.Struct]
    rules: FieldRules

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of fields that act, with the fields' own."""
        budgets = dict.fromkeys(BUDGET_NAMES[1:], BUDGET) if BUDGET in self.kind.__struct_fields__ else {}
        return {**self.rules.aliases, **budgets}

    def mark(self, path: str) -> str:
        """Return the mark of a parameter in this dialect."""
        fate = self.rules.fates.get(path)
        if path in self.kind.__struct_fields__ or path in self.aliases:
            return "●"
        if fate is None:
            return "✗" if is_constraint(path) else "–"
        if fate.idle is None:
            return "–" if fate.is_reported else "○"
        values = ", ".join(f"`{json.dumps(value)}`" for value in fate.idle)
        return f"✗ unless {values}" if values else "✗"


DIALECTS = (
    Dialect("Chat", chat.ChatRequest, openai.RULES),
    Dialect("Completions", completions.CompletionRequest, completions.RULES),
    Dialect("Responses", responses.ResponseRequest, responses.RULES),
    Dialect("Messages", anthropic.MessagesRequest, anthropic.RULES),
)
OLLAMA = Dialect("Ollama", ollama.OllamaChatRequest, ollama.RULES)


def page() -> str:
    """Return the page's text. Raises ValueError if WORDS lacks a parameter that acts or has one too many."""
    acting = {name for dialect in DIALECTS for name in (*dialect.kind.__struct_fields__, *dialect.aliases)}
    if acting != WORDS.keys():
        raise ValueError(f"WORDS lacks {sorted(acting - WORDS.keys())} and has without need {sorted(WORDS.keys() - acting)}")
    others: dict[str, str] = {}
    for dialect in (*DIALECTS, OLLAMA):
        others |= {path: fate.why for path, fate in dialect.rules.fates.items() if path not in acting | others.keys()}
    whole = [path for path in others if path.isidentifier()]
    nested = [path for path in others if not path.isidentifier()]
    lines = [HEAD, "## Supported in at least one dialect\n", *_table([*WORDS])]
    lines += [
        "\n## Refused or without effect\n",
        *_reasons(whole, others),
        "\n## Further down in a body\n",
        NESTED,
        *_reasons(nested, others),
    ]
    return "\n".join(lines) + "\n"


def _reasons(paths: list[str], why: dict[str, str]) -> list[str]:
    dialects = (*DIALECTS, OLLAMA)
    heads = ["parameter", "why", *(dialect.name for dialect in dialects)]
    rows = [[f"`{path}`", _sentence(why[path]), *(dialect.mark(path) for dialect in dialects)] for path in sorted(paths)]
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _table(names: list[str]) -> list[str]:
    heads = ["parameter", "takes", "meaning, or why not", *(dialect.name for dialect in DIALECTS)]
    rows = [[f"`{name}`", _takes(name), WORDS[name], *(dialect.mark(name) for dialect in DIALECTS)] for name in names]
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _takes(name: str) -> str:
    """The accepted values, by dialect if they differ."""
    found: dict[str, list[str]] = {}
    for dialect in DIALECTS:
        if name in dialect.aliases:
            found.setdefault(f"as `{dialect.aliases[name]}`", []).append(dialect.name)
        elif name in dialect.kind.__struct_fields__:
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
