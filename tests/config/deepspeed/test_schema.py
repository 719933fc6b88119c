import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minimind.config.deepspeed import schema
from minimind.config.deepspeed.schema import faults, optimizer_name
from minimind.config.deepspeed.values import DEFAULTS
from minimind.config.run_config import PROJECT

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


def nested(section, block):
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


def test_the_tables_are_of_the_installed_version(survey):
    assert survey["version"].split("+")[0] == schema.VERSION


def test_every_top_level_key_that_deepspeed_reads_is_known_and_no_other(survey):
    elsewhere = {"sequence_parallel_size", "data_parallel_size"}  # read by deepspeed.initialize
    for name in elsewhere:
        assert f'config["{name}"]' in survey["source"]
    removed = {name for name in schema.REMOVED if "." not in name}
    assert set(survey["top"]) | elsewhere == set(schema.TOP_LEVEL) | removed
    assert not removed & set(schema.TOP_LEVEL)


def test_every_section_without_a_model_lists_the_keys_that_deepspeed_reads(survey):
    assert survey["sections"].keys() == schema.SECTIONS.keys()
    for name, read in survey["sections"].items():
        assert set(read) == set(schema.SECTIONS[name]), name


def test_every_key_that_deepspeed_refuses_as_removed_is_refused_here(survey):
    assert set(survey["removed"]) <= set(schema.REMOVED)


def test_every_section_with_a_model_lists_its_fields(survey):
    assert survey["models"].keys() == schema.MODELLED.keys()
    for name, fields in survey["models"].items():
        refused = {field for field in fields if f"{name}.{field}" in schema.REMOVED}
        assert {field for field, (is_old, _) in fields.items() if is_old} <= refused
        assert set(fields) - refused == set(schema.MODELLED[name]), name


def test_the_names_of_fields_with_another_key_are_those_of_the_models(survey):
    assert len(survey["aliases"]) == 9
    assert survey["aliases"] == schema.FIELD_NAMES


@pytest.mark.parametrize("name", schema.MODELLED)
def test_every_default_of_the_models_is_a_value_of_its_kind(name, survey):
    fields = survey["models"][name]
    given = {field: fields[field][1] for field in schema.MODELLED[name]}
    assert faults(nested(name, given), "ds.json") == []


def test_what_auto_is_filled_with_are_the_models_defaults(survey):
    for key, value in DEFAULTS.items():
        section, _, name = key.rpartition(".")
        assert survey["models"][section][name][1] == value, key


def test_the_sections_that_are_covered_whole():
    # Names and kinds, not bounds.
    assert {name for name in schema.MODELLED if "." not in name} == {
        "zero_optimization",
        "bf16",
        "fp16",
    }


def test_every_optimizer_type_is_taken_or_refused_for_a_reason(survey):
    known = {name.lower() for name in (*schema.OPTIMIZER_PARAMS, *schema.REFUSED_OPTIMIZERS)}
    built = {*survey["by_name"], *(name.lower() for name in survey["torch"])}
    gone = {"onebitadam", "zerooneadam", "onebitlamb"}
    assert known == (built - {"optimizer"}) | gone
    assert {name.lower() for name in schema.ANY_CASE} <= set(survey["by_name"])


@pytest.mark.parametrize("name", schema.OPTIMIZER_PARAMS)
def test_optimizer_parameters_are_those_of_the_classes(name, survey):
    real = set(survey["optimizers"][name]) - {"adamw_mode", "max_grad_norm"}
    if name in ("Adam", "AdamW"):
        real |= POPPED
    if name == "Muon":
        real |= POPPED | {"foreach", "muon_lr", "adam_lr", "per_head_muon"}
    assert set(schema.OPTIMIZER_PARAMS[name].split()) == real


def test_scheduler_parameters_are_those_of_the_classes(survey):
    assert {name: set(names.split()) for name, names in schema.SCHEDULERS.items()} == {
        name: set(params) for name, params in survey["schedulers"].items()
    }


