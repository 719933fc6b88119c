"""`minimind data logits`: what a teacher says of the rows of a run, written once for many runs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minimind import __version__
from minimind.config.checks import given
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.paths import naming_flags
from minimind.data.shards.teacher_rows import NAME, ROWS, SUMS, TeacherRows
from minimind.data.tokenizer.vocabulary import TOKENIZER_FILES
from minimind.engine.engine import compute_as, marked_inputs
from minimind.errors import NumericError, UsageError
from minimind.runtime import disk
from minimind.runtime.device import set_numerics
from minimind.runtime.durable_files import canonical_json, mebibytes, write_durably
from minimind.runtime.environment import environment_kept
from minimind.runtime.output_folder import NewFolder
from minimind.train.inputs import require_inputs
from minimind.train.start import Plan, decide
from minimind.train.teacher import Teacher
from minimind.train.teacher_folder import TOKENIZER, facts_of

PROGRESS = "progress.json"  # of the draft
OWN = (NAME, ROWS, SUMS, *(f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES))


def record_teacher(argv: Sequence[str], out: Path, force: bool, top_k: int) -> None:
    """Write the folder for the run of these flags, and print its size."""
    # Checkpoints in its out_dir are no matter, nor is how processes share a matrix.
    run = replace(parse_flags(argv), resume="none", tensor_parallel=1)
    if run.teacher is None:
        raise UsageError("no teacher was named; give --teacher PLACE among the flags of the run")
    path, author = disk.resolve(out.expanduser()), "minimind data logits"
    folder = NewFolder(path, force, OWN, author, lambda path: disk.is_file(path / NAME))
    folder.require_free()
    with naming_flags(vars(run)), environment_kept(), ExitStack() as cleanup:
        require_inputs(run)
        _write(decide(run, read_launch(os.environ), cleanup, tokenize=True), folder, top_k)


def _write(plan: Plan, folder: NewFolder, top_k: int) -> None:
    run, (prepared, _, _), teacher = plan.run, plan.rows(), plan.teacher
    if not isinstance(teacher, Teacher):
        raise UsageError(f"{given(run, 'teacher')} has records already; name the teacher itself")
    vocab_size = prepared.tokenizer.vocab_size
    if top_k > vocab_size:
        raise UsageError(f"--top_k {top_k}: the tokenizer has {vocab_size} ids; give at most these")
    own = {"teacher": teacher.digest, "dtype": run.dtype, "top_k": top_k, "vocab_size": vocab_size}
    facts = facts_of(run, prepared.tokenizer, prepared) | own
    device = torch.device(plan.setup.device)
    set_numerics(device.type, run.deterministic, run.tf32)
    distillation = teacher.distillation(run, prepared.tokenizer.eos_id)
    compute_as(run, distillation.teacher, device)
    size, n_rows, targets, mass, done = run.micro_batch_rows(1), facts["rows"], 0, 0.0, 0

    def records() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal targets, mass
        for first in tqdm(range(done, n_rows, size), "micro-batches", disable=None):
            numbers = np.arange(first, min(first + size, n_rows))
            rows = torch.from_numpy(prepared.train.read_rows(numbers, run.max_seq_len + 1))
            inputs = marked_inputs(rows.to(device), has_starts=run.task == "sft")
            recorded = distillation.recorded(inputs, top_k, vocab_size)
            log_probs, ids = (tensor.cpu() for tensor in recorded)
            if not log_probs.isfinite().all():
                raise NumericError(
                    f"{given(run, 'teacher')}: its probabilities in {run.dtype} are not finite in"
                    f" rows {numbers[0]} to {numbers[-1]}; give another --dtype or teacher"
                )
            of_targets = log_probs[rows[:, 1:] >= 0]
            targets += len(of_targets)
            mass += float(of_targets[:, :-1].exp().sum(dtype=torch.float64))
            yield log_probs, ids

    # A draft is continued where these are equal. --batch_size is left out: it may have to be lower.
    means = [__version__, torch.__version__, device.type, run.deterministic, run.tf32]
    config = teacher.weights.config.to_json_string()
    key = canonical_json({"facts": facts, "means": means, "config": config})
    started, rows = time.perf_counter(), TeacherRows(folder.path, facts)
    with folder.written_aside(rows.bytes, key) as draft:
        prepared.tokenizer.save(draft / TOKENIZER)
        progress = draft / PROGRESS
        if disk.exists(progress):
            done, targets, mass = json.loads(progress.read_bytes())
            print(f"{draft} has {done:,} of {n_rows:,} rows; the others follow")

        def synced(rows: int) -> None:
            write_durably(progress, canonical_json([rows, targets, mass]))

        replace(rows, folder=draft).write(records(), done, synced)
        progress.unlink()
    print(
        f"{n_rows:,} rows of {run.max_seq_len} targets in {time.perf_counter() - started:.1f} s:"
        f" {mebibytes(rows.bytes)}, {rows.row_bytes / run.max_seq_len:.0f} bytes a target;"
        f" {top_k} of {vocab_size:,} ids have {mass / max(1, targets):.1%} of the probability\n"
        f"done: --teacher {folder.path}"
    )
