"""Compare how this tree and a commit read the same random command lines and YAML files.

python -m tools.compare_flags COMMIT [--inputs 20000] [--seed 0]

Each tree answers in a process of its own: the value and source of every flag, or the status of the
refusal, the number of faults in it and the flags that it names. Words of messages are not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Flags that rules combine, with values that meet and break them.
COMBINED = [
    "task=sft train_on=last chat_template=a template_date=2024-07-26 template_date=x text_field=b",
    "task=sft chat_template_kwargs={} chat_template_kwargs=[] doc_mask=on doc_mask=off stages=a",
    "spike_guard=on spike_factor=5 spike_window=20 max_rollbacks=0 dtype=float16 stages=a",
    "rope_scaling=ntk rope_scaling=yarn rope_factor=2 rope_original_length=64 max_seq_len=128",
    "rope_scaling=linear rope_theta=1 init_from=a dim=16 n_heads=8 rope_factor=8 max_seq_len=99999",
    "use_moe=on n_routed_experts=8 n_routed_experts=4 num_experts_per_tok=5 aux_loss_alpha=0",
    "norm_topk_prob=off n_shared_experts=2 use_moe=off model=shape.yaml model=tiny",
    "schedule=wsd decay_steps=5 decay_fraction=0.1 decay_shape=linear warmup_steps=9 max_steps=8",
    "stages=a epochs=2 max_flops=9 max_tokens=9 source=a=b data_path=c tokens_per_param=9",
    "eval_tasks=cloze eval_tasks_interval=5 eval_tasks_limit=9 keep_best=2 keep_best_by=average",
    "keep_best=2 eval_rows=0 val_path=a val_fraction=0 val_fraction=0.1 eval_interval=3",
    "keep_every=5 save_interval=2 save_interval=10 keep_best=1 eval_interval=4 keep_best_by=c",
    "verify_interval=5 on_corruption=stop sequence_parallel=2 compile=on use_moe=on max_seq_len=63",
    "sequence_parallel=3 n_heads=6 n_kv_heads=3 dim=96 head_dim=7 head_dim=8 n_kv_heads=4",
    "model=hf:. model=hf:none dim=64 mup_base_dim=8 zero_init_outputs=on loss=chunked doc_mask=on",
    "embedding_init=bigrams tie_word_embeddings=off init_from=a mup_base_dim=8 dim=1024",
    "zero_init_outputs=on init_from=a optimizer=sgd mup_base_dim=8 sample_prompts=p",
    "sample_prompts=p sample_interval=5 report_to=wandb,none report_to=a,aim allow_change=data,x",
    "mirror=s3://b/c mirror=https://h/x out_dir=s3://b/c init_from=hf:a/b skip_rows=s3://x/y",
    "config=run.yaml model=shape.yaml config=strong config=sft config=none model=tyni",
    "learning_rate=auto batch_size=auto muon_lr=auto beta1=auto eval_rows=auto dim=auto",
]
NUMBERS = ["0", "1", "2", "3", "8", "16", "64", "512", "-1", "0.5", "1.0", "1e3", "2e400", "nan"]
ODD = ["", "x", "auto", "True", "010", "1_000", " 5", "2**3", "é", "none", "a{b}", "0x10"]


def inputs(number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield command lines, and calls from Python, with the files that they name."""
    from minimind.config.parse import build_parser

    chance = random.Random(seed)
    takes = {a.dest: a for a in build_parser()._actions if a.dest not in ("help", "version")}
    page = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
    foreign = re.findall(r"`([a-z_.=A-Z0-9]+)`", page)
    pairs = [[tuple(word.split("=", 1)) for word in line.split()] for line in COMBINED]

    def value_of(name: str) -> str:
        choices = re.fullmatch(r"{(.*)}", str(takes[name].metavar))
        likely = choices[1].split(",") if choices else NUMBERS
        return chance.choice(likely if chance.random() < 0.8 else NUMBERS + ODD)

    def chosen() -> list[tuple[str, str]]:
        if chance.random() < 0.6:
            row = chance.choice(pairs) + chance.choice(pairs)
            return [(n, v) for n, v in chance.sample(row, chance.randint(1, min(5, len(row))))]
        names = chance.choices(list(takes), k=chance.randint(1, 5))
        return [(name, value_of(name)) for name in names if name != "print_completion"]

    def words(name: str, value: str) -> list[str]:
        if chance.random() < 0.03:  # a typing error
            cut = chance.randrange(len(name))
            name = name[:cut] + name[cut + 1 :]
        if chance.random() < 0.03:
            name, _, its = chance.choice(foreign).partition("=")
            value = its or value
        if name in takes and takes[name].nargs == 0 and chance.random() < 0.95:
            name, value = (f"no-{name}" if value in ("off", "0") else name), ""
        name = name.replace("_", "-") if chance.random() < 0.2 else name
        if not value:
            return [f"--{name}"]
        return [f"--{name}={value}"] if chance.random() < 0.4 else [f"--{name}", value]

    def of_yaml(value: str) -> str:
        value = {"on": "true", "off": "false"}.get(value, value)
        return json.dumps(value) if chance.random() < 0.2 else value

    for _ in range(number):
        files = {
            "run.yaml": "".join(f"{n}: {of_yaml(v)}\n" for n, v in chosen()),
            "shape.yaml": "".join(f"{n}: {of_yaml(v)}\n" for n, v in chance.choice(pairs[3:7])),
        }
        given = chosen()
        if chance.random() < 0.2:
            typed = {"on": True, "off": False, "None": None}
            values = {n: typed.get(v, v) for n, v in given}
            for n, v in values.items():
                is_number = re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?", str(v))
                if is_number and chance.random() < 0.8:
                    values[n] = json.loads(str(v))
                elif chance.random() < 0.1:
                    values[n] = chance.choice([None, [], [v], {}, 1.5, True])
            yield {"values": values, "files": files}
        else:
            extra = [chance.choice(ODD)] * (chance.random() < 0.03)
            yield {"argv": [w for n, v in given for w in words(n, v)] + extra, "files": files}


