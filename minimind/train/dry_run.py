"""What --dry_run prints: the settings, length and cost of a run that is not started."""

from __future__ import annotations

from minimind.config.deepspeed.backend_choice import advice
from minimind.engine.optimizers import mup_line
from minimind.report.formats import count
from minimind.runtime.urls import is_url, masked
from minimind.train.memory import too_large
from minimind.train.rows import run_budgets
from minimind.train.run_start import settings_tables
from minimind.train.start import Plan


def dry_run_text(plan: Plan) -> str:
    """Return the settings and the estimated cost of the run."""
    run, model = plan.run, plan.model
    flags, *deepspeed = settings_tables(plan.resolved)
    tables = [flags]
    if plan.prepared is not None:
        row_tokens = run.max_seq_len + 1
        lines = [f"data: {' '.join(plan.text.names)}"]
        for split, part in plan.prepared.manifest["splits"].items():
            lines.append(
                f"{split:<6} {part['tokens']:>14,} tokens, {part['documents']:,} documents, about"
                f" {part['tokens'] // row_tokens:,} rows of {row_tokens}"
            )
        tables.append("\n".join(lines))
    if urls := [masked(path) for path in plan.text.paths if is_url(path)]:
        tables.append(
            f"data: what {' '.join(urls)} holds is read by the run itself, not by this check"
        )
    tables += [*deepspeed, *filter(None, [_length(plan)])]
    from minimind.architecture.plan import plan_text

    costs = model.costs(run) or plan_text(
        run, plan.world_size, plan.resolved.config, device=plan.setup.device
    )
    own = mup_line(run), too_large(plan.setup, plan.resolved)
    notices = [*filter(None, own), *advice(plan.setup, plan.resolved, False)]
    if "batch_size" in run.open_flags:
        notices.append(
            f"auto: {', '.join(run.open_flags)} will be chosen from the text; what follows is for"
            f" --batch_size {run.batch_size}"
            + (f", of at most {fit.rows:,} at once, {fit.why}" if (fit := plan.fit) else "")
        )
    return "\n\n".join([*tables, *notices, costs])


def _length(plan: Plan) -> str:
    """Steps, tokens and learning rate of the run or of its stages; empty if raw text decides."""
    run, order, schedule = plan.run, plan.order, plan.schedule
    if schedule is None:
        return ""
    rate = [f"rate: {schedule}"] if plan.resolved.scheduler is None else []  # else DeepSpeed's
    if run.stages:
        from minimind.config.stages import plan_stages, stage_text
        from minimind.data.rows.stages import StagedOrder, stages_table

        if plan.prepared is not None:
            assert isinstance(order, StagedOrder)
            names = [source["name"] for source in plan.prepared.manifest["sources"]]
            table = stages_table(order, names)
        else:
            budgets = run_budgets(run, 1, plan.model)
            table = [stage.facts() for stage in plan_stages(run, plan.world_size, budgets)[1]]
        return "\n  ".join(["stages:", *map(stage_text, table), *rate])
    steps, tokens = schedule.total_steps, run.rows_per_step(plan.world_size) * run.max_seq_len
    lines = [f"length: {steps:,} steps of {tokens:,} tokens, {steps * tokens:,} tokens"]
    if order is not None:
        lines.append(f"{count(order.steps_per_epoch, 'step')} an epoch")
    elif run.epochs is not None:
        lines.append(f"or {run.epochs} passes over the text, if they are fewer steps")
    budgets = run_budgets(run, tokens, plan.model)
    lines += [f"{name} = {getattr(run, name):g} is {n:,} steps" for name, n in budgets.items()]
    return "\n  ".join([*lines, *rate])
