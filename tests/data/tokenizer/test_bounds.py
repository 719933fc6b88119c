"""What bounds a tokenizer lets through: usual ones; and what it refuses, with the figure."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)
from tokenizers import normalizers

from minimind.data.tokenizer import bounds
from minimind.data.tokenizer.bounds import require_bounded_json, require_bounded_model
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import DataError
from tests.conftest import sentences

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve"
    r"|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def untyped(step: dict[str, Any]) -> dict[str, Any]:
    return {key: step[key] for key in step if key != "type"}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [*steps]}


USUAL: dict[str, dict[str, Any]] = {
    "nothing": {},
    "GPT-2": {"pre_tokenizer": split(GPT2)},
    "Llama 3": {"pre_tokenizer": split(LLAMA3)},
    "o200k": {"pre_tokenizer": split(O200K)},
    "Llama 2": {
        "normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")),
        "decoder": {"type": "Sequence", "decoders": [replace(" ", String="▁"), {"type": "Fuse"}]},
    },
    "CLIP": {
        "normalizer": sequence({"type": "NFC"}, replace(" ", Regex=r"\s+"), {"type": "Lowercase"})
    },
    "blanks and quotes": {
        "normalizer": sequence(
            replace(" ", Regex=" {2,}"),
            replace('"', String="``"),
            replace('"', String="''"),
            {"type": "NFKD"},
            {"type": "StripAccents"},
        )
    },
    "six quotes": {"normalizer": sequence(*[replace("''", String='"')] * 6)},
    "words of letters": {"model": {"type": "WordPiece", "max_input_chars_per_word": 100}},
    "a pattern that Python has not": {"normalizer": replace("-", Regex=r"\p{Pd}+")},
}
GROWING: list[tuple[dict[str, Any], str]] = [
    ({"normalizer": sequence(*[replace("''", String='"')] * 7)}, "its normalizer may write 128"),
    ({"normalizer": replace("x" * 65, String="a")}, "its normalizer may write 65 characters"),
    ({"normalizer": replace("x" * 130, String="ab")}, "its normalizer may write 65 characters"),
    ({"normalizer": replace("x" * 195, Regex="a[bc]d")}, "its normalizer may write 65 characters"),
    ({"normalizer": replace("x" * 64, Regex="a*")}, "its normalizer may write 65 characters"),
    ({"normalizer": replace("x" * 64, Regex=r"\p{L}?")}, "its normalizer may write 65"),
    ({"normalizer": replace("x" * 64, String="")}, "its normalizer may write 65 characters"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 64}}, "its normalizer may write 65"),
    ({"decoder": replace("x" * 65, String="a")}, "its decoder may write 65 characters"),
    # The library takes a step without a type by its keys, and does not read other keys.
    ({"normalizer": untyped(replace("x" * 65, String="a"))}, "its normalizer may write 65 char"),
    ({"normalizer": {"prepend": "x" * 64}}, "its normalizer may write 65 characters"),
    (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 64, "pattern": {"String": "a"}}},
        "its normalizer may write 65 characters",
    ),
    # It takes the values of a step as a list, too, and some patterns otherwise than Python.
    ({"normalizer": [{"String": "a"}, "x" * 65]}, "its normalizer has a step as a list"),
    (
        {"normalizer": {"type": "Sequence", "normalizers": [[{"String": "a"}, "x" * 65]]}},
        "its normalizer has a step as a list",
    ),
    ({"decoder": ["x" * 65]}, "its decoder has a step as a list"),
    ({"normalizer": replace("x" * 640, Regex="(?<=a)q{10}?")}, "its normalizer may write 641"),
    ({"normalizer": replace("x" * 64, Regex="[a[bc]]")}, "its normalizer may write 65"),
    ({"model": {"vocab": [["a" * 1025, 0.0]]}}, "a piece of 1,025 characters"),
    ({"model": {"unk_token": "x" * 65}}, "its unk_token may write 65 characters"),
    ({"model": {"end_of_word_suffix": "x" * 65}}, "its end_of_word_suffix may write 65"),
    ({"model": {"type": "WordPiece", "max_input_chars_per_word": 1001}}, "up to 1001 characters"),
    ({"model": {"type": "Unigram", "vocab": [["a" * 1025, 0.0]]}}, "a piece of 1,025 characters"),
]


@pytest.mark.parametrize("name", USUAL)
def test_usual_ones_pass(name: str):
    require_bounded_json(Path("tokenizer.json"), USUAL[name])


@pytest.mark.parametrize(("values", "words"), GROWING)
def test_what_grows_is_refused_with_the_figure(values: dict[str, Any], words: str):
    with pytest.raises(DataError, match=rf"^tokenizer\.json: .*{words}.*; give another tokenizer$"):
        require_bounded_json(Path("tokenizer.json"), values)


def test_the_bound_is_not_exceeded_by_the_library():
    """Of steps that are let through, on text that they are made for."""
    grow = sequence(*[replace("''", String='"')] * 6)
    steps = [normalizers.Replace('"', "''") for _ in range(6)]
    once = normalizers.Sequence(steps).normalize_str('"')
    require_bounded_json(Path("tokenizer.json"), {"normalizer": grow})
    assert len(once) <= bounds.MOST_GROWTH


@pytest.mark.parametrize("bad", [None, 7, "x", [], {"type": 7}, {"type": "Replace", "pattern": 7}])
@pytest.mark.parametrize("part", ["normalizer", "decoder", "pre_tokenizer", "model"])
def test_what_is_none_is_left_to_the_library(part: str, bad: Any):
    require_bounded_json(Path("tokenizer.json"), {part: bad})


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc", "nfkc_cf"])
def test_usual_models_of_sentencepiece_pass(rule: str, kind: str):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
        sentence_iterator=iter(sentences(1, 50)),
        model_writer=model,
        model_type=kind,
        vocab_size=120,
        hard_vocab_limit=False,
        normalization_rule_name=rule,
        minloglevel=2,
    )
    require_bounded_model(Path("tokenizer.model"), ModelProto.FromString(model.getvalue()))


def test_patterns_are_tried_once(
    tiny_tokenizer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []
    stand_in = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(bounds, "LimitedServer", lambda *given: asked.append(given) or stand_in)
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer)
    load_tokenizer(tmp_path).save(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    load_tokenizer(tmp_path)
    assert asked == []  # it has none
    values = json.loads((tmp_path / "tokenizer.json").read_bytes())
    values["pre_tokenizer"] = split("[a-z]+(?:tried once)?")
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    load_tokenizer(tmp_path)
    load_tokenizer(tmp_path)
    assert len(asked) == 1


def test_an_id_that_would_fill_the_memory_is_refused(tiny_tokenizer: bytes, tmp_path: Path):
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer)
    load_tokenizer(tmp_path).save(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    values = json.loads((tmp_path / "tokenizer.json").read_bytes())
    last = {**values["added_tokens"][-1], "content": "<|last|>", "id": 2**32 - 1}
    values["added_tokens"].append(last)
    values["model"]["vocab"]["<|last|>"] = 2**32 - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(
        DataError, match=r"tokenizer\.json: has the id 4,294,967,295, above the limit"
    ):
        load_tokenizer(tmp_path)
