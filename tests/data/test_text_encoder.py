"""Words that are looked up against the same texts merged: ids, threads, models that forbid it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import sentencepiece

from minimind.data import text_encoder
from minimind.data.tokenizer import Tokenizer, train_tokenizer
from minimind.errors import DataError
from tests.data.test_tokenizer import AWKWARD, fuzz, prose, verse


@pytest.fixture(scope="module", params=[512, 4096])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(prose(1) + verse(1), request.param, path)
    return path


@pytest.fixture
def looked_up(monkeypatch):
    """What is asked of the table, of every text."""
    asked = []
    of = text_encoder.WordIds.of

    def recorded(words, parts):
        asked.extend(parts)
        return of(words, parts)

    monkeypatch.setattr(text_encoder.WordIds, "of", recorded)
    monkeypatch.setattr(text_encoder, "SPACED", 10**9)
    return asked


def texts_of(seed):
    draw = random.Random(seed)
    texts = [*prose(seed, 20), *verse(seed, 5), *AWKWARD, *fuzz(seed, 200)]
    texts += ["".join(draw.choices(texts, k=30)) for _ in range(10)]
    spaced = [text.replace("e", " ").replace("a", "  ") for text in texts]
    return [text for text in texts + spaced if text]


@pytest.mark.parametrize("kept", [0, 500, 2**20])
def test_ids_of_words_one_after_another_are_those_of_the_text(model, looked_up, monkeypatch, kept):
    monkeypatch.setattr(text_encoder, "KEPT_CHARACTERS", kept)
    tokenizer = Tokenizer(model)
    for seed in range(3):
        texts = texts_of(seed)
        found = [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)]
        assert found == tokenizer.encode_batch(texts, threads=1)
    assert len(looked_up) > 500


def test_threads_that_share_a_table_give_the_ids_of_one(model, looked_up, monkeypatch):
    monkeypatch.setattr(text_encoder, "KEPT_CHARACTERS", 1000)
    tokenizer = Tokenizer(model)
    batches = [texts_of(seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda texts: tokenizer.encode_arrays(texts, threads=1), batches))
    for texts, arrays in zip(batches, found, strict=True):
        assert [ids.tolist() for ids in arrays] == tokenizer.encode_batch(texts, threads=1)
    assert looked_up


def test_what_another_thread_holds_is_merged_and_one_text_by_many_threads_too(model, looked_up):
    tokenizer = Tokenizer(model)
    texts = prose(3, 5)
    with tokenizer._encoder._lock:
        merged = tokenizer.encode_arrays(texts, threads=1)
    assert not looked_up
    assert [ids.tolist() for ids in merged] == tokenizer.encode_batch(texts, threads=1)
    tokenizer.encode_arrays(texts, threads=2)
    assert not looked_up
    tokenizer.encode_arrays(texts, threads=1)
    assert looked_up


def test_half_a_character_is_told_and_the_table_is_free_again(model, looked_up):
    tokenizer = Tokenizer(model)
    with pytest.raises(DataError, match="half a surrogate pair at character 4"):
        tokenizer.encode_arrays(["a b \ud800"], threads=1)
    assert not tokenizer._encoder._lock.locked()


def test_a_text_with_few_spaces_is_not_taken_apart(model, looked_up, monkeypatch):
    monkeypatch.setattr(text_encoder, "SPACED", 12)
    Tokenizer(model).encode_arrays(["一二三四五六七八九十一 二", "one two"], threads=1)
    assert looked_up == ["one two"]


def test_a_model_with_spaces_inside_its_pieces_is_given_whole_texts(tmp_path, looked_up):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["of the of the in the", "in the of the rain"] * 50),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        split_by_whitespace=False,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = Tokenizer(tmp_path / "tokenizer.model")
    assert any(b"e o" in piece.content for piece in tokenizer.pieces())
    texts = ["in the of the of the rain", "of the"]
    found = [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)]
    assert found == tokenizer.encode_batch(texts, threads=1)
    assert tokenizer._encoder.joined is not None
    assert not looked_up
