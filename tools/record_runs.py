"""Record what about 60 small runs of a revision do, and compare it with what another one did.

    python -m tools.record_runs [REVISION] --out NEW.json [--against OLD.json] [--only NAME ...]

Without a revision the runs are of this tree. Each start of `record_runs.yaml` is a process forked
from one that has imported the revision. The record of a start is its status, its events, and of its
files the names, the settings and the sums of the tensors; times and what else differs between two
runs of the same code is left out. The status is 1 if two records differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind the recorded revision
from tools.revisions import ROOT, unpack

INPUTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FLAGS = (
    "--dim 32 --n_layers 2 --n_heads 4 --n_kv_heads 2 --max_seq_len 64 --batch_size 4"
    " --learning_rate 5e-3 --warmup_steps 1 --weight_decay 0.1 --dtype float32 --device cpu"
    " --log_interval 1 --eval_rows 16 --cache_dir {cache} --out_dir {out}"
)
# Fields that differ between two runs of the same code, and that depend on the machine.
VOLATILE = re.compile(
    r"time|seconds|.*_(ms|s|seconds|mib)|run|share|.*per_second|mfu|peak.*|commit|versions"
    r"|hardware|source_commit|sha256"
)
# Events of threads that work beside the loop.
BACKGROUND = ("checkpoint_saved", "mirrored")


def write_inputs(folder: Path) -> dict[str, str]:
    """Write the files that flags name; return the paths of all that flags may name."""
    from tools.runs import sentences

    files = folder / "files"
    files.mkdir()
    for name, content in INPUTS["files"].items():
        (files / name).write_text(content)
    for name, seed, number in (("text", 1, 200), ("other", 2, 60), ("valid", 3, 30)):
        lines = (json.dumps({"text": text}) + "\n" for text in sentences(seed, number))
        (files / f"{name}.jsonl").write_text("".join(lines))
    turns = [text[:50].strip() for text in sentences(4, 80)]
    with open(files / "chat.jsonl", "w") as file:
        for question, answer in zip(turns[::2], turns[1::2], strict=True):
            messages = [("user", question), ("assistant", answer)]
            chat = [{"role": role, "content": text} for role, text in messages]
            file.write(json.dumps({"messages": chat}) + "\n")
    paths = {name: files / f"{name}.jsonl" for name in ("text", "other", "valid", "chat")}
    paths |= {name: folder / name for name in ("data", "mixed", "cache", "uploads", "files")}
    paths |= {name: folder / "runs" / name for name in INPUTS["runs"]}
    return {name: str(path) for name, path in paths.items()}


def started(action: Any, output: Path) -> int:
    """The status of a process that is forked for `action`, and prints into `output`."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
    try:
        status = action()
    except SystemExit as error:
        status = error.code
    except BaseException as error:  # a bug, whose status is compared like any other
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 70
    sys.stdout.flush()
    os._exit(int(status or 0))


def stopping_at(name: str, step: str) -> Any:
    """The rate of a schedule, which sends this process a signal when step `step` + 1 begins."""
    from minimind.config.schedule import Schedule

    rate = Schedule.lr_at

    def lr_at(self: Schedule, number: int) -> float:
        if number == int(step):
            os.kill(os.getpid(), getattr(signal, name))
        return rate(self, number)

    return lr_at


def train(flags: list[str]) -> int:
    """Train in this process; SIGNAL@STEP among the flags is sent in the step after STEP."""
    from minimind.config.schedule import Schedule
    from minimind.launch.train_pretrain import main

    for word in [word for word in flags if "@" in word]:
        flags.remove(word)
        Schedule.lr_at = stopping_at(*word.split("@"))
    return main(flags)


