"""The pages of docs/ as text: their headings as anchors, their links, tables, blocks and flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from minimind.cli.main import build_parser
from minimind.config.run_config import FLAGS
from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--(?:no-)?([a-z][a-z_0-9-]*)(?![\w-])")
LAUNCHERS = {
    "accelerate": "commands/launch.py",
    "torch": "distributed/run.py",
    "deepspeed": "launcher/runner.py",
}  # the file of each package that has its launcher's flags


def prose(text: str) -> list[str]:
    """The lines that stand in no block of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()


def anchors(text: str) -> list[str]:
    """The anchor of each heading, in order, as GitHub and the site both make it."""
    titles = [re.sub(r"^#+ ", "", line) for line in prose(text) if re.match(r"#+ ", line)]
    kept = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    unlike = [title for title in kept if re.search(r"[\s-]{2}", title)]
    assert not unlike, "GitHub has a dash for each space, the site one for all"
    return [re.sub(r"\s", "-", title) for title in kept]


def links(text: str) -> list[str]:
    """Where the links of a page lead."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", "\n".join(prose(text))))


def rows(text: str, after: str) -> list[list[str]]:
    """The cells of the first table behind `after`, without its head."""
    assert text.count(after) == 1, after
    table = next(b for b in text.split(after)[1].split("\n\n") if b.startswith("|"))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def blocks(text: str) -> list[str]:
    """What stands in the blocks of code."""
    return re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def flags_of_ours() -> set[str]:
    """Every flag of training, of each subcommand, and of the scripts of this project."""
    found = {*FLAGS, "help", *_options(build_parser())}
    files = [ROOT / "tools" / "gpu" / "__main__.py"]
    for folder in ("benchmarks", "examples", "scripts"):
        files += (ROOT / folder).glob("*.py")
    for path in files:
        found |= set(re.findall(r'"--([a-z_-]+)"', path.read_text(encoding="utf-8")))
    return {name.replace("-", "_") for name in found}


def flags_of_launchers() -> set[str]:
    """Those of `accelerate launch`, torchrun and deepspeed, read in the installed sources."""
    found: set[str] = set()
    for package, file in LAUNCHERS.items():
        spec = find_spec(package)
        assert spec
        source = (Path(str(spec.origin)).parent / file).read_text(encoding="utf-8")
        found |= set(re.findall(r"""["']--([a-z_-]+)["']""", source))
    return {name.replace("-", "_") for name in found}


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        for word in action.option_strings:
            yield word.removeprefix("--").removeprefix("no-")
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _options(below)


class _Loader(yaml.SafeLoader):
    """PyYAML's; what names something of Python's is read as that name."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, name, node: name)


def site() -> dict[str, Any]:
    """What mkdocs.yml says."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)


def in_nav(entry: Any) -> Iterator[str]:
    """The pages of a nav, in order."""
    if isinstance(entry, str):
        yield entry
    else:
        for below in entry.values() if isinstance(entry, dict) else entry:
            yield from in_nav(below)
