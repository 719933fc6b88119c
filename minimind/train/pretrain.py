"""A run from its configuration to its end: builds what the loop needs, in order."""

from __future__ import annotations

import os
import secrets
import shlex
from contextlib import ExitStack
from dataclasses import replace
from math import gcd
from pathlib import Path
from textwrap import wrap

from minimind.checkpoint.directory import TrainState
from minimind.checkpoint.identity import facts, identity
from minimind.checkpoint.resume import Resumed, resume
from minimind.checkpoint.retention import Rules, had_rules
from minimind.checkpoint.run_folder import (
    is_in,
    lock_out_dir,
    require_own,
    require_writable,
    write_reference,
)
from minimind.checkpoint.saver import Saver
from minimind.config.deepspeed.backend_choice import Setup, advice
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import planned_launch, read_launch
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.order import Order
from minimind.engine.build import Engine, build_engine, leave_process_group
from minimind.errors import StorageError, UsageError
from minimind.report.run_logger import RunLogger
from minimind.report.verdict import Verdicts
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.event_log import EventLog
from minimind.runtime.heartbeat import Layout, record_layout
from minimind.runtime.process import Progress
from minimind.runtime.terminal import phase
from minimind.train.agreement import meet, require_agreement, with_common_dtype
from minimind.train.auto_values import with_auto_values
from minimind.train.build import (
    build_batches,
    plan_data_and_schedule,
    prepare_data,
    require_length,
    require_shared_folder,
    resume_order,
    sidecar_files,
    with_local_folder,
    with_prepared,
)
from minimind.train.evaluate import EVAL_ROWS, build_samples, held_out_of
from minimind.train.failures import SkippedSteps, report_out_of_memory
from minimind.train.initial_weights import InitialModel
from minimind.train.loop import GO_BACK, RunContext, damage_logged, go_back, register_cleanup, train
from minimind.train.optional import (
    build_corruption_check,
    build_mirror,
    build_scores,
    build_spike_guard,
    build_trace,
    open_trackers,
    require_place_of_mirror,
    require_traceable,
)
from minimind.train.rehearsal import checked
from minimind.train.summary import (
    COLUMNS,
    dry_run_text,
    log_run_start,
    log_start_event,
    mfu_per_speed,
    plan_run,
    setting_of,
)
from minimind.train.what_next import what_next

# For reading and writing: a disk may be slow, and a dead rank is detected by other means.
CHECKPOINT_TIMEOUT_S = 3600


def pretrain(run: RunConfig, progress: Progress) -> int:
    """Train until the run ends or is asked to stop; return 0 or 75. --dry_run only prints."""
    progress.stop.limit(run.max_minutes)
    with ExitStack() as cleanup:
        return pretrain_on(with_local_folder(run, cleanup), progress, cleanup)


def pretrain_on(run: RunConfig, progress: Progress, cleanup: ExitStack) -> int:
    """Check a run whose prepared folder is here, and train; `cleanup` closes what is opened."""
    # 1. The launcher, the model and the backend decide what flags leave open. Every mistake is
    # reported before the long work.
    given, launch = run, read_launch(os.environ)
    if run.dry_run:
        launch = planned_launch(launch, os.environ)
    setup, resolved, initial = checked(run, launch)
    run = initial.run
    # 2. The place of the run.
    out_dir = Path(run.out_dir)
    tokenizer = run.tokenizer if keeps_tokenizer(run) else None
    if run.dry_run:
        require_own(out_dir, tokenizer, run.config)
        if launch.rank == 0:
            require_place_of_mirror(run, is_start=False)
            model = initial.architecture
            print(dry_run_text(plan_run(setup, resolved, model), model))
        return 0
    require_writable(out_dir, tokenizer, run.config)
    if launch.rank == 0:
        require_place_of_mirror(run, is_start=True)
    return train_resolved(given, setup, resolved, initial, progress, cleanup)


def keeps_tokenizer(run: RunConfig) -> bool:
    """Whether the tokenizer in out_dir, which the run reads, stays as it is.

    That of a fine-tuning run gets a template and special tokens.
    """
    return run.task == "pretrain" and is_in(Path(run.out_dir), run.tokenizer)


