"""Special tokens appended to tokenizers of both kinds: the rest of the tokenizer stays the same."""

import json

import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)
from tokenizers import Tokenizer as Library
from tokenizers import models
from transformers import AutoTokenizer

from minimind.data.tokenizer.add_special import lacking, with_special_tokens
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import train_tokenizer
from minimind.data.tokenizer.vocabulary import write_tokenizer
from minimind.errors import DataError
from minimind.interop.gguf import CONTROL, gguf_vocabulary
from tests.data.tokenizer.test_hf_export import PLAIN, given
from tests.data.tokenizer.test_hf_tokenizer import END, byte_level
from tests.data.tokenizer.test_tokenizer import AWKWARD, fuzz, prose, verse

NAMES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "工具")
CHAT = "<|user|>\nwords<|end|>\n<|assistant|>工具<|system|>"
TEXTS = [*AWKWARD, CHAT, *NAMES, *prose(2, 10), *verse(2, 10), *fuzz(4, 300)]


def sentencepiece_model(directory):
    directory.mkdir()
    train_tokenizer(prose(1) + verse(1), 600, directory / "tokenizer.model")


def unigram(directory):
    """A model that normalizes, and has neither bytes nor padding."""
    directory.mkdir()
    (directory / "tokenizer.model").write_bytes(given(model_type="unigram")[1])


