"""A run of MiniMind's own trainer is imported, and continued by both on the same rows.

`python -m tools.minimind_resume CHECKOUT [OUT]` copies the checkout of jingyaogong/minimind to
OUT and stops its train_pretrain.py after three updates, on a CPU. Its `*_resume.pth` is imported
and resumed here, and its trainer goes on with `--from_resume 1`. Exit status 1: the two part.

Their AdamW decays norms, which no run of ours does. The last column has one group, as theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from minimind.checkpoint.reader import Contents
from minimind.checkpoint.resume import resume
from minimind.cli.main import main as minimind
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.parse import parse_flags
from minimind.engine.optimizers import parameter_groups
from minimind.engine.plain_backend import PlainBackend
from minimind.interop.weights import read_checkpoint_weights
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.rotary import half_to_interleaved
from minimind.runtime.terminal import aligned
from tests.conftest import ROOT, sentences
from tests.faults import tiny

UPDATES, MORE, ACCUMULATION, ROWS = 3, 5, 2, 4
STOP, END = UPDATES * ACCUMULATION, (UPDATES + MORE) * ACCUMULATION  # micro-batches
HIDDEN, HEADS = 64, 8  # MiniMind has no flag for its heads
TRAINER = {
    **{"device": "cpu", "num_workers": 0, "epochs": 1, "batch_size": ROWS, "max_seq_len": 48},
    **{"hidden_size": HIDDEN, "num_hidden_layers": 2, "accumulation_steps": ACCUMULATION},
    **{"save_interval": STOP, "log_interval": 1, "data_path": "../text.jsonl"},
}
SHAPE = {"n_heads": HEADS, "rope_theta": 1e6, "norm_eps": 1e-6, "max_seq_len": 32768}
KINDS = ("fp32", "exp_avg", "exp_avg_sq")
# Of the losses, and of each kind of number. Float32 sums in another order; as resumed, the decay of
# norms too: 5 updates at a rate of at most 3e-4 with a decay of 0.01.
ONE_GROUP, AS_RESUMED = (4e-6, 1e-7, 1e-7, 1e-9), (4e-5, 2e-5, 1e-6, 1e-8)


class Stopped(Exception):
    """The trainer reached the micro-batch at which it was to stop."""


def their_part(out: Path, last: int) -> None:
    """Run train_pretrain.py of the current folder up to a micro-batch, and save what it had."""
    from model import model_minimind  # type: ignore[import-not-found] (of the checkout)

    program = Path("train_pretrain.py")
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(program.resolve())}
    found: dict[str, Any] = {"losses": [], "rows": [], "rates": []}
    kind = model_minimind.MiniMindForCausalLM
    forward = kind.forward

    def recorded(self: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        if not found["losses"]:
            found["before"] = state()
        if len(found["losses"]) == last:
            raise Stopped
        result = forward(self, input_ids, **options)
        found["losses"].append(float(result.loss.detach()))
        found["rows"].append((input_ids, options["labels"]))
        found["rates"].append(names["optimizer"].param_groups[0]["lr"])
        return result

    def state() -> dict[str, dict[str, torch.Tensor]]:
        weights = dict(names["model"].named_parameters())
        moments = names["optimizer"].state
        return {
            "fp32": {name: p.detach().clone() for name, p in weights.items()},
            **{
                moment: {name: moments[p][moment].clone() for name, p in weights.items()}
                for moment in KINDS[1:]
                if moments
            },
        }

    kind.forward = recorded
    try:
        exec(compile(program.read_bytes(), str(program), "exec"), names)
    except Stopped:
        pass
    torch.save({**found, "after": state()}, out)


def train(checkout: Path, out: Path, last: int, **more: int) -> dict[str, Any]:
    """What their trainer recorded in a process of its own."""
    flags = [word for name, v in {**TRAINER, **more}.items() for word in (f"--{name}", str(v))]
    path = os.pathsep.join([str(ROOT), str(checkout)])
    command = [sys.executable, "-m", "tools.minimind_resume", "--part", str(out), str(last)]
    env = os.environ | {"PYTHONPATH": path, "HF_DATASETS_CACHE": str(checkout / "cache")}
    subprocess.run([*command, *flags], cwd=checkout / "trainer", env=env, check=True)
    return torch.load(out)


class Ours(tiny.Engine):
    """One process that resumes the imported run."""

    def __init__(self, checkpoint: Path, is_one_group: bool) -> None:
        contents = Contents(checkpoint)
        self.model = MiniMindForCausalLM(read_checkpoint_weights(checkpoint).config)
        identity, lr = contents.manifest["identity"], contents.manifest["identity"]["lr"]
        beta1, beta2 = lr["betas"]
        flags = {"beta1": beta1, "beta2": beta2, "grad_clip": 1, "dtype": "float32"}
        flags |= {"accumulation_steps": ACCUMULATION, "weight_decay": lr["weight_decay"]}
        run = parse_flags([word for name, v in flags.items() for word in (f"--{name}", str(v))])
        groups = parameter_groups(self.model, lr["weight_decay"])
        if is_one_group:
            groups = [{**group, "weight_decay": lr["weight_decay"]} for group in groups]
        self.backend = PlainBackend(self.model, self.model, ResolvedConfig(run, "single"), groups)
        found = resume(self, self, checkpoint.parent, "auto", identity)  # type: ignore[arg-type] (a stand-in)
        assert found.state.step == UPDATES

    def losses(self, rows: list[Any], rates: list[float]) -> list[float]:
        """The losses of micro-batches, with the rate of each."""
        losses = []
        for number, ((ids, labels), rate) in enumerate(zip(rows, rates, strict=True), 1):
            self.backend.begin(rate)
            loss = self.model(input_ids=ids, labels=labels).loss
            self.backend.backward(loss)
            self.backend.update(number % ACCUMULATION == 0)
            losses.append(float(loss.detach()))
        return losses


def apart(theirs: dict[str, torch.Tensor], ours: Any) -> float:
    """The largest difference between weights, or moments: theirs in our order of rotary pairs."""
    differences = []
    for name, value in theirs.items():
        if "q_" in name or "k_" in name:
            value = half_to_interleaved(value, HIDDEN // HEADS)
        differences.append((value - ours(name).view_as(value)).abs().max())
    return float(torch.stack(differences).max())


def main(checkout: Path, out: Path) -> int:
    """Print the table; return the exit status."""
    copy = out / "minimind"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git", "images"))
    texts = sentences(1, END * ROWS)
    (copy / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    train(copy, out / "first.pt", STOP)
    file, run = copy / "checkpoints" / f"pretrain_{HIDDEN}_resume.pth", out / "run"
    words = ["import", "--from", "minimind-resume", file, "--out", run, "--tokenizer"]
    words += [copy / "model", *(word for n, v in SHAPE.items() for word in (f"--{n}", v))]
    if status := minimind([*map(str, words)]):
        return status
    theirs = train(copy, out / "second.pt", MORE * ACCUMULATION, from_resume=1)
    checkpoint = tiny.newest(run)
    contents = Contents(checkpoint)
    assert {*theirs["before"]["fp32"]} == {*contents.shapes}
    table = []
    for kind in KINDS:
        found = apart(theirs["before"][kind], partial(contents.read, kind))
        table.append((f"{kind} at the import", found, 0.0, found, 0.0))
    columns = [continued(checkpoint, theirs, is_one_group) for is_one_group in (False, True)]
    names = [f"losses of {MORE} updates", *(f"{kind} after them" for kind in KINDS)]
    table += [*zip(names, columns[0], AS_RESUMED, columns[1], ONE_GROUP, strict=True)]
    titles = ("largest difference", "as resumed", "bound", "one group", "bound")
    lines = [(name, *(f"{number:.1e}" for number in row)) for name, *row in table]
    print(f"\nlosses of theirs: {theirs['losses'][0]:.4f} to {theirs['losses'][-1]:.4f}")
    print(aligned([titles, *lines], indent=""))
    do_agree = all(row[1] <= row[2] and row[3] <= row[4] for row in table)
    print("they agree" if do_agree else "they part")
    return int(not do_agree)


def continued(checkpoint: Path, theirs: dict[str, Any], is_one_group: bool) -> list[float]:
    """The largest difference of losses, and of each kind of number after them."""
    engine = Ours(checkpoint, is_one_group)
    losses = engine.losses(theirs["rows"], theirs["rates"])
    pieces = dict(engine.state().slices(0, 1))
    found = [float((torch.tensor(losses) - torch.tensor(theirs["losses"])).abs().max())]
    for kind in KINDS:
        found.append(apart(theirs["after"][kind], lambda name, k=kind: pieces[f"{k}|{name}|0"]))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--part":
        out, last = Path(sys.argv[2]), int(sys.argv[3])
        sys.argv = sys.argv[:1] + sys.argv[4:]
        their_part(out, last)
        sys.exit()
    checkout, *place = map(Path, sys.argv[1:])
    sys.exit(main(checkout, place[0] if place else Path(mkdtemp())))
