"""A stranger's template costs seconds, not a host."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from datetime import date
from itertools import product
from multiprocessing import get_context

import psutil
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minimind.data.chat import sandbox
from minimind.data.chat.conversations import Message, as_conversation, turn_of
from minimind.data.chat.template import DEFAULT_TEMPLATE, PROBE, PROBES, Renderer
from minimind.errors import UsageError
from tests.data.chat.hostile import FAILING, HOSTILE, LARGE, LOOPING
from tests.data.chat.made import CHATML

CHATS = (*PROBES, tuple(Message(one.role, one.content * 100) for one in PROBE * 16))


def refusal(name: str) -> str:
    renderer = Renderer(HOSTILE[name], {}, name)
    try:
        for chat, is_asked in product(CHATS, (False, True)):
            renderer.render(chat, is_asked)
    except UsageError as error:
        return str(error)
    return "rendered"


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_hang_or_fill_a_host_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    words = f"{name} takes more than 0.2 s or 512 MiB for one conversation; give another template"
    found = refusal(name)
    assert found == words or re.fullmatch(
        rf"{re.escape(name)} cannot be rendered \(\w+: .*\); correct it, or give another", found
    )


@pytest.mark.parametrize("name", FAILING)
def test_whatever_a_template_raises_is_its_error(name: str):
    with pytest.raises(UsageError, match=r"^chat\.jinja (cannot be rendered|is not a Jinja templ)"):
        Renderer(FAILING[name], {}, "chat.jinja").render(PROBE)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_for_some_chats_only_is_refused_for_these(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    source = f"{CHATML}{{% if 'whales' in messages[0].content %}}{LARGE[name]}{{% endif %}}"
    template = Renderer(source, {}, "chat.jinja")
    usual = template.render(PROBE)
    with pytest.raises(UsageError, match=r"^chat\.jinja (takes more than|cannot be rendered)"):
        template.render([Message("user", "tell of whales"), PROBE[1]])
    assert template.render(PROBE) == usual


ORDINARY = {
    "{{ messages|length * 2 }}{{ '-' * 20 }}{{ 'a'.center(5) }}{{ '7'.zfill(3) }}": "4"
    + "-" * 20
    + "  a  007",
    "{{ 2**10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ -7 / 2 }} {{ 2**-1 }} {{ 10**300 > 1 }}": (
        "1024 3 3 -3.5 0.5 True"
    ),
    "{{ '%5.2f|%s|%-4d|%%' % (1.5, [1, 'b'], 3) }}{{ '%(a)s'|format(a=2) }}": (
        " 1.50|[1, 'b']|3   |%2"
    ),
    "{{ '{:>4}|{a!r}'.format(1, a='b') }}{{ '{a}'.format_map({'a': 3}) }}": "   1|'b'3",
    "{{ ('<{}>'|safe).format('<') }}{{ ('<%s>'|safe) % '<' }}{{ '<' ~ ('<'|safe) }}": (
        "<&lt;><&lt;><<"
    ),
    "{% autoescape true %}{% for m in messages %}{{ '<' ~ m.role|safe }}{% endfor %}"
    "{% endautoescape %}": "&lt;user&lt;assistant",
    "{{ 'a' ~ 1 ~ none ~ nothing ~ [1] }}{{ [1] + [2] }}{{ (1,) * 2 }}": "a1None[1][1, 2](1, 1)",
    "{{ 'a-b'.replace('-', '+') }}{{ 'ab'|replace('b', 'ccc') }}{{ ['a', 'b']|join(', ') }}": (
        "a+baccca, b"
    ),
    "{{ ' '.join(['a', 'b']) }}{{ 'a\nb'|indent(2) }}{{ {'a': [1]}|tojson(indent=1) }}": (
        'a ba\n  b{\n "a": [\n  1\n ]\n}'
    ),
    "{{ [[1], [2]]|sum(start=[]) }}{{ [1, 2.5]|sum }}{{ [{'n': 4}]|sum(attribute='n') }}": (
        "[1, 2]3.54"
    ),
    "{{ 2.567|round(2) }}{{ 'a\tb'.expandtabs(4) }}{{ 1 < 2 <= 2 }}{{ [1] == [1] }}": (
        "2.57a   bTrueTrue"
    ),
    "{{ range(3)|batch(2, 0)|list }}{{ range(4)|slice(2)|list }}": (
        "[[0, 1], [2, 0]][[0, 1], [2, 3]]"
    ),
    "{{ messages|map(attribute='role')|join('/') }}{{ 'role' in messages[0] }}": (
        "user/assistantTrue"
    ),
    "{{ 3 is odd }}{{ 3 is even }}{{ 4 is divisibleby(2) }}{{ 4 is divisibleby(num=3) }}"
    "{{ '%d' is odd }}{{ 'a' is in 'ab' }}{{ 'a' is lower }}{{ 'list' is filter }}": (
        "TrueFalseTrueFalseFalseTrueTrueTrue"
    ),
    "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ [1] == [1] != [2] }}{{ 1 in [1] in [[1]] }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}": "TrueFalseTrueTrue1",
    "{{ {'a': 1, messages[0].role: 2, (1, 2): 3} }}{{ {'b': 5}['b'] }}{{ {(1, 2): 3}[(1, 2)] }}"
    "{{ [1, 2][-1] }}{{ [1, 2, 3][1:] }}{{ {}['a'] is defined }}": (
        "{'a': 1, 'user': 2, (1, 2): 3}532[2, 3]False"
    ),
    "{{ 'ab'|replace(new='c', old='b') }}{{ 'a\nb'|indent(first=true, width=1) }}"
    "{{ ['a', 'b']|join(d='-') }}{{ ['a', 'b']|join(1) }}{{ 'a\tb'.expandtabs(tabsize=2) }}": (
        "ac a\n ba-ba1ba b"
    ),
    "{{ '{!r:>4}{!s}{a}'.format('a', [1], a=2) }}{{ ('{!s}'|safe).format('<') }}": (" 'a'[1]2&lt;"),
    "{% set n = namespace(a=[1]) %}{{ n }}{% for i in [1, 1, 2] %}{{ loop.changed(i) }}"
    "{% endfor %}{{ {'b': 1, 'a': 2}|dictsort }}{{ [1]|safe }}{{ [3, [4]]|pprint }}": (
        "<Namespace {'a': [1]}>TrueFalseTrue[('a', 2), ('b', 1)][1][3, [4]]"
    ),
    "{% for i in 'ab' %}{{ '{0.index}'.format(loop) }}{{ loop|string|length }}{% endfor %}": (
        "117217"
    ),
    "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, b=3) }}": (
        "1(2,){'b': 3}"
    ),
}


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_operators_methods_and_filters_give_what_they_give(source: str):
    assert Renderer(source, {}, "chat.jinja").render(PROBE) == ORDINARY[source]
    plain = ImmutableSandboxedEnvironment().from_string(source)
    assert plain.render(messages=[*map(turn_of, PROBE)]) == ORDINARY[source]


@pytest.mark.parametrize("name", ["nested loops", "a macro that calls itself twice"])
def test_a_signal_is_answered_while_a_template_loops_for_some_chats(name: str):
    assert name in LOOPING
    source = f"{{% if 'whales' in messages[0].content %}}{HOSTILE[name]}{{% endif %}}"
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "from minimind.data.chat.template import Message, Renderer\n"
        "print('rendering', flush=True)\n"
        f"Renderer({source!r}, {{}}, 'chat.jinja').render([Message('user', 'whales')])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"rendering\n"
        time.sleep(0.5)
        process.terminate()
        assert process.wait(timeout=120) == 75


def test_templates_of_this_package_are_rendered_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minimind.runtime.limited.LimitedServer", None)
    assert Renderer(DEFAULT_TEMPLATE, {"eos_token": "</s>"}, "ours").render(PROBE)


def test_a_fork_and_a_killed_process_are_answered():
    renderer = Renderer("{{ messages[0].content }}", {}, "chat.jinja")
    assert renderer.render(PROBE) == " a b "
    fork = get_context("fork").Process(target=lambda: sys.exit(renderer.render(PROBE) != " a b "))
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    process = sandbox.bounded(renderer.source, None)._process
    assert process is not None
    worker = psutil.Process(process._worker._pid)
    worker.kill()
    psutil.wait_procs([worker], timeout=60)
    assert renderer.render(PROBE) == " a b "


def test_a_text_may_be_as_long_as_what_is_said():
    said = [Message("user", "x" * 2**21), Message("assistant", "y" * 2**21)]
    repeated = Renderer(CHATML.replace("+ m['content']", "+ m['content'] * 9"), {}, "chat.jinja")
    assert len(repeated.render(said)) > 9 * 2**22
    with pytest.raises(UsageError, match="more than 16,777,376 characters for one conversation"):
        Renderer("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", {}, "a").render(
            [Message("user", "a b c ")]
        )


def test_a_template_is_told_one_date():
    source = "{{ strftime_now('%d %b %Y %H:%M') }}"
    told = Renderer(source, {}, "chat.jinja", date(2024, 7, 26))
    assert told.render(PROBE) == "26 Jul 2024 00:00"
    today = date.today().strftime("%d %b %Y")
    assert Renderer(source, {}, "chat.jinja").render(PROBE).startswith(today)


def test_a_template_without_a_date_is_told_that_of_each_rendering(monkeypatch):
    class Day(date):
        @classmethod
        def today(cls) -> date:
            return next(days)

    days = iter([date(2031, 12, 31), date(2032, 1, 1)])
    monkeypatch.setattr("minimind.data.chat.sandbox.date", Day)
    renderer = Renderer("{{ strftime_now('%d %b %Y') }}", {}, "chat.jinja", is_limited=True)
    assert [renderer.render(PROBE) for _ in "ab"] == ["31 Dec 2031", "01 Jan 2032"]


def test_a_conversation_of_many_turns_is_rendered():
    turns = [
        Message(("user", "assistant")[n % 2], "\u6625\u7720\u4e0d\u89c9\u6653" * 40)
        for n in range(800)
    ]
    source = CHATML + "{# a stranger's #}"
    renderer = Renderer(source, {}, "chat.jinja")
    asked = [(800, False), *((turn, True) for turn in range(1, 800, 2))]
    whole, *prompts = [text for text, _ in renderer.beginnings(as_conversation(turns), asked)]
    for (turn, _), prompt in zip(asked[1:], prompts, strict=True):
        assert whole.startswith(prompt)
        assert prompt.count("\u6653") == 40 * turn
