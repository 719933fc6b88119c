"""Tiny folders with a tokenizer, of every kind that models come with.

Each is a function of a place and of the SentencePiece models that are trained once (`Models`).
Tags of templates are tokens in some of them and text in others.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # pyright: ignore[reportAttributeAccessIssue] (made at import)
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from tests.data.tokenizer.test_tokenizer import prose, verse

ROWS = 560
CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = (*CHATML, *HEADERS, *ROLES)
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
LLAMA |= {"unk_token": "<unk>"}
LITERAL = {**LLAMA, "tokenizer_class": "PreTrainedTokenizerFast"}
MODEL, JSON, CONFIG = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
Values = dict[str, Any]


@cache
def texts() -> list[str]:
    more = ["What is the color of the sky? User: Assistant: system 12 + 3.5\n def f(x): return x"]
    return [*prose(1, 40), *verse(1, 8, 60), *more * 20]


@cache
def trained(name: str, **settings: Any) -> bytes:
    """A SentencePiece model; `name` is that of its kind in `MODELS`."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue] (no stubs)
        sentence_iterator=iter(line for text in texts() for line in text.splitlines() if line),
        model_writer=model,
        vocab_size=ROWS,
        num_threads=1,
        minloglevel=2,
        hard_vocab_limit=False,
        **({"model_type": "bpe", "byte_fallback": True} | MODELS[name]),
    )
    return model.getvalue()


# Settings of the trainer: Llama's own, and what other models change.
PLAIN: Values = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MODELS: Mapping[str, Values] = {
    "llama": PLAIN,
    "no prefix": {**PLAIN, "add_dummy_prefix": False},
    "defaults": {},  # NFKC of its own, and one space for several
    "nfkc": {**PLAIN, "normalization_rule_name": "nfkc"},
    "user-defined tags": {**PLAIN, "user_defined_symbols": [*TAGS, "  ", "    "]},
    "control tags": {**PLAIN, "control_symbols": [*TAGS]},
    "no bytes": {**PLAIN, "byte_fallback": False, "character_coverage": 0.98},
    "unigram": {**PLAIN, "model_type": "unigram"},
    "pad": {**PLAIN, "pad_id": 3},
}


@cache
def ours() -> bytes:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as place:
        train_tokenizer(texts(), ROWS, Path(place) / MODEL, special=TAGS)
        return (Path(place) / MODEL).read_bytes()


@cache
def byte_level(prefix: bool = False, normal: str = "", digits: bool = False) -> str:
    made = tokenizers.Tokenizer(models.BPE())
    if normal:
        made.normalizer = {"nfc": normalizers.NFC(), "lower": normalizers.Lowercase()}[normal]
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ROWS,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts(), trainer)
    return made.to_str()


@cache
def unigram() -> str:
    made = tokenizers.Tokenizer(models.Unigram())
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=ROWS, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(texts(), trainer)
    return made.to_str()


@cache
def words() -> str:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=ROWS, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    made.train_from_iterator(texts(), trainer)
    return made.to_str()


def changed(content: str, **parts: Any) -> str:
    """A tokenizer.json with other parts; those that it has as objects are extended."""
    values = json.loads(content)
    merged = {name: {**(values.get(name) or {}), **part} for name, part in parts.items()}
    return json.dumps({**values, **merged})


@cache
def of_bytes(kind: str = "llama", pre: str = "first", legacy_form: bool = False) -> str:
    """The pieces of a SentencePiece model as a tokenizer.json: Metaspace, or as Llama-2's was."""
    proto = ModelProto.FromString(trained(kind))
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = []
    for piece in vocab:
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if legacy_form:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=pre, split=False)
    ends = [decoders.Strip(content=" ", left=1)] if pre != "never" else []
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made.to_str()


def with_tags(content: str, tags: Sequence[str] = TAGS, special: bool = True, **flags: Any) -> str:
    """A tokenizer.json with more tokens."""
    made = tokenizers.Tokenizer.from_str(content)
    tokens = [AddedToken(tag, normalized=flags.pop("normalized", False), **flags) for tag in tags]
    (made.add_special_tokens if special else made.add_tokens)(tokens)
    return made.to_str()


