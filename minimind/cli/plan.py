"""`minimind plan`: what fits."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.architecture.costs import ASSUMED_MFU, GPUS, known_gpu, named_gpu
from minimind.cli.command import OfRunFlags, argument, size_in_bytes
from minimind.config.run_config import RunConfig
from minimind.runtime.terminal import fitted

LABELED = 12  # column of the text behind a label
DATA_SHEETS = tuple(gpu.name for gpu in GPUS if gpu.memory)


@dataclass(kw_only=True)
class Plan(OfRunFlags):
    """Print memory, communication and FLOPs of every ZeRO stage, and which of them fit.

    Takes the flags of train_pretrain.py too (--model, --dim, --batch_size, --dtype,
    --deepspeed_config, ...), with the same names and ranges.
    """

    example = "minimind plan --model 104m --gpus 8 --memory 24GiB --batch_size 16"
    gpus: int = argument(1, ge=1)
    """processes, one per GPU"""
    memory: int | None = argument(None, parse=size_in_bytes)
    """memory of one GPU, such as 24GiB, 24GB (10^9 bytes) or 512MiB; a bare number counts GiB
    (default: from --gpu_model)"""
    gpu_model: str | None = argument(None, parse=named_gpu, choices=DATA_SHEETS, metavar="NAME")
    """model of the GPUs, for memory and peak, such as H100, 4090 or a100-40gb; an unknown name
    lists the known ones"""
    peak_tflops: float | None = argument(None, gt=0)
    """dense peak of one GPU in --dtype, in TFLOPS (default: from --gpu_model)"""
    mfu: float | None = argument(None, gt=0, le=1, unset=ASSUMED_MFU)
    """fraction of the peak that is reached"""
    tokens: float | None = argument(None, gt=0)
    """number of tokens to train on, such as 1e9"""

    def execute(self) -> None:
        from minimind.architecture.plan import Machine, plan

        gpu = self.gpu_model and known_gpu(self.gpu_model)
        peak = self.peak_tflops or (gpu.peak_tflops if gpu else None)
        memory = self.memory or (gpu.memory * 2**30 if gpu else None)
        machine = Machine(self.gpus, memory, peak, self.mfu, self.tokens)

        def sized(run: RunConfig) -> RunConfig:
            from minimind.train.start import teacher_of  # torch

            return teacher_of(run).sized(run)

        print(fitted(plan(self.run_flags, machine, sized), LABELED))
