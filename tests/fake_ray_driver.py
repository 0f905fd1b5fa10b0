"""A driver without Ray: says what a file has for it, a line each time the file changes, and notes which engines are renewed."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path


def main() -> None:
    news, diary = Path(sys.argv[1]), Path(sys.argv[2])
    sys.stdin.buffer.readline()
    threading.Thread(target=say, args=(news,), daemon=True).start()
    for line in sys.stdin:
        with diary.open("a") as file:
            file.write(line)
    with diary.open("a") as file:
        file.write("let go\n")


def say(news: Path) -> None:
    said = ""
    while True:
        text = news.read_text()
        if text and text != said:
            sys.stdout.write(text.strip() + "\n")
            sys.stdout.flush()
            said = text
        time.sleep(0.01)


if __name__ == "__main__":
    main()
