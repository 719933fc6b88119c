"""The docs as pages and as a site: links, anchors, flags, the nav, and what is built of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.docs.pages import (
    DOCS,
    FLAG,
    PAGES,
    anchors,
    flags_of_launchers,
    flags_of_ours,
    in_nav,
    links,
    prose,
    rows,
    site,
)

# Flags of programs whose sources are not read, each shown by a page.
THEIRS = {
    *("nodes", "gpus_per_node", "gpus_per_task"),  # sbatch, srun
    *("ipc", "shm_size", "file", "rm", "tag", "volume"),  # docker, podman
    *("model_args", "include_path", "tasks", "apply_chat_template"),  # lm_eval
    *("port", "jinja"),  # transformers serve, llama-server
    *("max_model_len", "deps", "long"),  # vllm, pip, pytest
}
MISTAKES = {"batch_sise"}
BLOCK = re.compile(r"(- |\d+\. |\|)")  # what begins an item of a list, or a row


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_anchor_of_a_page_is_there(page: str):
    twice = [name for name, count in Counter(anchors(PAGES[page])).items() if count > 1]
    assert twice == []
    for link in links(PAGES[page]):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        assert ".." not in path, f"{link}: the site has docs/ alone"
        assert not path or (DOCS / path).is_file(), link
        assert not anchor or anchor in anchors(PAGES[path or page]), link


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reads_the_same_on_github_and_on_the_site(page: str):
    """Python-Markdown takes a list or table right behind text for text, and one indented by 2."""
    for before, line in pairwise(["", *prose(PAGES[page])]):
        if BLOCK.match(line) and before and not before.startswith(" "):
            assert BLOCK.match(before), line
        assert not re.match(r" {1,3}(- |\d+\. )", line), line


def test_every_page_is_in_the_nav():
    assert sorted(in_nav(site()["nav"])) == sorted(PAGES)


def test_all_that_is_broken_is_an_error_and_no_plugin_needs_a_network():
    config = site()
    assert {*config["validation"]["nav"].values(), *config["validation"]["links"].values()} == {
        "warn"
    }
    assert config["theme"]["font"] is False
    plugins = [next(iter(one)) if isinstance(one, dict) else one for one in config["plugins"]]
    assert plugins == ["search"]


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_named_exists(page: str):
    text = PAGES[page]
    if page == "coming_from.md":  # whose left columns have the flags of others
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    named = {name.replace("-", "_") for name in FLAG.findall(text)}
    assert named - flags_of_ours() - flags_of_launchers() - THEIRS - MISTAKES == set()


def test_no_flag_of_others_is_excused_that_no_page_shows():
    named = {name.replace("-", "_") for text in PAGES.values() for name in FLAG.findall(text)}
    assert (THEIRS | MISTAKES) - named == set()


def test_what_is_called_a_field_of_the_trainer_is_one():
    spec = find_spec("transformers")
    assert spec
    source = (Path(str(spec.origin)).parent / "training_args.py").read_text(encoding="utf-8")
    kinds = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    (kind,) = (node for node in kinds if node.name == "TrainingArguments")
    targets = [node.target for node in kind.body if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in targets if isinstance(target, ast.Name)}
    table = rows(PAGES["coming_from.md"], "## From the Trainer of transformers")
    named = {name for cells in table for name in re.findall(r"`(\w+)`", cells[0])}
    assert len(named) >= 30
    assert named - fields == set()  # which lies in accelerator_config


@pytest.mark.parametrize("name", ["install", "index", "tutorial", "faq", "troubleshooting"])
def test_both_languages_have_the_same_parts_flags_and_links(name: str):
    texts = [PAGES[f"{name}.md"], PAGES[f"{name}_zh.md"]]
    for pattern in (r"^## ", r"`(--[a-z_-]+)", r"\]\(([a-z_]+)\.md", r"^\|", r"^- ", r"^\d\. "):
        counted = []
        for text in texts:
            found = re.findall(pattern, text, re.MULTILINE)
            counted.append(Counter(word.removesuffix("_zh") for word in found))
        assert counted[0] == counted[1], pattern


def test_the_site_is_built_strictly_and_loads_nothing_from_a_network(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.html")}
    assert {page.replace(".md", ".html") for page in PAGES} <= set(pages)
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*?\ssrc="?([^" >]+)', text)
        for link in re.findall(r"<link\b[^>]*>", text):
            if not re.search(r'rel="?(?:next|prev|canonical)', link):
                loaded += re.findall(r'href="?([^" >]+)', link)
        assert len(loaded) > 2, name
        assert [place for place in loaded if re.match(r"(https?:)?//", place)] == [], name
