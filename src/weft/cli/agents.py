"""The agents that `weft launch` starts, as one table: which wire each speaks, and how it is pointed at a server.

Everything an agent is told stands in its environment, on its command line or in a file of a folder that is weft's own; no
file has the server's key in it, agents read that from WEFT_API_KEY. Knows no server and starts nothing: `launch` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY = "WEFT_API_KEY"
MAX_OUTPUT = 32768  # tokens of one answer: what the agents' own makers take for large models


@dataclass(frozen=True)
class Target:
    """What an agent must know of its server."""

    url: str  # without /v1
    key: str
    model: str
    context: int  # tokens
    folder: Path  # the agent's own

    @property
    def output(self) -> int:
        """The longest answer to ask for. Agents take it off the context and shorten their history to the rest."""
        return min(MAX_OUTPUT, self.context // 4)


@dataclass(frozen=True)
class Start:
    """How one agent is started."""

    environment: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)  # by name, in the agent's folder
    arguments: tuple[str, ...] = ()  # before those of the user


@dataclass(frozen=True)
class Agent:
    """One row of the table."""

    command: str
    wire: str
    install: str
    start: Callable[[Target], Start]


def _claude(target: Target) -> Start:
    tiers = ("ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    return Start(
        {
            "CLAUDE_CONFIG_DIR": str(target.folder),
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_AUTH_TOKEN": target.key,
            "ANTHROPIC_API_KEY": "",
            **dict.fromkeys(("ANTHROPIC_MODEL", *tiers, "CLAUDE_CODE_SUBAGENT_MODEL"), target.model),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(target.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.output),
            # What changes from request to request at the prompt's front would have all of it computed again.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def _codex(target: Target) -> Start:
    """On the command line: config.toml is Codex's to write, it keeps there which folders are trusted."""
    provider = {"name": "weft", "base_url": f"{target.url}/v1", "wire_api": "responses", "env_key": KEY}
    settings = {
        "model": target.model,
        "model_provider": "weft",
        "model_context_window": target.context,
        **{f"model_providers.weft.{name}": value for name, value in provider.items()},
    }
    flags = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Start({"CODEX_HOME": str(target.folder), KEY: target.key}, arguments=tuple(flags))


def _opencode(target: Target) -> Start:
    """In a variable: it wins over the user's own file and over the project's, and neither is touched."""
    model = {"name": target.model, "limit": {"context": target.context, "output": target.output}}
    options = {"baseURL": f"{target.url}/v1", "apiKey": f"{{env:{KEY}}}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "weft", "options": options, "models": {target.model: model}}
    name = f"weft/{target.model}"
    config = {"provider": {"weft": provider}, "model": name, "small_model": name}
    return Start({"OPENCODE_CONFIG_DIR": str(target.folder), "OPENCODE_CONFIG_CONTENT": json.dumps(config), KEY: target.key})


def _copilot(target: Target) -> Start:
    return Start(
        {
            "COPILOT_HOME": str(target.folder),
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_BASE_URL": f"{target.url}/v1",
            "COPILOT_PROVIDER_API_KEY": target.key,
            "COPILOT_PROVIDER_WIRE_API": "completions",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(target.context - target.output),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(target.output),
            "COPILOT_MODEL": target.model,
            "COPILOT_OFFLINE": "true",
        }
    )


def _qwen(target: Target) -> Start:
    """As the machine's settings: they win over those that Qwen Code keeps for its user, in QWEN_HOME."""
    generation = {"contextWindowSize": target.context, "samplingParams": {"max_tokens": target.output}}
    model = {"id": target.model, "name": target.model, "baseUrl": f"{target.url}/v1", "envKey": KEY}
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model},
        "modelProviders": {"openai": [{**model, "generationConfig": generation}]},
    }
    places = {"QWEN_HOME": str(target.folder), "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(target.folder / "weft.json")}
    return Start({**places, KEY: target.key}, {"weft.json": _json(settings)})


def _pi(target: Target) -> Start:
    sizes = {"contextWindow": target.context, "maxTokens": target.output}
    model = {"id": target.model, "name": target.model, "reasoning": False, "input": ["text"], **sizes}
    provider = {"baseUrl": f"{target.url}/v1", "api": "openai-completions", "apiKey": KEY, "models": [model]}
    return Start(
        {"PI_CODING_AGENT_DIR": str(target.folder), KEY: target.key},
        {"models.json": _json({"providers": {"weft": provider}})},
        ("--provider", "weft", "--model", target.model),
    )


def _goose(target: Target) -> Start:
    return Start(
        {
            "GOOSE_PATH_ROOT": str(target.folder),
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": target.model,
            "GOOSE_CONTEXT_LIMIT": str(target.context),
            "GOOSE_MAX_TOKENS": str(target.output),
            "GOOSE_DISABLE_KEYRING": "1",
            "OPENAI_HOST": target.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": target.key,
        }
    )


def _crush(target: Target) -> Start:
    sizes = {"context_window": target.context, "default_max_tokens": target.output}
    provider = {"name": "weft", "type": "openai-compat", "base_url": f"{target.url}/v1", "api_key": f"${KEY}"}
    chosen = {"provider": "weft", "model": target.model}
    config = {
        "providers": {"weft": {**provider, "models": [{"id": target.model, "name": target.model, **sizes}]}},
        "models": {"large": chosen, "small": chosen},
    }
    folders = {"CRUSH_GLOBAL_CONFIG": str(target.folder), "CRUSH_GLOBAL_DATA": str(target.folder / "data")}
    return Start({**folders, KEY: target.key}, {"crush.json": _json(config)})


def _aider(target: Target) -> Start:
    name = f"openai/{target.model}"
    sizes = {"max_input_tokens": target.context - target.output, "max_output_tokens": target.output}
    facts = {**sizes, "max_tokens": target.output, "litellm_provider": "openai", "mode": "chat"}
    return Start(
        {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key},
        {"models.json": _json({name: {**facts, "input_cost_per_token": 0, "output_cost_per_token": 0}})},
        ("--model", name, "--weak-model", name, "--model-metadata-file", str(target.folder / "models.json")),
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


AGENTS: dict[str, Agent] = {
    "claude": Agent("claude", "/v1/messages", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "/v1/responses", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "/v1/chat/completions", "npm install -g opencode-ai", _opencode),
    "copilot": Agent("copilot", "/v1/chat/completions", "npm install -g @github/copilot", _copilot),
    "qwen": Agent("qwen", "/v1/chat/completions", "npm install -g @qwen-code/qwen-code", _qwen),
    "pi": Agent("pi", "/v1/chat/completions", "npm install -g @earendil-works/pi-coding-agent", _pi),
    "goose": Agent("goose", "/v1/chat/completions", "brew install block-goose-cli", _goose),
    "crush": Agent("crush", "/v1/chat/completions", "npm install -g @charmland/crush", _crush),
    "aider": Agent("aider", "/v1/chat/completions", "uv tool install aider-chat", _aider),
}
