"""Every adapter of DeepSpeed's wrappers in two real processes: saved, resumed, rewound, crossed.

One launch of tests/distributed/adapters.py studies them all; what needs a C++ op of DeepSpeed's,
which takes minutes to compile the first time, is long.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minimind.engine.op_build_lock import MAX_WAIT
from minimind.model.configuration import MiniMindConfig
from tests.distributed.adapters import CASES, LAST, SAVED
from tools.engines import FROZEN, LENGTH, ORDER, TINY, WithFrozenParts, text
from tools.forking import SILENT, Nursery

pytestmark = pytest.mark.launch
WRAPPERS = {
    "ddp, fp32": "AdamW",
    "ddp, bf16": "MasterWeights",
    "2, bf16, experts": "DeepSpeedZeroOptimizer",
    "2, bf16, experts, Muon": "DeepSpeedZeroOptimizer",
    "0, fp32": "AdamW",
    "0, bf16": "FP16_UnfusedOptimizer",
    "1, bf16, fp32 sums": "BF16_Optimizer",
    "0, bf16, FusedAdam": "FP16_Optimizer",
    "0, fp32, FusedAdam": "FusedAdam",
}
# One of each wrapper and way of saving one; the rest is long.
SHORT = [
    *("ddp, bf16", "0, bf16", "1, bf16, fp32 sums", "2, bf16, round robin"),
    *("2, fp16", "2, bf16, experts, Muon", "2, mixed", "3, bf16", "2, bf16, round robin, 8 bits"),
]
MIXED = [n for n in CASES if "mixed" in n and not n.endswith(("Muon", "experts"))]
LONG = [name for name in CASES if name not in SHORT]
SHORT_CROSSINGS = ["2, bf16, round robin -> 1, bf16, fp32 sums", "2, bf16, round robin -> 3, bf16"]
LONG_CROSSINGS = [
    "1, bf16, fp32 sums -> 2, bf16",
    "2, bf16, round robin, Muon -> 3, bf16, Muon",
    "3, bf16 -> 2, bf16",
    "ddp, bf16, Muon -> 2, bf16, round robin, Muon",
    "3, bf16, Muon -> 1, bf16, fp32 sums, Muon",
    "2, bf16, muP -> 3, bf16, muP",
    "2, fp16 -> 3, fp16",
    "2, bf16, experts -> 3, bf16, experts",
    "2, bf16 -> 2, bf16, FusedAdam",
    "2, bf16, FusedAdam -> 1, bf16, CPUAdam",
    "1, bf16, CPUAdam -> 2, bf16",
    "0, bf16, FusedAdam -> 2, bf16",
    "2, bf16 -> 0, bf16, FusedAdam",
    "2, fp32, Muon -> 0, fp32, Muon",
    "0, fp32, Muon -> 3, fp32, Muon",
    "ddp, bf16, muP -> 2, bf16, muP",
    "ddp, bf16, Lion -> 3, bf16, Lion",
    "3, bf16, Lion -> 1, bf16, fp32 sums, Lion",
    "2, bf16, offload, Lion -> 2, bf16, CPULion",
    "2, bf16, CPULion -> ddp, bf16, Lion",
    "2, fp32, SGD -> 3, fp32, SGD",
    "2, bf16, 8 bits -> 2, bf16",
]
SOURCES = [name.partition(" -> ")[0] for name in LONG_CROSSINGS]


def in_order(names: Iterable[str]) -> list[str]:
    """What has to do with stage 3 last."""
    return sorted(names, key=lambda name: name.startswith("3") or " -> 3" in name)


def studied(
    nursery: Nursery, directory: Path, names: Iterable[str], seconds: float = SILENT
) -> dict[str, Any]:
    out, module = directory / "found.json", "tests.distributed.adapters"
    words = [str(out), *in_order(names)]
    statuses, _, report = nursery.run(module, words, directory / "ranks", seconds=seconds)
    assert statuses == [0, 0], report[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def plain(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return studied(nursery, tmp_path_factory.mktemp("plain"), [*SHORT, *SHORT_CROSSINGS])


@pytest.fixture(scope="module")
def more(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The other cases. CASES lists a source before what resumes from it; an op may be compiled."""
    names = [name for name in CASES if name not in SHORT or name in SOURCES]
    place = tmp_path_factory.mktemp("more")
    return studied(nursery, place, [*names, *LONG_CROSSINGS], MAX_WAIT + SILENT)


@pytest.fixture
def found(request: pytest.FixtureRequest, name: str) -> dict[str, Any]:
    """What was seen of one case, from the launch that it belongs to."""
    is_short = name in (*SHORT, *SHORT_CROSSINGS)
    return request.getfixturevalue("plain" if is_short else "more")


def marked(names: Iterable[str], long: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.long) if n in long else n for n in names]


