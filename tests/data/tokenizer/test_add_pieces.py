"""Pieces added to tokenizers of both kinds: texts are divided as before, and then joined."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from minimind.data.tokenizer.add_pieces import count_words, with_pieces
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.vocabulary import BYTE_NAMES, write_tokenizer
from minimind.errors import DataError
from tests.data.tokenizer.test_add_special import of_a_class, sentencepiece_model, unigram
from tests.data.tokenizer.test_hf_tokenizer import END, byte_level
from tests.data.tokenizer.test_tokenizer import AWKWARD, fuzz, prose, verse

SIZE = 40
LEARNT = [*verse(3, 60), "Zürich naïve café 12345 Zürich, naïve; café! 12345\n" * 9]
TEXTS = [*AWKWARD, *LEARNT[-2:], *prose(2, 10), *verse(5, 10), *fuzz(4, 200)]
TOKENS = ["café", " Zürich", "zebra", "brazen", "zeb"]


def spaced(directory):
    """Like Llama 2's: a space before every text, and bytes for characters that have no piece."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    library.normalizer = normalizers.Sequence(steps)
    library.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    library.train_from_iterator(["▁" + text.replace(" ", "▁") for text in prose(1, 50)], trainer)
    library.pre_tokenizer = None
    strip = decoders.Strip(" ", 1, 0)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    values = json.loads(library.to_str())
    values["added_tokens"] = values["added_tokens"][:3]
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(values))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def whole_words(directory):
    """Like Llama 3's, which takes a word that is a piece without merging."""
    byte_level(directory, ignore_merges=True)