def train_resolved(
    given: RunConfig,
    setup: Setup,
    resolved: ResolvedConfig,
    initial: InitialModel,
    progress: Progress,
    cleanup: ExitStack,
) -> int:
    """Prepare the data, build the engine, train; `cleanup` closes what is opened.

    `given` has the flags as parsed.
    """
    run, is_rank_0 = setup.run, setup.launch.rank == 0
    out_dir = Path(run.out_dir)
    # 3. The text, which decides the vocabulary and the schedule.
    is_locked = is_rank_0 and disk.exists(out_dir)
    if is_locked:  # refuse a folder in use before the long work
        progress.lock = lock_out_dir(out_dir)
    prepared = prepare_data(run)
    if resolved.run.open_flags:
        known, manifest = with_prepared(resolved.run, prepared), prepared.manifest
        run = with_auto_values(setup, known, resolved.optimizer, manifest, initial.architecture)
    # The ranks meet here, as what follows depends on the dtype that their devices compute.
    store = meet(given, setup)
    run = with_common_dtype(store, run, setup.launch)
    if run is not setup.run:
        setup = replace(setup, run=run)
        resolved = setup.resolve()
    order, schedule = plan_data_and_schedule(
        resolved.run, prepared, setup.launch.world_size, initial.architecture
    )
    require_traceable(run, schedule.total_steps)
    # 4. The configuration in force, read from here on.
    setup = replace(setup, run=with_prepared(run, prepared))
    resolved = setup.resolve(schedule)
    run = resolved.run
    if is_rank_0 and not is_locked:
        progress.lock = lock_out_dir(out_dir)
    progress.out_dir = out_dir
    # 5. The engine, with its process group, of ranks that train the same run.
    cleanup.enter_context(report_out_of_memory(setup, resolved))
    model = initial.architecture
    require_agreement(store, given, setup, resolved, model, prepared, order, schedule)
    engine = build_engine(resolved, initial.build(run, prepared), setup.device)
    del store
    cleanup.callback(engine.release)
    engine.introduce(progress.peers)
    require_shared_folder(engine, out_dir)
    # 6. The log, the state that is resumed, and the objects of the loop.
    with storing(str(out_dir), "give another --out_dir"):
        mfu = mfu_per_speed(run, initial.architecture, engine.device, engine.world_size, order)
        logger = RunLogger(
            out_dir, schedule.total_steps, engine.device, engine.rank == 0, run.profile, mfu
        )
    logger.verdicts = Verdicts(setting_of(engine, schedule))
    cleanup.callback(logger.close)
    context, resumed = build_context(
        run, prepared, order, schedule, engine, logger, progress, initial, cleanup
    )
    register_cleanup(context)
    # 7. Files of the run in out_dir, and what reads them.
    notices = advice(setup, resolved)  # of --config too, which may be replaced here
    if engine.rank == 0:
        with storing(str(out_dir), "give another --out_dir"):
            write_reference(out_dir, resolved)
            prepared.list_rejected(out_dir)
        if not keeps_tokenizer(run):
            prepared.tokenizer.save(out_dir / "tokenizer")
        context.mirror.start(context.saver.good)
        if resumed.state.step < schedule.total_steps:  # else the trackers' runs would be empty
            logger.trackers = open_trackers(run, resumed.state.step)
    # 8. The start as people and as a restart see it.
    log_run_start(context, prepared, resumed, initial, notices)
    context.mirror.report()
    record_for_restart(run, engine)
    progress.has_started = True
    return train_to_end(context, prepared, resumed, initial)


def train_to_end(
    context: RunContext, prepared: Prepared, resumed: Resumed, initial: InitialModel
) -> int:
    """Train, going back where the spike guard asks for it; return the exit status."""
    rows = len(context.held_out.in_force)
    if context.engine.rank == 0:
        log_floors(context, prepared, resumed.state.step)
    state, status, reason = train(context, resumed.state)
    while status == GO_BACK:
        context, resumed = go_back(context)
        log_start_event(context, prepared, resumed, initial)
        state, status, reason = train(context, resumed.state)
    has_grown = len(context.held_out.in_force) > rows  # validations came to read more
    if context.engine.rank == 0 and status == 0 and has_grown:
        log_floors(context, prepared, state.step)
    finish(context, state, status, reason)
    return status


def record_for_restart(run: RunConfig, engine: Engine) -> None:
    """Record what a restart on other processes has to know; collective."""
    key, resolved = "gradient_accumulation_steps", engine.resolved
    by_file = resolved.path if resolved.sources.get(key) == resolved.path else ""
    origin, _, field = run.sources["accumulation_steps"].rpartition(": ")
    split_unit = 0
    if run.stages and run.split_batches:
        from minimind.config.stages import read_stages

        own = [stage.batch_size for stage in read_stages(run.stages).stages]
        split_unit = gcd(*(rows or run.batch_size for rows in own)) if any(own) else 0
    record_layout(
        engine.rank,
        Layout(
            launch=engine.from_rank_0(secrets.token_hex(8)),
            out_dir=str(Path(run.out_dir).absolute()),
            world_size=engine.world_size,
            group_size=run.parallel(engine.world_size).group_size,
            micro_batch_rows=run.micro_batch_rows(engine.world_size),
            accumulation_steps=run.accumulation_steps,
            batch_size=run.batch_size,
            split_batches=run.split_batches,
            resume=run.resume,
            fixed_by=by_file or (origin if field == key else ""),
            split_unit=split_unit,
        ),
    )


