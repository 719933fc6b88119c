"""What a start decides before it trains: one function for a start, a rehearsal and a dry run."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minimind.architecture.select import Architecture, HuggingFace
from minimind.architecture.shape import trained_parameters
from minimind.checkpoint.resume import read_manifests
from minimind.checkpoint.retention import with_best
from minimind.checkpoint.run_folder import require_outputs
from minimind.config.checks import given, with_epoch
from minimind.config.deepspeed.backend_choice import Setup, read_setup
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.flags import AUTO
from minimind.config.launcher_env import Launch, read_launch
from minimind.config.origin import Origin, Rank
from minimind.config.rules import can_divide, divided, needs_text
from minimind.config.run_config import RunConfig
from minimind.config.run_record import require_rules
from minimind.config.schedule import Schedule, budget_steps
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.order import Order
from minimind.data.tokenizer.load import load_tokenizer
from minimind.engine.build import require_accepted
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.environment import environment_kept
from minimind.train.auto_values import numbers_to_resume, with_auto_values
from minimind.train.evaluate import read_sample_prompts
from minimind.train.initial_weights import InitialModel, fine_tuned, read_initial
from minimind.train.memory import Fit, largest_fit
from minimind.train.rows import plan_length, plan_rows, run_budgets
from minimind.train.text import Text, find_text, read_text, with_text

if TYPE_CHECKING:
    from minimind.train.teacher import Teacher
    from minimind.train.teacher_folder import TeacherFolder


@dataclass(frozen=True)
class Plan:
    """A run as its start decides it.

    Where raw text is not read, what it decides is open, and `prepared` and `order` are None.
    `schedule` is None if it depends on that text.
    """

    setup: Setup
    resolved: ResolvedConfig
    initial: InitialModel
    text: Text
    prepared: Prepared | None
    order: Order | None
    schedule: Schedule | None
    fit: Fit | None = None  # of the micro-batch; None if it was given
    teacher: Teacher | TeacherFolder | None = None

    @property
    def run(self) -> RunConfig:
        """All flags with their final values."""
        return self.resolved.run

    @property
    def model(self) -> Architecture:
        return self.initial.architecture

    def rows(self) -> tuple[Prepared, Order, Schedule]:
        """Return text, row order and schedule of a plan for which the text was read."""
        prepared, order, schedule = self.prepared, self.order, self.schedule
        assert prepared is not None
        assert order is not None
        assert schedule is not None
        return prepared, order, schedule

    @property
    def world_size(self) -> int:
        return self.setup.launch.world_size

    @property
    def held_out(self) -> int | None:
        """Rows that are held out; None for raw text that is not read."""
        return self.prepared and self.prepared.val.rows(self.run.max_seq_len + 1)

    @property
    def tokens(self) -> int | None:
        """Target tokens of all steps; None if they depend on raw text that is not read."""
        run = self.run
        if run.stages:
            from minimind.config.stages import plan_stages

            _, stages, _ = plan_stages(run, self.world_size, run_budgets(run, 1, self.model))
            return sum(stage.tokens for stage in stages)
        if self.schedule is None or (self.order is None and needs_text(run)):
            return None
        return self.schedule.total_steps * run.rows_per_step(self.world_size) * run.max_seq_len


def decide(run: RunConfig, launch: Launch, cleanup: ExitStack, tokenize: bool) -> Plan:
    """Decide what the flags leave open, and raise every mistake; the text is read last.

    tokenize=False reads no raw text. A copy of a prepared folder at a URL is kept until `cleanup`.
    """
    text, teacher = find_text(run, cleanup), None
    if run.teacher is not None:
        teacher = teacher_of(run)
        run = teacher.sized(run)
    saved = read_manifests(Path(run.out_dir) / "checkpoints", run.resume)
    initial = read_initial(run, text, saved)
    if teacher:
        initial = with_tokenizer_of(teacher, initial, text)
    if run.task == "sft":
        initial = fine_tuned(initial, saved)
    run, model, world_size = initial.run, initial.architecture, launch.world_size
    require_rules(run)
    if run.freeze:
        trained_parameters(run, model.sizes(run))
    resumed = None
    if (run.dtype == AUTO or run.open_flags) and (resumed := numbers_to_resume(run, saved)):
        run = resumed.with_dtype(run)
    setup = read_setup(run, launch)
    run = setup.run
    resolved = setup.resolve()
    require_accepted(resolved, setup.device)
    require_outputs(resolved)
    read_sample_prompts(run)
    traced_steps(run)
    require_tasks(run)
    require_fitting_stages(run, text, world_size)
    own_loss = None
    if run.own_loss:
        from minimind.model.own_loss import OwnLoss

        own_loss = OwnLoss.imported(run.own_loss)
    if teacher and run.tokenizer:  # before a long text is tokenized
        teacher.require_fit(run, load_tokenizer(run.tokenizer))

    prepared = read_text(run, text) if tokenize or text.folder else None
    known = with_text(resolved.run, text, prepared)
    fit, is_open = None, "batch_size" in known.open_flags
    if known.open_flags:
        manifest = prepared and prepared.manifest
        known = with_auto_values(setup, known, resolved.optimizer, manifest, model, resumed)
    if is_open and can_divide(known):
        fit = largest_fit(setup, known, resolved, model)
        if "batch_size" not in known.open_flags:
            known = divided(known, world_size, fit.rows, fit.why)
    order = schedule = None
    if prepared is not None:
        order, schedule = plan_rows(known, text, prepared, world_size, model)
        known = with_epoch(known, order.steps_per_epoch)
    elif known.stages:
        from minimind.config.stages import plan_stages

        _, _, schedule = plan_stages(known, world_size, run_budgets(known, 1, model))
    elif not needs_text(replace(known, epochs=None)):
        schedule = plan_length(known, world_size, model, None)
    if schedule is not None:
        require_traceable(known, schedule.total_steps)
    if own_loss:
        own_loss.require_sums(model.vocabulary(known))
    if teacher and prepared:
        teacher.require_fit(known, prepared.tokenizer, prepared)
    resolved = setup.complete(resolved, known, schedule)
    return Plan(setup, resolved, initial, text, prepared, order, schedule, fit, teacher)


def teacher_of(run: RunConfig) -> Teacher | TeacherFolder:
    """The model that --teacher names, or the folder with its records."""
    from minimind.data.shards.teacher_rows import NAME, TeacherRows
    from minimind.runtime.hub import local_model

    place = run.teacher or ""
    if disk.is_file((path := with_best(local_model(place))) / NAME):
        from minimind.train.teacher_folder import TeacherFolder

        return TeacherFolder(place, TeacherRows.of(path))
    from minimind.train.teacher import Teacher

    return Teacher.of(run)


def with_tokenizer_of(
    teacher: Teacher | TeacherFolder, initial: InitialModel, text: Text
) -> InitialModel:
    """Return the model with the teacher's tokenizer, where nothing else decides it."""
    run, path = initial.run, teacher.tokenizer_path
    if path is None or any((run.tokenizer, run.init_from, text.folder)):
        return initial
    by = f"--teacher {teacher.place}"
    if isinstance(initial.architecture, HuggingFace):
        initial.architecture.require_embedding_rows(load_tokenizer(path).vocab_size, by)
    return replace(initial, run=run.with_values(Origin(by, Rank.DATA), tokenizer=str(path)))


