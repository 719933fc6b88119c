"""What stops a server that reads requests without limits: also for benchmarks/serve_attacked.py.

A stranger's template does what `BOMBS` say where the last message has their name; `large_bodies`
are for any template.
"""

from __future__ import annotations

import json
from typing import Any

LONG = "range(99999)"  # Jinja has no longer one
BOMBS = {
    "recursive macro": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "recursive loop": (
        "{% set few = range(9) | list %}{% for a in few recursive %}{% if loop.depth < 60 %}"
        "{% set u = loop(few) %}{% endif %}{% endfor %}"
    ),
    "loops in loops": f"{{% for a in {LONG} %}}{{% for b in {LONG} %}}{{% endfor %}}{{% endfor %}}",
    "nested lists": (
        "{% set n = namespace(t=[1]) %}{% for a in range(99) %}{% set n.t = [n.t, n.t] %}"
        "{% endfor %}{{ n.t }}"
    ),
    "range": f"{{{{ {LONG} | list | length }}}}{{{{ range(9999999) | sum }}}}",
    "repeated text": "{{ 'a' * 10**9 }}",
    "doubled text": (
        "{% set n = namespace(t='a') %}{% for a in range(99) %}{% set n.t = n.t + n.t %}"
        "{% endfor %}"
    ),
    "width": "{{ '%999999999d' % 1 }}",
    "format": "{{ '{:999999999}'.format(1) }}",
    "wordwrap": "{{ ('a b ' * 999999) | wordwrap(1) }}",
    "striptags": "{{ ('<' * 99999) | striptags }}{{ ('<!--' * 99999) | striptags }}",
}
BOMBS |= {
    name: f"{{% for a in {LONG} %}}{{% for b in {LONG} %}}{{% set u = {computed} %}}"
    "{% endfor %}{% endfor %}"
    for name, computed in {
        "filter": "('ab' * 999) | upper",
        "find": "('a' * 9999).find('a' * 499 + 'b')",
        "count": "('a' * 9999).count('aa')",
        "replace": "('ab' * 9999).replace('b', 'c')",
        "split": "('a b ' * 99).split()",
        "sort": "range(9999) | sort(reverse=true)",
        "groupby": "[{'a': 1}, {'a': 2}] | groupby('a')",
        "unique": "range(9999) | unique | list",
        "power": "3 ** 2000",
        "division": "(3 ** 2000) // 7",
        "urlize": "('www.a.com ' * 99) | urlize",
        "tojson": "range(999) | list | tojson",
        "slices": "(range(999) | list)[::-1]",
        "dates": "strftime_now('%Y' * 99)",
    }.items()
}


def with_bombs(source: str) -> str:
    """A template that renders as `source` unless its last message has the name of a bomb."""
    cases = (
        f"{{% if messages[-1].content == {name!r} %}}{bomb}{{% endif %}}"
        for name, bomb in BOMBS.items()
    )
    return "".join(cases) + source


def chat_of(*contents: str, **fields: Any) -> bytes:
    """The body of a request of a chat whose users say this, with empty answers between."""
    turns: list[dict[str, str]] = []
    for content in contents:
        turns += [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
    return json.dumps({"messages": turns[:-1], "max_tokens": 1, **fields}).encode()


def large_bodies() -> dict[str, bytes]:
    """Bodies of about a mebibyte: paths, and what they take long to read for."""
    deep: Any = "a"
    for _ in range(25):
        deep = {"a": deep}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": deep}} for n in range(3000)
    ]
    return {
        "many turns": chat_of(*["a"] * 12_500),
        "many users": json.dumps(
            {"messages": [{"role": "user", "content": "a"}] * 30_000}
        ).encode(),
        "many tools": chat_of("a", tools=tools),
        "one letter": chat_of("a" * 1_000_000),
        "words": chat_of("春眠 ab " * 60_000),
        "many parts": json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 33_000}]}
        ).encode(),
        "many roles": json.dumps(
            {
                "messages": [{"role": "system", "content": ""}] * 28_000
                + [{"role": "user", "content": "a"}]
            }
        ).encode(),
    }
