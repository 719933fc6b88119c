"""tokenizer.json against the SentencePiece model it is made from, by transformers alone."""

import io
import json
import random

import pytest
import sentencepiece
from transformers import AutoTokenizer

from minimind.data.tokenizer import hf_export
from minimind.data.tokenizer.hf_export import hugging_face_files
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from minimind.data.tokenizer.vocabulary import CONTROL
from tests.data.tokenizer.test_tokenizer import AWKWARD, fuzz, prose, verse

CODE = "def f(x):\n\tif x  <  10:\n\t\treturn [x,\t2]\r\n\r\n\n    # done ▁\n"
SEED = 20


@pytest.fixture(scope="module", params=[512, 600, pytest.param(4096, marks=pytest.mark.long)])
def pair(request, tmp_path_factory):
    """Ours, and what AutoTokenizer makes of the directory without tokenizer.model."""
    directory = tmp_path_factory.mktemp("exported")
    texts = prose(1) + verse(1) + [CODE * 20, "<s>a</s>" * 30]
    train_tokenizer(texts, request.param, directory / "tokenizer.model")
    ours = SentencePieceTokenizer(directory)
    ours.save(directory)
    (directory / "tokenizer.model").rename(directory.with_suffix(".model"))
    return ours, AutoTokenizer.from_pretrained(directory), directory


def documents():
    draw = random.Random(SEED)
    mixed = [CODE, "1234567890", "👩‍👩‍👧 🇨🇳", "龘靐齉", "   ", "\n\n\n\n", "▁", "\ufdd0", "\ufdd1"]
    mixed += [*AWKWARD, *prose(2, 10), *verse(2, 10)]
    joined = ["".join(draw.choices(mixed, k=draw.randint(2, 8))) for _ in range(300)]
    runs = [c * n for c in " \na\t▁ab" for n in (*range(1, 70), 255, 1000)]
    return [*mixed, *joined, *runs, *fuzz(SEED, 1000)]


@pytest.mark.sample(1)
def test_autotokenizer_gives_the_same_ids_and_the_text_back(pair):
    ours, theirs, _ = pair
    for text in documents():
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids, f"{text!r} of seed {SEED}"
        assert theirs.decode(ids) == text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_runs_of_few_letters_that_merge_in_many_ways_have_the_same_ids(tmp_path):
    draw = random.Random(SEED)
    for letters in ("ab", "a b", " \n\t"):
        texts = ["".join(draw.choice(letters) * draw.choice([1, 1, 2, 3, 8]) for _ in range(300))
                 for _ in range(40)]  # fmt: skip
        train_tokenizer(texts, 512, tmp_path / "tokenizer.model")
        ours = SentencePieceTokenizer(tmp_path)
        ours.save(tmp_path)
        theirs = load_tokenizer(tmp_path / "tokenizer.json")
        for _ in range(1000):
            text = "".join(draw.choice(letters) * draw.randint(1, 9) for _ in range(20))
            assert theirs.encode(text) == ours.encode(text), f"{text!r} of seed {SEED}"


def test_the_special_ids_are_ours_and_nothing_is_added(pair):
    ours, theirs, _ = pair
    special = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id)
    assert special == (ours.bos_id, ours.eos_id, ours.pad_id, 0)
    assert len(theirs) == ours.vocab_size
    assert theirs("")["input_ids"] == []
    assert ours.eos_id not in theirs("a</s>b")["input_ids"]
    ids = [1, *ours.encode("text"), 2, 3]
    assert theirs.decode(ids, skip_special_tokens=True) == "text"


def test_our_own_reader_of_tokenizer_json_agrees(pair):
    ours, _, directory = pair
    theirs = load_tokenizer(directory)
    texts = documents()
    assert list(map(theirs.encode, texts)) == list(map(ours.encode, texts))
    assert (theirs.vocab_size, theirs.unused) == (ours.vocab_size, ours.unused)
    assert (theirs.bos_id, theirs.eos_id, theirs.pad_id) == (1, 2, 3)
    assert theirs.piece_bytes().tolist() == ours.piece_bytes().tolist()
    assert theirs.pieces() == ours.pieces()


def test_unused_pieces_are_silent_and_not_found_in_text(tmp_path):
    train_tokenizer(["hello <unused_3>"], 600, tmp_path / "tokenizer.model")
    ours = SentencePieceTokenizer(tmp_path)
    ours.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours.unused > 200
    assert theirs("hello <unused_3>")["input_ids"] == ours.encode("hello <unused_3>")
    assert theirs.decode([6, *ours.encode("hello")], skip_special_tokens=True) == "hello"


