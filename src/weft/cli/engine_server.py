"""`weft engine`: an engine on a machine of its own, for servers that are given its address; `weft key`: the secret they share."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from weft.config import DEFAULT_ENGINE_KEY, GateConfig

engine_command = App(name="engine")
Settings = Annotated[GateConfig, Parameter(name="*")]
KeyFile = Annotated[Path | None, Parameter(help="The file to write. Default: ~/.config/weft/engine.key.")]


@engine_command.default
def start_engine(settings: Settings) -> int:
    """Run an engine that servers on any machine can use: `weft serve --engines HOST:PORT,…`.

    When it is stopped, its answers go on in the servers' other engines.

    For example:
      weft engine mlx-community/Qwen3-4B-4bit --listen 0.0.0.0:8500
      weft engine smollm2 --listen 127.0.0.1:8501
    """
    from weft.serving.gate_server import serve_engine

    return serve_engine(settings)


def key_command(file: KeyFile = None, /) -> None:
    """Write a new engine key. Copy the file to every machine that has an engine or a server of yours, and keep it secret.

    For example:
      weft key
      weft key office.key
    """
    from weft.serving.engine_key import write_new_key

    path = (file or DEFAULT_ENGINE_KEY).expanduser()
    write_new_key(path)
    sys.stdout.write(f"{path} is written; copy it to the other machines, to the same place or where --engine-key says\n")
