"""Parts beside the recipe `strong`, each alone, in 0.97 of the steps.

    OMP_NUM_THREADS=1 python -m benchmarks.recipe TEXT.jsonl --folder DIR [--shapes 0.3m 1m]
        [--steps 200] [--share 0.97] [--seeds 3] [--only PART ...] [--out FILE.json]

A part saves 3 % of the steps if it ends in 0.97 of them at least as low as `strong` in all of them:
the learning rate of every run falls over its own steps. The product does not know the parts. This
module changes groups and updates of the optimizer from outside, and blends averages of the weights
into the last weights of `strong`. No rate is searched again for a part. Every run takes steps of 4
rows of 256 tokens, in fp32 on one thread. One of 33 documents is held out. Printed are bits per
byte of the held-out rows after the last step: the mean over seeds, each seed's, and the difference
from `strong` in all steps. What is done in DIR is not done again.
"""

from __future__ import annotations

import json
import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.auto_values import ROW, Case
from benchmarks.default_rules import SHAPES, Plan, data_of, divide
from benchmarks.dropout import train
from benchmarks.record import arguments, record
from minimind.config.run_config import RunConfig
from minimind.engine import build, optimizers
from minimind.engine.optimizers import Groups, WeightAverage, hidden_matrices, run_groups
from minimind.train import loop, pretrain
from minimind.train.evaluate import evaluate

ROWS = 4  # of a step: those of the rule for up to 0.43 million tokens
FEW_TOKENS, RATE_OF_FEW = 500_000, 0.002  # configs/recipes/strong.yaml
STRONG = "strong"
# An average of the weights over a share of the steps, and its weight in the blend.
BLENDS = ((0.025, 0.5), (0.05, 1.0), (0.05, 0.5), (0.1, 0.5))
# A head has rows of these matrices, or columns.
SIDES = {"q_proj": "rows", "k_proj": "rows", "v_proj": "rows", "o_proj": "columns"}
GroupsOf = Callable[[Any, RunConfig], Groups]


def with_beta2(beta2: float) -> GroupsOf:
    """Groups in which the norms have another decay of the second moment."""

    def groups(model: Any, run: RunConfig) -> Groups:
        return [
            group | {"betas": (run.beta1, beta2)} if group["params"][0].ndim < 2 else group
            for group in run_groups(model, run)
        ]

    return groups


def pairs_of_heads(model: Any, run: RunConfig) -> Groups:
    """Groups in which those of Muon say how heads divide a matrix, for `orthogonal_by_pairs`."""
    *others, muon = run_groups(model, run)
    by_side: dict[str | None, dict[str, Any]] = {}
    for name, p in hidden_matrices(model).items():
        by_side.setdefault(SIDES.get(name.split(".")[-2]), {})[name] = p
    for side, found in by_side.items():
        own = {"params": [*found.values()], "names": frozenset(found), "side": side}
        others.append(muon | own | {"pair": 2 * model.config.head_dim})
    return others


def orthogonal_by_pairs(update: Tensor, group: Any, whole: Any = optimizers._orthogonal) -> Tensor:
    """Changes as `_orthogonal` has them, each pair of heads as a matrix of its own."""
    side = group.get("side")
    if side is None:
        return whole(update, group)
    heads = update if side == "rows" else update.mT
    changes = whole(heads.reshape(-1, group["pair"], heads.shape[-1]), group).view(heads.shape)
    return changes if side == "rows" else changes.mT.contiguous()


PARTS: dict[str, tuple[dict[str, float], GroupsOf]] = {
    STRONG: ({}, run_groups),
    "beta2 of norms 0.99": ({}, with_beta2(0.99)),
    "beta2 of norms 0.999": ({}, with_beta2(0.999)),
    "Muon by pairs of heads": ({}, pairs_of_heads),
    "rate falls to 0": ({"min_lr_ratio": 0.0}, run_groups),
}


