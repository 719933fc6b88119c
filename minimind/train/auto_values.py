"""Numbers for the flags that are "auto": those of the checkpoint, else those of the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from minimind.architecture.select import Architecture
from minimind.checkpoint.directory import verify
from minimind.checkpoint.resume import Manifests
from minimind.config.checks import given
from minimind.config.deepspeed.backend_choice import Setup
from minimind.config.flags import AUTO
from minimind.config.origin import DEFAULT, Origin, Rank
from minimind.config.parse import convert
from minimind.config.rules import (
    BY_EPOCHS,
    Workload,
    batch_values,
    flags_with_rules,
    most_rows,
    needs_text,
    smallest_step,
    values_by_rules,
)
from minimind.config.run_config import RunConfig
from minimind.data.rows.skip_rows import rows_of_sources
from minimind.errors import CheckpointError, UsageError
from minimind.report.formats import size
from minimind.train.rows import run_budgets


def with_auto_values(
    setup: Setup,
    known: RunConfig,
    optimizer: str,
    manifest: Mapping[str, Any] | None,
    model: Architecture,
    resumed: Numbers | None,
) -> RunConfig:
    """Return `known` with numbers for its flags that are "auto".

    `known` has what files and text decide. A number is that of the checkpoint to resume, else of
    the rule, else the default of the flag. What the text decides stays open without its `manifest`.
    Raise CheckpointError if the rows of a step of the checkpoint cannot be divided.
    """
    world_size, names = setup.launch.world_size, flags_with_rules(known, optimizer)
    sources = None if manifest is None else rows_of_sources(known, manifest)
    left_open: Sequence[str] = ()
    values: dict[str, Any] = {}
    by_rule: dict[str, Any] = {}
    origin = origin_of_rule = Origin(AUTO, Rank.RULE)

    def by_rules(run: RunConfig, names: Sequence[str]) -> tuple[dict[str, Any], Workload]:
        return values_by_rules(
            run,
            names,
            optimizer,
            world_size,
            setup.device,
            sources,
            model.parameters(run),
            lambda tokens: run_budgets(run, tokens, model),
        )

    if resumed:
        place, rows, origin = resumed.place, resumed.rows, resumed.origin
        values = {name: resumed.values[name] for name in known.open_flags if name in resumed.values}
        if known.global_batch_size is None and rows % smallest_step(known, world_size):
            divisors, remedies = _divisors(known, rows, world_size)
            raise CheckpointError(
                f"batch_size = {AUTO}: the {rows} rows of a step in {place} cannot be divided by"
                f" {divisors}; {remedies}, or give --batch_size with --allow_change batch"
            )
        if rows:
            most = most_rows(known, setup.device)
            values |= batch_values(known, world_size, rows, most)
        if "warmup_steps" in values and sources is None and needs_text(known):
            del values["warmup_steps"]  # the length of the run, which may be shorter, is not known
            left_open = ["warmup_steps"]
        elif "warmup_steps" in values:
            shorter, work = by_rules(known.with_values(origin, **values), ["warmup_steps"])
            if values["warmup_steps"] > work.steps:  # the run has become shorter
                del values["warmup_steps"]
                if "warmup_steps" in names:
                    by_rule, origin_of_rule = shorter, _origin_of_rule(work)
    elif sources is None and needs_text(known):
        left_open = names
    elif names:
        left_open = [name for name in names if sources is None and name in BY_EPOCHS]
        by_rule, work = by_rules(known, names)
        origin_of_rule = _origin_of_rule(work)
    found = {**values, **by_rule}
    decided = {*known.open_flags} - {*found} - {*left_open}
    plain = {name: getattr(known, name) for name in decided}
    run = known.with_values(DEFAULT, **plain)
    run = run.with_values(origin, **values)
    return run.with_values(origin_of_rule, **by_rule)


def _origin_of_rule(work: Workload) -> Origin:
    several = f", {work.epochs:.3g} epochs" if work.epochs > 1 else ""
    words = f"{AUTO}: {size(work.parameters)} parameters, {size(work.tokens)} tokens{several}"
    return Origin(words, Rank.RULE)


def _divisors(run: RunConfig, rows: int, world_size: int) -> tuple[str, str]:
    """What `rows` of a step are to be divided by and are not, and the ways to change that."""
    processes = run.parallel(world_size).data_size
    divisors, remedies = [], []
    if run.is_explicit("accumulation_steps"):
        divisors.append(f"{given(run, 'accumulation_steps')}")
        remedies += [given(run, "accumulation_steps").remove] * (rows % processes == 0)
    if processes > 1:
        divisors.append(f"{processes} processes")
        if rows % processes:
            instead = " instead of --accumulation_steps" * run.is_explicit("accumulation_steps")
            remedies.append(f"start processes that divide them, or give --global_batch_size {rows}")
            remedies[-1] += instead
    return " x ".join(divisors), ", or ".join(remedies)


def numbers_to_resume(run: RunConfig, saved: Manifests) -> Numbers | None:
    """Read the numbers of the checkpoint that --resume asks for; None if there is none.

    It is at --mirror if none of those here, `saved`, is as new. The resume itself reports a damaged
    one, and takes the next; files are hashed here only where that one has other numbers.
    """
    here = [
        (path, Numbers.of(run, str(path), manifest))
        for path, manifest in saved.items()
        if not isinstance(manifest, CheckpointError)
    ]
    if any(numbers.differ(here[0][1]) for _, numbers in here):
        here = [next((one for one in here if verify(one[0]) is None), here[0])]
    newest = here[0][1] if here else None
    if run.mirror is None or run.resume != "auto":
        return newest
    from minimind.checkpoint.remote_run import RemoteRun, folder_of

    remote = RemoteRun(run.mirror)
    for step in remote.published():
        if newest and step <= newest.step:
            break
        with suppress(CheckpointError):
            place = f"{remote.shown}/{folder_of(step)}"
            return Numbers.of(run, place, remote.manifest(step)[0])
    return newest


@dataclass(frozen=True)
class Numbers:
    """What a checkpoint has for the flags that are "auto": values, and the rows of a step."""

    place: str
    step: int
    values: dict[str, Any]
    rows: int

    @classmethod
    def of(cls, run: RunConfig, place: str, manifest: dict[str, Any]) -> Numbers:
        """Read a manifest; values that no flag can have are left out."""
        groups = manifest["identity"]
        saved = {**groups.get("lr", {}), **groups.get("schedule", {}), **manifest}
        saved["batch_size"] = saved.get("micro_batch_rows")
        found: dict[str, Any] = {}
        for name in (*run.open_flags, "accumulation_steps", "dtype"):
            with suppress(UsageError):
                if saved.get(name) is not None:
                    found[name] = convert(name, saved[name], place)
        micro_batches, rows = found.pop("accumulation_steps", 0), found.pop("batch_size", 0)
        group = 1
        for name in ("tensor_parallel", "sequence_parallel"):
            with suppress(UsageError):
                group *= convert(name, saved.get(name, 1), place)
        rows = rows * micro_batches * manifest["world_size"] // group
        if rows and saved.get("global_batch_size") is not None:  # without padding
            with suppress(UsageError):
                rows = convert("global_batch_size", saved["global_batch_size"], place)
        return cls(place, manifest["step"], found, rows)

    @property
    def origin(self) -> Origin:
        return Origin(f"{AUTO}: as in {self.place.rpartition('/')[2]}", Rank.RULE)

    def differ(self, other: Numbers) -> bool:
        return (self.values, self.rows) != (other.values, other.rows)

    def with_dtype(self, run: RunConfig) -> RunConfig:
        """Replace `dtype = auto` by the dtype of the checkpoint.

        The launcher and the DeepSpeed file replace it, as they replace a default.
        """
        if run.dtype != AUTO:
            return run
        return run.with_values(self.origin, dtype=self.values.get("dtype", AUTO))
