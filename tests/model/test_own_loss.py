"""--loss MODULE:FUNCTION: what is refused; the own cross-entropy trains as the built-in one."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

import minimind.train as training
from minimind.errors import CheckpointError, UsageError
from minimind.model.loss import IGNORED, own_sum
from minimind.model.own_loss import OwnLoss
from tests.train.test_fine_tuning import conversations
from tools.runs import events

train: Any = training  # a package that is called like a function
FLAGS: dict[str, Any] = {
    **{"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "max_seq_len": 32},
    **{"vocab_size": 600, "batch_size": 2, "device": "cpu", "eval_rows": 8, "dtype": "float32"},
    **{"max_steps": 6, "val_fraction": 0.1, "log_interval": 1, "deepspeed_config": "none"},
}
SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads", "max_seq_len", "vocab_size")
LOSSES = """
from functools import partial
from torch import rand_like
from torch.nn.functional import cross_entropy
def ce(logits, targets):
    assert logits.dtype.itemsize == 4
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
def mean(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
def unmasked(logits, targets):
    return ce(logits, targets) + logits.logsumexp(-1).square().sum()
def detached(logits, targets):
    return ce(logits.detach(), targets)
def constant(logits, targets):
    return ce(logits, targets) * 0
def each(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
def number(logits, targets):
    return 3.0
def whole(logits, targets):
    return (targets != -100).sum()
def fails(logits, targets):
    return logits[99]
def infinite(logits, targets):
    return ce(logits, targets) / 0
def one(logits):
    return logits.sum()
def noisy(logits, targets):
    return ce(logits * rand_like(logits), targets)
def exits(logits, targets):
    raise SystemExit(3)
def in_place(logits, targets):
    is_target = targets != -100
    targets[~is_target] = 0
    logits -= logits.detach().amax(-1, keepdim=True)
    each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each[is_target.flatten()].sum()
def by_product(logits, targets):
    rows, ids = logits.flatten(0, 1), targets.flatten()
    ones = logits.new_ones(rows.shape[1], 1)
    at_targets = rows.gather(1, ids[:, None])[:, 0]
    return ((rows.exp() @ ones)[:, 0].log() - at_targets).sum()
def none_of_padding(logits, targets):
    return ce(logits, targets) if (targets != -100).any() else logits.new_zeros(())
bound = partial(ce)
value = 3
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with the module of losses."""
    (tmp_path / "losses_of_test.py").write_text(LOSSES)
    (tmp_path / "broken_of_test.py").write_text("import nothing_of_that_name")
    (tmp_path / "exiting_of_test.py").write_text("raise SystemExit(5)")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("losses_of_test:mean", "a sum over targets, not a mean"),
        ("losses_of_test:unmasked", "counts targets of -100"),
        ("losses_of_test:detached", "has no gradient"),
        ("losses_of_test:constant", "has no gradient"),
        ("losses_of_test:each", "returned a tensor of shape (24,)"),
        ("losses_of_test:number", "returned float"),
        ("losses_of_test:whole", "returned a tensor of shape () and torch.int64"),
        ("losses_of_test:fails", "raised IndexError"),
        ("losses_of_test:one", "raised TypeError"),
        ("losses_of_test:infinite", "is inf for random logits"),
        ("losses_of_test:noisy", "for the same 4 rows; compute it from"),
        ("losses_of_test:exits", "raised SystemExit: 3"),
        ("losses_of_test:value", "value is no function"),
        ("losses_of_test:absent", "absent is not there"),
        ("sys:f", "f is not there in sys"),
        ("nowhere_of_test:f", "cannot be imported (ModuleNotFoundError"),
        ("exiting_of_test:f", "cannot be imported (SystemExit: 5)"),
        ("broken_of_test:f", "No module named 'nothing_of_that_name'"),
    ],
)
def test_a_loss_that_cannot_be_summed_is_refused(name: str, words: str):
    state = torch.get_rng_state()
    with pytest.raises(UsageError) as refused:
        OwnLoss.imported(name).require_sums(50)
    assert str(refused.value).startswith(f"--loss {name}")
    assert words in str(refused.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_it_may_change_its_arguments_and_skip_rows_without_targets():
    logits, targets = torch.randn(2, 5, 40), torch.randint(40, (2, 5))
    targets[0, 3:] = IGNORED
    given = logits.clone(), targets.clone()
    OwnLoss.imported("losses_of_test:in_place").require_sums(40)
    found, count = own_sum(OwnLoss.imported("losses_of_test:in_place"), logits, targets)
    expected, _ = own_sum(OwnLoss.imported("losses_of_test:ce"), given[0], targets)
    assert count == 8
    assert torch.equal(targets, given[1])
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    # The backward pass of a micro-batch of padding alone.
    leaf = given[0].requires_grad_()
    OwnLoss.imported("losses_of_test:none_of_padding")(leaf, targets * 0 + IGNORED).backward()
    assert leaf.grad is not None
    assert not leaf.grad.any()


def test_it_computes_in_float32_under_autocast():
    logits, targets = torch.randn(2, 5, 400), torch.randint(400, (2, 5))
    loss = OwnLoss.imported("losses_of_test:by_product")
    expected = loss(logits, targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(logits, targets), expected)


def test_its_digest_is_that_of_the_module_that_is_named(tmp_path: Path):
    digest = sha256((tmp_path / "losses_of_test.py").read_bytes()).hexdigest()
    for name in ("ce", "bound"):
        assert OwnLoss.imported(f"losses_of_test:{name}").digest() == digest


def curve(out_dir: Path) -> list[list[float]]:
    lines = events(out_dir, "step")
    return [[line["loss"], line["grad_norm"]] for line in lines]


def val_losses(out_dir: Path) -> list[float]:
    return [event["val_loss"] for event in events(out_dir, "eval")]


def test_the_own_cross_entropy_is_the_built_in_one_bit_for_bit_and_is_resumed(
    cached: dict[str, Any], tmp_path: Path
):
    built_in, own, broken = (tmp_path / name for name in ("built_in", "own", "broken"))
    given = {**FLAGS, **cached}
    assert train(given, out_dir=str(built_in)) == 0
    assert train(given, loss="losses_of_test:ce", out_dir=str(own)) == 0
    assert curve(own) == curve(built_in)
    assert val_losses(own) == val_losses(built_in)
    (start,) = events(own, "run_start")
    assert start["identity"]["model"]["loss"].startswith("losses_of_test:ce (")
    # Another loss is another run.
    with pytest.raises(
        CheckpointError, match=r"model\.loss: losses_of_test:ce \(.*allow_change model"
    ):
        train(given, out_dir=str(own))
    half = {**given, "loss": "losses_of_test:ce", "out_dir": str(broken)}
    assert train(half, stop_at_step=3) == 75
    assert train(half) == 0
    assert curve(broken) == curve(own)


def test_it_counts_the_targets_of_conversations_and_rows_of_padding(
    cached: dict[str, Any], tmp_path: Path
):
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, conversations(60))))
    assert train({**FLAGS, **cached}, out_dir=str(tmp_path / "base")) == 0
    start = {"init_from": str(tmp_path / "base")}
    for number, more in enumerate(
        (
            {"task": "sft", "data_path": str(path), "accumulation_steps": 2, **start},
            {"global_batch_size": 5, "batch_size": 2},
            {"use_moe": True, "n_routed_experts": 4, "verify_interval": 3},
        )
    ):
        found = []
        for loss in ("full", "losses_of_test:ce"):
            out = tmp_path / f"{number}{loss}"
            given = {**FLAGS, **cached, **more, "loss": loss, "out_dir": str(out)}
            if "task" in more:  # the shape is that of the base
                given = {name: given[name] for name in given if name not in SHAPE}
            assert train(given) == 0
            found.append(curve(out))
        assert found[0] == found[1]
