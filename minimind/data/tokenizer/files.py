"""The files of a tokenizer in a directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from minimind.runtime.durable_files import read_small, storing, write_whole

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIALS_NAME = "special_tokens_map.json"
TEMPLATE_NAME = "chat_template.jinja"  # as transformers names it
TOKENIZER_FILES = (MODEL_NAME, JSON_NAME, CONFIG_NAME, SPECIALS_NAME, TEMPLATE_NAME)
LARGEST_TEMPLATE = 2**20  # bytes
LARGEST_FILE = 2**28  # bytes; a million pieces take a tenth of it


def read_template_beside(path: Path) -> dict[str, bytes]:
    """The chat template beside the file of a tokenizer, by name; empty if there is none."""
    file = path.with_name(TEMPLATE_NAME)
    return {TEMPLATE_NAME: read_small(file, LARGEST_TEMPLATE)} if file.exists() else {}


def formatting_as_trained(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, such that transformers formats conversations to the ids of training.

    It renders a chat template to one text and encodes that. With a template, special tokens are
    therefore matched in texts, those that a user writes too; without one they are not.
    """
    if TEMPLATE_NAME not in files or CONFIG_NAME not in files:
        return dict(files)
    config = json.loads(files[CONFIG_NAME]) | {"split_special_tokens": False}
    return {**files, CONFIG_NAME: json.dumps(config, ensure_ascii=False, indent=1).encode()}


def write_tokenizer(directory: str | Path, files: Mapping[str, bytes]) -> None:
    """Write each file atomically and remove those of another tokenizer."""
    directory = Path(directory)
    with storing(f"{directory}: cannot write the tokenizer", "free space, or correct the path"):
        directory.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER_FILES:
            for leftover in directory.glob(f"{name}.tmp-*"):  # of a killed process
                leftover.unlink(missing_ok=True)
            if name in files:
                write_whole(directory / name, files[name])
            else:
                (directory / name).unlink(missing_ok=True)