def listed(first: int, tags: Sequence[str] = TAGS, **flags: Any) -> Values:
    """added_tokens_decoder of a tokenizer_config.json, with the tokens after `first`."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [(i, name) for i, name in enumerate(("<unk>", "<s>", "</s>"))]
    tokens += [(first + at, name) for at, name in enumerate(tags)]
    return {
        str(i): {"content": name, **plain, "special": True, **(flags if i >= first else {})}
        for i, name in tokens
    }


def flagged(content: str, **flags: Any) -> Values:
    """The added tokens of a tokenizer.json as a tokenizer_config.json lists them, changed."""
    tokens = json.loads(content)["added_tokens"]
    return {str(token.pop("id")): {**token, **flags} for token in tokens}


def pieces(kind: str) -> int:
    return len(ModelProto.FromString(trained(kind)).pieces)


def folder(config: Values | None, model_type: str = "llama", **files: bytes | str) -> Files:
    """Content by name; `model` and `json` stand for the files of a tokenizer."""
    names = {"model": MODEL, "json": JSON, "added": "added_tokens.json"}
    names |= {"specials": "special_tokens_map.json"}
    made: Files = {names[name]: content for name, content in files.items()}
    made["config.json"] = json.dumps({"model_type": model_type})
    return made if config is None else {**made, CONFIG: json.dumps(config)}


Files = dict[str, "bytes | str"]


def exported() -> Files:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as place:
        (Path(place) / MODEL).write_bytes(ours())
        (Path(place) / "chat_template.jinja").write_text("with one, tags in texts are matched")
        return {
            **SentencePieceTokenizer(place).exported,
            "config.json": '{"model_type": "minimind"}',
        }


def llama(kind: str = "llama", **more: Any) -> Files:
    return folder(LLAMA | more, model=trained(kind))


def appended(kind: str = "llama", **flags: Any) -> Files:
    return llama(kind, added_tokens_decoder=listed(pieces(kind), **flags))


def literal(content: str, **more: Any) -> Files:
    return folder(LITERAL | more, json=content)


def yi(config: Values) -> Files:
    content = json.loads(of_bytes("user-defined tags"))
    ids = content["model"]["vocab"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for name in (*TAGS, "  ", "    "):
        token = {"id": ids[name], "content": name, **flags, "special": name in TAGS}
        content["added_tokens"].append(token)
    return folder(config, model=trained("user-defined tags"), json=json.dumps(content))


def json_without(count: int) -> str:
    """The tokenizer.json of a model without its last pieces."""
    content = json.loads(of_bytes())
    vocab = content["model"]["vocab"]
    last = max(vocab.values()) - count
    kept = {name: i for name, i in vocab.items() if i <= last}
    merges = [pair for pair in content["model"]["merges"] if "".join(pair) in kept]
    content["model"] |= {"vocab": kept, "merges": [m for m in merges if {*m} <= kept.keys()]}
    return json.dumps(content)


MAP = json.dumps({"eos_token": "<|im_end|>", "additional_special_tokens": [*TAGS]})
WITH_FLAGS = {"eos_token": {"__type": "AddedToken", "content": "</s>", "rstrip": True}}
KINDS: dict[str, Callable[[], Files]] = {
    # tokenizer.model alone
    "llama": llama,
    "llama, legacy": lambda: llama(legacy=True),
    "llama, not legacy": lambda: llama(legacy=False),
    "llama, legacy null": lambda: llama(legacy=None),
    "llama, no prefix space": lambda: llama(add_prefix_space=False),
    "llama, legacy without prefix space": lambda: llama(legacy=True, add_prefix_space=False),
    "llama, bos and eos added": lambda: llama(add_bos_token=True, add_eos_token=True),
    "llama, fast class": lambda: llama(tokenizer_class="LlamaTokenizerFast"),
    "no tokenizer_config": lambda: folder(None, model=trained("llama")),
    "model of a literal class": lambda: folder(LITERAL, model=trained("llama")),
    "no dummy prefix": lambda: llama("no prefix"),
    "no dummy prefix, literal": lambda: folder(LITERAL, model=trained("no prefix")),
    "trainer's defaults": lambda: llama("defaults"),
    "trainer's defaults, literal": lambda: folder(LITERAL, model=trained("defaults")),
    "nfkc": lambda: llama("nfkc"),
    "no byte fallback": lambda: llama("no bytes"),
    "unigram": lambda: llama("unigram"),
    "unigram, literal": lambda: folder(LITERAL, model=trained("unigram")),
    "user-defined tags": lambda: llama("user-defined tags"),
    "control tags": lambda: llama("control tags"),
    "control tags, legacy": lambda: llama("control tags", legacy=True),
    "added tokens": appended,
    "added tokens, legacy": lambda: folder(
        LLAMA | {"legacy": True, "added_tokens_decoder": listed(pieces("llama"))},
        model=trained("llama"),
    ),
    "added tokens with spaces": lambda: appended(lstrip=True, rstrip=True),
    "added tokens, not special": lambda: appended(special=False),
    "added_tokens.json": lambda: folder(
        LLAMA,
        model=trained("llama"),
        added=json.dumps({tag: pieces("llama") + at for at, tag in enumerate(TAGS)}),
        specials=MAP,
    ),
    "a pad token that is missing": lambda: llama(pad_token="[PAD]"),
    "a pad piece": lambda: llama("pad", pad_token="<pad>"),
    # tokenizer.json alone
    "byte level": lambda: literal(with_tags(byte_level())),
    "byte level, tags as text": lambda: literal(byte_level()),
    "byte level, prefix space": lambda: literal(with_tags(byte_level(prefix=True))),
    "byte level, nfc": lambda: literal(with_tags(byte_level(normal="nfc", digits=True))),
    "byte level, lower case": lambda: literal(with_tags(byte_level(normal="lower"))),
    "byte level as Llama-3": lambda: folder(LLAMA, json=with_tags(byte_level())),
    "byte level as GPT-2": lambda: folder(
        LITERAL | {"tokenizer_class": "GPT2Tokenizer"}, "gpt2", json=with_tags(byte_level())
    ),
    "byte level as Qwen2": lambda: folder(
        LITERAL | {"tokenizer_class": "Qwen2Tokenizer"}, "qwen2", json=with_tags(byte_level())
    ),
    "byte level, a literal class in Qwen2": lambda: folder(
        LITERAL, "qwen2", json=with_tags(byte_level())
    ),
    "tags with spaces after": lambda: literal(with_tags(byte_level(), rstrip=True)),
    "tags with spaces before": lambda: literal(with_tags(byte_level(), lstrip=True)),
    "tags of whole words": lambda: literal(with_tags(byte_level(), single_word=True)),
    "tags, normalized": lambda: literal(with_tags(byte_level(normal="lower"), normalized=True)),
    "tags, not special": lambda: literal(with_tags(byte_level(), special=False)),
    "tags named beside": lambda: literal(
        with_tags(byte_level(), special=False), additional_special_tokens=[*TAGS]
    ),
    "an end that is an ordinary piece": lambda: literal(
        with_tags(byte_level(), special=False), eos_token="<|im_end|>"
    ),
    "an end with flags": lambda: folder(LITERAL | WITH_FLAGS, json=with_tags(byte_level())),
    "unigram json": lambda: literal(with_tags(unigram())),
    "metaspace first": lambda: literal(with_tags(of_bytes())),
    "metaspace always": lambda: literal(with_tags(of_bytes(pre="always"))),
    "metaspace never": lambda: literal(with_tags(of_bytes(pre="never"))),
    "prepended": lambda: literal(with_tags(of_bytes(legacy_form=True))),
    "prepended as Llama": lambda: folder(LLAMA, json=with_tags(of_bytes(legacy_form=True))),
    "prepended as Llama, legacy": lambda: folder(
        LLAMA | {"legacy": True}, json=with_tags(of_bytes(legacy_form=True))
    ),
    "json without tokenizer_config": lambda: folder(None, json=with_tags(of_bytes())),
    "json without a class": lambda: folder(
        {"bos_token": "<s>", "eos_token": "</s>"}, json=with_tags(of_bytes())
    ),
    "a token with a role of its own": lambda: literal(
        with_tags(byte_level()), extra_special_tokens={"image_token": "<|image|>"}
    ),
    "other flags beside": lambda: literal(
        with_tags(byte_level()), added_tokens_decoder=flagged(with_tags(byte_level()), rstrip=True)
    ),
    "words that are taken whole": lambda: literal(
        changed(with_tags(byte_level()), model={"ignore_merges": True})
    ),
    "word pieces": lambda: literal(with_tags(words())),
    "tokens of another file": lambda: folder(
        LITERAL,
        json=byte_level(),
        added=json.dumps({tag: ROWS + at for at, tag in enumerate(TAGS)}),
    ),
    "prepended, tags normalized": lambda: literal(
        with_tags(of_bytes(legacy_form=True), normalized=True)
    ),
    "cut short": lambda: literal(
        changed(
            with_tags(byte_level()),
            truncation=dict(direction="Right", max_length=5, strategy="LongestFirst", stride=0),
        )
    ),
    "unigram json as T5": lambda: folder(
        LITERAL | {"tokenizer_class": "T5Tokenizer"}, "t5", json=with_tags(unigram())
    ),
    "as Gemma": lambda: folder(
        LITERAL | {"tokenizer_class": "GemmaTokenizer"}, model=trained("llama")
    ),
    "model without a class": lambda: folder(
        {"bos_token": "<s>", "eos_token": "</s>"}, model=trained("llama")
    ),
    "a pad token that the json lacks": lambda: literal(with_tags(byte_level()), pad_token="[PAD]"),
    # both
    "a model of ours, a foreign json": lambda: folder(LITERAL, model=ours(), json=of_bytes()),
    "ours": lambda: {MODEL: ours(), "config.json": '{"model_type": "minimind"}'},
    "ours, exported": exported,
    "both, equal": lambda: folder(LLAMA, model=trained("llama"), json=of_bytes()),
    "both, equal, literal": lambda: folder(LITERAL, model=trained("llama"), json=of_bytes()),
    "both, equal, legacy": lambda: folder(
        LLAMA | {"legacy": True}, model=trained("llama"), json=of_bytes(legacy_form=True)
    ),
    "both, prepended, literal": lambda: folder(
        LITERAL, model=trained("llama"), json=of_bytes(legacy_form=True)
    ),
    "both, more in the json": lambda: folder(
        LLAMA, model=trained("llama"), json=with_tags(of_bytes())
    ),
    "both, fewer in the json": lambda: folder(
        LITERAL, model=trained("llama"), json=json_without(20)
    ),
    "Yi": lambda: yi(LLAMA),
    "Yi, legacy": lambda: yi(LLAMA | {"legacy": True}),
    "Yi, literal": lambda: yi(LITERAL),
}


def write(place: Path, kind: str, template: str) -> Path:
    """A folder of a kind with a chat template."""
    place.mkdir(parents=True)
    for name, content in {**KINDS[kind](), "chat_template.jinja": template}.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return place
