"""What all ranks must have alike is compared before they train, and a difference is named."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)

from minimind.architecture.select import MiniMind
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.flags import FLAGS
from minimind.config.launcher_env import Launch
from minimind.config.origin import Origin, Rank
from minimind.config.parse import parse_flags
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.rows.order import Order
from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.runtime.agreement import Difference, Told, first_difference
from minimind.train import agreement
from minimind.train.agreement import MAY_DIFFER, all_told, error_of
from minimind.train.initial_weights import InitialModel
from minimind.train.start import Plan
from minimind.train.text import Text

HOST = socket.gethostname()
GIVEN = parse_flags(["--device", "cpu", "--learning_rate", "0.001", "--batch_size", "8"])


def compared(*ranks: Mapping[str, Mapping[str, Told]]) -> list[Difference | None]:
    """What each rank finds, all at the same time."""
    store: Any = HashStore()
    store.set_timeout(timedelta(seconds=30))
    with ThreadPoolExecutor(len(ranks)) as pool:
        found = [
            pool.submit(first_difference, store, rank, len(ranks), kinds)
            for rank, kinds in enumerate(ranks)
        ]
        return [one.result() for one in found]


def told(given: RunConfig = GIVEN, decided: RunConfig | None = None, **other: Any) -> Any:
    """All that a rank compares, of a run with these flags."""
    setup = read_setup(given, other.pop("launch", Launch(world_size=2)))
    resolved = setup.resolve()
    resolved = resolved if decided is None else replace(resolved, run=decided)
    setup = replace(setup, **{name: other.pop(name) for name in ("document",) if name in other})
    prepared: Any = SimpleNamespace(
        manifest={"fingerprint": other.pop("text", "text")},
        tokenizer=SimpleNamespace(
            fingerprint=other.pop("pieces", "pieces"), chat_template=other.pop("template", "")
        ),
    )
    schedule = Schedule("cosine", 1e-3, 0.1, 2, other.pop("steps", 20))
    order = Order(64, 8, seed=0, left_out=other.pop("left_out", ()))
    environ, teacher = other.pop("environ", {}), other.pop("teacher", None)
    assert not other
    text = Text("--data_path", given.data_path, given.data_path, None)
    initial = InitialModel(resolved.run, MiniMind())
    plan = Plan(setup, resolved, initial, text, prepared, order, schedule, teacher=teacher)
    return all_told(given, plan, environ)


def refused(ours: Any, theirs: Any) -> RunError:
    """The error of both of two ranks, which name one difference."""
    first, second = compared(ours, theirs)
    assert first == second
    assert first is not None
    return error_of(first, GIVEN)


def another(name: str) -> Any:
    """A value of a flag that it does not have in GIVEN."""
    value, choices = getattr(GIVEN, name), FLAGS[name].choices
    if choices:
        return next(choice for choice in choices if choice != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return ("other",) if isinstance(value, tuple) else "other"


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_of_one_rank_is_named_or_may_differ_for_a_reason(name: str):
    other = GIVEN.with_values(Origin(f"--{name}", Rank.DATA), **{name: another(name)})
    found = compared({"flag": agreement.flags_told(GIVEN)}, {"flag": agreement.flags_told(other)})
    if name in MAY_DIFFER:
        assert found == [None, None]
        return
    assert found[0] == found[1]
    assert found[0] is not None
    error = error_of(found[0], GIVEN)
    assert (type(error), error.cause_rank) == (UsageError, 0)
    assert str(error).startswith(f"--{name} is not the same on all ranks: rank 0 ({HOST}) has ")
    assert f", rank 1 ({HOST}) has {Told(another(name), f'--{name}').shown(name)}; " in str(error)


def test_flags_that_may_differ_are_flags_with_a_reason():
    assert {*MAY_DIFFER} <= {*FLAGS}
    assert all(len(reason) > 10 for reason in MAY_DIFFER.values())
    assert {f.name for f in fields(RunConfig)} - {*FLAGS} == {"sources", "teacher_weights"}


def test_ranks_that_have_all_alike_train_whatever_may_differ():
    other = GIVEN.with_values(
        Origin("--x", Rank.DATA), num_workers=3, cache_dir="/fast", local_rank=1, out_dir="o"
    )
    environ = {"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "1", "TORCHINDUCTOR_CACHE_DIR": "x"}
    assert compared(told(), told(other, environ=environ), told()) == [None] * 3


def test_a_teacher_is_compared_by_its_weights_not_its_place():
    def seen(place: str, digest: str) -> Any:
        teacher: Any = SimpleNamespace(place=place, digest=digest)
        return told(GIVEN.with_values(Origin("--x", Rank.DATA), teacher=place), teacher=teacher)

    assert compared(seen("/a", "1f2e"), seen("/b", "1f2e")) == [None] * 2
    error = refused(seen("/a", "1f2e"), seen("/a", "3d4c"))
    assert isinstance(error, UsageError)
    assert str(error).startswith("--teacher is not the same on all ranks: ")


ENVIRONMENT = (
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("ATEN_CPU_CAPABILITY", "ONEDNN_DEFAULT_FPMATH_MODE", "NCCL_ALGO", "TORCHDYNAMO_DISABLE"),
    *("TORCH_BLAS_PREFER_CUBLASLT", "TRITON_INTERPRET", "TORCHINDUCTOR_MAX_AUTOTUNE"),
)


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_a_variable_that_changes_numbers_is_named(name: str):
    error = refused(told(), told(environ={name: "1"}))
    assert isinstance(error, UsageError)
    assert f"{name} in the environment is not the same on all ranks: " in str(error)
    assert f"rank 0 ({HOST}) has none, rank 1 ({HOST}) has '1'; give the same on all" in str(error)


@pytest.mark.parametrize(
    "name",
    [
        *("MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "CUDNN_PATH", "CUDNN_HOME"),
        *("CUDNN_VERSION", "CUBLAS_VERSION", "ROCBLAS_TENSILE_LIBPATH", "CUBLAS_LOGINFO_DBG"),
        *("PYTORCH_TUNABLEOP_FILENAME", "PYTORCH_TUNABLEOP_VERBOSE", "TORCH_COMPILE_DEBUG"),
        *("TORCH_COMPILE_DEBUG_DIR", "TORCHINDUCTOR_FX_GRAPH_CACHE", "MIOPEN_ENABLE_LOGGING"),
        *("CUDNN_LIBRARY", "CUDNN_LIB_DIR", "CUDNN_INCLUDE_DIR"),
    ],
)
def test_a_variable_that_names_a_place_or_what_is_printed_may_differ(name: str):
    assert compared(told(), told(environ={name: "1"})) == [None, None]


def test_what_the_launcher_of_a_rank_says_is_named():
    yaml = Launch(world_size=2, flags={"grad_clip": ("0.5", "gradient_clipping")}, source="a.yaml")
    error = refused(told(), told(launch=yaml))
    assert str(error).startswith("gradient_clipping of the launcher is not the same on all ranks")
    assert "has 0.5 (a.yaml); give the same on all" in str(error)
    error = refused(told(), told(launch=Launch(world_size=3)))
    assert str(error).startswith("WORLD_SIZE in the environment is not the same on all ranks")


NVME = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/a"}}}


def test_a_value_of_the_deepspeed_file_is_named():
    shipped = read_setup(GIVEN, Launch(world_size=2, uses_deepspeed=True)).document
    changed = json.loads(json.dumps(shipped))
    changed["zero_optimization"]["stage"] = 1
    error = refused(told(document=shipped), told(document=changed))
    assert str(error).startswith("zero_optimization.stage of --deepspeed_config is not the same")
    nvme = json.loads(json.dumps(NVME).replace("/a", "/b"))
    assert compared(told(document=NVME), told(document=nvme)) == [None, None]


@pytest.mark.parametrize("library", ["torch", "minimind", "deepspeed", "transformers", "numpy"])
def test_another_version_is_named(library: str, monkeypatch: pytest.MonkeyPatch):
    ours = told()
    if library == "numpy":
        monkeypatch.setattr(agreement.np, "__version__", "9.9.9")
    else:
        found = agreement.versions()
        monkeypatch.setattr(agreement, "versions", lambda: found | {library: "9.9.9"})
    error = refused(ours, told())
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"version of {library} is not the same on all ranks: rank 0 ")
    assert "9.9.9" in str(error)
    assert str(error).endswith("install the same on all hosts")


def test_other_text_is_an_error_of_data():
    others: list[dict[str, Any]] = [{"text": "b"}, {"pieces": "b"}, {"left_out": ((3, 4),)}]
    for other in others:
        error = refused(told(), told(**other))
        assert isinstance(error, DataError)
        assert " is different: rank 0 " in str(error)


def test_numbers_of_rules_differ_by_what_hosts_see_in_out_dir():
    other = GIVEN.with_values(Origin("auto: as in step_00000010", Rank.DATA), learning_rate=0.002)
    error = refused(told(decided=GIVEN), told(decided=other))
    assert isinstance(error, StorageError)
    assert "learning_rate is decided by other checkpoints there: rank 0 " in str(error)
    assert "has 0.002 (auto: as in step_00000010); give a folder on" in str(error)


@pytest.mark.parametrize("decided", [{"compile": "on"}, {"dtype": "bfloat16"}], ids=str)
def test_what_hosts_decide_by_themselves_is_named(decided: dict[str, Any]):
    ours = GIVEN.with_values(Origin("auto", Rank.RULE), dtype="float32")
    other = ours.with_values(Origin("derived: no compiler", Rank.RULE), **decided)
    error = refused(told(decided=ours), told(decided=other))
    assert isinstance(error, UsageError)
    assert str(error).startswith(f"{next(iter(decided))} is not the same on all ranks: ")
    assert "(derived: no compiler); make the hosts alike in what decides it" in str(error)


def test_what_is_not_shown_is_compared():
    urls = (f"s3://bucket/run?X-Amz-Signature={n}" for n in (1, 2))
    runs = (GIVEN.with_values(Origin("--mirror", Rank.DATA), mirror=url) for url in urls)
    first, _ = compared(*({"flag": agreement.flags_told(run)} for run in runs))
    assert first is not None
    assert "Signature" not in str(first)
    assert "rank 1" in str(first)
    assert str(first).endswith("has another in what is not shown")


def test_the_first_rank_that_differs_is_named_on_all():
    kinds = [{"flag": {"--seed": Told(seed)}} for seed in (1, 1, 3, 1, 2)]
    found = compared(*kinds)
    assert len({*found}) == 1
    assert found[0] == Difference("flag", "--seed", 2, ("1", "3"), (HOST, HOST))
