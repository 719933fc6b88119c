"""A run from its configuration to its end: builds what the loop needs, in order."""

from __future__ import annotations

import gc
import math
import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from minimind.checkpoint.directory import OWNER, published_checkpoints
from minimind.checkpoint.identity import identity
from minimind.checkpoint.resume import Resumed, TrainState, damage_logged, resume, resume_order
from minimind.checkpoint.retention import Rules, had_rules, saved_in
from minimind.checkpoint.run_folder import (
    lock_out_dir,
    recorded_flags,
    tokenizer_kept,
    write_reference,
)
from minimind.checkpoint.saver import Saver, sidecar_files
from minimind.config.deepspeed.backend_choice import advice
from minimind.config.flags import FLAGS
from minimind.config.launcher_env import Launch, planned_launch, read_launch
from minimind.config.origin import Origin, Rank
from minimind.config.run_config import RunConfig
from minimind.config.schedule import Schedule
from minimind.data.rows.order import Order
from minimind.engine.build import (
    Engine,
    build_engine,
    keep_freed_memory,
    leave_process_group,
    print_collectives,
)
from minimind.errors import HALVED, MemoryFull, StorageError, UsageError
from minimind.report.run_logger import RunLogger
from minimind.report.slowness import Verdicts
from minimind.runtime import disk
from minimind.runtime.device import HOST, accelerator, device_kind
from minimind.runtime.durable_files import storing
from minimind.runtime.event_log import EventLog
from minimind.runtime.exit import log_end
from minimind.runtime.heartbeat import Layout, record_layout
from minimind.runtime.process import Progress
from minimind.runtime.terminal import folded, phase, screen_columns
from minimind.train.agreement import (
    meet,
    require_agreement,
    require_shared_folder,
    with_common_dtype,
    with_common_fit,
)
from minimind.train.evaluate import build_samples, held_out_of
from minimind.train.failures import SkippedSteps
from minimind.train.loop import GO_BACK, RunContext, register_cleanup, train
from minimind.train.memory import report_out_of_memory, too_large
from minimind.train.rows import build_batches
from minimind.train.run_start import COLUMNS, log_run_start, log_start_event
from minimind.train.speed import mfu_per_speed, setting_of
from minimind.train.start import Plan, decide, traced_steps
from minimind.train.what_next import best_line, what_next

if TYPE_CHECKING:
    from minimind.train.own_code import Hook

# For reading and writing: a disk may be slow, and a dead rank is detected by other means.
CHECKPOINT_TIMEOUT_S = 3600


def pretrain(run: RunConfig, progress: Progress, hooks: Mapping[str, Hook] | None = None) -> int:
    """Train until the run ends or is asked to stop; return 0 or 75. --dry_run only prints.

    `require_inputs` and `require_out_dir` have passed. `hooks` are the functions of the caller, by
    name.
    """
    progress.stop.limit(run.max_minutes)
    launch, fewest = read_launch(os.environ), math.inf
    while not run.dry_run:
        try:
            with ExitStack() as cleanup:
                return train_planned(run, launch, progress, cleanup, hooks)
        except MemoryFull as error:
            # As many rows again: the record of them could not be written.
            rows = error.halved["micro_batch_rows"] if error.halved else fewest
            if rows >= fewest or not error.goes_on:
                raise
            fewest = rows
            log_halved(run, progress, error)
            print(f"warning  step {progress.step}: {error}", file=sys.stderr, flush=True)
        run = begin_anew(run, progress)
    with ExitStack() as cleanup:
        from minimind.train.dry_run import dry_run_text

        launch = planned_launch(launch, os.environ)
        plan = decide(run, launch, cleanup, tokenize=False)
        if launch.rank == 0:
            require_place_of_mirror(run, is_start=False)
            print(dry_run_text(plan))
        return 0


def log_halved(run: RunConfig, progress: Progress, error: MemoryFull) -> None:
    """Record that the next start takes a smaller micro-batch, if it does."""
    if error.halved:
        fields = {"step": progress.step, **error.halved}
        log_end(Path(run.out_dir), fields, str(error), event=HALVED)


def begin_anew(run: RunConfig, progress: Progress) -> RunConfig:
    """Free what a run that ended in this process has held; return the flags with which it goes on.

    They resume from a checkpoint that it has saved.
    """
    leave_process_group()
    gc.collect()
    if (kind := accelerator(run.device)).is_available():
        kind.begin_anew()
    saved = published_checkpoints(Path(run.out_dir) / "checkpoints")
    if run.resume != "auto" and saved:
        run = run.with_values(Origin("the checkpoint of this run", Rank.FLAG), resume="auto")
    progress.has_started = progress.is_training = False
    return run


