"""Real two-process runs through run_accelerate.sh, compared with one another step by step.

Hardware: two CPU cores. Command: pytest tests/distributed. Starting a run costs far more than its
twenty small steps, so each run is started once and looked at by several tests.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import Launcher, Run
from tests.distributed.conftest import BF16, FP32, LONGER, STEPS, largest_relative_difference
from tests.train.starts import require_labels, start_of
from tools.forking import Forked
from tools.runs import config_of_stage

pytestmark = pytest.mark.launch


def test_a_run_ends_well_and_reports_what_ran(unbroken: Run):
    assert unbroken.status == 0, unbroken.stderr
    (start,) = unbroken.events("run_start")
    assert start["backend"] == "deepspeed"
    assert (start["zero_stage"], start["world_size"], start["step"]) == (2, 2, 0)
    assert (start["dtype"], start["device"], start["resume_from"]) == ("bfloat16", "cpu", None)
    assert start["tokens_per_step"] == 2 * 2 * 2 * 64
    assert start["total_steps"] == STEPS
    (end,) = unbroken.events("exit")
    assert (end["status"], end["step"]) == (0, STEPS)


@pytest.mark.long
def test_a_recipe_trains_in_place_of_the_shipped_optimizer(launch: Launcher, tmp_path: Path):
    """The start script with its own files; in-process tests resolve every optimizer's flag."""
    run = launch.run(tmp_path / "out", "--config strong --max_steps 2 --eval_rows 0")
    assert run.status == 0, run.stderr
    notice = "optimizer muon by --config strong, in place of configs/ds_config.json's AdamW"
    assert " ".join(run.stdout.split()).count(notice) == 1  # long lines are folded
    (start,) = run.events("run_start")
    assert (start["backend"], start["zero_stage"]) == ("deepspeed", 2)
    assert "optimizer: muon" in (run.out_dir / "config.yaml").read_text()


def test_pos_cis_is_complex64_on_every_rank_under_bf16(unbroken: Run):
    (start,) = unbroken.events("run_start")
    assert start["rotary"] == ["torch.complex64"] * 2


def test_the_loss_falls(unbroken: Run):
    losses = unbroken.losses()
    assert len(losses) == STEPS
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5