@pytest.mark.parametrize("name", marked(CASES, LONG))
def test_the_same_configuration_continues_bit_for_bit(found: dict[str, Any], name: str):
    """Made anew, in an engine that trained on meanwhile, and from before the first step."""
    seen = found[name]
    assert [step["step"] for step in seen["unbroken"]] == list(range(LAST))
    assert seen["anew"] == [seen["unbroken"][SAVED:], []]
    assert seen["rewound"] == [seen["unbroken"][SAVED:], []]
    assert seen["restarted"] == [seen["unbroken"][:SAVED], []]
    assert seen["unbroken"][-1]["loss"] < seen["unbroken"][0]["loss"]


@pytest.mark.parametrize("name", marked(CASES, LONG))
def test_every_parameter_is_saved_once_and_whole(found: dict[str, Any], name: str):
    """Frozen ones without moments, the tied embedding once, and the buffer as it was counted."""
    keys = found[name]["keys"]
    sizes = {key.split("|")[1]: size for key, size in keys.items() if key.startswith("fp32|")}
    assert "lm_head.weight" not in sizes
    assert sizes["model.embed_tokens.weight"] == TINY["vocab_size"] * TINY["dim"]
    assert len({*FROZEN} & {*sizes}) == 2
    for parameter, size in sizes.items():
        is_matrix = parameter.startswith("model.layers.") and "norm" not in parameter
        has_momentum = name.endswith("SGD") or (name.endswith("Muon") and is_matrix)
        moments = {"momentum_buffer"} if has_momentum else {"exp_avg", "exp_avg_sq"}
        moments = {"exp_avg"} if name.endswith("Lion") else moments
        kept = {key.split("|")[0]: n for key, n in keys.items() if key.endswith(f"|{parameter}")}
        moments |= {"ema"} if "--ema" in CASES[name].flags else set()
        trained = {} if parameter in FROZEN else dict.fromkeys(moments, size)
        assert kept == {"fp32": size, **trained}
    assert keys["buffer|seen"] == 1
    looked_at = CASES[name].stage is None  # once, by DDP's search for unused parameters
    assert found[name]["seen"] == LAST * CASES[name].accumulation + looked_at


@pytest.mark.long
@pytest.mark.parametrize("name", ["2, fp32, recomputing", "3, fp32, recomputing"])
def test_blocks_that_are_computed_again_train_to_the_same_numbers(more: dict[str, Any], name: str):
    kept = more[name.removesuffix(", recomputing")]
    assert more[name]["unbroken"] == kept["unbroken"]
    assert more[name]["seen"] == kept["seen"]


@pytest.mark.parametrize("name", marked(WRAPPERS, LONG))
def test_the_cases_are_what_they_are_called(found: dict[str, Any], name: str):
    assert found[name]["wrapper"] == WRAPPERS[name]


@cache
def trained_under_autocast() -> list[float]:
    """The losses of a plain loop: fp32 weights, torch.autocast and torch's AdamW."""
    torch.manual_seed(1)
    model = WithFrozenParts(MiniMindConfig(**TINY, max_seq_len=LENGTH))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.85, 0.97), eps=1e-8)
    table, losses = text(), []
    for step in range(LAST):
        loss = 0.0
        for rows in table[torch.from_numpy(ORDER.rows_for(step, 0, 1))].split(2):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(rows[:, :-1]).logits
                of_rows = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            (of_rows / 4).backward()
            loss += of_rows.item() / 4
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / 100)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


@pytest.mark.parametrize("name", marked(MIXED, LONG))
def test_autocast_trains_as_in_a_plain_loop(found: dict[str, Any], name: str):
    """As many rows in a forward pass; the compiler rounds otherwise, as does a sum in bf16."""
    losses = [step["loss"] for step in found[name]["unbroken"]]
    expected = trained_under_autocast()
    assert losses == pytest.approx(expected, rel=1e-4)
    if not name.endswith(("one graph", "low sent")):
        assert losses[0] == pytest.approx(expected[0], rel=1e-6)  # bf16 and fp32: 1e-5 apart


@pytest.mark.parametrize("name", marked([name for name in CASES if "fp16" in name], LONG))
def test_the_loss_scale_continues_through_overflows(found: dict[str, Any], name: str):
    """What the bit-for-bit test compares does happen: halved and doubled before and after."""
    steps = found[name]["unbroken"]
    assert steps[SAVED - 1]["skipped"] > 0
    assert steps[-1]["skipped"] > steps[SAVED - 1]["skipped"]
    scales = [step["scale"] for step in steps[SAVED:]]
    assert any(b > a for a, b in pairwise(scales))
    assert any(b < a for a, b in pairwise(scales))


@pytest.mark.parametrize("name", marked([*SHORT_CROSSINGS, *LONG_CROSSINGS], LONG_CROSSINGS))
def test_another_wrapper_or_optimizer_class_continues_with_the_same_moments(
    found: dict[str, Any], name: str
):
    """Without the moments the first losses would differ by hundredths."""
    unbroken = found[name.partition(" -> ")[0]]["unbroken"][SAVED:]
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(found[name], unbroken, strict=True)]
    assert max(differences) < 2e-3
    assert [step["scale"] for step in found[name]] == [step["scale"] for step in unbroken]