def require_place_of_mirror(run: RunConfig, is_start: bool) -> None:
    """Raise LockedError if out_dir is a mirror; at a start, too, if --mirror cannot be this run's.

    Raise StorageError if nothing can be written to the URL.
    """
    out_dir = Path(run.out_dir)
    if run.mirror is None and not disk.is_file(out_dir / OWNER):
        return
    from minimind.checkpoint.mirror import require_mirror, require_no_mirror

    require_no_mirror(out_dir, run.mirror)
    if is_start and run.mirror is not None:
        require_mirror(run.mirror, out_dir, run.resume)


def train_planned(
    given: RunConfig,
    launch: Launch,
    progress: Progress,
    cleanup: ExitStack,
    hooks: Mapping[str, Hook] | None,
) -> int:
    """Decide, build the engine, train; `cleanup` closes what is opened.

    `given` has the flags as parsed.
    """
    # 1. The folder of the run. One in use is refused before the long work.
    out_dir, is_rank_0 = Path(given.out_dir), launch.rank == 0
    if is_rank_0:
        require_place_of_mirror(given, is_start=True)
        if progress.lock is None and disk.exists(out_dir):
            progress.lock = lock_out_dir(out_dir)
    # 2. Everything that the flags leave open. The text is tokenized here.
    plan = decide(given, launch, cleanup, tokenize=True)
    if is_rank_0 and progress.lock is None:
        progress.lock = lock_out_dir(out_dir)
    progress.out_dir = out_dir
    # 3. The engine, with its process group, of ranks that train the same run.
    store = meet(plan.setup, given.dist_timeout)
    plan = with_common_dtype(store, plan)
    plan = with_common_fit(store, plan)
    require_agreement(store, given, plan)
    run, (prepared, order, schedule) = plan.run, plan.rows()
    cleanup.enter_context(report_out_of_memory(plan.setup, plan.resolved))
    # A model that is built after DeepSpeed's engine is divided at stage 3.
    distillation = plan.teacher and plan.teacher.distillation(run, prepared.tokenizer.eos_id)
    engine = build_engine(plan.resolved, plan.initial.build(run, prepared), plan.setup.device)
    if distillation:
        engine.learn_from(distillation)
    del store
    if engine.kind is HOST:
        cleanup.callback(keep_freed_memory, os.environ, keeps=False)
    cleanup.callback(engine.release)
    engine.introduce(progress.peers)
    require_shared_folder(engine, out_dir)
    # 4. The log, the state that is resumed, and the objects of the loop.
    with storing(str(out_dir), "give another --out_dir"):
        mfu = mfu_per_speed(run, plan.model, engine.device, engine.world_size, order)
        logger = RunLogger(
            out_dir, schedule.total_steps, engine.device, engine.rank == 0, run.profile, mfu
        )
    logger.verdicts = Verdicts(setting_of(engine, schedule))
    cleanup.callback(logger.close)
    context, resumed = build_context(plan, engine, logger, progress, cleanup)
    if hooks:
        from minimind.train.own_code import Hooks

        context = replace(context, hooks=Hooks(hooks, engine, logger))
    register_cleanup(context)
    # 5. Files of the run in out_dir, and what reads them.
    notices = [*advice(plan.setup, plan.resolved)]  # of --config too, which may be replaced here
    notices += filter(None, [too_large(plan.setup, plan.resolved)])
    if engine.rank == 0:
        with storing(str(out_dir), "give another --out_dir"):
            write_reference(out_dir, plan.resolved)
            prepared.list_rejected(out_dir)
        if tokenizer_kept(run) is None:
            prepared.tokenizer.save(out_dir / "tokenizer")
        if context.mirror:
            context.mirror.start(context.saver.good)
        # Else the trackers' runs are empty.
        has_steps = resumed.state.step < context.schedule.total_steps
        if run.trackers() and has_steps:
            from minimind.report.trackers import open_trackers

            logger.trackers = open_trackers(run, resumed.state.step, recorded_flags(run))
    # 6. The start as people and as a restart see it.
    log_run_start(context, resumed, notices)
    if context.mirror:
        context.mirror.report()
    record_for_restart(plan, engine)
    progress.has_started = True
    with report_out_of_memory(plan.setup, plan.resolved, plan.fit):
        return train_to_end(context, resumed)


