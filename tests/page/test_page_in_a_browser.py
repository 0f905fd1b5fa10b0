"""The page in a real browser, against a real server: it chats, it shows the batch, and it fits on a phone.

Pictures of what it looked like are left in build/screenshots.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from browsing import IN_A_BROWSER, PICTURES, say, text_of, until
from fronts import front
from servers import ENDLESS_WORD, Server

SYSTEM = "You tell small stories to small children. You are kind, you write simply, and every story ends well. " * 4

pytestmark = IN_A_BROWSER


def test_an_answer_streams_and_is_stopped(open_page: Any, server: Server) -> None:
    page = open_page()
    say(page, "Tell me a long story." + ENDLESS_WORD, temperature="0", schema='{"type": "string", "minLength": 3000}')
    until(page, "document.querySelector('li.assistant .prose')?.textContent.length > 20")
    assert page.is_visible("#stop")
    seen = text_of(page)
    page.click("#stop")
    page.wait_for_selector("#send", state="visible")

    server.wait_idle()
    assert text_of(page).startswith(seen)
    assert "stopped" in page.inner_text(".facts")


def test_an_edited_message_makes_a_branch_and_the_first_one_stays(open_page: Any) -> None:
    page = open_page()
    say(page, "Tell me of a cat.", max_tokens="60", temperature="0")
    page.wait_for_selector(".facts:has-text('tokens')")
    first = text_of(page)
    assert first
    page.click("footer >> text=Edit")
    page.fill(".editor textarea", "Tell me of a dog.")
    page.press(".editor textarea", "Enter")
    page.wait_for_selector(".branches:has-text('2/2')")
    page.wait_for_selector(".facts:has-text('tokens')")
    assert page.inner_text("li.user .prose") == "Tell me of a dog."
    page.reload()  # it is kept in the browser

    page.click("[aria-label='Branch before']")
    assert page.inner_text("li.user .prose") == "Tell me of a cat."
    assert text_of(page) == first
    page.click("footer >> text=Again")
    page.wait_for_selector("li.assistant .branches:has-text('2/2')")
    page.wait_for_selector("#send", state="visible")


def test_probabilities_and_the_raw_request_are_shown_on_demand(open_page: Any) -> None:
    page = open_page()
    page.click("#settings")
    page.check("#option-logprobs")
    page.click("#close")
    say(page, "Tell me of a cat.", max_tokens="60", temperature="0", system="Be brief.")
    page.click("footer >> text=Probabilities")
    page.click(".token >> nth=1")
    alternatives = page.inner_text(".alternatives")
    page.click("footer >> text=Raw")

    assert page.locator(".token").count() > 2
    assert alternatives.count("%") >= 5
    assert '"content": "Be brief."' in page.inner_text(".sent")


def test_eight_requests_are_eight_threads_and_their_common_beginning_is_one_span(open_page: Any, server: Server) -> None:
    page = open_page()
    page.click("#tab-live")
    body = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    prompts = [f"{SYSTEM}{word} went out." for word in ("Bob", "Cat", "Dan", "Eve", "Fox", "Gus", "Hen")]
    threads = [threading.Thread(target=server.post, args=("/v1/completions", {"prompt": one, **body})) for one in prompts]
    slow = {"prompt": f"{SYSTEM}Ann met a{ENDLESS_WORD}.", "stream": True, **body}
    with server.stream("/v1/completions", slow) as response:  # it holds the others up until the browser has looked
        pieces = response.iter_bytes()  # one that is dropped closes the response
        next(pieces)
        for thread in threads:
            thread.start()
        until(page, "document.querySelectorAll('#lanes li:not([data-state=finished])').length >= 8")
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / "eight-threads.png")
    for thread in threads:
        thread.join()
    shared = "[...document.querySelectorAll('.span')].find((one) => one.offsetHeight > 5 * 22)"
    until(page, f"Boolean({shared})")
    page.evaluate(f"{shared}.click()")
    assert "You tell small stories" in page.inner_text("#node")
    page.click("#lanes li:nth-last-child(1) button")
    page.wait_for_selector(".waterfall")
    page.wait_for_selector("mark.new")

    assert page.locator("#memory .bar i").count() > 3
    assert "admission" in page.locator(".limit").first.get_attribute("class")
    assert "tokens/s" in page.inner_text("#rates")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_on_a_phone(open_page: Any, scheme: str) -> None:
    page = open_page(390, 844, color_scheme=scheme)
    say(page, "Tell me of a cat. " * 20 + "x" * 200, max_tokens="20")
    page.wait_for_selector(".facts:has-text('tokens')")
    for tab in ("chat", "live", "models"):
        page.click(f"#tab-{tab}")
        page.wait_for_timeout(300)
        page.screenshot(path=PICTURES / f"phone-{tab}-{scheme}.png")

        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate(f"document.getElementById('{tab}').scrollWidth") <= 390


def test_it_can_be_used_without_a_mouse(open_page: Any) -> None:
    page = open_page()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-live"
    assert page.is_visible("#live")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".model")
    page.keyboard.press("ArrowRight")

    assert page.is_visible("#chat")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    for _ in range(2):
        page.press("#theme", "Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_what_a_model_says_is_never_markup(open_page: Any) -> None:
    page = open_page()
    hostile = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) **<script>alert(1)</script>**\n\n```html\n<b>x</b>\n```"
    made = page.evaluate(
        """async (text) => {
          const { render } = await import("/page/markdown.js");
          const box = document.createElement("div");
          render(box, text);
          return [box.querySelectorAll("img, script, a, b").length, box.querySelectorAll("strong, pre").length, box.textContent];
        }""",
        hostile,
    )

    assert made[:2] == [0, 2]
    assert "<img src=x onerror=alert(1)> [a](javascript:alert(1))" in made[2]


def test_thinking_can_be_unfolded_and_the_result_of_a_tool_goes_back(open_page: Any) -> None:
    page, asked = open_page(), []
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    replies = [
        [{"reasoning_content": "I should look."}, {"tool_calls": [call]}, "tool_calls"],
        [{"content": "It **rains**."}, "stop"],
    ]

    def answer(route: Any) -> None:
        asked.append(json.loads(route.request.post_data))
        *deltas, finish = replies[len(asked) - 1]
        events = [{"choices": [{"delta": delta}]} for delta in deltas]
        events.append({"choices": [{"delta": {}, "finish_reason": finish}]})
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    say(page, "Does it rain?", tools='[{"type": "function", "function": {"name": "weather"}}]')
    page.click("summary")
    assert page.is_visible("text=I should look.")
    assert page.inner_text(".call code >> nth=0") == "weather"
    page.fill("[aria-label='Result of weather']", "rain")
    page.click("text=Return")
    page.wait_for_selector("strong:has-text('rains')")

    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    assert asked[0]["tools"][0]["function"]["name"] == "weather"


def test_a_server_with_a_key_is_asked_with_the_key(open_page: Any) -> None:
    with front({"m": []}, api_keys=("secret",)) as guarded:
        page = open_page(url=guarded.url)
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#model option", state="attached")

        assert page.inner_text("#pulse") == "ready"
        page.goto("about:blank")


def pictured(page: Any, name: str) -> None:
    """A picture of each size and colour; nothing may stick out."""
    for width in (390, 1280):
        page.set_viewport_size({"width": width, "height": 860})
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=PICTURES / f"{name}-{width}-{scheme}.png")
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_models_are_loaded_and_unloaded_on_the_page(open_page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "story-0123456789ab-1-float32", tmp_path / "torn-0123456789ab-1-float32"
    for file in ("config.json", "model.safetensors"):
        for folder in (good, bad):
            folder.mkdir(exist_ok=True)
            (folder / file).write_bytes(bytes(2_000_000))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    spare = {str(good): ["--load-until", str(tmp_path / "gate")], str(bad): ["--fail", "weights are missing"]}
    with front({"m": []}, spare=spare) as models:
        page = open_page(url=f"{models.url}/#models")
        row = page.locator(f"#choices li:has-text('{good.name}')")
        row.wait_for()
        offered = row.inner_text()
        page.focus(f"[aria-label='Load {good}']")
        page.keyboard.press("Enter")
        page.wait_for_selector("progress")
        pictured(page, "models-loading")
        (tmp_path / "gate").touch()
        page.wait_for_selector(f".model:has-text('{good.name}') .dot.loaded")
        until(page, "document.querySelectorAll('#model option').length === 2")
        page.click(f"[aria-label='Load {bad}']")
        page.wait_for_selector(".problem:has-text('weights are missing')")
        pictured(page, "models-failed")
        page.click(f"[aria-label='Remove {bad}']")
        page.wait_for_selector(f"[aria-label='Load {bad}']")
        page.click(f"[aria-label='Unload {good}']")
        page.click("text=Cancel")
        assert page.is_visible(f"[aria-label='Unload {good}']")
        page.click(f"[aria-label='Unload {good}']")
        pictured(page, "models-ask")
        page.click("#ask-yes")
        page.wait_for_selector(f"[aria-label='Load {good}']")
        until(page, "document.querySelectorAll('#model option').length === 1")

        assert "fits: it needs at least" in offered
        assert "4.0 MB on disk" in offered
        assert [served.name for served in models.service.models] == ["m"]
        page.goto("about:blank")
