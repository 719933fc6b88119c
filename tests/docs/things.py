"""What the commands of the pages name, made small: text, runs, models, and the project's folder."""

from __future__ import annotations

import csv
import json
import random
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import minimind.train
from minimind.data.tokenizer.load import load_tokenizer
from tests.conftest import ROOT, SMALL, Trained, sentences
from tests.data.chat.templates import PLAIN
from tests.data.chat.test_turns import sft_line
from tests.interop import minimind2
from tests.interop.byte_level import write_tokenizer

FOLDERS = ("benchmarks", "configs", "docs", "examples", "minimind", "scripts", "tests", "tools")
FILES = ("Makefile", "constraints.txt", "pyproject.toml", "run_accelerate.sh", "train_pretrain.py")
DOCUMENTS = 250  # 37 rows of 512 tokens: two steps of two processes


class Things:
    """Makes whatever commands name and do not make themselves."""

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        text, run, model = self._text, self._run, self._llama
        self._makers: dict[str, Callable[[Path], object]] = {
            **dict.fromkeys(("my_text.jsonl", "notes.jsonl", "poems.jsonl", "kjv.jsonl"), text),
            **{"articles.json": self._articles, "articles.csv": self._articles},
            "other_text.jsonl": text,
            **{"notes.jsonl.zst": text, "books/": self._books, "kjv/": self._verses},
            **dict.fromkeys(
                ("my_talk.jsonl", "talk.jsonl", "held_out.jsonl", "more.jsonl"), self._talk
            ),
            **dict.fromkeys(("out/mine", "out/a", "out/b", "out/c", "out/sample/run"), run),
            **dict.fromkeys(("out/sft", "out/sample/sft"), self._tuned),
            **dict.fromkeys(("exported", "DIR"), model),
            "identity_conversations.jsonl": self._lists_of_turns,
            **{"pretrain_t2t_mini.jsonl": text, "sft_t2t_mini.jsonl": self._minimind3_talk},
            "out/other": self._other_run,
            "data/big": lambda path: shutil.copytree(trained.mixed, path),
            "prompts.jsonl": lambda path: path.write_text('{"prompt": "Once upon"}\n' * 3),
            **{"full_sft_512.pth": self._minimind2, "minimind-3": self._minimind3},
            "minimind_tokenizer": lambda path: shutil.copytree(trained.run / "tokenizer", path),
        }

    def put(self, commands: Sequence[str], place: Path) -> None:
        """The project's folder as a reader has it, and what these commands find there."""
        for name in (*FOLDERS, *FILES):
            (place / name).symlink_to(ROOT / name)
        (place / ".venv").mkdir()
        for path in Path(sys.prefix).iterdir():
            if path.name != ".ready":
                (place / ".venv" / path.name).symlink_to(path)
        (place / ".venv" / ".ready").touch()  # newer than pyproject.toml: make installs nothing
        (place / "home").mkdir()
        for name in needed(commands, tuple(self._makers)):
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._makers[name](path)

    def _articles(self, path: Path) -> None:
        texts = sentences(len(path.name), DOCUMENTS)
        if path.suffix == ".json":
            items = [{"title": text[:9], "body": {"text": text}} for text in texts]
            path.write_text(json.dumps(items, indent=1), encoding="utf-8")
        else:
            with open(path, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([("title", "text"), *((t[:9], t) for t in texts)])

    def _text(self, path: Path) -> None:
        texts = sentences(len(path.name), DOCUMENTS)
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        if path.suffix == ".zst":
            import zstandard

            path.write_bytes(zstandard.compress("".join(lines).encode()))
        else:
            path.write_text("".join(lines), encoding="utf-8")

    def _books(self, path: Path) -> None:
        path.mkdir()
        for n, text in enumerate(sentences(7, DOCUMENTS)):
            (path / f"{n}.txt").write_text(text, encoding="utf-8")

    def _verses(self, path: Path) -> None:
        path.mkdir()
        self._text(path / "genesis.jsonl")
        self._text(path / "ruth.jsonl")

    def _run(self, path: Path) -> None:
        shutil.copytree(self._trained.run, path)

    def _other_run(self, path: Path) -> None:
        train: Any = minimind.train  # a module that is called
        places = {"data_path": str(self._trained.mixed), "cache_dir": str(self._trained.cache)}
        assert train({**SMALL, **places, "seed": 43}, out_dir=str(path)) == 0

    def _talk(self, path: Path) -> None:
        texts = sentences(len(path.name), 8 * DOCUMENTS)
        pairs = ({"prompt": text[:20], "completion": text[20:40]} for text in texts)
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")

    def _lists_of_turns(self, path: Path) -> None:
        """As of nanochat."""
        texts = sentences(len(path.name), 4 * DOCUMENTS)
        said = (zip(("user", "assistant"), (text[:20], text[20:40]), strict=True) for text in texts)
        lines = ([{"role": role, "content": one} for role, one in turns] for turns in said)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def _tuned(self, path: Path) -> None:
        train: Any = minimind.train
        talk = path.parent / "talk.jsonl"
        self._talk(talk)
        more = {"task": "sft", "init_from": str(self._trained.run), "max_steps": 2}
        more |= {"data_path": str(talk), "cache_dir": str(path.parent / "cache")}
        assert train({**more, "deepspeed_config": "none", "device": "cpu"}, out_dir=str(path)) == 0

    def _minimind3_talk(self, path: Path) -> None:
        draw = random.Random(3)
        lines = (json.dumps(sft_line(draw, number), ensure_ascii=False) for number in range(640))
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def _llama(self, path: Path, kind: str = "llama") -> None:
        """A directory of a small model with random weights.

        The tokenizer is the one in it, else that of the run.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        if not path.exists():
            load_tokenizer(self._trained.run / "tokenizer").save(path)
        tokenizer = load_tokenizer(path)
        config = AutoConfig.for_model(
            kind,
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            bos_token_id=tokenizer.bos_id,
            eos_token_id=tokenizer.eos_id,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(path)

    def _minimind3(self, path: Path) -> None:
        write_tokenizer(path, "gpt-2", sentences(1, 300))
        (path / "chat_template.jinja").write_text(PLAIN["minimind3"], encoding="utf-8")
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        names |= {"pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (path / "tokenizer_config.json").write_text(json.dumps(names))
        self._llama(path, "qwen3")
        values = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**values, "model_type": "minimind"}))

    def _minimind2(self, path: Path) -> None:
        import torch

        pieces = load_tokenizer(self._trained.run / "tokenizer").vocab_size
        shape = minimind2.Shape(dim=64, n_heads=8, n_kv_heads=2, vocab_size=pieces)
        torch.save(minimind2.random_weights(shape), path)


def needed(commands: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of `names` that are read before, if ever, a command has written them."""
    found: list[str] = []
    made: set[str] = set()
    for command in commands:
        words = shlex.split(command, comments=True)
        for before, word in zip(["", *words], words, strict=False):
            own = [name for name in names if is_in(name, word)]
            if before in ("--out", "--out_dir"):
                made.update(own)
            else:
                found += [name for name in own if name not in made and name not in found]
    return found


def is_in(name: str, word: str) -> bool:
    """Whether a word of a command names this thing, or, where it ends in /, what lies in it."""
    end = "" if name.endswith("/") else r"(?![\w.-])"
    return bool(re.search(rf"(?<![\w./-]){re.escape(name)}{end}", word))
