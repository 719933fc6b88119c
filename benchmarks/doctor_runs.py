"""Short runs of which `minimind doctor` has to name what ails them, or nothing: their figures.

    OMP_NUM_THREADS=1 python -m benchmarks.doctor_runs kjv=TEXT.jsonl poems=TEXT.jsonl \\
        python=TEXT.jsonl headers=TEXT.jsonl --folder DIR [--only RUN ...] \\
        --out tests/report/recorded_runs.jsonl

The texts are English and Chinese, python (of examples/stdlib_corpus.py) and headers (the C headers
of Python, a document each). A line of the result is a run: its flags and events, without text,
times and paths. `sick` is what is wrong with it, by the kind of the finding that has to name it,
and empty for a healthy one. What is done in DIR is not done again.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import arguments
from minimind.cli.main import main as minimind
from minimind.launch.train_pretrain import main as train_pretrain
from minimind.report.history import read_configuration

SMALL = (
    "--dim 64 --n_layers 2 --n_heads 4 --n_kv_heads 2 --max_seq_len 128"
    " --batch_size 8 --max_steps 240 --log_interval 4 --eval_interval 30"
    " --device cpu --dtype float32 --deepspeed_config none --num_workers 0"
)
MOST = 1_500_000  # characters of a text
KEPT = ("step", "loss", "lr", "grad_norm")  # of a line
FACTS = (  # of a start
    *("step", "resume_from", "init_from", "world_size", "parameters", "tokens_per_step", "order"),
    *("rows_per_epoch", "total_steps", "stages", "dtype", "device"),
)
FLAGS = (  # of the configuration
    *("task", "optimizer", "learning_rate", "min_lr_ratio", "warmup_steps", "schedule"),
    *("weight_decay", "grad_clip", "muon_lr", "muon_scaling", "spike_guard", "batch_size"),
    *("vocab_size", "max_seq_len", "use_moe", "aux_loss_alpha", "val_fraction", "val_path"),
    *("eval_rows", "eval_interval", "save_interval", "num_workers"),
)
EVENTS = ("floors", "eval", "rolled_back", "exit", "checkpoint_saved", "step_skipped")
OF_PLACES = ("text", "rows", "path", "positions")  # fields of events that are of no use
LIMITS = "--spike_guard --max_rollbacks 2 --save_interval 20"

Documents = list[str]


def _mixed(draw: random.Random, documents: Documents) -> Documents:
    """Every paragraph with its words in an order of chance."""
    return ["\n".join(_shuffled(draw, line) for line in text.split("\n")) for text in documents]


def _shuffled(draw: random.Random, line: str) -> str:
    words = line.split(" ")
    draw.shuffle(words)
    return " ".join(words)


def _any_characters(draw: random.Random, documents: Documents) -> Documents:
    """Every line with its characters in an order of chance."""
    return [
        "\n".join("".join(draw.sample(line, len(line))) for line in text.split("\n"))
        for text in documents
    ]


def _hexadecimal(draw: random.Random, documents: Documents, step: int = 2) -> Documents:
    """Every second document in digits of chance, of the same length."""
    size = [len(text.encode()) for text in documents]
    return [
        draw.randbytes(size[n] // 2).hex() if n % step == 0 else text
        for n, text in enumerate(documents)
    ]


# Texts made of those that are given: name -> (the text, what is done to it).
MADE: dict[str, tuple[str, Callable[[random.Random, Documents], Documents]]] = {
    "kjv-mixed": ("kjv", _mixed),
    "python-mixed": ("python", _mixed),
    "poems-mixed": ("poems", _any_characters),
    "kjv-hex": ("kjv", _hexadecimal),
    "poems-hex": ("poems", _hexadecimal),
    "python-hex": ("python", lambda draw, texts: _hexadecimal(draw, texts, 3)),
    "kjv-few": ("kjv", lambda _, texts: texts[:50]),
}
# name -> (what is wrong, text, flags).
RUNS: dict[str, tuple[str, str, str]] = {
    # Sick.
    "another language to validate": ("other_text", "kjv", "--val_path {poems}"),
    "poems, validated on English": ("other_text", "poems", "--val_path {kjv}"),
    "half hexadecimal": ("chance", "kjv-hex", ""),
    "half of poems hexadecimal": ("chance", "poems-hex", ""),
    "words in any order": ("word_order", "kjv-mixed", ""),
    "characters in any order": ("word_order", "poems-mixed", ""),
    "an English tokenizer for Chinese": ("tokenizer", "poems", "--tokenizer {kjv-tokenizer}"),
    "a Chinese tokenizer for English": ("tokenizer", "kjv", "--tokenizer {poems-tokenizer}"),
    "rows of 8 tokens": ("short_rows", "kjv", "--max_seq_len 8 --batch_size 64"),
    "a warm-up of all steps": ("long_warmup", "kjv", "--warmup_steps 240"),
    "a warm-up of all steps, 400": ("long_warmup", "python", "--warmup_steps 400 --max_steps 400"),
    "lion x 36": ("high_rate", "kjv", "--optimizer lion --learning_rate 0.018"),
    "lion x 60": ("high_rate", "python", "--optimizer lion --learning_rate 0.03"),
    "weight decay 100": ("weight_decay", "kjv", "--weight_decay 100"),
    "weight decay 30": ("weight_decay", "headers", "--weight_decay 30"),
    "spikes again and again": (
        "spikes",
        "kjv",
        f"{LIMITS} --learning_rate 0.3 --schedule constant --spike_window 16 --spike_factor 1"
        " --max_steps 400 --grad_clip 0",
    ),
    "spikes, with limits by default": (
        "spikes",
        "kjv",
        "--spike_guard --save_interval 20 --learning_rate 0.02 --spike_window 16"
        " --spike_factor 1.5 --seed 4 --grad_clip 0",
    ),
    # Healthy.
    "4 rows": ("", "kjv", "--batch_size 4 --max_steps 400"),
    "4 rows of poems": ("", "poems", "--batch_size 4 --max_steps 400 --log_interval 10"),
    "4 rows of python, each step": (
        "",
        "python",
        "--batch_size 4 --max_steps 200 --log_interval 1",
    ),
    "4 rows of headers": ("", "headers", "--batch_size 4 --max_steps 400 --learning_rate 1e-3"),
    "4 rows, constant rate": ("", "python", "--batch_size 4 --schedule constant --seed 3"),
    "8 rows": ("", "python", "--seed 1"),
    "16 rows of headers": ("", "headers", "--batch_size 16"),
    "16 rows of poems": ("", "poems", "--batch_size 16 --seed 2"),
    "32 rows": ("", "kjv", "--batch_size 32 --max_steps 80 --log_interval 2"),
    "64 rows of poems": ("", "poems", "--batch_size 64 --max_steps 80 --log_interval 2"),
    "64 rows of headers": (
        "",
        "headers",
        "--batch_size 64 --max_steps 60 --max_seq_len 64 --log_interval 2",
    ),
    "muon": ("", "kjv", "--optimizer muon --muon_lr 0.01"),
    "lion": ("", "kjv", "--optimizer lion --learning_rate 5e-4"),
    "strong": ("", "poems", "--config strong"),
    "wsd": ("", "python", "--schedule wsd"),
    "linear to zero": ("", "headers", "--schedule linear --min_lr_ratio 0"),
    "long rows": ("", "kjv", "--max_seq_len 256 --batch_size 4"),
    "short rows": ("", "poems", "--max_seq_len 64 --batch_size 16"),
    "experts": ("", "kjv", "--use_moe --ema 0.98 --max_steps 120"),
    "little text": ("", "kjv-few", "--batch_size 8 --max_steps 200 --vocab_size 600"),
    "bfloat16": ("", "poems", "--dtype bfloat16 --batch_size 8"),
    "stopped early": ("", "kjv", "--stop_at_step 120"),
    "fine-tuning on other text": (
        "",
        "python",
        "--init_from '{4 rows of headers}' --max_steps 160",
    ),
    "conversations": (
        "",
        "talk",
        "--config sft --init_from '{8 rows}' --batch_size 8 --max_steps 120",
    ),
    "more of the same text": (
        "",
        "kjv",
        "--init_from '{4 rows}' --learning_rate 3e-4 --seed 5 --max_steps 160",
    ),
    "two sources": ("", "", "--source kjv={prepared-kjv}:1 --source headers={prepared-headers}:1"),
    "stages": ("", "", "--stages {stages}"),
}


def write_documents(place: Path, documents: Iterable[str]) -> None:
    """A line of JSON for each."""
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    place.write_text("".join(lines), encoding="utf-8")


def write_texts(given: dict[str, Path], folder: Path) -> None:
    """The first characters of the texts that are given, and what is made of them."""
    texts: dict[str, Documents] = {}
    for name, path in given.items():
        documents, size = [], 0
        for line in path.read_text(encoding="utf-8").splitlines():
            documents.append(json.loads(line)["text"])
            size += len(documents[-1])
            if size > MOST:
                break
        texts[name] = documents
    for name, (source, change) in MADE.items():
        texts[name] = change(random.Random(name), texts[source])
    for name, documents in texts.items():
        if not (folder / f"{name}.jsonl").exists():
            write_documents(folder / f"{name}.jsonl", documents)


def prepare(name: str, folder: Path, *flags: str) -> Path:
    """A prepared folder of a text."""
    out = folder / f"prepared-{name}"
    if not out.exists():
        words = ["prepare", str(folder / f"{name}.jsonl"), "--val_fraction", "0.05", *flags]
        assert minimind([*words, "--out", str(out)]) == 0
    return out


def places_of(folder: Path) -> dict[str, str]:
    """What flags name, by its name in `RUNS`."""
    from examples.stdlib_conversations import main as write_talk

    places = {path.stem: str(path) for path in folder.glob("*.jsonl")}
    for name in ("kjv", "poems"):
        places[f"{name}-tokenizer"] = str(
            prepare(name, folder, "--vocab_size", "2048") / "tokenizer"
        )
    sources = {
        name: prepare(name, folder, "--tokenizer", places["kjv-tokenizer"])
        for name in ("kjv", "headers")
    }
    places |= {f"prepared-{name}": str(place) for name, place in sources.items()}
    weights = [{"kjv": 3, "headers": 1}, {"kjv": 1, "headers": 3}]
    stages = [{"weights": weights[0], "until": "50%"}, {"weights": weights[1]}]
    content = {"sources": {name: str(place) for name, place in sources.items()}, "stages": stages}
    (folder / "stages.yaml").write_text(json.dumps(content))
    write_talk(folder / "talk.jsonl")
    runs = {name: str(folder / "runs" / name) for name in RUNS}
    return {
        **places,
        **runs,
        "stages": str(folder / "stages.yaml"),
        "talk": str(folder / "talk.jsonl"),
    }


def train(name: str, folder: Path, places: dict[str, str]) -> Path:
    """The out_dir of a run, which is trained unless that was done."""
    _, text, flags = RUNS[name]
    out = folder / "runs" / name
    metrics = out / "metrics.jsonl"
    if metrics.exists() and '"event": "exit"' in metrics.read_text():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(exist_ok=True)
    words = [*shlex.split(SMALL), "--out_dir", str(out), "--cache_dir", str(folder / "cache")]
    if text:
        words += ["--data_path", places[text]]
        if "--val_path" not in flags:
            words += ["--val_fraction", "0.05"]
        if "--tokenizer" not in flags and "--init_from" not in flags:
            words += ["--vocab_size", "2048"]
    words += [word.format_map(places) for word in shlex.split(flags)]
    # Each in a process of its own, which has imported torch.
    worker = multiprocessing.get_context("fork").Process(target=train_pretrain, args=(words,))
    worker.start()
    worker.join()
    return out


def compact(out: Path, name: str, folder: Path) -> dict[str, Any]:
    """The figures of a run that say nothing of this machine and none of its text."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    events: list[dict[str, Any]] = []
    for line in lines:
        kind = line["event"]
        if kind == "run_start":
            events.append({"event": kind, **{key: line.get(key) for key in FACTS}})
            if line.get("init_from"):
                events[-1]["init_from"] = "another run"
        elif kind == "step":
            if not events or "lines" not in events[-1]:
                events.append({"lines": {key: [] for key in KEPT}})
            for key in KEPT:
                events[-1]["lines"][key].append(_short(line.get(key)))
        elif kind in EVENTS:
            kept = {key: v for key, v in line.items() if key != "time" and key not in OF_PLACES}
            events.append(_short(kept))
    known = read_configuration(out).flags
    flags = {key: known[key][0] for key in FLAGS if key in known}
    found = {"name": name, "sick": RUNS[name][0], "flags": flags, "events": events}
    return json.loads(json.dumps(found).replace(f"{folder}/", ""))


def _short(value: Any) -> Any:
    """Its floats with five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value


def main(words: Sequence[str] | None = None) -> None:
    """Train what is missing, and write the figures of all that is trained."""
    parser = arguments(__doc__)
    parser.add_argument("texts", nargs="+", metavar="NAME=TEXT.jsonl")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=[*RUNS])
    args = parser.parse_args(words)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    given = {name: Path(path) for name, _, path in (one.partition("=") for one in args.texts)}
    write_texts(given, folder)
    places = places_of(folder)
    found = [compact(train(name, folder, places), name, folder) for name in args.only]
    if args.out:
        args.out.write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")


if __name__ == "__main__":
    main()