def rehearse(run: RunConfig, launch: Launch | None = None) -> Plan:
    """Return what the start of a new run decides without reading raw text.

    `launch` is that of this process unless another is given.
    """
    run = replace(run, resume="none")  # a checkpoint in the default out_dir is of another run
    with environment_kept(), ExitStack() as cleanup:
        return decide(run, launch or read_launch(os.environ), cleanup, tokenize=False)


def traced_steps(run: RunConfig) -> tuple[int, int] | None:
    """Return the first and last step of --trace_steps, or None; raise UsageError if malformed."""
    if run.trace_steps is None:
        return None
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", run.trace_steps)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise UsageError(
            f"{given(run, 'trace_steps')} is not FIRST:LAST with 1 <= FIRST <= LAST; write 10:13"
            " for steps 10 to 13"
        )
    return first, last


def require_traceable(run: RunConfig, total_steps: int) -> None:
    """Raise UsageError if the run ends before the first step of --trace_steps."""
    steps = traced_steps(run)
    if steps and steps[0] > total_steps:
        raise UsageError(
            f"{given(run, 'trace_steps')} begins after the run's last step, {total_steps}; give"
            " steps that it takes"
        )


def require_fitting_stages(run: RunConfig, text: Text, world_size: int) -> None:
    """Raise UsageError for a mistake in --stages that can be seen before the text is read.

    With --tokens_per_param the vocabulary of the text decides the length of the run. Where
    --batch_size is "auto", the size of the text may decide the steps.
    """
    if run.stages is None:
        return
    from minimind.config.stages import plan_stages, read_stages, require_stages

    if text.folder is None:
        read_stages(run.stages).require_sources([source.name for source in text.sources])
    if run.tokens_per_param is not None:
        require_stages(run, {})
        return
    budgets = budget_steps(run, 1, 1, 1)
    if "batch_size" in run.open_flags:
        require_stages(run, budgets)
        return
    run = replace(run, warmup_steps=0) if "warmup_steps" in run.open_flags else run
    plan_stages(run, world_size, budgets)


def require_tasks(run: RunConfig) -> None:
    """Raise UsageError for a task of --eval_tasks that cannot be asked, before its data is read.

    So for a --keep_best_by that is no score, if no task is a group, whose tasks are not known yet.
    """
    if run.eval_tasks is None:
        return
    from minimind.config.tasks import OWN_TASKS, require_compared, tasks_of

    has_chance, has_groups = dict[str, bool](), False
    for task in tasks_of(run):
        has_chance[task.name] = not task.is_own or OWN_TASKS[task.name].chance is not None
        if not task.is_own:
            from minimind.inference.lm_eval_tasks import require_task

            manager = require_task(task, f"{given(run, 'eval_tasks')}")
            has_groups |= task.name not in manager.all_subtasks
    if not has_groups:
        require_compared(run, has_chance)
