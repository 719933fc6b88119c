"""The ways a run can end, each with the exit status a shell sees.

A `RunError` is something its reader can mend, told in one sentence: the field, the value, where it
came from, and the way out after a semicolon. Anything else that escapes is a bug of ours: 70.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence


class RunError(Exception):
    """An ending that is told in one line instead of a traceback."""

    code = "E_INTERNAL"
    status = 70

    def __init__(
        self, message: str, cause_rank: int | None = None, table: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.cause_rank = cause_rank  # set when all ranks raise what only one of them met
        self.table = table  # lines shown above the one line, for what reads badly in a sentence


class UsageError(RunError):
    """The command line or a configuration file asks for something that cannot be."""

    code = "E_USAGE"
    status = 2


def fault_error(faults: list[str]) -> UsageError:
    """All of them as one error, numbered where there are several."""
    unique = list(dict.fromkeys(faults))
    if len(unique) == 1:
        return UsageError(unique[0])
    numbered = " ".join(f"({n}) {fault}." for n, fault in enumerate(unique, 1))
    return UsageError(f"{len(unique)} faults: {numbered}")


class DataError(RunError):
    """The text, the tokenizer or the prepared tokens cannot be trained on."""

    code = "E_DATA"
    status = 3


class CheckpointError(RunError):
    """No checkpoint can be used, or the one there is belongs to another run."""

    code = "E_CHECKPOINT"
    status = 4


class StorageError(RunError):
    """A file cannot be written: disk full, read-only, or not there."""

    code = "E_STORAGE"
    status = 5


class NumericError(RunError):
    """The loss or the gradient is no longer a number."""

    code = "E_NONFINITE"
    status = 6


class PeerError(RunError):
    """Another rank died, hung or left."""

    code = "E_PEER"
    status = 7


class LockedError(RunError):
    """Another run is writing to the same out_dir."""

    code = "E_LOCKED"
    status = 8


class RendezvousError(RunError):
    """The ranks could not find one another."""

    code = "E_RENDEZVOUS"
    status = 9


class MemoryFull(RunError):
    """Memory could not be allocated: the device's, or the host's."""

    code = "E_MEMORY"
    status = 10


# The words of torch, cuBLAS, cuDNN and NCCL for an allocation that failed, where they raise no
# type of their own. Triton's "out of resource" is about one kernel, and is not among them.
HOST_FULL = "DefaultCPUAllocator: can't allocate memory"
DEVICE_FULL = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|Cuda failure.*out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)


def which_memory(error: BaseException) -> str:
    """`device` or `host` where `error` is a failed allocation there, otherwise an empty string."""
    if isinstance(error, MemoryError) or HOST_FULL in str(error):
        return "host"
    # By name: this module does without torch.
    is_typed = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    is_told = isinstance(error, RuntimeError) and DEVICE_FULL.search(str(error))
    return "device" if is_typed or is_told else ""


def memory_full(error: BaseException) -> MemoryFull | None:
    """The ending of a program that met a failed allocation; None for any other error."""
    where = which_memory(error)
    if not where:
        return None
    told = (str(error).splitlines() or [type(error).__name__])[0]
    return MemoryFull(
        f"the {where} is out of memory ({told}); lower --batch_size or --max_seq_len, or use a"
        f" {where} with more memory"
    )


def known_error(error: BaseException) -> RunError | None:
    """The ending that an error of a library is: memory or a disk is full; None for any other."""
    if isinstance(error, RunError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or "a file that was being written"
        return StorageError(f"{place}: {error.strerror}; free some space")
    return memory_full(error)


PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved; run the same command again


class Stopped(RunError):
    """The run was asked to stop before its first step, so that there was nothing to save."""

    code = "PREEMPTED"
    status = PREEMPTED


class Interrupted(RunError):
    """Ctrl-C, met by a command that says what it leaves behind."""

    code = "INTERRUPTED"
    status = 130  # as a shell has it: 128 + SIGINT
