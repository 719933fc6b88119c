"""Updates of ZeRO 1 and 2 by flat partitions: kernels per bucket and group, none per parameter.

DeepSpeed 0.19.8 copies, tests and measures gradients one by one, and links every weight again:
18 kernels per parameter and update, each launched by the host, and four reads (docs/design.md).
Here the gradients of a bucket are copied at once into one vector per group, which DeepSpeed's own
`step` takes as it takes DeepCompile's. Losses, weights and moments are the same bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as _unflatten

from minimind.engine.adapters import TESTED, untested_deepspeed
from minimind.engine.master_weights import copy_gradients
from minimind.engine.optimizers import multi_tensor

OTHER_WRAPPERS = {
    "DeepSpeedZeroOptimizer_Stage3": "stage 3",
    "BF16_Optimizer": "data_types.grad_accum_dtype",
}
CHECKED = 2  # updates of a run whose vectors are compared with the gradients, where that is due
# What DeepSpeed's wrapper must have: read here, or replaced.
READ = (
    *("params_in_partition", "partition_count", "partition_size", "bit16_groups", "dtype"),
    *("round_robin_bit16_groups", "round_robin_bit16_offsets", "round_robin_bit16_padding"),
    *("single_partition_of_fp32_groups", "averaged_gradients", "partition_gradients", "device"),
    *("cpu_offload", "zenflow", "has_moe_layers", "use_separate_grad_accum", "ipg_buckets"),
    *("contiguous_gradients", "reduce_scatter", "use_multi_rank_bucket_allreduce"),
    *("gradient_average", "gradient_predivide_factor", "sequence_parallel_size", "overlap_comm"),
    "gradient_accumulation_steps",
    *("reduce_bucket_size", "dp_process_group", "model_parallel_world_size", "_is_muon_group"),
    *("model_parallel_rank", "_model_parallel_all_reduce", "compute_grad_norm", "clip_grad"),
    *("loss_scale", "_has_inf_or_nan", "is_gradient_accumulation_boundary", "_grad_acc_hooks"),
    *("create_gradient_handling_hooks", "_backward_hook_state"),
    *("_get_preflattened_grad_partition", "_release_preflattened_grad_buffers"),
)
REPLACED = (
    *("overlapping_partition_gradients_reduce_epilogue", "reduce_gradients"),
    *("clear_backward_seen_flag", "check_overflow", "has_overflow_partitioned_grads_serial"),
    *("get_grad_norm_direct", "unscale_and_clip_grads", "_update_model_bit16_weights"),
)

_copy_each = multi_tensor._foreach_copy_


def reason_against(optimizer: Any) -> str:
    """Why DeepSpeed's own path updates; empty if flat partitions cover the wrapper."""
    if installed := untested_deepspeed():
        return f"DeepSpeed {installed} is not the tested {TESTED}"
    name = type(optimizer).__name__
    if name != "DeepSpeedZeroOptimizer":
        return OTHER_WRAPPERS.get(name, f"its wrapper is {name}")
    if missing := [name for name in (*READ, *REPLACED) if not hasattr(optimizer, name)]:
        return f"its wrapper has no {missing[0]}"
    z = optimizer
    by_itself = {
        "offload_optimizer": z.cpu_offload,
        "zenflow": z.zenflow,
        "MoE layers of DeepSpeed": z.has_moe_layers,
        "data_types.grad_accum_dtype": z.use_separate_grad_accum,
        "parameter_alignment": any(map(any, z.round_robin_bit16_padding)),
        "communication_data_type": set(z.ipg_buckets) != {z.dtype},  # or torch_autocast
        "gradient_predivide_factor": z.gradient_predivide_factor != 1.0 and not z.reduce_scatter,
        "Muon of DeepSpeed": any(map(z._is_muon_group, filter(None, z.params_in_partition))),
    }
    among_ranks = {
        "contiguous_gradients = false": not z.contiguous_gradients,
        "reduce_scatter = false": not z.reduce_scatter,
        "use_multi_rank_bucket_allreduce = false": not z.use_multi_rank_bucket_allreduce,
    }
    options = by_itself | (among_ranks if z.partition_count[0] > 1 else {})
    return ", ".join(name for name, is_set in options.items() if is_set)


