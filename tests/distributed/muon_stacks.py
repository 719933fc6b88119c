"""Worker of tests/engine/test_muon.py: trained, saved and resumed, one by one and in stacks.

Usage: RANKS of ... muon_stacks OUT.json
The table says one number of elements where a run begins and another where it is resumed.
"""

from __future__ import annotations

import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from minimind.engine import optimizers
from minimind.engine.build import Engine, leave_process_group
from tools.engines import Case, WithFrozenParts, build, course, load, save, state_of

SAVED, LAST = 3, 6
STACKS = {"one by one": 0, "pairs": 2**11, "all": 2**20}
FLAGS = "--optimizer muon --muon_lr 0.01 --grad_clip 0 --muon_coefficients polar_express"
EXPERTS = {"use_moe": True, "n_routed_experts": 3, "num_experts_per_tok": 1}
# Without DeepSpeed first, as the others go on from its checkpoint.
CASES = {
    f"{'none' if stage is None else stage}, {dtype}": Case(
        stage, dtype, flags=FLAGS, model=WithFrozenParts, shape=EXPERTS
    )
    for stage, dtype in (
        *((None, "float32"), (None, "bfloat16"), (1, "bfloat16")),
        *((2, "float32"), (2, "bfloat16"), (3, "bfloat16")),
    )
}


def digest(engine: Engine) -> str:
    """Digest of the weights and moments of all ranks."""
    state = state_of(engine)
    return sha256(b"".join(state[key].numpy().tobytes() for key in sorted(state))).hexdigest()


def stepped(engine: Engine, first: int, last: int) -> dict[str, Any]:
    """The course, how many matrices were iterated together in it, and the end."""
    iterate, together = optimizers.newton_schulz, list[int]()

    def noted(update: torch.Tensor, *numbers: Any) -> torch.Tensor:
        together.append(1 if update.ndim == 2 else len(update))
        return iterate(update, *numbers)

    optimizers.newton_schulz = noted
    try:
        losses = [step["loss"] for step in course(engine, first, last)]
    finally:
        optimizers.newton_schulz = iterate
    counters = engine.backend.counters()
    return {
        **{"losses": losses, "together": together, "digest": digest(engine)},
        "recorded": counters["muon_stack"],
    }


def study(case: Case, stack: int, root: Path) -> dict[str, Any]:
    """The unbroken course, and the same resumed where the table says otherwise."""
    optimizers.STACKS = {"cpu": stack}
    engine = build(case, seed=1)
    before = stepped(engine, 0, SAVED)
    save(engine, root, SAVED)
    after = stepped(engine, SAVED, LAST)
    close(engine, case)
    return {"before": before, "after": after, "resumed": resumed(case, stack, root)}


def resumed(case: Case, stack: int, root: Path) -> dict[str, Any]:
    """The course from the checkpoint on."""
    optimizers.STACKS = {"cpu": 0 if stack else 2**20}
    engine = build(case, seed=2)
    load(engine, root, SAVED)
    found = stepped(engine, SAVED, LAST)
    close(engine, case)
    return found


def close(engine: Engine, case: Case) -> None:
    """Let the next engine begin."""
    engine.backend.release()
    if case.stage is None:
        leave_process_group()


def main() -> None:
    """Study every case; write what was seen."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    out, found = Path(sys.argv[1]), dict[str, Any]()
    for name, case in CASES.items():
        for how, stack in STACKS.items():
            found[f"{how}, {name}"] = study(case, stack, out.parent / f"{how}, {name}")
            if case.stage is not None:
                without = out.parent / f"{how}, none, {case.dtype}"
                found[f"{how}, {name}"]["crossed"] = resumed(case, stack, without)
    out.write_text(json.dumps(found))
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
