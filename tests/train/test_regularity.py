"""What follows from what stands before it: pages of this project, digits by chance, mixed words."""

from __future__ import annotations

import base64
import random
import re
from pydoc_data.topics import topics

import pytest

from minimind.train.regularity import share_of_chance, word_order
from tests.conftest import ROOT

DRAW = random.Random(1)
PAGES = {
    language: "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob(pages)))
    for language, pages in {"English": "[a-m]*[!h].md", "Chinese": "*_zh.md"}.items()
}
PAGES["python"] = "".join(
    path.read_text("utf-8") for path in sorted((ROOT / "minimind").glob("data/*/*.py"))
)
BY_CHANCE = {
    "hexadecimal": lambda: DRAW.randbytes(300).hex(),
    "base64": lambda: base64.b64encode(DRAW.randbytes(450)).decode(),
    "bases": lambda: "".join(DRAW.choices("ACGT", k=600)),
    "numbers": lambda: ",".join(str(DRAW.randrange(10**6)) for _ in range(90)),
}


def parts(text: str, size: int = 600) -> list[str]:
    return [text[n : n + size] for n in range(0, len(text), size)][:1000]


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_regular(name: str):
    share = share_of_chance(parts(PAGES[name]))
    assert share is not None
    assert share < 0.15


@pytest.mark.parametrize("kind", BY_CHANCE)
def test_text_by_chance_is_told_from_what_stands_beside_it(kind: str):
    page = parts("\n".join(topics[name] for name in sorted(topics)))[:100]  # of Python's help
    drawn = [BY_CHANCE[kind]() for _ in page]
    share = share_of_chance([text for pair in zip(page, drawn, strict=True) for text in pair])
    sizes = [sum(len(text.encode()) for text in texts) for texts in (page, drawn)]
    # Digits of 64 kinds make pairs of letters rarer, so that some of the page seems by chance too.
    assert share == pytest.approx(sizes[1] / sum(sizes), abs=0.12)


def test_a_few_pieces_say_nothing():
    assert share_of_chance(["abcdefgh" * 100]) is None
    assert share_of_chance([]) is None
    assert word_order([]) == (0.0, 0)


@pytest.mark.parametrize("name", ["English", "Chinese"])
def test_the_order_of_words(name: str):
    """Characters of Chinese are its words."""
    text = PAGES[name]
    bits, pairs = word_order(parts(text))
    assert pairs > 1000
    assert bits > 0.3
    lines = []
    for line in text.splitlines():
        words = re.findall(r"[\u3040-\u9fff]|[A-Za-z]+", line)
        DRAW.shuffle(words)
        lines.append(" ".join(words))
    bits, pairs = word_order(["\n".join(lines)])
    assert pairs > 1000
    assert abs(bits) < 0.1


def test_lists_of_words_have_no_order():
    words = "alpha beta gamma delta epsilon zeta eta theta iota kappa".split()
    bits, pairs = word_order([" ".join(DRAW.choices(words, k=3000))])
    assert pairs == 2999
    assert abs(bits) < 0.03
