"""An optimizer block of type Muon becomes flags; what excludes Muon is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from minimind.config.deepspeed.backend_choice import Setup
from minimind.config.deepspeed.resolve import ResolvedConfig, read_deepspeed_json, resolve
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import UsageError


def resolved(
    params: dict[str, Any] | None, flags: str = "", device: str = "cpu", **more: Any
) -> ResolvedConfig:
    document = {**read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG)), **more}
    if params is not None:
        document["optimizer"] = {"type": "Muon", "params": params}
    return resolve(document, "ds.json", parse_flags(flags.split()), 2, device)


def test_the_block_is_adopted_and_deepspeed_sees_none():
    params = {"lr": 1e-3, "muon_lr": 0.03, "momentum": 0.9, "betas": [0.8, 0.9], "eps": 1e-8}
    found = resolved(params)
    assert "optimizer" not in found.config
    assert (found.run.learning_rate, found.run.beta1) == (1e-3, 0.8)
    assert found.run.muon == {"muon_lr": 0.03, "muon_momentum": 0.9, "muon_scaling": "original"}
    assert found.run.sources["muon_lr"] == "ds.json: optimizer.params.muon_lr"
    assert found.optimizer == "Muon"
    assert found.optimizer_params == found.run.muon


def test_auto_is_filled_from_the_flags():
    params = {"lr": "auto", "muon_lr": "auto", "momentum": "auto"}
    flags = "--muon_lr 0.01 --muon_scaling match_rms_adamw"
    muon = resolved(params, flags).run.muon
    assert muon == {"muon_lr": 0.01, "muon_momentum": 0.95, "muon_scaling": "match_rms_adamw"}
    assert resolved(params).run.muon["muon_lr"] == 0.02


MUON = {"muon_lr": 0.02}


@pytest.mark.parametrize(
    ("params", "flags", "more", "sentence"),
    [
        ({"lr": 1e-3}, "", {}, "optimizer.params.muon_lr is missing"),
        (MUON, "--muon_lr 0.01", {}, "muon_lr is 0.02 but --muon_lr says muon_lr = 0.01"),
        (MUON, "--optimizer adamw", {}, "optimizer.type is muon but --optimizer says"),
        ({**MUON, "ns_method": "gram"}, "", {}, 'ns_method is "gram", which torch\'s Muon does'),
        ({**MUON, "per_head_muon": True}, "", {}, "per_head_muon is true, which"),
        (None, "--optimizer muon", {}, 'optimizer.type is "AdamW" but optimizer = muon'),
        (None, "--muon_lr 0.01", {}, "muon_lr = 0.01 (--muon_lr) has no effect with optimizer ="),
        (
            MUON,
            "",
            {"scheduler": {"type": "WarmupLR", "params": {}}},
            "scheduler sets one learning rate, and optimizer = muon (ds.json: optimizer.type)",
        ),
        (
            MUON,
            "",
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer is not supported with optimizer = muon",
        ),
    ],
)
def test_what_excludes_muon_is_refused(params, flags, more, sentence):
    with pytest.raises(UsageError) as caught:
        resolved(params, flags, **more)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("flag", ["--muon_lr 0.01", "--muon_momentum 0.9"])
def test_without_deepspeed_a_flag_of_muon_needs_muon(flag):
    launch = read_launch({})
    run = parse_flags(f"{flag} --deepspeed_config none".split())
    with pytest.raises(UsageError, match=r"has no effect with optimizer = adamw \(default\)"):
        Setup(run, launch, "cpu", "single", {}, "none").resolve()
    run = parse_flags(f"{flag} --deepspeed_config none --optimizer muon".split())
    found = Setup(run, launch, "cpu", "single", {}, "none").resolve()
    assert found.optimizer == "Muon"
    shown = {name: (getattr(found.run, name), found.run.sources[name]) for name in found.run.muon}
    assert shown["muon_scaling"] == ("original", "Muon's default")
    assert sorted(source for _, source in shown.values())[0] == flag.split()[0]