def train_to_end(context: RunContext, resumed: Resumed) -> int:
    """Train, going back where the spike guard asks for it; return the exit status."""
    rows = len(context.held_out.in_force)
    if context.engine.rank == 0:
        log_floors(context, resumed.state.step)
    state, status, reason = train(context, resumed.state)
    while status == GO_BACK:
        from minimind.train.rollback import go_back

        context, resumed = go_back(context)
        log_start_event(context, resumed)
        state, status, reason = train(context, resumed.state)
    has_grown = len(context.held_out.in_force) > rows  # validations came to read more
    if context.engine.rank == 0 and status == 0 and has_grown:
        log_floors(context, state.step)
    finish(context, state, status, reason)
    return status


def record_for_restart(plan: Plan, engine: Engine) -> None:
    """Record what a restart on other processes has to know; collective."""
    run, resolved, fixed_by = plan.run, engine.resolved, ""
    key = resolved.sources.get("gradient_accumulation_steps")
    if key is not None and key.rank is Rank.DEEPSPEED:
        fixed_by = resolved.path
    elif run.sources["accumulation_steps"].rank is Rank.LAUNCHER:
        fixed_by = plan.setup.launch.source
    split_unit = 0
    if run.stages and run.split_batches:
        from minimind.config.stages import read_stages

        own = [stage.batch_size for stage in read_stages(run.stages).stages]
        split_unit = gcd(*(rows or run.batch_size for rows in own)) if any(own) else 0
    has_other = run.global_batch_size or any(map(run.meets, FLAGS["global_batch_size"].excludes))
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
            fixed_by=fixed_by,
            split_unit=split_unit,
            global_batch_size=run.global_batch_size or 0,
            paddable_rows=0 if has_other else run.rows_per_step(engine.world_size),
        ),
    )


def build_context(
    plan: Plan, engine: Engine, logger: RunLogger, progress: Progress, cleanup: ExitStack
) -> tuple[RunContext, Resumed]:
    """Resume the state and build the loop's objects.

    After it returns, a stop signal takes effect at the end of a step.
    """
    run, root = plan.run, Path(plan.run.out_dir) / "checkpoints"
    prepared, order, schedule = plan.rows()
    run_identity = identity(run, plan.model.identity(run), prepared, schedule, order, engine)
    ranks = engine.another_group(CHECKPOINT_TIMEOUT_S)
    mirror = verified = None
    if run.mirror is not None:
        from minimind.checkpoint.mirror import Mirror

        mirror = Mirror(run, run.mirror, ranks, logger)
        cleanup.callback(mirror.close)
        verified = mirror.restore(run_identity)
    with damage_logged(logger):
        changeable = run.allowed_changes()
        resumed = resume(
            engine,
            ranks,
            root,
            run.resume,
            run_identity,
            changeable,
            verified=verified,
            accumulation_steps=0 if run.global_batch_size else run.accumulation_steps,
        )
    if resumed.path:
        order = resume_order(order, resumed)
    require_length(run, resumed.state.step, schedule, order)
    saver = Saver(
        engine,
        ranks,
        root,
        Rules.of(vars(run)),
        sidecar_files(prepared, engine),
        run.async_save,
        run.save_minutes,
    )
    saver.good = resumed.state.step if run.verify_interval else None
    saver.had_rules = had_rules(root.parent, saver.rules)  # before config.yaml is replaced
    if mirror:
        mirror.begin(resumed)
    batches = build_batches(run, engine, prepared, order)
    held_out = held_out_of(run, prepared, order, schedule.total_steps)
    held_out.begin_with(resumed.eval_rows)
    if held_out.loss_weights is not None:
        engine.weigh_sources(held_out.loss_weights)
    patience = scores = trace = corruption = fingerprints = spikes = None
    if run.patience is not None:
        from minimind.train.patience import Patience

        patience = Patience(run, schedule, logger).restored(resumed, ranks)
    if run.eval_tasks is not None:
        from minimind.train.scores import Scores

        scores = Scores.of(run, prepared, progress.stop)
    if steps := traced_steps(run):
        from minimind.report.trace import Trace

        trace = Trace(steps, root.parent, engine.rank, device_kind(engine.device))
    if run.verify_interval:
        from minimind.recovery.corruption import CorruptionCheck

        corruption = CorruptionCheck(run, engine, resumed.state.step)
    if run.fingerprints:
        from minimind.recovery.fingerprints import Fingerprints

        fingerprints = Fingerprints(engine, batches)
    if run.guard:
        from minimind.recovery.spikes import SpikeGuard

        spikes = SpikeGuard.of(run, engine, batches, prepared, logger, resumed)
    context = RunContext(
        plan=plan,
        identity=run_identity,
        init_from=plan.initial.origin(resumed.manifest),
        prepared=prepared,
        engine=engine,
        batches=batches,
        held_out=held_out,
        samples=build_samples(run, prepared.tokenizer),
        scores=scores,
        patience=patience,
        hooks=None,
        saver=saver,
        mirror=mirror,
        trace=trace,
        communication=engine.instrument_collectives() if run.profile else None,
        logger=logger,
        corruption=corruption,
        fingerprints=fingerprints,
        spikes=spikes,
        skipped=SkippedSteps(run, engine, order, batches.at, prepared.tokenizer.decode, logger),
        stop=progress.begin(),
        progress=progress,
        cleanup=cleanup,
    )
    return context, resumed