@pytest.fixture(
    scope="module", params=[sentencepiece_model, byte_level, of_a_class, whole_words, spaced]
)
def given(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("given") / "given"
    request.param(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def learnt(given, tmp_path_factory):
    folder = tmp_path_factory.mktemp("learnt")
    return with_pieces(given, count_words(LEARNT), folder, SIZE)


def same_but_for_a_space(tokenizer, ids, text):
    return tokenizer.decode(ids).removeprefix(" ") == text.removeprefix(" ")


def test_new_ids_follow_the_last_one_and_the_others_stay(given, learnt):
    after, joined = learnt
    first = given.vocab_size
    assert [*joined] == [*range(first, first + SIZE)]
    assert after.vocab_size == first + SIZE
    assert after.pieces()[:first] == given.pieces()
    assert after.special_tokens() == given.special_tokens()
    roles = [(one.bos_id, one.eos_id, one.pad_id, one.unk_id) for one in (given, after)]
    assert roles[0] == roles[1]
    assert {piece.kind for piece in after.pieces()[first:]} <= {"character", "longer", "byte"}


def test_each_piece_stands_for_the_text_of_those_that_it_joins(given, learnt):
    after, joined = learnt
    pieces = after.pieces()
    for new, old in joined.items():
        assert pieces[new].content == b"".join(pieces[i].content for i in old)
        assert len(old) > 1 or given.piece_name(old[0]) in BYTE_NAMES
        assert max(old) < given.vocab_size


def test_texts_take_fewer_tokens_and_come_back_as_before(given, learnt):
    after, joined = learnt
    contents = [piece.content for piece in given.pieces()]
    for text in TEXTS:
        old, new = given.encode(text), after.encode(text)
        assert len(new) <= len(old)
        assert after.decode(new) == given.decode(old)
        spread = [i for one in new for i in joined.get(one, (one,))]
        spelt, as_before = (b"".join(contents[i] for i in ids) for ids in (spread, old))
        assert spelt == as_before
    sizes = [sum(len(one.encode(text)) for text in LEARNT) for one in (given, after)]
    assert sizes[1] < 0.97 * sizes[0]
    used = {i for text in LEARNT for i in after.encode(text)}
    assert len(used & {*joined}) > SIZE / 2


def test_none_crosses_words_or_holds_a_digit(given, learnt):
    after, joined = learnt
    pieces = after.pieces()
    for new in joined:
        text = pieces[new].content.decode(errors="ignore")
        assert not any(character.isdigit() or character == "\n" for character in text)
        assert " " not in text[1:]


def test_the_first_piece_joins_the_most_frequent_pair(tmp_path):
    byte_level(tmp_path / "given")
    before = load_tokenizer(tmp_path / "given")
    words = count_words(LEARNT)
    times = Counter()
    for word, n in words.items():
        for pair in pairwise(before.encode(word)):
            times[pair] += n
    _, joined = with_pieces(before, words, tmp_path / "new", 1)
    assert [times[ids] for ids in joined.values()] == [max(times.values())]


def test_the_same_bytes_for_the_same_text(given, learnt, tmp_path):
    again, joined = with_pieces(given, count_words(LEARNT), tmp_path, SIZE)
    assert again.files() == learnt[0].files()
    assert joined == learnt[1]


def test_autotokenizer_agrees(learnt, tmp_path):
    after, _ = learnt
    write_tokenizer(tmp_path, {n: c for n, c in after.exported.items() if n != "tokenizer.model"})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == after.vocab_size
    for text in TEXTS:
        options = {"add_special_tokens": False, "split_special_tokens": True}
        assert theirs.encode(text, **options) == after.encode(text)


def test_each_token_of_a_list_is_one_token_also_inside_of_a_text(given, tmp_path):
    after, joined = with_pieces(given, dict.fromkeys(TOKENS, 1), tmp_path)
    pieces, old = after.pieces(), given.encode("\nzebra")
    for token in TOKENS:
        ids = after.encode(f"\n{token}\n")
        assert [i for i in ids if i in joined and pieces[i].content.decode() == token]
        assert same_but_for_a_space(after, ids, f"\n{token}\n")
    (zebra,) = (i for i in joined if pieces[i].content == b"zebra")
    assert joined[zebra] == (*old[-len(joined[zebra]) :],)
    needed = sum(len(given.encode("\n" + token)) - 1 for token in TOKENS)
    assert len(TOKENS) <= len(joined) <= needed


def test_added_tokens_keep_their_ids(tmp_path):
    """The library numbers them from the size of the vocabulary on, unless that has them."""
    byte_level(tmp_path / "given")
    before = load_tokenizer(tmp_path / "given")
    ids = [before.piece_id(name) for name in ("[tool]", "<pad>", END)]
    after, _ = with_pieces(before, {"zebra": 1}, tmp_path / "new")
    assert [after.piece_id(name) for name in ("[tool]", "<pad>", END)] == ids
    assert after.encode("a[tool]b")[1] == ids[0]
    assert not {*ids[1:]} & {*after.encode(f"a<pad>{END}")}


# --- what cannot be added -------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["New York", END, "<pad>"])
def test_a_token_that_cannot_be_one_is_refused(token, tmp_path):
    byte_level(tmp_path / "given")
    before = load_tokenizer(tmp_path / "given")
    with pytest.raises(DataError, match="cannot be"):
        with_pieces(before, {"zebra": 1, token: 1}, tmp_path / "new")


@pytest.mark.parametrize("token", ["</s>", "<unk>", "<0x41>"])
def test_a_token_that_sentencepiece_cannot_make_is_refused(token, tmp_path):
    sentencepiece_model(tmp_path / "given")
    before = load_tokenizer(tmp_path / "given")
    with pytest.raises(DataError, match="cannot be"):
        with_pieces(before, {"zebra": 1, token: 1}, tmp_path / "new")


@pytest.mark.parametrize("words", [{}, {"a": 1}])
def test_a_list_without_a_new_piece_is_refused(words, given, tmp_path):
    with pytest.raises(DataError, match="--tokens: only 0 new pieces are found"):
        with_pieces(given, words, tmp_path)


def test_a_token_that_the_tokenizer_loses_a_part_of_is_refused(tmp_path):
    library = Library(models.BPE({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, [], unk_token="<unk>"))
    library.decoder = decoders.Fuse()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="'aé' cannot be one token"):
        with_pieces(tokenizer, {"ab": 1, "aé": 1}, tmp_path / "new")


def test_other_types_are_refused_by_name(tmp_path):
    unigram(tmp_path / "unigram")
    with pytest.raises(DataError, match="is of type UNIGRAM, and pieces"):
        with_pieces(load_tokenizer(tmp_path / "unigram"), {"zebra": 1}, tmp_path / "new")
    byte_level(tmp_path / "marked")
    values = json.loads((tmp_path / "marked" / "tokenizer.json").read_text())
    values["model"]["continuing_subword_prefix"] = "##"
    values["model"]["merges"] = []
    (tmp_path / "marked" / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(DataError, match="is of type BPE with marks of words"):
        with_pieces(load_tokenizer(tmp_path / "marked"), {"zebra": 1}, tmp_path / "new")
    library = Library(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    (tmp_path / "words").mkdir()
    library.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(DataError, match="is of type WordLevel"):
        with_pieces(load_tokenizer(tmp_path / "words"), {"zebra": 1}, tmp_path / "new")


def test_more_pieces_than_the_text_has_are_refused(given, tmp_path):
    with pytest.raises(DataError, match=r"--learn 9: only \d new pieces are found"):
        with_pieces(given, count_words(["qzx qzx"]), tmp_path / "new", 9)


def test_a_special_token_that_text_would_give_is_refused(tmp_path):
    """A word that is a piece is taken whole, so no special token may be one."""
    whole_words(tmp_path / "given")
    library = Library.from_file(str(tmp_path / "given" / "tokenizer.json"))
    library.add_special_tokens(["sop"])
    library.save(str(tmp_path / "given" / "tokenizer.json"))
    before = load_tokenizer(tmp_path / "given")
    assert before.piece_id("sop") not in before.encode("sop")
    with pytest.raises(DataError, match="pieces cannot be added, for other ids would change"):
        with_pieces(before, {"zebra": 1}, tmp_path / "new")
