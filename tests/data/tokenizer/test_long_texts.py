"""Long texts in chunks against the same texts whole: ids, text and memory."""

import functools
import random
import subprocess
import sys
from itertools import pairwise

import pytest

from minimind.data.tokenizer import sentencepiece
from minimind.data.tokenizer import sentencepiece as text_encoder
from minimind.data.tokenizer.sentencepiece import (
    SentencePieceTokenizer,
    adjacent_pairs,
    chunks,
    train_tokenizer,
)
from tests.data.tokenizer.test_tokenizer import AWKWARD, fuzz, prose, verse


@pytest.fixture(scope="module", params=[512, 4096])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(prose(1) + verse(1), request.param, path)
    return SentencePieceTokenizer(path)


@pytest.fixture
def small_chunks(monkeypatch):
    def cut(limit):
        monkeypatch.setattr(text_encoder, "LONGEST_WHOLE", limit)
        cut_small = functools.partial(chunks, aim=limit, limit=4 * limit)
        monkeypatch.setattr(text_encoder, "chunks", cut_small)

    return cut


@pytest.mark.sample(2)
@pytest.mark.parametrize("most", [1, 2, 7])
def test_ids_decoded_a_run_at_a_time_are_the_text_of_the_whole(tokenizer, monkeypatch, most):
    text = "".join([*prose(2, 5), *verse(2, 5), *AWKWARD, *fuzz(most, 50)])
    ids = tokenizer.encode_arrays([text], threads=1)[0]
    monkeypatch.setattr(sentencepiece, "CHUNK_TOKENS", most)
    parts = list(sentencepiece.id_chunks(ids, tokenizer.pieces))
    assert len(parts) > 100
    assert [i for part in parts for i in part] == ids.tolist()
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("limit", [64, 97, 1000])
def test_ids_of_chunks_are_those_of_the_whole(tokenizer, small_chunks, limit):
    draw = random.Random(limit)
    mixed = [*prose(2, 20), *verse(2, 20), *AWKWARD, *fuzz(limit, 200)]
    texts = ["".join(draw.choices(mixed, k=50)) for _ in range(10)] + mixed
    whole = list(map(tokenizer.encode, texts))
    small_chunks(limit)
    found = tokenizer.encode_arrays(texts, threads=2)
    assert [ids.tolist() for ids in found] == whole


def test_a_cut_is_never_within_what_a_piece_joins():
    joined = adjacent_pairs(["ab", "bc", "a", "xyz"])
    assert joined == {"ab", "bc", "xy", "yz"}
    assert list(chunks("abcabcabc", joined, 3)) == ["abc", "abc", "abc"]
    assert list(chunks("abcabcabca", joined, 4)) == ["abcabc", "abca"]
    assert list(chunks("abcabcabc", joined, 100)) == ["abcabcabc"]
    assert list(chunks("", joined, 4)) == [""]
    text = "".join(random.Random(0).choices("abcxyz", k=1000))
    parts = list(chunks(text, joined, 20, 40))
    assert "".join(parts) == text
    assert min(map(len, parts[:-1])) >= 20
    assert max(map(len, parts)) < 40
    assert not {a[-1] + b[0] for a, b in pairwise(parts)} & joined


def test_a_text_without_a_place_to_cut_still_comes_back(tmp_path, small_chunks):
    train_tokenizer(["aaaa" * 50, "bab"], 512, tmp_path / "t.model")
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    small_chunks(7)
    parts = list(chunks("a" * 20, adjacent_pairs(["aa"]), 2, 7))
    assert parts == ["aaaaaaa", "aaaaaaa", "aaaaaa"]
    ids = tokenizer.encode("a" * 1000)
    assert len(ids) >= 1000 / 28
    assert tokenizer.decode(ids) == "a" * 1000


MEASURED = """
import sys
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer
from minimind.runtime.environment import peak_bytes
tokenizer = SentencePieceTokenizer(sys.argv[1])
text = "the rain in spain " * (int(sys.argv[2]) // 18)
tokenizer.encode("warm")
before = peak_bytes()
count = len(tokenizer.encode_arrays([text], 1)[0])
print((peak_bytes() - before) / len(text), count)
"""


def test_memory_per_character_of_a_long_text_is_a_fraction_of_what_merging_needs(tmp_path):
    train_tokenizer(["the rain in spain " * 20], 512, tmp_path / "t.model")
    size = str(6 * 2**20)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "t.model"), size]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    per_character, count = map(float, done.stdout.split())
    assert count > 0
    assert per_character < 25, "bytes of memory a character; a whole text takes over 40"
