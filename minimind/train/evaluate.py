"""Loss of held-out rows during training, per source, and samples of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minimind.config.run_config import RunConfig
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import held_out_rows
from minimind.data.shards.token_shards import TokenShards
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.engine.build import Engine
from minimind.engine.loss_of_batch import PADDING, uncompiled
from minimind.errors import UsageError
from minimind.inference.score import LossSums
from minimind.report.run_logger import RunLogger

if TYPE_CHECKING:
    from minimind.inference.generate import Sampling


@dataclass(frozen=True)
class HeldOutRows:
    """Rows that an evaluation reads, and the bytes of text that a token stands for, by source."""

    shards: TokenShards
    rows: np.ndarray  # (N,) row indices
    row_tokens: int
    bytes_per_id: Sequence[np.ndarray]  # of each source, (vocabulary,)
    sources: tuple[str, ...] = ("data",)
    weights: tuple[float, ...] | None = None  # of the sources in training; None: by size

    def by_source(self) -> dict[str, np.ndarray]:
        """Row indices of each source that has any."""
        if len(self.sources) == 1:
            return {self.sources[0]: self.rows}
        ends = np.cumsum(self.shards.sizes(self.row_tokens))
        source = np.searchsorted(ends, self.rows, side="right")
        rows = {name: self.rows[source == n] for n, name in enumerate(self.sources)}
        return {name: indices for name, indices in rows.items() if len(indices)}

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


def held_out_of(run: RunConfig, prepared: Prepared) -> HeldOutRows:
    """Return the rows that every evaluation reads."""
    row_tokens = run.max_seq_len + 1
    rows = held_out_rows(prepared.val, run.eval_rows, row_tokens, prepared.train.weights)
    names = tuple(source["name"] for source in prepared.manifest["sources"])
    sizes = prepared.bytes_per_id("val")
    return HeldOutRows(prepared.val, rows, row_tokens, sizes, names, prepared.train.weights)


def log_evaluation(
    engine: Engine, held_out: HeldOutRows, batch_rows: int, step: int, logger: RunLogger
) -> dict[str, Any]:
    """Log an `eval` event and its lines, with those of a moving average; return its fields."""
    results = evaluate(engine, held_out, batch_rows)
    if average := engine.average:
        with average.in_force():
            of_average = evaluate(engine, held_out, batch_rows)
        results |= {f"ema_{name}": of_average[name] for name in ("val_loss", "val_bpb")}
    logger.event("eval", step=step, **results)
    by_source = results.get("by_source", {})
    parts = [("", results), *((f" of {name}", part) for name, part in by_source.items())]
    logger.print(
        "\n".join(
            f"step {step}: validation loss{name} {part['val_loss']:.4f},"
            f" perplexity {part['val_ppl']:.1f}, {part['val_bpb']:.3f} bits per byte"
            for name, part in parts
        )
    )
    if average:
        logger.print(
            f"step {step}: validation loss of the average"
            f" {results['ema_val_loss']:.4f}, {results['ema_val_bpb']:.3f} bits per byte"
        )
    return results


def evaluate(engine: Engine, held_out: HeldOutRows, batch_rows: int) -> dict[str, Any]:
    """Return the fields of an `eval` event, with `by_source` if there are several sources, and
    `unvalidated`, the names of those without a held-out row.

    With weights the total is that of the mixture: a source counts by its weight in training, not by
    its number of held-out rows. Collective: under ZeRO-3 a forward pass is, so every rank runs the
    same number of them, the last ones perhaps on ignored rows.
    """
    rows_of = held_out.by_source()
    local = [_sum_loss(engine, held_out, name, rows, batch_rows) for name, rows in rows_of.items()]
    flat = engine.sum_over_ranks([number for sums in local for number in sums])
    sums = [LossSums(*flat[at : at + 3]) for at in range(0, len(flat), 3)]
    if len(held_out.sources) == 1:
        return sums[0].event()
    by_source = dict(zip(rows_of, sums, strict=True))
    events = {name: part.event() for name, part in by_source.items()}
    found = {**mixture(by_source, held_out).event(), "by_source": events}
    if unvalidated := held_out.unvalidated:
        found["unvalidated"] = unvalidated
    return found


def mixture(by_source: Mapping[str, LossSums], held_out: HeldOutRows) -> LossSums:
    """Sum over all held-out tokens, with each source scaled to its weight in training."""
    total = reduce(add, by_source.values())
    if held_out.weights is None:
        return total
    weight = dict(zip(held_out.sources, held_out.weights, strict=True))
    tokens_per_weight = total.tokens / sum(weight[name] for name in by_source)
    scaled = (
        sums.scaled(weight[name] * tokens_per_weight / max(1.0, sums.tokens))
        for name, sums in by_source.items()
    )
    return reduce(add, scaled)


def _sum_loss(
    engine: Engine, held_out: HeldOutRows, source: str, rows: np.ndarray, batch_rows: int
) -> list[float]:
    """Loss, tokens and bytes summed over this rank's share of the rows of a source.

    The device is read at the end, so that it computes a batch while the next one is made. Of ranks
    that share rows the first counts them.
    """
    bytes_per_id = held_out.bytes_per_id[held_out.sources.index(source)]
    losses, counts, text_bytes = [], [], 0.0
    for start in range(0, len(rows), batch_rows * engine.parallel.data_size):
        first = start + engine.data_rank * batch_rows
        batch = held_out.batch(rows[first : first + batch_rows], batch_rows)
        loss, count = engine.loss_of(torch.from_numpy(batch))
        losses.append(loss)
        counts.append(count)
        targets = batch[:, 1:]
        text_bytes += float(bytes_per_id[targets[targets >= 0]].sum())
    if not engine.parallel.is_first(engine.rank):
        return [0.0, 0.0, 0.0]
    return [sum(torch.stack(losses).tolist()), sum(torch.stack(counts).tolist()), text_bytes]


MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Samples:
    """Prompts of the samples and how they are continued."""

    prompts: tuple[str, ...]
    tokenizer: AnyTokenizer
    sampling: Sampling


def read_sample_prompts(run: RunConfig) -> tuple[str, ...]:
    """The prompts of `--sample_prompts`, by default one empty prompt; none without an interval."""
    if not run.sample_interval:
        return ()
    if run.sample_prompts is None:
        return ("",)
    from minimind.inference.prompts import read_prompts

    return tuple(read_prompts(run.sample_prompts, "--sample_prompts", pipes=False))


def build_samples(run: RunConfig, tokenizer: AnyTokenizer) -> Samples | None:
    """The samples of a run, if it has any; raise UsageError if a prompt is too long."""
    prompts = read_sample_prompts(run)
    if not prompts:
        return None
    from minimind.inference.generate import Sampling

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
    from minimind.inference.generate import generate_texts

    synced_gpus = engine.resolved.zero_stage == 3 and engine.world_size > 1
    engine.backend.forward.eval()
    with uncompiled(engine.model):
        result = generate_texts(
            engine.model,
            samples.tokenizer,
            samples.prompts,
            samples.sampling,
            synced_gpus=synced_gpus,
        )
    return result.texts
