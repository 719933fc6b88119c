"""Text against the text that comes back from its ids, at two sizes of vocabulary and under fuzz."""

import hashlib
import pickle
import random
import sys
from itertools import accumulate

import pytest

from minimind.data.text.sample import sample
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, alphabet, train_tokenizer
from minimind.errors import DataError, StorageError, UsageError

AWKWARD = [
    "",
    " ",
    "   leading and trailing   ",
    "\n",
    "\n\n\n",
    "a\n\nb\r\n\tc\n",
    "def f(x):\n\tif x:\n\t\treturn   [1,  2]\n\n\n# end",
    "《帝京篇十首 一》太宗皇帝\n秦川雄帝宅，函谷壯皇居。",
    "👩‍👩‍👧‍👦 🇨🇳 é e\u0301 ﬁ ½ Å",
    "</s><s><unk><pad><0x41><unused_0>",
    "▁", "a▁b ▁ ▁▁", "▁ \ufdd0▁\ufdd1", "\ufdd0", "\ufdd1", "\ufdd1\ufdd0\ufdd1\ufdd1▁", "▅ ⁇ ",
    "\0a\0", "\ufeffbom", "\x7f\x80\x85\xa0\u200b\u2028\u2029\u3000", "\uffff\U0010ffff",
    "1234567890 3.14159 0x1F",
]  # fmt: skip


def prose(seed, documents=300):
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(2000)]
    return [" ".join(draw.choices(words, k=60)) + ".\n\tindented  ▁ 12\n" for _ in range(documents)]


def verse(seed, documents=200, characters=5000):
    """Like Chinese verse: thousands of characters, a few of them everywhere, no spaces."""
    draw = random.Random(seed)
    known = [chr(0x4E00 + i) for i in range(characters)]
    sums = list(accumulate(1 / (rank + 1) for rank in range(characters)))

    def line():
        return "".join(draw.choices(known, cum_weights=sums, k=7))

    return ["，".join(line() for _ in range(60)) + "。\n" for _ in range(documents)]


@pytest.fixture(scope="module", params=[512, pytest.param(4096, marks=pytest.mark.long)])
def tokenizer(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_tokenizer(prose(1) + verse(1), request.param, path)
    return SentencePieceTokenizer(path)


def fuzz(seed, texts):
    """Texts over all of Unicode but surrogates, with what escapes are made of more often."""
    draw = random.Random(seed)
    planes = [range(0x80), range(0x3000), range(0xD800), range(0xE000, 0x110000)]
    special = " \n\t\r▁\ufdd0\ufdd1▅\0a<0x>"
    for _ in range(texts):
        yield "".join(
            draw.choice(special) if draw.random() < 0.3 else chr(draw.choice(draw.choice(planes)))
            for _ in range(draw.randint(0, 80))
        )


@pytest.mark.sample(1)
def test_every_text_comes_back(tokenizer):
    texts = AWKWARD + prose(2, 20) + verse(2, 20) + list(fuzz(3, 3000))
    for text, ids in zip(
        texts, (found.tolist() for found in tokenizer.encode_arrays(texts, threads=2)), strict=True
    ):
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.encode(text)
        assert all(3 < i < tokenizer.vocab_size for i in ids)


def test_every_character_comes_back(tokenizer):
    characters = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
    for start in range(0, len(characters), 5000):
        text = "".join(characters[start : start + 5000])
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_piece_bytes_add_up_to_the_text(tokenizer):
    sizes = tokenizer.piece_bytes()
    assert sizes.dtype == "int32"
    assert sizes.shape == (tokenizer.vocab_size,)
    assert sizes[: 4 + tokenizer.unused].tolist() == [0] * (4 + tokenizer.unused)
    for text in prose(4, 20) + verse(4, 20) + ["a▁b", "  ▁ ", "\n春 😀\0", "\x01\x7f"]:
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())


def test_the_ids_are_the_agreed_ones(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 3)
    assert tokenizer.decode([1, 2, 3]) == ""
    assert tokenizer.unused == 0
    assert tokenizer.vocab_size in (512, 4096)
    assert tokenizer.fingerprint == hashlib.sha256(tokenizer.path.read_bytes()).hexdigest()


def test_newlines_and_runs_of_spaces_are_learnt(tmp_path):
    text = "if x:\n\n\n        return\n\n\n        pass\n" * 50
    train_tokenizer([text], 512, tmp_path / "t.model")
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    sizes = tokenizer.piece_bytes()
    assert max(sizes[tokenizer.encode("\n\n\n")]) == 3
    assert max(sizes[tokenizer.encode("        return")]) >= 8


