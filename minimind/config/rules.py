"""Rules for "auto": batch, learning rate and weight decay by parameters, tokens and epochs.

They hold for AdamW from random weights, that of the batch for Muon, too; where they do not, "auto"
stands for the plain number of the flag. The exponents of batch and rate are those of Li et al.
(2025), arXiv 2503.04715; the rest is fitted to the runs of benchmarks/default_rules.py. The decay
of several passes is fitted to those of benchmarks/auto_values.py, too, and Muon's batch to those of
docs/measurements.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minimind.config.flags import AUTO
from minimind.config.origin import OPEN, Origin, Rank
from minimind.config.run_config import RunConfig
from minimind.config.schedule import planned_decay, run_length

# Ends of the runs that the rules are fitted to, beyond which the numbers stay as they are.
FEWEST_PARAMETERS, FEWEST_TOKENS, MOST_EPOCHS = 278_976, 2**18, 12.0
HIGHEST_RATE = 6e-3  # above it, small models became unstable
# Tokens of a micro-batch, above which a process accumulates: larger ones are slower on a CPU, and
# their speed on a GPU is not measured (docs/measurements.md).
MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
UNKNOWN_TOKENS = 8192  # where the memory, or what a row takes of it, is not known
# Documents are held out by their hashes: where 5 are expected, none is once in 150 texts.
HELD_OUT_DOCUMENTS, FEWEST_DOCUMENTS = 5, 50


@dataclass(frozen=True)
class Workload:
    """What the rules read."""

    parameters: int
    tokens: int  # that the run trains on
    epochs: float  # passes over the text
    steps: int  # in which the rate may warm up: those before a decay of wsd


@dataclass(frozen=True)
class SourceRows:
    """Rows of a source that a run reads, of --max_seq_len tokens and one, and its weight."""

    name: str
    rows: int
    weight: float | None


def tokens_per_step(tokens: float, optimizer: str) -> float:
    """Tokens of a step, of which rows are the nearest power of two for each process."""
    factor, _ = OF_OPTIMIZER[optimizer]
    return factor * max(tokens, FEWEST_TOKENS) ** 0.571


def learning_rate(work: Workload) -> float:
    """Peak rate for the batch of the rule."""
    parameters = max(work.parameters, FEWEST_PARAMETERS)
    by_law = 1.79 * parameters**-0.713 * max(work.tokens, FEWEST_TOKENS) ** 0.307
    return min(HIGHEST_RATE, by_law)


def weight_decay(work: Workload) -> float:
    """Decay of matrices: a text that is read many times wants far more (arXiv 2509.14786)."""
    return 0.1 * min(max(work.epochs, 1.0), MOST_EPOCHS) ** 0.9


def warmup_steps(work: Workload) -> float:
    """Steps of warm-up, which a short run needs as well as a long one."""
    return min(100, work.steps * 3 // 10)


# The rule of each flag with AdamW. Those of the batch are suited_rows and batch_values.
RULES: Mapping[str, Callable[[Workload], float]] = {
    "learning_rate": learning_rate,
    "weight_decay": weight_decay,
    "warmup_steps": warmup_steps,
}
BY_EPOCHS = ("weight_decay",)
# Each optimizer has a factor of the batch, and flags that have a rule beside the batch. Muon gains
# more from a larger batch, and its updates take longer.
OF_OPTIMIZER: Mapping[str, tuple[float, Collection[str]]] = {
    "AdamW": (0.4, RULES),
    "Adam": (0.4, RULES),
    "AdamW8bit": (0.4, RULES),
    "Muon": (0.8, ()),
}


def with_dtype(run: RunConfig, device: str, has_bf16: bool) -> RunConfig:
    """Replace `dtype = auto`: bfloat16 on a type of device that has instructions for it.

    float16 is never chosen: it trains on GPUs only, and its loss has to be scaled.
    """
    if run.dtype != AUTO:
        return run
    dtype, has = ("bfloat16", "has") if has_bf16 else ("float32", "has no")
    return run.with_values(
        Origin(f"{AUTO}: {device} {has} bf16 instructions", Rank.RULE), dtype=dtype
    )


def flags_with_rules(run: RunConfig, optimizer: str) -> list[str]:
    """Flags of the run that are "auto" and have a rule with this optimizer."""
    if run.task != "pretrain" or run.init_from is not None or run.mup_base_dim is not None:
        return []  # fine-tuning, and rates that are of another width
    if optimizer not in OF_OPTIMIZER:
        return []
    _, others = OF_OPTIMIZER[optimizer]
    return [name for name in run.open_flags if name == "batch_size" or name in others]


def suited_rows(unit: int, row_tokens: int, tokens: float, most: int, optimizer: str) -> int:
    """Rows of a step for a run of so many tokens: `unit` times a power of two, at most `most`."""
    rows, suited = unit, tokens_per_step(tokens, optimizer)
    while 2 * rows <= most and 2 * rows * row_tokens < math.sqrt(2) * suited:
        rows *= 2
    return rows


def smallest_step(run: RunConfig, world_size: int) -> int:
    """Rows of a step with one row in each micro-batch."""
    micro_batches = run.accumulation_steps if run.is_explicit("accumulation_steps") else 1
    return run.parallel(world_size).data_size * micro_batches


def most_rows(run: RunConfig, device: str, fitting: int | None = None) -> int:
    """Rows of the largest micro-batch of a process, of which `fitting` fit (None: not known)."""
    by_tokens = max(1, most_tokens(device, fitting is not None) // run.max_seq_len)
    return by_tokens if fitting is None else min(by_tokens, fitting)


def most_tokens(device: str, is_known: bool) -> int:
    """Tokens of the largest micro-batch where memory is no limit; is_known: whether it fits."""
    most = MICRO_BATCH_TOKENS.get(device, MICRO_BATCH_TOKENS["cuda"])
    return most if is_known else min(most, UNKNOWN_TOKENS)


def can_divide(run: RunConfig) -> bool:
    """Whether the start may divide the rows of a step into micro-batches of any size."""
    is_given = run.is_explicit("batch_size") or run.is_explicit("accumulation_steps")
    return not is_given and not _has_batches_of_stages(run)


def divided(run: RunConfig, world_size: int, most: int, why: str) -> RunConfig:
    """The run with the rows of its step in micro-batches of at most `most` rows."""
    values = batch_values(run, world_size, run.rows_per_step(world_size), most)
    source = run.sources["batch_size"]
    if source.rank is Rank.DEFAULT and values.get("batch_size") == run.batch_size:
        return run
    of_step = source.removeprefix(f"{AUTO}: ").partition("; at most ")[0]
    words = f"{AUTO}: {of_step}; at most {most:,} at once, {why}"
    return run.with_values(Origin(words, Rank.RULE), **values)


def _has_batches_of_stages(run: RunConfig) -> bool:
    """Whether a stage has a batch of its own, which --accumulation_steps would multiply, too."""
    if run.stages is None:
        return False
    from minimind.config.stages import read_stages

    return any(stage.batch_size for stage in read_stages(run.stages).stages)


def batch_values(run: RunConfig, world_size: int, rows: int, most: int) -> dict[str, int]:
    """--batch_size for `rows` of a step, and --accumulation_steps unless that is given.

    A micro-batch has at most `most` rows.
    """
    data_size = run.parallel(world_size).data_size
    if run.global_batch_size is not None:  # the number of processes decides the micro-batches
        return {"batch_size": min(run.global_batch_size, most)}
    each = rows // data_size
    micro_batches, values = run.accumulation_steps, {}
    if not run.is_explicit("accumulation_steps") and not _has_batches_of_stages(run):
        micro_batches = next(n for n in range(1, each + 1) if not each % n and each // n <= most)
        values["accumulation_steps"] = micro_batches
    micro_batch = each // micro_batches
    return {"batch_size": micro_batch * data_size if run.split_batches else micro_batch, **values}


def largest_micro_batch(run: RunConfig, world_size: int, most: int) -> dict[str, int]:
    """--batch_size of the largest micro-batch of `batch_values`, which is a power of two."""
    rows = 2 ** (most.bit_length() - 1) * (
        run.parallel(world_size).data_size if run.split_batches else 1
    )
    return {"batch_size": rows}


def mean_epochs(
    reads: Sequence[tuple[int, Mapping[str, float] | None]], sizes: Mapping[str, int]
) -> float:
    """How often a source is read, as the mean over the tokens that are read.

    `reads` has tokens and the weights by which sources have a share of them (None: by their size),
    `sizes` the tokens of each source.
    """
    total = sum(tokens for tokens, _ in reads)
    if not total:
        return 0.0
    if all(weights is None for _, weights in reads):
        return total / max(1, sum(sizes.values()))
    of_source = dict.fromkeys(sizes, 0.0)
    for tokens, weights in reads:
        shares = sizes if weights is None else weights
        whole = sum(shares.values()) or 1  # the start refuses a text without a row
        for name in shares.keys() & sizes:  # the start refuses another name
            of_source[name] += tokens * shares[name] / whole
    return sum(read / total * read / max(1, sizes[name]) for name, read in of_source.items())


def suited_values(names: Iterable[str], work: Workload) -> dict[str, float]:
    """Values of the rules for these flags; rates have three digits, as people write them."""
    values = {name: RULES[name](work) for name in names if name in RULES}
    return {n: v if isinstance(v, int) else float(f"{v:.3g}") for n, v in values.items()}


def needs_text(run: RunConfig) -> bool:
    """Whether the length of the run, and with it the rules, depend on its text."""
    limits = (run.max_steps, run.max_tokens, run.max_flops, run.tokens_per_param)
    return run.epochs is not None or not any(limits)


def values_by_rules(
    run: RunConfig,
    names: Collection[str],
    optimizer: str,
    world_size: int,
    device: str,
    sources: Sequence[SourceRows] | None,
    parameters: int,
    budgets_of: Callable[[int], Mapping[str, int]],
) -> tuple[dict[str, Any], Workload]:
    """Values of the rules for the flags `names`, and what they follow from.

    Those that follow from epochs are left out without `sources`, those of the text. `budgets_of`
    has the steps within each budget, as `budget_steps`, by tokens of a step.
    """
    rows_of = {one.name: one.rows for one in sources or ()}
    of_text = sys.maxsize if sources is None else sum(rows_of.values())

    def length(rows: int) -> int:
        """Steps of so many rows, of all stages alike."""
        budgets = budgets_of(rows * run.max_seq_len)
        is_staged = run.stages is not None and bool(budgets)
        limited = replace(run, max_steps=None) if is_staged else run  # other steps
        return run_length(limited, of_text // rows, budgets)

    if "batch_size" in names and run.global_batch_size is None:
        unit = smallest_step(run, world_size)
        # With --max_steps the batch decides the tokens: those of the plain one count.
        plain = run.parallel(world_size).data_size * run.batch_size
        rows = unit if run.max_steps is None else plain
        rows = min(rows, max(unit, of_text))
        most = min(of_text, length(rows) * rows)
        if not run.is_explicit("accumulation_steps") and _has_batches_of_stages(run):
            most = min(most, most_rows(run, device) * unit)  # one micro-batch each
        tokens = length(rows) * rows * run.max_seq_len
        rows = suited_rows(unit, run.max_seq_len, tokens, most, optimizer)
    else:
        rows = run.rows_per_step(world_size)
    has_rows = "batch_size" in names
    at_once = most_rows(run, device)
    values: dict[str, Any] = batch_values(run, world_size, rows, at_once) if has_rows else {}
    steps = length(rows)
    decay, tokens = planned_decay(run, steps), steps * rows * run.max_seq_len
    weights = {one.name: one.weight for one in sources or () if one.weight is not None}
    of_sources = weights if len(weights) == len(rows_of) else None
    reads = [(tokens, of_sources)]
    if run.stages is not None:
        from minimind.config.stages import plan_stages

        batch = batch_values(run, world_size, rows, at_once)
        staged = run.with_values(OPEN, **batch, warmup_steps=0)
        _, stages, schedule = plan_stages(staged, world_size, budgets_of(1))
        reads = [(one.tokens, one.weights or of_sources) for one in stages]
        tokens = sum(one.tokens for one in stages)
        steps, decay = schedule.total_steps, schedule.decay_steps
    epochs = mean_epochs(reads, {name: n * run.max_seq_len for name, n in rows_of.items()})
    work = Workload(parameters, tokens, epochs, max(0, steps - decay))
    known = [name for name in names if sources is not None or name not in BY_EPOCHS]
    return {**suited_values(known, work), **values}, work


def held_out_of(documents: float, tokens: float = math.inf, row_tokens: int = 0) -> float:
    """--val_fraction by which some documents, and two rows, are held out; 0 for too small a text.

    `tokens` are those of the text, and `row_tokens` those of a row.
    """
    if documents < FEWEST_DOCUMENTS or 4 * row_tokens > tokens:
        return 0.0
    share = max(HELD_OUT_DOCUMENTS / documents, 2 * row_tokens / tokens)
    return min(1.0, max(RunConfig.val_fraction, round(share, 3)))