def build_context(
    run: RunConfig,
    prepared: Prepared,
    order: Order,
    schedule: Schedule,
    engine: Engine,
    logger: RunLogger,
    progress: Progress,
    initial: InitialModel,
    cleanup: ExitStack,
) -> tuple[RunContext, Resumed]:
    """Resume the state and build the loop's objects.

    After it returns, a stop signal takes effect at the end of a step.
    """
    root = Path(run.out_dir) / "checkpoints"
    model_identity = initial.architecture.identity(run)
    run_identity = identity(run, model_identity, prepared, schedule, order, engine)
    ranks = engine.another_group(CHECKPOINT_TIMEOUT_S)
    mirror = build_mirror(run, ranks, logger)
    cleanup.callback(mirror.close)
    mirror.restore(run_identity)
    with damage_logged(logger):
        resumed = resume(engine, ranks, root, run.resume, run_identity, run.allowed_changes())
    if resumed.path:
        order = resume_order(order, resumed)
    require_length(run, resumed.state.step, schedule, order)
    saver = Saver(
        engine,
        ranks,
        root,
        Rules.of(vars(run)),
        {**facts(run, run_identity, order, engine), "init_from": initial.origin(resumed.manifest)},
        sidecar_files(prepared, engine),
        run.async_save,
        run.save_minutes,
    )
    saver.good = resumed.state.step if run.verify_interval else None
    saver.had_rules = had_rules(root.parent, saver.rules)  # before config.yaml is replaced
    mirror.begin(resumed)
    batches = build_batches(run, engine, prepared, order)
    held_out = held_out_of(run, prepared, order, schedule.total_steps)
    held_out.begin_with(resumed.manifest.get(EVAL_ROWS, 0))
    context = RunContext(
        run=run,
        schedule=schedule,
        engine=engine,
        batches=batches,
        held_out=held_out,
        samples=build_samples(run, prepared.tokenizer),
        scores=build_scores(run, prepared, progress.stop),
        saver=saver,
        mirror=mirror,
        trace=build_trace(run, engine.rank, engine.device),
        communication=engine.instrument_collectives() if run.profile else None,
        logger=logger,
        corruption=build_corruption_check(run, engine, resumed.state.step),
        spikes=build_spike_guard(run, engine, batches, prepared, logger, resumed),
        skipped=SkippedSteps(run, engine, order, batches.at, prepared.tokenizer.decode, logger),
        stop=progress.begin(),
        progress=progress,
        cleanup=cleanup,
    )
    return context, resumed


def finish(context: RunContext, state: TrainState, status: int, reason: str) -> None:
    """Log the end of the run and write its report; every rank leaves the process group."""
    run, logger = context.run, context.logger
    context.batches.close()
    if run.mirror:
        context.mirror.finish()
    # What was being uploaded at the last save, or was left where a start was killed after it. A
    # start that saves nothing deletes nothing by rules of its own.
    if run.mirror or context.saver.had_rules:
        context.saver.prune()
    if message := context.saver.prune_error(wait=True):
        logger.print(message)
    code = "DONE" if status == 0 else "PREEMPTED"
    end = {"code": code, "status": status, "reason": reason, "step": state.step}
    logger.event("exit", **end, **logger.unlogged_pauses())
    logger.close(timeout=run.dist_timeout / 2)  # other ranks wait at the barrier
    if status:
        command = "run the same command again"
        if run.resume != "auto":  # the same command would resume from the same checkpoint
            command = f"run it again without --resume {shlex.quote(run.resume)}"
        logger.print(f"{reason} at step {state.step}; {command} to go on")
    else:
        logger.print(f"done: {state.step} steps, {state.tokens:,} tokens; next\n{what_next(run)}")
    if context.engine.rank == 0:
        out_dir = Path(run.out_dir)
        try:
            from minimind.report.history import read_runs
            from minimind.report.page import REPORT_NAME, write_report
            from minimind.report.placement import placement

            if placed := placement(read_runs([out_dir])[0]):
                logger.print("\n".join(wrap(placed, COLUMNS, subsequent_indent="  ")))
            write_report([out_dir], out_dir / REPORT_NAME, "correct the path of --out_dir")
            logger.print(f"report {out_dir / REPORT_NAME}")
        # metrics.jsonl was removed, or the installation has changed since the start.
        except (StorageError, UsageError, ImportError) as error:
            logger.print(f"no report: {error}")
    context.engine.barrier()
    if context.progress.peers:
        context.progress.peers.close()
    leave_process_group()


def log_floors(context: RunContext, prepared: Prepared, step: int) -> None:
    """Log the floors of the rows that are validated once per text; conversations have none."""
    rows = len(context.held_out.in_force)
    if context.run.task != "pretrain" or not rows:
        return
    of_text = {"text": prepared.manifest["fingerprint"], "rows": rows}
    log = EventLog(Path(context.run.out_dir) / "metrics.jsonl")
    before = [*log.events("floors")]
    if warning := log.warning():
        context.logger.print(f"warning  {warning}")
    if before and before[-1]["step"] <= step and before[-1].items() >= of_text.items():
        return
    from minimind.train.floors import floors

    with phase("compressing the held-out text, counting n-grams"):
        found = floors(prepared, context.held_out)
    context.logger.event("floors", step=step, **of_text, **found)