def test_the_same_texts_give_the_same_model(tmp_path):
    for name in ("a", "b"):
        train_tokenizer(iter(prose(1) + verse(1)), 600, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    train_tokenizer(prose(2), 600, tmp_path / "c")
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.parametrize("texts", [["a"], ["hello hello"], ["\n\nx"], ["春眠不覺曉。"] * 3, [" "]])
def test_tiny_text_still_gives_exactly_the_pieces_requested(tmp_path, texts):
    train_tokenizer(texts, 1000, tmp_path / "t.model")
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    assert tokenizer.vocab_size == 1000
    assert tokenizer.unused > 600
    assert len(tokenizer.encode("  ")) <= 2  # a space is a piece even where the text has none
    assert tokenizer.eos_id == 2
    for text in [*texts, *AWKWARD]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.sample(1)
@pytest.mark.parametrize("vocab_size", [512, 1024])
def test_thousands_of_characters_fit_a_small_vocabulary(tmp_path, vocab_size):
    texts = verse(5, characters=8000)
    train_tokenizer(texts, vocab_size, tmp_path / "t.model")
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    assert tokenizer.vocab_size == vocab_size
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in texts)


def test_the_most_frequent_characters_and_a_space_are_kept():
    assert alphabet(["aaabbc▅▅▅▅\0\0\0\0"], 3) == {" ", "a", "b"}


def test_a_sample_is_bounded_spread_and_hardly_changed_by_one_more_text():
    texts = [f"{i:05d} " + "x" * 994 for i in range(1000)]
    kept = sample(texts, 100_000)
    assert 98 <= len(kept) <= 100
    assert kept == sorted(kept)
    thirds = [sum(int(text[:5]) // 334 == third for text in kept) for third in range(3)]
    assert min(thirds) > 15
    assert len(set(sample(["a new one " * 100, *texts], 100_000)) & set(kept)) >= 98
    assert sum(len(text.encode()) for text in sample(["字" * 10**6], 200_000)) > 100_000


def test_another_seed_takes_another_sample_and_the_same_one_the_same():
    texts = [f"{i:05d} " + "x" * 994 for i in range(1000)]
    by_seed = [sample(texts, 100_000, seed) for seed in (42, 7, 42)]
    assert by_seed[0] == by_seed[2] == sample(texts, 100_000)
    assert len(set(by_seed[0]) & set(by_seed[1])) < 30


def test_text_that_holds_the_names_of_control_pieces_is_learnt_from(tmp_path):
    texts = [f"<s>hello</s> <unused_0> <unused_1> <pad> <unk> <0xAB>\n{i}" for i in range(50)]
    train_tokenizer(texts, 512, tmp_path / "t.model")
    tokenizer = SentencePieceTokenizer(tmp_path / "t.model")
    assert tokenizer.vocab_size == 512
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {0, 1, 2, 3} & {*ids}


def test_too_few_pieces_and_no_text_are_refused(tmp_path):
    with pytest.raises(UsageError, match="vocab_size = 511"):
        train_tokenizer(["text"], 511, tmp_path / "t.model")
    with pytest.raises(UsageError, match="2097152 is more than the 1048576"):
        train_tokenizer(["text"], 2**21, tmp_path / "t.model")
    for texts in ([], ["\n\n"]):
        with pytest.raises(DataError, match="no text"):
            train_tokenizer(texts, 512, tmp_path / "t.model")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_tokenizer_is_the_same_and_loads_from_its_directory(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new")
    tokenizer.save(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ]
    assert SentencePieceTokenizer(tmp_path / "new").fingerprint == tokenizer.fingerprint
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        tokenizer.save(tmp_path / "file")


def test_a_missing_or_damaged_model_is_reported(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.model: .*cannot be read"):
        SentencePieceTokenizer(tmp_path)
    model = tokenizer.path.read_bytes()
    pickled = pickle.dumps({"model": [1, 2]})
    for content in (b"", b"not a model", model[: len(model) // 2], pickled):
        (tmp_path / "t.model").write_bytes(content)
        with pytest.raises(DataError, match="not a SentencePiece model"):
            SentencePieceTokenizer(tmp_path / "t.model")


def test_a_model_with_bytes_of_another_is_reported_or_works(tokenizer, tmp_path):
    """Some damages only show as a piece, or as a message, that is not UTF-8."""
    whole, draw = tokenizer.path.read_bytes(), random.Random(1)
    path = tmp_path / "t.model"
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.choice((1, 1, 1, 4))):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            damaged = SentencePieceTokenizer(path)
        except DataError as error:
            refused += len(str(error).splitlines()) == 1
            continue
        damaged.decode(damaged.encode("春眠 abc \n \0"))
        damaged.decode(range(damaged.vocab_size))
        damaged.piece_bytes()
    assert refused > 100
