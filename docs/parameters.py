"""Writes docs/parameters.md: every parameter of the four wires, read from the structs that read requests.

What a parameter takes and on which wires it acts comes from the code; what it does is said here, once. Run
`python docs/parameters.py` to write the page anew; a test holds it against the code.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weft.api.anthropic import request as anthropic
from weft.api.openai import chat, completions
from weft.api.openai import request as openai
from weft.api.openai.responses import request as responses
from weft.api.openapi import document

PAGE = Path(__file__).with_suffix(".md")
SCHEMAS = document("")["components"]["schemas"]

HEAD = """# Parameters

<!-- written by docs/parameters.py -->

What becomes of every request parameter, on OpenAI's Chat Completions, Completions and Responses and on Anthropic's Messages.
[The wires](api.md) says more of each; `/openapi.json` of a running server has the schemas.

| mark | means |
|---|---|
| ● | acts: what is asked for holds, or the request is a 400 that names it |
| ○ | accepted; the answer is the same with and without it |
| ✗ | refused: a 400 with the code `unsupported_parameter`, unless the value is one with which it would not act |
| – | unknown here: listed in the reply's header `x-ignored-params` |

null is the same as leaving a parameter out, on all wires.
"""

WORDS = {
    # What is asked
    "model": "A served model's name. May be left out where one model is served.",
    "messages": "The conversation. Chat: roles system, developer, user, assistant, tool. Messages: user, assistant, system.",
    "prompt": "Completions: texts, or lists of token ids. On Responses it would be a prompt that OpenAI keeps.",
    "input": "The conversation, as a text or as items. Needed, unless there is a `previous_response_id`.",
    "instructions": "A system message before everything else.",
    "system": "The system message, as a text or as text blocks.",
    "previous_response_id": "What was asked and answered up to that response goes before the input.",
    "echo": "The prompt comes first in the answer, with its log-probabilities where `logprobs` is given.",
    "chat_template_kwargs": "Handed to the model's chat template.",
    "add_generation_prompt": "false: the prompt ends after the last message, without the opening of an answer.",
    "continue_final_message": "true: the last message, an assistant's, is gone on with.",
    # How it is told
    "stream": "Server-sent events as the answer is made.",
    "stream_options": "`include_usage`: a last chunk with usage (Chat, Completions).",
    "n": "So many answers, the prompt computed once. Prompts × n is at most 128.",
    "logprobs": "Log-probabilities of the answer's tokens, before penalties and temperature: whether, or how many.",
    "top_logprobs": "The log-probabilities of so many likeliest tokens at each place.",
    "include": "`message.output_text.logprobs`, `reasoning.encrypted_content`; the rest speaks of tools not to be had.",
    "skip_special_tokens": "false: special tokens are shown in the text.",
    "store": "Responses: keep the response so that it can be come back to (default true).",
    "metadata": "Messages: `user_id` says that this client comes again. Responses: told back.",
    "user": "A label. Responses: told back.",
    "safety_identifier": "A label. Responses: told back.",
    # How much
    "max_tokens": "The longest answer. Default: the rest of the context; Messages needs it, Responses says `max_output_tokens`.",
    "max_completion_tokens": "The same; wins over `max_tokens`. On Responses: `max_output_tokens`.",
    "max_output_tokens": "The longest answer, in tokens. Default: the rest of the context.",
    "min_tokens": "The answer does not end before it has so many tokens.",
    "stop": "Texts that end the answer and are not part of it. They do not act inside thinking and calls.",
    "stop_sequences": "Texts that end the answer and are not part of it.",
    "stop_token_ids": "Token ids that end the answer, beside the model's own.",
    "ignore_eos": "true: the model's own end tokens do not end the answer.",
    "truncation": "Told back as disabled: nothing is ever left out, what is too long is a 400.",
    "max_tool_calls": "Told back: it counts tools that a server runs, and none are run here.",
    # Sampling
    "temperature": "0 is greedy. Default: the makers' advice, else 1.",
    "top_p": "Sample from the likeliest tokens that make up this share.",
    "top_k": "Sample from so many likeliest tokens; 0 for all.",
    "min_p": "Sample from tokens at least this share as likely as the likeliest.",
    "repetition_penalty": "Makes tokens of prompt and answer less likely where above 1.",
    "presence_penalty": "Taken off the logit of each token that the answer has.",
    "frequency_penalty": "Taken off the logit of each token, for each time that the answer has it.",
    "logit_bias": "Added to the logits of these token ids.",
    "seed": "The same seed gives the same answer, whoever else is served.",
    # Its shape
    "response_format": "text, json_object, json_schema (held exactly with `strict`), structural_tag.",
    "text": "Responses: `format` as `response_format`; `verbosity` is a hint that no model here takes.",
    "structured_outputs": "vLLM's words for it: one of json, json_object, regex, choice, grammar, structural_tag.",
    "guided_json": "A schema for the answer (vLLM's older word).",
    "guided_regex": "A pattern that the whole answer matches.",
    "guided_choice": "The answer is one of these texts.",
    "guided_grammar": "A grammar for the answer, in Lark's or GBNF's notation.",
    "json_schema": "A schema for the answer (llama.cpp's word).",
    "grammar": "A grammar for the answer (llama.cpp's word).",
    "output_config": "`format`: a schema, held exactly. `effort`: how much to think.",
    "output_format": "The older name of `output_config.format`.",
    # Thinking
    "reasoning_effort": "How much to think: in the template's words, or as a budget. On Responses: `reasoning.effort`.",
    "reasoning": "`effort`: how much to think. `summary`: the thinking is told as a summary too.",
    "thinking": "enabled with `budget_tokens`, adaptive, between_tools or disabled; `display` omitted hides it.",
    "thinking_token_budget": "So many tokens may be thought, then the answer begins. Completions do not think.",
    "reasoning_budget_tokens": "The same; -1: no limit.",
    # Tools
    "tools": "What may be called: functions; on Responses custom tools and namespaces too. A text to be continued calls nothing.",
    "tool_choice": "auto, none, required (Messages: any), one tool, or some of them.",
    "parallel_tool_calls": "false: at most one call.",
    # The cache, and whose turn it is
    "cache_salt": "What is computed of the prompt is shared only with requests of the same salt.",
    "prompt_cache_key": "This client comes again: its prompts are kept longer, and it takes turns of its own.",
    "session_id": "The same.",
    "cache_control": "On the whole request it says nothing new, prompts are kept anyway; on a block it acts (see The wires).",
    "priority": "Where not all can be answered at once, higher ones go first. Default 0.",
    "service_tier": "`priority` is a priority of 10, `flex` of −10, others none. On Messages it changes nothing.",
    # Refused
    "functions": "OpenAI's first way to say `tools`: send those.",
    "function_call": "OpenAI's first way to say `tool_choice`: send that.",
    "guided_whitespace_pattern": "The white space of a constrained answer is fixed.",
    "include_reasoning": "Thinking is always told, in a field of its own.",
    "modalities": "Answers are text.",
    "audio": "Answers are text.",
    "prediction": "Nothing is guessed ahead here yet.",
    "web_search_options": "The server searches nothing; give the model a tool of yours.",
    "suffix": "Nothing is filled in between two texts yet.",
    "best_of": "Every answer that is made is told: use `n`.",
    "xtc_probability": "Not one of the samplers here.",
    "dry_multiplier": "Not one of the samplers here.",
    "repetition_detection": "Answers that repeat themselves are not ended; use a penalty.",
    "draft_model": "Nothing is guessed ahead here yet.",
    "logprobs_mode": "Log-probabilities are always those before penalties and temperature.",
    "return_progress": "How far a prompt is computed is not told in the stream.",
    "timings_per_token": "Timings come once, with the end.",
    "background": "Responses are made while the client waits.",
    "conversation": "Conversations are not kept; `previous_response_id` goes back to a response.",
    "context_management": "Nothing is left out of a prompt; what is too long is a 400.",
    "moderation": "Nobody here judges texts.",
    "mcp_servers": "The server calls no other servers; give the model a tool of yours.",
    # Without effect
    "verbosity": "A hint that no model here takes.",
    "prompt_cache_options": "Prompts are kept anyway.",
    "prompt_cache_retention": "How long is the server's setting.",
    "ttl": "A model stays loaded.",
    "request_id": "A label; the reply's id is in `x-request-id`.",
    "guided_decoding_backend": "There is one.",
    "xtc_threshold": "A shade of `xtc_probability`.",
    "dry_base": "A shade of `dry_multiplier`.",
    "dry_allowed_length": "A shade of `dry_multiplier`.",
    "dry_penalty_last_n": "A shade of `dry_multiplier`.",
    "dry_sequence_breakers": "A shade of `dry_multiplier`.",
    "client_metadata": "A label.",
    "access_programs": "A label.",
    "image": "A setting of a tool that is not to be had here.",
    "speed": "There is one.",
    "inference_geo": "It is computed where the server stands.",
    "user_profile_id": "A label.",
    "workspace_id": "A label.",
}


@dataclass(frozen=True)
class Wire:
    """One of the four: the struct of its requests, what it refuses, what changes nothing."""

    name: str
    kind: type[msgspec.Struct]
    refused: dict[str, tuple[Any, ...]]
    harmless: frozenset[str]

    def mark(self, name: str) -> str:
        """What becomes of a parameter here."""
        if name in self.kind.__struct_fields__:
            return "●"
        if name in self.refused:
            values = ", ".join(f"`{json.dumps(value)}`" for value in self.refused[name])
            return f"✗ unless {values}" if values else "✗"
        return "○" if name in self.harmless else "–"


WIRES = (
    Wire("Chat", chat.ChatRequest, openai.RULES.refused, openai.RULES.harmless),
    Wire("Completions", completions.CompletionRequest, openai.RULES.refused, openai.RULES.harmless),
    Wire("Responses", responses.ResponseRequest, responses.RULES.refused, responses.RULES.harmless),
    Wire("Messages", anthropic.MessagesRequest, anthropic.RULES.refused, anthropic.RULES.harmless),
)


def page() -> str:
    """The whole page. Raises ValueError where words are missing, or left over."""
    known = {name for wire in WIRES for name in (*wire.kind.__struct_fields__, *wire.refused, *wire.harmless)}
    if known != WORDS.keys():
        raise ValueError(f"WORDS lacks {sorted(known - WORDS.keys())} and has without need {sorted(WORDS.keys() - known)}")
    acting = [name for name in WORDS if any(name in wire.kind.__struct_fields__ for wire in WIRES)]
    others = [name for name in WORDS if name not in acting]
    return "\n".join([HEAD, "## Those that act somewhere\n", *_table(acting), "\n## Those that do not\n", *_table(others)]) + "\n"


def _table(names: list[str]) -> list[str]:
    heads = ["parameter", "takes", "what it does, or why not", *(wire.name for wire in WIRES)]
    rows = [[f"`{name}`", _takes(name), WORDS[name], *(wire.mark(name) for wire in WIRES)] for name in names]
    if not any(row[1] for row in rows):
        heads, rows = [head for head in heads if head != "takes"], [[row[0], *row[2:]] for row in rows]
    return [_line(heads), _line(["---"] * len(heads)), *map(_line, rows)]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _takes(name: str) -> str:
    """What values are taken, wire by wire where they differ."""
    found: dict[str, list[str]] = {}
    for wire in WIRES:
        if name in wire.kind.__struct_fields__:
            found.setdefault(_values(SCHEMAS[wire.kind.__name__]["properties"][name]), []).append(wire.name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(wires)}: {words}" for words, wires in found.items())


def _values(said: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in said:
        fields = SCHEMAS[said["$ref"].rpartition("/")[2]].get("properties", {})
        return f"object with {', '.join(fields)}"
    if "anyOf" in said:
        return " or ".join(dict.fromkeys(_values(one) for one in said["anyOf"] if one.get("type") != "null"))
    if "enum" in said:
        return ", ".join(str(value) for value in said["enum"] if value is not None)
    if "const" in said:
        return json.dumps(said["const"])
    match said.get("type"):
        case "array":
            count = (
                f"{said['minItems']} or more "
                if "minItems" in said
                else f"up to {said['maxItems']} "
                if "maxItems" in said
                else ""
            )
            return f"list of {count}{_values(said.get('items', {}))}"
        case str(kind):
            return kind + _bounds(said.get("minimum"), said.get("maximum"))
    return "object" if "properties" in said else "anything"


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" {low} to {high}"
    return f" ≥ {low}" if low is not None else f" ≤ {high}" if high is not None else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
