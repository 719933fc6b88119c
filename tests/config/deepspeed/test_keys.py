"""The table of keys is that of the installed DeepSpeed; names, types and defaults."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minimind.config.deepspeed.key_checks import is_one_of, key_faults
from minimind.config.deepspeed.keys import (
    FIELD_NAMES,
    IN_TORCH,
    KEYS,
    OPTIMIZER_PARAMS,
    REMOVED,
    SCHEDULER_PARAMS,
    SECTIONS,
    VERSION,
    optimizer_name,
)
from minimind.config.run_config import PROJECT
from tests.config.deepspeed.test_resolve import DEFAULTS

# Run by another process: importing DeepSpeed warns, and picks a device for good.
SURVEY = r"""
import inspect, json
from pathlib import Path
import torch
import deepspeed
from deepspeed.ops import adagrad, adam, lamb, lion
from deepspeed.runtime import config, lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero import config as zero, offload_config as offload

class Asked(dict):
    '''Remembers every name that it was asked for.'''
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.names = set()
    def __getitem__(self, name):
        self.names.add(name)
        return super().__getitem__(name)
    def get(self, name, default=None):
        self.names.add(name)
        return super().get(name, default)
    def __contains__(self, name):
        self.names.add(name)
        return super().__contains__(name)
    def keys(self):  # for `name in config.keys()`
        return self
    def __copy__(self):
        return self

top, old = Asked(train_batch_size=1), Asked(train_batch_size=1, zero_optimization=True)
sections = dict.fromkeys(("activation_checkpointing", "aio", "checkpoint", "data_types"))
sections |= dict.fromkeys(("flops_profiler", "timers", "torch_autocast", "optimizer", "scheduler"))
sections = {name: Asked(type="x") for name in sections}
del sections["torch_autocast"]["type"]
sections["torch_autocast"].update(dtype="bf16", lower_precision_safe_modules=[])
for written in (top, old, Asked(train_batch_size=1, **sections)):
    config.DeepSpeedConfig(written)

def takes(*classes):
    found = {}
    for one in classes:
        for name, spec in list(inspect.signature(one.__init__).parameters.items())[2:]:
            found[name] = "auto" if spec.default is spec.empty else spec.default
    return found

def fields(model):
    given = model().model_dump(mode="json", by_alias=True)
    found = {}
    for name, field in model.model_fields.items():
        is_old = (field.json_schema_extra or {}).get("deprecated", False)
        found[field.alias or name] = [is_old, given.get(field.alias or name)]
    return found

