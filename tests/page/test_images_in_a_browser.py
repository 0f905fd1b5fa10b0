"""Images on the chat page, in a real browser against a real server: how they come in, what is sent, what is refused and kept."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import image_files
from browsing import IN_A_BROWSER, say, text_of, until
from fronts import front

FOLDER = Path(__file__).parent.parent / "pictures"
DIGIT = FOLDER / "00_digit.png"
QUESTION = "Tell me the digit."
TEXT_FILE = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"Bread, milk"}

pytestmark = IN_A_BROWSER


def pick(page: Any, *files: Any) -> None:
    """Choose files with the button."""
    page.wait_for_selector("#attach:not([disabled])")
    with page.expect_file_chooser() as chooser:
        page.click("#attach")
    chooser.value.set_files(list(files))


def paste(page: Any, file: Path) -> None:
    """Put a PNG on the clipboard and press the keys for pasting."""
    page.wait_for_selector("#attach:not([disabled])")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.focus("#draft")
    page.evaluate(
        """async (encoded) => {
          const bytes = Uint8Array.from(atob(encoded), (one) => one.charCodeAt(0));
          await navigator.clipboard.write([new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) })]);
        }""",
        base64.b64encode(file.read_bytes()).decode(),
    )
    page.keyboard.press("ControlOrMeta+v")


def drop(page: Any, *files: Path) -> None:
    """Drag files from outside onto the messages."""
    browser = page.context.new_cdp_session(page)
    dragged = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        browser.send("Input.dispatchDragEvent", {"type": kind, "x": 400, "y": 300, "data": dragged})


def ask(page: Any, text: str, **settings: str) -> Any:
    """Send a message; return the content of the last message of the request."""
    with page.expect_request("**/v1/chat/completions") as asked:
        say(page, text, **{"temperature": "0", "max_tokens": "60", **settings})
    return json.loads(asked.value.post_data)["messages"][-1]["content"]


def wait_answered(page: Any) -> None:
    page.wait_for_selector("li.assistant:last-child .facts:has-text('tokens')")


def image_part(file: Path) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"}}


def notice(page: Any) -> str:
    page.wait_for_selector("#notice:not(:empty)")
    text: str = page.inner_text("#notice")
    return text


def fill_storage(page: Any, but: int) -> None:
    """Leave room for so many characters in what the browser keeps for the page."""
    page.evaluate(
        """(but) => {
          let length = 0;
          for (let step = 2 ** 26; step >= 1024; ) {
            try {
              localStorage.setItem("other", "x".repeat(length + step));
              length += step;
            } catch {
              step /= 2;
            }
          }
          localStorage.setItem("other", "x".repeat(length - but));
        }""",
        but,
    )


@contextmanager
def visiting(open_page: Any, *models: str, rows: list[dict[str, Any]] | None = None) -> Iterator[Any]:
    """The page of a server with these models, which read text only; or have what `rows`, in place of theirs, say of them."""
    with front({name: [] for name in models}) as server:
        page = open_page(url="about:blank")
        if rows is not None:
            page.route("**/v1/models", lambda route: route.fulfill(json={"data": rows}))
        page.goto(server.url)
        try:
            yield page
        finally:
            page.goto("about:blank")  # the server ends when nobody listens to its events


@pytest.mark.parametrize("way", [pick, paste, drop])
def test_an_image_is_sent_before_the_text_and_answered(open_page: Any, way: Any) -> None:
    page = open_page()
    page.wait_for_selector("#attach:not([disabled])")
    way(page, DIGIT)
    page.wait_for_selector("#tray img")
    image, text = ask(page, QUESTION)
    wait_answered(page)

    assert text == {"type": "text", "text": QUESTION}
    assert image["type"] == "image_url"
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    if way is not paste:  # a clipboard encodes anew
        assert image == image_part(DIGIT)
    assert "8" in text_of(page)
    assert page.locator("#tray img").count() == 0
    assert page.locator("li.user .images img").count() == 1


def test_several_images_are_sent_in_their_order_and_counted_in_the_live_view(open_page: Any) -> None:
    page, files = open_page(), [FOLDER / "28a_two.png", FOLDER / "28b_two.png"]
    pick(page, *files)
    page.wait_for_selector("#tray img >> nth=1")
    content = ask(page, "What color is the shape in the second picture?")
    wait_answered(page)
    page.click("#tab-live")
    until(page, "document.getElementById('memory').textContent.includes('kept images')")

    assert content[:-1] == [image_part(file) for file in files]
    assert "blue" in page.evaluate("document.querySelector('li.assistant .prose').textContent")


def test_a_removed_image_is_not_sent(open_page: Any) -> None:
    page = open_page()
    pick(page, DIGIT, FOLDER / "20_digit.png")
    page.wait_for_selector("#tray img >> nth=1")
    page.focus("[aria-label='Remove 00_digit.png']")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.ariaLabel") == "Remove 20_digit.png"
    page.keyboard.press("Enter")

    assert page.evaluate("document.activeElement.id") == "draft"
    assert ask(page, QUESTION) == QUESTION
    wait_answered(page)


def test_an_image_alone_is_a_message(open_page: Any) -> None:
    page = open_page()
    pick(page, DIGIT)
    content = ask(page, "")  # Enter waits for a file that is still being read
    wait_answered(page)
    thumbnail = page.locator("li.user .thumbnail")
    height = thumbnail.bounding_box()["height"]
    thumbnail.click()

    assert content == [image_part(DIGIT)]
    assert text_of(page)
    assert thumbnail.bounding_box()["height"] > height


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_a_large_picture_is_scaled_down(open_page: Any, kind: str) -> None:
    page = open_page()
    data = image_files.encoded(image_files.noise(1, 1).resize((3000, 1500)), kind)
    pick(page, {"name": "large", "mimeType": f"image/{kind}", "buffer": data})
    page.wait_for_selector("#tray img")
    until(page, "document.querySelector('#tray img').naturalWidth > 0")

    size = "(({ naturalWidth, naturalHeight }) => [naturalWidth, naturalHeight])(document.querySelector('#tray img'))"
    assert page.evaluate(size) == [2048, 1024]
    assert page.get_attribute("#tray img", "src").startswith(f"data:image/{kind};base64,")


def test_what_is_no_image_or_too_large_is_refused_with_a_sentence(open_page: Any) -> None:
    page = open_page()
    pick(page, TEXT_FILE)
    text_file = notice(page)
    pick(
        page,
        TEXT_FILE | {"name": "false.png", "mimeType": "image/png"},
        {"name": "true.png", "mimeType": "image/png", "buffer": DIGIT.read_bytes()},
    )
    page.wait_for_selector("#tray img")
    false_image = notice(page)
    pick(page, {"name": "huge.png", "mimeType": "image/png", "buffer": bytes(20_000_001)})
    until(page, "document.getElementById('notice').textContent.includes('huge')")

    assert text_file == "notes.txt is no PNG, JPEG, WebP or GIF image."
    assert false_image == "false.png can not be read as an image."
    assert notice(page) == "huge.png has more than the 20 MB that an image may have."
    assert page.locator("#tray img").count() == 1
    assert ask(page, QUESTION)[0] == image_part(DIGIT)
    assert page.inner_text("#notice") == ""
    wait_answered(page)


def test_a_dropped_text_file_is_refused_and_the_page_stays(open_page: Any, tmp_path: Path) -> None:
    page, file = open_page(), tmp_path / "notes.txt"
    file.write_text("Bread, milk")
    page.wait_for_selector("#attach:not([disabled])")
    drop(page, file)

    assert notice(page) == "notes.txt is no PNG, JPEG, WebP or GIF image."
    assert page.locator("#tray img").count() == 0


def test_a_model_without_vision_takes_no_image(open_page: Any) -> None:
    with visiting(open_page, "m") as page:
        page.wait_for_selector("#attach[title^='m reads']")
        drop(page, DIGIT)

        assert notice(page) == "m reads text only. Images need a model with vision."
        assert page.is_disabled("#attach")
        assert page.locator("#tray img").count() == 0


def test_images_wait_while_a_model_without_vision_is_chosen(open_page: Any) -> None:
    rows = [{"id": "a", "capabilities": ["vision"]}, {"id": "b", "capabilities": []}]
    with visiting(open_page, "a", "b", rows=rows) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url) if "completions" in request.url else None)
        pick(page, DIGIT)
        page.wait_for_selector("#tray img")
        page.select_option("#model", "b")
        say(page, QUESTION)

        assert notice(page) == "b reads text only. Images need a model with vision."
        assert page.locator("#tray img").count() == 1
        assert page.input_value("#draft") == QUESTION
        assert asked == []


def test_an_edited_message_keeps_its_images_and_so_does_the_browser(open_page: Any) -> None:
    page = open_page()
    pick(page, DIGIT)
    ask(page, "What do you see?")
    wait_answered(page)
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    page.click("footer >> text=Edit")
    assert page.is_visible(".editor [aria-label='Remove 00_digit.png']")
    page.fill(".editor textarea", QUESTION)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press(".editor textarea", "Enter")
    page.wait_for_selector(".branches:has-text('2/2')")
    wait_answered(page)
    assert "8" in text_of(page)
    page.click("footer >> text=Raw")
    raw = page.inner_text(".sent")
    page.click("footer >> text=Why?")
    page.wait_for_selector(".waterfall")

    content = json.loads(asked.value.post_data)["messages"][-1]["content"]
    assert content == [image_part(DIGIT), {"type": "text", "text": QUESTION}]
    assert "data:image/png;base64," in raw
    assert content[0]["image_url"]["url"] not in raw  # shortened: it would be most of the page


def test_a_conversation_whose_images_do_not_fit_is_kept_without_them(open_page: Any) -> None:
    page = open_page()
    page.wait_for_selector("#attach:not([disabled])")
    fill_storage(page, but=60_000)
    image = image_files.encoded(image_files.noise(200, 200), "png")  # 160 kB as a data URL
    pick(page, {"name": "noise.png", "mimeType": "image/png", "buffer": image})
    ask(page, "What do you see?")
    wait_answered(page)
    told, answer = notice(page), text_of(page)
    page.reload()

    assert "one message loses its images" in told
    assert "noise.png: not kept" in page.inner_text("li.user .images")
    assert text_of(page) == answer
    assert ask(page, "And now?") == "And now?"
    wait_answered(page)