def test_the_rate_of_every_step_is_the_schedules(unbroken: Run):
    from minimind.config.schedule import Schedule

    planned = Schedule("cosine", 2e-3, 0.1, STEPS * 3 // 10, STEPS)
    assert [s["lr"] for s in unbroken.events("step")] == [planned.lr_at(i) for i in range(STEPS)]


def test_rows_and_tokens_count_on(unbroken: Run):
    for number, step in enumerate(unbroken.events("step"), 1):
        assert step["step"] == number
        assert step["rows"] == [(number - 1) * 8, number * 8]
        assert step["tokens"] == number * 8 * 64


def test_the_four_phases_are_the_step(unbroken: Run):
    for step in unbroken.events("step"):
        parts = [step[f"{p}_ms"] for p in ("data", "forward", "backward", "optimizer")]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(step["step_ms"])
        assert step["tokens_per_second"] > 0
        assert step["memory_mib"] > 0


def test_profiling_prints_a_table_and_records_the_same(unbroken: Run):
    assert unbroken.stdout.count("phase") == 3
    assert [p["step"] for p in unbroken.events("profile")] == [16, 32, STEPS]
    assert all(p["forward_ms"] > 0 for p in unbroken.events("profile"))
    assert all(p["checkpoint_ms"] > 0 for p in unbroken.events("profile"))
    after_a_save = [s["step"] for s in unbroken.events("step") if s["checkpoint_ms"] > 0]
    assert after_a_save == list(range(7, STEPS, 6))


def test_validation_counts_every_target_once(unbroken: Run):
    found = unbroken.events("eval")
    assert [e["step"] for e in found] == [18, STEPS]
    assert found[1]["val_loss"] < found[0]["val_loss"]
    assert found[0]["tokens"] % 64 == 0
    assert found[0]["val_bpb"] > 0


def test_a_start_fits_a_screen(unbroken: Run):
    require_labels(start_of(unbroken.stdout))


def test_every_resolved_value_is_kept_and_the_table_is_a_flag_away(unbroken: Run):
    resolved = json.loads((unbroken.out_dir / "ds_config.resolved.json").read_text())
    assert "auto" not in json.dumps(resolved)
    assert resolved["train_batch_size"] == 8
    for output in ("gradient_accumulation_steps", "grad_clip (default)"):
        assert output not in unbroken.stdout  # without --verbose
    assert "batch_size: 2  # --batch_size" in (unbroken.out_dir / "config.yaml").read_text()


def test_checkpoints_are_complete_pruned_and_verify(unbroken: Run):
    from minimind.checkpoint.directory import published_checkpoints, read_manifest, verify

    found = published_checkpoints(unbroken.out_dir / "checkpoints")
    assert [p.name for p in found] == ["step_00000036", "step_00000030"]
    assert [e["step"] for e in unbroken.events("checkpoint_saved")] == list(range(6, STEPS + 1, 6))
    assert verify(found[0]) is None
    manifest = read_manifest(found[0])
    assert (manifest["step"], manifest["world_size"], manifest["zero_stage"]) == (STEPS, 2, 2)
    names = {entry["name"] for entry in manifest["files"]}
    assert {"shard-0-of-2.safetensors", "shard-1-of-2.safetensors", "state.json"} <= names
    assert not list((unbroken.out_dir / "checkpoints").glob("*.tmp-*"))


def test_text_is_generated_from_a_checkpoint(unbroken: Run, capsys: pytest.CaptureFixture[str]):
    from minimind.cli.main import main

    ask = ["generate", "--checkpoint", str(unbroken.out_dir), "--prompt", "春眠", "--seed", "1"]
    assert main([*ask, "--max_new_tokens", "12"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("春眠")
    assert "step_00000036" in output.err


def test_another_stage_in_the_json_alone_gives_the_same_losses(
    other_stage: tuple[int, Path, Run], fp32: Run
):
    stage, _, other = other_stage
    assert other.status == 0, other.stderr
    assert other.events("run_start")[0]["zero_stage"] == stage
    assert largest_relative_difference(other.losses(), fp32.losses()) < 2e-6
    norms = [s["grad_norm"] for s in fp32.events("step")]
    assert [s["grad_norm"] for s in other.events("step")] == pytest.approx(norms, rel=1e-4)
    assert [s["step"] for s in other.events("sample")] == [10, 20]


@pytest.mark.long  # the chain below also resumes as one process
def test_one_process_of_four_is_two_of_two(forked: Launcher, fp32: Run, tmp_path: Path):
    one = forked.run(tmp_path, f"{FP32} --accumulation_steps 4", processes=1)
    assert one.status == 0, one.stderr
    assert one.events("run_start")[0]["world_size"] == 1
    assert largest_relative_difference(one.losses(), fp32.losses()) < 2e-6
    assert [s["rows"] for s in one.events("step")] == [s["rows"] for s in fp32.events("step")]


def test_ddp_is_deepspeed_and_split_batches_counts_over_all_processes(
    forked: Launcher, fp32: Run, tmp_path: Path
):
    flags = f"{FP32} --deepspeed_config none --split_batches --batch_size 4"
    ddp = forked.run(tmp_path, flags)
    assert ddp.status == 0, ddp.stderr
    (start,) = ddp.events("run_start")
    assert (start["backend"], start["zero_stage"], start["world_size"]) == ("ddp", None, 2)
    assert "2 rows x 2 micro-batches x 2 processes = 8 rows, 512 tokens" in ddp.stdout
    assert largest_relative_difference(ddp.losses(), fp32.losses()) < 2e-6
    for name in ("lr", "rows", "tokens"):
        assert [s[name] for s in ddp.events("step")] == [s[name] for s in fp32.events("step")]
    norms = [s["grad_norm"] for s in fp32.events("step")]
    assert [s["grad_norm"] for s in ddp.events("step")] == pytest.approx(norms, rel=1e-4)


def test_killed_stopped_and_started_again_it_repeats_the_unbroken_run_bit_for_bit(
    forked: Forked, unbroken: Run, tmp_path: Path
):
    flags = f"{BF16} {LONGER} --eval_interval 18"
    out = tmp_path / "out"
    assert forked.run_until(out, flags, "checkpoint_saved")[0] == [-signal.SIGKILL] * 2
    statuses, shown = forked.run_until(out, flags, '"loss": ', signal.SIGUSR1)
    assert statuses == [75, 75], shown
    assert "stopped on SIGUSR1, saved at step" in shown
    assert "run the same command again" in shown
    assert "error[" not in shown
    resumed = forked.run(out, flags)
    assert resumed.status == 0, resumed.stderr
    end = resumed.events("exit")[0]
    assert (end["status"], end["code"]) == (75, "PREEMPTED")
    first, second, third = resumed.events("run_start")
    assert (first["step"], third["step"]) == (0, end["step"])
    assert third["resume_from"].endswith(f"step_{end['step']:08d}")
    assert second["step"] in range(6, 33, 6)
    assert second["resume_from"].endswith(f"step_{second['step']:08d}")
    expected = dict(zip(range(1, STEPS + 1), unbroken.curve(), strict=True))
    for line in resumed.curve():
        assert line == expected[int(line[0])]
    assert {int(line[0]) for line in resumed.curve()} == set(range(1, STEPS + 1))
    assert resumed.events("eval")[-1]["val_loss"] == unbroken.events("eval")[-1]["val_loss"]


def test_one_run_continues_along_a_chain_of_world_sizes_and_stages(
    forked: Launcher, fp32: Run, tmp_path: Path
):
    """Processes 2 -> 1 -> 4 -> 2, stages 2 -> 3 -> 0 -> 2: the rows and losses of the unbroken run.

    Saved after odd numbers of steps: the windows of micro-batches must begin anew.
    """
    saved = fp32.out_dir / "checkpoints" / "step_00000009"
    layout = {"world_size": 2, "zero_stage": 2}
    for processes, stage, last in ((1, 3, 13), (4, 0, 17), (2, 2, None)):
        out, accumulation = tmp_path / str(stage), 4 // processes
        flags = f"{FP32} --split_batches --batch_size {8 // accumulation} --resume {saved}"
        flags += f" --accumulation_steps {accumulation}"
        flags += f" --deepspeed_config {config_of_stage(stage, tmp_path)}"
        flags += f" --stop_at_step {last}" if last else ""
        part = forked.run(out, flags, processes=processes)
        assert part.status == (75 if last else 0), part.stderr
        (reshard,) = part.events("checkpoint_resharded")
        assert reshard["from"] == layout
        layout = {"world_size": processes, "zero_stage": stage}
        assert reshard["to"] == layout
        steps = part.events("step")
        before = [s for s in fp32.events("step") if steps[0]["step"] <= s["step"]]
        for one, unbroken in zip(steps, before, strict=not last):
            assert (one["step"], one["rows"]) == (unbroken["step"], unbroken["rows"])
            assert one["loss"] == pytest.approx(unbroken["loss"], abs=2e-6)
        assert steps[-1]["step"] == (last or 20)
        saved = out / "checkpoints" / f"step_{last or 20:08d}"


def test_a_checkpoint_of_deepspeed_continues_without_it(
    forked: Launcher, fp32: Run, tmp_path: Path
):
    saved = fp32.out_dir / "checkpoints" / "step_00000009"
    flags = f"{FP32} --deepspeed_config none --resume {saved}"
    resumed = forked.run(tmp_path / "out", flags)
    assert resumed.status == 0, resumed.stderr
    (reshard,) = resumed.events("checkpoint_resharded")
    assert (reshard["from"]["zero_stage"], reshard["to"]["zero_stage"]) == (2, None)
    for after, unbroken in zip(resumed.losses(), fp32.losses()[9:], strict=True):
        assert after == pytest.approx(unbroken, rel=2e-6)
