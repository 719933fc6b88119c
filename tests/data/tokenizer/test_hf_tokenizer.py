"""Tokenizers that somebody else wrote as tokenizer.json: read, used, refused."""

import json

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.shards.manifest import Options
from minimind.data.text.inputs import Source
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from minimind.errors import DataError
from tests.data.tokenizer.test_tokenizer import AWKWARD, fuzz, prose, verse

END = "<|endoftext|>"


def byte_level(directory, **options):
    """Like GPT-2's and Llama 3's: letters for bytes, and a token that is added behind."""
    library = Library(models.BPE(**options))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(prose(1, 50), trainer)
    library.add_tokens(["[tool]"])
    library.add_special_tokens(["<pad>"])
    directory.mkdir(exist_ok=True)
    library.save(str(directory / "tokenizer.json"))
    return library


def write(path, value):
    path.write_text(json.dumps(value))


@pytest.fixture
def directory(tmp_path):
    byte_level(tmp_path / "given")
    return tmp_path / "given"


def test_a_byte_level_tokenizer_loses_nothing_and_takes_no_text_for_a_special_token(directory):
    tokenizer = load_tokenizer(directory)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    sizes = tokenizer.piece_bytes()
    texts = [*AWKWARD, END, f"a{END}b<pad>", *prose(2, 10), *verse(2, 10), *fuzz(4, 500)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == tokenizer.encode_arrays([text], 1)[0].tolist()
        assert tokenizer.decode(ids) == text
        assert sizes[ids].sum() == len(text.encode())
        assert not {tokenizer.eos_id, tokenizer.pad_id} & {*ids}


def test_ids_cover_added_tokens_and_the_roles_are_those_of_the_files_beside(directory):
    plain = load_tokenizer(directory)
    assert plain.vocab_size == 702
    assert (plain.bos_id, plain.eos_id, plain.pad_id, plain.unused) == (-1, 0, 0, 0)
    assert plain.encode("[tool]") == [700]
    assert plain.piece_bytes()[[0, 700, 701]].tolist() == [0, 6, 0]
    write(directory / "special_tokens_map.json", {"eos_token": "<pad>", "bos_token": END})
    assert (load_tokenizer(directory).bos_id, load_tokenizer(directory).eos_id) == (0, 701)
    config = {"eos_token": {"content": END, "lstrip": False}, "pad_token": "<pad>"}
    write(directory / "tokenizer_config.json", config)
    report = load_tokenizer(directory / "tokenizer.json")
    assert (report.bos_id, report.eos_id, report.pad_id) == (0, 701, 701)  # as AutoTokenizer
    listed = {"added_tokens_decoder": {"0": {"content": END, "special": True}}}
    write(directory / "tokenizer_config.json", config | listed)
    report = load_tokenizer(directory / "tokenizer.json")
    assert (report.bos_id, report.eos_id, report.pad_id) == (-1, 0, 701)
    assert len({plain.fingerprint, report.fingerprint, load_tokenizer(directory).fingerprint}) == 2


def test_truncation_padding_and_dropout_of_the_file_are_left_out(tmp_path):
    library = byte_level(tmp_path / "given", dropout=0.5)
    library.enable_truncation(3)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "given" / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "given")
    text = prose(2, 1)[0]
    assert len({tuple(tokenizer.encode(text)) for _ in range(10)}) == 1
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_saved_one_is_the_same_and_takes_the_place_of_another_kind(directory, tmp_path):
    (tmp_path / "new").mkdir()
    train_tokenizer(["text"], 512, tmp_path / "new" / "tokenizer.model")
    assert isinstance(load_tokenizer(tmp_path / "new"), SentencePieceTokenizer)
    given = load_tokenizer(directory)
    given.save(tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        *("tokenizer.json", "tokenizer_config.json")
    ]
    again = load_tokenizer(tmp_path / "new")
    assert again.fingerprint == given.fingerprint
    assert again.files() == given.files()
    assert again.eos_id == given.eos_id


def test_pieces_of_a_decoder_that_joins_words_count_the_space(tmp_path):
    library = Library(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.Lowercase()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    library.train_from_iterator(["the cathedral the cat"] * 5, trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"eos_token": "[SEP]"})
    tokenizer = load_tokenizer(tmp_path)
    text = "the cathedral the cat"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.piece_bytes()[tokenizer.encode(text)].sum() == len(text) + 1


def test_text_is_prepared_with_it(directory, tmp_path):
    texts = prose(3, 40)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "t.jsonl").write_text(lines)
    source = Source("data", (str(tmp_path / "t.jsonl"),))
    requested = PrepareRequest((source,), str(directory), options=Options(val_fraction=0.1))
    prepared = prepare_for_run(requested, tmp_path / "cache")
    assert prepared.manifest["vocab_size"] == 702
    tokens = len(prepared.train) + len(prepared.val)
    assert tokens == sum(len(prepared.tokenizer.encode(text)) + 1 for text in texts)


def test_half_a_character_is_reported(directory):
    for threads in (1, 2):
        with pytest.raises(DataError, match="surrogate"):
            load_tokenizer(directory).encode_arrays(["fine", "a\ud83d"], threads)


def test_one_without_an_end_of_document_is_reported_where_to_name_it(tmp_path):
    library = Library(models.BPE({"a": 0, "b": 1}, []))
    library.save(str(tmp_path / "tokenizer.json"))
    message = r'token that ends a document.*"eos_token".*tokenizer_config\.json'
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)
    write(tmp_path / "tokenizer_config.json", {"eos_token": "<end>"})
    with pytest.raises(DataError, match=r"no token '<end>', the eos_token"):
        load_tokenizer(tmp_path)
    write(tmp_path / "tokenizer_config.json", {"eos_token": "b"})
    assert load_tokenizer(tmp_path).eos_id == 1
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: is not JSON"):
        load_tokenizer(tmp_path)
