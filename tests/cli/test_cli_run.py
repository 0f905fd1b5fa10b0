"""`weft run` beside a running server."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from cli_command import WEFT, environment, weft
from cli_server import running


def test_a_question_is_answered_by_the_server_that_has_the_model(tmp_path: Path) -> None:
    with running() as server:
        done = weft(tmp_path, "run", "other", "Why blue?", "--seed", "7", "--top-k", "3", "--no-think", WEFT_URL=server.url)

    assert done.returncode == 0
    assert done.stdout == "It is blue.\n"
    assert "Let me see." in done.stderr
    assert "12 tokens, stop; first after" in done.stderr
    path, body = server.asked[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Why blue?"}]
    assert (body["model"], body["seed"], body["top_k"], body["stream"]) == ("other", 7, 3, True)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "temperature" not in body


def test_a_story_is_continued_by_the_server(tmp_path: Path) -> None:
    with running() as server:
        done = weft(tmp_path, "run", "tiny-hybrid", stdin="Once upon a time\n", WEFT_URL=server.url)

    assert done.stdout == "Once upon a time, there was a loom.\n"
    assert "12 tokens, length" in done.stderr
    assert (server.asked[0][0], server.asked[0][1]["prompt"]) == ("/v1/completions", "Once upon a time")


def test_mlx_is_not_loaded_when_a_server_answers(tmp_path: Path) -> None:
    code = "import sys; from weft.cli import app; app(['run', 'other', 'Why?'], result_action='return_value'); "
    code += "sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    with running() as server:
        done = subprocess.run(
            [WEFT[0], "-c", code], env=environment(tmp_path, WEFT_URL=server.url), stdin=subprocess.DEVNULL, check=False
        )

    assert done.returncode == 0
    assert server.asked


def test_interrupting_hangs_up_and_the_server_knows(tmp_path: Path) -> None:
    with running() as server:
        process = subprocess.Popen(
            [*WEFT, "run", "other", "Talk for ever"], env=environment(tmp_path, WEFT_URL=server.url),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.read(12)
        process.send_signal(signal.SIGINT)
        _, notes = process.communicate(timeout=30)

        assert server.left.wait(10)
    assert process.returncode == 0
    assert "[cancelled]" in notes


def test_a_failure_in_mid_answer_is_told(tmp_path: Path) -> None:
    with running() as server:
        done = weft(tmp_path, "run", "other", "Begin and break", WEFT_URL=server.url)

    assert done.returncode == 1
    assert done.stderr.endswith("weft: the row failed\n")


def test_what_the_server_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    with running() as server:
        done = weft(tmp_path, "run", "other", "hi", "--max-tokens", "999999", WEFT_URL=server.url)

    assert done.returncode == 1
    assert done.stderr.endswith("weft: max_tokens 999999 is too much\n")


def test_a_model_that_no_server_has_is_loaded_here(tmp_path: Path) -> None:
    with running() as server:
        server.health = 503
        done = weft(tmp_path, "run", "tiny-hybrid", "Once upon a time", "--max-tokens", "3", WEFT_URL=server.url)

    assert done.returncode == 0
    assert "3 tokens" in done.stderr
    assert "loading it here" in done.stderr
    assert not server.asked


def test_local_does_not_ask_the_server(tmp_path: Path) -> None:
    with running() as server:
        done = weft(tmp_path, "run", "tiny-hybrid", "Once upon a time", "--local", "--max-tokens", "3", WEFT_URL=server.url)

    assert done.returncode == 0
    assert "3 tokens" in done.stderr
    assert not server.asked


PICTURE = Path(__file__).parent.parent / "pictures" / "00_digit.png"


def test_an_image_is_asked_about(tmp_path: Path) -> None:
    done = weft(
        tmp_path,
        "run",
        "tiny-hybrid",
        "--image",
        str(PICTURE),
        "Tell me the digit.",
        "--no-think",
        "--temperature",
        "0",
        "--local",
    )

    assert done.stdout == "The digit is 8.\n"


def test_a_file_that_is_no_image_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("text")
    no_image = weft(tmp_path, "run", "tiny-hybrid", "--image", str(tmp_path / "text.png"), "What?", "--local")
    missing = weft(tmp_path, "run", "tiny-hybrid", "--image", str(tmp_path / "gone.png"), "What?", "--local")

    assert "text.png: " in no_image.stderr
    assert "gone.png could not be read: No such file or directory" in missing.stderr
    assert no_image.returncode == missing.returncode == 1
