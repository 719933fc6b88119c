"""`minimind tokenizer train | inspect` from the command line: files, figures, errors."""

import json
import subprocess
import sys
from hashlib import sha256

import pytest
import sentencepiece
from transformers import AutoTokenizer

from minimind.cli.main import main
from minimind.data.prepare.encode import split_of
from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
from minimind.data.shards.manifest import Options
from minimind.data.text.inputs import Source
from minimind.data.text.sample import sample
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer
from minimind.data.tokenizer.statistics import quote
from tests.data.tokenizer.test_tokenizer import prose, verse
from tests.killing import killed_in_replacing

FILES = ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
MANY = [f"<{i}>" for i in range(133)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = (json.dumps({"text": text}) for text in prose(1, 100) + verse(1, 50))
    path.write_text("\n".join(lines) + "\n")
    return path


def tokenizer(*words):
    return main(["tokenizer", *map(str, words)])


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "tokenizer"
    assert tokenizer("train", text, "--out", out, "--vocab_size", 700, "--val_fraction", 0.1) == 0
    return out


def test_the_same_text_and_seed_give_the_same_files(text, trained, tmp_path, capsys):
    again = tmp_path / "deep" / "again"
    words = ["--out", again, "--vocab-size", "700", "--val_fraction", "0.1", "--seed", "42"]
    assert tokenizer("train", "--data_path", text, *words) == 0
    assert contents(again) == contents(trained)
    assert sorted(contents(again)) == FILES
    output = capsys.readouterr().out
    assert f"{again}: 700 pieces (0 of them unused), learnt from" in output
    assert "bytes per token on" in output
    assert "of held-out text" in output
    assert [path.name for path in again.parent.iterdir()] == ["again"]


def test_special_tokens_are_listed_and_loaded(text, trained, tmp_path, capsys):
    out, names = tmp_path / "out", ["<|im_start|>", "<|im_end|>", "<tool_call>"]
    words = ["--out", out, "--vocab_size", 700, "--special_tokens", *names[:2]]
    assert tokenizer("train", text, *words, "--special-tokens", names[2]) == 0
    assert AutoTokenizer.from_pretrained(out).convert_tokens_to_ids(names) == [4, 5, 6]
    assert sorted(contents(out)) == FILES
    capsys.readouterr()
    assert tokenizer("inspect", out) == 0
    output = capsys.readouterr().out
    assert "2 '</s>'  3 '<pad>'  4 '<|im_start|>'  5 '<|im_end|>'  6 '<tool_call>'\n" in output
    assert ["control", "7"] in [line.split()[:2] for line in output.splitlines()]
    (line,) = (line for line in output.splitlines() if line.endswith(" awkward text"))
    assert line.split()[-3] == "all"
    assert b"additional" not in contents(trained)["tokenizer_config.json"]


REFUSED = {
    "": "is empty",
    "<pad>": "is built in",
    "<0x41>": "is built in",
    "<unused_7>": "begins with <unused_",
    "a b": "holds whitespace",
    "a\u3000": "holds whitespace",
    "a\n": "holds whitespace",
    "a\0b": "a character that cannot be printed",
    "a\ud83d": "a character that cannot be printed",
    "a\ufdd0": "a character that cannot be printed",
    "a\u2581": "holds U+2581",
    "x": "is one character",
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_special_token_is_rejected(name, text, tmp_path, capsys):
    words = ["--out", tmp_path / "out", "--special_tokens", "<ok>", name]
    assert tokenizer("train", text, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--special_tokens: {name!r} " in line
    assert REFUSED[name] in line
    assert [*tmp_path.iterdir()] == []


def test_seed_determines_the_sample(text, tmp_path):
    few = ["--vocab_size", 600, "--sample_bytes", 65536]
    for name, seed in {"a": 1, "b": 2, "c": 1}.items():
        assert tokenizer("train", text, "--out", tmp_path / name, "--seed", seed, *few) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "c")
    assert contents(tmp_path / "a") != contents(tmp_path / "b")


def test_tokenizer_equals_that_of_a_run_on_the_text(text, trained, tmp_path):
    request = PrepareRequest((Source("data", (str(text),)),), None, 700, Options(val_fraction=0.1))
    prepared = prepare_for_run(request, tmp_path)
    assert prepared.tokenizer.fingerprint == SentencePieceTokenizer(trained).fingerprint


def split(text: str) -> str:
    return split_of(sha256(text.encode()).digest(), 0.5)


def test_held_out_documents_are_not_trained_on(tmp_path):
    texts = [f"{i} {'zq' * 20}" for i in range(40)] + ["abc " * 20] * 5
    texts = [
        t
        for t in texts
        if (split_of(sha256(t.encode()).digest(), 0.5) == "val") == t.endswith("zq")
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    assert any("zq" in t for t in texts)
    assert any("abc" in t for t in texts)
    words = ["--out", tmp_path / "o", "--vocab_size", 512, "--val_fraction", 0.5]
    assert tokenizer("train", tmp_path / "t.jsonl", *words) == 0
    pieces = {piece.content for piece in SentencePieceTokenizer(tmp_path / "o").pieces()}
    assert b"abc" in pieces
    assert b"zq" not in pieces


def test_autotokenizer_loads_the_output(trained):
    theirs = AutoTokenizer.from_pretrained(trained)
    for text in prose(7, 5) + verse(7, 5):
        assert theirs(text)["input_ids"] == SentencePieceTokenizer(trained).encode(text)


def test_existing_folder_is_replaced_only_with_force_and_if_it_is_an_output(text, tmp_path, capsys):
    out = tmp_path / "out"
    few = [text, "--out", out, "--vocab_size"]
    assert tokenizer("train", *few, 512) == 0
    assert tokenizer("train", *few, 600) == 2
    assert f"--out {out} exists" in capsys.readouterr().err
    assert SentencePieceTokenizer(out).vocab_size == 512
    assert tokenizer("train", *few, 600, "--force") == 0
    assert SentencePieceTokenizer(out).vocab_size == 600
    (out / "notes.txt").write_text("mine")
    assert tokenizer("train", *few, 512, "--force") == 2
    assert "notes.txt" in capsys.readouterr().err
    assert (out / "notes.txt").read_text() == "mine"


def trained_otherwise(folder, text):
    """A model of SentencePiece's own settings."""
    options = {"input": str(text), "model_prefix": str(folder / "tokenizer"), "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(vocab_size=600, byte_fallback=True, **options)
    (folder / "tokenizer.vocab").unlink()


def with_json(name, change):
    def edit(folder, text):
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values, ensure_ascii=False, indent=1))

    return edit


FOREIGN = {
    "tokenizer.json alone": lambda folder, text: (folder / "tokenizer.model").unlink(),
    "a model of other settings": trained_otherwise,
    "no model": lambda folder, text: (folder / "tokenizer.model").write_bytes(b"mine"),
    "an empty model": lambda folder, text: (folder / "tokenizer.model").write_bytes(b""),
    "another configuration": with_json(
        "tokenizer_config.json", lambda values: values.update(model_max_length=512)
    ),
    "an own template": with_json(
        "tokenizer_config.json", lambda values: values.update(chat_template="mine")
    ),
    "another tokenizer.json": with_json("tokenizer.json", lambda values: values.update(a=1)),
    "a template": lambda folder, text: (folder / "chat_template.jinja").write_text("mine"),
    "special tokens": lambda folder, text: (folder / "special_tokens_map.json").write_text("{}"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_force_replaces_no_tokenizer_of_others(name, text, tmp_path, capsys):
    out = tmp_path / "out"
    words = ("train", text, "--out", out, "--vocab_size", 600)
    assert tokenizer(*words) == 0
    FOREIGN[name](out, text)
    before = contents(out)
    assert tokenizer(*words, "--force") == 2
    assert f"--out {out} " in capsys.readouterr().err
    assert contents(out) == before


@pytest.mark.sample(1)
@pytest.mark.parametrize("at", range(1, 5))
def test_next_command_cleans_up_after_a_kill(text, tmp_path, at):
    out = tmp_path / "out"
    words = ["tokenizer", "train", str(text), "--out", str(out), "--vocab_size"]
    assert main([*words, "512"]) == 0
    old = contents(out)
    killed_in_replacing([*words, "600", "--force"], at)
    is_new = out.exists() and contents(out) != old
    assert main([*words, "512"]) == 2
    assert is_new or contents(out) == old
    assert SentencePieceTokenizer(out).vocab_size == (600 if is_new else 512)
    assert main([*words, "700", "--force"]) == 0
    assert SentencePieceTokenizer(out).vocab_size == 700
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_inspect_counts_pieces_tokens_and_unused_pieces(text, trained, capsys):
    capsys.readouterr()
    assert tokenizer("inspect", trained, "--data_path", text) == 0
    output = capsys.readouterr().out
    ours = SentencePieceTokenizer(trained)
    assert f"SentencePiece, 700 pieces, id 2 ends a document, sha256 {ours.fingerprint}" in output
    assert ["byte", "256"] in [line.split()[:2] for line in output.splitlines()]
    documents = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    ids = [i for document in documents for i in ours.encode(document)]
    per_token = sum(len(document.encode()) for document in documents) / len(ids)
    line = next(line for line in output.splitlines() if line.endswith(str(text)))
    assert line.split() == ["150", *line.split()[1:3], f"{per_token:.3f}", "all", str(text)]
    assert f"never produced on that text: {696 - len({*ids})} of 696 pieces" in output
    longest = max(ours.pieces(), key=lambda piece: len(piece.content)).content
    assert f"  {quote(longest)}\n" in output.split("longest pieces")[1]


def test_inspect_reports_text_that_does_not_round_trip(tmp_path, text, capsys):
    from tokenizers import Tokenizer as Library
    from tokenizers import models, normalizers

    library = Library(models.BPE({"<unk>": 0, "a": 1, "</s>": 2}, [], unk_token="<unk>"))
    library.normalizer = normalizers.Lowercase()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.txt").write_text("aaAaa")
    assert tokenizer("inspect", tmp_path / "tokenizer.json", "--data_path", tmp_path / "t.txt") == 0
    output = capsys.readouterr().out
    assert "Hugging Face, 3 pieces, id 2 ends" in output
    assert "NOT 1" in output
    assert "t.txt: loses 100.00% of the text (5 of 5 bytes): 'aaAaa' comes back as" in output


def test_bad_documents_are_skipped_and_told(trained, text, tmp_path, capsys):
    place = tmp_path / "bad.jsonl"
    bad = b'{"text": "a"}{"text": "b"}\n\0\n'
    place.write_bytes(text.read_bytes() + bad)
    told = f"note   {place}: 3 bad documents skipped, 1 byte lost, the first: {place}:"
    train = ("train", place, "--out", tmp_path / "out", "--vocab_size", 512)
    for words in (("inspect", trained, "--data_path", place), train):
        assert tokenizer(*words) == 3
        assert tokenizer(*words, "--on_bad_data", "skip") == 0
        assert told in capsys.readouterr().err


def test_pieces_are_escaped_for_a_terminal():
    assert quote("\x1b[31m \n\u202e字".encode()) == r"'\x1b[31m \n\u202e字'"
    assert quote("字".encode()[:2]) == r"'\xe5\xad'"


def test_second_writer_of_one_output_is_rejected(text, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    words = ["train", text, "--out", out, "--vocab_size"]
    learnt = []

    def meanwhile(*given):
        learnt.append(given)
        if len(learnt) == 1:
            assert tokenizer(*words, 600) == 0
        return sample(*given)

    monkeypatch.setattr("minimind.data.text.sample.sample", meanwhile)
    assert tokenizer(*words, 512) == 2
    output = capsys.readouterr().err
    assert output.endswith(f"--out {out} exists; give another folder, or --force to replace it\n")
    assert SentencePieceTokenizer(out).vocab_size == 600
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("where", ["text.sample.sample", "tokenizer.sentencepiece.train_tokenizer"])
def test_ctrl_c_prints_one_line_and_keeps_an_earlier_output(
    where, text, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    words = ["train", text, "--out", out, "--vocab_size", 512]
    assert tokenizer(*words) == 0
    before = contents(out)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"minimind.data.{where}", interrupted)
    capsys.readouterr()
    assert tokenizer(*words, "--force", "--special_tokens", "<a>") == 130
    assert capsys.readouterr().err == (
        f"minimind: error[INTERRUPTED]: stopped; {out} is unchanged, and the same command starts"
        " again\n"
    )
    assert contents(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["train", "TEXT"], 2, "required: --out"),
        (["train", "--out", "OUT"], 2, "no text was named"),
        (["train", "TEXT", "--out", "OUT", "--vocab_size", "511"], 2, "511 must be at least 512"),
        (["train", "TEXT", "--out", "OUT", "--vocab_size", "2000000"], 2, "2000000 is more than"),
        (["train", "TEXT", "--out", "OUT", "--special_tokens"], 2, "expected at least one"),
        (["train", "TEXT", "--out", "OUT", "--special_tokens", "<a>", "<a>"], 2, "is named twice"),
        (
            ["train", "TEXT", "--out", "OUT", "--vocab_size", "512", "--special_tokens", *MANY],
            2,
            "133 are more than the 132 that vocab_size = 512 has room for",
        ),
        (
            ["train", "TEXT", "--out", "OUT", "--val_fraction", "1"],
            2,
            "--val_fraction: 1 must be at least 0 and below 1",
        ),
        (["train", "TEXT", "--out", "OUT", "--sample_bytes", "0"], 2, "--sample_bytes"),
        (["train", "TEXT", "--out", "OUT", "--sample_bytes", "9K"], 2, "--sample_bytes 9216 is"),
        (
            ["train", "TEXT", "--out", "OUT", "--max_document_bytes", "9"],
            3,
            "max_document_bytes = 9",
        ),
        (["train", "TEXT", "--out", "OUT", "--val_fraction", "0.99999"], 3, "no document is left"),
        (["train", "TEXT", "TEXT", "--out", "OUT"], 2, "is named twice; name it once"),
        (["train", "NONE", "--out", "OUT"], 3, "no such file"),
        (["train", "BLANK", "--out", "OUT"], 3, "no text to learn"),
        (
            ["train", "TEXT", "--out", "OUT", "--text_field", "t\udcff"],
            2,
            r"'t\udcff' is not UTF-8",
        ),
        (["inspect"], 2, "required: DIR|FILE"),
        (["inspect", "OUT"], 3, "no such tokenizer"),
        (["inspect", "FOLDER"], 3, "neither tokenizer.model (SentencePiece) nor tokenizer.json"),
        (["inspect", "TEXT"], 3, "not a SentencePiece model"),
    ],
)
def test_invalid_arguments_give_a_one_line_error_and_leave_nothing(
    words, status, message, text, tmp_path, capsys
):
    (tmp_path / "blank.txt").write_text("\n\n")
    places = {"TEXT": text, "OUT": tmp_path / "out", "NONE": tmp_path / "none", "FOLDER": tmp_path}
    places["BLANK"] = tmp_path / "blank.txt"
    assert tokenizer(*(places.get(word, word) for word in words)) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["blank.txt"]


def test_help_needs_neither_torch_nor_a_tokenizer_library():
    code = (
        "import sys; from minimind.cli.main import build_parser; build_parser();"
        "print({'torch', 'sentencepiece', 'tokenizers', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_inspect_accepts_documents_as_long_as_the_tokenizer(trained, text, monkeypatch, capsys):
    monkeypatch.setattr(SentencePieceTokenizer, "longest_at_once", 40)
    assert tokenizer("inspect", trained, "--data_path", text) == 3
    assert "max_document_bytes = 40;" in capsys.readouterr().err
    assert tokenizer("inspect", trained, "--data_path", text, "--max_document_bytes", "1MiB") == 0
