"""The optimizer block becomes flags; flags without effect and what excludes Muon are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minimind.config.deepspeed.backend_choice import Setup, advice, read_setup, with_choices
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.launcher_env import read_launch
from minimind.config.parse import PRESETS, RECIPES, files_by_name, parse_flags
from minimind.config.run_config import CONFIGS, DEFAULT_DEEPSPEED_CONFIG
from minimind.errors import UsageError


def resolved(
    params: dict[str, Any] | None,
    flags: str = "",
    device: str = "cpu",
    kind: str = "Muon",
    **more: Any,
) -> ResolvedConfig:
    document = {**read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG)), **more}
    if params is not None:
        document["optimizer"] = {"type": kind, "params": params}
    return resolve(document, "ds.json", parse_flags(flags.split()), 2, device)


def test_the_block_is_adopted_and_deepspeed_sees_none():
    params = {"lr": 1e-3, "muon_lr": 0.03, "momentum": 0.9, "betas": [0.8, 0.9], "eps": 1e-8}
    found = resolved(params)
    assert "optimizer" not in found.config
    assert (found.run.learning_rate, found.run.beta1) == (1e-3, 0.8)
    muon = {"muon_lr": 0.03, "muon_momentum": 0.9, "muon_scaling": "original"}
    more = {"muon_steps": 5, "muon_coefficients": "quintic", "cautious_weight_decay": False}
    assert found.run.muon == {**muon, **more}
    assert found.run.sources["muon_lr"] == "ds.json: optimizer.params.muon_lr"
    assert found.optimizer == "Muon"
    assert found.optimizer_params == muon  # checkpoints record the others if they differ


def test_auto_is_filled_from_the_flags():
    params = {"lr": "auto", "muon_lr": "auto", "momentum": "auto"}
    flags = "--muon_lr 0.01 --muon_scaling match_rms_adamw"
    muon = resolved(params, flags).run.muon
    expected = {"muon_lr": 0.01, "muon_momentum": 0.95, "muon_scaling": "match_rms_adamw"}
    assert expected.items() <= muon.items()
    assert resolved(params).run.muon["muon_lr"] == 0.02


MUON = {"muon_lr": 0.02}


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


def without_deepspeed(line: str) -> ResolvedConfig:
    run = parse_flags([*line.split(), "--deepspeed_config", "none"])
    return Setup(run, read_launch({}), "cpu", "single", {}, "none").resolve()


@pytest.mark.parametrize(
    ("line", "recorded"),
    [
        ("", {}),
        ("--muon_steps 5 --muon_coefficients quintic", {}),
        ("--muon_steps 3", {"muon_steps": 3}),
        ("--muon_coefficients polar_express", {"muon_coefficients": "polar_express"}),
        ("--cautious_weight_decay", {"cautious_weight_decay": True}),
    ],
)
def test_a_checkpoint_without_values_of_muon_means_those_before_their_flags(line, recorded):
    found = without_deepspeed(f"--optimizer muon {line}").optimizer_params
    before = {"muon_lr": 0.02, "muon_momentum": 0.95, "muon_scaling": "original"}
    assert found == {**before, **recorded}


def test_lion_and_sgd_are_named_and_their_values_are_in_force():
    lion = without_deepspeed("--optimizer lion --beta1 0.95 --beta2 0.98")
    assert (lion.optimizer, lion.optimizer_params) == ("Lion", {})
    sgd = without_deepspeed("--optimizer sgd")
    assert (sgd.optimizer, sgd.optimizer_params) == ("SGD", {"momentum": 0.9})
    assert (sgd.run.sgd_momentum, sgd.run.sources["sgd_momentum"]) == (0.9, "SGD's default")


@pytest.mark.parametrize(
    ("params", "line", "momentum", "source"),
    [
        ({}, "", 0.0, "torch's default"),
        ({}, "--sgd_momentum 0.8", 0.8, "--sgd_momentum"),
        ({"momentum": "auto"}, "", 0.9, "SGD's default"),
        ({"momentum": "auto"}, "--sgd_momentum 0.8", 0.8, "--sgd_momentum"),
        ({"momentum": 0.7}, "", 0.7, "ds.json: optimizer.params.momentum"),
        ({"momentum": 0.7}, "--optimizer sgd --sgd_momentum 0.7", 0.7, "--sgd_momentum"),
    ],
)
def test_the_momentum_of_an_sgd_block_is_the_flags(params, line, momentum, source):
    found = with_choices(resolved(params, line, kind="SGD"), "cpu")
    assert found.config["optimizer"]["params"]["momentum"] == momentum
    assert (found.run.sgd_momentum, found.run.sources["sgd_momentum"]) == (momentum, source)
    assert found.optimizer_params == {"momentum": momentum}


def test_a_block_of_another_optimizer_is_adopted():
    for kind, flag in {"Adam": "adamw", "AdamW": "adamw", "Lion": "lion", "SGD": "sgd"}.items():
        found = resolved({"lr": "auto"}, device="cuda", kind=kind)
        assert (found.optimizer, found.run.optimizer) == (kind, flag)
        assert found.run.sources["optimizer"] == "ds.json: optimizer.type"
    with pytest.raises(UsageError, match=r'optimizer\.type is "Lion" but --optimizer says'):
        resolved({"lr": "auto"}, "--optimizer adamw", "cuda", "Lion")


@pytest.mark.parametrize("key", ["muon_lr", "momentum", "eps", "adam_lr", "torch_adam", "lr"])
@pytest.mark.parametrize("value", [None, {}])
def test_a_value_of_the_wrong_type_is_one_fault(key, value):
    with pytest.raises(UsageError) as caught:
        resolved({"muon_lr": 0.02, key: value})
    assert str(caught.value).count(f"optimizer.params.{key} is") == 1


def test_the_command_line_is_the_source_of_its_flags_and_the_file_of_its_keys():
    with pytest.raises(UsageError) as caught:
        resolved(None, "--muon_lr 0.01 --dtype float16")
    assert "(1) dtype = float16 (--dtype) needs a GPU" in str(caught.value)
    assert "(2) muon_lr = 0.01 (--muon_lr) has no effect" in str(caught.value)
    with pytest.raises(UsageError, match=r"^ds\.json: scheduler sets one learning rate"):
        resolved(MUON, scheduler={"type": "WarmupLR", "params": {}})


# Shipped files, and what excludes Muon in them.
VARIANTS = {path.stem: path for path in sorted((CONFIGS / "deepspeed").glob("*.json"))}
EXCLUDED = {
    **dict.fromkeys(("lr_range_test", "warmup_cosine"), "scheduler sets one learning rate"),
    **dict.fromkeys(("zero2_offload", "zero3_offload"), "offload_optimizer is not supported"),
}
BY_ACCELERATE = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "configs/ds_config.json",
}


@pytest.mark.parametrize("optimizer", ["muon", "lion", "sgd"])
@pytest.mark.parametrize("name", ["ds_config", *VARIANTS])
def test_the_default_block_of_a_shipped_file_gives_way_to_a_flag(name: str, optimizer: str):
    path = str(VARIANTS.get(name, DEFAULT_DEEPSPEED_CONFIG))
    setup = read_setup(
        parse_flags(["--optimizer", optimizer, "--deepspeed_config", path]), read_launch({})
    )
    reason = EXCLUDED.get(name, "") if optimizer == "muon" else ""
    if name == "muon" and optimizer != "muon":  # its block is why one takes that file
        reason = 'optimizer.type is "Muon" but --optimizer says'
    if reason:
        with pytest.raises(UsageError) as caught:
            setup.resolve()
        assert reason in str(caught.value)
        assert "(1)" not in str(caught.value)
        return
    found = setup.resolve()
    assert (found.run.optimizer, found.run.sources["optimizer"]) == (optimizer, "--optimizer")
    assert "optimizer" not in found.config
    line = f"optimizer {optimizer} by --optimizer, in place of {path}'s AdamW"
    notices = [line] if "optimizer" in setup.document and name != "muon" else []
    for is_start in (True, False):
        shown = advice(setup, found, is_start)
        assert [notice for notice in shown if notice.startswith("optimizer ")] == notices


@pytest.mark.parametrize("recipe", files_by_name(RECIPES))
@pytest.mark.parametrize("preset", files_by_name(PRESETS))
@pytest.mark.parametrize("stage", ["", "zero0", "zero1", "zero3"])
def test_every_recipe_starts_with_every_preset_on_the_shipped_files(recipe, preset, stage):
    words = ["--config", recipe, "--model", preset]
    flags = ["--deepspeed_config", str(VARIANTS[stage])] if stage else []
    for environ, more in ((BY_ACCELERATE, flags), ({}, flags or ["--deepspeed_config", "none"])):
        setup = read_setup(parse_flags([*words, *more]), read_launch(environ))
        found = setup.resolve()
        assert found.run.optimizer == ("muon" if recipe == "strong" else "adamw")
        is_replaced = recipe == "strong" and setup.backend == "deepspeed"
        shown = [
            n for n in advice(setup, found) if n.startswith("optimizer muon by --config strong,")
        ]
        assert len(shown) == is_replaced


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", 1e-3),
        ("betas", [0.9, 0.95]),
        ("weight_decay", 0.1),
        ("eps", 1e-6),
        ("torch_adam", False),
        ("amsgrad", True),
        ("foreach", None),
    ],
)
def test_a_shipped_file_in_which_a_value_was_chosen_contradicts(
    key, value, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The folder of configuration files is one of the test's own, with the shipped names."""
    document = read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG))
    place = tmp_path / "ds_config.json"
    monkeypatch.setattr("minimind.config.deepspeed.adopt.DEFAULT_DEEPSPEED_CONFIG", place)
    run = parse_flags(["--optimizer", "lion"])
    assert resolve(document, str(place), run, 2, "cpu").optimizer == "Lion"
    document["zero_optimization"]["stage"] = 3  # which is no choice of an optimizer
    assert resolve(document, str(place), run, 2, "cpu").optimizer == "Lion"
    document["optimizer"]["params"][key] = value
    with pytest.raises(UsageError, match=r'optimizer\.type is "AdamW" but --optimizer says'):
        resolve(document, str(place), run, 2, "cpu")


def test_a_copy_of_a_shipped_file_is_the_users_own(tmp_path: Path):
    copy = tmp_path / "ds_config.json"
    copy.write_bytes(DEFAULT_DEEPSPEED_CONFIG.read_bytes())
    run = parse_flags(["--config", "strong", "--deepspeed_config", str(copy)])
    with pytest.raises(UsageError) as caught:
        read_setup(run, read_launch({})).resolve()
    assert str(caught.value).startswith(
        f'{copy}: optimizer.type is "AdamW" but --config strong says optimizer = muon; give'
        f" --config a copy of {RECIPES / 'strong.yaml'} without optimizer, or give --deepspeed"
    )
    block = json.loads(copy.read_text())["optimizer"]
    for type_name in ("Adam", "SGD", "Lion"):  # a type that was chosen
        document = {"optimizer": {**block, "type": type_name, "params": {"lr": "auto"}}}
        with pytest.raises(UsageError, match="but --config strong says optimizer = muon"):
            resolve(document, str(DEFAULT_DEEPSPEED_CONFIG), run, 2, "cuda")
