"""Loss of held-out rows during training, per source, and samples of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minimind.config.flags import EVAL_ERROR, EVAL_TIME, FIRST_EVAL_ROWS, VAL_LOSS
from minimind.config.loss_weights import loss_weights
from minimind.config.run_config import RunConfig
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import held_out_rows
from minimind.data.rows.order import Order
from minimind.data.shards.conversation_shards import PADDING
from minimind.data.shards.token_shards import TokenShards
from minimind.data.tokenizer.load import Tokenizer
from minimind.engine.compile import uncompiled
from minimind.engine.engine import Engine
from minimind.errors import UsageError
from minimind.inference.score import LossSums, standard_error
from minimind.report.formats import count
from minimind.report.run_logger import RunLogger

if TYPE_CHECKING:
    from minimind.inference.text import Sampling


@dataclass
class HeldOutRows:
    """Rows that an evaluation reads, and the bytes of text that a token stands for, by source.

    An evaluation reads the first `reads` of the rows (None: all), which are spread over the text as
    all of them are. It reads more, and so do all after it, while its standard error is too large.
    """

    shards: TokenShards
    rows: np.ndarray  # (N,) row indices, the most that an evaluation reads
    row_tokens: int
    bytes_per_id: Sequence[np.ndarray]  # of each source, (vocabulary,)
    sources: tuple[str, ...] = ("data",)
    weights: tuple[float, ...] | None = None  # of the sources in training; None: by size
    reads: int | None = None
    loss_weights: tuple[float, ...] | None = None  # of the targets of each source

    @property
    def total(self) -> int:
        """Rows of the held-out text."""
        return sum(self.shards.sizes(self.row_tokens))

    @property
    def may_grow(self) -> bool:
        """Whether an evaluation may read more rows than the one before."""
        return self.reads is not None and self.reads < len(self.rows)

    def begin_with(self, reads: int) -> None:
        """Let the next evaluation read so many rows, those of a checkpoint, or FIRST_EVAL_ROWS.

        It reads all if their number is fixed, and one of each source at least.
        """
        if self.reads is not None:
            self.reads = min(max(reads, FIRST_EVAL_ROWS, len(self.by_source())), len(self.rows))

    @property
    def in_force(self) -> np.ndarray:
        """The rows that the last evaluation read, or the first one will read."""
        return self.rows[: self.reads]

    def by_source(self, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Row indices of each source that has any, of all rows or of some."""
        chosen = self.rows if rows is None else rows
        if len(self.sources) == 1:
            return {self.sources[0]: chosen}
        source = np.searchsorted(self._ends, chosen, side="right")
        found = {name: chosen[source == n] for n, name in enumerate(self.sources)}
        return {name: indices for name, indices in found.items() if len(indices)}

    def shares(self, by_source: Mapping[str, LossSums]) -> list[float]:
        """What the targets of the sources count in training, from sums over some of their rows.

        Their rows count by weight, without weights by the number that is held out, and the targets
        of a row by --loss_weight.
        """
        if len(self.sources) == 1:
            return [1.0]
        weights = np.array(self.weights or np.diff(self._ends, prepend=0))
        weights = (weights * (self.loss_weights or 1.0)).tolist()
        share = dict(zip(self.sources, weights, strict=True))
        return [share[name] * one.tokens / max(1.0, one.rows) for name, one in by_source.items()]

    @property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.shards.sizes(self.row_tokens))

    @property
    def unvalidated(self) -> list[str]:
        """The sources of which no row is read, though rows of others are."""
        validated = self.by_source()
        return [name for name in self.sources if name not in validated] if len(self.rows) else []

    def batch(self, indices: np.ndarray, size: int) -> np.ndarray:
        """Tokens of the rows, int64 (size, row_tokens), padded with rows of `PADDING`."""
        batch = np.full((size, self.row_tokens), PADDING, dtype=np.int64)
        if len(indices):
            batch[: len(indices)] = self.shards.read_rows(indices, self.row_tokens)
        return batch


