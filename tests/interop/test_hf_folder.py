"""Files for AutoTokenizer: from every model type the ids that the model was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.interop.hf_folder import transformers_files
from minimind.interop.job import Job
from tests.conftest import sentences
from tests.data.tokenizer.test_hf_tokenizer import END, byte_level

PLAIN = ("Hello, world!", " a  b\n", "春眠不覺曉。", "🙂👩‍👧 ▁ x", "1234 5")
TEXTS = [*PLAIN, *sentences(11, 200)]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.model that was learnt here."""
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    train_tokenizer([*sentences(3, 80), *PLAIN], 600, path)
    return path


def written(folder: Path, model_type: str, tokenizer: Tokenizer) -> tuple[Path, str | None]:
    """The small files of a model of that type, and the note on them."""
    config = AutoConfig.for_model(model_type)
    files, note = transformers_files(Job("", model_type, config, tokenizer, "bfloat16"))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder, note


def ids_of(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mistral", "gemma2", "phi3"])
def test_auto_tokenizer_gives_the_ids_of_a_sentencepiece_model(kind, pieces, tmp_path):
    ours = load_tokenizer(pieces)
    folder, note = written(tmp_path, kind, ours)
    assert note is None
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids_of(theirs) == [ours.encode(text) for text in TEXTS]
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    values = json.loads((folder / "generation_config.json").read_text())
    assert values["eos_token_id"] == AutoConfig.from_pretrained(folder).eos_token_id == ours.eos_id


def test_texts_longer_than_a_row_of_the_model_give_no_warning(pieces, tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", told.append)
    ours, config = load_tokenizer(pieces), AutoConfig.for_model("llama", max_position_embeddings=8)
    files, _ = transformers_files(Job("", "llama", config, ours, "bfloat16"))
    assert json.loads(files["tokenizer_config.json"])["model_max_length"] == 8
    assert not told


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_5_text"])
def test_note_for_a_model_type_whose_class_rebuilds_the_tokenizer(kind, pieces, tmp_path):
    ours = load_tokenizer(pieces)
    folder, note = written(tmp_path, kind, ours)
    theirs = AutoTokenizer.from_pretrained(folder)
    is_right = ids_of(theirs) == [ours.encode(text) for text in TEXTS]
    assert is_right == (note is None)
    if note:
        assert f"loads it as {type(theirs).__name__}, with other ids for " in note
        assert note.endswith("; load it with PreTrainedTokenizerFast.from_pretrained")
    right = PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids_of(right) == [ours.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    "more",
    [
        None,
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "LlamaTokenizer"},
        {"tokenizer_class": "T5TokenizerFast"},
        {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}},
    ],
)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_tokenizer_json_keeps_its_ids_for_any_declared_class(kind, more, tmp_path):
    given = tmp_path / "given"
    byte_level(given)
    if more is not None:
        (given / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **more}))
    ours = load_tokenizer(given)
    (tmp_path / "out").mkdir()
    folder, note = written(tmp_path / "out", kind, ours)
    assert note is None
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids_of(theirs) == [ours.encode(text) for text in TEXTS]
    assert theirs.eos_token_id == ours.eos_id


def test_note_for_a_sentencepiece_model_without_an_equal_tokenizer_json(tmp_path):
    """Unigram pieces: of the file alone a Qwen3 model's class makes empty ids."""
    import sentencepiece

    spm: Any = sentencepiece.SentencePieceTrainer
    spm.train(
        **{"sentence_iterator": iter(sentences(3, 80)), "model_type": "unigram"},
        **{"model_prefix": str(tmp_path / "tokenizer"), "vocab_size": 60, "minloglevel": 2},
        **{"hard_vocab_limit": False},
    )
    ours = load_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "out").mkdir()
    folder, note = written(tmp_path / "out", "qwen3", ours)
    assert not (folder / "tokenizer.json").exists()
    assert note
    assert note.startswith("AutoTokenizer of transformers 5")
    assert note.endswith("; tokenize with minimind, or train with another tokenizer")
