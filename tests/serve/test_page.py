"""The chat page in a headless browser, before the server and before made answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from minimind.report.formats import PALETTE
from minimind.serve.app import load_page
from minimind.serve.protocol import Request
from tests.browser import opened
from tests.conftest import POSITIONS
from tests.contrast import contrast
from tests.serve.conftest import InProcess

EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture
def url(server: InProcess, listening: Callable[[Any], int]) -> str:
    return address(listening, server)


def address(listening: Callable[[Any], int], server: InProcess) -> str:
    app = server.app
    return f"http://localhost:{listening(app)}/"


def say(page: Page, text: str) -> None:
    box(page).fill(text)
    box(page).press("Enter")


def box(page: Page) -> Any:
    return page.get_by_role("textbox", name="Message", exact=True)


def settle(page: Page, name: str, value: str) -> None:
    """Give a setting without opening the settings."""
    page.evaluate("([n, v]) => { at(n).value = v; at(n).onchange(); }", [name, value])


def noted(page: Page, text: str) -> None:
    """Wait for a text below a turn."""
    expect(page.locator("article .tools").filter(has_text=text)).to_have_count(1)


def answers(page: Page) -> Any:
    return page.locator("article.assistant .text").last


def ended(page: Page, number: int = 1) -> None:
    """Wait for the end of the answer with this number."""
    name = re.compile(f"(Regenerate|Retry) answer {number}$")
    expect(page.get_by_role("button", name=name)).to_be_enabled()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def model(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def made(
    page: Page,
    *deltas: Any,
    end: str = "data: [DONE]\n\n",
    path: str = "chat/completions",
    **more: Any,
) -> list[Any]:
    """Answer each request with these deltas; return the bodies that the page sends.

    `more` are fields of each chunk.
    """
    bodies: list[Any] = []
    chunks = [{"choices": [{"index": 0, "delta": delta}], **more} for delta in deltas]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end

    def fulfill(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(body=text, content_type="text/event-stream")

    page.unroute(f"**/v1/{path}")
    page.route(f"**/v1/{path}", fulfill)
    return bodies


def usage(prompt: int, new: int, finish_reason: str = "stop") -> str:
    """The last chunks of a stream."""
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]}
    counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    chunks = last, {"choices": [], "usage": counts}
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"


def refusing(page: Page, status: int, **error: Any) -> None:
    """Refuse each request."""
    page.unroute("**/v1/chat/completions")
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(status=status, json={"error": error})
    )


def size_of(server: InProcess) -> str:
    """As the page writes it: three digits."""
    count = server.scheduler._model.num_parameters()
    assert 1000 <= count < 10**6
    return f"{float(f'{count / 1000:.3g}'):g}K"


def test_the_server_answers_in_the_page_as_it_answers_anyone(server: InProcess, url: str):
    expected = server.chat("Hello", seed=7, max_tokens=12)["choices"][0]["message"]["content"]
    with opened(url) as page:
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Max tokens").fill("12")
        page.get_by_label("Seed").fill("7")
        say(page, "Hello")
        ended(page)
        assert (answers(page).text_content() or "").strip() == (expected or "").strip()
        size = f"minimind, {size_of(server)} parameters, context {POSITIONS}"
        expect(page.locator("#size")).to_have_text(size)
        page.reload()
        assert page.locator("#seed").input_value() == "7"


def test_a_sent_message_is_edited_and_the_conversation_goes_on_from_there(url: str):
    with opened(url) as page:
        bodies = made(page, {"content": "Yes."})
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Top p").fill("0.9")
        page.get_by_label("Stop sequences").fill("\\n\\nUser:\nEnd")
        say(page, "One")
        ended(page)
        say(page, "Two")
        ended(page, 2)
        page.get_by_role("button", name="Edit message 1").click()
        page.get_by_label("Edit the message").fill("Three")
        page.get_by_label("Edit the message").press("Enter")
        expect(page.locator("article")).to_have_count(2)
        ended(page)
        page.get_by_role("button", name="Regenerate answer 1").click()
        ended(page)
    system = {"role": "system", "content": "Be brief."}
    assert bodies[1]["messages"] == [system, user("One"), model("Yes."), user("Two")]
    assert bodies[2]["messages"] == [system, user("Three")]
    assert bodies[3] == bodies[2]
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["\n\nUser:", "End"],
        "truncation": "auto",
    }
    assert bodies[0] == {**bodies[0], **settings}
    assert not {"seed", "max_tokens"} & bodies[0].keys()


@pytest.mark.long
def test_any_answer_is_generated_again(url: str):
    with opened(url) as page:
        bodies = made(page, {"content": "Yes."})
        for number, text in enumerate(("One", "Two", "Three"), 1):
            say(page, text)
            ended(page, number)
        page.get_by_role("button", name="Regenerate answer 2").click()
        expect(page.locator("article")).to_have_count(4)
        ended(page, 2)
    assert bodies[3] == bodies[1]


def test_a_reload_keeps_the_conversation_and_a_new_chat_clears_it(url: str):
    with opened(url) as page:
        bodies = made(page, {"reasoning_content": "hm"}, {"content": "**Yes**"}, end=usage(5, 3))
        say(page, "One")
        ended(page)
        shown = page.locator("#log").inner_html()
        page.reload()
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        assert page.locator("#log").inner_html() == shown
        say(page, "Two")
        ended(page, 2)
        assert bodies[1]["messages"] == [user("One"), model("**Yes**"), user("Two")]
        page.route("**/v1/chat/completions", lambda route: None)  # never answers
        say(page, "Three")
        page.get_by_role("button", name="Stop").wait_for()
        page.reload()
        noted(page, "Stopped, as the page was left.")
        expect(page.get_by_role("button", name="Retry answer 3")).to_be_visible()
        page.get_by_role("button", name="New chat").click()
        page.reload()
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        assert page.locator("article").count() == 0


@pytest.mark.long
def test_a_failed_or_empty_answer_is_not_sent_and_nor_is_its_question(url: str):
    with opened(url) as page:
        bodies = made(page, {"content": "Yes."})
        say(page, "One")
        ended(page)
        refusing(page, 429, message="the server is busy; ask again in a moment", code="queue_full")
        say(page, "Busy")
        ended(page, 2)
        page.unroute("**/v1/chat/completions")
        page.route("**/v1/chat/completions", lambda route: route.abort())
        say(page, "Broken")
        ended(page, 3)
        made(page, {"content": "Half"}, end="")
        say(page, "Broken off")
        ended(page, 4)
        made(page)
        say(page, "Empty")
        ended(page, 5)
        errors = ["the server is busy; ask again in a moment", "The server does not answer."]
        assert page.locator(".error").all_text_contents() == [*errors, "The server broke off."]
        noted(page, "The answer is empty.")
        assert page.get_by_text("Retry asks it anew").count() == 4
        bodies += made(page, {"content": "No."})
        last = made(page, {"content": "No."})
        say(page, "Last")
        ended(page, 6)
        page.get_by_role("button", name="Retry answer 2").click()
        expect(page.locator("article")).to_have_count(4)
        ended(page, 2)
        assert answers(page).text_content() == "No."
    assert last[0]["messages"] == [user("One"), model("Yes."), user("Last")]
    assert last[1]["messages"] == [user("One"), model("Yes."), user("Busy")]


def test_a_full_context_drops_the_oldest_turns_and_says_so(server: InProcess, url: str):
    """By the server's count: two of these questions fit, three do not."""
    with opened(url) as page:
        settle(page, "max_tokens", "5")
        settle(page, "seed", "3")
        for number in range(1, 6):
            say(page, "ab " * 400)
            ended(page, number)
            assert page.locator(".error").count() == 0
            assert page.locator("article.out").count() == 2 * max(0, number - 2)
        line = page.locator("article .line").filter(has_text="The first 4 turns no longer fit")
        expect(line).to_have_count(1)
        page.reload()
        expect(page.locator("article.out")).to_have_count(6)
        page.get_by_role("button", name="Edit message 5").click()
        page.get_by_label("Edit the message").fill("ab")
        page.get_by_label("Edit the message").press("Enter")
        ended(page, 5)
        expect(page.locator("article.out")).to_have_count(4)


