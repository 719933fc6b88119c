"""The vocabulary of byte-level BPE in GGUF; tests/examples/test_other_servers.py asks llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import UsageError
from minimind.interop.gguf import CONTROL, NORMAL, SPLITS, UNUSED, USER_DEFINED, gguf_vocabulary
from tests.conftest import sentences
from tests.interop.byte_level import SPECIAL, THOUGHT, write_tokenizer


@pytest.fixture(scope="module", params=SPLITS.values())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("byte_level") / request.param
    write_tokenizer(place, request.param, sentences(1, 100))
    return place


def test_each_row_has_its_token_and_merges_have_their_order(folder: Path):
    tokenizer: Any = load_tokenizer(folder)
    rows = tokenizer.vocab_size + 3
    found = gguf_vocabulary(tokenizer, rows)
    assert (found["model"], found["pre"]) == ("gpt2", folder.name)
    names = [tokenizer.piece_name(i) for i in range(tokenizer.vocab_size)]
    assert found["tokens"] == [*names, *(f"[PAD{i}]" for i in range(rows - 3, rows))]
    types = [NORMAL] * (rows - 4)
    types[:3] = [CONTROL] * len(SPECIAL)
    assert found["tokens"][rows - 4] == THOUGHT
    assert found["token_type"] == [*types, USER_DEFINED, UNUSED, UNUSED, UNUSED]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert found["merges"] == [" ".join(pair) for pair in merges]
    assert (found["bos_token_id"], found["eos_token_id"], found["padding_token_id"]) == (0, 0, 0)
    assert [found["add_bos_token"], found["add_eos_token"]] == [False, False]


def step(values: dict[str, Any], number: int) -> dict[str, Any]:
    first = values["pre_tokenizer"]
    return first["pretokenizers"][number] if first["type"] == "Sequence" else first


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another expression": lambda v: step(v, 0)["pattern"].update(Regex=r"\w+"),
    "a literal": lambda v: step(v, 0).update(pattern={"String": " "}),
    "what is between": lambda v: step(v, 0).update(invert=True),
    "words removed": lambda v: step(v, 0).update(behavior="Removed"),
    "split twice": lambda v: step(v, 1).update(use_regex=True),
    "a space in front": lambda v: step(v, 1).update(add_prefix_space=True),
    "three steps": lambda v: v["pre_tokenizer"]["pretokenizers"].insert(0, dict(step(v, 0))),
    "punctuation": lambda v: step(v, 0).update(type="Punctuation"),
    "no splits": lambda v: v.update(pre_tokenizer=None),
    "lower case": lambda v: v.update(normalizer={"type": "Lowercase"}),
    "whole words": lambda v: v["model"].update(ignore_merges=True),
    "an end of words": lambda v: v["model"].update(end_of_word_suffix="</w>"),
    "dropout": lambda v: v["model"].update(dropout=0.1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_llama_cpp_would_split_otherwise_is_refused(change: str, tmp_path: Path):
    write_tokenizer(tmp_path, "qwen2", sentences(1, 20))
    tokenizer = load_tokenizer(tmp_path)
    gguf_vocabulary(tokenizer, tokenizer.vocab_size)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    CHANGES[change](values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match="gguf has no name for how it splits a text; export"):
        gguf_vocabulary(load_tokenizer(tmp_path), tokenizer.vocab_size)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "smollm"])
def test_composition_is_known_with_the_split_of_qwen2_alone(name: str, tmp_path: Path):
    write_tokenizer(tmp_path, name, sentences(1, 20))
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**values, "normalizer": {"type": "NFC"}}))
    with pytest.raises(UsageError, match="gguf has no name"):
        gguf_vocabulary(load_tokenizer(tmp_path), 1000)
