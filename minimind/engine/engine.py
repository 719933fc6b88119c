"""The engine: one optimizer step over all ranks, on any backend.

Rows are (B, T + 1) token ids; the model reads all but the last and predicts all but the first. A
token t of a row that is no target is stored as ~t, which is negative: in fine-tuning, where
~(t + START) also starts a conversation and the first token has the row's source, and in rows of
`PADDING`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.run_config import ParallelLayout
from minimind.data.shards.conversation_shards import SOURCE, START
from minimind.engine.clocks import CommunicationClock, PhaseClock
from minimind.engine.compile import CompileClock, compute_in, uncompiled
from minimind.engine.optimizers import WeightAverage
from minimind.engine.plain_backend import PlainBackend
from minimind.engine.state import ZeroState
from minimind.model.dropout import row_keys
from minimind.model.loss import IGNORED, mean_with_nan_grads
from minimind.model.sequence import SequenceGroup
from minimind.model.sizes import LOSS_CHUNK
from minimind.runtime.collectives import Ranks, collective_backend, lost_peers
from minimind.runtime.device import HOST, device_kind, widened

if TYPE_CHECKING:
    from minimind.config.run_config import RunConfig
    from minimind.engine.deepspeed_backend import DeepSpeedBackend
    from minimind.model.distillation import Distillation

COMPILE_TIMEOUT = 3600.0  # seconds that ranks wait for one that compiles


def token_ids(rows: torch.Tensor) -> torch.Tensor:
    """Return the ids of tokens; non-targets are stored negative."""
    return torch.where(rows >= 0, rows, ~rows % START)


def source_of(rows: torch.Tensor) -> torch.Tensor:
    """Number of the source of each row (B, T + 1) of conversations, (B,)."""
    return ~rows[:, 0] // SOURCE


def text_inputs(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments of the model for rows (B, T + 1) of text, whose tokens are all targets."""
    return {"input_ids": rows[:, :-1], "shift_labels": rows[:, 1:]}


def marked_inputs(rows: torch.Tensor, has_starts: bool) -> dict[str, torch.Tensor]:
    """The same for rows with negative tokens; `has_starts`: documents are conversations."""
    targets = torch.where(rows >= 0, rows, IGNORED)
    inputs = {"input_ids": token_ids(rows)[:, :-1], "shift_labels": targets[:, 1:]}
    return inputs | ({"document_starts": ~rows[:, :-1] >= START} if has_starts else {})


def compute_as(run: RunConfig, model: Any, device: torch.device) -> None:
    """Move a model, whose forward pass then has the dtype of the run's model."""
    model.to(device, getattr(torch, run.weight_dtype))
    compute_in(run.dtype, model, device.type)


