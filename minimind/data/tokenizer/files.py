"""The files of a tokenizer in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from minimind.runtime.durable_files import storing, write_whole

MODEL_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
SPECIALS_NAME = "special_tokens_map.json"
TOKENIZER_FILES = (MODEL_NAME, JSON_NAME, CONFIG_NAME, SPECIALS_NAME)
LARGEST_FILE = 2**28  # bytes; a million pieces take a tenth of it


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
