"""A fact that several pages tell is the same on each, and that of the program or of one file."""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from minimind.architecture.plan import Machine, plan
from minimind.architecture.shape import shape_of
from minimind.config.flags import FLAGS
from minimind.config.parse import parse_flags
from tests.conftest import ROOT
from tests.docs.pages import PAGES, blocks, rows

GIB = 2**30
OTHERS = ("README.md", "README_zh.md", "CONTRIBUTING.md", "examples/README.md", "Makefile")
# The text of every page in paragraphs, each on one line.
TEXTS = {
    name: [re.sub(r"\s+", " ", part) for part in text.split("\n\n")]
    for name, text in {
        **PAGES,
        **{name: (ROOT / name).read_text(encoding="utf-8") for name in OTHERS},
    }.items()
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PRESETS = ("tiny", "26m", "64m", "104m", "0.4b")


def parameters(*flags: str) -> int:
    return shape_of(parse_flags(flags)).parameters


def in_readme(pattern: str) -> Callable[[], str]:
    """What the README has in the place of the group."""

    def found() -> str:
        (value,) = {match for part in TEXTS["README.md"] for match in re.findall(pattern, part)}
        return value

    return found


def of_the_sample() -> tuple[str, str]:
    """The parameters of `make train`, in millions, and its steps."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    flags = re.search(r"run_accelerate\.sh (--config \w+ --model \w+) ", makefile)
    steps = re.search(r"^STEPS \?= (\d+)$", makefile, re.MULTILINE)
    assert flags
    assert steps
    return f"{parameters(*flags[1].split()) / 1e6:.1f}", steps[1]


def versions(name: str) -> dict[str, str]:
    """The versions that a file of constraints has, by package."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


BITS = r"validation (\d\.\d{3}) bits per byte, better than the trigram"
BAND = r"tiny-strong \((\d\.\d{3} to \d\.\d{3})"
FLOORS = r"better than the (trigram \(\d.+? unigram \(\d\.\d{3}\))"
LOSS = r"validation loss (\d\.\d+)"


def in_picture() -> list[str]:
    """The lines of the terminal of `make train` as its picture has them."""
    picture = (ROOT / "docs" / "images" / "make_train.svg").read_text(encoding="utf-8")
    return [html.unescape(line) for line in re.findall(r">([^<>]+)</text>", picture)]


def last_loss() -> str:
    """The loss at the end of the sample."""
    last = [re.match(rf"step {of_the_sample()[1]}/\d+ +loss (\d\.\d+)", s) for s in in_picture()]
    (loss,) = [match[1] for match in last if match]
    return f"{float(loss):.1f}"


@dataclass(frozen=True)
class Fact:
    """What matches `pattern` in a paragraph about a subject is `truth`, and these pages have it."""

    pattern: str
    truth: Callable[[], object]
    pages: tuple[str, ...]
    about: str = ""  # a pattern, too


SAMPLE = ("README_zh.md", "report.md", "faq.md", "faq_zh.md")
FACTS = {
    "size and steps of the sample": Fact(
        r"([\d.]+)M (?:parameters, |参数，)(\d+) (?:steps|步)",
        of_the_sample,
        ("index.md", "index_zh.md"),
        "`--config strong`",
    ),
    "bits per byte of the sample": Fact(
        BITS,
        in_readme(BITS),
        SAMPLE,
        r"^(?!.*step 120/)",  # which is the tutorial
    ),
    "its bits per byte in a comparison": Fact(
        r"`strong` ends at (\d\.\d{3}) and random weights", in_readme(BITS), ("measurements.md",)
    ),
    "band of the sample": Fact(BAND, in_readme(BAND), SAMPLE),
    "floors of the sample": Fact(FLOORS, in_readme(FLOORS), SAMPLE),
    "loss of held-out text": Fact(
        r"(3\.\d\d) on held-out text|held-out text to (\d\.\d\d)"
        r"|留出文本(?:上接近|的损失降到) (\d\.\d\d)",
        lambda: f"{float(in_readme(LOSS)()):.2f}",
        ("index.md", "index_zh.md", "troubleshooting.md", "troubleshooting_zh.md"),
    ),
    "last loss of the sample": Fact(
        r"ends near a loss of (\d\.\d)|to about (\d\.\d), the loss"
        r"|降到 (\d\.\d) 左右|最后接近 (\d\.\d)",
        last_loss,
        ("index.md", "index_zh.md", "troubleshooting.md", "troubleshooting_zh.md"),
    ),
    "minutes of make train": Fact(
        r"(\d+) (?:to|到) (\d+) (?:minutes|分钟)",
        lambda: ("3", "8"),
        ("README.md", "README_zh.md", "index.md", "index_zh.md", "faq.md", "faq_zh.md", "Makefile"),
        "make train|^train: ",
    ),
    "minutes of make test": Fact(
        r"make test +#[^#]*? (\d+) (?:minutes|分钟)",
        in_readme(r"make test +# at most (\d+) minutes"),
        ("README.md", "README_zh.md"),
    ),
    "what is trained": Fact(
        r"(\d+M) (?:to|到) (\d+B) (?:parameters|参数)",
        lambda: re.findall(r"(\d+M) to (\d+B) parameters", PYPROJECT["description"])[0],
        ("README.md", "README_zh.md"),
    ),
    "oldest Python": Fact(
        r"Python >= ([\d.]+)",
        lambda: PYPROJECT["requires-python"].removeprefix(">="),
        ("README.md", "README_zh.md"),
    ),
    "DeepSpeed": Fact(
        r"[dD]eep[sS]peed (\d+\.\d+\.\d+)",
        lambda: versions("constraints.txt")["deepspeed"],
        ("install.md", "install_zh.md", "memory.md"),
    ),
    "Accelerate": Fact(
        r"[aA]ccelerate (\d+\.\d+\.\d+)",
        lambda: versions("constraints.txt")["accelerate"],
        ("install.md", "install_zh.md"),
    ),
    "number of flags": Fact(r"\b(\d{3}) flags\b", lambda: str(len(FLAGS)), ()),
}


@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_a_fact_is_the_same_on_every_page(fact: Fact):
    told: dict[str, set[object]] = {}
    for name, parts in TEXTS.items():
        for match in (
            m for p in parts if re.search(fact.about, p) for m in re.finditer(fact.pattern, p)
        ):
            groups = [group for group in match.groups() if group]
            told.setdefault(name, set()).add(tuple(groups) if len(groups) > 1 else groups[0])
    truth = fact.truth()
    assert {name: values for name, values in told.items() if values != {truth}} == {}, truth
    assert set(fact.pages) - set(told) == set()


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_the_last_lines_of_the_sample_are_those_of_its_picture(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    (shown,) = [block for block in blocks(text) if block.startswith("step ")]
    assert [line.strip() for line in shown.splitlines() if line.strip() not in in_picture()] == []


def test_the_size_of_a_preset_is_that_of_its_shape():
    whole, rounded = [], []
    for parts in TEXTS.values():
        for part in parts:
            whole += re.findall(r"(tiny|26m|64m|104m|0\.4b)`?,? \(?([\d,]{9,}) parameters", part)
            rounded += re.findall(r"\| `(tiny|26m|64m|104m|0\.4b)` \| ([\d.]+)M \|", part)
    assert len(rounded) >= 2 * len(PRESETS)
    for preset, number in whole:
        sizes = [parameters("--model", preset, *more) for more in ((), ("--config", "strong"))]
        assert int(number.replace(",", "")) in sizes
    for preset, number in rounded:
        digits = len(number.partition(".")[2])
        assert number == f"{parameters('--model', preset) / 1e6:.{digits}f}"


@pytest.mark.parametrize(("page", "heading"), [("faq.md", "my GPU?"), ("faq_zh.md", "我的 GPU ")])
def test_the_memory_of_a_preset_is_that_of_the_plan(page: str, heading: str):
    table = rows(PAGES[page], heading)
    assert [cells[0].strip("`") for cells in table] == list(PRESETS)
    for preset, (_, _, memory, tokens) in zip(PRESETS, table, strict=True):
        told = plan(["--model", preset], Machine(gpus=1, memory=24 * GIB))
        needed = re.search(r"Recommended: no DeepSpeed.*: ([\d.]+) of", told)
        assert needed
        assert memory == f"{float(needed[1]):.1f} GiB"
        billions = 20 * parameters("--model", preset) / 1e9
        number, unit = re.findall(r"([\d.]+) (billion|亿)", tokens)[0]
        scale = 1 if unit == "billion" else 10
        assert float(number) == pytest.approx(scale * billions, rel=0.06)


@pytest.mark.parametrize("page", ["install.md", "install_zh.md"])
def test_the_versions_of_the_page_are_those_of_the_files(page: str):
    text = re.sub(r"\s+", " ", PAGES[page])
    tested = versions("constraints.txt")
    named = re.findall(r"\b(torch|transformers|accelerate|deepspeed) (\d+\.\d+\.\d+)", text)
    assert {name: tested[name] for name, _ in named} == dict(named)
    assert len(named) == 4
    assert f"'torch=={tested['torch']}'" in text
    oldest, newest = versions("constraints-oldest.txt"), versions("constraints-newest.txt")
    bounds = re.findall(r"\b(torch|transformers) (\d+\.\d+) (?:to|到) (\d+\.\d+)", text)
    assert len(bounds) == 2
    for name, first, last in bounds:
        assert oldest[name].startswith(f"{first}.")
        assert newest[name].startswith(f"{last}.")
    classified = re.findall(r"Python :: (3\.\d+)", "\n".join(PYPROJECT["classifiers"]))
    assert set(re.findall(r"\b3\.\d\d\b", text.partition("## ")[0])) == set(classified)


@pytest.mark.parametrize(
    ("page", "heading"), [("install.md", "## Extras"), ("install_zh.md", "## 可选依赖")]
)
def test_every_extra_has_a_row(page: str, heading: str):
    table = rows(PAGES[page], heading)
    named = [name for cells in table for name in re.findall(r"`(\w+)`", cells[0])]
    assert sorted(named) == sorted(PYPROJECT["optional-dependencies"])