class Gradients(list[Tensor]):
    """What DeepSpeed's `step` takes as a group's gradients: views, and the vector they show."""

    def __init__(self, flat: Tensor, views: Sequence[Tensor]) -> None:
        super().__init__(views)
        self.flat_partition: Tensor | None = flat

    def release_grad_buffers(self) -> None:
        """Drop the vector; called by DeepSpeed when its optimizer has it."""
        self.clear()
        self.flat_partition = None


class FlatPartitions:
    """Stands in for the hooks, the reduction, the test and the norm of a ZeRO 1 or 2 wrapper.

    On one rank gradients stay in `.grad` until the update. Among several, a bucket is reduced in
    the backward pass as soon as it is full, at stage 1 in that of the last micro-batch, or after it
    without overlap_comm. This rank's part of it goes into the vector of its group.
    """

    def __init__(self, optimizer: Any, checked: int = 0) -> None:
        """checked: how many updates are compared with the gradients themselves."""
        z = self.z = optimizer
        self._deepspeed: Any = sys.modules[type(z).__module__]
        self.comm = comm = self._deepspeed.dist
        self._norm_dtype = self._deepspeed.get_norm_dtype()
        self.fault = ""  # why it was given up
        self._left_to_check = checked
        self._ranks = comm.get_world_size(z.dp_process_group)
        self._params: list[Any] = [p for group in z.bit16_groups for p in group]
        self._sizes = [p.numel() for p in self._params]
        self._own: list[tuple[int, int] | None] = [None] * len(self._params)  # start, length
        self._order: list[list[int]] = []  # of the parameters in each vector, by index
        self._lengths: list[list[int]] = []  # of their parts, and the padding
        index_of = {p: index for index, p in enumerate(self._params)}
        rank = comm.get_rank(z.dp_process_group)
        for group, params in enumerate(z.params_in_partition):
            ordered = z.round_robin_bit16_groups[group]
            offsets = dict(zip(ordered, z.round_robin_bit16_offsets[group], strict=True))
            size, lengths = int(z.partition_size[group]), []
            for p in params:
                start = max(0, rank * size - offsets[p])
                length = min(p.numel(), (rank + 1) * size - offsets[p]) - start
                self._own[index_of[p]] = start, length
                lengths.append(length)
            self._order.append([index_of[p] for p in params])
            self._lengths.append([*lengths, size - sum(lengths)])
        self._vectors: list[Tensor] = []  # of sums over micro-batches, while there are any
        self._parts: list[Any] = [None] * len(self._params)  # views of them
        self._is_added_to = False  # they have the gradients of earlier micro-batches
        self._expected: dict[int, Tensor] = {}  # the same one by one, while updates are compared
        self._bucket: list[int] = []
        self._elements = 0
        self._reduced: list[tuple[Any, list[int], Sequence[Tensor]]] = []
        self._taken: list[int] = []  # in this backward pass
        self._install()

    def _install(self) -> None:
        z = self.z
        for hook in z._grad_acc_hooks:
            hook.remove()
        z._grad_acc_hooks.clear()
        if self._ranks > 1 and (z.partition_gradients or z.overlap_comm):
            take = self._take if z.partition_gradients else self._take_last
            if not self._params[0].is_cpu:
                self._stream = torch.accelerator.current_stream()  # of the updates
                take = partial(self._take_on_stream, take)
            for index, p in enumerate(self._params):
                z._grad_acc_hooks.append(p.register_post_accumulate_grad_hook(partial(take, index)))
        z.overlapping_partition_gradients_reduce_epilogue = self._end_backward
        z.reduce_gradients = self._end_backward
        z.clear_backward_seen_flag = z._backward_hook_state.reset_for_new_step
        if z.model_parallel_world_size == 1 and z.compute_grad_norm:
            z.check_overflow = lambda partition_gradients=True: None  # the norm shows it
        z.has_overflow_partitioned_grads_serial = self._overflow
        z.get_grad_norm_direct = self._norm
        z.unscale_and_clip_grads = self._clip
        z._update_model_bit16_weights = lambda group_index: None  # weights are views already

    def remove(self, fault: str) -> None:
        """Give DeepSpeed its own path back, for a stated reason."""
        self.fault = fault
        for hook in self.z._grad_acc_hooks:
            hook.remove()
        self.z._grad_acc_hooks.clear()
        for name in REPLACED:
            vars(self.z).pop(name, None)
        self.z.create_gradient_handling_hooks()

    def _take(self, index: int, _: Any = None) -> None:
        """Hook: the gradient of a parameter is complete."""
        size = self._sizes[index]
        if self._elements + size > self.z.reduce_bucket_size:
            self._reduce_bucket()
        self._bucket.append(index)
        self._elements += size

    def _take_last(self, index: int, _: Any) -> None:
        """The same at stage 1, which reduces after the last micro-batch only."""
        if self.z.is_gradient_accumulation_boundary():
            self._take(index)

    def _take_on_stream(self, take: Any, index: int, p: Any) -> None:
        """The same on a device with streams: a hook may run on another than the update does."""
        stream = torch.accelerator.current_stream()
        if stream == self._stream:
            take(index, p)
            return
        self._stream.wait_stream(stream)
        p.grad.record_stream(self._stream)  # it is freed here, and was allocated there
        with self._stream:
            take(index, p)

    def _reduce_bucket(self) -> None:
        """Average the gradients of the bucket over ranks (collective)."""
        if not self._bucket:
            return
        z, bucket = self.z, self._bucket
        params = [self._params[index] for index in bucket]
        grads = [p.grad for p in params]
        if self._left_to_check:
            self._expect(bucket, grads)
        if len(bucket) == 1:  # an embedding is larger than the buckets, and is not copied
            buffer = grads[0].view(-1)
        else:
            buffer = grads[0].new_empty(self._elements)
            _copy_each(_unflatten(buffer, grads), grads)
        del grads
        for p in params:  # before the reduction, during which the bucket is held alone
            p.grad = None
        if z.gradient_average:
            buffer.div_(self._ranks / float(z.sequence_parallel_size))
        work = self.comm.all_reduce(buffer, group=z.dp_process_group, async_op=z.overlap_comm)
        pieces = buffer.split_with_sizes([self._sizes[index] for index in bucket])
        self._reduced.append((work, bucket, pieces))
        self._taken += bucket
        self._bucket, self._elements = [], 0
        self._keep_parts(leave=1 if z.overlap_comm else 0)

    def _keep_parts(self, leave: int) -> None:
        """Put this rank's parts of reduced buckets into the vectors, but for the last `leave`."""
        while len(self._reduced) > leave:
            work, bucket, pieces = self._reduced.pop(0)
            if work is not None:
                work.wait()
            if not self._vectors:
                self._begin_vectors()
            targets, parts = [], []
            for index, piece in zip(bucket, pieces, strict=True):
                if own := self._own[index]:
                    targets.append(self._parts[index])
                    parts.append(piece if own[1] == self._sizes[index] else piece.narrow(0, *own))
            if targets:
                (multi_tensor._foreach_add_ if self._is_added_to else _copy_each)(targets, parts)

    def _begin_vectors(self) -> None:
        """A vector for each group; zero where no gradient comes."""
        z = self.z
        for order, lengths in zip(self._order, self._lengths, strict=True):
            vector = torch.zeros(sum(lengths), dtype=z.dtype, device=z.device)
            for index, part in zip(order, vector.split(lengths), strict=False):
                self._parts[index] = part
            self._vectors.append(vector)

    def _end_backward(self, pipeline_parallel: bool = False) -> None:
        """Reduce what is left; after the last micro-batch hand the gradients to DeepSpeed."""
        z = self.z
        if self._ranks > 1:
            if not z._grad_acc_hooks:
                for index, p in enumerate(self._params):
                    if p.grad is not None:
                        self._take(index)
            self._reduce_bucket()
            self._keep_parts(leave=0)
            assert len(set(self._taken)) == len(self._taken), "a gradient was complete twice"
            self._taken.clear()
            self._is_added_to = True
        if z.is_gradient_accumulation_boundary():
            for group in range(len(self._order)):
                gather = self._of_one_rank if self._ranks == 1 else self._of_ranks
                z.averaged_gradients[group] = gather(group)
            if self._left_to_check:
                self._check()
            self._vectors, self._is_added_to = [], False
            self._parts = [None] * len(self._params)  # views, which would keep the vectors
            for p in self._params:
                p.grad = None
        z._epilogue_ran_this_backward = True

    def _of_one_rank(self, group: int) -> Gradients:
        """Gradients of a single rank, from `.grad`."""
        z, lengths = self.z, self._lengths[group]
        dtype = z.single_partition_of_fp32_groups[group].dtype
        vector = torch.empty(sum(lengths), dtype=dtype, device=z.device)
        parts = vector.split(lengths)
        copy_gradients(parts, [*(self._params[index].grad for index in self._order[group]), None])
        return Gradients(vector, parts[:-1])

    def _of_ranks(self, group: int) -> Gradients:
        """This rank's part of the mean over ranks."""
        if not self._vectors:  # no parameter had a gradient
            self._begin_vectors()
        dtype = self.z.single_partition_of_fp32_groups[group].dtype
        vector = self._vectors[group].to(dtype)
        return Gradients(vector, vector.split(self._lengths[group])[:-1])

    def _expect(self, bucket: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Add to what is expected: each gradient by an all-reduce of its own (collective)."""
        z = self.z
        for index, grad in zip(bucket, grads, strict=True):
            whole = grad.detach().clone().view(-1)
            if z.gradient_average:
                whole.div_(self._ranks / float(z.sequence_parallel_size))
            self.comm.all_reduce(whole, group=z.dp_process_group)
            if own := self._own[index]:
                part = whole.narrow(0, *own).clone()
                before = self._expected.get(index)
                self._expected[index] = part if before is None else before.add_(part)

    def _check(self) -> None:
        """Compare the vectors with the gradients themselves (collective).

        Where a rank's differ, every rank takes the gradients and leaves updates to DeepSpeed. Among
        more than two ranks the order of a sum depends on where in a bucket it stands: parts may
        differ by the rounding of as many terms in every micro-batch.
        """
        z, differs = self.z, False
        terms = self._ranks * z.gradient_accumulation_steps if self._ranks > 2 else 0
        rounding = terms * torch.finfo(z.dtype).eps
        for group, order in enumerate(self._order):
            for index, part in zip(order, z.averaged_gradients[group], strict=True):
                one = self._params[index].grad if self._ranks == 1 else self._expected.get(index)
                expected = torch.zeros_like(part) if one is None else one.view(-1).to(part.dtype)
                finite = expected.nan_to_num(0.0, 0.0, 0.0)
                bound = rounding * float(finite.abs().max()) if rounding else 0.0
                if not torch.allclose(part, expected, rtol=0.0, atol=bound, equal_nan=True):
                    part.copy_(expected)
                    differs = True
        self._expected.clear()
        self._left_to_check -= 1
        differ = torch.tensor(int(differs), device=z.device)
        self.comm.all_reduce(differ, op=self.comm.ReduceOp.MAX, group=z.dp_process_group)
        z._model_parallel_all_reduce(tensor=differ, op=self.comm.ReduceOp.MAX)
        if differ.item():
            self._left_to_check = 0
            self.remove("flat partitions differed from the gradients, which were taken instead")

    def _overflow(self) -> Tensor:
        """Whether a gradient is not finite, (1,) on the device.

        Asked only without the norm, and under tensor parallelism, where ranks above 0 leave whole
        weights out of it.
        """
        flats = [gradients.flat_partition for gradients in self.z.averaged_gradients.values()]
        return torch.stack([self.z._has_inf_or_nan(flat) for flat in flats]).any().view(1)

    def _norm(self, gradients: Any, params: Any, norm_type: float = 2) -> Tensor:
        """The norm of a group over all ranks, in DeepSpeed's order and dtype; -1 if not finite."""
        z, comm, is_divided = self.z, self.comm, self._deepspeed.is_model_parallel_parameter
        if z.model_parallel_rank > 0:
            pairs = zip(gradients, params, strict=True)
            gradients = [part for part, p in pairs if is_divided(p)]
        squares = torch.zeros((), device=z.device)
        if gradients:
            norms = multi_tensor._foreach_norm(list(gradients), 2, dtype=self._norm_dtype)
            squares = torch.stack(norms).pow(2.0).sum().float()
        if self._ranks > 1:
            comm.all_reduce(squares, op=comm.ReduceOp.SUM, group=z.dp_process_group)
        z._model_parallel_all_reduce(tensor=squares, op=comm.ReduceOp.SUM)
        norm = squares.pow(0.5)
        return torch.where(torch.isfinite(norm), norm, -1.0)

    def _clip(self, gradients: Sequence[Tensor], norm: Any) -> None:
        """Undo the loss scale and clip, by a norm that `step` has read and found valid."""
        z = self.z
        if z.clip_grad == 0.0 and z.loss_scale == 1.0:
            return
        scale = z.loss_scale
        if z.clip_grad > 0.0:
            scale = torch.clamp((norm / scale + 1e-6) / z.clip_grad, min=1.0) * scale
        for gradient in gradients:
            gradient.mul_(1.0 / scale)
