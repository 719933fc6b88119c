"""What the examples read: lines of this Python's own library, and a tokenizer learnt on them.

Nothing is fetched. The same interpreter always gives the same lines and the same pieces, so every
process of a launch may make them for itself.
"""

from __future__ import annotations

import sysconfig
import tempfile
from itertools import islice
from pathlib import Path

import sentencepiece
from stdlib_corpus import sources
from transformers import AlbertTokenizer

LENGTHS = range(24, 73)
SPECIAL = {"pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "pad_piece": "<pad>"}


def labelled_lines(count: int, skipped: int = 0) -> list[tuple[str, int]]:
    """Lines of code (0) and of comments (1, without their #) in turn."""
    code: list[str] = []
    comments: list[str] = []
    for text in sources(Path(sysconfig.get_paths()["stdlib"])):
        for line in map(str.strip, text.splitlines()):
            words = line.lstrip("# ") if line.startswith("#") else line
            if len(words) in LENGTHS:
                (comments if line.startswith("#") else code).append(words)
        if 2 * min(len(code), len(comments)) > count + skipped:
            break
    pairs = zip(code, comments, strict=False)
    rows = [row for pair in pairs for row in zip(pair, (0, 1), strict=True)]
    return list(islice(rows, skipped, skipped + count))


def learnt_tokenizer(texts: list[str], pieces: int = 512) -> AlbertTokenizer:
    """A SentencePiece tokenizer of so many pieces, with [CLS], [SEP] and [MASK]."""
    with tempfile.TemporaryDirectory() as folder:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(texts),
            model_prefix=f"{folder}/spiece",
            vocab_size=pieces,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            num_threads=1,
            minloglevel=2,
            **SPECIAL,
        )
        return AlbertTokenizer.from_pretrained(folder)