def stable(value: Any, folder: str) -> Any:
    """A value without volatile fields and without the path of the folder."""
    if isinstance(value, dict):
        if value.get("event") == "verdict":  # whose sentence has times
            value = {**value, "text": "..."}
        return {
            key: "..." if VOLATILE.fullmatch(str(key)) else stable(inner, folder)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [stable(inner, folder) for inner in value]
    if isinstance(value, str):
        return value.replace(folder, "DIR")
    return value


def record_of(out: Path, folder: str) -> dict[str, Any]:
    """What a start left in its out_dir."""
    record: dict[str, Any] = {"files": {}}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name, content = str(path.relative_to(out)), path.read_bytes()
        if path.name == "metrics.jsonl":
            events = [json.loads(line) for line in content.splitlines()]
            record["events"] = stable(events, folder)
        elif path.suffix in (".yaml", ".json") and path.name != "tokenizer.json":
            record["files"][name] = stable(yaml.safe_load(content), folder)
        elif path.name.startswith(("shard", "buffers")):
            record["files"][name] = hashlib.sha256(content).hexdigest()
        else:
            record["files"][name] = ""
    return record


def table(text: str, folder: str) -> dict[str, list[str]]:
    """The indented lines of a dry run: the first word, and the columns after it."""
    lines = [line for line in text.replace(folder, "DIR").splitlines() if line.startswith("  ")]
    rows = [re.split(r" {2,}", line.strip()) for line in lines]
    return {row[0]: row[1:] for row in rows}


def work(names: list[str]) -> None:
    """Record the runs in this process, which has a revision on its path."""
    out_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import minimind.train.pretrain  # noqa: F401 (what is imported here is not imported by each run)
    from minimind.cli.main import main

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        paths = write_inputs(folder)
        vocabulary = ["--vocab_size", "600", "--out"]
        main(["prepare", paths["text"], *vocabulary, paths["data"]])
        sources = ["--source", f"a={paths['text']}", "--source", f"b={paths['other']}"]
        main(["prepare", *sources, *vocabulary, paths["mixed"]])
        records = {}
        for name in names:
            out = Path(paths[name])
            for number, given in enumerate(INPUTS["runs"][name], 1):
                data = "" if "--source" in given or "--data_path" in given else "--data_path {data}"
                flags = f"{FLAGS} {data} {given}".format(**paths, out=out).split()
                status = started(lambda flags=flags: train(flags), folder / "output")
                record = {"status": status, **(record_of(out, made) if out.exists() else {})}
                if "--dry_run" in flags:
                    record["table"] = table((folder / "output").read_text(), made)
                records[f"{name} {number}"] = record
        mirrored = sorted(Path(paths["uploads"]).rglob("*"))
        records["uploads"] = {"files": [str(path.relative_to(folder)) for path in mirrored]}
    json.dump(records, out_file, indent=1)
    out_file.close()


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every value by its path: `events.step.3.loss` counts the events of a name."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list) and value and isinstance(value[0], dict) and "event" in value[0]:
        items, counts = [], Counter()
        for event in value:
            counts[event["event"]] += 1
            items.append((f"{event['event']}.{counts[event['event']]}", event))
        in_order = [event["event"] for event in value if event["event"] not in BACKGROUND]
        items.append(("order", in_order))
    else:
        return {path: value}
    found = {}
    for key, inner in items:
        found |= leaves(inner, f"{path}.{key}".lstrip("."))
    return found or {path: value}


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    """Print the values that differ, those of the same name together; return their number."""
    groups: dict[str, list[str]] = defaultdict(list)
    for start in sorted({*old, *new}):
        before, after = leaves(old.get(start, {})), leaves(new.get(start, {}))
        for path in sorted({*before, *after}):
            values = before.get(path, "(absent)"), after.get(path, "(absent)")
            if values[0] != values[1]:
                group = re.sub(r"\d+", "N", path)
                groups[group].append(f"{start}: {values[0]!r} -> {values[1]!r}")
    for group, found in sorted(groups.items(), key=lambda item: -len(item[1])):
        print(f"{len(found)} x {group}")
        for line in found[:2]:
            print(f"    {line[:300]}")
    print(f"{len({*old, *new})} starts, {sum(map(len, groups.values()))} values differ")
    return len(groups)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("revision", nargs="?")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(INPUTS["runs"]), metavar="NAME")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        tree = ROOT
        if given.revision:
            tree = unpack(given.revision, Path(made), "minimind", "configs", "pyproject.toml")
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MINIMIND"))
        }
        done = subprocess.run(
            [sys.executable, __file__, "--work", *(given.only or INPUTS["runs"])],
            cwd=tree,
            env=kept | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
        )
    given.out.write_bytes(done.stdout)
    new = json.loads(done.stdout)
    print(f"{len(new)} starts, recorded in {given.out}")
    return min(1, compare(json.loads(given.against.read_text()), new)) if given.against else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2:])
    else:
        sys.exit(main())
