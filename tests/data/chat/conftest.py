import json

import pytest
from transformers import AutoTokenizer

from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from tests.data.chat.made import EVERY_TOKEN, WORDS
from tests.data.tokenizer.test_tokenizer import prose, verse


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A SentencePiece model with special tokens, and the tokenizer.json made from it."""
    directory = tmp_path_factory.mktemp("chat_tokenizer")
    texts = [*prose(1, 200), *verse(1, 200), " ".join(WORDS)]
    train_tokenizer(texts, 1000, directory / "tokenizer.model", special=EVERY_TOKEN)
    SentencePieceTokenizer(directory).save(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(folder):
    return SentencePieceTokenizer(folder)


@pytest.fixture(scope="session")
def byte_level(folder, tmp_path_factory):
    """A byte-level tokenizer.json that normalizes to NFC, as Qwen's does."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    directory = tmp_path_factory.mktemp("byte_level")
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<s>", "</s>", *EVERY_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*prose(1, 200), *verse(1, 200)], trainer)
    made.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "additional_special_tokens": list(EVERY_TOKEN),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return HuggingFaceTokenizer(directory)


@pytest.fixture(scope="module", params=["sentencepiece", "byte_level"])
def pair(request, tokenizer, byte_level):
    """Ours, and what AutoTokenizer makes of tokenizer.json, matching special tokens in text."""
    ours = tokenizer if request.param == "sentencepiece" else byte_level
    theirs = AutoTokenizer.from_pretrained(ours.path.parent)
    theirs.split_special_tokens = False
    return ours, theirs
