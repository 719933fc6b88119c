"""Words that are looked up against the same texts merged: ids, threads, models that forbid it."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.tokenizer import sentencepiece as text_encoder
from minimind.data.tokenizer.sentencepiece import Tokenizer, train_tokenizer
from minimind.errors import DataError
from tests.data.tokenizer.test_tokenizer import AWKWARD, fuzz, prose, verse


@pytest.fixture(scope="module", params=[512, pytest.param(4096, marks=pytest.mark.long)])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(prose(1) + verse(1), request.param, path)
    return path


@pytest.fixture
def looked_up(monkeypatch):
    """Parts that are looked up: every text, however few of its words are cached."""
    parts_seen = []
    encode = text_encoder.WordCache.encode

    def recorded(words, parts):
        parts_seen.extend(parts)
        return encode(words, parts)

    monkeypatch.setattr(text_encoder.WordCache, "encode", recorded)
    monkeypatch.setattr(text_encoder, "MAX_CHARACTERS_PER_SPACE", 10**9)
    monkeypatch.setattr(text_encoder, "MIN_WORDS_PER_NEW", 1)
    return parts_seen


def texts_of(seed):
    draw = random.Random(seed)
    texts = [*prose(seed, 20), *verse(seed, 5), *AWKWARD, *fuzz(seed, 200)]
    texts += ["".join(draw.choices(texts, k=30)) for _ in range(10)]
    spaced = [text.replace("e", " ").replace("a", "  ") for text in texts]
    return [text for text in texts + spaced if text]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kept", [0, 9000, 2**23])
def test_ids_of_words_one_after_another_are_those_of_the_text(model, looked_up, monkeypatch, kept):
    monkeypatch.setattr(text_encoder, "CACHE_SIZE", kept)
    monkeypatch.setattr(text_encoder, "LOOKUP_CHARACTERS", 2000)
    tokenizer = Tokenizer(model)
    for seed in range(3):
        texts = texts_of(seed)
        found = [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)]
        assert found == tokenizer.encode_batch(texts, threads=1)
    assert len(looked_up) > 500


@pytest.mark.sample(2)
@pytest.mark.parametrize("more", [[], ["a\0b", "\0", "end\0"]], ids=["none", "NUL"])
@pytest.mark.parametrize("threads", [1, 2])
def test_short_texts_encoded_as_one_have_the_ids_of_each(model, monkeypatch, threads, more):
    monkeypatch.setattr(text_encoder, "MAX_CHARACTERS_PER_SPACE", 0)  # none is looked up
    tokenizer = Tokenizer(model)
    encoder = tokenizer._encoder
    texts = [text for text in texts_of(1) if "\0" not in text]
    texts += ["".join(prose(seed)) for seed in range(9)]
    texts += ["a" * 70_000, "", " ", "a", *more, *verse(2, 50), " a ", "\n"]
    short = sum(len(text) <= text_encoder.CHUNK_CHARACTERS for text in texts)
    assert 300 < short <= len(texts) - 10
    requested = []
    whole = encoder._whole

    def recorded(encode, texts, **options):
        requested.extend(texts)
        return whole(encode, texts, **options)

    monkeypatch.setattr(encoder, "_whole", recorded)
    found = [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads)]
    assert found == tokenizer.encode_batch(texts, threads=1)
    assert len(requested) == 1 + len(texts) - (0 if more else short)
    assert tokenizer.encode_arrays([], threads) == []


def test_threads_that_share_a_table_give_the_ids_of_one(model, looked_up, monkeypatch):
    monkeypatch.setattr(text_encoder, "CACHE_SIZE", 9000)
    monkeypatch.setattr(text_encoder, "LOOKUP_CHARACTERS", 500)
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
    with ThreadPoolExecutor(1) as pool, tokenizer._encoder._lock:
        merged = pool.submit(tokenizer.encode_arrays, texts, 1).result(timeout=60)
    assert not looked_up
    assert [ids.tolist() for ids in merged] == tokenizer.encode_batch(texts, threads=1)
    tokenizer.encode_arrays(texts, threads=2)
    assert not looked_up
    tokenizer.encode_arrays(texts, threads=1)
    assert looked_up


def test_a_table_is_bounded_and_does_not_learn_what_hardly_comes_again(model, monkeypatch):
    words = text_encoder.TextEncoder(Tokenizer(model)._processor)._words
    assert words is not None
    draw = random.Random(0)
    numbers = " ".join(str(draw.random()) for _ in range(1000))
    assert words.encode([numbers])[0].tolist() == Tokenizer(model).encode(numbers)
    assert not words._ids
    for seed in range(3):
        words.encode(["".join(prose(seed, 300))])
    assert 5000 < len(words._ids) < 7000  # 2,000 of each seed
    monkeypatch.setattr(text_encoder, "CACHE_SIZE", words._size + text_encoder.ENTRY_SIZE)
    words.encode(["".join(prose(2, 300))])
    assert len(words._ids) > 5000  # nothing new
    words.encode(["".join(prose(3, 300))])
    assert not words._ids


def test_a_tokenizer_can_be_copied_for_other_processes(model):
    tokenizer = Tokenizer(model)
    texts = prose(3, 5)
    expected = [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)]
    for other in (pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert [ids.tolist() for ids in other.encode_arrays(texts, threads=1)] == expected


def learn(folder, **rules):
    given = {
        "model_type": "bpe",
        "vocab_size": 285,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["of the of the in the", "in the of the rain."] * 50),
        model_prefix=str(folder / "tokenizer"),
        minloglevel=2,
        **{**given, **rules},
    )


def rounded(path):
    """Give the pieces of a model whole scores, as byte-pair pieces have them."""
    model = ModelProto.FromString(path.read_bytes())
    for piece in model.pieces:
        piece.score = round(piece.score)
    path.write_bytes(model.SerializeToString())


OTHERS = {
    "words with whole scores": {"model_type": "word", "vocab_size": 264},
    "a space put before": {"add_dummy_prefix": True},
    "no bytes": {"byte_fallback": False, "vocab_size": 30},
    "symbols of its own": {"user_defined_symbols": ["of the", "<0x0>", "\n\n"], "vocab_size": 290},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_short_texts_have_the_ids_that_sentencepiece_gives_each(tmp_path, other):
    learn(tmp_path, normalization_rule_name="identity", **other)
    rounded(tmp_path / "tokenizer.model")
    tokenizer = Tokenizer(tmp_path / "tokenizer.model")
    texts = [
        "of the in",
        "xy zq",
        "of",
        "",
        "raix",
        " the of",
        "\n",
        "the<0x0>\n\n",
        "\n of the of",
    ]
    whole = [tokenizer._processor.encode(text) for text in texts]
    for threads in (1, 2):
        assert [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads)] == whole


RULES = {"tab to space": "9\t20", "dropped": "200B\t", "spaces": "2E 20 20\t2E 20"}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_model_with_rules_of_normalisation_is_given_whole_texts(tmp_path, looked_up, rule):
    (tmp_path / "rules.tsv").write_text(f"{rule}\n")
    learn(tmp_path, normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.model")
    texts = ["of\t the \t of the", "of \u200b \u200b the", "of.  the.  in", "of.  the.  in" * 99]
    whole = [tokenizer._processor.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts, threads=1) == whole
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)] == whole
    assert tokenizer._encoder.pairs is None
    assert list(tokenizer.exported) == ["tokenizer.model", "tokenizer_config.json"]


@pytest.mark.parametrize("threads", [1, 2])
def test_half_a_character_is_reported_and_the_table_is_free_again(model, looked_up, threads):
    tokenizer = Tokenizer(model)
    for given in (
        ["a b \ud800"],
        ["one", "abcd\udc00", "three"],
        ["one", "x" * 4 + "\ud800" * 600],
    ):
        with pytest.raises(DataError, match="a lone surrogate at character 4"):
            tokenizer.encode_arrays(given, threads)
        assert not tokenizer._encoder._lock.locked()


def test_a_text_with_few_spaces_is_not_taken_apart(model, looked_up, monkeypatch):
    monkeypatch.setattr(text_encoder, "MAX_CHARACTERS_PER_SPACE", 12)
    Tokenizer(model).encode_arrays(["一二三四五六七八九十一 二", "one two"], threads=1)
    assert looked_up == ["one two"]


def test_a_model_with_spaces_inside_its_pieces_is_given_whole_texts(tmp_path, looked_up):
    learn(tmp_path, normalization_rule_name="identity", split_by_whitespace=False)
    tokenizer = Tokenizer(tmp_path / "tokenizer.model")
    assert any(b"e o" in piece.content for piece in tokenizer.pieces())
    texts = ["in the of the of the rain", "of the"]
    found = [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)]
    assert found == tokenizer.encode_batch(texts, threads=1)
    assert tokenizer._encoder.pairs is not None
    assert not looked_up
