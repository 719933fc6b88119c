"""What a page quotes of a file of this project is what stands there.

A quote is a block tagged python below a line `FILE.py: Class.method`, or `FILE.py` for a whole
module, in backticks. Its lines follow one another in the source as they do in the block; a line
`...` stands for lines that are left out. The indent of a method counts from its own first line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from textwrap import dedent

import pytest

from tests.conftest import ROOT
from tests.docs.pages import PAGES

MARKED = re.compile(
    r"^`(?P<file>\S+\.py)(?:: (?P<name>[\w.]+))?`\n\n```python\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
QUOTES = [
    pytest.param(page, match, id=f"{page}-{match['file']}-{match['name']}")
    for page, text in PAGES.items()
    for match in MARKED.finditer(text)
]


def lines_of(file: str, name: str | None) -> list[str]:
    """The lines of a function or class, decorators included; without a name, of the module."""
    source = (ROOT / file).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(source)
    for part in name.split(".") if name else ():
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [
            one for one in ast.iter_child_nodes(node) if isinstance(one, kinds) and one.name == part
        ]
        assert len(found) == 1, f"{file} has no {name}"
        (node,) = found
    if isinstance(node, ast.Module):
        return source.splitlines()
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    first = min(one.lineno for one in (node, *node.decorator_list))
    return dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno])).splitlines()


def stretches(lines: Sequence[str]) -> Iterator[list[str]]:
    """What stands between the lines `...`."""
    stretch: list[str] = []
    for line in [*lines, "..."]:
        if line.strip() != "...":
            stretch.append(line)
        elif stretch:
            yield stretch
            stretch = []


def missing(quoted: Sequence[str], source: Sequence[str]) -> str | None:
    """The first line that is quoted and does not stand where the quote has it."""
    begin = 0
    for stretch in stretches(quoted):
        longest = 0
        for start in range(begin, len(source)):
            pairs = zip(stretch, source[start:], strict=False)
            equal = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            equal = min(len(stretch), len(source) - start) if equal is None else equal
            longest = max(longest, equal)
            if equal == len(stretch):
                begin = start + equal
                break
        else:
            return stretch[longest]
    return None


@pytest.mark.parametrize(("page", "match"), QUOTES)
def test_a_quote_is_what_stands_in_the_source(page: str, match: re.Match[str]):
    line = missing(match["text"].splitlines(), lines_of(match["file"], match["name"]))
    marker = match[0].splitlines()[0]
    told = f"docs/{page}: {line!r} of the quote {marker} does not stand there so; correct the page"
    assert line is None, told


def test_every_block_of_python_in_the_tour_is_a_quote():
    text = PAGES["tour.md"]
    assert len(MARKED.findall(text)) == text.count("```python") >= 14


SOURCE = ["def f(x):", '    """Add."""', "    y = x + 1", "    y = x + 1", "    return y"]


@pytest.mark.parametrize(
    ("quoted", "line"),
    [
        (SOURCE, None),
        (["def f(x):", "    ...", "    y = x + 1", "    return y"], None),
        (["def f(x):", "    ...", "    y = x + 2", "    return y"], "    y = x + 2"),  # changed
        (["def f(x):", "    y = x + 1"], "    y = x + 1"),  # lines left out in silence
        (["    return y", "...", "def f(x):"], "def f(x):"),  # in another order
        ([*SOURCE, "    return x"], "    return x"),  # beyond the end
    ],
)
def test_a_change_is_found(quoted: list[str], line: str | None):
    assert missing(quoted, SOURCE) == line


def test_a_name_that_is_gone_is_found():
    with pytest.raises(AssertionError, match=r"decoder.py has no Attention.backward"):
        lines_of("minimind/model/decoder.py", "Attention.backward")
