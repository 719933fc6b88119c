"""Saving and resuming in process: what goes in comes out, and what goes wrong all ranks report.

The engine is a stand-in with a plain AdamW, which is what DeepSpeed leaves at stage 0 in fp32; the
other wrappers are resumed by real runs in tests/distributed.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minimind.checkpoint import saver as saver_module
from minimind.checkpoint.directory import published_checkpoints, verify
from minimind.checkpoint.resume import Resumed, TrainState
from minimind.checkpoint.resume import resume as resume_from
from minimind.checkpoint.retention import VALIDATION, Rules, saved_of
from minimind.checkpoint.saver import Saver
from minimind.checkpoint.tensor_files import Staging
from minimind.config.parse import parse_flags
from minimind.engine.deepspeed_backend import DeepSpeedBackend
from minimind.engine.optimizers import optimizer_of, parameter_groups
from minimind.engine.state import ZeroState
from minimind.errors import CheckpointError, NumericError, StorageError, which_memory
from minimind.runtime.durable_files import Metrics
from tests.alone import Alone
from tests.checkpoint.weights import load_weights
from tools.late_device import DEVICE, LATE, Stream, late_device

CPU = torch.device("cpu")
FACTS = {"identity": {"seed": {"seed": 1}}, "world_size": 1, "zero_stage": 0, "dtype": "float32"}


class Model(nn.Module):
    """A matrix, a vector that is not decayed, and a persistent buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.matrix = nn.Parameter(torch.randn(5, 3))
        self.gain = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("table", torch.ones(2, dtype=torch.complex64), persistent=False)


def test_too_little_pinned_memory_is_the_hosts_though_cuda_reports_it(monkeypatch):
    """With a stand-in for CUDA, whose words are those of a full GPU."""

    def empty(*size: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(MemoryError, match=r"tried to allocate 4\.00 GiB") as caught:
        Staging(2**30, torch.device("cuda", 0))
    assert which_memory(caught.value) == "host"


class Engine(Alone):
    """One rank, or one of several whose gathers bring a failure of rank 1."""

    def __init__(self, seed: int, other: Any = None, device: torch.device = CPU) -> None:
        self.model = Model(seed).to(device)
        run = parse_flags(["--learning_rate", "0.1", "--beta2", "0.9"])
        self.optimizer = optimizer_of(parameter_groups(self.model, 0.1), run)
        self.deepspeed = SimpleNamespace(
            module=self.model,
            optimizer=self.optimizer,
            fp16_enabled=lambda: False,
            gradient_accumulation_steps=lambda: 4,
            train_batch_size=lambda: 8,
            lr_scheduler=None,
            global_steps=0,
            global_samples=0,
            micro_steps=0,
            skipped_steps=0,
        )
        self.backend = DeepSpeedBackend(self.deepspeed)
        self.other = other
        self.device = device

    def state(self) -> ZeroState:
        return self.backend.state()

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.other is None else [value, self.other]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            (self.model.matrix.sum() ** 2 + (self.model.gain**3).sum()).backward()
            self.optimizer.step()
            self.model.get_buffer("seen").add_(1)
            self.deepspeed.global_steps += 1
            self.deepspeed.skipped_steps = self.deepspeed.global_steps // 2


def saved_late(root: Path, is_overtaken: bool = False) -> tuple[Tensor, Tensor, float]:
    """A weight at step 2, the same as saved beside step 3, and the ms that the save stalled.

    With `is_overtaken` the device has done step 3 when the saving thread begins. Otherwise it has
    copied nothing yet.
    """
    engine = Engine(1, device=DEVICE)
    engine.train(2)
    keeper = saver(engine, root)
    before = engine.model.matrix.detach().clone()
    goes_on = threading.Event()
    keeper._thread.submit(goes_on.wait, 60)
    keeper.begin(manifest_of(2, 2))
    assert not LATE.is_done()  # the loop has not waited for the copies
    engine.train(1)
    if is_overtaken:
        LATE.main.synchronize()
    goes_on.set()
    event = keeper.poll(wait=True)
    assert event is not None
    assert LATE.is_done() == is_overtaken  # nor the save for more than them
    keeper.close()
    return before.cpu(), load_weights(Path(event["path"]))["matrix"], event["stall_ms"]


@pytest.mark.parametrize("is_overtaken", [False, True])
def test_a_save_beside_the_next_update_has_the_state_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_overtaken: bool
):
    clock = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=lambda: 0.0)
    monkeypatch.setattr(saver_module, "time", clock)  # what is left of a stall is the device's
    with late_device():
        before, saved, stall_ms = saved_late(tmp_path, is_overtaken)
    assert torch.equal(before, saved)
    assert stall_ms == 6.0  # of six copies: two weights, each with two moments