@contextmanager
def blends_judged() -> Iterator[dict[str, float]]:
    """Let a run keep averages; after it, the result has bits per byte of the BLENDS by name."""
    found: dict[str, float] = {}
    averages: dict[float, WeightAverage] = {}
    advances, evaluates = loop.advance_progress, loop.run_evaluation

    def advance(context: loop.RunContext, state: Any, steps: int) -> None:
        advances(context, state, steps)
        for share in {share for share, _ in BLENDS}:
            if share not in averages:
                decay = 1 - 1 / max(2.0, share * context.schedule.total_steps)
                averages[share] = WeightAverage(context.engine.backend, decay)
            averages[share].update(state.step)

    def judge(context: loop.RunContext, state: Any) -> None:
        evaluates(context, state)
        rows = context.run.micro_batch_rows(context.engine.world_size)
        for share, weight in BLENDS:  # of a share the whole average first
            average = averages[share]
            for f in {id(f.owner): f for f in average.state().fragments}.values():
                average.values[id(f.owner)].lerp_(f.owner.detach(), 1 - weight)
            with average.in_force():
                bits = evaluate(context.engine, context.held_out, rows, grows=False)["val_bpb"]
            found[f"{weight:g} of the average over {100 * share:g} %"] = bits

    with (
        patch.object(loop, "advance_progress", advance),
        patch.object(loop, "run_evaluation", judge),
    ):
        yield found


def run(
    shape: str, part: str, steps: int, seed: int, data: Path, folder: Path, blends: bool
) -> dict[str, Any]:
    """Last validation of a run, with those of the blends if asked for, unless that was done."""
    flags, groups = PARTS[part]
    place = folder / "runs" / f"{shape}-{part.replace(' ', '-')}-{steps}-{seed}.json"
    if place.exists():
        return json.loads(place.read_text())
    case = Case(shape, "text", steps * ROWS * ROW)
    partial = place.with_suffix(".partial.json")
    partial.unlink(missing_ok=True)  # it would be taken for done
    judging = blends_judged() if blends else nullcontext({})
    with (
        judging as judged,
        patch.object(pretrain, "log_floors", lambda *_: None),  # no part of a run's loss
        patch.object(build, "run_groups", groups),
        patch.object(optimizers, "_orthogonal", orthogonal_by_pairs),
    ):
        more: dict[str, Any] = {"config": STRONG, "batch_size": ROWS, "seed": seed}
        if case.tokens < FEW_TOKENS:
            more["learning_rate"] = RATE_OF_FEW
        found = train(case, data, {**more, **flags}, partial)
    partial.write_text(json.dumps({**found, "blends": judged}))
    partial.rename(place)
    print(f"{place.stem}: {found['bits']:.4f}, {found['cpu_seconds']:.0f} CPU s", flush=True)
    return json.loads(place.read_text())


def table(shape: str, runs: dict[tuple[str, int], list[dict[str, Any]]], steps: int) -> list[Any]:
    """A line for each part and blend, which are printed."""
    ends = {(part, n): [one["bits"] for one in own] for (part, n), own in runs.items()}
    for (part, n), own in runs.items():
        for blend in own[0]["blends"]:
            ends[f"{part}, {blend}", n] = [one["blends"][blend] for one in own]
    goal, lines = ends[STRONG, steps], []
    for (part, n), bits in ends.items():
        mean, above = statistics.mean(bits), [a - b for a, b in zip(bits, goal, strict=True)]
        lines.append({"shape": shape, "part": part, "steps": n, "bits": bits, "above": above})
        each = " ".join(f"{one:.4f}" for one in bits)
        print(
            f"{shape}: {part}, {n} steps: {mean:.4f} ({each}); above strong in {steps}:"
            f" {statistics.mean(above):+.4f} ({min(above):+.4f} to {max(above):+.4f})",
            flush=True,
        )
    return lines


def compare(args: Namespace) -> None:
    """Make the runs, seed by seed, print the tables, and record the results."""
    before, fewer = os.getloadavg(), round(args.share * args.steps)
    divide(args.text, args.folder)
    (args.folder / "runs").mkdir(exist_ok=True)
    pairs = [(STRONG, args.steps), *((part, fewer) for part in args.only)]
    data = {shape: data_of(Plan(shape, 0), args.folder) for shape in args.shapes}
    runs: dict[str, dict[tuple[str, int], list[dict[str, Any]]]] = {}
    for seed in range(args.seeds):
        for shape in args.shapes:
            own = runs.setdefault(shape, {pair: [] for pair in pairs})
            for part, steps in pairs:
                blends = (part, steps) == (STRONG, fewer)
                found = run(shape, part, steps, seed, data[shape], args.folder, blends)
                own[part, steps].append(found)
    lines = [line for shape in args.shapes for line in table(shape, runs[shape], args.steps)]
    record(args.out, "recipe", before, found=lines)


def main() -> None:
    """Compare the parts with the recipe."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=["0.3m", "1m"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--share", type=float, default=0.97)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART")
    args = parser.parse_args()
    if not 0 < round(args.share * args.steps) < args.steps:
        parser.error(
            f"--share {args.share:g} of --steps {args.steps} is no smaller number of steps"
        )
    compare(args)


if __name__ == "__main__":
    main()
