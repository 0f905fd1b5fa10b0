"""The files of a model's folder that a front needs: listed by digest, sent once, and kept in a folder named by their contents."""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from weft.config import cache_folder

NAME = re.compile(r"(additional_chat_templates/)?\w[\w.-]*\.(json|jinja)")  # tokenizer, template, configs; never a path elsewhere
MAX_BYTES = 64 << 20  # of one file; a tokenizer has some megabytes


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digests of the files in a model's folder that a front needs, by name."""
    found = (*folder.glob("*.json"), *folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*.jinja"))
    named = {str(path.relative_to(folder)): path for path in sorted(found) if path.stat().st_size <= MAX_BYTES}
    return {name: digest_of(path.read_bytes()) for name, path in named.items() if NAME.fullmatch(name)}


def digest_of(data: bytes) -> str:
    """Return the digest by which fronts and gates compare a file's contents."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def read_model_file(folder: Path, name: str) -> bytes:
    """Return a file's contents; empty if it is none of those that fronts may have, or can not be read."""
    try:
        return (folder / name).read_bytes() if NAME.fullmatch(name) else b""
    except OSError:
        return b""


def local_folder(digests: Mapping[str, str]) -> Path:
    """Return the folder on this machine for files with these digests; other files are in another folder."""
    listed = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return cache_folder() / "engines" / digest_of(listed.encode())[:32]


def missing_files(folder: Path, digests: Mapping[str, str]) -> list[str]:
    """Return the names of files that are not in the folder as their digests say."""

    def is_there(name: str) -> bool:
        return (folder / name).is_file() and digest_of((folder / name).read_bytes()) == digests[name]

    return [name for name in sorted(digests) if NAME.fullmatch(name) and not is_there(name)]


def keep_file(folder: Path, name: str, data: bytes) -> None:
    """Write a file into place, whole or not at all; several servers may do so at the same time."""
    path = folder / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)
