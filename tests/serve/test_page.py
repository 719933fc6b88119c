"""The chat page in a headless browser, before the server and before made answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from minimind.report.formats import PALETTE
from minimind.serve.app import load_page
from tests.browser import opened
from tests.serve.conftest import InProcess

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def url(server: InProcess, listening: Callable[[Any], int]) -> str:
    return address(listening, server)


def address(listening: Callable[[Any], int], server: InProcess) -> str:
    app = server.app
    return f"http://localhost:{listening(app)}/"


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def answers(page: Page) -> Any:
    return page.locator("article.assistant .text").last


def made(page: Page, *deltas: Any, end: str = "data: [DONE]\n\n") -> list[Any]:
    """Answer each chat with these deltas; return the bodies that the page sends."""
    bodies: list[Any] = []
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end

    def fulfill(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body=text, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfill)
    return bodies


def test_the_server_answers_in_the_page_as_it_answers_anyone(server: InProcess, url: str):
    expected = server.chat("Hello", seed=7, max_tokens=12)["choices"][0]["message"]["content"]
    with opened(url) as page:
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Most tokens").fill("12")
        page.get_by_label("Seed").fill("7")
        say(page, "Hello")
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        assert (answers(page).text_content() or "").strip() == (expected or "").strip()
        page.reload()
        assert page.locator("#seed").input_value() == "7"


def test_a_sent_message_is_edited_and_the_conversation_goes_on_from_there(url: str):
    with opened(url) as page:
        bodies = made(page, {"content": "Yes."})
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        say(page, "One")
        expect(answers(page)).to_have_text("Yes.")
        say(page, "Two")
        expect(page.locator("article")).to_have_count(4)
        page.get_by_role("button", name="Edit").first.click()
        page.get_by_label("Edit the message").fill("Three")
        page.get_by_label("Edit the message").press("Enter")
        expect(page.locator("article")).to_have_count(2)
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        page.get_by_role("button", name="Retry").click()
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
    system, one = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"})
    yes = {"role": "assistant", "content": "Yes."}
    assert bodies[1]["messages"] == [system, one, yes, {"role": "user", "content": "Two"}]
    assert bodies[2]["messages"] == [system, {"role": "user", "content": "Three"}]
    assert bodies[3] == bodies[2]
    assert bodies[0]["temperature"] == 0.5
    assert "seed" not in bodies[0]


def test_thoughts_are_folded_calls_and_code_shown_and_no_text_is_markup(url: str):
    call = {"index": 0, "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Rome"}'}}
    with opened(url) as page:
        text = f"{EVIL}\n```python\nprint(1)\n```\nDone."
        made(page, {"reasoning_content": f"hm {EVIL}"}, {"content": text}, {"tool_calls": [call]},
             {"tool_calls": [rest]})  # fmt: skip
        say(page, EVIL)
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        assert not page.locator("details .text").is_visible()
        page.get_by_text("Thoughts").click()
        expect(page.locator("details .text")).to_have_text(f"hm {EVIL}")
        assert page.locator("article code").all_text_contents() == ["print(1)", '{"city":"Rome"}']
        assert page.locator("article img").count() == 0
        expect(page.get_by_text("Calls weather")).to_be_visible()


MARKDOWN = """# A *title*
Plain `a * b *c*` and **bold `x` *both***, *it*.

- one
  goes on

- **two**
  3. nested
#none 2*3*4 **open *open `open a__b__c
"""
MARKUP = (
    "<h3>A <em>title</em></h3>"
    "<span>Plain <code>a * b *c*</code> and <strong>bold <code>x</code> <em>both</em></strong>,"
    " <em>it</em>.</span>"
    "<ul><li>one\ngoes on</li><li><strong>two</strong></li></ul>"
    '<ol><li value="3" style="margin-left: 1em;">nested</li></ol>'
    "<span>#none 2*3*4 **open *open `open a__b__c</span>"
)


def test_markdown_of_answers_is_shown_and_that_of_messages_left(url: str):
    with opened(url) as page:
        made(page, {"content": MARKDOWN})
        say(page, MARKDOWN)
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        assert answers(page).inner_html() == MARKUP
        assert page.locator("article.user .text").inner_html() == MARKDOWN


def test_markdown_appears_while_an_answer_is_written(url: str):
    """At every length; marks that are never closed take no longer than others."""
    with opened(url) as page:
        shown = page.evaluate(
            """text => Array.from(text, (_, n) => {
                const place = make("div");
                fill(place, text.slice(0, n + 1));
                return place.innerHTML;
            })""",
            "a **b** `c",
        )
        assert shown[5] == "<span>a **b*</span>"
        assert shown[6] == "<span>a <strong>b</strong></span>"
        assert shown[9] == "<span>a <strong>b</strong> `c</span>"
        for mark in ("*a ", "**a ", "`a", "**a *b* ", "**`*", "- ", "1. *", "a"):
            page.evaluate("text => fill(make('div'), text)", mark * 20_000)


def test_stop_keeps_what_came_and_errors_are_read(url: str):
    with opened(url) as page:
        page.route("**/v1/chat/completions", lambda route: None)  # never answers
        say(page, "Hello")
        page.get_by_role("button", name="Stop").wait_for()
        page.keyboard.press("Escape")
        expect(page.get_by_text("Stopped.")).to_be_visible()
        made(page, {"content": "Half"}, end='data: {"error": {"message": "it is too late"}}\n\n')
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".error")).to_have_text("it is too late")
        expect(answers(page)).to_have_text("Half")
        page.get_by_role("button", name="New").click()
        expect(page.locator("article")).to_have_count(0)


def test_a_key_is_asked_for(server: InProcess, listening: Callable[[Any], int]):
    with opened(address(listening, server.limited(api_key="secret"))) as page:
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").press("Tab")
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()


def test_a_model_without_chat_template_continues_a_text(
    base: InProcess, listening: Callable[[Any], int]
):
    with opened(address(listening, base)) as page:
        text = page.get_by_label("Text to continue")
        page.evaluate("document.getElementById('max_tokens').value = '5'")
        text.fill("In the")
        text.press("Enter")
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        assert page.locator(".error").count() == 0
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Temperature")).to_be_visible()
        expect(page.get_by_label("System prompt")).to_be_hidden()


def test_a_phone_has_no_sideways_scroll(url: str):
    with opened(url, width=390, is_mobile=True, has_touch=True, color_scheme="dark") as page:
        made(page, {"content": "long" * 200 + "\n```\n" + "x" * 300 + "\n```"})
        page.get_by_role("button", name="Settings").click()
        say(page, "word" * 100)
        expect(page.get_by_role("button", name="Retry")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"


def test_the_colors_are_those_of_the_report():
    page = load_page()[0]
    for name in ("paper", "ink", "soft", "rule", "bad", "run0"):
        for color in PALETTE[name]:
            assert f"--{name}: {color}" in page
