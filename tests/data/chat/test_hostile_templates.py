"""A stranger's template costs seconds, not a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import pytest

from minimind.data.chat import rendering
from minimind.data.chat.rendering import PROBE, Renderer, require_bounded
from minimind.data.chat.template import DEFAULT_TEMPLATE
from minimind.data.chat.turns import Message
from minimind.errors import UsageError
from tests.data.chat.hostile import FAILING, HOSTILE
from tests.data.chat.made import CHATML, CHATML_MARKED, HEADERS, HEADERS_MARKED


def refusal(name: str) -> str:
    try:
        require_bounded(HOSTILE[name], name)
    except UsageError as error:
        return str(error)
    return "taken"


def test_what_would_hang_or_fill_a_host_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendering, "MAX_SECONDS", 0.1)
    assert len(HOSTILE) >= 40
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(HOSTILE, pool.map(refusal, HOSTILE), strict=True))
    words = "takes more than 0.1 s or 512 MiB for short conversations; give another template"
    assert found == {name: f"{name} {words}" for name in HOSTILE}


@pytest.mark.parametrize("name", FAILING)
def test_whatever_a_template_raises_is_its_error(name: str):
    with pytest.raises(UsageError, match=r"^chat\.jinja (cannot be rendered|is not a Jinja templ)"):
        Renderer(FAILING[name], {}, "chat.jinja").render(PROBE)


def test_usual_templates_are_bounded():
    for source in (DEFAULT_TEMPLATE, CHATML, CHATML_MARKED, HEADERS, HEADERS_MARKED):
        require_bounded(source, "chat.jinja")
    for source in [*FAILING.values()][:2]:  # reported where it is rendered
        require_bounded(source, "chat.jinja")


def test_a_text_may_be_as_long_as_what_is_said():
    said = [Message("user", "x" * 2**21), Message("assistant", "y" * 2**21)]
    repeated = Renderer(CHATML.replace("+ m['content']", "+ m['content'] * 9"), {}, "chat.jinja")
    assert len(repeated.render(said)) > 9 * 2**22
    with pytest.raises(UsageError, match="more than 16,777,312 characters for one conversation"):
        Renderer("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", {}, "a").render(
            [Message("user", "a b c ")]
        )


def test_a_signal_is_answered_while_a_template_is_tried(tmp_path: Path):
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "from minimind.data.chat.rendering import require_bounded\n"
        "print('trying', flush=True)\n"
        "require_bounded('{{ 9**(9**8) > 1 }}', 'chat.jinja')\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"trying\n"
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(timeout=20) == 75


def test_a_template_is_told_one_date():
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    told = Renderer(source, {}, "chat.jinja", date(2024, 7, 26))
    assert told.render(PROBE) == "26 Jul 2024 00:00"
    today = date.today().strftime("%d %b %Y")
    assert Renderer(source, {}, "chat.jinja").render(PROBE).startswith(today)