@pytest.mark.long
def test_an_answer_says_why_it_ended_how_fast_and_what_is_left(url: str):
    full = "The context is full; the next question leaves the oldest turns out."
    with opened(url) as page:
        for count, left, text in (
            (20, POSITIONS - 100, "Cut at Max tokens."),
            (POSITIONS - 80, 0, full),
        ):
            made(page, {"content": "Yes"}, end=usage(80, count, "length"))
            say(page, "One")
            noted(page, f"{left} of {POSITIONS} tokens of context left")
            noted(page, text)
        page.unroute("**/v1/chat/completions")
        settle(page, "seed", "3")
        say(page, "春眠 ab")
        ended(page, 3)
        assert re.search(
            r"\d+ tokens · [\d.]+ tokens/s ·", page.locator("article .tools").last.inner_text()
        )


def test_thoughts_are_folded_calls_and_code_shown_and_no_text_is_markup(url: str):
    call = {"index": 0, "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Rome"}'}}
    with opened(url) as page:
        text = f"{EVIL}\n```python\nprint(1)\n```\nDone."
        made(page, {"reasoning_content": f"hm {EVIL}"}, {"content": text}, {"tool_calls": [call]},
             {"tool_calls": [rest]})  # fmt: skip
        say(page, EVIL)
        ended(page)
        assert not page.locator("details .text").is_visible()
        page.get_by_text("Thoughts").click()
        expect(page.locator("details .text")).to_have_text(f"hm {EVIL}")
        assert page.locator("article code").all_text_contents() == ["print(1)", '{"city":"Rome"}']
        assert page.locator("article img").count() == 0
        expect(page.get_by_text("Calls weather")).to_be_visible()