models = {
    "zero_optimization": zero.DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": offload.DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": offload.DeepSpeedZeroOffloadParamConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
}
optim = torch.optim
muon = DeepSpeedEngine._MUON_HALF_KEYS + DeepSpeedEngine._ADAM_HALF_KEYS
fused = takes(adam.FusedAdam, adam.DeepSpeedCPUAdam)
print("SURVEY" + json.dumps({
    "version": deepspeed.__version__,
    "top": sorted(top.names | old.names),
    "sections": {name: sorted(block.names) for name, block in sections.items()},
    "source": Path(deepspeed.__file__).read_text(),
    "removed": [*config._REMOVED_TOP_LEVEL_CONFIG_KEYS]
        + [f"zero_optimization.{name}" for name in config._REMOVED_ZERO_CONFIG_KEYS],
    "models": {name: fields(model) for name, model in models.items()},
    "aliases": {
        f"{section}.{name}": field.alias
        for section, model in models.items()
        for name, field in model.model_fields.items()
        if field.alias not in (None, name) and model.model_config.get("populate_by_name")
    },
    "by_name": config.DEEPSPEED_OPTIMIZERS,
    "torch": [n for n, one in vars(optim).items() if isinstance(one, type)],
    "optimizers": {
        "Adam": takes(optim.Adam, optim.AdamW) | fused,
        "AdamW": takes(optim.AdamW) | fused,
        "Adagrad": takes(optim.Adagrad, adagrad.DeepSpeedCPUAdagrad),
        "Lamb": takes(lamb.FusedLamb),
        "Lion": takes(lion.FusedLion, lion.DeepSpeedCPULion),
        "Muon": dict.fromkeys(muon, "auto"),
        **{n: takes(one) for n, one in vars(optim).items()
           if isinstance(one, type) and n not in ("Adam", "AdamW", "Adagrad", "Muon", "Optimizer")},
    },
    "schedulers": {n: takes(getattr(lr_schedules, n)) for n in lr_schedules.VALID_LR_SCHEDULES},
}))
"""


def nested(section: str, block: Any) -> Any:
    """The object in which `block` stands at a dotted path."""
    for name in reversed(section.split(".")):
        block = {name: block}
    return block


POPPED = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}  # by the engine, from Adam and Muon


@pytest.fixture(scope="module")
def survey():
    done = subprocess.run(
        [sys.executable, "-c", SURVEY],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("SURVEY")[2])


MODELLED = ("zero_optimization", "bf16", "fp16")
MODELLED += ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
PARAMS_OF = OPTIMIZER_PARAMS | SCHEDULER_PARAMS
TOP_LEVEL = [key.name for key in SECTIONS[""]]


def names(section: str) -> set[str]:
    return {key.name for key in SECTIONS[section]}


def faults(config: Any) -> list[str]:
    return [fault.sentence for fault in key_faults(config, "ds.json")]


def test_the_table_is_of_the_installed_version(survey):
    assert survey["version"].split("+")[0] == VERSION


def test_every_top_level_key_that_deepspeed_reads_is_known_and_no_other(survey):
    elsewhere = {"sequence_parallel_size", "data_parallel_size"}  # read by deepspeed.initialize
    for name in elsewhere:
        assert f'config["{name}"]' in survey["source"]
    removed = {name for name in REMOVED if "." not in name}
    assert set(survey["top"]) | elsewhere == names("") | removed
    assert not removed & names("")


def test_every_section_without_a_model_lists_the_keys_that_deepspeed_reads(survey):
    inert = {name for name in survey["sections"] if KEYS[name].why}  # not read, not described
    assert inert == {"activation_checkpointing", "aio", "checkpoint"}
    for name, read in survey["sections"].items():
        if name not in inert:
            assert set(read) == names(name), name


def test_every_key_that_deepspeed_refuses_as_removed_is_refused_here(survey):
    assert set(survey["removed"]) <= set(REMOVED)


@pytest.mark.parametrize("name", MODELLED)
def test_every_section_with_a_model_lists_its_fields(name, survey):
    fields = survey["models"][name]
    refused = {field for field in fields if f"{name}.{field}" in REMOVED}
    assert {field for field, (is_old, _) in fields.items() if is_old} <= refused
    assert set(fields) - refused == names(name)


def test_the_names_of_fields_with_another_key_are_those_of_the_models(survey):
    assert len(survey["aliases"]) == 9
    assert survey["aliases"] == FIELD_NAMES


@pytest.mark.parametrize("name", MODELLED)
def test_every_default_of_the_models_is_a_value_of_its_kind(name, survey):
    given = {field: survey["models"][name][field][1] for field in names(name)}
    assert faults(nested(name, given)) == []


def test_what_auto_is_filled_with_are_the_models_defaults(survey):
    for key, value in DEFAULTS.items():
        section, _, name = key.rpartition(".")
        assert survey["models"][section][name][1] == value, key


def test_what_has_no_effect_is_accepted_as_deepspeeds_default(survey):
    for section in MODELLED:
        for key in SECTIONS[section]:
            if key.why:
                assert is_one_of(survey["models"][section][key.name][1], key.only), key.name


def test_the_optimizers_are_built_by_deepspeed(survey):
    lowered = {name.lower() for name in OPTIMIZER_PARAMS if name not in IN_TORCH}
    assert lowered <= set(survey["by_name"])
    assert set(IN_TORCH) <= set(survey["torch"])


@pytest.mark.parametrize("name", OPTIMIZER_PARAMS)
def test_optimizer_parameters_are_those_of_the_classes(name, survey):
    real = set(survey["optimizers"][name]) - {"adamw_mode", "max_grad_norm"}
    if name in ("Adam", "AdamW"):
        real |= POPPED
    if name == "Muon":
        real |= POPPED | {"foreach", "muon_lr", "adam_lr", "per_head_muon"}
    assert set(OPTIMIZER_PARAMS[name].split()) == real


def test_scheduler_parameters_are_those_of_the_classes(survey):
    assert {name: set(params.split()) for name, params in SCHEDULER_PARAMS.items()} == {
        name: set(params) for name, params in survey["schedulers"].items()
    }


@pytest.mark.parametrize("name", SCHEDULER_PARAMS)
def test_a_scheduler_needs_the_parameters_without_a_default(name, survey):
    defaults = survey["schedulers"][name].items()
    needed = {param for param, default in defaults if default == "auto"} - {"total_num_steps"}
    told = " ".join(faults({"scheduler": {"type": name, "params": {}}}))
    assert {param for param in SCHEDULER_PARAMS[name].split() if param in told} == needed


@pytest.mark.parametrize("block", ["optimizer", "scheduler"])
def test_every_parameter_has_a_row(block):
    params = OPTIMIZER_PARAMS if block == "optimizer" else SCHEDULER_PARAMS
    assert names(f"{block}.params") == {name for row in params.values() for name in row.split()}


@pytest.mark.parametrize("name", PARAMS_OF)
def test_every_default_of_the_classes_is_a_value_of_its_kind(name, survey):
    block = "optimizer" if name in OPTIMIZER_PARAMS else "scheduler"
    defaults = survey[f"{block}s"][name].items()
    given = {key: value for key, value in defaults if key in PARAMS_OF[name].split()}
    assert faults({block: {"type": name, "params": given}}) == []


@pytest.mark.parametrize(
    "inside",
    [
        {"reduce_bucket_size": 5e8, "sub_group_size": 10**9, "stage3_max_live_parameters": 1e9},
        {"cpu_offload": False, "cpu_offload_param": None, "cpu_offload_use_pin_memory": False},
        {"cpu_offload": None, "offload_param": {"device": "cpu"}},
        {"offload_optimizer": None, "offload_param": None, "zenflow": None},
        {"zenflow": {"anything": 1}, "leaf_module": {"classes": ["x"]}},
        {"overlap_comm": None, "offload_optimizer": {"device": "cpu", "nvme_path": None}},
    ],
    ids=str,
)
def test_what_deepspeed_obeys_or_a_rule_reports_is_no_fault(inside):
    assert faults({"zero_optimization": inside}) == []


def test_the_shipped_file_has_no_faults():
    assert faults(json.loads(Path(PROJECT / "configs" / "ds_config.json").read_text())) == []


@pytest.mark.parametrize("name", KEYS)
def test_auto_is_right_for_every_value(name):
    is_object = str(KEYS[name].kind).startswith("object")
    block, _, param = name.partition(".params.")
    config: dict[str, Any] = nested(name, "auto")
    if param:
        kinds = OPTIMIZER_PARAMS if block == "optimizer" else SCHEDULER_PARAMS
        kind = next(kind for kind, params in kinds.items() if param in params.split())
        config = {block: {"type": kind, "params": {param: "auto"}}}
        if kind == "OneCycle":
            config[block]["params"] |= {"cycle_min_lr": "auto", "cycle_max_lr": "auto"}
    elif block in ("optimizer.params", "scheduler.params"):
        config[block.partition(".")[0]]["type"] = "auto"
    assert bool(faults(config)) == is_object or "type" in faults(config)[0]


@pytest.mark.parametrize("odd", [None, 10**400, 1.5, "x", [], [1], True, {}, {"": None, "x": []}])
def test_odd_values_never_raise(odd):
    for name in (*TOP_LEVEL, *REMOVED):
        faults({name: odd})
        faults({name: {"type": odd, "params": odd, "throughput": odd}})
        faults({name: {"type": "AdamW", "params": {"lr": odd}}})
    for section in MODELLED:
        faults(nested(section, odd))
        faults(nested(section, dict.fromkeys(names(section), odd)))


@pytest.mark.parametrize(
    ("written", "name"),
    [("adamw", "AdamW"), ("ADAM", "Adam"), ("SGD", "SGD"), ("sgd", None), (3, None), (None, None)],
)
def test_the_case_of_a_type_matters_as_in_deepspeed(written, name):
    assert optimizer_name(written) == name