def given(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
        sentence_iterator=iter(prose(1)),
        model_writer=model,
        vocab_size=600,
        minloglevel=2,
        **options,
    )
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.getvalue())
    return processor, model.getvalue()


PLAIN = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
}


@pytest.mark.parametrize(
    "other",
    [
        {"model_type": "unigram"},
        {"byte_fallback": False},
        {"normalization_rule_name": "nfkc"},
        {"add_dummy_prefix": True},
        {"remove_extra_whitespaces": True},
        {"user_defined_symbols": ["eta oin", "zzz"]},
    ],
)
def test_a_given_model_that_does_more_than_merge_is_not_exported_wrongly(tmp_path, other):
    assert set(hugging_face_files(given(**PLAIN)[0])) == {"tokenizer.json", "tokenizer_config.json"}
    processor, model = given(**{**PLAIN, **other})
    assert hugging_face_files(processor) == {}
    (tmp_path / "given.model").write_bytes(model)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"of": "another"}))
    load_tokenizer(tmp_path / "given.model").save(tmp_path)
    assert (tmp_path / "tokenizer.model").read_bytes() == model
    assert not (tmp_path / "tokenizer.json").exists()


def test_the_trial_is_spared_only_where_just_these_files_stand_beside_the_model(
    tmp_path, monkeypatch
):
    tried = []
    agree = hf_export._agree
    monkeypatch.setattr(hf_export, "_agree", lambda *both: tried.append(1) or agree(*both))
    (tmp_path / "tokenizer.model").write_bytes(given(**PLAIN)[1])
    exported = load_tokenizer(tmp_path).exported
    assert len(tried) == 1
    load_tokenizer(tmp_path).save(tmp_path)
    assert len(tried) == 2
    assert load_tokenizer(tmp_path).exported == exported
    assert len(tried) == 2
    report = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(report.replace("1.0", "1.00"))
    assert load_tokenizer(tmp_path).exported == exported
    assert len(tried) == 3


OWN = ["<|im_start|>", "<|im_end|>", "<tool_call>", 'a,"b', "工具调用", "<0xab>"]


@pytest.fixture(
    scope="module", params=[(512, 300), (600, 1), pytest.param((4096, 300), marks=pytest.mark.long)]
)
def special(request, tmp_path_factory):
    """Ours with special tokens of one's own, much of whose text holds their names, and theirs."""
    directory = tmp_path_factory.mktemp("special")
    vocab_size, many = request.param
    chats = [f"{OWN[0]}user\n{word} {OWN[1]}\n{''.join(OWN)}" for word in prose(3, many)]
    train_tokenizer(chats, vocab_size, directory / "tokenizer.model", special=OWN)
    ours = SentencePieceTokenizer(directory)
    ours.save(directory)
    (directory / "tokenizer.model").rename(directory.with_suffix(".model"))
    return ours, AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)


def test_special_tokens_of_ones_own_have_fixed_ids_behind_the_built_in_ones(special):
    ours, theirs, read = special
    named = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, **{n: 4 + i for i, n in enumerate(OWN)}}
    assert ours.special_tokens() == read.special_tokens() == named
    assert theirs.convert_tokens_to_ids(OWN) == [*range(4, 4 + len(OWN))]
    assert {*theirs.all_special_tokens} == {*named}
    assert len(theirs) == ours.vocab_size
    assert {piece.kind for piece in ours.pieces()[: 4 + len(OWN)]} == {CONTROL}
    assert read.pieces() == ours.pieces()
    assert ours.decode(range(4, 4 + len(OWN))) == ""
    assert theirs.decode([4, *ours.encode("text"), 5], skip_special_tokens=True) == "text"


@pytest.mark.sample(1)
def test_text_is_never_made_of_special_tokens(special):
    ours, theirs, read = special
    draw = random.Random(SEED)
    mixed = [*OWN, *(name[:-1] for name in OWN), *AWKWARD, " ", "\n"]
    chats = ["".join(draw.choices(mixed, k=draw.randint(1, 9))) for _ in range(1000)]
    for text in chats + documents():
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == ids == read.encode(text), f"{text!r} of seed {SEED}"
        assert all(i >= 4 + len(OWN) for i in ids)
        assert ours.decode(ids) == theirs.decode(ids) == text


def test_special_tokens_may_take_all_but_the_last_pieces(tmp_path):
    names = [f"<|{i}|>" for i in range(132)]
    train_tokenizer(prose(1) + verse(1), 512, tmp_path / "tokenizer.model", special=names)
    ours = SentencePieceTokenizer(tmp_path)
    ours.save(tmp_path)
    assert ours.vocab_size == 512
    assert [*ours.special_tokens()][4:] == names
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in documents():
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert ours.decode(ours.encode(text)) == text