def require_length(run: RunConfig, step: int, schedule: Schedule, order: Order) -> None:
    """Raise UsageError if the resumed step is past the run's end, or the end is undefined.

    After a change of batch size or text, steps differ in size and --epochs has no meaning.
    """
    if order.origin.step and (run.epochs is not None or run.max_steps is None):
        raise UsageError(
            f"the batch, the text or the rows left out were changed at step {order.origin.step}, so"
            " that --epochs and budgets no longer determine the number of steps; give --max_steps"
            " instead, counted from step 0"
        )
    if step > schedule.total_steps:
        raise UsageError(
            f"the checkpoint is already at step {step}, and the run has {schedule.total_steps}"
            f" steps ({run.sources['max_steps']}); raise --max_steps or --epochs"
        )


def finish(context: RunContext, state: TrainState, status: int, reason: str) -> None:
    """Log the end of the run and write its report; every rank leaves the process group."""
    run, logger = context.run, context.logger
    context.batches.close()
    if context.mirror:
        context.mirror.finish()
    # What was being uploaded or read at the last save, or was left where a start was killed after
    # it. A start that saves nothing deletes nothing by rules of its own.
    if context.saver.has_saved or context.saver.had_rules:
        context.saver.prune()
    if message := context.saver.prune_error(wait=True):
        logger.print(message)
    code = "DONE" if status == 0 else "PREEMPTED"
    end = {"code": code, "status": status, "reason": reason, "step": state.step}
    logger.event("exit", **end, **logger.unlogged_pauses())
    logger.close(timeout=run.dist_timeout / 2)  # other ranks wait at the barrier
    print_collectives(context.engine.resolved)
    if status:
        command = "run the same command again"
        if run.resume != "auto":  # the same command would resume from the same checkpoint
            command = f"run it again without --resume {shlex.quote(run.resume)}"
        logger.print(f"{reason} at step {state.step}; {command} to continue")
    else:
        tokens = f"{state.tokens:,} tokens"
        logger.print(f"{reason}: {state.step} steps, {tokens}; next\n{what_next(run)}")
    if context.engine.rank == 0:
        out_dir = Path(run.out_dir)
        try:
            best = best_line(run, saved_in(context.saver.root), state.step)
            if best and status == 0:
                logger.print(best)
            from minimind.report.history import read_runs
            from minimind.report.page import REPORT_NAME, write_report
            from minimind.report.placement import placement

            if placed := placement(read_runs([out_dir])[0]):
                logger.print("\n".join(folded(placed, 2, screen_columns(COLUMNS))))
            write_report([out_dir], out_dir / REPORT_NAME, "correct the path of --out_dir")
            logger.print(f"report {out_dir / REPORT_NAME}")
        # metrics.jsonl was removed, or the installation has changed since the start.
        except (StorageError, UsageError, ImportError) as error:
            logger.print(f"no report: {error}")
    context.engine.barrier()
    if context.progress.peers:
        context.progress.peers.close()
    leave_process_group()


def log_floors(context: RunContext, step: int) -> None:
    """Log the floors of the rows that are validated once per text; conversations have none."""
    prepared, rows = context.prepared, len(context.held_out.in_force)
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
