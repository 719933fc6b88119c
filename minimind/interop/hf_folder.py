"""The small files beside weights that transformers reads, tokenizer included.

AutoTokenizer selects a class by model_type as well as by tokenizer_config.json, and some classes
rebuild what tokenizer.json defines. So the files are loaded and compared before they are written.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minimind.architecture.select import special_ids
from minimind.data.tokenizer.files import CONFIG_NAME, JSON_NAME, dump_json, with_length
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.data.tokenizer.vocabulary import CONTROL, FILLER
from minimind.interop.write_folder import configuration_files
from minimind.runtime.panics import panics_caught

TEXTS = (
    *("Hello, world!", " leading and  double spaces\n\n\ttab\r\n", "0123456789 3.14", "naïve café"),
    *("春眠不覺曉，處處聞啼鳥。", "日本語のテキスト", "한국어 문장", "Привет, мир", "مرحبا"),
    *("🙂👩‍👩‍👧🏳️‍🌈", "a▁b ▁ c", "def f(x):\n    return x ** 2\n", "\u200b\ufeff\u00a0"),
)
RANDOM_TEXTS = 200  # made of random pieces of the vocabulary

Files = dict[str, bytes]


def transformers_files(
    config: PretrainedConfig, tokenizer: AnyTokenizer, dtype: str
) -> tuple[Files, str | None]:
    """The small files of a model of transformers, and a note if AutoTokenizer reads other ids."""
    values = json.loads(config.to_json_string())
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    positions = getattr(config, "max_position_embeddings", None)  # also of configs that rename it
    return config_and_tokenizer_files(values | special_ids(tokenizer), tokenizer, dtype, positions)


def config_and_tokenizer_files(
    config: Mapping[str, Any], tokenizer: AnyTokenizer, dtype: str, positions: int | None
) -> tuple[Files, str | None]:
    """Configuration files, and tokenizer files from which AutoTokenizer gives the same ids.

    If no variant of them does, the second value is a note with the reason.
    """
    configuration = configuration_files(config, dtype)
    texts = list(_test_texts(tokenizer))
    expected = [tokenizer.encode(text) for text in texts]
    files: Files = {}
    reason = ""
    for variant in _variants(with_length(tokenizer.exported, positions)):
        files = {**configuration, **variant}
        reason = _compare_ids(files, texts, expected, AutoTokenizer)
        if not reason:
            return files, None
    note = f"AutoTokenizer of transformers {transformers.__version__} {reason}"
    if JSON_NAME in files and not _compare_ids(files, texts, expected, PreTrainedTokenizerFast):
        return files, f"{note}; load it with PreTrainedTokenizerFast.from_pretrained"
    return files, f"{note}; tokenize with minimind, or train with another tokenizer"


def _variants(files: Mapping[str, bytes]) -> Iterator[Files]:
    """The tokenizer files as they are, then with the class that takes tokenizer.json literally.

    The code that an auto_map names is not among the files.
    """
    if CONFIG_NAME not in files:
        yield dict(files)
        return
    config = json.loads(files[CONFIG_NAME])
    if "auto_map" not in config:
        yield dict(files)
    if config.pop("auto_map", None) is None and JSON_NAME not in files:
        return
    if JSON_NAME in files:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    yield {**files, CONFIG_NAME: dump_json(config)}


def _compare_ids(
    files: Mapping[str, bytes], texts: list[str], expected: list[list[int]], loader: Any
) -> str:
    """What goes wrong when `loader` reads these files; empty if it gives the expected ids."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            with panics_caught():
                loaded = loader.from_pretrained(
                    folder, trust_remote_code=False, local_files_only=True
                )
                actual = [loaded.encode(text, add_special_tokens=False) for text in texts]
        except Exception as error:  # transformers' converters raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"does not load this tokenizer ({lines[0]})".replace(folder, "DIR")
    wrong = sum(one != other for one, other in zip(actual, expected, strict=True))
    if not wrong:
        return ""
    return f"loads it as {type(loaded).__name__}, with other ids for {wrong} of {len(texts)} texts"


def _test_texts(tokenizer: AnyTokenizer) -> Iterator[str]:
    yield from TEXTS
    pieces = tokenizer.pieces()
    ids = [i for i, piece in enumerate(pieces) if piece.kind not in (CONTROL, FILLER)]
    rng = random.Random(0)
    for _ in range(RANDOM_TEXTS if ids else 0):
        yield tokenizer.decode(rng.choices(ids, k=rng.randint(1, 20)))