def mean_loss(out: Any, targets: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of the backward pass: nats per token plus the balance loss of experts.

    The summed cross-entropy is divided by `targets`, a positive scalar; None: those of the
    micro-batch. Both parts are then means over rows of equal length, so their mean over
    micro-batches and ranks is the mean over the rows of a step, however it is split.
    """
    count = out.targets if targets is None else targets
    mean = mean_with_nan_grads(out.loss_sum, count, also=out.aux_loss)
    return mean if out.aux_loss is None else mean + out.aux_loss


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step on this rank; tensors stay on the device."""

    loss_sums: tuple[torch.Tensor, ...]  # sums of each micro-batch
    targets: tuple[torch.Tensor, ...]  # of each one, by weight where the loss has weights
    grad_norm: float | torch.Tensor | None
    lr: float  # the learning rate of this step
    skipped_so_far: int | torch.Tensor  # since step 0, for a gradient that is not finite
    is_skipped: bool | torch.Tensor  # this step, on every rank
    aux_loss: torch.Tensor | None = None  # of experts, mean over this rank's micro-batches
    expert_load: torch.Tensor | None = None  # (L, X), likewise

    @property
    def loss_sum(self) -> torch.Tensor:
        """Sum over micro-batches, in float64 where the device has it."""
        return reduce(torch.add, map(widened, self.loss_sums))

    @property
    def tokens(self) -> torch.Tensor:
        return reduce(torch.add, self.targets)


class Engine(Ranks):
    """Runs optimizer steps over all ranks on one of the backends."""

    def __init__(
        self,
        backend: DeepSpeedBackend | PlainBackend,
        resolved: ResolvedConfig,
        device: torch.device,
        parameters: int,
    ) -> None:
        super().__init__(timedelta(seconds=resolved.run.dist_timeout))
        self.backend = backend
        self.parameters = parameters  # count of the whole model; at stage 3 a rank holds a part
        self.resolved = resolved
        self.device = device
        self.kind = device_kind(device)
        self.parallel = resolved.run.parallel(self.world_size)
        self.data_rank = self.parallel.data_rank(self.rank)
        timeout = collective_backend(device.type, resolved.run.dist_timeout)[1]
        self.sequence = sequence_group(self.parallel, self.rank, timeout)
        if self.sequence:
            self.model.sequence = self.sequence
        self.is_fine_tuning = resolved.run.task == "sft"
        run, size = resolved.run, self.world_size
        # Rows have tokens that are no targets.
        has_padding = run.padded_rows(size) > run.rows_per_step(size)
        self.counts_targets = self.is_fine_tuning or has_padding
        self.loss_weights: torch.Tensor | None = None  # (sources,), of a target of each
        # Number of positions whose logits are computed at a time; 0: all.
        self.loss_chunk_size = LOSS_CHUNK if resolved.run.loss == "chunked" else 0
        # Arguments of the model for the loss of a training step.
        self.trained_loss: dict[str, Any] = {"loss_chunk_size": self.loss_chunk_size}
        if run.own_loss:
            from minimind.model.own_loss import OwnLoss

            self.trained_loss["own_loss"] = OwnLoss.imported(run.own_loss)
        self.distillation: Distillation | None = None
        self.row_tokens = run.max_seq_len + 1  # after them a row may have a teacher's record
        # Validation is not compiled: on a GPU our models always compute parts.
        in_parts = self.kind is not HOST and resolved.run.hugging_face is None
        self.eval_chunk_size = LOSS_CHUNK if in_parts else self.loss_chunk_size
        self.compiling = CompileClock(resolved.run)
        compiles = resolved.run.compile == "on" and self.world_size > 1
        self._compilation = self.another_group(COMPILE_TIMEOUT) if compiles else None
        self.seeded_step = 0
        self._known_update = backend.zero_update
        decay = resolved.run.ema
        self.average = None if decay is None else WeightAverage(backend, decay)

    @property
    def model(self) -> Any:
        """The model inside the engine."""
        return self.backend.module

    def state(self) -> ZeroState:
        """This rank's fp32 weights, their average and moments; see the backend's."""
        return self.average.state() if self.average else self.backend.state()

    @property
    def zero_update(self) -> str:
        """Who updates under ZeRO; empty without DeepSpeed."""
        return self.backend.zero_update

    def take_update_change(self) -> str:
        """Who updates under ZeRO, if that has changed since the last call; else empty."""
        before, self._known_update = self._known_update, self.zero_update
        return self.zero_update if self.zero_update != before else ""

    def instrument_collectives(self) -> CommunicationClock:
        """Start timing collectives; return their clock."""
        clock = CommunicationClock(self.device)
        self.backend.watch(clock)
        return clock

    def release(self) -> None:
        """Restore process-wide state, for notebooks."""
        self.backend.release()

    def weigh_sources(self, weights: Sequence[float]) -> None:
        """Let a target count by the weight of its source, none below 1."""
        self.loss_weights = torch.tensor(weights, device=self.device)

    def learn_from(self, distillation: Distillation) -> None:
        """Train with the loss of a teacher, which is moved here and computes as the model does."""
        if distillation.teacher is not None:
            compute_as(self.resolved.run, distillation.teacher, self.device)
        self.distillation = distillation

    def seed(self, step: int, data_rank: int | None = None) -> None:
        """Reseed torch for a step, so that checkpoints need no random state.

        As on `data_rank`; None: on this rank. Ranks that read the same rows have the same state.
        """
        self.seeded_step = step
        data_rank = self.data_rank if data_rank is None else data_rank
        seed = ((self.resolved.run.seed * 1_000_003 + step) * 4_099 + data_rank) % 2**63
        # Not torch.manual_seed, which visits every device type each time.
        torch.default_generator.manual_seed(seed)
        self.kind.seed(seed)

    def step(
        self,
        micro_batches: Sequence[torch.Tensor],
        lr: float,
        clock: PhaseClock,
        norm_limit: float = math.inf,
        first: int = 0,
    ) -> StepResult:
        """Take one optimizer step over this rank's micro-batches, each (B, T + 1) token ids.

        The update is skipped if the gradient norm before clipping is above `norm_limit`. `first`:
        number of this rank's first row among those of the step, which dropout depends on.

        The learning rate is set first, since DeepSpeed updates at the last micro-batch. The loss is
        the mean over all targets of the step, with weights the weighted mean. In pretraining
        without rows of padding every micro-batch has the same number of targets, so that is the
        mean over micro-batches and ranks; otherwise targets are counted.
        """
        backend = self.backend
        actual_lr, skipped_before = backend.begin(lr), backend.skipped_steps
        norm, sums, counts, aux_losses, loads = None, [], [], [], []
        with lost_peers():
            divisor = self._mean_targets(micro_batches) if self.counts_targets else None
            for number, rows in enumerate(micro_batches, 1):
                is_last = number == len(micro_batches)
                with backend.micro_batch(is_last):
                    rows = rows.to(self.device, non_blocking=self.kind.pins)
                    clock.mark("data")
                    inputs = self.inputs_of(rows, first)
                    first += len(rows)
                    by_row = self.loss_weights is not None
                    out = backend.forward(**inputs, **self.trained_loss, loss_by_row=by_row)
                    if self.loss_weights is not None:
                        of_rows = self.loss_weights[source_of(rows)]
                        out.loss_sum = of_rows @ out.loss_sum
                        out.targets = of_rows @ out.targets.float()
                    self._wait_for_compilation()
                    clock.mark("forward")
                    backend.backward(mean_loss(out, divisor))
                    clock.mark("backward")
                norm = backend.update(is_last, norm_limit)
                if is_last and self.average:
                    self.average.update(self.seeded_step)
                clock.mark("optimizer", is_last)
                sums.append(out.loss_sum.detach())
                counts.append(out.targets)
                if out.aux_loss is not None:
                    aux_losses.append(out.aux_loss.detach())
                    loads.append(out.expert_load)
        skipped = backend.skipped_steps
        return StepResult(
            tuple(sums),
            tuple(counts),
            norm,
            actual_lr,
            skipped,
            skipped > skipped_before,
            torch.stack(aux_losses).mean() if aux_losses else None,
            torch.stack(loads).mean(0) if loads else None,
        )

    def _mean_targets(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mean number of targets per micro-batch of the step, over all ranks (collective).

        float32 on the device, which is not waited for. If summed losses are divided by it, their
        mean over micro-batches and ranks is the mean over all targets. A step without targets
        counts as one with a single target, so that its loss is 0.
        """
        counts = [self._count(rows) for rows in micro_batches[:]]  # shows no progress
        total = torch.stack(counts).sum(0).to(self.device, non_blocking=self.kind.pins)
        if self.world_size > 1:
            dist.all_reduce(total)
        if self.loss_weights is not None:
            total = widened(self.loss_weights) @ widened(total)
        total = total / self.parallel.sequence  # each rank that shares rows has counted all
        mean = total.clamp(min=1) / (self.world_size * self.resolved.run.accumulation_steps)
        return mean.float()

    def _count(self, rows: torch.Tensor) -> torch.Tensor:
        """Number of targets of rows (B, T + 1), with weights those of each source, (sources,)."""
        of_rows = (rows[:, 1 : self.row_tokens] >= 0).sum(1)
        if self.loss_weights is None:
            return of_rows.sum()
        by_source = of_rows.new_zeros(len(self.loss_weights))
        return by_source.index_add(0, source_of(rows), of_rows)

    def _wait_for_compilation(self) -> None:
        """After the first forward pass, which compiles, wait until every rank has compiled.

        Cold and warm caches differ by minutes, and the collectives of the backward pass wait for
        --dist_timeout only. Meanwhile no rank is behind another, so none counts as hanging; one
        that ends or is stopped is reported as ever.
        """
        if self._compilation is not None:
            self._compilation.barrier()
            self._compilation = None

    def inputs_of(self, rows: torch.Tensor, first: int = 0) -> dict[str, Any]:
        """Arguments of the model in training for rows (B, T + 1) on its device.

        They are the rows of the seeded step from number `first` on. A teacher computes its logits,
        or has left a record after the tokens of a row.
        """
        rows, records = rows.tensor_split([self.row_tokens], dim=1)
        inputs: dict[str, Any] = text_inputs(rows)
        if self.counts_targets:
            inputs = marked_inputs(rows, has_starts=self.is_fine_tuning)
        if rate := self.resolved.run.dropout:
            place = self.resolved.run.seed, self.seeded_step, first, len(rows)
            inputs |= {"dropout": rate, "dropout_keys": row_keys(*place, rows.device)}
        if self.distillation:
            inputs["own_loss"] = self.distillation.of(inputs, records)
        return inputs

    @torch.no_grad()
    def loss_of(
        self, rows: torch.Tensor, by_row: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return summed loss and target count of rows (B, T + 1), or those of each row, (B,).

        Leaves the model in eval mode.
        """
        rows = rows[:, : self.row_tokens]  # records of a teacher are not read
        self.backend.forward.eval()
        if self.kind.pins and rows.is_cpu:  # from other memory a copy waits for what is queued
            rows = rows.pin_memory()
        rows = rows.to(self.device, non_blocking=self.kind.pins)
        inputs = marked_inputs(rows, has_starts=self.is_fine_tuning)
        # Uncompiled: batches of other shapes than in training would trigger recompilation.
        with lost_peers(), uncompiled(self.model):
            out = self.backend.forward(
                **inputs, loss_chunk_size=self.eval_chunk_size, loss_by_row=by_row
            )
            if self.sequence:
                for local in (out.loss_sum, out.targets):
                    dist.all_reduce(local, group=self.sequence.group)
        return out.loss_sum, out.targets


def sequence_group(parallel: ParallelLayout, rank: int, timeout: timedelta) -> SequenceGroup | None:
    """The ranks that divide the positions of this rank's rows (collective); None without."""
    size = parallel.sequence
    if size == 1:
        return None
    starts = range(0, parallel.world_size, size)
    with lost_peers():  # every rank makes every group
        members = (list(range(first, first + size)) for first in starts)
        groups = [dist.new_group(ranks, timeout=timeout) for ranks in members]
    return SequenceGroup(groups[rank // size], rank % size, size)
