"""README.md of an export: what the run was, and how its files are loaded, for a page of the Hub.

It is made to be published. So URLs are masked, files of this host are shown by name only, and the
licence is left to the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml
from huggingface_hub import ModelCard, ModelCardData

from minimind.checkpoint.directory import NAME as STEP
from minimind.checkpoint.directory import read_manifest
from minimind.checkpoint.retention import saved_of
from minimind.config.run_record import given_names, record_fault
from minimind.config.yaml_files import load_yaml
from minimind.errors import UsageError
from minimind.interop.formats import Format
from minimind.interop.job import Job
from minimind.interop.tensor_sources import TRAINED
from minimind.interop.weights import CHECKPOINT, Weights
from minimind.interop.write_folder import PRODUCER
from minimind.report.history import Run, number, read_runs
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.event_log import EventLog
from minimind.runtime.terminal import printable
from minimind.runtime.urls import BEGINS, HUB_PREFIX, ON_THE_HUB, masked_values, named

NAME = "README.md"
TEMPLATE = Path(__file__).with_suffix(".jinja")  # what a stranger named is in its HTML, escaped
LICENSE = "# license: the Hub asks for one, such as apache-2.0; this line is where it is written\n"
MARK = re.compile(rb"<!-- %b ([0-9a-f]{64}) -->" % PRODUCER.encode())
HOST_FLAGS = ("out_dir", "cache_dir", "mirror")  # where things are, not what was trained
SHAPE = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "num_key_value_heads": "heads of keys and values",
    "intermediate_size": "width of the feed-forward layers",
    "vocab_size": "pieces of the vocabulary",
    "max_position_embeddings": "positions",
    "rope_theta": "rotary base",
    "rope_scaling": "rotary scaling",
    "tie_word_embeddings": "tied embeddings",
    "qkv_bias": "biases of queries, keys and values",
    "qk_norm": "norms of queries and keys",
    "use_moe": "experts",
}
Rows = dict[str, str]


def model_card(weights: Weights, job: Job, to: Format, note: str | None = None) -> bytes:
    """README.md of `weights`; `note` is of how its tokenizer has to be loaded."""
    has_chat = job.tokenizer.chat_template is not None
    parameters = f"{sum(map(math.prod, weights.tensors.shapes.values())):,}"
    training, flags = _training(weights)
    tags = ["minimind", *(["gguf"] if to.file else []), *(["conversational"] if has_chat else [])]
    data = ModelCardData(
        library_name=None if to.file or not to.in_transformers else "transformers",
        pipeline_tag="text-generation",
        tags=[*dict.fromkeys((*tags, job.kind))],
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        name=_line(job.name),
        parameters=parameters,
        kind=job.kind,
        producer=PRODUCER,
        to=to,
        has_chat=has_chat,
        note=note and _line(note),
        positions=getattr(weights.config, "max_position_embeddings", None),
        masks_documents=getattr(weights.config, "doc_mask", False),
        training=training | {"precision of these files": job.dtype},
        shape={"parameters": parameters, **_shape(weights.config)},
        flags=flags and yaml.safe_dump(flags, sort_keys=False, allow_unicode=True),
    )
    content = f"{card}\n".replace("---\n", f"---\n{LICENSE}", 1).encode()
    return content + f"\n<!-- {PRODUCER} {sha256(content).hexdigest()} -->\n".encode()


def _line(text: str) -> str:
    """A text on one line, within which HTML does not end."""
    return " ".join(printable(text).split())


def is_ours(card: bytes) -> bool:
    """Whether a README.md was made here."""
    return MARK.search(card) is not None


def is_edited(card: bytes) -> bool:
    """Whether a README.md that was made here has other text now."""
    mark = MARK.search(card)
    if mark is None:
        return False
    digest = sha256(card[: mark.start() - 1]).hexdigest()
    return card[mark.end() :] != b"\n" or digest != mark[1].decode()


def _training(weights: Weights) -> tuple[Rows, dict[str, Any]]:
    """What is known of the run, and the flags that were given to it; what is missing is left out.

    A checkpoint that was moved away from its run has only its own manifest.
    """
    path, which = disk.resolve(weights.path), weights.which
    if weights.kind != CHECKPOINT:
        source = f"{path.name} ({weights.kind})"
        return {"converted from": _line(f"{source}, of which nothing more is known")}, {}
    manifest = read_manifest(path)
    step, identity = manifest["step"], manifest["identity"]
    is_of_run = path.parent.name == "checkpoints" and STEP.fullmatch(path.name)
    folder = path.parent.parent if is_of_run else None
    run = None
    if folder and disk.is_file(folder / "metrics.jsonl"):
        run = read_runs([folder])[0]
    values, given, faults = _flags(folder / "config.yaml") if folder else ({}, set[str](), [])
    if run is not None and run.unread_lines:
        faults = [f"{run.unread_lines:,} damaged lines of metrics.jsonl", *faults]
    batch, lr, schedule = (identity.get(name, {}) for name in ("batch", "lr", "schedule"))
    sizes = batch.get("stages") or [[batch.get("rows_per_step"), batch.get("max_seq_len")]]
    steps = dict.fromkeys(f"{rows} rows of {length} tokens" for rows, length in sizes)
    rows = {
        "text": _text(values, folder / "metrics.jsonl" if run and folder else None, step),
        "trained on": f"{manifest['tokens']:,} tokens in {step:,} steps of"
        f" {', then of '.join(steps)}",
    }
    if start := _mapping(manifest.get("init_from")):
        rows["started from"] = shown_place(str(start.get("place")))
    if which != TRAINED:
        rows["weights"] = f"a moving average of those that were trained (--ema {values.get('ema')})"
    rows |= _losses(run, step, which)
    if which == TRAINED and folder and "validation" not in rows:
        if (loss := saved_of(path).val_loss) is not None:
            rows["validation"] = f"loss {loss:.4f}, on held-out text"
    optimizer = ("learning_rate", "weight_decay", "dropout", "betas", "grad_clip", "mup_base_dim")
    parts = [str(lr["optimizer"])] if "optimizer" in lr else []
    rows["optimizer"] = ", ".join([*parts, *(f"{n} {lr[n]}" for n in optimizer if n in lr)])
    shape = schedule.get("shape")
    parts = [shape if isinstance(shape, str) else "of DeepSpeed"] if shape else []
    named = ("total_steps", "warmup_steps", "decay_steps", "min_lr_ratio")
    rows["schedule"] = ", ".join([*parts, *(f"{n} {schedule[n]}" for n in named if n in schedule)])
    rows["precision in training"] = str(identity.get("dtype", {}).get("dtype", ""))
    rows["seed"] = str(identity.get("seed", {}).get("seed", ""))
    rows["left out"] = "; ".join(faults)
    versions = _mapping(manifest.get("versions"))
    rows["software"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    flags = {
        str(name): _published(value)
        for name, value in masked_values(values).items()
        if name in given and name not in HOST_FLAGS
    }
    return {name: _line(value) for name, value in rows.items() if value}, flags


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _flags(config: Path) -> tuple[dict[str, Any], set[str], list[str]]:
    """The flags of a run, which of them were given, and what is damaged."""
    if not disk.is_file(config):
        return {}, set(), []
    fault = record_fault(config)
    faults = [f"config.yaml {fault}"] if fault else []
    with suppress(UsageError):  # edited by hand: the weights are exported all the same
        return load_yaml(str(config), "the run's"), given_names(config), faults
    return {}, set(), faults


def _text(values: Mapping[str, Any], metrics: Path | None, step: int) -> str:
    """Names of the text, and how many tokens it has."""
    data = values.get("data_path") or values.get("source") or values.get("stages") or ()
    told = ", ".join(shown_place(str(one)) for one in (data if isinstance(data, list) else [data]))
    known: Mapping[str, Any] = {}
    if metrics is not None:
        with storing(str(metrics), "correct its permissions"):
            for event in EventLog(metrics).events("token_balance"):
                known = event if event["step"] <= step else known

    def count(value: Any) -> str:
        return f"{number(value):,.0f}"

    for source in filter(None, map(_mapping, known.get("sources") or ())):
        name = shown_place(str(source.get("name")))
        told += f", {name}: {count(source.get('epoch'))} tokens in an epoch"
    if "text" not in known:
        return told
    tokens = f"{count(known['text'])} tokens"
    if "conversations" in known:
        of = number(known["conversations"]) + number(known.get("held_out_conversations"))
        tokens += f" in {count(of)} conversations"
    return f"{told}; {tokens}, {count(known.get('held_out'))} of them held out"


def _losses(run: Run | None, step: int, which: str) -> Rows:
    """The last loss and validation up to the step, of the weights that are trained or `ema`."""
    rows: Rows = {}
    if run is None:
        return rows
    if which == TRAINED:
        steps, loss = run.column("step"), run.column("loss")
        at = np.flatnonzero(np.isfinite(loss) & (steps <= step))
        if len(at):
            rows["loss"] = f"{loss[at[-1]]:.4f} at step {steps[at[-1]]:,.0f}"
    key = "val_loss" if which == TRAINED else f"{which}_val_loss"
    known = [
        one
        for one in run.events("eval")
        if number(one["step"]) <= step and math.isfinite(number(one.get(key)))
    ]
    if known:
        more = (("loss", "loss"), ("perplexity", "ppl"), ("bits per byte", "bpb"))
        found = ((noun, number(known[-1].get(key.replace("loss", end)))) for noun, end in more)
        figures = ", ".join(f"{noun} {n:.4f}" for noun, n in found if math.isfinite(n))
        at_step = f"{number(known[-1]['step']):,.0f}"
        rows["validation"] = f"{figures} at step {at_step}, on held-out text"
    return rows


def shown_place(text: str) -> str:
    """A path as it may be published: a masked URL, or the last part of what is on this host.

    A step directory is shown with its run.
    """
    name = named(text)
    if BEGINS.match(name) and not name.startswith("file:"):
        return name
    prefix = HUB_PREFIX if name.startswith(HUB_PREFIX) else ""
    if ON_THE_HUB.fullmatch(name) and not disk.exists(Path(name.removeprefix(prefix)).expanduser()):
        return name
    path = PurePath(name)
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name} {path.name}"
    return prefix + (path.name or name)


def _published(value: Any) -> Any:
    if isinstance(value, list):
        return [_published(one) for one in value]
    if isinstance(value, dict):
        return {str(name): _published(inner) for name, inner in value.items()}
    return shown_place(value) if isinstance(value, str) else value


def _shape(config: Any) -> Rows:
    values = {noun: getattr(config, name, None) for name, noun in SHAPE.items()}
    words = {"True": "yes", "False": "no"}
    return {n: words.get(str(v), str(v)) for n, v in values.items() if v is not None}