def test_a_save_that_does_not_wait_for_its_copies_has_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Staging, "synchronize", lambda staging: 0.0)
    with late_device():
        before, saved, _ = saved_late(tmp_path)
    assert before.all()
    assert not saved.any()


def test_copies_on_a_stream_that_the_update_does_not_wait_for_are_of_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The order of the one stream is what the update waits by."""
    copy = Staging.copy

    def copy_beside(staging: Staging, slices: Any) -> Any:
        LATE.set_stream(Stream(DEVICE))
        copies = copy(staging, slices)
        LATE.set_stream(LATE.main)
        return copies

    monkeypatch.setattr(Staging, "copy", copy_beside)
    with late_device():
        before, saved, _ = saved_late(tmp_path, is_overtaken=True)
    assert not torch.equal(before, saved)


def manifest_of(step: int, tokens: int = 0) -> dict[str, Any]:
    return {**FACTS, "step": step, "tokens": tokens}


def saver(engine: Engine, root: Any, keep_last: int = 2, in_background: bool = True) -> Saver:
    return Saver(engine, engine, root, Rules(keep_last), {}, in_background)  # type: ignore[arg-type] (a stand-in)


def save(engine: Engine, root: Any, state: TrainState, keep_last: int = 2) -> dict[str, Any]:
    engine.deepspeed.global_steps = state.step  # whatever was trained here
    keeper = saver(engine, root, keep_last)
    keeper.begin(manifest_of(state.step, state.tokens))
    event = keeper.poll(wait=True)
    assert event is not None
    keeper.prune()
    assert keeper.prune_error(wait=True) == ""
    keeper.close()
    return event


def resume(
    engine: Engine,
    root: Any,
    requested: str = "auto",
    identity: Any = FACTS["identity"],
    allowed: Any = frozenset(),
) -> Resumed:
    return resume_from(engine, engine, root, requested, identity, allowed)  # type: ignore[arg-type] (a stand-in)


def test_a_resumed_engine_continues_as_the_saved_one(tmp_path):
    root = tmp_path / "checkpoints"
    first = Engine(1)
    first.train(3)
    resume(first, root)
    saved = save(first, root, TrainState(3, 300))
    assert saved["bytes"] > 0
    second = Engine(2)
    resumed = resume(second, root)
    assert (resumed.state, resumed.rejected) == (TrainState(3, 300), [])
    assert str(resumed.path) == saved["path"]
    assert second.deepspeed.micro_steps == 12
    assert second.deepspeed.skipped_steps == 1
    for engine in (first, second):
        engine.train(4)
    for name, value in first.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], value), name
    for key, value in load_weights(published_checkpoints(root)[0]).items():
        assert value.shape == first.model.state_dict()[key].shape


def test_a_save_before_the_first_step_resumes_without_moments(tmp_path):
    first, second = Engine(1), Engine(2)
    save(first, tmp_path, TrainState())
    second.train(2)  # leaves moments that must go
    resume(second, tmp_path)
    first.train(1)
    second.train(1)
    assert torch.equal(first.model.matrix, second.model.matrix)


def test_files_are_readable_by_others_and_hold_no_table_that_the_shape_determines(tmp_path):
    save(Engine(1), tmp_path, TrainState(1, 1))
    (path,) = published_checkpoints(tmp_path)
    assert verify(path) is None
    for file in path.iterdir():
        assert file.stat().st_mode & 0o044 == 0o044
    assert "table" not in (path / "buffers.safetensors").read_bytes().decode("latin1")
    assert json.loads((path / "state.json").read_text())["parameters"]["matrix"] == [5, 3]


def test_damaged_and_abandoned_checkpoints_step_aside_and_the_new_one_stays(tmp_path):
    engine = Engine(1)
    for step in (100, 200):
        save(engine, tmp_path, TrainState(step, 0))
    shard = tmp_path / "step_00000200" / "shard-0-of-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert resume(engine, tmp_path).state.step == 100
    assert (tmp_path / "rejected-step_00000200").is_dir()
    save(engine, tmp_path, TrainState(110, 0), keep_last=1)
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000110"]


def test_what_is_newer_than_a_named_checkpoint_is_abandoned(tmp_path):
    engine = Engine(1)
    for step in (100, 200):
        save(engine, tmp_path, TrainState(step, 0))
    resume(engine, tmp_path, str(tmp_path / "step_00000100"))
    assert (tmp_path / "abandoned-step_00000200").is_dir()
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000100"]


def test_a_checkpoint_from_elsewhere_leaves_none_of_another_course_standing(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    for step in (1, 4):
        save(Engine(1), here, TrainState(step, 0))
    elsewhere = save(Engine(2), there, TrainState(4, 0))["path"]
    assert resume(Engine(3), here, elsewhere).path == Path(elsewhere)
    assert published_checkpoints(here) == []
    assert sorted(p.name for p in here.iterdir()) == [
        "abandoned-step_00000001",
        "abandoned-step_00000004",
    ]
    assert len(published_checkpoints(there)) == 1


def test_a_parameter_that_never_has_a_gradient_is_no_reason_to_refuse(tmp_path):
    engine, other = Engine(1), Engine(2)

    def step(one: Engine) -> None:
        one.optimizer.zero_grad()
        (one.model.matrix.sum() ** 2).backward()  # and nothing of the gain
        one.optimizer.step()

    step(engine)
    save(engine, tmp_path, TrainState(1, 0))
    resume(other, tmp_path)
    for one in (engine, other):
        step(one)
    assert torch.equal(engine.model.matrix, other.model.matrix)
    assert torch.equal(engine.model.gain, other.model.gain)


def test_none_starts_over_and_keeps_the_old_ones(tmp_path):
    root = tmp_path / "checkpoints"
    save(Engine(1), root, TrainState(5, 0))
    assert resume(Engine(1), root, "none").state == TrainState()
    assert (tmp_path / "checkpoints-before" / "step_00000005").is_dir()
    assert published_checkpoints(root) == []


def test_an_unpublished_save_is_swept_at_the_next_start(tmp_path):
    (tmp_path / "step_00000007.tmp-dead").mkdir()
    assert resume(Engine(1), tmp_path).state == TrainState()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("requested", "report"), [("nowhere", "cannot be read"), ("empty", "holds no checkpoint")]
)
def test_a_named_checkpoint_that_is_not_there_is_an_error(tmp_path, requested, report):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=report):
        resume(Engine(1), tmp_path / "run", str(tmp_path / requested))


def test_checkpoints_that_are_gone_are_no_fresh_start(tmp_path):
    root = tmp_path / "checkpoints"
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write("run_start", step=0, resume_from=None)
    assert resume(Engine(1), root).path is None  # none was promised yet
    metrics.write("checkpoint_saved", step=40)
    metrics.write("run_start", step=40, resume_from="checkpoints/step_00000040")
    with pytest.raises(CheckpointError, match=r"one at step 40; .*--resume none"):
        resume(Engine(1), root)
    assert resume(Engine(1), root, "none").path is None
    metrics.write("run_start", step=0, resume_from=None)
    metrics.close()
    assert resume(Engine(1), root).path is None
    (root / "rejected-step_00000050").mkdir()
    with pytest.raises(CheckpointError, match=r"set aside \(last: rejected-step_00000050\)"):
        resume(Engine(1), root)


def test_only_what_is_allowed_may_change(tmp_path):
    save(Engine(1), tmp_path, TrainState(1, 0))
    other = {"seed": {"seed": 2}, "lr": {"beta": 1}}
    with pytest.raises(
        CheckpointError, match=r"lr\.beta: None -> 1\);.*allow_change lr,seed"
    ) as report:
        resume(Engine(1), tmp_path, identity=other, allowed={"seed"})
    assert "seed.seed" not in str(report.value)
    resumed = resume(Engine(1), tmp_path, identity=other, allowed={"seed", "lr", "batch"})
    assert list(map(str, resumed.changed)) == ["lr.beta: None -> 1", "seed.seed: 1 -> 2"]


def test_a_model_of_another_shape_is_refused_by_name(tmp_path):
    save(Engine(1), tmp_path, TrainState(1, 0))
    other = Engine(1)
    other.model.matrix.data = torch.zeros(4, 3)
    with pytest.raises(CheckpointError, match=r"matrix: \[5, 3\] -> \[4, 3\]"):
        resume(other, tmp_path)


def test_another_run_is_refused_with_what_changed(tmp_path):
    save(Engine(1), tmp_path, TrainState(1, 0))
    with pytest.raises(CheckpointError, match=r"seed\.seed: 1 -> 2") as caught:
        resume(Engine(1), tmp_path, identity={"seed": {"seed": 2}})
    assert caught.value.cause_rank == 0


def test_weights_that_are_no_longer_finite_are_never_published(tmp_path):
    engine = Engine(1)
    with torch.no_grad():
        engine.model.gain[1] = float("nan")
    with pytest.raises(NumericError, match="fp32 of gain"):
        save(engine, tmp_path, TrainState(1, 0))
    assert list(tmp_path.iterdir()) == []


def test_what_is_saved_is_the_state_at_the_beginning_of_the_save(tmp_path):
    engine = Engine(1)
    engine.train(2)
    keeper = saver(engine, tmp_path)
    for step in (2, 3):  # the second one in memory used before
        before = {name: value.clone() for name, value in engine.model.state_dict().items()}
        hold = threading.Event()
        keeper._thread.submit(hold.wait)  # the disk is slow
        keeper.begin(manifest_of(step, 0))
        assert keeper.poll(wait=False) is None
        engine.train(1)
        hold.set()
        event = keeper.poll(wait=True)
        assert event
        assert event["step"] == step
        other = Engine(2)
        assert resume(other, tmp_path).state.step == step
        for name, value in other.model.state_dict().items():
            assert torch.equal(value, before[name]), name
            assert name == "table" or not torch.equal(value, engine.model.state_dict()[name])


def test_a_save_that_fails_in_the_background_is_reported_when_it_is_waited_for(
    tmp_path, monkeypatch
):
    engine = Engine(1)
    keeper = saver(engine, tmp_path)
    monkeypatch.setattr(saver_module, "publish", lambda tmp, final: os.rename(tmp / "x", final))
    keeper.begin(manifest_of(1, 0))
    keeper._thread.submit(lambda: None).result()
    assert keeper.has_failed
    assert keeper.poll(wait=False) is None
    with pytest.raises(StorageError, match="No such file"):
        keeper.poll(wait=True)
    assert list(tmp_path.iterdir()) == []


def test_older_checkpoints_are_pruned_after_the_new_one_is_reported(tmp_path):
    save(Engine(1), tmp_path, TrainState(1, 0))
    keeper = saver(Engine(1), tmp_path, keep_last=1)
    keeper.begin(manifest_of(2, 0))
    assert keeper.poll(wait=True)
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000002", "step_00000001"]
    keeper.prune()
    assert keeper.prune_error(wait=True) == ""
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000002"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_the_new_one_lasts(
    tmp_path, monkeypatch
):
    def refuse(root, rules, good):
        raise PermissionError(errno.EACCES, "Permission denied", "step_00000001")

    monkeypatch.setattr(saver_module, "prune", refuse)
    keeper = saver(Engine(1), tmp_path)
    keeper.begin(manifest_of(2, 0))
    assert keeper.poll(wait=True)
    keeper.prune()
    assert "step_00000001" in keeper.prune_error(wait=True)
    assert keeper.prune_error(wait=True) == ""
    assert [p.name for p in published_checkpoints(tmp_path)] == ["step_00000002"]


def test_the_room_for_a_checkpoint_is_known_before_the_first(tmp_path, monkeypatch):
    engine = Engine(1)
    keeper = saver(engine, tmp_path)
    engine.train(1)
    taken = save(engine, tmp_path, TrainState(1, 0))["bytes"]
    state = len((tmp_path / "step_00000001" / "state.json").read_bytes())
    # All but the headers and state.json, some hundred bytes beside the tensors.
    assert keeper.bytes == pytest.approx(taken - state, abs=1500)
    monkeypatch.setattr(saver_module, "free_bytes", lambda path: keeper.bytes - 1)
    with pytest.raises(
        StorageError, match=rf"needs {keeper.bytes:,} bytes .* {keeper.bytes - 1:,}"
    ):
        keeper.require_capacity(10)
    monkeypatch.setattr(saver_module, "free_bytes", lambda path: keeper.bytes)
    assert "--keep_last 2 needs" in keeper.require_capacity(10)
    monkeypatch.setattr(saver_module, "free_bytes", lambda path: 2 * keeper.bytes)
    assert keeper.require_capacity(10).endswith("the disk has room for 2 more")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_with_the_bytes_needed_and_free(tmp_path, monkeypatch, number):
    def full(path, runs):
        raise OSError(number, os.strerror(number))

    keeper = saver(Engine(1), tmp_path)
    monkeypatch.setattr(saver_module, "write_slices", full)
    keeper.begin(manifest_of(1, 0))
    with pytest.raises(StorageError, match=rf"step_00000001.*{keeper.bytes:,} bytes .*needed, \d"):
        keeper.poll(wait=True)


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(saver_module, "write_durably", full)
    with pytest.raises(StorageError, match=r"state\.json: No space left"):
        save(Engine(1), tmp_path, TrainState(1, 0))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_for_a_validation_is_told_to_all_ranks_at_once(tmp_path, monkeypatch):
    def full(directory, val_loss, by):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / VALIDATION))

    keeper = saver(Engine(1), tmp_path)
    monkeypatch.setattr(saver_module, "record_validation", full)
    keeper.begin(manifest_of(1, 0))
    keeper.validated(1, 3.0)  # which rank 0 alone would raise
    keeper.prune()
    keeper.prune_error(wait=True)
    assert keeper.has_failed
    assert keeper.poll(wait=False)  # the save itself is complete
    with pytest.raises(StorageError, match=r"validation\.json: No space left .*; free some space"):
        keeper.wait_for_validations()
    engine = Engine(1)
    keeper = saver(engine, tmp_path)
    engine.other = (None, (StorageError, "disk of rank 1", ()))
    with pytest.raises(StorageError, match="disk of rank 1"):
        keeper.wait_for_validations()


def test_nothing_is_pruned_once_a_validation_is_not_recorded(tmp_path, monkeypatch):
    def full(directory, val_loss, by):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory / VALIDATION))

    save(Engine(1), tmp_path, TrainState(1, 0))
    keeper = saver(Engine(1), tmp_path, keep_last=1)
    monkeypatch.setattr(saver_module, "record_validation", full)
    keeper.validated(1, 3.0)  # it may be the best
    keeper.begin(manifest_of(2, 0))
    assert keeper.poll(wait=True)
    with pytest.raises(StorageError, match="No space left"):
        keeper.wait_for_validations()
    keeper.prune()
    assert keeper.prune_error(wait=True) == ""
    assert len(published_checkpoints(tmp_path)) == 2


def test_a_validation_that_ends_before_its_save_is_recorded(tmp_path, monkeypatch):
    is_validated, real = threading.Event(), saver_module.write_slices

    def slow(*given):
        is_validated.wait(60)
        return real(*given)

    monkeypatch.setattr(saver_module, "write_slices", slow)
    keeper = saver(Engine(1), tmp_path)
    keeper.begin(manifest_of(1, 0))
    keeper.validated(1, 3.0)
    is_validated.set()
    assert keeper.poll(wait=True)
    keeper.wait_for_validations()
    assert saved_of(published_checkpoints(tmp_path)[0]).val_loss == 3.0


def test_a_rank_that_cannot_write_is_named_to_all(tmp_path):
    engine = Engine(1)
    keeper = saver(engine, tmp_path)
    engine.other = (None, (StorageError, "disk of rank 1", ()))
    keeper.begin(manifest_of(1, 0))
    with pytest.raises(StorageError, match="disk of rank 1") as caught:
        keeper.poll(wait=True)
    assert caught.value.cause_rank == 1


def test_an_optimizer_or_wrapper_without_an_adapter_is_refused_by_name(tmp_path):
    engine = Engine(1)
    engine.deepspeed.optimizer = torch.optim.RMSprop(engine.model.parameters())
    with pytest.raises(CheckpointError, match="RMSprop"):
        saver(engine, tmp_path)
    engine.deepspeed.optimizer = SimpleNamespace(optimizer=engine.optimizer)
    with pytest.raises(CheckpointError, match="SimpleNamespace"):
        saver(engine, tmp_path)


def test_replicated_state_is_shared_out_without_gap_or_overlap():
    from minimind.engine.state import Fragment

    whole = Fragment("w", 0, 11, torch.arange(11.0), 0)
    parts = [whole.share(rank, 4) for rank in range(4)]
    assert torch.cat([p.view(p.owner) for p in parts]).tolist() == list(range(11))
    assert [p.start for p in parts] == [p.offset for p in parts]


def test_matrices_are_decayed_and_gains_are_not():
    decayed, plain = parameter_groups(Model(1), 0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert [p.ndim for p in decayed["params"]] == [2]
    assert [p.ndim for p in plain["params"]] == [1]
