"""`make pictures`: a server under a small load, the page in a headless Chromium, and what it looks like in docs/pictures."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from bench.front import serving

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
SERVER = [sys.executable, "-m", "weft", "serve", "smollm2", "--port", "0", "--max-rows", "6"]
SEEING = [sys.executable, "-m", "weft", "serve", "tiny-hybrid", "--port", "0"]
IMAGES = Path(__file__).parent.parent / "tests" / "pictures"
MOST_BYTES = 300_000
QUESTION = "Write a Python function that says whether a word is a palindrome. Then explain in a short list how it works."
SYSTEM = """You are the assistant of a small PLACE. You know its rooms, its opening hours and its rules. You answer in plain
words, in at most three sentences, and when you do not know something you say so and name the desk where one can ask.
The PLACE is open from Tuesday to Saturday, ten to six, on Thursdays until eight. Children under twelve come with somebody
who is grown up. Bags are left in the lockers on the ground floor, which take a coin and give it back. There is a lift behind
the stairs. Photographs are allowed, lamps and tripods are not. Food stays outside, water in bottles may come in. The café
beside the entrance serves soup from noon. Guided tours begin at the desk on Wednesdays at three and last an hour. Whoever
finds something brings it to the desk; it is kept for a month. Visitors with dogs may tie them up in the court, where there
is a bowl of water. Groups of more than ten ask for a time by letter, at least two weeks before they come. Prices are on the
board at the door, and on the first Sunday of the month nobody pays at all."""
VISITORS = (
    "When do you open on Sunday?",
    "Is there a room where I can print a poster?",
    "How long may I keep a book?",
    "Which book about bees would you give to a child of six?",
    "I have lost my card. What now?",
    "Do you have newspapers from the year I was born?",
    "May I bring my dog?",
    "Who chooses the books that you buy?",
)
IMAGE_QUESTIONS = (
    ("What do you see?", "19_describe.png"),
    ("What color is the shape in the second picture?", "28a_two.png", "28b_two.png"),
)
NEXT_QUESTION = ("Reply with JSON with the keys digit and color.", "16_json.png")
SHAPE = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 200}}, "required": ["answer"]}


def main() -> None:
    """Take all pictures."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium is installed: apt-get install chromium, or brew install --cask chromium")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with serving(SERVER) as url, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        chat(chromium.new_page(viewport={"width": 1200, "height": 800}, device_scale_factor=1.5), url)
        live(chromium.new_page(viewport={"width": 1200, "height": 1340}, device_scale_factor=1.5), url)
        chromium.close()
    with serving(SEEING) as url, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        images(chromium.new_page(viewport={"width": 1200, "height": 960}, device_scale_factor=1.5), url)
        chromium.close()


def chat(page: Page, url: str) -> None:
    """A question and its answer."""
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    page.evaluate("localStorage.setItem('weft.settings', JSON.stringify({ temperature: '0', max_tokens: '260' }))")
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    page.fill("#draft", QUESTION)
    page.press("#draft", "Enter")
    page.wait_for_selector(".facts:has-text('tokens')", timeout=120_000)
    take(page, "chat")


def images(page: Page, url: str) -> None:
    """Questions about images with their answers, and one more that is not sent yet."""
    page.goto(url)
    page.evaluate("localStorage.setItem('weft.settings', JSON.stringify({ temperature: '0', max_tokens: '60' }))")
    page.reload()
    for number, question in enumerate(IMAGE_QUESTIONS):
        write(page, *question)
        page.press("#draft", "Enter")
        page.wait_for_selector(f".facts:has-text('tokens') >> nth={number}", timeout=120_000)
    write(page, *NEXT_QUESTION)
    take(page, "images")


def write(page: Page, text: str, *names: str) -> None:
    """Put images and a text into the composer."""
    page.wait_for_selector("#attach:not([disabled])")
    page.set_input_files("#files", [IMAGES / name for name in names])
    page.wait_for_selector(f"#tray img >> nth={len(names) - 1}")
    page.fill("#draft", text)


def live(page: Page, url: str) -> None:
    """Eight visitors, some of them at the same moment, on six rows."""
    page.goto(f"{url}/#live")
    crowd(url, "museum", 100)  # once before, so that nothing is done for the first time
    urllib.request.urlopen(f"{url}/v1/cache/clear", b"").read()
    page.wait_for_selector("#lanes li", state="detached", timeout=120_000)
    asking = threading.Thread(target=crowd, args=(url, "library", 100))
    asking.start()
    page.wait_for_selector("#lanes li[data-state=finished] >> nth=1", timeout=120_000)
    page.click("#lanes li[data-state=finished] >> nth=1")
    page.wait_for_selector("mark.new")
    page.evaluate("document.getElementById('live').scrollTo(0, 0)")
    take(page, "live")
    asking.join()


def crowd(url: str, place: str, tokens: int) -> None:
    """All visitors, a moment after each other."""
    threads = [threading.Thread(target=ask, args=(url, place, number, tokens)) for number in range(len(VISITORS))]
    for number, thread in enumerate(threads):
        thread.start()
        time.sleep(0.0 if number % 3 else 0.6)
    for thread in threads:
        thread.join()


def ask(url: str, place: str, number: int, tokens: int) -> None:
    """One visitor's question by one of three wires, one of them in a given shape."""
    system, question, most = SYSTEM.replace("PLACE", place), VISITORS[number], tokens + 10 * number
    messages = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"temperature": 0.7, "model": "smollm2"}
    if number % 4 == 1:
        path = "/v1/messages"
        body |= {"system": system, "messages": messages, "max_tokens": most}
    elif number % 4 == 2:
        path = "/v1/responses"
        body |= {"instructions": system, "input": question, "max_output_tokens": most, "store": False}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": [{"role": "system", "content": system}, *messages], "max_tokens": most}
    if number == 3:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SHAPE}}
    asked = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(asked).read()


def take(page: Page, name: str) -> None:
    """Keep what is to be seen, if it is small enough for a README."""
    page.wait_for_timeout(600)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    size = path.stat().st_size
    print(f"{path}: {size / 1000:.0f} kB")
    assert size < MOST_BYTES, f"{path} has {size} bytes, more than the {MOST_BYTES} a README should carry"


if __name__ == "__main__":
    main()
