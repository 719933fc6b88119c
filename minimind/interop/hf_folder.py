"""The small files beside weights that transformers reads, tokenizer included.

AutoTokenizer selects a class by model_type as well as by tokenizer_config.json, and some classes
rebuild what tokenizer.json defines. So the files are loaded and compared before they are written.
The model itself goes along as code, for trust_remote_code.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minimind.architecture.select import IDS, special_ids
from minimind.data.tokenizer.load import Tokenizer
from minimind.data.tokenizer.vocabulary import (
    CONFIG_NAME,
    CONTROL,
    FILLER,
    JSON_NAME,
    dump_json,
    with_length,
)
from minimind.errors import CheckpointError
from minimind.interop.job import Job
from minimind.model import causal_lm
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.checked_json import read_object
from minimind.runtime.panics import panics_caught
from minimind.runtime.urls import masked_values

TEXTS = (
    *("Hello, world!", " leading and  double spaces\n\n\ttab\r\n", "0123456789 3.14", "naïve café"),
    *("春眠不覺曉，處處聞啼鳥。", "日本語のテキスト", "한국어 문장", "Привет, мир", "مرحبا"),
    *("🙂👩‍👩‍👧🏳️‍🌈", "a▁b ▁ c", "def f(x):\n    return x ** 2\n", "\u200b\ufeff\u00a0"),
)
RANDOM_TEXTS = 200  # made of random pieces of the vocabulary

Files = dict[str, bytes]


def configuration_files(values: Mapping[str, Any], job: Job) -> Files:
    """config.json and generation_config.json, with the same special ids.

    Generation ends at the end of a turn, too.
    """
    ids = {name: values[name] for name in IDS if values.get(name) is not None}
    if job.end is not None:
        ids["eos_token_id"] = [*dict.fromkeys((job.tokenizer.eos_id, job.end))]
    contents = {
        # torch_dtype is for transformers 4
        "config.json": {**values, "dtype": job.dtype, "torch_dtype": job.dtype},
        "generation_config.json": {"_from_model_config": True, **ids},
    }
    return {
        name: json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
        for name, content in contents.items()
    }


def tokenizer_files(job: Job) -> Files:
    """The files of the tokenizer, which truncates to the positions of the model."""
    positions = getattr(job.config, "max_position_embeddings", None)  # also where it is renamed
    return with_length(job.tokenizer.exported, positions)


def transformers_files(job: Job) -> tuple[Files, str | None]:
    """The small files of a model of transformers, and the note of `checked_files`."""
    values = masked_values(json.loads(job.config.to_json_string()))
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[job.config.model_type]]
    return checked_files(values | special_ids(job.tokenizer), job)


def checked_files(values: Mapping[str, Any], job: Job) -> tuple[Files, str | None]:
    """Configuration files, and tokenizer files from which AutoTokenizer gives the same ids.

    If no variant of them does, the second value is a note with the reason.
    """
    configuration = configuration_files(values, job)
    texts = list(_test_texts(job.tokenizer))
    expected = [job.tokenizer.encode(text) for text in texts]
    files: Files = {}
    reason = ""
    for variant in _variants(tokenizer_files(job)):
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
                options = {"add_special_tokens": False, "verbose": False}
                actual = [loaded.encode(text, **options) for text in texts]
        except Exception as error:  # transformers' converters raise anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return f"does not load this tokenizer ({lines[0]})".replace(folder, "DIR")
    wrong = sum(one != other for one, other in zip(actual, expected, strict=True))
    if not wrong:
        return ""
    return f"loads it as {type(loaded).__name__}, with other ids for {wrong} of {len(texts)} texts"


def _test_texts(tokenizer: Tokenizer) -> Iterator[str]:
    yield from TEXTS
    pieces = tokenizer.pieces()
    ids = [i for i, piece in enumerate(pieces) if piece.kind not in (CONTROL, FILLER)]
    rng = random.Random(0)
    for _ in range(RANDOM_TEXTS if ids else 0):
        yield tokenizer.decode(rng.choices(ids, k=rng.randint(1, 20)))


AUTO_MAP = {
    "AutoConfig": "configuration.MiniMindConfig",
    "AutoModel": "causal_lm.MiniMindModel",
    "AutoModelForCausalLM": "causal_lm.MiniMindForCausalLM",
    "AutoModelForQuestionAnswering": "causal_lm.MiniMindForQuestionAnswering",
    "AutoModelForSequenceClassification": "causal_lm.MiniMindForSequenceClassification",
    "AutoModelForTokenClassification": "causal_lm.MiniMindForTokenClassification",
}
"""The "auto_map" of config.json: file and class by Auto class."""

_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^([ \t]*)from minimind((?:\.\w+)*)\.(\w+) import ", re.MULTILINE)


def remote_code() -> dict[str, bytes]:
    """Content by file name, sorted, read from this package: what is exported is what ran."""
    files: dict[str, bytes] = {}
    pending = [(".model", entry.split(".")[0]) for entry in AUTO_MAP.values()]
    while pending:
        package, module = pending.pop()
        if f"{module}.py" in files:
            continue
        folder = _PACKAGE.joinpath(*package.split("."))
        source = (folder / f"{module}.py").read_text(encoding="utf-8")
        files[f"{module}.py"] = _IMPORT.sub(r"\1from .\3 import ", source).encode()
        pending += [(package, name) for _, package, name in _IMPORT.findall(source)]
    return dict(sorted(files.items()))


def has_remote_code(folder: Path) -> bool:
    """Whether the config.json of a folder names code."""
    try:
        return "auto_map" in read_object(folder / "config.json")[0]
    except CheckpointError:
        return False


def register() -> None:
    """Register model_type "minimind" with the Auto classes of AUTO_MAP; may be repeated.

    From then on they use these classes instead of the code in a directory.
    """
    AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig, exist_ok=True)
    for name, entry in AUTO_MAP.items():
        if name != "AutoConfig":
            kind = getattr(causal_lm, entry.split(".")[1])
            getattr(transformers, name).register(MiniMindConfig, kind, exist_ok=True)
