"""Every kind of folder with a tokenizer and a template against transformers; see `wall`."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.vocabulary import write_tokenizer
from minimind.errors import DataError
from tests.data.chat.folders import KINDS, LLAMA, write
from tools.chat_masks import CONVERSATIONS, PLAIN, TEMPLATES, TEXTS, Cell, text_wall, wall

# What a refusal may say; each is true of the cells that it is said of.
SENTENCES = (
    "a special token of the tokenizer, which could forge a turn",
    "a token of the tokenizer, which could forge a turn",
    'turn 2: "content" is empty',
    "drops characters that it has no piece for",
    "finds special tokens that the template did not write, such as '<",
    "(UndefinedError: 'bos_token' is undefined)",
    "tokenizer.json: has no token '[PAD]', the pad_token of the files beside it",
)


def require_none_different(found: Mapping[tuple[str, ...], Cell]) -> Counter[str]:
    for where, cell in found.items():
        assert cell.outcome != "different", (where, cell.what)
        if cell.outcome == "refused":
            assert any(sentence in cell.what for sentence in SENTENCES), (where, cell.what)
    return Counter(cell.outcome for cell in found.values())


def test_a_sample_of_the_wall():
    names = [*TEMPLATES]
    found = {}
    for at, kind in enumerate([*KINDS][::5]):
        found |= wall([kind], [names[at % len(names)]])
    outcomes = require_none_different(found)
    assert outcomes["equal"] > outcomes.total() / 2


def test_texts_of_every_kind_have_the_ids_of_autotokenizer():
    outcomes = require_none_different(text_wall([*KINDS][1::2]))
    assert outcomes["equal"] > 0.9 * outcomes.total()


@pytest.mark.long
def test_the_whole_wall():
    assert len(KINDS) >= 40
    assert len(TEMPLATES) >= 6
    assert len(CONVERSATIONS) >= 5
    outcomes = require_none_different(wall(KINDS, TEMPLATES))
    assert outcomes["equal"] > outcomes.total() / 2
    texts = require_none_different(text_wall(KINDS))
    assert texts["equal"] > 0.95 * len(KINDS) * len(TEXTS)


TYPES = ("qwen2", "mistral", "gpt2", "llama", "minimind")


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_of_a_folder_has_its_ids_beside_any_model(kind: str, tmp_path: Path):
    """As in a step of a run, or in an export; a file alone too, by another name."""
    folder = write(tmp_path / "given", kind, PLAIN["zephyr"])
    places = [folder]
    for name in ("tokenizer.model", "tokenizer.json"):
        if (folder / name).exists():
            places.append(folder / f"own{Path(name).suffix}")
            shutil.copy(folder / name, places[-1])
    for place in places:
        try:
            given = load_tokenizer(place)
        except DataError:
            assert kind == "a pad token that the json lacks"
            continue
        for number, files in enumerate((given.files(), given.exported)):
            out = tmp_path / f"{place.name}-{number}"
            write_tokenizer(out, files)
            for model_type in TYPES:
                (out / "config.json").write_text(json.dumps({"model_type": model_type}))
                again = load_tokenizer(out)
                where = (kind, place.name, number, model_type)
                assert [*map(again.encode, TEXTS)] == [*map(given.encode, TEXTS)], where
                assert again.special_tokens() == given.special_tokens(), where


def test_the_legacy_of_a_folder_is_followed(tmp_path: Path):
    """The same model: with and without a space after a special token."""
    kinds = ("control tags", "control tags, legacy")
    folders = [write(tmp_path / kind, kind, PLAIN["chatml"]) for kind in kinds]
    ids: list[Any] = [load_tokenizer(folder) for folder in folders]
    text = "<|im_start|>user"
    one, other = (tokenizer.encode_written(text)[0].tolist() for tokenizer in ids)
    assert one != other
    theirs = [AutoTokenizer.from_pretrained(folder) for folder in folders]
    assert [one, other] == [one_.encode(text, add_special_tokens=False) for one_ in theirs]


def test_code_of_a_folder_is_not_run(tmp_path: Path):
    """A tokenizer.json is then read as it is; a SentencePiece model is refused."""
    ways = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    for kind in ("llama", "metaspace always"):
        folder = write(tmp_path / kind, kind, PLAIN["chatml"])
        (folder / "tokenizer_config.json").write_text(json.dumps({**LLAMA, **ways}))
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    words = (
        r"llama: AutoTokenizer of transformers, .* cannot read the tokenizer \(.*; copy the file"
    )
    with pytest.raises(DataError, match=words):
        load_tokenizer(tmp_path / "llama")
    assert load_tokenizer(tmp_path / "metaspace always").encode("a")
    shutil.copy(tmp_path / "llama" / "tokenizer.model", tmp_path / "alone.model")
    assert load_tokenizer(tmp_path / "alone.model").encode("a")
    assert not (tmp_path / "ran").exists()
