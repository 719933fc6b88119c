"""Updates of ZeRO 1 and 2 by flat partitions: kernels per bucket and group, none per parameter.

DeepSpeed 0.19.8 copies, tests and measures gradients one by one, and links every weight again:
18 kernels per parameter and update, each launched by the host, and four reads (docs/design.md).
Here the gradients of a bucket are copied at once into one vector per group, which DeepSpeed's own
`step` takes as it takes DeepCompile's. Losses, weights and moments are the same bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minimind.engine.adapters import TESTED, untested_deepspeed

CHECKED = 2  # updates of a run whose vectors are compared with the gradients, where that is due
# What DeepSpeed's wrapper must have: read here, or replaced.
READ = (
    *("params_in_partition", "partition_size", "bit16_groups", "averaged_gradients", "zenflow"),
    *("round_robin_bit16_groups", "round_robin_bit16_offsets", "round_robin_bit16_padding"),
    *("single_partition_of_fp32_groups", "_backward_hook_state", "create_gradient_handling_hooks"),
    *("_grad_acc_hooks", "_get_preflattened_grad_partition", "_release_preflattened_grad_buffers"),
)
REPLACED = (
    *("overlapping_partition_gradients_reduce_epilogue", "reduce_gradients"),
    *("clear_backward_seen_flag", "check_overflow", "has_overflow_partitioned_grads_serial"),
    *("get_grad_norm_direct", "unscale_and_clip_grads", "_update_model_bit16_weights"),
)

_copy_each: Any = torch._foreach_copy_
_add_each: Any = torch._foreach_add_
_norm_each: Any = torch._foreach_norm


def reason_against(optimizer: Any, ranks: int) -> str:
    """Why DeepSpeed's own path updates; empty if flat partitions cover the wrapper.

    ranks: those among which its gradients are summed.
    """
    if installed := untested_deepspeed():
        return f"DeepSpeed {installed} is not the tested {TESTED}"
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer":
        return f"its wrapper is {type(optimizer).__name__}"
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
        "Muon of DeepSpeed": any(map(z._is_muon_group, filter(None, z.params_in_partition))),
    }
    among_ranks = {
        "contiguous_gradients = false": not z.contiguous_gradients,
        "reduce_scatter = false": not z.reduce_scatter,
        "use_multi_rank_bucket_allreduce = false": not z.use_multi_rank_bucket_allreduce,
    }
    options = by_itself | (among_ranks if ranks > 1 else {})
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
        self._expected: dict[nn.Parameter, Tensor] = {}  # own parts, while updates are compared
        self._place: dict[nn.Parameter, tuple[int, int, int, int]] = {}
        self._lengths: list[list[int]] = []  # of the parts of each group, and its padding
        rank = comm.get_rank(z.dp_process_group)
        for group, params in enumerate(z.params_in_partition):
            ordered = z.round_robin_bit16_groups[group]
            offsets = dict(zip(ordered, z.round_robin_bit16_offsets[group], strict=True))
            size, lengths = int(z.partition_size[group]), []
            for index, p in enumerate(params):
                start = max(0, rank * size - offsets[p])
                length = min(p.numel(), (rank + 1) * size - offsets[p]) - start
                self._place[p] = group, index, start, length
                lengths.append(length)
            self._lengths.append([*lengths, size - sum(lengths)])
        self._parts: list[Sequence[Tensor] | None] = [None] * len(self._lengths)
        self._flats: list[Tensor | None] = [None] * len(self._lengths)
        self._is_added_to = False  # the vectors have the gradients of earlier micro-batches
        self._bucket: list[nn.Parameter] = []
        self._elements = 0
        self._seen: set[nn.Parameter] = set()  # in this backward pass
        self._streams: set[Any] = set()  # of the bucket's gradients
        self._reduced: list[tuple[Any, list[nn.Parameter], list[Tensor]]] = []
        self._install()

    def _install(self) -> None:
        z = self.z
        for hook in z._grad_acc_hooks:
            hook.remove()
        z._grad_acc_hooks.clear()
        if self._ranks > 1 and (z.partition_gradients or z.overlap_comm):
            take = self._take if z.bit16_groups[0][0].is_cpu else self._take_on_stream
            for group in z.bit16_groups:
                z._grad_acc_hooks += [p.register_post_accumulate_grad_hook(take) for p in group]
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

    def _take(self, p: nn.Parameter) -> None:
        """Hook: the gradient of `p` is complete."""
        if not (self.z.partition_gradients or self.z.is_gradient_accumulation_boundary()):
            return
        assert p not in self._seen, "a gradient is complete twice in a backward pass"
        self._seen.add(p)
        if self._elements + p.numel() > self.z.reduce_bucket_size:
            self._reduce_bucket()
        self._bucket.append(p)
        self._elements += p.numel()

    def _take_on_stream(self, p: nn.Parameter) -> None:
        """The same on a device with streams: hooks of compiled parts may run on others."""
        self._take(p)
        self._streams.add(torch.accelerator.current_stream())

    def _reduce_bucket(self) -> None:
        """Begin the mean over ranks of the bucket's gradients; the backward pass goes on."""
        if not self._bucket:
            return
        z, bucket = self.z, self._bucket
        for stream in self._streams:
            torch.accelerator.current_stream().wait_stream(stream)
        grads: list[Any] = [p.grad for p in bucket]
        if len(bucket) == 1:  # an embedding is larger than the buckets, and is not copied
            buffer = grads[0].view(-1)
            pieces = [buffer]
        else:
            buffer = grads[0].new_empty(self._elements)
            pieces = list(buffer.split([grad.numel() for grad in grads]))
            _copy_each(pieces, [grad.view(-1) for grad in grads])
        if self._left_to_check:
            self._expect(bucket, grads)
        if z.gradient_average:
            buffer.div_(self._ranks / float(z.sequence_parallel_size))
        work = self.comm.all_reduce(buffer, group=z.dp_process_group, async_op=z.overlap_comm)
        for p in bucket:
            p.grad = None
        self._reduced.append((work, bucket, pieces))
        self._bucket, self._elements, self._streams = [], 0, set()
        self._keep_parts(leave=1 if z.overlap_comm else 0)

    def _keep_parts(self, leave: int) -> None:
        """Put this rank's parts of reduced buckets into the vectors, but for the last `leave`."""
        while len(self._reduced) > leave:
            work, params, pieces = self._reduced.pop(0)
            if work is not None:
                work.wait()
            targets, parts = [], []
            for p, piece in zip(params, pieces, strict=True):
                if p in self._place:
                    group, index, start, length = self._place[p]
                    targets.append(self._parts_of(group)[index])
                    parts.append(piece if length == len(piece) else piece.narrow(0, start, length))
            if targets:
                (_add_each if self._is_added_to else _copy_each)(targets, parts)

    def _parts_of(self, group: int) -> Sequence[Tensor]:
        """Parts of a group's vector, by parameter; zero where no gradient comes."""
        if (parts := self._parts[group]) is None:
            z, lengths = self.z, self._lengths[group]
            flat = self._flats[group] = torch.zeros(sum(lengths), dtype=z.dtype, device=z.device)
            parts = self._parts[group] = flat.split(lengths)
        return parts

    def _end_backward(self, pipeline_parallel: bool = False) -> None:
        """Reduce what is left; after the last micro-batch hand the gradients to DeepSpeed."""
        z = self.z
        if self._ranks > 1 and not z._grad_acc_hooks:
            for p in (p for group in z.bit16_groups for p in group if p.grad is not None):
                self._take(p)
        self._reduce_bucket()
        self._keep_parts(leave=0)
        self._seen.clear()
        self._is_added_to = True
        if z.is_gradient_accumulation_boundary():
            is_equal = True
            for group in range(len(self._lengths)):
                gradients = self._gathered(group) if self._ranks == 1 else self._summed(group)
                z.averaged_gradients[group] = gradients
                if self._left_to_check:
                    is_equal &= self._is_as_expected(group, gradients)
            self._is_added_to = False
            if self._left_to_check:
                self._end_check(is_equal)
            if self._ranks == 1:
                for p in self._place:
                    p.grad = None
        z._epilogue_ran_this_backward = True

    def _gathered(self, group: int) -> Gradients:
        """Gradients of a single rank, from `.grad`."""
        z, lengths = self.z, self._lengths[group]
        masters = z.single_partition_of_fp32_groups[group]
        flat = torch.empty(sum(lengths), dtype=masters.dtype, device=z.device)
        *parts, padding = flat.split(lengths)
        grads: list[Any] = [p.grad for p in z.params_in_partition[group]]
        given = [(at, g.view(-1)) for at, g in zip(parts, grads, strict=True) if g is not None]
        missing = [at for at, g in zip(parts, grads, strict=True) if g is None]
        torch._foreach_zero_([*missing, padding])
        if given:
            _copy_each(*map(list, zip(*given, strict=True)))
        return Gradients(flat, parts)

    def _summed(self, group: int) -> Gradients:
        """This rank's part of the mean over ranks."""
        z = self.z
        self._parts_of(group)
        flat: Any = self._flats[group]
        flat = flat.to(z.single_partition_of_fp32_groups[group].dtype)
        self._flats[group] = self._parts[group] = None
        return Gradients(flat, flat.split(self._lengths[group])[:-1])

    def _expect(self, params: Sequence[nn.Parameter], grads: Sequence[Tensor]) -> None:
        """Add to what is expected: each gradient by an all-reduce of its own (collective)."""
        z = self.z
        for p, grad in zip(params, grads, strict=True):
            own = grad.detach().clone().view(-1)
            if z.gradient_average:
                own.div_(self._ranks / float(z.sequence_parallel_size))
            self.comm.all_reduce(own, group=z.dp_process_group)
            if p in self._place:
                _, _, start, length = self._place[p]
                part = own.narrow(0, start, length).clone()
                self._expected[p] = self._expected[p].add_(part) if p in self._expected else part

    def _is_as_expected(self, group: int, gradients: Gradients) -> bool:
        """Whether a vector has the gradients themselves; if not, they are put into it.

        Among more than two ranks the order of a sum depends on where in a bucket it stands: parts
        may differ by the rounding of as many terms.
        """
        is_equal = True
        for p, part in zip(self.z.params_in_partition[group], gradients, strict=True):
            found = p.grad if self._ranks == 1 else self._expected.pop(p, None)
            expected = torch.zeros_like(part) if found is None else found.view(-1).to(part.dtype)
            bound = 0.0
            if self._ranks > 2:
                rounding = self._ranks * torch.finfo(self.z.dtype).eps
                bound = rounding * float(expected.abs().max()) if len(expected) else 0.0
            if not torch.allclose(part, expected, rtol=0.0, atol=bound, equal_nan=True):
                part.copy_(expected)
                is_equal = False
        return is_equal

    def _end_check(self, is_equal: bool) -> None:
        """Count a compared update; give up on every rank where one differed (collective)."""
        differ = torch.tensor(0 if is_equal else 1, device=self.z.device)
        self.comm.all_reduce(differ, op=self.comm.ReduceOp.MAX, group=self.z.dp_process_group)
        self._left_to_check -= 1
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
            norms = _norm_each(list(gradients), 2, dtype=self._norm_dtype)
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
