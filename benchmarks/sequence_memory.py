"""Activations that a process holds for the backward pass, by row length, with --sequence_parallel.

    OMP_NUM_THREADS=1 python -m benchmarks.sequence_memory [--model 26m] [--sizes 1 2 4]
        [--lengths 512 1024 ...] [--out FILE.json]

One row on each number of CPU processes (--sizes) in fp32 (gloo), forward pass and loss. Counted are
the bytes of the storages that autograd saves, each once and without parameters: the most of any
rank. Speed is not measured: the processes may share cores.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.record import arguments, preset, record
from minimind.model.sequence import SequenceGroup

SIZES = [1, 2, 4]
LENGTHS = [512, 1024, 2048, 4096, 8192]


def saved_bytes(name: str, length: int, group: SequenceGroup | None) -> int:
    """Bytes that autograd saves in the forward pass of one row."""
    torch.manual_seed(0)
    model = preset(name, length)
    model.sequence = group
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}  # by address; kept, so that no address is used twice

    def hold(x: Tensor) -> Tensor:
        if (address := x.untyped_storage().data_ptr()) not in own:
            held[address] = x
        return x

    row = torch.randint(model.config.vocab_size, (1, length + 1))
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        model(row[:, :-1], shift_labels=row[:, 1:], loss_chunk_size=0, use_cache=False)
    return sum(x.untyped_storage().nbytes() for x in held.values())


def measure(rank: int, size: int, name: str, lengths: list[int], folder: str) -> None:
    """Write the most bytes of any rank for each length, in one of `size` processes."""
    torch.set_num_threads(1)
    place = f"file://{folder}/store-{size}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
    world = dist.group.WORLD
    assert world is not None
    group = SequenceGroup(world, rank, size) if size > 1 else None
    most = torch.tensor([saved_bytes(name, length, group) for length in lengths])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save(most.tolist(), f"{folder}/{size}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Measure every size, print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    args = parser.parse_args()
    heads = preset(args.model, 1).config.num_attention_heads
    if unequal := [size for size in args.sizes if heads % size]:
        parser.error(f"--sizes {unequal[0]} does not divide the {heads} heads of {args.model}")
    load = os.getloadavg()
    found: dict[int, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in args.sizes:
            spawn(measure, (size, args.model, args.lengths, folder), size)
            found[size] = torch.load(Path(folder, f"{size}.pt"), weights_only=True)
    print(f"{'row':>6}" + "".join(f"{f'N = {size}, MiB':>16}" for size in args.sizes))
    for number, length in enumerate(args.lengths):
        cells = (f"{found[size][number] / 2**20:>16,.1f}" for size in args.sizes)
        print(f"{length:>6}" + "".join(cells))
    record(args.out, "sequence_memory", load, lengths=args.lengths, bytes_by_size=found)


if __name__ == "__main__":
    main()
