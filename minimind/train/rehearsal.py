"""What the start of a run decides and refuses before its long work, without training it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace

from minimind.architecture.select import Architecture
from minimind.checkpoint.run_folder import require_outputs
from minimind.config.deepspeed.backend_choice import Setup, read_setup
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.launcher_env import Launch, read_launch
from minimind.config.rules import needs_text
from minimind.config.run_config import RunConfig
from minimind.config.run_record import require_rules
from minimind.engine.build import require_accepted
from minimind.runtime.environment import environment_kept
from minimind.train.auto_values import with_dtype_of_checkpoint
from minimind.train.build import plan_length, run_budgets, with_local_folder
from minimind.train.evaluate import read_sample_prompts
from minimind.train.initial_weights import InitialModel, fine_tuned, read_initial
from minimind.train.optional import require_fitting_stages, require_tasks, traced_steps
from minimind.train.summary import Planned, dry_run_text, plan_run


def checked(run: RunConfig, launch: Launch) -> tuple[Setup, ResolvedConfig, InitialModel]:
    """Return the setup, the resolved config and the model of a run.

    Raise every mistake that is known before the text is read.
    """
    initial = fine_tuned(read_initial(run)) if run.task == "sft" else read_initial(run)
    require_rules(initial.run)
    initial = replace(initial, run=with_dtype_of_checkpoint(initial.run))
    setup = read_setup(initial.run, launch)
    run = initial.run
    resolved = setup.resolve()
    require_accepted(resolved, setup.device)
    require_outputs(resolved)
    read_sample_prompts(run)
    traced_steps(run)
    require_tasks(run)
    require_fitting_stages(run, launch.world_size)
    return setup, resolved, initial


@dataclass(frozen=True)
class Rehearsal:
    """A run as it will be, as far as that is known without reading raw text."""

    run: RunConfig  # with the numbers that text and rules decide
    tokens: int | None  # that it trains on; None if text decides that is not read
    held_out: int | None  # rows; None of raw text


def rehearse(run: RunConfig) -> Rehearsal:
    """Return what the start of a new run decides; raise what --dry_run would raise."""
    run = replace(run, resume="none")  # a checkpoint in the default out_dir is of another run
    launch = read_launch(os.environ)
    with environment_kept(), ExitStack() as cleanup:
        setup, resolved, initial = checked(with_local_folder(run, cleanup), launch)
        model = initial.architecture
        planned = plan_run(setup, resolved, model)
        dry_run_text(planned, model)
    run, held_out = planned.run, None
    if planned.manifest is not None:
        texts = (source["tokens"]["val"] for source in planned.manifest["sources"])
        held_out = sum(tokens // (run.max_seq_len + 1) for tokens in texts)
    return Rehearsal(run, _tokens(planned, model), held_out)


def _tokens(planned: Planned, model: Architecture) -> int | None:
    """Target tokens of all steps of a run; None if text decides their number and is not read."""
    run, order, world_size = planned.run, planned.order, planned.setup.launch.world_size
    if run.stages:
        from minimind.config.stages import plan_stages

        _, stages, _ = plan_stages(run, world_size, run_budgets(run, 1, model))
        return sum(stage.tokens for stage in stages)
    if order is None and needs_text(run):
        return None
    steps = plan_length(run, world_size, model, order).total_steps
    return steps * run.rows_per_step(world_size) * run.max_seq_len