def configured(directory):
    """As save_pretrained of transformers 4 writes it, with its class and its list of tokens."""
    library = byte_level(directory)
    added = library.get_added_tokens_decoder().items()
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": END,
        "pad_token": "<pad>",
        "added_tokens_decoder": {
            str(i): {"content": token.content, "special": token.special} for i, token in added
        },
        "additional_special_tokens": ["<pad>"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def of_a_class(directory):
    byte_level(directory)
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


KINDS = [sentencepiece_model, unigram, byte_level, configured, of_a_class]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A tokenizer, and the same with special tokens."""
    folder = tmp_path_factory.mktemp("pair")
    request.param(folder / "given")
    before = load_tokenizer(folder / "given")
    return before, with_special_tokens(before, NAMES, folder / "new")


def test_new_ids_follow_the_last_one_and_the_others_stay(pair):
    before, after = pair
    first = before.vocab_size
    assert after.vocab_size == first + len(NAMES)
    new = {name: first + at for at, name in enumerate(NAMES)}
    assert after.special_tokens() == {**before.special_tokens(), **new}
    assert [after.piece_id(name) for name in NAMES] == [*new.values()]
    assert after.pieces()[:first] == before.pieces()
    assert {piece.kind for piece in after.pieces()[first:]} == {"control"}
    assert after.piece_bytes()[first:].tolist() == [0] * len(NAMES)
    roles = [(one.bos_id, one.eos_id, one.pad_id, one.unused) for one in pair]
    assert roles[0] == roles[1]
    assert before.fingerprint != after.fingerprint


def test_texts_have_the_same_ids_and_come_back(pair):
    before, after = pair
    ids = list(map(before.encode, TEXTS))
    assert list(map(after.encode, TEXTS)) == ids
    assert [array.tolist() for array in after.encode_arrays(TEXTS, 1)] == ids
    for one in ids:
        assert after.decode(one) == before.decode(one)
    first = before.vocab_size
    assert after.decode([first, *ids[-1], first + 1]) == before.decode(ids[-1])


def test_nothing_is_written_where_none_is_lacking_and_else_the_same_bytes(pair, tmp_path):
    before, after = pair
    assert with_special_tokens(after, NAMES[::-1], tmp_path / "nothing") is after
    assert with_special_tokens(before, [], tmp_path / "nothing") is before
    assert not (tmp_path / "nothing").exists()
    again = with_special_tokens(before, NAMES, tmp_path / "again")
    assert again.files() == after.files()
    assert again.fingerprint == after.fingerprint
    again = with_special_tokens(again, [NAMES[0], "<|tool|>"], tmp_path / "again")
    assert again.piece_id("<|tool|>") == again.vocab_size - 1 == after.vocab_size
    assert lacking(before, ["<|tool|>", NAMES[0]]) == ["<|tool|>", NAMES[0]]


def test_autotokenizer_agrees(pair, tmp_path):
    before, after = pair
    if "tokenizer.json" not in after.exported:
        pytest.skip("a model that tokenizer.json cannot express")
    write_tokenizer(tmp_path, {n: c for n, c in after.exported.items() if n != "tokenizer.model"})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    new = [*range(before.vocab_size, after.vocab_size)]
    assert len(theirs) == after.vocab_size
    assert theirs.convert_tokens_to_ids([*NAMES]) == new
    assert theirs.eos_token_id == after.eos_id
    for text in TEXTS:
        own = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert own == after.encode(text)
    plain = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=False)
    user, end = new[1], new[3]
    expected = [user, *after.encode("\nwords"), end]
    assert plain.encode("<|user|>\nwords<|end|>", add_special_tokens=False) == expected
    assert theirs.decode(expected, skip_special_tokens=True) == "\nwords"


def test_gguf_names_them_control_pieces(tmp_path):
    sentencepiece_model(tmp_path / "given")
    before = load_tokenizer(tmp_path / "given")
    after = with_special_tokens(before, NAMES, tmp_path / "new")
    old, new = (gguf_vocabulary(each, each.vocab_size) for each in (before, after))
    assert new["tokens"] == [*old["tokens"], *NAMES]
    assert new["token_type"] == [*old["token_type"], *[CONTROL] * len(NAMES)]
    assert new["merges"] == old["merges"]
    assert new["scores"][: len(old["scores"])] == old["scores"]


def test_the_model_says_how_many_pieces_it_has(tmp_path):
    sentencepiece_model(tmp_path / "given")
    after = with_special_tokens(load_tokenizer(tmp_path / "given"), NAMES, tmp_path / "new")
    model = ModelProto.FromString(after.files()["tokenizer.model"])
    assert model.trainer_spec.vocab_size == len(model.pieces) == after.vocab_size


# --- what does not fit --------------------------------------------------------------------------


def test_a_name_that_text_is_encoded_to_is_refused(pair, tmp_path):
    before, _ = pair
    library = getattr(before, "KIND", "") == "Hugging Face"
    ordinary = "[tool]" if library else next(n for n in ("▁ta", "▁t", "in") if before.piece_id(n))
    with pytest.raises(DataError, match="is an ordinary piece"):
        with_special_tokens(before, ["<|new|>", ordinary], tmp_path / "new")
    for name, reason in (("", "is empty"), ("a b", "whitespace"), ("<unused_1>", "fillers")):
        with pytest.raises(DataError, match=reason):
            with_special_tokens(before, [name], tmp_path / "new")
    with pytest.raises(DataError, match="named twice"):
        with_special_tokens(before, ["<|new|>", "<|new|>"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_name_that_would_change_a_role_is_refused(tmp_path):
    model = given(**PLAIN, pad_piece="<|pad|>")[1]
    (tmp_path / "tokenizer.model").write_bytes(model)
    before = load_tokenizer(tmp_path)
    assert before.pad_id == before.eos_id
    with pytest.raises(DataError, match="other ids would change"):
        with_special_tokens(before, ["<|pad|>"], tmp_path / "new")


def test_the_end_of_a_document_stays_where_no_file_named_it(tmp_path):
    byte_level(tmp_path / "given")
    (tmp_path / "given" / "tokenizer_config.json").write_text('{"bos_token": "<pad>"}')
    before = load_tokenizer(tmp_path / "given")
    after = with_special_tokens(before, ["<|end_of_text|>"], tmp_path / "new")
    assert (after.bos_id, after.eos_id) == (before.bos_id, before.eos_id) == (701, 0)


def test_a_vocabulary_that_skips_ids_is_refused(tmp_path):
    Library(models.BPE({"a": 0, "b": 1, "c": 9}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    with pytest.raises(DataError, match="other ids would change or be skipped"):
        with_special_tokens(load_tokenizer(tmp_path), NAMES, tmp_path / "new")
