"""The same tokens of a text over the whole run, or most of them in its decay (--stages).

    OMP_NUM_THREADS=1 python -m benchmarks.mid_training ONE.jsonl OTHER.jsonl --work DIR
        [--seeds 1 2] [--steps 400] [--share 0.1] [--before 0.05] [--decay 0.2] [--out FILE.json]

Each of the two texts is once the better one, which is a share of the tokens of a run, and once the
rest. By wsd, `even` reads this share in every step, and `decay` reads the share --before up to the
decay, and in it as much more that both read equal tokens of the better text. Prints the last
validation loss of both texts, in bits per byte.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

import minimind.train as training
from benchmarks.record import arguments, record
from minimind.cli.main import main as minimind

train: Any = training  # a package that is called like a function
FIXED: dict[str, Any] = {
    **{"dim": 128, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "max_seq_len": 128},
    **{"batch_size": 8, "eval_rows": 400, "learning_rate": 3e-3, "schedule": "wsd"},
    **{"device": "cpu", "deepspeed_config": "none", "log_interval": 50},
}


def prepare(texts: dict[str, Path], work: Path) -> dict[str, str]:
    """A prepared folder of each text, with one tokenizer of both; by name."""
    tokenizer, paths = work / "tokenizer", " ".join(map(str, texts.values()))
    words = [f"tokenizer train {paths} --vocab_size 4096 --out {tokenizer}"]
    for name, path in texts.items():
        given = f"--tokenizer {tokenizer} --val_fraction 0.02"
        words.append(f"prepare {path} {given} --out {work / name}")
    for line in (f"{one} --force" for one in words):
        if status := minimind(line.split()):
            raise SystemExit(status)
    return {name: str(work / name) for name in texts}


def stages_of(better: str, rest: str, given: Any) -> dict[str, list[dict[str, Any]]]:
    """The stages of both runs, with equal tokens of the better text."""
    share, before = given.share, given.before
    in_decay = (share - before * (1 - given.decay)) / given.decay
    last = {"name": "decay", "weights": {better: in_decay, rest: 1 - in_decay}}
    first = {"name": "stable", "until": 1 - given.decay}
    even = {"weights": {better: share, rest: 1 - share}}
    return {
        "even": [{**first, **even}, {**last, **even}],
        "decay": [{**first, "weights": {better: before, rest: 1 - before}}, last],
    }


def end_of(out_dir: Path, flags: dict[str, Any]) -> dict[str, float]:
    """Train; bits per byte of each source in the last validation."""
    train(flags, out_dir=str(out_dir))
    events = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    (*_, last) = (event for event in events if event["event"] == "eval")
    return {name: values["val_bpb"] for name, values in last["by_source"].items()}


def main() -> None:
    """Train two runs for each seed and better text, print the table, write the JSON."""
    parser = arguments(__doc__)
    parser.add_argument("texts", type=Path, nargs=2)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--before", type=float, default=0.05)
    parser.add_argument("--decay", type=float, default=0.2)
    given = parser.parse_args()
    load = os.getloadavg()
    given.work.mkdir(parents=True, exist_ok=True)
    folders = prepare({path.stem: path for path in given.texts}, given.work)
    names, found = list(folders), []
    print(f"{'better':>10}{'seed':>6}{'even':>10}{'decay':>18}   rest: even, decay")
    for better, rest in (names, names[::-1]):
        for seed in given.seeds:
            ends = {}
            for kind, stages in stages_of(better, rest, given).items():
                path = given.work / f"{better}-{kind}.yaml"
                content = {"sources": folders, "decay_from": "decay", "stages": stages}
                path.write_text(yaml.safe_dump(content))
                flags = {**FIXED, "stages": str(path), "max_steps": given.steps, "seed": seed}
                flags |= {"eval_interval": given.steps, "resume": "none"}
                flags |= {"cache_dir": str(given.work / "cache")}
                ends[kind] = end_of(given.work / f"{better}-{kind}-{seed}", flags)
            even, decay = ends["even"][better], ends["decay"][better]
            others = ", ".join(f"{ends[kind][rest]:.4f}" for kind in ends)
            compared = f"{decay:>9.4f} ({decay / even - 1:+.1%})"
            print(f"{better:>10}{seed:>6}{even:>10.4f}{compared}   {others}")
            found.append({"better": better, "seed": seed, "bits_per_byte": ends})
    record(given.out, "mid_training", load, runs=found)


if __name__ == "__main__":
    main()