MARKDOWN = """# A *title*
Plain `a * b *c*` and **bold `x` *both***, *it*, ~~gone~~.

- one
  goes on

- **two**
  3. nested
     ```py
     x = 1
       y
     ```

> quoted
---
| a | *b* |
|---|:-:|
| 1 | `x` |
#none 2*3*4 **open *open `open a__b__c
"""
CODE = (
    '<figure class="code"><figcaption>py<button type="button" aria-label="Copy code">Copy</button>'
    "</figcaption><pre><code>x = 1\n  y</code></pre></figure>"
)
MARKUP = (
    "<h3>A <em>title</em></h3>"
    "<p>Plain <code>a * b *c*</code> and <strong>bold <code>x</code> <em>both</em></strong>,"
    " <em>it</em>, <s>gone</s>.</p>"
    "<ul><li><p>one\ngoes on</p></li><li><p><strong>two</strong></p>"
    f'<ol><li value="3"><p>nested</p>{CODE}</li></ol></li></ul>'
    "<blockquote><p>quoted</p></blockquote><hr>"
    '<div class="wide_table"><table><thead><tr><th>a</th><th><em>b</em></th></tr></thead>'
    "<tbody><tr><td>1</td><td><code>x</code></td></tr></tbody></table></div>"
    "<p>#none 2*3*4 **open *open `open a__b__c</p>"
)


