"""What one rank of many sends in a step and keeps, against `minimind plan`: one process plays it.

    OMP_NUM_THREADS=1 python -m benchmarks.fake_ranks [--ranks 8 64 512 1024] [--out FILE.json]
        [FLAG ...]

The process group sends nothing. It fills what other ranks would, and counts what DeepSpeed and DDP
ask of it in the third step. Ranks 0 and W - 1 are played, each in a fork. Values mean nothing.
FLAGs change the run: preset tiny, rows of 32 tokens, bf16.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor
from torch.futures import Future

from benchmarks.record import arguments, record
from minimind.architecture.costs import bytes_sent, memory
from minimind.architecture.plan import layout_of, shape_of
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.flags import SHAPE
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine import optimizers
from minimind.engine.build import build_engine
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM, enable_checkpointing
from minimind.model.configuration import MiniMindConfig

STAGES = (None, 1, 2, 3)
SMALL = "--model tiny --max_seq_len 32 --batch_size 1 --max_steps 3 --device cpu --dtype bfloat16"
FILL = 0.01
c10d: Any = import_module("torch._C._distributed_c10d")
zero: Any = import_module("deepspeed.runtime.zero.utils")  # before the forks
ProcessGroup: Any = dist.ProcessGroup  # pyright: ignore[reportPrivateImportUsage]


class OneOfMany(ProcessGroup):
    """A group of `size` ranks of which only this one exists.

    In a sum all ranks count as equal. Gathered parts of other ranks are FILL, not this rank's
    values, whose padding is not initialized. Unlike torch's fake group it fills all of them, and
    DDP's C++ calls it too.
    """

    counts: ClassVar[dict[str, dict[str, int]]] = {}  # of all groups of the process, by kind

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "one_of_many"

    def _done(self, kind: str, whole: Tensor, passes: int, result: Any) -> Any:
        """Count one call: on a ring each pass sends the whole but one part of `size`."""
        sent = passes * whole.nbytes * (self._size - 1) / self._size
        call = {"calls": 1, "elements": whole.numel(), "bytes": whole.nbytes, "sent": sent}
        before = self.counts.setdefault(kind, dict.fromkeys(call, 0))
        self.counts[kind] = {name: before[name] + value for name, value in call.items()}
        future: Future[Any] = Future()
        future.set_result(result)
        return c10d._create_work_from_future(future)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        if opts.reduceOp == dist.ReduceOp.SUM:
            tensor.mul_(self._size)
        return self._done("all_reduce", tensor, 2, tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        (tensor,) = tensors
        return self._done("broadcast", tensor, 1, tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self._done("barrier", torch.empty(0), 1, None)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Of lists: what DDP compares, so that every rank has to hold the same."""
        for part in outputs[0]:
            part.copy_(inputs[0])
        whole = inputs[0].expand(self._size, *inputs[0].shape)
        return self._done("all_gather", whole, 1, outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        own = own.clone()  # it may be a part of the output
        output.fill_(FILL).view(self._size, -1)[self._rank] = own.view(-1)
        return self._done("all_gather", output, 1, output)

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        output.view(-1).copy_(whole.view(self._size, -1)[self._rank])
        if opts.reduceOp == dist.ReduceOp.SUM:
            output.mul_(self._size)
        return self._done("reduce_scatter", whole, 1, output)

    # Their names in older versions of torch.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single


def play(rank: int, world_size: int, stage: int | None, flags: Sequence[str]) -> dict[str, Any]:
    """What rank `rank` of `world_size` does in its third step, and what the plan says of it."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # nobody listens
    dist.Backend.register_backend(  # pyright: ignore[reportPrivateImportUsage]
        "one_of_many", lambda store, rank, size, timeout: OneOfMany(rank, size), devices=["cpu"]
    )
    new_group = dist.new_group
    dist.new_group = lambda *given, **named: new_group(*given, **{**named, "backend": None})
    # What every rank compares with rank 0's at stage 3.
    zero.assert_lst_len_same_as_other_ranks = lambda numbers: None
    zero.get_lst_from_rank0 = lambda numbers: numbers
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("one_of_many", store=store, rank=rank, world_size=world_size)
    run = parse_flags([*SMALL.split(), *flags])
    document = read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG))
    document["zero_optimization"] |= {"stage": stage}
    if run.is_explicit("optimizer"):
        del document["optimizer"]
    resolved = ResolvedConfig(run, "ddp")
    if stage is not None:
        resolved = resolve(document, "fake_ranks.json", run, world_size, "cpu")
    shape, layout = shape_of(run), layout_of(run, world_size, resolved.config, "cpu")
    sizes = {name: getattr(run, name) for name in SHAPE if name != "rope_theta"}
    # As the plan counts for a CPU.
    optimizers.iteration_dtype = lambda device: torch.float32
    model = MiniMindForCausalLM(MiniMindConfig(**sizes))
    if run.gradient_checkpointing:
        enable_checkpointing(model)
    engine = build_engine(resolved, model, "cpu")
    for _ in range(3):  # stage 3 learns the order of weights in the first, DDP its buckets
        OneOfMany.counts.clear()
        clock = PhaseClock(torch.device("cpu"))
        clock.begin()
        rows = torch.randint(run.vocab_size, (run.accumulation_steps, 1, run.max_seq_len + 1))
        done = engine.step(list(rows), 1e-3, clock)
        assert not done.is_skipped
    sent = sum(call["sent"] for call in OneOfMany.counts.values())
    optimizer: Any = engine.backend.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    moments = [value for state in base.state.values() for value in state.values()]
    weights = {id(p) for p in engine.model.parameters()}  # in fp32 DDP has no other masters
    masters = [p for p in base.state if id(p) not in weights]
    held = sum(t.nbytes for t in (*masters, *moments) if torch.is_tensor(t) and t.ndim)
    return {
        "of": {"world_size": world_size, "rank": rank, "stage": stage},
        "collectives": OneOfMany.counts,
        "sent": {"counted": sent, "plan": bytes_sent(shape, layout)},
        "state": {"counted": held, "plan": memory(shape, layout).optimizer},
    }


def in_a_fork(*case: Any) -> dict[str, Any]:
    """What `play` returns: DeepSpeed knows one process group per process."""
    context = multiprocessing.get_context("fork")
    results: Any = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(play(*case)))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{case} ended with {process.exitcode}")
    return results.get()


def shown(found: dict[str, Any]) -> str:
    """One line of the table."""
    of, sent, state = found["of"], found["sent"], found["state"]
    name = "DDP" if of["stage"] is None else f"ZeRO-{of['stage']}"
    calls = ", ".join(
        f"{call['calls']} {kind} {call['elements']:,}"
        for kind, call in found["collectives"].items()
    )
    return (
        f"{of['world_size']:>6,}{of['rank']:>6,} {name:<8}{sent['counted'] / 2**20:>8.3f}"
        f"{sent['counted'] / sent['plan'] - 1:>+9.3%}{state['counted']:>12,}"
        f"{state['counted'] - state['plan']:>+6,}  {calls}"
    )


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512, 1024])
    args, flags = parser.parse_known_args()
    load = os.getloadavg()
    print(
        f"{'ranks':>6}{'rank':>6} {'':8}{'MiB sent':>8}{'plan off':>9}{'state bytes':>12}{'off':>6}"
        "  calls and elements"
    )
    table = []
    for world_size in args.ranks:
        for stage in STAGES:
            for rank in (0, world_size - 1):
                table.append(in_a_fork(rank, world_size, stage, flags))
                print(shown(table[-1]), flush=True)
    record(args.out, "fake_ranks", load, table=table)