def test_a_scheduler_needs_the_parameters_without_a_default(survey):
    needed = {
        name: tuple(k for k, default in params.items() if default == "auto")
        for name, params in survey["schedulers"].items()
    }
    needed = {name: tuple(set(names) - {"total_num_steps"}) for name, names in needed.items()}
    assert {n: set(names) for n, names in needed.items() if names} == {
        n: set(names) for n, names in schema.NEEDED.items()
    }


@pytest.mark.parametrize("name", [*schema.OPTIMIZER_PARAMS, *schema.SCHEDULERS])
def test_every_default_of_the_classes_is_a_value_of_its_kind(name, survey):
    block = "optimizer" if name in schema.OPTIMIZER_PARAMS else "scheduler"
    taken = (schema.OPTIMIZER_PARAMS | schema.SCHEDULERS)[name].split()
    given = {k: v for k, v in survey[f"{block}s"][name].items() if k in taken}
    assert faults({block: {"type": name, "params": given}}, "ds.json") == []


@pytest.mark.parametrize(
    "inside",
    [
        {"reduce_bucket_size": 5e8, "sub_group_size": 10**9, "stage3_max_live_parameters": 1e9},
        {"stage": 7},  # these are reported where stages are compared
        {"stage": "three"},
        {"cpu_offload": False, "cpu_offload_param": None, "cpu_offload_use_pin_memory": False},
        {"cpu_offload": None, "offload_param": {"device": "cpu"}},
        {"offload_optimizer": None, "offload_param": None, "zenflow": None},
        {"zenflow": {"anything": 1}, "leaf_module": {"classes": ["x"]}},
        {"overlap_comm": None, "offload_optimizer": {"device": "cpu", "nvme_path": None}},
    ],
    ids=str,
)
def test_what_deepspeed_obeys_or_another_module_reports_is_no_fault(inside):
    assert faults({"zero_optimization": inside}, "ds.json") == []


def test_the_shipped_file_has_no_faults():
    path = PROJECT / "configs" / "ds_config.json"
    assert faults(json.loads(Path(path).read_text()), str(path)) == []


@pytest.mark.parametrize("name", schema.TOP_LEVEL)
def test_auto_is_right_everywhere(name):
    assert faults({name: "auto"}, "ds.json") == []


@pytest.mark.parametrize("name", schema.MODELLED)
def test_auto_is_right_inside_the_sections(name):
    assert faults(nested(name, dict.fromkeys(schema.MODELLED[name], "auto")), "ds.json") == []


def test_auto_is_right_inside_the_blocks():
    params = dict.fromkeys(schema.OPTIMIZER_PARAMS["AdamW"].split(), "auto")
    warmup = dict.fromkeys(schema.SCHEDULERS["WarmupDecayLR"].split(), "auto")
    config = {
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }
    assert faults(config, "ds.json") == []
    assert faults({"optimizer": {"type": "auto", "params": {"lr": "auto"}}}, "ds.json") == []


@pytest.mark.parametrize("odd", [None, 3, "auto", [], [1], True, {3: 4, None: 2}, {"": ""}])
def test_odd_input_is_reported_and_never_raises(odd):
    assert faults(odd, "ds.json")


@pytest.mark.parametrize("odd", [None, 10**400, 1.5, "x", [], [1], True, {}, {"": None, "x": []}])
def test_odd_values_never_raise(odd):
    for name in (*schema.TOP_LEVEL, *schema.REMOVED):
        faults({name: odd}, "ds.json")
        faults({name: {"type": odd, "params": odd, "throughput": odd}}, "ds.json")
        faults({name: {"type": "AdamW", "params": {"lr": odd}}}, "ds.json")
    for name, names in schema.MODELLED.items():
        faults(nested(name, odd), "ds.json")
        faults(nested(name, dict.fromkeys(names, odd)), "ds.json")


@pytest.mark.parametrize(
    ("written", "name"),
    [("adamw", "AdamW"), ("ADAM", "Adam"), ("SGD", "SGD"), ("sgd", None), (3, None), (None, None)],
)
def test_the_case_of_a_type_matters_as_in_deepspeed(written, name):
    assert optimizer_name(written) == name
