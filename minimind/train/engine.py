"""The one seam to Accelerate and DeepSpeed: a model and a resolved configuration in, steps out.

Nothing else in the package imports the two libraries. Three of their habits are dealt with here:
without CUDA, Accelerate's DeepSpeed path finds no backend and lets every rank believe that it is
rank 0 of 1, so gloo is named explicitly and the ranks are counted; DeepSpeed compiles a
shared-memory op at the first CPU start, which only inference uses, so it is not built; and
`clip_grad_norm_` and prepared schedulers mean something else under DeepSpeed, so neither is used.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from minimind.config import RunConfig
from minimind.errors import PeerError, RendezvousError, UsageError
from minimind.model.decoder import MiniMindForCausalLM
from minimind.model.loss import next_token_loss
from minimind.train.deepspeed_config import Resolved
from minimind.train.optimizer import adamw, parameter_groups
from minimind.train.profile import PhaseClock

PRECISION = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: this rank's summed loss and target count, and the global norm.

    Tensors stay on the device; whoever reports them reads them.
    """

    loss_sum: torch.Tensor
    tokens: torch.Tensor
    grad_norm: float | torch.Tensor | None
    lr: float  # as the optimizer had it
    skipped_so_far: int  # steps DeepSpeed dropped since step 0 for a non-finite gradient


def choose_device(run: RunConfig) -> str:
    """`cuda` or `cpu`; a UsageError when a GPU is asked for and there is none."""
    if run.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device = cuda ({run.sources['device']}), but torch sees no GPU here; use --device cpu"
        )
    if run.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return run.device


def launched_world() -> tuple[int, int]:
    """(rank, world size) as the launcher says; a process started by hand is rank 0 of 1."""
    if "LOCAL_RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def build_engine(resolved: Resolved, model: MiniMindForCausalLM, device: str) -> Engine:
    """The model under DeepSpeed, its optimizer and process group with it.

    The configuration must be resolved: DeepSpeed gets exactly what the table printed.
    """
    run = resolved.run
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is first imported
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # also where there are GPUs
    # The YAML's deepspeed fields were read by our resolver; left set, Accelerate raises over them.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    _quiet("DeepSpeed", "accelerate")
    # DeepSpeed 0.19.8 still calls the old names of two collectives; torch 2.13 says so each time.
    warnings.filterwarnings("ignore", r"`torch.distributed.\w+` is deprecated", FutureWarning)
    import accelerate
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, InitProcessGroupKwargs

    deepspeed.ops.__dict__["__compatible_ops__"] = _without_shared_memory_op(deepspeed.ops)
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for it
        torch.use_deterministic_algorithms(True)
    backend = "nccl" if device == "cuda" else "gloo"
    timeout = timedelta(seconds=run.dist_timeout)
    try:
        accelerator = accelerate.Accelerator(
            mixed_precision=PRECISION[run.dtype],
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=resolved.config),
            gradient_accumulation_steps=run.accumulation_steps,
            kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=timeout)],
        )
    except dist.DistError as error:
        raise RendezvousError(f"the ranks did not meet: {error}; check the launcher") from error
    if accelerator.num_processes != dist.get_world_size():
        raise RendezvousError(
            f"Accelerate counts {accelerator.num_processes} processes, the process group"
            f" {dist.get_world_size()}; every rank would read the same rows"
        )
    assert accelerator.device.type == device, f"asked for {device}, got {accelerator.device}"
    parameters = sum(p.numel() for p in model.parameters())
    groups = parameter_groups(model, run.weight_decay)
    named = "optimizer" in resolved.config
    optimizer = DummyOptim(groups, lr=run.learning_rate) if named else adamw(groups, run)
    prepared = _prepared(accelerator, model, optimizer, run.deepspeed_config)
    return Engine(prepared, resolved, accelerator.device, parameters)


def _prepared(accelerator: Any, model: Any, optimizer: Any, path: str) -> Any:
    """The DeepSpeed engine; what DeepSpeed or the optimizer refuse in `path` is a UsageError."""
    from deepspeed.runtime.config import DeepSpeedConfigError
    from pydantic import ValidationError

    try:
        return accelerator.prepare(model, optimizer)[0]
    except (ValidationError, DeepSpeedConfigError) as error:  # its own check of nested sections
        raise UsageError(f"{path}: {_first_fault(error)}; mend it there") from error
    except TypeError as error:  # the optimizer's own check of its parameters
        if "unexpected keyword argument" not in str(error):
            raise
        raise UsageError(f"{path}: optimizer.params: {error}; mend it") from error


def _first_fault(error: Exception) -> str:
    """`key: what` of a pydantic error, the key as seen from its section; else its text."""
    faults = getattr(error, "errors", list)()
    if not faults:
        return " ".join(str(error).split())
    return f"{'.'.join(map(str, faults[0]['loc']))}: {faults[0]['msg']}"