def test_markdown_of_answers_is_shown_and_that_of_messages_left(url: str):
    with opened(url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        made(page, {"content": MARKDOWN})
        say(page, MARKDOWN)
        ended(page)
        assert answers(page).inner_html() == MARKUP
        assert page.locator("article.user .text").inner_html() == MARKDOWN.replace(">", "&gt;")
        page.get_by_role("button", name="Copy code").click()
        expect(page.get_by_role("status").filter(has_text="Copied")).to_have_count(1)
        assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n  y"


def test_links_are_of_the_web_or_a_mailbox_and_no_markup_of_a_model_is_run(url: str):
    links = {
        "[a *b*](https://a.b/c_(d))": "https://a.b/c_(d)",
        "![i](http://z.w/i.png)": "http://z.w/i.png",
        "(https://en.org/A_(b)).": "https://en.org/A_(b)",
        '**[b](https://q.r/?a=1&b=2 "title")**,': "https://q.r/?a=1&b=2",
        "**https://x.y/**": "https://x.y/",
        "<mailto:a@b.c>": "mailto:a@b.c",
    }
    none = ["javascript:alert(1)", "JaVaScRiPt:alert(1)", "data:text/html,x", "//evil", "/x", "x:y"]
    none += [" javascript:alert(1)", "java\tscript:alert(1)", "&#106;avascript:alert(1)"]
    hostile = [f"[a]({one})" for one in none] + [EVIL, "<script>alert(1)</script>"]
    hostile += ["[<img>](javascript:alert(1))", "<a href=javascript:alert(1)>x</a>", "`<b>`"]
    with opened(url) as page:
        page.on("dialog", lambda dialog: pytest.fail(dialog.message))
        made(page, {"content": "\n\n".join([*links, *hostile])})
        say(page, "One")
        ended(page)
        found = page.locator("article.assistant a")
        shown = found.evaluate_all("all => all.map(one => [one.href, one.rel, one.target])")
        assert shown == [[one, "noopener noreferrer", "_blank"] for one in links.values()]
        text = answers(page).inner_text()
        assert all(one in text for one in hostile if "`" not in one)
        tags = answers(page).evaluate(
            "all => [...all.querySelectorAll('*')].map(one => one.tagName)"
        )
        assert {*tags} <= {"P", "A", "EM", "STRONG", "CODE"}


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
        assert shown[5] == "<p>a **b*</p>"
        assert shown[6] == "<p>a <strong>b</strong></p>"
        assert shown[9] == "<p>a <strong>b</strong> `c</p>"
        marks = [
            "*a ",
            "**a ",
            "`a",
            "**a *b* ",
            "**`*",
            "- ",
            "1. *",
            "a",
            "> ",
            "[",
            "[a](",
            "[a](b",
        ]
        marks += [
            "~~a ",
            "https://(",
            "|",
            "|a",
            "-|",
            "- - - x",
            "\n",
            "- a\n",
            "> - ",
            "mailto:",
            "`",
            "~",
        ]
        marks += ["<script>", "[a](https://x.y/(", '[a](b "', "| a |\n|---|\n", " ", "* ", "&lt;"]
        for mark in marks:
            page.evaluate("text => fill(make('div'), text)", mark * (100_000 // len(mark)))
        steps = "".join(" " * n + "- x\n" for n in range(400))
        page.evaluate("text => fill(make('div'), text)", steps)


@pytest.mark.long
def test_what_is_shown_stays_while_an_answer_goes_on(url: str):
    """A selection in it does, and the focus."""
    with opened(url) as page:
        kept = page.evaluate(
            """() => {
                const place = make("div"), one = text => (fill(place, text), place.firstChild);
                return one("a\\n\\n`b") === one("a\\n\\n`b` **c**\\n\\nd");
            }"""
        )
        assert kept


def test_stop_keeps_what_came_and_errors_are_read(url: str):
    with opened(url) as page:
        page.route("**/v1/chat/completions", lambda route: None)  # never answers
        say(page, "Hello")
        page.get_by_role("button", name="Stop").wait_for()
        page.keyboard.press("Escape")
        noted(page, "Stopped.")
        made(page, {"content": "Half"}, end='data: {"error": {"message": "it is too late"}}\n\n')
        page.get_by_role("button", name="Retry").click()
        expect(page.locator(".error")).to_have_text("it is too late")
        expect(answers(page)).to_have_text("Half")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)


@pytest.mark.long
def test_escape_closes_the_settings_or_stops_the_answer(url: str):
    with opened(url) as page:
        settings, toggle = page.locator("#settings"), page.get_by_role("button", name="Settings")
        toggle.click()
        page.get_by_label("Seed").press("Escape")
        expect(settings).to_be_hidden()
        expect(toggle).to_be_focused()
        page.route("**/v1/chat/completions", lambda route: None)  # never answers
        toggle.click()
        say(page, "One")
        page.get_by_role("button", name="Stop").wait_for()
        page.get_by_label("Seed").press("Escape")  # the settings, as the focus is there
        expect(settings).to_be_hidden()
        expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
        toggle.click()
        box(page).press("Escape")
        noted(page, "Stopped.")
        expect(settings).to_be_visible()
        box(page).press("Escape")
        expect(settings).to_be_hidden()
        box(page).fill("a")
        box(page).press("Shift+Enter")
        assert box(page).input_value() == "a\n"
        page.get_by_role("button", name="Edit message 1").click()
        page.get_by_label("Edit the message").press("Escape")
        expect(page.locator("article.user .text")).to_have_text("One")


@pytest.mark.long
def test_an_answer_is_announced_once_and_every_control_has_a_name(url: str):
    with opened(url) as page:
        page.evaluate(
            """() => {
                window.heard = [];
                const text = node => heard.push(node.textContent);
                const tell = all => all.forEach(one => one.addedNodes.forEach(text));
                new MutationObserver(tell).observe(at("status"), { childList: true });
            }"""
        )
        made(
            page,
            *({"content": one} for one in ("One ", "**two** ", "three")),
            {"reasoning_content": "hm"},
        )
        say(page, "Hello")
        ended(page)
        refusing(page, 429, message="busy")
        say(page, "Again")
        ended(page, 2)
        assert page.evaluate("heard") == ["Model: One two three", "busy"]
        assert page.locator("#log").get_attribute("aria-live") == "off"
        page.get_by_role("button", name="Settings").click()
        tree = page.locator("body").aria_snapshot()
        names = re.findall(r'- (button|textbox|spinbutton)(?: "([^"]+)")?', tree)
        assert all(name for _, name in names), tree
        assert len({*names}) == len(names)
        fields = ["Temperature", "Top p", "Max tokens", "Seed"]
        assert [name for role, name in names if role == "spinbutton"] == fields
        for role, name in (
            ("log", "Conversation"),
            ("group", "Settings"),
            ("main", ""),
            ("banner", ""),
        ):
            assert f'- {role} "{name}"' in tree if name else f"- {role}" in tree
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"


@pytest.mark.long
def test_what_the_server_refuses_or_a_model_seldom_bears_is_remarked(url: str):
    with opened(url) as page:
        expect(page.get_by_role("heading", name="tiny")).to_be_visible()
        page.get_by_role("button", name="Settings").click()
        for name, value, text in (
            ("Temperature", "9", "Above 2, the most that OpenAI takes, answers are almost random."),
            ("Temperature", "-1", "Give 0 or more."),
            ("Temperature", "1.35", ""),
            ("Top p", "1.5", "Give 0 to 1."),
            ("Max tokens", "5000", f"Give 1 to {POSITIONS}, a whole number."),
            ("Seed", "1.5", "Give 0 or more, a whole number."),
        ):
            field = page.get_by_label(name, exact=True)
            field.fill(value)
            expect(field).to_have_accessible_description(text)


@pytest.mark.long
def test_the_conversation_is_exported(url: str):
    with opened(url) as page:
        made(page, {"content": "**Yes**"})
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        say(page, "One")
        ended(page)
        refusing(page, 429, message="busy")
        say(page, "Two")
        ended(page, 2)
        found = {}
        for suffix in ("json", "md"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"Export .{suffix}").click()
            assert download.value.suggested_filename == f"tiny.{suffix}"
            found[suffix] = download.value.path().read_text()
    system = {"role": "system", "content": "Be brief."}
    messages = [system, user("One"), model("**Yes**")]
    assert json.loads(found["json"]) == {"model": "tiny", "messages": messages}
    sections = ["# tiny", "## System", "Be brief.", "## You", "One", "## Model", "**Yes**"]
    assert found["md"] == "\n\n".join(sections) + "\n"


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
        settle(page, "max_tokens", "5")
        settle(page, "seed", "3")
        for number in range(1, 4):  # the oldest text is left out once the context is full
            text.fill("In the" if number == 1 else "ab " * 600)
            text.press("Enter")
            ended(page, number)
            assert page.locator(".error").count() == 0
            assert page.locator("article.out").count() == (0, 0, 4)[number - 1]
        page.get_by_role("button", name="Settings").click()
        expect(page.get_by_label("Temperature")).to_be_visible()
        expect(page.get_by_label("System prompt")).to_be_hidden()


def test_a_phone_has_no_sideways_scroll_and_targets_for_fingers(url: str):
    with opened(url, width=390, is_mobile=True, has_touch=True, color_scheme="dark") as page:
        table = "| a | b |\n|---|---|\n" + f"| {'x' * 300} | [y](https://a.b) |\n"
        code = "\n```\n" + "x" * 300 + "\n```\n"
        made(page, {"reasoning_content": "hm"}, {"content": "long" * 200 + code + table})
        page.get_by_role("button", name="Settings").click()
        say(page, "word" * 100)
        ended(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
        sizes = page.locator("button, input, textarea, summary").evaluate_all(
            """all => all.filter(one => one.checkVisibility())
                .map(one => [one.textContent, one.offsetWidth, one.offsetHeight])"""
        )
        assert len(sizes) > 12
        assert [one for one in sizes if min(one[1:]) < 44] == []


def colors() -> list[dict[str, str]]:
    """The custom properties of the page, light and dark."""
    roots = re.findall(r":root \{([^}]*)\}", load_page()[0])
    return [dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", root)) for root in roots]


def test_the_colors_are_those_of_the_report_and_can_be_told_apart():
    light, dark = colors()
    for name in ("paper", "ink", "soft", "rule", "edge", "bad", "run0"):
        assert (light[name], dark[name]) == PALETTE[name]
    for found in (light, dark):
        for text in ("ink", "soft", "bad", "run0"):  # run0 is also the ground of a button's text
            assert contrast(found[text], found["paper"]) >= 4.5, text
        for border in ("edge", "run0"):  # of controls, and of the focus
            assert contrast(found[border], found["paper"]) >= 3, border


def test_fields_of_the_page_have_the_bounds_of_the_server():
    page, schema = load_page()[0], Request.model_json_schema()["properties"]
    for name in ("temperature", "top_p"):
        (field,) = re.findall(f'<input id="{name}"[^>]*>', page)
        own = {key: float(value) for key, value in re.findall(r'(min|max)="([\d.]+)"', field)}
        told = schema[name]["anyOf"][0]
        least = told.get("minimum", told.get("exclusiveMinimum"))
        assert own == {"min": least} | ({"max": told["maximum"]} if "maximum" in told else {})
