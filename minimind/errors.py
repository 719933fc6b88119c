"""Errors that end a run, each with its exit status.

The message of a `RunError` is one sentence: the field, the value, its source and, after a
semicolon, the remedy. Any other exception that escapes is a bug and exits with status 70.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any


class RunError(Exception):
    """Base class of errors that are printed as one line, without a traceback."""

    code = "E_INTERNAL"
    status = 70

    def __init__(
        self, message: str, cause_rank: int | None = None, table: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.cause_rank = cause_rank  # the failing rank, where all ranks raise its error
        self.table = table  # lines printed above the message


class UsageError(RunError):
    """The command line or a configuration file is invalid."""

    code = "E_USAGE"
    status = 2


def fault_error(faults: list[str]) -> UsageError:
    """Combine all faults into one error, numbered if there are several."""
    unique = list(dict.fromkeys(faults))
    if len(unique) == 1:
        return UsageError(unique[0])
    numbered = " ".join(
        f"({n}) {fault}" if fault.endswith("?") else f"({n}) {fault}."
        for n, fault in enumerate(unique, 1)
    )
    return UsageError(f"{len(unique)} faults: {numbered}")


class DataError(RunError):
    """The text, the tokenizer or the prepared tokens cannot be trained on."""

    code = "E_DATA"
    status = 3


class TooFewRows(DataError):
    """A step, or a source, wants more rows than the text has; with other settings it may not."""


class CheckpointError(RunError):
    """No checkpoint is usable, or the checkpoint belongs to another run."""

    code = "E_CHECKPOINT"
    status = 4


class StorageError(RunError):
    """A file cannot be written, or object storage does not answer."""

    code = "E_STORAGE"
    status = 5


class NumericError(RunError):
    """The loss or the gradient is not finite."""

    code = "E_NONFINITE"
    status = 6


class PeerError(RunError):
    """Another rank died, hung or exited."""

    code = "E_PEER"
    status = 7


class LockedError(RunError):
    """Another run is writing to the same out_dir."""

    code = "E_LOCKED"
    status = 8


class RendezvousError(RunError):
    """The ranks could not connect to each other."""

    code = "E_RENDEZVOUS"
    status = 9


class MemoryFull(RunError):
    """Device or host memory could not be allocated."""

    code = "E_MEMORY"
    status = 10

    def __init__(
        self, message: str, halved: Mapping[str, Any] | None = None, goes_on: bool = False
    ) -> None:
        """halved: fields of the event `HALVED` if the next start takes a smaller micro-batch.

        goes_on: that start is possible in this process.
        """
        super().__init__(message)
        self.halved = halved
        self.goes_on = goes_on


HALVED = "micro_batch_halved"  # event: a start of the same run takes a smaller micro-batch


class CorruptionError(RunError):
    """A rank computes wrongly, or holds other numbers than it should."""

    code = "E_CORRUPTION"
    status = 11


# Messages of failed allocations that have no exception type: of torch, cuBLAS, cuDNN, NCCL, ROCm,
# oneAPI and torch_npu.
# Triton's "out of resource" concerns a single kernel and is not included.
HOST_FULL = "DefaultCPUAllocator: can't allocate memory"
DEVICE_FULL = re.compile(
    r"(CUDA|HIP|XPU|NPU) out of memory|(CUDA|HIP) error: out of memory|Cuda failure.*out of memory"
    r"|MPS backend out of memory|Invalid buffer size: |_OUT_OF_DEVICE_MEMORY"
    r"|(CU|HIP)BLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)

# vGPUs and some WSL2 drivers do not have the virtual memory management that expandable segments,
# which this program turns on, are made of.
NOT_EXPANDABLE = "CUDA driver error: operation not supported"

NO_HOME = "Could not determine home directory."  # of Path.expanduser


def which_memory(error: BaseException) -> str:
    """Return `device` or `host` if `error` is a failed allocation there, else an empty string."""
    if isinstance(error, MemoryError) or HOST_FULL in str(error):
        return "host"
    # By name, so that this module does not import torch.
    is_typed = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    has_message = isinstance(error, RuntimeError) and DEVICE_FULL.search(str(error))
    return "device" if is_typed or has_message else ""


def is_of_compiler(error: BaseException) -> bool:
    """Whether it is what torch.compile raises if a compiler fails, or was killed."""
    return any(kind.__name__ == "BackendCompilerFailed" for kind in type(error).__mro__)


FULL = (errno.ENOSPC, errno.EDQUOT)
# What the surroundings refuse for a path, not what a program forgot.
OF_DISK = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR),
    *(errno.EINVAL, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.ETIMEDOUT),
)


# What helps against an error of the disk, by its number.
CURES = {
    **dict.fromkeys(FULL, "free some space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "correct its permissions"),
    errno.EROFS: "mount its file system for writing",
    errno.ENAMETOOLONG: "shorten the name",
    errno.ELOOP: "correct its links",
    errno.ENOTDIR: "correct the path",
}


def is_of_disk(error: BaseException) -> bool:
    """Whether an error is what the disk, or its permissions, refuse for a path that it names."""
    return isinstance(error, OSError) and error.errno in OF_DISK and error.filename is not None


def known_error(error: BaseException) -> RunError | None:
    """Convert an error of a library about memory, the disk or `~`; None for any other error."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, OSError) and error.errno in FULL:
        place = error.filename or "a file that was being written"
        return StorageError(f"{place}: {error.strerror}; {CURES[error.errno]}")
    if isinstance(error, OSError) and is_of_disk(error):
        cure = CURES.get(error.errno or 0, "correct the path or its permissions")
        return StorageError(f"{error.filename}: {error.strerror}; {cure}")
    if isinstance(error, RuntimeError) and str(error) == NO_HOME:
        if os.path.expanduser("~") == "~":
            return UsageError(
                "a path begins with ~, but HOME is not set and this user has no home folder; set"
                " HOME, or give --cache_dir (default: ~/.cache/minimind) and any other path in"
                " full"
            )
        return UsageError(
            "a path begins with ~ and the name of a user who is not known here; write it in full"
        )
    if isinstance(error, RuntimeError) and NOT_EXPANDABLE in str(error):
        return MemoryFull(
            f"the driver of this GPU refuses expandable segments of memory ({NOT_EXPANDABLE});"
            " run again with PYTORCH_ALLOC_CONF=expandable_segments:False"
        )
    if not (where := which_memory(error)):
        return None
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return MemoryFull(
        f"the {where} is out of memory ({reason}); lower --batch_size or --max_seq_len, or use a"
        f" {where} with more memory"
    )


PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved; run the same command again


class Stopped(RunError):
    """A stop request arrived before the first step, so there is no checkpoint."""

    code = "PREEMPTED"
    status = PREEMPTED


class Interrupted(RunError):
    """Ctrl-C in a command that reports which files it leaves behind, or twice in a run."""

    code = "INTERRUPTED"
    status = 130  # 128 + SIGINT, as in a shell
