"""`weft ls`, `weft pull`, `weft ps`, `weft load`, `weft unload`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli_command import weft
from cli_server import STATUS, running

from fronts import front
from weft.model.resolve import TINY_HYBRID


def hub_entry(home: Path, name: str, *files: str) -> Path:
    """A repository as the Hugging Face cache keeps it, every file 1000 bytes long."""
    repository = home / "hf" / "hub" / name.replace("/", "--")
    snapshot = repository / "snapshots" / ("0" * 40)
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    for number, file in enumerate(files):
        blob = repository / "blobs" / str(number)
        blob.write_bytes(bytes(1000))
        (snapshot / file).symlink_to(blob)
    return snapshot


def listed(home: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(weft(home, "ls", "--json").stdout)}


def test_a_fresh_machine_has_what_comes_with_weft(tmp_path: Path) -> None:
    rows = listed(tmp_path)

    assert set(rows) == {"tiny-hybrid", "smollm2"}
    assert rows["tiny-hybrid"]["folder"] == str(TINY_HYBRID)
    assert rows["tiny-hybrid"]["size_bytes"] > 1_000_000
    fit = {"needed_bytes": None, "free_bytes": rows["tiny-hybrid"]["free_bytes"], "verdict": "unknown"}
    assert rows["smollm2"] == {"name": "smollm2", "kind": "built-in", "folder": None, "size_bytes": 0, **fit}
    assert rows["tiny-hybrid"]["needed_bytes"] > rows["tiny-hybrid"]["size_bytes"]


def test_whole_models_of_the_caches_are_listed_and_nothing_else(tmp_path: Path) -> None:
    folder = hub_entry(tmp_path, "models/org/whole", "config.json", "model.safetensors", "tokenizer.json")
    hub_entry(tmp_path, "models/org/torch", "config.json", "pytorch_model.bin")
    hub_entry(tmp_path, "models/org/interrupted", "config.json")
    hub_entry(tmp_path, "datasets/org/data", "config.json", "model.safetensors")
    converted = tmp_path / "cache" / "weft" / "story-0123456789ab-1-float32"
    half_made = tmp_path / "cache" / "weft" / "download-gguf"
    for path in (converted / "config.json", converted / "model.safetensors", half_made / "story.gguf"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(500))
    rows = listed(tmp_path)

    assert set(rows) == {"tiny-hybrid", "smollm2", "org/whole", str(converted)}
    assert rows["org/whole"].items() >= {"name": "org/whole", "kind": "hub", "folder": str(folder), "size_bytes": 3000}.items()
    assert (rows[str(converted)]["kind"], rows[str(converted)]["size_bytes"]) == ("converted", 1000)


def test_the_list_for_people_has_the_same_names(tmp_path: Path) -> None:
    hub_entry(tmp_path, "models/org/whole", "config.json", "model.safetensors")
    lines = weft(tmp_path, "ls").stdout.splitlines()

    assert [line.split()[0] for line in lines] == ["NAME", "tiny-hybrid", "smollm2", "org/whole"]
    assert "2.0 kB" in lines[3]
    assert lines[0].split() == ["NAME", "SIZE", "FITS", "KIND", "FOLDER"]
    assert "unknown" in lines[2]


def test_pulling_the_shipped_model_prints_its_folder(tmp_path: Path) -> None:
    done = weft(tmp_path, "pull", "tiny-hybrid")

    assert done.returncode == 0
    assert done.stdout == f"{TINY_HYBRID}\n"


def test_ps_shows_what_the_server_says(tmp_path: Path) -> None:
    with running() as server:
        told = weft(tmp_path, "ps", "--url", server.url).stdout
        exact = weft(tmp_path, "ps", "--json", WEFT_URL=f"{server.url}/v1/").stdout
    head, names, first, second = told.splitlines()

    assert head == f"{server.url}: weft 9.9, up for 0:01:01"
    assert names.split()[:3] == ["MODEL", "STATUS", "CONTEXT"]
    assert first.split()[:3] == ["tiny-hybrid", "loaded", "2048"]
    assert first.endswith("weights 13.0 MB")
    assert second.split()[:3] == ["other", "-", "-"]
    assert json.loads(exact) == STATUS


def test_ps_says_when_the_key_is_wrong_and_uses_the_right_one(tmp_path: Path) -> None:
    with running() as server:
        server.key = "right"
        without = weft(tmp_path, "ps", "--url", server.url)
        right = weft(tmp_path, "ps", "--url", server.url, WEFT_API_KEY="right,second")

    assert (without.returncode, without.stderr) == (1, "weft: the API key is missing or wrong\n")
    assert right.returncode == 0


def test_a_running_server_loads_and_unloads_what_it_is_told(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors"):
            (tmp_path / name / file).write_bytes(bytes(10))
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    with front({"m": []}, spare={bad: ["--fail", "weights are missing"]}) as server:
        told = [
            weft(tmp_path, *words, "--url", server.url)
            for words in (
                ("load", "./good"),
                ("load", good),
                ("load", "./bad"),
                ("unload", "./good"),
                ("unload", "good"),
                ("unload", "m"),
            )
        ]
        left = [model["id"] for model in server.get("/v1/models").json()["data"]]

    assert [done.returncode for done in told] == [0, 0, 1, 0, 1, 0]
    assert (told[0].stdout, told[3].stdout) == (f"{good} is loaded\n", f"{good} is unloaded\n")
    assert told[2].stderr.endswith(f"weft: {bad} is not loaded: weights are missing\n")
    assert "is loaded here" in told[4].stderr
    assert left == [bad]
