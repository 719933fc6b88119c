"""The vocabulary of byte-level BPE in GGUF; tests/examples/test_other_servers.py asks llama.cpp."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from transformers import AutoTokenizer

from minimind.cli.main import main
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import UsageError
from minimind.interop.gguf import (
    CONTROL,
    NORMAL,
    SPLITS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    gguf_vocabulary,
    note_on_spaces,
)
from tests.conftest import sentences
from tests.data.chat.folders import LLAMA, write
from tests.interop.byte_level import SPECIAL, THOUGHT, write_tokenizer
from tests.interop.hostile import good_folder


@pytest.fixture(scope="module", params=SPLITS.values())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("byte_level") / request.param
    write_tokenizer(place, request.param, sentences(1, 100))
    return place


def test_each_row_has_its_token_and_merges_have_their_order(folder: Path):
    tokenizer: Any = load_tokenizer(folder)
    rows = tokenizer.vocab_size + 3
    found = gguf_vocabulary(tokenizer, rows)
    assert (found["model"], found["pre"]) == ("gpt2", folder.name)
    names = [tokenizer.piece_name(i) for i in range(tokenizer.vocab_size)]
    assert found["tokens"] == [*names, *(f"[PAD{i}]" for i in range(rows - 3, rows))]
    types = [NORMAL] * (rows - 4)
    types[:3] = [CONTROL] * len(SPECIAL)
    assert found["tokens"][rows - 4] == THOUGHT
    assert found["token_type"] == [*types, USER_DEFINED, UNUSED, UNUSED, UNUSED]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert found["merges"] == [" ".join(pair) for pair in merges]
    assert (found["bos_token_id"], found["eos_token_id"], found["padding_token_id"]) == (0, 0, 0)
    assert [found["add_bos_token"], found["add_eos_token"]] == [False, False]


def step(values: dict[str, Any], number: int) -> dict[str, Any]:
    first = values["pre_tokenizer"]
    return first["pretokenizers"][number] if first["type"] == "Sequence" else first


SPLIT = "gguf has no name for how it splits a text"
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another expression": (lambda v: step(v, 0)["pattern"].update(Regex=r"\w+"), SPLIT),
    "a literal": (lambda v: step(v, 0).update(pattern={"String": " "}), SPLIT),
    "what is between": (lambda v: step(v, 0).update(invert=True), SPLIT),
    "words removed": (lambda v: step(v, 0).update(behavior="Removed"), SPLIT),
    "split twice": (lambda v: step(v, 1).update(use_regex=True), SPLIT),
    "a space in front": (lambda v: step(v, 1).update(add_prefix_space=True), SPLIT),
    "three steps": (
        lambda v: v["pre_tokenizer"]["pretokenizers"].insert(0, dict(step(v, 0))),
        SPLIT,
    ),
    "punctuation": (lambda v: step(v, 0).update(type="Punctuation"), SPLIT),
    "no splits": (lambda v: v.update(pre_tokenizer=None), SPLIT),
    "lower case": (
        lambda v: v.update(normalizer={"type": "Lowercase"}),
        "has the normalizer 'Lowercase', and gguf has no name for it",
    ),
    "whole words": (
        lambda v: v["model"].update(ignore_merges=True),
        "has ignore_merges = True, unlike qwen2 of gguf, which splits so",
    ),
    "an end of words": (
        lambda v: v["model"].update(end_of_word_suffix="</w>"),
        "has end_of_word_suffix = '</w>', and gguf has no name for it",
    ),
    "dropout": (
        lambda v: v["model"].update(dropout=0.1),
        "has dropout = 0.1, and gguf has no name for it",
    ),
    "unigram": (
        lambda v: v.update(
            model={"type": "Unigram", "vocab": [[t, -1.0] for t in v["model"]["vocab"]]}
        ),
        "is a Unigram model, and a tokenizer.json is only written if it has byte pairs",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_llama_cpp_would_split_otherwise_is_refused(change: str, tmp_path: Path):
    write_tokenizer(tmp_path, "qwen2", sentences(1, 20))
    tokenizer = load_tokenizer(tmp_path)
    gguf_vocabulary(tokenizer, tokenizer.vocab_size)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    apply, told = CHANGES[change]
    apply(values)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=f"tokenizer.json: {told}; export --format llama$"):
        gguf_vocabulary(load_tokenizer(tmp_path), tokenizer.vocab_size)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "smollm"])
def test_composition_is_known_with_the_split_of_qwen2_alone(name: str, tmp_path: Path):
    write_tokenizer(tmp_path, name, sentences(1, 20))
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**values, "normalizer": {"type": "NFC"}}))
    with pytest.raises(UsageError, match="has the normalizer 'NFC', and gguf has no name for it"):
        gguf_vocabulary(load_tokenizer(tmp_path), 1000)


TEXTS = (
    *("Hello, world!", " one space", "  two", "   three  inside ", "a", " ", "  ", "\n", "\n\n a"),
    *("\ttab", "春眠不覺曉，處處聞啼鳥。", " 春眠", "日本語のテキスト", "naïve café", "🙂👩‍👩‍👧"),
    *("def f(x):\n    return x ** 2\n", "0123456789 3.14", "the wind and the sky", "end ", "x\r\n"),
)


def sentencepiece_model(folder: Path, own: tuple[str, ...] = (), **changes: Any) -> Any:
    """A SentencePiece tokenizer as Llama 2 has it, but for `changes`."""
    options: dict[str, Any] = {
        **{"model_type": "bpe", "vocab_size": 400, "normalization_rule_name": "identity"},
        **{"byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": True},
        **{"character_coverage": 0.9995, "pad_id": -1, "minloglevel": 2, "num_threads": 1},
        **{"user_defined_symbols": [*own], "hard_vocab_limit": False},
    }
    folder.mkdir(parents=True, exist_ok=True)
    trainer: Any = sentencepiece.SentencePieceTrainer
    with open(folder / "tokenizer.model", "wb") as file:
        trainer.train(
            sentence_iterator=iter([*sentences(1, 200), *TEXTS]),
            model_writer=file,
            **{**options, **changes},
        )
    return load_tokenizer(folder)


def scored(entries: dict[str, Any], text: str) -> list[int]:
    """Ids as llama.cpp makes them of a vocabulary of "llama".

    It matches special and own tokens, then merges between them by the highest score.
    """
    ids = {token: i for i, token in enumerate(entries["tokens"])}
    kinds = dict(zip(entries["tokens"], entries["token_type"], strict=True))
    whole = [token for token, kind in kinds.items() if kind in (CONTROL, USER_DEFINED)]
    matched = re.compile(f"({'|'.join(map(re.escape, sorted(whole, key=len, reverse=True)))})")
    prefix = " " if entries["add_space_prefix"] else ""
    found = []
    for number, part in enumerate(matched.split(text)):
        found += [ids[part]] if number % 2 else merged(entries, ids, part and f"{prefix}{part}")
    return found


def merged(entries: dict[str, Any], ids: dict[str, int], text: str) -> list[int]:
    can = {token: i for token, i in ids.items() if entries["token_type"][i] == NORMAL}
    parts = [*text.replace(" ", "\u2581")]
    while True:
        pairs = [(at, can.get(a + b)) for at, (a, b) in enumerate(pairwise(parts))]
        known = [(-entries["scores"][i], at) for at, i in pairs if i is not None]
        if not known:
            break
        at = min(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    spelt = ([can[p]] if p in can else [ids[f"<0x{b:02X}>"] for b in p.encode()] for p in parts)
    return [i for own in spelt for i in own]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_before_a_text_is_kept(prefix: bool, tmp_path: Path):
    tokenizer = sentencepiece_model(tmp_path, add_dummy_prefix=prefix)
    entries = gguf_vocabulary(tokenizer, tokenizer.vocab_size + 2)
    assert entries["add_space_prefix"] is prefix
    for text in TEXTS:
        assert scored(entries, text) == tokenizer.encode(text), text


def test_own_pieces_are_user_defined(tmp_path: Path):
    own = ("<|user|>", "[INST]")
    tokenizer = sentencepiece_model(tmp_path, own, add_dummy_prefix=False)
    entries = gguf_vocabulary(tokenizer, tokenizer.vocab_size)
    kinds = zip(entries["tokens"], entries["token_type"], strict=True)
    assert {token for token, kind in kinds if kind == USER_DEFINED} == {*own}


def test_a_written_file_has_the_space_and_gives_the_ids(tmp_path: Path):
    folder = good_folder(tmp_path / "model")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**LLAMA, "legacy": True}))
    tokenizer = sentencepiece_model(folder)
    words = ["export", "--checkpoint", str(folder), "--format", "gguf", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    names = ("tokens", "scores", "token_type", "add_space_prefix")
    entries: Any = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in names}
    assert entries["add_space_prefix"] is True
    (tmp_path / "out" / "tokenizer.model").unlink()  # else transformers converts this one
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in TEXTS:
        if not text.startswith(" "):  # transformers puts no second space before a text
            assert scored(entries, text) == tokenizer.encode(text), text
            found = theirs.encode(text, add_special_tokens=False)
            assert found == tokenizer.encode(text), text


def test_a_written_file_has_the_tokens_that_a_folder_adds_to_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = good_folder(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    size = sentencepiece_model(folder).vocab_size
    flags = {"special": True, "normalized": False}
    added = {str(size): {"content": "<|im_start|>", **flags}}
    added |= {str(size + 1): {"content": "<|im_end|>", **flags}}
    added |= {str(size + 2): {"content": "<think>", **flags, "special": False}}
    config = {**LLAMA, "eos_token": "<|im_end|>", "pad_token": "<unk>", "legacy": False}
    config["added_tokens_decoder"] = added
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    words = ["export", "--checkpoint", str(folder), "--format", "gguf", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0
    assert "one more space than the tokenizer: after a special token" in capsys.readouterr().err
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    entries: Any = {name: field.contents() for name, field in fields.items()}
    tokens, kinds = (entries[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    assert tokens[size : size + 4] == ["<|im_start|>", "<|im_end|>", "<think>", f"[PAD{size + 3}]"]
    assert kinds[size : size + 4] == [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    ids = [entries[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "padding")]
    assert ids == [1, size + 1, 0]


AFTER, BEFORE = "after a special token", "before a text that begins with a space"
# Folders that transformers reads as merged pieces: whether a space is put before a text, and where
# llama.cpp puts more of them.
MERGED: dict[str, tuple[bool, list[str]]] = {
    "llama": (True, [AFTER, BEFORE]),
    "llama, legacy": (True, [BEFORE]),
    "llama, no prefix space": (False, []),
    "model without a class": (False, []),
    "no dummy prefix": (True, [AFTER, BEFORE]),  # as a class of transformers reads it
    "trainer's defaults": (True, [AFTER, BEFORE]),
    "control tags, legacy": (True, [BEFORE]),
    "added tokens": (True, [AFTER, BEFORE]),
    "added tokens, legacy": (True, [BEFORE]),
    "added tokens, not special": (True, [AFTER, BEFORE]),
    "added_tokens.json": (True, [AFTER, BEFORE]),
    "as Gemma": (False, []),
    "metaspace always": (True, [BEFORE]),
    "metaspace never": (False, []),
    "prepended": (True, []),
    "both, more in the json": (True, [AFTER, BEFORE]),
}
CHAT = "<s>[INST] the sky [/INST] a<|im_end|>\nb</s>"


@pytest.mark.parametrize("kind", MERGED)
def test_merged_pieces_have_the_ids_of_autotokenizer(kind: str, tmp_path: Path):
    """Where a note says that readers put more spaces, texts without such a place."""
    prefix, places = MERGED[kind]
    folder = write(tmp_path / "model", kind, "{{ messages }}")
    tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    rows = tokenizer.vocab_size + 2
    entries = gguf_vocabulary(tokenizer, rows)
    assert entries["add_space_prefix"] is prefix
    where = ", and ".join(places)
    note = f"readers of gguf put one more space than the tokenizer: {where}" if where else None
    assert note_on_spaces(tokenizer, entries) == note
    texts = [text for text in TEXTS if BEFORE not in places or not text.startswith(" ")]
    for text in [*texts, *([] if AFTER in places else [CHAT])]:
        assert scored(entries, text) == theirs.encode(text, add_special_tokens=False), text
    if AFTER in places:
        assert scored(entries, CHAT) != theirs.encode(CHAT, add_special_tokens=False)
    added = {i: token for i, token in theirs.added_tokens_decoder.items() if i < rows - 2}
    found = {i: (entries["tokens"][i], entries["token_type"][i]) for i in added}
    unknown = entries.get("unknown_token_id")
    assert found == {
        i: (token.content, UNKNOWN if i == unknown else CONTROL if token.special else USER_DEFINED)
        for i, token in added.items()
    }
    ids = entries["bos_token_id"], entries["eos_token_id"]
    assert ids == (theirs.bos_token_id, theirs.eos_token_id)


MERGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "in another order": (
        lambda v: v["model"]["merges"].sort(key=lambda pair: len(pair[0])),
        "merges pieces in another order than readers of gguf, which know only the pieces",
    ),
    "a merge is missing": (
        lambda v: v["model"]["merges"].pop(),
        "merges pieces in another order than readers of gguf, which know only the pieces",
    ),
    "words taken whole": (
        lambda v: v["model"].update(ignore_merges=True),
        "has ignore_merges = True, and gguf has no name for it",
    ),
    "a byte is missing": (
        lambda v: v["model"]["vocab"].update({"<zero>": v["model"]["vocab"].pop("<0x00>")}),
        "has no byte pieces, in which readers of gguf spell what has no other",
    ),
    "lower case": (
        lambda v: v.update(normalizer={"type": "Lowercase"}),
        "changes or splits a text before it merges, which readers of gguf do not",
    ),
    "split at digits": (
        lambda v: v.update(pre_tokenizer={"type": "Digits", "individual_digits": True}),
        "changes or splits a text before it merges, which readers of gguf do not",
    ),
    "tokens that overlap": (
        lambda v: v["added_tokens"][0].update(content="<s><"),
        "matches '<s><' before it merges, which readers of gguf do in another order",
    ),
    "a token with spaces after": (
        lambda v: v["added_tokens"][1].update(rstrip=True),
        "gguf has no rstrip of the token '<s>'",
    ),
}


@pytest.mark.parametrize("change", MERGES)
def test_merged_pieces_that_readers_would_read_otherwise_are_refused(change: str, tmp_path: Path):
    folder = write(tmp_path / "model", "metaspace never", "{{ messages }}")
    values = json.loads((folder / "tokenizer.json").read_text())
    apply, told = MERGES[change]
    apply(values)
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(UsageError) as caught:
        gguf_vocabulary(load_tokenizer(folder), 1000)
    assert f"{folder}/tokenizer.json: {told}; export --format llama" == str(caught.value)


REFUSED = {
    "unigram": (
        {"model_type": "unigram"},
        "is a model of unigram pieces, and only those that are merged are written as gguf",
    ),
    "words": ({"model_type": "word", "byte_fallback": False}, "is a model of word pieces, and"),
    "no bytes": (
        {"byte_fallback": False},
        "has no byte pieces, in which readers of gguf spell what has no other",
    ),
    "nmt_nfkc": (
        {"normalization_rule_name": "nmt_nfkc"},
        "normalizes a text by nmt_nfkc, which readers of gguf do not for merged pieces",
    ),
    "nfkc_cf": ({"normalization_rule_name": "nfkc_cf"}, "normalizes a text by nfkc_cf, which"),
    "spaces removed": (
        {"remove_extra_whitespaces": True},
        "removes or moves spaces of a text, which readers of gguf do not for merged pieces",
    ),
    "spaces after words": ({"treat_whitespace_as_suffix": True}, "removes or moves spaces of a te"),
    "own pieces that overlap": (
        {"own": ("ab", "bcd"), "add_dummy_prefix": False},
        "matches 'ab' before it merges, which readers of gguf do in another order",
    ),
    "own pieces with spaces": (
        {"own": ("\u2581\u2581x",), "add_dummy_prefix": False},
        "matches '\u2581\u2581x' before it merges, which readers of gguf do in another order",
    ),
    "own pieces and a space": (
        {"own": ("<|user|>",)},
        "matches '<|user|>' before it merges, which readers of gguf do in another order",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_sentencepiece_model_is_refused_by_what_it_does(name: str, tmp_path: Path):
    changes, told = REFUSED[name]
    tokenizer = sentencepiece_model(tmp_path, **changes)
    with pytest.raises(UsageError) as caught:
        gguf_vocabulary(tokenizer, tokenizer.vocab_size)
    assert f"{tmp_path}/tokenizer.model: {told}" in str(caught.value)
    assert str(caught.value).endswith("; export --format llama")
