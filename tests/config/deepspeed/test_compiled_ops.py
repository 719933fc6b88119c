"""Ops of DeepSpeed: which one a configuration loads, and what is done if it cannot be compiled."""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from minimind.config.deepspeed import backend_choice
from minimind.config.deepspeed.backend_choice import (
    OPS,
    TORCH_ADAM,
    Setup,
    advice,
    required_op,
    unbuildable_optimizer,
)
from minimind.config.deepspeed.document import put, read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import Launch
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from tests.conftest import ROOT

SHIPPED = read_deepspeed_json(str(ROOT / "configs" / "ds_config.json"))
NO_NVCC = "the CUDA compiler nvcc is not installed"


@pytest.fixture
def uncompilable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_choice, "extension_fault", lambda device: f"{NO_NVCC} for {device}")


@pytest.fixture
def compilable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of compiled extensions, which is empty."""
    monkeypatch.setattr(backend_choice, "extension_fault", lambda device: "")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return tmp_path


def setup_of(changes: dict[str, Any], device: str = "cuda") -> Setup:
    document = deepcopy(SHIPPED)
    for key, value in changes.items():
        put(document, key, value)
    run = with_dtype(parse_flags([]), device, has_bf16=True)
    return Setup(run, Launch(), device, "deepspeed", document, "ds.json")


def adam_of(resolved: ResolvedConfig) -> dict[str, Any]:
    names = ("torch_adam", "fused", *backend_choice.DEEPSPEED_ADAM)
    params = resolved.config["optimizer"]["params"]
    return {name: params[name] for name in names if name in params}


@pytest.mark.parametrize(
    ("block", "offload", "device", "op"),
    [
        ({"type": "AdamW", "params": {"torch_adam": True}}, False, "cuda", ""),
        ({"type": "SGD", "params": {}}, False, "cuda", ""),
        ({"type": "AdamW", "params": {"torch_adam": False}}, False, "cuda", "fused_adam"),
        ({"type": "adam", "params": {"torch_adam": False}}, True, "cuda", "cpu_adam"),
        ({"type": "Lion", "params": {}}, False, "cuda", "fused_lion"),
        ({"type": "Lion", "params": {}}, True, "cuda", "cpu_lion"),
    ],
)
def test_an_optimizer_that_cannot_be_compiled_is_known_before_the_start(
    block, offload, device, op, monkeypatch, uncompilable
):
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = {"optimizer": block, "zero_optimization": zero}
    assert required_op(config) == op
    fault = unbuildable_optimizer(config, device)
    assert (f"DeepSpeed's {op}, which cannot be compiled" in fault) == bool(op)
    assert bool(fault) == bool(op)
    if op:
        assert f"{NO_NVCC} for {'cpu' if offload else 'cuda'}" in fault
        monkeypatch.setattr(backend_choice, "is_installed", lambda name: name == op)
        assert unbuildable_optimizer(config, device) == ""


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    "params", [{"bias_correction": True}, {"set_grad_none": False, "fp32_optimizer_states": True}]
)
def test_auto_falls_back_to_torchs_adamw_and_says_so(uncompilable, params, offload):
    changes = {f"optimizer.params.{name}": value for name, value in params.items()}
    if offload:
        changes["zero_optimization.offload_optimizer"] = {"device": "cpu"}
    setup = setup_of(changes)
    resolved = setup.resolve()
    assert adam_of(resolved) == {"torch_adam": True, "fused": True}
    assert unbuildable_optimizer(resolved.config, "cuda") == ""
    op, on = ("cpu_adam", "cpu") if offload else ("fused_adam", "cuda")
    line = (
        f"warning  DeepSpeed's {op} cannot be compiled: {NO_NVCC} for {on}; torch's fused AdamW"
        " takes its place, with equal updates"
    )
    assert line in advice(setup, resolved)
    reason = f"derived: DeepSpeed's {op} cannot be compiled: {NO_NVCC} for {on}"
    completed = setup.complete(resolved, resolved.run, None)
    assert [one.sources[TORCH_ADAM] for one in (resolved, completed)] == [reason] * 2
    assert [*advice(setup, resolved, is_start=False)] == [line]
    assert resolved.optimizer_params == setup_of({}).resolve().optimizer_params  # resumes either


def test_with_a_compiler_auto_is_deepspeeds_and_the_compilation_is_announced(compilable):
    setup = setup_of({"optimizer.params.bias_correction": True})
    resolved = setup.resolve()
    assert adam_of(resolved) == {"torch_adam": False, "bias_correction": True}
    line = (
        "compile  DeepSpeed's fused_adam is compiled at the first start, which takes minutes"
        ' ("torch_adam": true in optimizer.params avoids it)'
    )
    assert [*advice(setup, resolved, is_start=False)] == [line]
    (compilable / "fused_adam").mkdir()
    (compilable / "fused_adam" / "fused_adam.so").touch()
    assert [*advice(setup, resolved, is_start=False)] == []


def test_what_torchs_adamw_cannot_do_is_not_replaced(uncompilable):
    resolved = setup_of({"optimizer.params.bias_correction": False}).resolve()
    assert adam_of(resolved) == {"torch_adam": False, "bias_correction": False}
    fault = unbuildable_optimizer(resolved.config, "cuda")
    assert fault.endswith(
        'write "torch_adam": true and remove bias_correction, which only this one has'
    )
    asked = setup_of({"optimizer.params.torch_adam": False}).resolve()
    assert adam_of(asked) == {"torch_adam": False}  # which is said to be refused
    assert unbuildable_optimizer(asked.config, "cuda").endswith("torch's needs no compiler")


@pytest.mark.parametrize(
    "offload", [{}, {"zero_optimization.offload_optimizer": {"device": "cpu"}}]
)
def test_the_shipped_file_compiles_nothing(compilable, offload):
    setup = setup_of(offload)
    resolved = setup.resolve()
    assert adam_of(resolved) == {"torch_adam": True, "fused": True}
    assert [*advice(setup, resolved, is_start=False)] == []


@pytest.mark.parametrize("op", OPS)
def test_the_names_are_deepspeeds(op: str):
    folder = "cpu." if op.startswith("cpu_") else ""
    module = import_module(f"deepspeed.ops.op_builder.{folder}{op}")
    assert op in {one.NAME for one in vars(module).values() if hasattr(one, "NAME")}


@pytest.mark.parametrize(
    ("written", "unread"),
    [
        ("", ""),
        ("8.0;9.0", ""),
        ("7.5 8.6+PTX", ""),
        ("9.0a", "9.0a"),
        ("8.0;10.0f", "10.0f"),
        ("Hopper", "Hopper"),
    ],
)
def test_architectures_that_deepspeed_cannot_read_are_a_fault_of_cuda_ops_alone(
    compilable: Path, monkeypatch: pytest.MonkeyPatch, written: str, unread: str
):
    """Seen on an H100 whose environment named 9.0a: the compilation ended with a ValueError."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", written)
    fault = backend_choice.op_fault("fused_adam", "cuda")
    assert (unread in fault) if unread else fault == ""
    assert (
        backend_choice.op_fault("cpu_adam", "cuda")
        == backend_choice.op_fault("fused_adam", "cpu")
        == ""
    )


@pytest.mark.parametrize("written", ["9.0a", "Hopper", "8.0;9.0+PTX"])
def test_deepspeed_reads_architectures_as_told(monkeypatch: pytest.MonkeyPatch, written: str):
    """Its own reader is asked, so that a newer one which reads more is noticed."""
    from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder  # noqa: TID251 (its reader)

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", written)
    builder: Any = FusedAdamBuilder()
    builder.jit_mode = True
    if backend_choice.architectures_fault(written):
        with pytest.raises(ValueError, match="invalid literal"):
            builder.compute_capability_args()
    else:
        builder.compute_capability_args()
