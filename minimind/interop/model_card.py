"""README.md of an export: what the run was, and how its files are loaded, for a page of the Hub.

It is made to be published. So URLs are masked, files of this host are shown by name only, and the
licence is left to the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

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
LOAD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

place = "."  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(place{options})
tokenizer = AutoTokenizer.from_pretrained(place{options})
{tokens}
answer = model.generate(**tokens, max_new_tokens={new})[0]
print(tokenizer.decode(answer, skip_special_tokens=True))
```
"""
TEXT = 'tokens = tokenizer("Once upon a time", return_tensors="pt")'
MESSAGES = """\
messages = [{"role": "user", "content": "Hello"}]
tokens = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""

Rows = dict[str, str]


def model_card(weights: Weights, job: Job, to: Format, note: str | None = None) -> bytes:
    """README.md of `weights`; `note` is of how its tokenizer has to be loaded."""
    parameters = sum(map(math.prod, weights.tensors.shapes.values()))
    has_chat = job.tokenizer.chat_template is not None
    parts = [
        _header(to, job.kind, has_chat),
        f"# {_plain(job.name)}\n",
        f"A language model of {parameters:,} parameters ({_plain(job.kind)}), written by"
        f" {PRODUCER}.\n",
        "## Use\n",
        *_use(weights.config, to, has_chat, note),
        "## Training\n",
    ]
    training, flags = _training(weights)
    parts += [_table(training | {"precision of these files": job.dtype})]
    parts += ["## Shape\n", _table({"parameters": f"{parameters:,}", **_shape(weights.config)})]
    if flags:
        text = yaml.safe_dump(flags, sort_keys=False, allow_unicode=True)
        parts += ["## Flags that were given\n", _fenced(text, "yaml")]
    content = "\n".join(parts).encode()
    return content + f"\n<!-- {PRODUCER} {_digest(content)} -->\n".encode()


def is_ours(card: bytes) -> bool:
    """Whether a README.md was made here."""
    return MARK.search(card) is not None


def is_edited(card: bytes) -> bool:
    """Whether a README.md that was made here has other text now."""
    mark = MARK.search(card)
    if mark is None:
        return False
    return card[mark.end() :] != b"\n" or _digest(card[: mark.start() - 1]) != mark[1].decode()


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _header(to: Format, model_type: str, has_chat: bool) -> str:
    """The YAML that the Hub reads."""
    is_gguf = bool(to.file)
    tags = ["minimind", *(["gguf"] if is_gguf else []), *(["conversational"] if has_chat else [])]
    if model_type not in tags:
        tags.append(model_type)
    values = {} if is_gguf else {"library_name": "transformers"}
    text = yaml.safe_dump(values | {"pipeline_tag": "text-generation", "tags": tags})
    return f"---\n{LICENSE}{text}---\n"


def _use(config: Any, to: Format, has_chat: bool, note: str | None) -> Iterator[str]:
    positions = getattr(config, "max_position_embeddings", None)
    if to.file:
        ask = "llama-cli -m {} --jinja" if has_chat else 'llama-completion -m {} -no-cnv -p "Once"'
        yield _fenced(f"{ask.format(to.file)}\n", "bash")
    else:
        yield LOAD.format(
            options=to.options,
            tokens=MESSAGES if has_chat else TEXT,
            new=min(50, (positions or 100) // 2),
        )
    if to.options:
        yield "`trust_remote_code=True` runs the model's code, which is in these files.\n"
    if note:
        yield f"{_plain(note)}.\n"
    if positions:
        yield f"Input and output have {positions:,} tokens at most.\n"
    if not to.options and getattr(config, "doc_mask", False):
        yield (
            "It was trained with a mask between documents, which this format has not: give it one"
            " document at a time.\n"
        )


def _training(weights: Weights) -> tuple[Rows, dict[str, Any]]:
    """What is known of the run, and the flags that were given to it."""
    if weights.kind != CHECKPOINT:
        source = f"{_code(weights.path.name)} ({weights.kind})"
        return {"converted from": f"{source}, of which nothing more is known"}, {}
    manifest = read_manifest(weights.path)
    records = _Records.of(weights.path, manifest["step"])
    identity = manifest["identity"]
    batch = identity.get("batch", {})
    sizes = batch.get("stages") or [[batch.get("rows_per_step"), batch.get("max_seq_len")]]
    steps = dict.fromkeys(f"{rows} rows of {length} tokens" for rows, length in sizes)
    rows = {
        "text": records.text(),
        "trained on": f"{manifest['tokens']:,} tokens in {manifest['step']:,} steps of"
        f" {', then of '.join(steps)}",
    }
    if start := _mapping(manifest.get("init_from")):
        rows["started from"] = _code(shown_place(str(start.get("place"))))
    if weights.which != TRAINED:
        rows["weights"] = f"a moving average of those that were trained (--ema {records.ema})"
    rows |= records.losses(weights.which)
    rows |= _settings(identity)
    rows["left out"] = "; ".join(records.faults)
    versions = _mapping(manifest.get("versions"))
    rows["software"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {name: value for name, value in rows.items() if value}, records.flags


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _settings(identity: Mapping[str, Any]) -> Rows:
    """Optimizer, schedule and the like, as far as the manifest has them."""
    lr, schedule = identity.get("lr", {}), identity.get("schedule", {})
    names = ("learning_rate", "weight_decay", "betas", "grad_clip", "mup_base_dim")
    shape = schedule.get("shape")
    steps = ("total_steps", "warmup_steps", "decay_steps", "min_lr_ratio")
    return {
        "optimizer": _plain(
            ", ".join(
                [
                    *([str(lr["optimizer"])] if "optimizer" in lr else []),
                    *(f"{name} {lr[name]}" for name in names if name in lr),
                ]
            )
        ),
        "schedule": ", ".join(
            [
                *([shape if isinstance(shape, str) else "of DeepSpeed"] if shape else []),
                *(f"{name} {schedule[name]}" for name in steps if name in schedule),
            ]
        ),
        "precision in training": str(identity.get("dtype", {}).get("dtype", "")),
        "seed": str(identity.get("seed", {}).get("seed", "")),
    }


@dataclass(frozen=True)
class _Records:
    """What the run recorded up to this checkpoint; each file may be missing."""

    step: int
    run: Run | None
    balance: Mapping[str, Any]
    data: tuple[str, ...]
    val_loss: float | None  # loss in the checkpoint, of the weights that are trained
    ema: Any
    flags: dict[str, Any]
    faults: tuple[str, ...] = ()  # damage of the run's files

    @classmethod
    def of(cls, checkpoint: Path, step: int) -> _Records:
        checkpoint = disk.resolve(checkpoint)
        if checkpoint.parent.name != "checkpoints" or not STEP.fullmatch(checkpoint.name):
            return cls(step, None, {}, (), None, None, {})  # it was moved away from its run
        folder = checkpoint.parent.parent
        metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
        run = read_runs([folder])[0] if disk.is_file(metrics) else None
        balance: dict[str, Any] = {}
        if run is not None:
            with storing(str(metrics), "correct its permissions"):
                for event in EventLog(metrics).events("token_balance"):
                    balance = event if event["step"] <= step else balance
        values: dict[str, Any] = {}
        given: set[str] = set()
        faults = []
        if run is not None and run.unread_lines:
            faults.append(f"{run.unread_lines:,} damaged lines of metrics.jsonl")
        if disk.is_file(config):
            if fault := record_fault(config):
                faults.append(f"config.yaml {fault}")
            with suppress(UsageError):  # edited by hand: the weights are exported all the same
                values = load_yaml(str(config), "the run's")
                given = given_names(config)
        data = values.get("data_path") or values.get("source") or values.get("stages") or ()
        return cls(
            step=step,
            run=run,
            balance=balance,
            data=tuple(map(shown_place, map(str, data if isinstance(data, list) else [data]))),
            val_loss=saved_of(checkpoint).val_loss,
            ema=values.get("ema"),
            flags={
                str(name): _published(value)
                for name, value in masked_values(values).items()
                if name in given and name not in HOST_FLAGS
            },
            faults=tuple(faults),
        )

    def text(self) -> str:
        """Names of the text, and how many tokens it has."""
        told, known = ", ".join(map(_code, self.data)), self.balance
        for source in filter(None, map(_mapping, known.get("sources") or ())):
            name = _plain(shown_place(str(source.get("name"))))
            told += f", {name}: {_count(source.get('epoch'))} tokens in an epoch"
        if "text" not in known:
            return told
        tokens = f"{_count(known['text'])} tokens"
        if "conversations" in known:
            of = number(known["conversations"]) + number(known.get("held_out_conversations"))
            tokens += f" in {_count(of)} conversations"
        return f"{told}; {tokens}, {_count(known.get('held_out'))} of them held out"

    def losses(self, which: str) -> Rows:
        """The last loss and validation up to the step, of the weights that are trained or `ema`."""
        rows: Rows = {}
        if self.run is not None and which == TRAINED:
            steps, loss = self.run.column("step"), self.run.column("loss")
            at = np.flatnonzero(np.isfinite(loss) & (steps <= self.step))
            if len(at):
                rows["loss"] = f"{loss[at[-1]]:.4f} at step {steps[at[-1]]:,.0f}"
        key = "val_loss" if which == TRAINED else f"{which}_val_loss"
        known = [
            one
            for one in (self.run.events("eval") if self.run is not None else [])
            if number(one["step"]) <= self.step and math.isfinite(number(one.get(key)))
        ]
        if known:
            last = known[-1]
            more = (("loss", "loss"), ("perplexity", "ppl"), ("bits per byte", "bpb"))
            found = ((noun, number(last.get(key.replace("loss", end)))) for noun, end in more)
            figures = ", ".join(f"{noun} {n:.4f}" for noun, n in found if math.isfinite(n))
            rows["validation"] = f"{figures} at step {_count(last['step'])}, on held-out text"
        elif which == TRAINED and self.val_loss is not None:
            rows["validation"] = f"loss {self.val_loss:.4f}, on held-out text"
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
    return {
        noun: {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
        for noun, value in values.items()
        if value is not None
    }


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items()), ""])


def _plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*<\[|])", r"\\\1", " ".join(printable(text).split()))


def _code(text: str) -> str:
    """Text as code in a cell of a table."""
    line = " ".join(printable(text).split()).replace("|", r"\|")
    fence = "`" * (_longest_run(line) + 1)
    return f"{fence}{line}{fence}" if len(fence) == 1 else f"{fence} {line} {fence}"


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}{fence}\n"


def _count(value: Any) -> str:
    return f"{number(value):,.0f}"


def _longest_run(text: str) -> int:
    """Length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
