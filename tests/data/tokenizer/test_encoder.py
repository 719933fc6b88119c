"""Ids of many texts against those of each, by threads and with models that must not be cut."""

from __future__ import annotations

import copy
import pickle
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.data.tokenizer import sentencepiece as text_encoder
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from minimind.data.tokenizer.vocabulary import escape
from minimind.errors import DataError
from tests.data.tokenizer.test_tokenizer import AWKWARD, fuzz, prose, verse


@pytest.fixture(scope="module", params=[512, pytest.param(4096, marks=pytest.mark.long)])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(prose(1) + verse(1), request.param, path)
    return path


def texts_of(seed):
    draw = random.Random(seed)
    texts = [*prose(seed, 20), *verse(seed, 5), *AWKWARD, *fuzz(seed, 200)]
    texts += ["".join(draw.choices(texts, k=30)) for _ in range(10)]
    spaced = [text.replace("e", " ").replace("a", "  ") for text in texts]
    return [text for text in texts + spaced if text]


def whole(tokenizer, texts):
    return [tokenizer._processor.encode(escape(text)) for text in texts]


@pytest.mark.parametrize("threads", [1, 2])
def test_texts_have_the_ids_that_sentencepiece_gives_each(model, threads):
    tokenizer = SentencePieceTokenizer(model)
    texts = [*texts_of(1), "a\0b", "\0", "", " ", "a", " a ", "\n"]
    texts += ["".join(prose(seed, 300)) for seed in range(2)]  # longer than what is encoded whole
    assert max(map(len, texts)) > text_encoder.LONGEST_WHOLE
    found = [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads)]
    assert found == whole(tokenizer, texts)
    assert found[:50] == [tokenizer.encode(text) for text in texts[:50]]
    assert tokenizer.encode_arrays([], threads) == []


def test_threads_that_share_a_tokenizer_give_the_ids_of_one(model):
    tokenizer = SentencePieceTokenizer(model)
    batches = [texts_of(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda texts: tokenizer.encode_arrays(texts, threads=1), batches))
    for texts, arrays in zip(batches, found, strict=True):
        assert [ids.tolist() for ids in arrays] == whole(tokenizer, texts)


def test_a_tokenizer_can_be_copied_for_other_processes(model):
    tokenizer = SentencePieceTokenizer(model)
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
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
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
    expected = [tokenizer._processor.encode(text) for text in texts]
    for threads in (1, 2):
        assert [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads)] == expected


RULES = {"tab to space": "9\t20", "dropped": "200B\t", "spaces": "2E 20 20\t2E 20"}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_model_with_rules_of_normalisation_is_given_whole_texts(tmp_path, rule):
    (tmp_path / "rules.tsv").write_text(f"{rule}\n")
    learn(tmp_path, normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    texts = ["of\t the \t of the", "of \u200b \u200b the", "of.  the.  in", "of.  the.  in" * 99]
    expected = [tokenizer._processor.encode(text) for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)] == expected
    assert not tokenizer.is_lossless
    assert list(tokenizer.exported) == ["tokenizer.model", "tokenizer_config.json"]


@pytest.mark.parametrize("threads", [1, 2])
def test_half_a_character_is_reported(model, threads):
    tokenizer = SentencePieceTokenizer(model)
    for given in (
        ["a b \ud800"],
        ["one", "abcd\udc00", "three"],
        ["one", "x" * 4 + "\ud800" * 600],
    ):
        with pytest.raises(DataError, match="a lone surrogate at character 4"):
            tokenizer.encode_arrays(given, threads)


def test_a_model_with_spaces_inside_its_pieces_gives_the_ids_of_whole_texts(tmp_path):
    learn(tmp_path, normalization_rule_name="identity", split_by_whitespace=False)
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    assert any(b"e o" in piece.content for piece in tokenizer.pieces())
    texts = ["in the of the of the rain", "of the"]
    assert tokenizer.is_lossless
    assert [ids.tolist() for ids in tokenizer.encode_arrays(texts, threads=1)] == whole(
        tokenizer, texts
    )