def answer() -> None:
    """Read inputs from standard input, a JSON line each, and print what the tree makes of each."""
    from minimind.config.parse import build_config, parse_flags
    from minimind.config.run_config import FLAGS
    from minimind.errors import RunError

    names = "|".join(sorted(FLAGS, key=len, reverse=True))
    named = re.compile(rf"--(?:no-)?({names})\b|\b({names}) = ")
    for line in sys.stdin:
        case = json.loads(line)
        for name, text in case["files"].items():
            Path(name).write_text(text, encoding="utf-8")
        found: dict[str, Any]
        try:
            if "argv" in case:
                run = parse_flags(case["argv"])
            else:
                run = build_config(case["values"], "train({name}=...)")
            found = {"values": {n: getattr(run, n) for n in FLAGS}, "sources": dict(run.sources)}
        except RunError as error:
            said = str(error)
            faults = max([int(n) for n in re.findall(r"(?:^|\s)\((\d+)\) ", said)], default=1)
            flags = sorted({a or b for a, b in named.findall(said)})
            found = {"status": error.status, "faults": faults, "flags": flags, "said": said}
        except SystemExit as end:  # of --help
            found = {"exit": end.code}
        found = {**found, "sources": dict(sorted(found.get("sources", {}).items()))}
        print(json.dumps(found, sort_keys=True, default=str))


def answers(tree: Path, cases: str) -> list[dict[str, Any]]:
    """What a tree makes of the inputs."""
    environ = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--answer"],
            env=environ,
            cwd=folder,
            input=cases,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    texts = done.stdout.replace(str(tree), "TREE").splitlines()
    return [json.loads(text) for text in texts if text.startswith("{")]


def main() -> int:
    """Compare; return 1 if the trees differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answer", action="store_true")
    args = parser.parse_args()
    if args.answer:
        answer()
        return 0
    cases = [*inputs(args.inputs, args.seed)]
    text = "".join(json.dumps(case) + "\n" for case in cases)
    with tempfile.TemporaryDirectory() as folder:
        from tools.revisions import unpack  # not in every earlier commit, which runs this file

        old = answers(unpack(args.commit, Path(folder)), text)
    new = answers(ROOT, text)
    assert len(old) == len(new) == len(cases)
    differences = fewer = 0
    for case, before, after in zip(cases, old, new, strict=True):
        if all(before.get(k) == after.get(k) for k in {*before, *after} - {"said"}):
            continue
        is_subset = {*after.get("flags", ())} <= {*before.get("flags", ())}
        if is_subset and 0 < after.get("faults", 0) < before.get("faults", 0):
            fewer += 1
            continue
        differences += 1
        if differences <= 40:
            print(json.dumps({"input": case, "before": before, "after": after}, indent=1))
    kinds = Counter("refused" if "status" in one else "accepted" for one in old)
    print(
        f"{len(cases)} inputs, {dict(kinds)} before; {fewer} are refused with fewer faults, which"
        f" followed from others; {differences} differ"
    )
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
