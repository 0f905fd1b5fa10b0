"""A server that was told to end is gone in time, whatever its threads do; it does not start where files are too few."""

from __future__ import annotations

import subprocess
import sys

from waiting import HANG_SECONDS

STUCK = """
import threading
from weft.serving.server import end_process_after

threading.Thread(target=threading.Event().wait).start()  # a thread that never ends keeps Python from ending
end_process_after(0.05)
"""
FEW_FILES = """
import resource
from weft.cli.serve import Terminal
from weft.config import ServerConfig
from weft.errors import WeftError
from weft.serving.server import serve

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
try:
    serve(ServerConfig(("tiny-hybrid",), port=0), Terminal(), lambda *_: None)
except WeftError as error:
    print(error)
"""


def test_a_thread_at_work_does_not_keep_a_server_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    assert done.returncode == 1
    assert "did not end within 0.05 s" in done.stderr


def test_a_limit_on_files_that_is_too_low_is_named_at_the_start() -> None:
    done = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)

    assert done.stdout.startswith("the limit on open files is 100, and weft needs 192: raise it")
