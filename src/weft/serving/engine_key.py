"""The secret that fronts and engines on several machines share: CURVE encrypts the channel, and a wrong key gets no word.

Both sides derive their key pairs from one secret: whoever has the file may be a front or an engine, and nobody else.
"""

import asyncio
import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85

from weft.errors import WeftError

SECRET_BYTES = 32
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # where libzmq asks whether a client may come in


class EngineKey:
    """Key pairs of the two sides of the channel, derived from one secret."""

    def __init__(self, secret: bytes) -> None:
        self._secrets = {side: _derived(secret, side) for side in ("engine", "front")}
        self._publics = {side: zmq.curve_public(one) for side, one in self._secrets.items()}

    @classmethod
    def read(cls, path: Path) -> "EngineKey":
        """Read the key of a file that `weft key` has written; raise WeftError if there is none."""
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise WeftError(f"the engine key {path} can not be read ({reason}); make one with `weft key`") from error
        if not re.fullmatch(rf"[0-9a-f]{{{2 * SECRET_BYTES}}}", text):
            raise WeftError(f"{path} is no engine key: it must hold {2 * SECRET_BYTES} hex digits, as `weft key` writes them")
        return cls(bytes.fromhex(text))

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = self._secrets["engine"], self._publics["engine"]

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        socket.curve_serverkey = self._publics["engine"]
        socket.curve_secretkey, socket.curve_publickey = self._secrets["front"], self._publics["front"]

    async def admit(self, context: zmq.asyncio.Context) -> None:
        """Answer libzmq's questions whether a client of this context may come in, until cancelled: fronts with this key may."""
        with context.socket(zmq.REP) as questions:
            questions.bind(ZAP_ADDRESS)
            while True:
                version, request, _domain, _address, _identity, mechanism, *credentials = await questions.recv_multipart()
                is_ours = mechanism == b"CURVE" and credentials == [z85.decode(self._publics["front"])]
                status = [b"200", b"OK"] if is_ours else [b"400", b"not the key"]
                await questions.send_multipart([version, request, *status, b"front", b""])


def write_new_key(path: Path) -> None:
    """Write a new secret to a file that only its owner can read; raise WeftError if the file exists or can not be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise WeftError(f"{path} exists; remove it first if all engines and fronts are to get a new key") from error
    except OSError as error:
        raise WeftError(f"{path} can not be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(SECRET_BYTES) + "\n")


def _derived(secret: bytes, side: str) -> bytes:
    return z85.encode(hashlib.blake2b(secret, digest_size=32, person=side.encode()).digest())


async def until_cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
