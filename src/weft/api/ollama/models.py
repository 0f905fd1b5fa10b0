"""What Ollama's programs ask before they chat: version, models, one model, what is loaded; and embeddings, refused.

Tells what the service knows in Ollama's words. `app` has the routes.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.api.admin import json_response
from weft.api.body import read_json
from weft.api.ollama.schema import EmbedRequest, ShowRequest, plain_name
from weft.api.openai.schema import converted
from weft.config import ServerConfig
from weft.errors import UnsupportedParameter
from weft.ipc.messages import Ready
from weft.serving.model import ServedModel
from weft.serving.service import Service

WIRE_VERSION = "0.13.4"  # of Ollama: programs that also want /v1/responses ask for this one or a later one
NEVER = "9999-12-31T00:00:00Z"


class OllamaEndpoints:
    """The endpoints beside the generating ones."""

    def __init__(self, service: Service, config: ServerConfig) -> None:
        self.service = service
        self.config = config
        self.started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    async def version(self, request: Request) -> Response:  # noqa: ARG002 - the endpoints' signature
        """The version of the wire that is spoken, and ours."""
        return json_response({"version": WIRE_VERSION, "weft": __version__})

    async def tags(self, request: Request) -> Response:  # noqa: ARG002
        """Everything served, those that answer first."""
        models = sorted(self.service.models, key=lambda served: not served.is_ready)
        return json_response({"models": [self._row(served) for served in models]})

    async def ps(self, request: Request) -> Response:  # noqa: ARG002
        """What is loaded. Nothing is unloaded by itself."""
        loaded = [served for served in self.service.models if served.is_ready]
        return json_response({"models": [{**self._row(served), **_place(served)} for served in loaded]})

    async def show(self, request: Request) -> Response:
        """One model: what it can, how long its context is, how it writes prompts."""
        asked = converted(await self._body(request), ShowRequest)
        codec, ready = self.service.find(plain_name(asked.model or asked.name)).require()
        found = {"completion": codec, "tools": codec.calls, "thinking": codec.markers}
        details = _details(ready)
        return json_response(
            {
                "license": "",
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in codec.recommended.items()),
                "template": codec.writer.template.source if codec.writer is not None else "",
                "modified_at": self.started,
                "details": details,
                "model_info": {
                    "general.architecture": details["family"],
                    f"{details['family']}.context_length": ready.limits.context_length,
                    f"{details['family']}.vocab_size": ready.limits.vocab_size,
                },
                "capabilities": [name for name, way in found.items() if way is not None],
            }
        )

    async def embed(self, request: Request) -> Response:
        """Refuse: no model can do it yet."""
        served = self.service.find(plain_name(converted(await self._body(request), EmbedRequest).model))
        raise UnsupportedParameter(f"{served.name} writes text and has no embeddings; weft serves no model that has any", "model")

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, max_bytes=self.config.max_body_bytes, seconds=self.config.body_seconds)

    def _row(self, served: ServedModel) -> dict[str, Any]:
        ready = served.supervisor.condition.ready
        return {
            "name": served.name,
            "model": served.name,
            "modified_at": self.started,
            "size": 0 if ready is None else ready.memory.get("weights", 0),
            "digest": hashlib.sha256(served.name.encode()).hexdigest(),  # of the name: there is no one file to take it of
            "details": {} if ready is None else _details(ready),
        }


def _place(served: ServedModel) -> dict[str, Any]:
    _, ready = served.require()
    size_vram = 0 if ready.device == "cpu" else ready.memory.get("weights", 0)
    return {"expires_at": NEVER, "size_vram": size_vram, "context_length": ready.limits.context_length}


def _details(ready: Ready) -> dict[str, Any]:
    """What the model's own files say of it."""
    config: dict[str, Any] = msgspec.json.decode((Path(ready.folder) / "config.json").read_bytes())
    family = str(config.get("model_type", "unknown"))
    quantization = config.get("quantization") or {}
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": f"{quantization['bits']}-bit" if "bits" in quantization else str(config.get("dtype", "")),
    }
