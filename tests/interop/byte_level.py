"""Byte-level BPE tokenizers that split a text in the ways that llama.cpp has names for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from minimind.interop.gguf import SPLITS, TAKES_WHOLE

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THOUGHT = "<think>"  # matched in a text


def splitter(splits: str) -> PreTokenizer:
    """What splits a text: by ByteLevel's own words, by digits too, or by an expression."""
    last = ByteLevel(add_prefix_space=False, use_regex=splits in ("", "digits"))
    first = {"": [], "digits": [Digits(individual_digits=True)]}
    steps = first.get(splits, [Split(Regex(splits), "isolated")])
    return Steps([*steps, last]) if splits else last


def write_tokenizer(folder: Path, name: str, texts: Sequence[str]) -> None:
    """Write a tokenizer of this name of llama.cpp, trained on texts, to a new folder."""
    made = Tokenizer(models.BPE(ignore_merges=name == TAKES_WHOLE))
    made.pre_tokenizer = splitter({name: splits for splits, name in SPLITS.items()}[name])
    made.decoder = decoders.ByteLevel()
    if name == "qwen2":
        made.normalizer = normalizers.NFC()
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator([*texts], trainer)
    made.add_tokens([AddedToken(THOUGHT, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
