"""Numbers for the flags that are "auto": those of the checkpoint, else those of the rules."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from minimind.architecture.select import Architecture
from minimind.checkpoint.directory import read_manifest
from minimind.checkpoint.resume import requested_checkpoints
from minimind.config.deepspeed.backend_choice import Setup
from minimind.config.flags import AUTO
from minimind.config.parse import convert
from minimind.config.rules import (
    BY_EPOCHS,
    Workload,
    batch_values,
    flags_with_rules,
    suited_rows,
    suited_values,
)
from minimind.config.run_config import RunConfig
from minimind.config.schedule import planned_decay, run_length
from minimind.errors import CheckpointError, UsageError
from minimind.report.formats import size
from minimind.train.build import run_budgets


def with_auto_values(
    setup: Setup, known: RunConfig, optimizer: str, n_rows: int | None, model: Architecture
) -> RunConfig:
    """Return the run of `setup` with numbers for the flags that are "auto" in `known`.

    `known` has what files and text decide. The numbers are those of the checkpoint from which the
    run resumes, else those of the rules, else the plain ones of the flags. What is decided by
    epochs stays open without `n_rows`, the rows of the text.
    """
    world_size, decided = setup.launch.world_size, known.open_flags
    values: dict[str, Any] = {}
    rows, source = 0, AUTO
    unit = known.parallel(world_size).data_size
    unit *= known.accumulation_steps if known.is_explicit("accumulation_steps") else 1
    if saved := _checkpoint_to_resume(known):
        path, values, rows = saved
        names, source = [*values, *(["batch_size"] if rows else [])], f"{AUTO}: as in {path.name}"
        if rows % unit:
            raise UsageError(
                f"batch_size = {AUTO}: the {rows} rows of a step in {path} cannot be divided over"
                f" {unit} processes and micro-batches; start processes that divide them, or give"
                " --batch_size with --allow_change batch"
            )
    elif names := flags_with_rules(known, optimizer):
        if n_rows is None:
            decided = [name for name in decided if name not in BY_EPOCHS]
        of_text = sys.maxsize if n_rows is None else n_rows

        def length(rows: int) -> int:
            """Steps of so many rows, of all stages alike."""
            budgets = run_budgets(known, rows * known.max_seq_len, model)
            is_staged = known.stages is not None and bool(budgets)
            limited = replace(known, max_steps=None) if is_staged else known  # other steps
            return run_length(limited, of_text // rows, budgets)

        if "batch_size" in names:
            # With --max_steps the batch decides the tokens: those of the plain one count.
            rows = unit if known.max_steps is None else unit * known.batch_size
            rows = min(rows, max(unit, of_text))
            tokens = length(rows) * rows * known.max_seq_len
            most = min(of_text, tokens // known.max_seq_len)
            rows = suited_rows(unit, known.max_seq_len, tokens, most)
        else:
            rows = known.rows_per_step(world_size)
        steps = length(rows)
        decay = planned_decay(known, steps)
        tokens = steps * rows * known.max_seq_len
        if known.stages is not None:
            tokens, steps, decay = _of_stages(known, setup, rows, model)
        work = Workload(
            parameters=model.parameters(known),
            tokens=tokens,
            epochs=tokens / max(1, of_text * known.max_seq_len),
            steps=steps - decay,
        )
        values, source = suited_values(set(names) & set(decided), work), f"{AUTO}: {_text(work)}"
    if "batch_size" in names:
        values |= batch_values(known, world_size, rows, setup.device)
    plain = {name: getattr(known, name) for name in decided if name not in values}
    return setup.run.with_values("default", **plain).with_values(source, **values)


def _text(work: Workload) -> str:
    several = f", {work.epochs:.3g} epochs" if work.epochs > 1 else ""
    return f"{size(work.parameters)} parameters, {size(work.tokens)} tokens{several}"


def _of_stages(
    run: RunConfig, setup: Setup, rows: int, model: Architecture
) -> tuple[int, int, int]:
    """Tokens and steps of the stages of a run of `rows`, and the steps of the decay."""
    from minimind.config.stages import plan_stages

    world_size = setup.launch.world_size
    values = {**batch_values(run, world_size, rows, setup.device), "warmup_steps": 0}
    budgets = run_budgets(run, 1, model)
    _, stages, schedule = plan_stages(run.with_values(AUTO, **values), world_size, budgets)
    return sum(one.tokens for one in stages), schedule.total_steps, schedule.decay_steps


def _checkpoint_to_resume(run: RunConfig) -> tuple[Path, dict[str, Any], int] | None:
    """The checkpoint that --resume asks for, its numbers for open flags, and the rows of a step.

    None if there is none. The resume itself reports a damaged one, and takes the next.
    """
    for path in requested_checkpoints(Path(run.out_dir) / "checkpoints", run.resume):
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            return path, *_numbers(run, path, manifest)
    return None


def _numbers(run: RunConfig, path: Path, manifest: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The numbers of a manifest for open flags, without values that no flag can have."""
    groups = manifest["identity"]
    saved = {**groups.get("lr", {}), **groups.get("schedule", {}), **manifest}
    saved["batch_size"] = saved.get("micro_batch_rows")
    found: dict[str, Any] = {}
    for name in (*run.open_flags, "accumulation_steps"):
        with suppress(UsageError):
            if saved.get(name) is not None:
                found[name] = convert(name, saved[name], str(path))
    micro_batches, rows = found.pop("accumulation_steps", 0), found.pop("batch_size", 0)
    group = 1
    for name in ("tensor_parallel", "sequence_parallel"):
        with suppress(UsageError):
            group *= convert(name, saved.get(name, 1), str(path))
    return found, rows * micro_batches * manifest["world_size"] // group
