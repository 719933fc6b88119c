"""A run from its configuration to its last checkpoint: what the loop needs, built in order."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from minimind.architecture.hf_models import rotary_dtype
from minimind.checkpoint.identity import facts, hardware, identity, layout, source_commit, versions
from minimind.checkpoint.resume import Resumed, resume
from minimind.checkpoint.run_folder import claim, require_output, require_writable, write_reference
from minimind.checkpoint.saver import Saver
from minimind.checkpoint.train_state import TrainState
from minimind.config.deepspeed.backend_choice import Setup, advice, read_setup
from minimind.config.deepspeed.engine_rules import outputs
from minimind.config.deepspeed.resolve import Resolved
from minimind.config.launcher_env import read_launch
from minimind.config.run_config import FLAGS, RunConfig
from minimind.config.schedule import Schedule
from minimind.data.loader.row_order import Order
from minimind.data.prepare.prepare import Prepared
from minimind.engine.build import Engine, build_engine, leave, require_accepted, section_faults
from minimind.errors import StorageError, UsageError
from minimind.report.write import NAME as REPORT
from minimind.report.write import write_report
from minimind.runtime.durable_files import storing
from minimind.runtime.process import Progress
from minimind.telemetry.mfu import mfu_per_speed, peak_of
from minimind.telemetry.progress import Report
from minimind.telemetry.trace import require_traceable, trace_of, traced_steps
from minimind.telemetry.trackers import FINISH, open_trackers
from minimind.train.build import (
    batches_of,
    continued,
    held_out_of,
    plan,
    prepare_data,
    require_default_data,
    require_length,
    require_resume_path,
    require_same_files,
    with_prepared,
)
from minimind.train.initial_weights import Initial, read_initial
from minimind.train.loop import train
from minimind.train.loop_actions import Desk, close_with
from minimind.train.memory_report import reported_memory
from minimind.train.sample_text import build_samples, read_sample_prompts
from minimind.train.settings import dry_run_text
from minimind.train.skipped_steps import SkippedSteps
from minimind.train.start_summary import opening

# Seconds that a rank waits for another that reads or writes a checkpoint: a disk may be slow, and a
# rank that is gone or stopped is noticed by other means.
PATIENCE = 3600
SHARDING = ("world_size", "zero_stage")


def pretrain(run: RunConfig, progress: Progress) -> int:
    """Train `run` to its end or to a request to stop; 0 or 75. With --dry_run only tell."""
    progress.stop.limit(run.max_minutes)
    launch = read_launch(os.environ)
    initial = read_initial(run)
    run = initial.run
    setup = read_setup(run, launch)
    # Mistakes before the work.
    resolved = setup.resolve(sections=partial(section_faults, device=setup.device))
    require_accepted(resolved, setup.device)
    for key, place in outputs(resolved.config).items():
        require_output(Path(place), f"{resolved.path}: {key}")
    read_sample_prompts(run)
    traced_steps(run)
    if run.dry_run:
        if launch.rank == 0:
            print(dry_run_text(setup, resolved, initial.architecture))
        return 0
    require_default_data(run)
    require_resume_path(run)
    require_writable(Path(run.out_dir))
    with ExitStack() as held:
        return train_resolved(setup, resolved, initial, progress, held)


def train_resolved(
    setup: Setup, resolved: Resolved, initial: Initial, progress: Progress, held: ExitStack
) -> int:
    """The same for a run whose mistakes have been told; `held` closes what it opens."""
    run, is_first = setup.run, setup.launch.rank == 0
    out_dir = Path(run.out_dir)
    claimed = is_first and out_dir.exists()
    if claimed:  # before the long work
        progress.lock = claim(out_dir)
    prepared = prepare_data(run)
    order, schedule = plan(resolved.run, prepared, setup.launch.world_size)
    require_traceable(run, schedule.total_steps)
    setup = replace(setup, run=with_prepared(run, prepared))
    resolved = setup.resolve(schedule)
    run = resolved.run
    if is_first and not claimed:
        progress.lock = claim(out_dir)
    progress.out_dir = out_dir
    held.enter_context(reported_memory(setup, resolved))
    engine = build_engine(resolved, initial.build(run, prepared.tokenizer), setup.device)
    held.callback(engine.release)
    engine.introduce(progress.peers)
    require_same_files(engine, out_dir, prepared)
    with storing(str(out_dir), "mend its rights, or give another --out_dir"):
        share = mfu_per_speed(run, initial.architecture, engine.device, engine.world_size)
        total_steps, is_speaker = schedule.total_steps, engine.rank == 0
        report = Report(out_dir, total_steps, engine.device, is_speaker, run.profile, share)
    held.callback(report.close)
    desk, resumed = build_desk(run, prepared, order, schedule, engine, report, progress, initial)
    close_with(held, desk)
    if engine.rank == 0:
        with storing(str(out_dir), "free some space, or give another --out_dir"):
            write_reference(out_dir, resolved)
            prepared.list_rejected(out_dir)
        prepared.tokenizer.save(out_dir / "tokenizer")
        if resumed.state.step < schedule.total_steps:  # else they would hold nothing
            told = {name: getattr(run, name) for name in FLAGS}
            report.trackers = open_trackers(run, resumed.state.step, told)
    tell_start(desk, prepared, resumed, initial, advice(setup, resolved))
    progress.has_started = True
    state, status, reason = train(desk, resumed.state)
    finish(desk, state, status, reason)
    return status


def build_desk(
    run: RunConfig,
    prepared: Prepared,
    order: Order,
    schedule: Schedule,
    engine: Engine,
    report: Report,
    progress: Progress,
    initial: Initial,
) -> tuple[Desk, Resumed]:
    """What the loop works with, the state resumed; a request to stop is remembered from here on."""
    root = Path(run.out_dir) / "checkpoints"
    same = identity(run, initial.architecture.identity(run), prepared, schedule, order, engine)
    ranks = engine.another_group(PATIENCE)
    resumed = resume(engine, ranks, root, run.resume, same, run.allowed_changes())
    if resumed.path:
        order = continued(order, resumed)
    require_length(run, resumed.state.step, schedule, order)
    saver = Saver(
        engine,
        ranks,
        root,
        run.keep_last,
        {**facts(run, same, order, engine), "init_from": initial.origin(resumed.manifest)},
        texts(prepared, engine),
        run.async_save,
        run.save_minutes,
    )
    batches = batches_of(run, prepared, order, engine)
    desk = Desk(
        run=run,
        schedule=schedule,
        engine=engine,
        batches=batches,
        held_out=held_out_of(run, prepared),
        samples=build_samples(run, prepared.tokenizer),
        saver=saver,
        trace=trace_of(run, engine.rank),
        communication=engine.watched() if run.profile else None,
        report=report,
        skipped=SkippedSteps(run, engine, order, batches.at, prepared.tokenizer.decode, report),
        stop=progress.begin(),
        progress=progress,
    )
    return desk, resumed


def texts(prepared: Prepared, engine: Engine) -> dict[str, bytes]:
    """Small files beside the tensors: enough to generate from a checkpoint alone."""
    return {
        "ds_config.resolved.json": json.dumps(engine.resolved.config, indent=2).encode(),
        "config.json": engine.model.config.to_json_string().encode(),
        **prepared.tokenizer.files(),
    }


def tell_start(
    desk: Desk, prepared: Prepared, resumed: Resumed, initial: Initial, notes: list[str]
) -> None:
    """Say and record what is about to happen; a StorageError where no checkpoint would fit."""
    run, engine, report, order = desk.run, desk.engine, desk.report, desk.batches.order
    for bad in resumed.rejected:
        report.event("checkpoint_rejected", path=str(bad.path), file=bad.file, reason=bad.reason)
        report.say(f"checkpoint {bad.path} is passed over: {bad.file} {bad.reason}")
    state, path, peak = resumed.state, resumed.path, peak_of(run, engine.device)
    room = (
        desk.saver.require_room()
        if state.step < desk.schedule.total_steps
        else "nothing is left to save"
    )
    report.event(
        "run_start",
        step=state.step,
        resume_from=str(path) if path else None,
        init_from=initial.origin(resumed.manifest),
        **layout(run, engine),
        dtype=run.dtype,
        device=engine.device.type,
        hardware=hardware(engine.device),
        peak_tflops=peak[0] if peak else None,
        peak_source=peak[1] if peak else None,
        parameters=engine.parameters,
        tokens_per_step=desk.batches.tokens_per_step,
        rows_per_epoch=order.n_rows,
        total_steps=desk.schedule.total_steps,
        versions=versions(),
        commit=source_commit(),
        rotary=engine.gather(rotary_dtype(engine.model)),
    )
    now = layout(run, engine)
    before = {key: resumed.manifest.get(key, now[key]) for key in now}  # an old one tells less
    if path and before != now:
        told = [f"{key} {before[key]} -> {now[key]}" for key in now if before[key] != now[key]]
        report.say(f"shared out anew: {', '.join(told)}")
        was, is_now = ({key: side[key] for key in SHARDING} for side in (before, now))
        if was != is_now:
            report.event("checkpoint_resharded", **{"from": was, "to": is_now})
    if resumed.changed:
        told = [str(one) for one in resumed.changed]
        report.event("run_changed", changes=told)
        report.say(f"allowed to change: {'; '.join(told)}")
    notes = [*filter(None, (initial.architecture.line(), initial.line())), *notes]
    if (traced := traced_steps(run)) and traced[1] <= state.step:
        notes.append(f"trace    none: --trace_steps {run.trace_steps} is before step {state.step}")
    report.say(opening(desk, prepared, resumed, room, notes))


def finish(desk: Desk, state: TrainState, status: int, reason: str) -> None:
    """Tell the end, on every rank at the same moment."""
    desk.batches.close()
    if told := desk.saver.not_retired(wait=True):
        desk.report.say(told)
    code = "DONE" if status == 0 else "PREEMPTED"
    end = {"code": code, "status": status, "reason": reason, "step": state.step}
    desk.report.event("exit", **end, **desk.report.untold())
    desk.report.close(patience=min(FINISH, desk.run.dist_timeout / 2))  # other ranks wait below
    if status:
        again = "run the same command again"
        if desk.run.resume != "auto":  # which would begin where this start began
            again = f"run it again without --resume {shlex.quote(desk.run.resume)}"
        desk.report.say(f"{reason} at step {state.step}; {again} to go on")
    else:
        command = os.path.relpath(Path(sys.executable).parent / "minimind")
        place = shlex.quote(desk.run.out_dir)
        desk.report.say(
            f"done: {state.step} steps, {state.tokens:,} tokens; try\n"
            f'  {command} generate --checkpoint {place} --prompt "..."'
        )
    if desk.engine.rank == 0:
        write_page(desk)
    desk.engine.barrier()
    if desk.progress.peers:
        desk.progress.peers.close()
    leave()


def write_page(desk: Desk) -> None:
    """Write the run's report into its out_dir and print its path, or why there is none."""
    out_dir = Path(desk.run.out_dir)
    try:
        write_report([out_dir], out_dir / REPORT, "free some space")
        desk.report.say(f"report {out_dir / REPORT}")
    except (StorageError, UsageError) as error:  # metrics.jsonl was taken away
        desk.report.say(f"no report: {error}")
