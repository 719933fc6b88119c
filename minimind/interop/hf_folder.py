"""The small files beside weights that transformers reads, tokenizer included.

AutoTokenizer chooses a class by model_type as well as by tokenizer_config.json, and some classes
rebuild what tokenizer.json says. So the files are loaded before they are written out.
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

from minimind.architecture.select import IDS, special_ids
from minimind.data.tokenizer.files import CONFIG_NAME, JSON_NAME
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.data.tokenizer.vocabulary import CONTROL, FILLER

TEXTS = (
    *("Hello, world!", " leading and  double spaces\n\n\ttab\r\n", "0123456789 3.14", "naïve café"),
    *(
        "春眠不覺曉，處處聞啼鳥。",
        "日本語のテキスト",
        "한국어 문장",
        "Привет, мир",
        "مرحبا",
        "🙂👩‍👩‍👧🏳️‍🌈",
    ),
    *("a▁b ▁ c", "def f(x):\n    return x ** 2\n", "\u200b\ufeff\u00a0"),
)
DRAWN = 200  # texts put together from pieces of the vocabulary


Files = dict[str, bytes]


def foreign_files(
    config: PretrainedConfig, tokenizer: AnyTokenizer, dtype: str
) -> tuple[Files, str | None]:
    """The small files of a model of transformers, and what AutoTokenizer makes of them if wrong."""
    told = json.loads(config.to_json_string())
    told["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return with_tokenizer(told | special_ids(tokenizer), tokenizer, dtype)


def with_tokenizer(
    told: Mapping[str, Any], tokenizer: AnyTokenizer, dtype: str
) -> tuple[Files, str | None]:
    """`configuration_files`, and a tokenizer from which AutoTokenizer gives the same ids.

    Where it gives others, the second value says so, and what does not.
    """
    texts = configuration_files(told, dtype)
    files, note = _tokenizer_files(tokenizer, texts)
    return {**texts, **files}, note


def configuration_files(told: Mapping[str, Any], dtype: str) -> Files:
    """config.json and generation_config.json, with the same special ids."""
    ids = {name: told[name] for name in IDS if told.get(name) is not None}
    written = {**told, "dtype": dtype, "torch_dtype": dtype}  # the latter for transformers 4
    return {
        "config.json": _json(written),
        "generation_config.json": _json({"_from_model_config": True, **ids}),
    }


def _tokenizer_files(
    tokenizer: AnyTokenizer, beside: Mapping[str, bytes]
) -> tuple[Files, str | None]:
    """The files from which AutoTokenizer gives the same ids, or the best there are and why not."""
    files: Files = {}
    texts = list(_probes(tokenizer))
    expected = [tokenizer.encode(text) for text in texts]
    fault = ""
    for files in _candidates(tokenizer.exported):
        fault = _fault({**beside, **files}, texts, expected, AutoTokenizer)
        if not fault:
            return files, None
    note = f"AutoTokenizer of transformers {transformers.__version__} {fault}"
    if JSON_NAME in files and not _fault(
        {**beside, **files}, texts, expected, PreTrainedTokenizerFast
    ):
        return files, f"{note}; load it with PreTrainedTokenizerFast.from_pretrained"
    return files, f"{note}; tokenize with minimind, or train with another tokenizer"


def _candidates(files: Mapping[str, bytes]) -> Iterator[Files]:
    """The tokenizer as it is, then with the class that takes tokenizer.json literally.

    The code that an auto_map names is not among the files.
    """
    if CONFIG_NAME not in files:
        yield dict(files)
        return
    told = json.loads(files[CONFIG_NAME])
    if "auto_map" not in told:
        yield dict(files)
    told.pop("auto_map", None)
    told["tokenizer_class"] = "PreTrainedTokenizerFast"
    yield {**files, CONFIG_NAME: json.dumps(told, ensure_ascii=False, indent=1).encode()}


def _fault(
    files: Mapping[str, bytes], texts: list[str], expected: list[list[int]], face: Any
) -> str:
    """What goes wrong when `face` loads these files; empty if its ids are the expected ones."""
    with tempfile.TemporaryDirectory() as made:
        for name, content in files.items():
            (Path(made) / name).write_bytes(content)
        try:
            loaded = face.from_pretrained(made, trust_remote_code=False, local_files_only=True)
            found = [loaded.encode(text, add_special_tokens=False) for text in texts]
        except Exception as error:  # transformers' converters raise whatever comes up
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"does not load this tokenizer ({lines[0]})".replace(made, "DIR")
    wrong = sum(one != other for one, other in zip(found, expected, strict=True))
    if not wrong:
        return ""
    return f"loads it as {type(loaded).__name__}, with other ids for {wrong} of {len(texts)} texts"


def _probes(tokenizer: AnyTokenizer) -> Iterator[str]:
    yield from TEXTS
    silent = (CONTROL, FILLER)
    ids = [i for i, piece in enumerate(tokenizer.pieces()) if piece.kind not in silent]
    draw = random.Random(0)
    for _ in range(DRAWN if ids else 0):
        yield tokenizer.decode(draw.choices(ids, k=draw.randint(1, 20)))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
