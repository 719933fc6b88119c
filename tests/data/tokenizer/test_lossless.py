"""What a tokenizer loses of a text: refused by every command, or named where it is allowed."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import minimind.train as training
from minimind.cli.main import main as minimind
from minimind.data.prepare.prepared import open_prepared, open_text
from minimind.data.shards.manifest import read_manifest
from minimind.data.tokenizer.load import load_tokenizer
from minimind.data.tokenizer.lossless import TextLoss, lost_bytes
from minimind.errors import DataError
from tools.runs import events

train: Any = training  # a package that is called like a function
CHINESE = [f"{n} 春眠不覺曉，處處聞啼鳥。夜來風雨聲，花落知多少。" for n in range(40)]
WORDS = "light of the day and water over earth that was good in a garden of trees".split()
ENGLISH = [
    f"The {WORDS[n % 16]} {WORDS[n % 7]} {WORDS[n % 5]} was {n} days old." for n in range(60)
]
ODD = [
    f"Caf\u00e9 {n} e\u0301 \u212b \ufb01ne \u00bd \uff21\uff22 \u3000 Ab  c\n\n d "
    for n in range(40)
]
END = "<|endoftext|>"


def learnt(kind: str) -> Tokenizer:
    """A tokenizer of one of the common kinds, learnt on plain English."""
    special: dict[str, Any] = {"special_tokens": [END, "[UNK]"], "show_progress": False}
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space", use_regex=True)
    if kind == "WordLevel":
        one = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        one.pre_tokenizer, trainer = (
            pre_tokenizers.Whitespace(),
            trainers.WordLevelTrainer(**special),
        )
    elif kind == "WordPiece":
        one = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        one.normalizer, one.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
        one.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, **special)
    elif kind == "Unigram":
        one = Tokenizer(models.Unigram())
        one.pre_tokenizer, one.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="[UNK]", **special)
    elif kind in ("BPE", "BPE with unk"):
        one = Tokenizer(models.BPE(unk_token="[UNK]") if kind == "BPE with unk" else models.BPE())
        one.pre_tokenizer, one.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=400, **special)
    else:
        one = Tokenizer(models.BPE())
        one.pre_tokenizer, one.decoder = byte_level, decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, **special)
        named = {"NFC": normalizers.NFC(), "NFKC": normalizers.NFKC(), "strip": normalizers.Strip()}
        named["lower case"] = normalizers.Lowercase()
        if kind in named:
            one.normalizer = named[kind]
    one.train_from_iterator(ENGLISH, trainer)
    return one


def written(kind: str, place: Path) -> Path:
    folder = place / kind
    folder.mkdir(exist_ok=True)
    if kind.startswith("SentencePiece"):
        model, rule = io.BytesIO(), kind.partition(" ")[2]
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
            sentence_iterator=iter(ENGLISH),
            model_writer=model,
            model_type="bpe",
            vocab_size=300,
            character_coverage=1.0,
            byte_fallback="bytes" in kind,
            hard_vocab_limit=False,
            normalization_rule_name="nmt_nfkc" if "nfkc" in rule else "identity",
            remove_extra_whitespaces="nfkc" in rule,
            minloglevel=2,
        )
        (folder / "tokenizer.model").write_bytes(model.getvalue())
    else:
        learnt(kind).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


def measured(folder: Path, texts: list[str]) -> TextLoss:
    tokenizer, loss = load_tokenizer(folder), TextLoss()
    ids = tokenizer.encode_arrays(texts, 1)
    loss.count(tokenizer, tokenizer.piece_bytes(), texts, ids)
    return loss


# By tokenizer: the shares that it loses of Chinese, of English and of odd characters.
SHARES = {
    "BPE": (0.963, 0, 0.578),
    "BPE with unk": (0.963, 0, 0.578),
    "WordLevel": (0.977, 0.03, 0.963),
    "WordPiece": (0.977, 0.03, 0.834),
    "Unigram": (0.963, 0, 0.578),
    "byte level": (0, 0, 0),
    "prefix space": (0, 0, 0),
    "NFC": (0, 0, 0.128),
    "NFKC": (0.08, 0, 0.428),
    "strip": (0, 0, 0.021),
    "lower case": (0, 0.03, 0.235),
    "SentencePiece": (0.963, 0, 0.578),
    "SentencePiece bytes": (0, 0, 0),
    "SentencePiece nfkc": (0.963, 0, 0.663),
    "SentencePiece nfkc bytes": (0.08, 0, 0.535),
}


@pytest.mark.parametrize("kind", SHARES)
def test_the_share_that_is_lost(kind: str, tmp_path: Path):
    folder = written(kind, tmp_path)
    for texts, share in zip((CHINESE, ENGLISH, ODD), SHARES[kind], strict=True):
        loss = measured(folder, texts)
        assert loss.share == pytest.approx(share, abs=6e-4), str(loss)
        assert (loss.lost == 0) == (share == 0)
        assert loss.bytes == sum(len(text.encode()) for text in texts)
        assert bool(loss.example) == bool(loss.changed) >= bool(loss.lost)


def test_a_change_that_cannot_be_seen_is_shown_by_codes(tmp_path: Path):
    assert measured(written("NFC", tmp_path), ["e\u0301"]).example == (
        r"'e\u0301' comes back as '\xe9'"
    )


def test_bytes_that_are_lost():
    for text, back, lost in [
        ("abc", "abc", 0),
        ("abc", " abc", 0),  # a space before the text
        ("春眠a", "a", 6),
        ("春", "", 3),
        ("AbC", "abc", 2),
        ("a b", "ab", 1),
        ("ab", "a b", 1),
        (" a", "  a", 1),
        ("e\u0301", "\u00e9", 3),
        ("\ufb01", "fi", 3),
        ("a\nb", "a b", 1),
        ("\u00e9", "\ufffd", 3),
    ]:
        assert lost_bytes(text, back) == lost, (text, back)


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_prepare_refuses_a_tokenizer_that_loses_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    english, chinese = lines(tmp_path / "e.jsonl", ENGLISH), lines(tmp_path / "c.jsonl", CHINESE)
    folder = written("BPE", tmp_path)
    words = ["prepare", "--tokenizer", str(folder), "--val_fraction", "0.2"]
    assert minimind([*words, str(english), "--out", str(tmp_path / "english")]) == 0
    assert "lossy" not in capsys.readouterr().out
    sources = ["--source", f"a={english}:3", "--source", f"b={chinese}:1"]
    out = ["--out", str(tmp_path / "mixed")]
    assert minimind([*words, *sources, *out]) == 3
    error = capsys.readouterr().err
    assert "source b: the tokenizer" in error
    assert "春" in error
    assert "comes back as" in error
    assert "--allow_lossy_tokenizer" in error
    assert not (tmp_path / "mixed").exists()
    assert minimind([*words, *sources, *out, "--allow_lossy_tokenizer"]) == 0
    assert "lossy  b: the tokenizer loses 9" in capsys.readouterr().out
    first, second = read_manifest(tmp_path / "mixed")["sources"]
    assert (first["text_loss"]["lost"], second["text_loss"]["bytes"]) == (0, second["text_bytes"])
    assert minimind(["data", "inspect", str(tmp_path / "mixed")]) == 0
    assert "lossy  b: the tokenizer loses 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "back", "lost"),
    [
        (" answer", "answer", 0),
        ("answer", " answer", 0),
        ("  answer", " answer", 0),
        ("   answer", " answer", 2),
        (" answer", "answer ", 1),
        ("ab", "a", 1),
    ],
)
def test_one_space_before_a_text_is_no_loss(text: str, back: str, lost: int):
    assert lost_bytes(text, back) == lost


def test_no_more_is_said_to_be_lost_than_there_is():
    assert str(TextLoss(bytes=9, lost=12, example="x")) == "100.00% of the text (9 of 9 bytes): x"


def test_bytes_without_a_decoder_are_named_with_what_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, folder = lines(tmp_path / "e.jsonl", ENGLISH), written("byte level", tmp_path)
    words = ["prepare", "--tokenizer", str(folder), str(path), "--out"]
    assert minimind([*words, str(tmp_path / "with")]) == 0
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": None}))
    assert minimind([*words, str(tmp_path / "without")]) == 3
    error = capsys.readouterr().err
    assert 'has no decoder for its bytes: write "decoder": {"type": "ByteLevel"} there, or' in error


def test_inspect_says_what_is_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, folder = lines(tmp_path / "c.jsonl", CHINESE), written("WordLevel", tmp_path)
    assert minimind(["tokenizer", "inspect", str(folder), "--data_path", str(path)]) == 0
    assert re.search(r"c\.jsonl: loses 97\.66% of the text \([\d,]+ of", capsys.readouterr().out)


def test_shares_are_merged_with_what_they_lose(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = lines(tmp_path / "c.jsonl", CHINESE * 3)
    words = ["prepare", str(path), "--tokenizer", str(written("Unigram", tmp_path))]
    out = ["--out", str(tmp_path / "out")]
    for number in range(2):
        assert minimind([*words, *out, "--shard_bytes", "4000", "--shard", f"{number}/2"]) == 0
    assert minimind(["prepare", "--merge", *out]) == 3
    assert "loses 9" in capsys.readouterr().err
    assert minimind(["prepare", "--merge", *out, "--allow_lossy_tokenizer"]) == 0
    (source,) = read_manifest(tmp_path / "out")["sources"]
    whole = measured(tmp_path / "Unigram", CHINESE * 3)
    found = TextLoss(**source["text_loss"])
    assert (found.bytes, found.tokens, found.lost) == (whole.bytes, whole.tokens, whole.lost)
    assert len(read_manifest(tmp_path / "out")["splits"]["train"]["shards"]) > 1


SHAPE: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 16},
    **{"batch_size": 4, "device": "cpu", "deepspeed_config": "none", "max_steps": 2},
}


def test_train_and_eval_measure_the_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, folder = lines(tmp_path / "c.jsonl", CHINESE * 3), written("BPE with unk", tmp_path)
    flags = {**SHAPE, "data_path": [str(path)], "tokenizer": str(folder), "val_fraction": 0.3}
    flags |= {"cache_dir": str(tmp_path / "cache"), "eval_rows": 10**6}
    for _ in range(2):  # also from the cache
        with pytest.raises(DataError, match=r"loses 9\d\.\d\d% of the text"):
            train(flags, out_dir=str(tmp_path / "refused"))
    assert train(flags, out_dir=str(tmp_path / "out"), allow_lossy_tokenizer=True) == 0
    assert "lossy    the tokenizer loses 9" in capsys.readouterr().out
    found = events(tmp_path / "out", "eval")[-1]
    (cache,) = (tmp_path / "cache").glob("tokens-*[0-9a-f]")
    split = open_prepared(cache).manifest["splits"]["val"]
    bits = found["val_loss"] / math.log(2) * split["tokens"] / split["text_bytes"]
    assert found["val_bpb"] == pytest.approx(bits, rel=1e-9)
    words = ["eval", "--checkpoint", str(tmp_path / "out"), "--data_path", str(path)]
    words += ["--device", "cpu", "--cache_dir", str(tmp_path / "cache"), "--json"]
    assert minimind(words) == 3
    assert "loses 9" in capsys.readouterr().err
    ratios = list[float]()
    for more, of in (([], "text"), (["--max_rows", "20"], "tokens")):
        assert minimind([*words, "--allow_lossy_tokenizer", *more]) == 0
        output = capsys.readouterr()
        assert "c.jsonl: the tokenizer loses 9" in output.err
        result = json.loads(output.out)
        assert result["bytes_of"] == of
        total = sum(len(text.encode()) for text in CHINESE * 3)
        assert more or result["bytes"] == total
        ratios.append(result["bytes"] / result["tokens"])
    assert ratios[1] == pytest.approx(ratios[0], rel=0.01)


def test_conversations_are_measured_between_special_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    turns = [{"role": "user", "content": CHINESE[0]}, {"role": "assistant", "content": "the end"}]
    path = tmp_path / "talk.jsonl"
    path.write_text((json.dumps({"messages": turns, "source": "web"}) + "\n") * 40)
    english = lines(tmp_path / "e.jsonl", ENGLISH)
    base = {**SHAPE, "max_seq_len": 64, "cache_dir": str(tmp_path / "cache"), "eval_rows": 8}
    base["tokenizer"] = str(written("BPE with unk", tmp_path))
    assert train({**base, "data_path": [str(english)]}, out_dir=str(tmp_path / "base")) == 0
    del base["tokenizer"]
    flags = {**base, "task": "sft", "init_from": str(tmp_path / "base"), "data_path": [str(path)]}
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len"):
        del flags[name]
    with pytest.raises(DataError, match=r"loses \d\d\.\d\d% of the text .*春"):
        train(flags, out_dir=str(tmp_path / "sft"))
    assert train(flags, out_dir=str(tmp_path / "sft"), allow_lossy_tokenizer=True) == 0
    output = capsys.readouterr().out
    assert "ignored keys beside the turns: source\n" in output
    assert "lossy    the tokenizer loses" in output


def test_a_tokenizer_learnt_here_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = lines(tmp_path / "c.jsonl", [*CHINESE, *ENGLISH, *ODD])
    monkeypatch.setattr(TextLoss, "count", lambda *_: pytest.fail("it loses nothing"))
    words = ["prepare", str(path), "--vocab_size", "600", "--out", str(tmp_path / "out")]
    assert minimind(words) == 0
    prepared = open_text(tmp_path / "out")
    assert prepared.tokenizer.is_lossless
    assert "text_loss" not in prepared.manifest["sources"][0]
    (sizes,) = prepared.bytes_per_id("val")
    np.testing.assert_array_equal(sizes, prepared.tokenizer.piece_bytes())