def _without_shared_memory_op(ops: Any) -> dict[str, bool]:
    """DeepSpeed's table of buildable ops with the one that only inference all-reduces use off.

    It takes a compiler and up to 80 s, and a process killed meanwhile leaves a lock behind that
    every later start waits for, in silence.
    """
    return {**ops.__compatible_ops__, "deepspeed_shm_comm": False}


def _quiet(*names: str) -> None:
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)


# What gloo and c10d say when the other end of a connection is gone or silent.
LOST = ("Connection closed", "Connection reset", "Broken pipe", "imed out", "remote process exited")


@contextmanager
def _peers() -> Iterator[None]:
    """Turn the end of a peer, which the libraries tell as a RuntimeError, into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(words in str(error) for words in LOST):
            reason = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0]
            raise PeerError(
                f"another rank is gone or does not answer ({reason}); run the same command again"
            ) from error
        raise


class Engine:
    """Takes optimizer steps over all ranks, and answers what the others may not ask DeepSpeed."""

    backend = "deepspeed"

    def __init__(
        self, deepspeed_engine: Any, resolved: Resolved, device: torch.device, parameters: int
    ) -> None:
        self.deepspeed = deepspeed_engine
        self.parameters = parameters  # of the whole model; stage 3 leaves each rank a piece
        self.resolved = resolved
        self.device = device
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # Small facts travel over gloo, so that agreeing on them never waits for the GPU.
        patience = timedelta(seconds=resolved.run.dist_timeout)
        self._control: Any = dist.new_group(backend="gloo", timeout=patience)

    @property
    def model(self) -> MiniMindForCausalLM:
        """The model inside the engine."""
        return self.deepspeed.module

    def seed(self, step: int) -> None:
        """Reseed torch for one step, so that no random state needs to be in a checkpoint."""
        mixed = (self.resolved.run.seed * 1_000_003 + step) * 4_099 + self.rank
        torch.manual_seed(mixed % 2**63)

    def step(
        self, micro_batches: Sequence[torch.Tensor], lr: float, clock: PhaseClock
    ) -> StepResult:
        """One optimizer step over this rank's micro-batches, each (B, T + 1) token ids.

        The learning rate is set first: at the last micro-batch DeepSpeed reduces, clips and
        updates. It divides by the number of micro-batches itself. Rows are packed, so that every
        micro-batch on every rank has the same number of targets: only therefore is the mean over
        micro-batches and ranks the mean over tokens.
        """
        engine = self.deepspeed
        engine.train()
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = torch.zeros((), dtype=torch.int64, device=self.device)
        norm = None
        with _peers():
            for rows in micro_batches:
                rows = rows.to(self.device, non_blocking=True)
                clock.mark("data")
                loss, count = self._loss(rows)
                clock.mark("forward")
                engine.backward(loss / count)
                clock.mark("backward")
                if engine.is_gradient_accumulation_boundary():
                    norm = self._norm_of_replicated_gradients()
                engine.step()
                clock.mark("optimizer")
                loss_sum += loss.detach()
                tokens += count
        norm = norm if norm is not None else engine.get_global_grad_norm()
        used = engine.optimizer.param_groups[0]["lr"]
        return StepResult(loss_sum, tokens, norm, used, engine.skipped_steps)

    @torch.no_grad()
    def loss_of(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(summed loss, target count) of rows (B, T + 1) without training on them."""
        self.deepspeed.eval()
        with _peers():
            return self._loss(rows.to(self.device))

    def _loss(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = rows[:, :-1].clamp(min=0)  # a row of ignored targets still needs real inputs
        return next_token_loss(self.deepspeed(input_ids=inputs).logits, rows[:, 1:])

    def _norm_of_replicated_gradients(self) -> torch.Tensor | None:
        """The gradient norm where DeepSpeed keeps none: stage 0 in fp32, gradients in .grad."""
        engine = self.deepspeed
        if engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
            return None
        return torch.nn.utils.get_total_norm(
            [p.grad for p in engine.module.parameters() if p.grad is not None]
        )

    def sum_over_ranks(self, numbers: list[float]) -> list[float]:
        """Element by element, in float64, the same on every rank."""
        total = torch.tensor(numbers, dtype=torch.float64)
        with _peers():
            dist.all_reduce(total, group=self._control)
        return total.tolist()

    def any_rank(self, answer: bool) -> bool:
        """Whether any rank says yes; every rank must ask."""
        return self.sum_over_ranks([float(answer)])[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """The JSON-like values of all ranks, by rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        with _peers():
            dist.all_gather_object(values, value, group=self._control)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with _peers():
            dist.barrier(group=self._control)

    def close(self) -> None:
        """Leave the process group; the engine is of no use afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()