def held_out_of(run: RunConfig, prepared: Prepared, order: Order, steps: int) -> HeldOutRows:
    """Return the rows that evaluations read in a run of so many steps."""
    row_tokens, weights = run.max_seq_len + 1, prepared.train.weights
    number, reads = run.eval_rows, None
    if number is None:
        number = affordable_rows(run, order.tokens_of(range(steps), run.max_seq_len), steps)
        # Losses that --keep_best compares are of the same rows.
        reads = None if run.keep_best and run.keep_best_by == VAL_LOSS else FIRST_EVAL_ROWS
    rows = held_out_rows(prepared.val, number, row_tokens, weights)
    names = tuple(source["name"] for source in prepared.manifest["sources"])
    sizes = prepared.bytes_per_id("val")
    of_loss = loss_weights(run.loss_weight or (), names)
    return HeldOutRows(prepared.val, rows, row_tokens, sizes, names, weights, reads, of_loss)


def affordable_rows(run: RunConfig, train_tokens: int, steps: int) -> int:
    """Rows of each validation with which all of them take at most EVAL_TIME of the training.

    Counted, not timed: a result must not depend on the load of a machine. Validating a row, by a
    forward pass alone, takes a third of the time of training on it.
    """
    evaluations = -(-steps // run.eval_interval)  # the last step is always validated
    passes = 1 if run.ema is None else 2
    rows = EVAL_TIME * 3 * train_tokens / run.max_seq_len / (evaluations * passes)
    return max(1, int(rows))


def log_evaluation(
    engine: Engine, held_out: HeldOutRows, batch_rows: int, step: int, logger: RunLogger
) -> dict[str, Any]:
    """Log an `eval` event and its lines, with those of a moving average; return its fields."""
    results = evaluate(engine, held_out, batch_rows)
    if average := engine.average:
        with average.in_force():
            of_average = evaluate(engine, held_out, batch_rows, grows=False)
        results |= {f"ema_{name}": of_average[name] for name in ("val_loss", "val_bpb")}
    logger.event("eval", step=step, **results)
    by_source = results.get("by_source", {})
    parts = [("", results), *((f" of {name}", part) for name, part in by_source.items())]
    of_all = f" of {held_out.total:,}"
    logger.print(
        "\n".join(
            f"step {step}: validation loss{name} {part['val_loss']:.4f}{_error(part)}"
            f" ({count(part['rows'], 'row')}{of_all * (part is results)}), perplexity"
            f" {part['val_ppl']:.1f}, {part['val_bpb']:.3f} bits per byte"
            for name, part in parts
        )
    )
    if average:
        logger.print(
            f"step {step}: validation loss of the average"
            f" {results['ema_val_loss']:.4f}, {results['ema_val_bpb']:.3f} bits per byte"
        )
    return results


def _error(part: Mapping[str, Any]) -> str:
    error = part["val_loss_se"]
    return "" if error is None else f" +- {error:.4f}"


def evaluate(
    engine: Engine, held_out: HeldOutRows, batch_rows: int, grows: bool = True
) -> dict[str, Any]:
    """Return the fields of an `eval` event, with `by_source` if there are several sources, and
    `unvalidated`, the names of those without a held-out row.

    While the standard error is not below EVAL_ERROR of the loss, it reads twice the rows, unless
    `grows` is False or there are no more.

    With weights the total is that of the mixture: a source counts as in training, not by its number
    of held-out rows. Collective: under ZeRO-3 a forward pass is, so every rank runs the same number
    of them, the last ones perhaps on ignored rows.
    """
    by_source = _sums(engine, held_out, held_out.in_force, batch_rows)
    while True:
        total = mixture(by_source, held_out)
        error = standard_error([*by_source.values()], held_out.shares(by_source))
        is_enough = error is not None and error < EVAL_ERROR * total.mean
        if is_enough or not (grows and held_out.may_grow):
            break
        assert held_out.reads is not None
        before, held_out.reads = held_out.reads, min(2 * held_out.reads, len(held_out.rows))
        more = held_out.rows[before : held_out.reads]
        for name, sums in _sums(engine, held_out, more, batch_rows).items():
            by_source[name] = by_source[name] + sums if name in by_source else sums
    found = _event(total, [*by_source.values()], error) | {"held_out": held_out.total}
    if len(held_out.sources) == 1:
        return found
    found["by_source"] = {
        name: _event(sums, [sums], standard_error([sums], [1.0]))
        for name, sums in by_source.items()
    }
    if unvalidated := held_out.unvalidated:
        found["unvalidated"] = unvalidated
    return found


def _event(total: LossSums, parts: Sequence[LossSums], error: float | None) -> dict[str, Any]:
    return {**total.event(), "val_loss_se": error, "rows": round(sum(part.rows for part in parts))}


def mixture(by_source: Mapping[str, LossSums], held_out: HeldOutRows) -> LossSums:
    """Sum over all held-out tokens, with each source scaled to what it counts in training."""
    total = reduce(add, by_source.values())
    if len(held_out.sources) == 1 or not total.tokens:
        return total
    shares = held_out.shares(by_source)
    scaled = (
        sums.scaled(share / sum(shares) * total.tokens / max(1.0, sums.tokens))
        for share, sums in zip(shares, by_source.values(), strict=True)
    )
    return reduce(add, scaled)


def _sums(
    engine: Engine, held_out: HeldOutRows, rows: np.ndarray, batch_rows: int
) -> dict[str, LossSums]:
    """Loss sums of each source over some of the rows (collective)."""
    rows_of = held_out.by_source(rows)
    local = [_sum_loss(engine, held_out, name, rows, batch_rows) for name, rows in rows_of.items()]
    flat = engine.sum_over_ranks([number for sums in local for number in astuple(sums)])
    width = len(flat) // max(1, len(rows_of))
    sums = [LossSums(*flat[at : at + width]) for at in range(0, len(flat), width)]
    return dict(zip(rows_of, sums, strict=True))


def _sum_loss(
    engine: Engine, held_out: HeldOutRows, source: str, rows: np.ndarray, batch_rows: int
) -> LossSums:
    """Loss, tokens and bytes summed over this rank's share of the rows of a source.

    The device is read at the end, so that it computes a batch while the next one is made. Of ranks
    that share rows the first counts them.
    """
    bytes_per_id = held_out.bytes_per_id[held_out.sources.index(source)]
    losses, counts, text_bytes = [], [], 0.0
    for start in range(0, len(rows), batch_rows * engine.parallel.data_size):
        first = start + engine.data_rank * batch_rows
        batch = held_out.batch(rows[first : first + batch_rows], batch_rows)
        loss, count = engine.loss_of(torch.from_numpy(batch), by_row=True)
        losses.append(loss)
        counts.append(count)
        targets = batch[:, 1:]
        text_bytes += float(bytes_per_id[targets[targets >= 0]].sum())
    if not engine.parallel.is_first(engine.rank):
        return LossSums(0.0, 0.0, 0.0)
    of_rows, tokens = np.array([torch.cat(losses).tolist(), torch.cat(counts).tolist()])
    return LossSums.of_rows(of_rows, tokens, text_bytes)


MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Samples:
    """Prompts of the samples and how they are continued."""

    prompts: tuple[str, ...]
    tokenizer: Tokenizer
    sampling: Sampling


def read_sample_prompts(run: RunConfig) -> tuple[str, ...]:
    """The prompts of `--sample_prompts`, by default one empty prompt; none without an interval."""
    if not run.sample_interval:
        return ()
    if run.sample_prompts is None:
        return ("",)
    from minimind.inference.prompts import read_prompts

    return tuple(read_prompts(run.sample_prompts, "--sample_prompts", pipes=False))


def build_samples(run: RunConfig, tokenizer: Tokenizer) -> Samples | None:
    """The samples of a run, if it has any; raise UsageError if a prompt is too long."""
    prompts = read_sample_prompts(run)
    if not prompts:
        return None
    from minimind.inference.text import Sampling

    for number, prompt in enumerate(prompts, 1):
        if (length := len(tokenizer.encode(prompt))) >= run.max_seq_len:
            raise UsageError(
                f"--sample_prompts {run.sample_prompts}: prompt {number} has {length} tokens, and"
                f" max_seq_len is {run.max_seq_len}; shorten it"
            )
    return Samples(prompts, tokenizer, Sampling(MAX_NEW_TOKENS, seed=run.seed))


def draw(engine: Engine, samples: Samples) -> tuple[str, ...]:
    """Continue each prompt, with no effect on the model or the global random state.

    Call on all ranks, which generate the same texts: under ZeRO-3 a forward pass is collective.
    """
    from minimind.inference.engine import generate_texts

    is_collective = engine.resolved.zero_stage == 3 and engine.world_size > 1
    engine.backend.forward.eval()
    with uncompiled(engine.model):
        result = generate_texts(
            engine.model,
            samples.tokenizer,
            samples.prompts,
            samples.sampling,
            is_collective=is_collective,
        )
    return result.texts
