"""A loss of the user's own, --loss MODULE:FUNCTION, and what training needs of it.

`function(logits, targets)` gets float32 logits (B, T, V), and targets (B, T) that are already
shifted. It returns the sum of the losses of all targets but those of `IGNORED`, not their mean. A
step divides this sum by the number of targets of all micro-batches and ranks, so that the gradient
does not depend on how the rows are divided.
"""

import importlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from minimind.errors import UsageError, which_memory
from minimind.model.loss import IGNORED
from minimind.runtime.terminal import first_lines, trace_lines

ROUNDING = 1e-4  # of a sum of float32, as a share of it


@dataclass(frozen=True)
class OwnLoss:
    """The function, whose errors name the flag."""

    name: str  # MODULE:FUNCTION
    function: Callable[..., object]
    file: str | None  # of its module, where that has one

    @classmethod
    def imported(cls, name: str) -> "OwnLoss":
        """Import it, from the current directory first, as `python -m` does; raise UsageError."""
        module_name, _, attribute = name.partition(":")
        here = os.getcwd()
        sys.path.insert(0, here)
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {first_lines(error)}"
            raise UsageError(
                f"--loss {name}: {module_name} cannot be imported ({what}); correct it, or start"
                " where it is",
                table=trace_lines(error),
            ) from error
        finally:
            sys.path.remove(here)
        function = getattr(module, attribute, None)
        file = getattr(module, "__file__", None)
        if not callable(function):
            what = "is no function" if hasattr(module, attribute) else "is not there"
            raise UsageError(
                f"--loss {name}: {attribute} {what} in {file or module_name}; name a function of it"
            )
        return cls(name, function, file)

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum, a float32 scalar; raise UsageError for what it raises, or if it is no scalar.

        Computed in float32 under autocast, too. It has a gradient, of zeros for a constant.
        """
        try:
            with torch.autocast(logits.device.type, enabled=False):
                found: object = self.function(logits.float(), targets.clone())
        except (Exception, SystemExit) as error:
            if which_memory(error):
                raise
            raise UsageError(
                f"--loss {self.name} raised {type(error).__name__}: {first_lines(error)}; correct"
                " it",
                table=trace_lines(error),
            ) from error
        if isinstance(found, Tensor) and found.ndim == 0 and found.is_floating_point():
            return (
                found.float() if found.requires_grad else found.float() + logits[:0].float().sum()
            )
        kind = type(found).__name__
        if isinstance(found, Tensor):
            kind = f"a tensor of shape {tuple(found.shape)} and {found.dtype}"
        raise self.fault(f"returned {kind}", "return the sum of the losses, a scalar")

    def fault(self, what: str, remedy: str) -> UsageError:
        """The error of a loss that cannot be trained with."""
        return UsageError(f"--loss {self.name} {what}; {remedy}")

    def digest(self) -> str:
        """SHA-256 of the file of its module; empty where that has none."""
        return sha256(Path(self.file).read_bytes()).hexdigest() if self.file else ""

    def require_sums(self, vocabulary: int) -> None:
        """Try it on a few random rows; raise UsageError if the sums of parts are not the whole."""
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            logits = torch.randn(4, 6, vocabulary)
            targets = torch.randint(vocabulary, (4, 6))
            whole, grad = self._with_gradient(logits, targets)
            if not (math.isfinite(whole) and grad.isfinite().all()):
                raise self.fault(
                    f"is {whole} for random logits", "make its sum and gradient finite"
                )
            if not grad.any():
                raise self.fault("has no gradient", "compute it from the logits, by torch")
            again, _ = self._with_gradient(logits, targets)
            if not math.isclose(again, whole, rel_tol=ROUNDING):
                raise self.fault(
                    f"is {whole:g}, then {again:g} for the same 4 rows",
                    "compute it from the logits and targets alone",
                )
            first, _ = self._with_gradient(logits[:1], targets[:1])
            others, _ = self._with_gradient(logits[1:], targets[1:])
            if not math.isclose(first + others, whole, rel_tol=ROUNDING):
                raise self.fault(
                    f"is {whole:g} for 4 rows, and {first:g} and {others:g} for the first and the"
                    " other 3",
                    "return a sum over targets, not a mean",
                )
            targets[1, :3] = targets[3] = IGNORED
            partly, grad = self._with_gradient(logits, targets)
            without, none = self._with_gradient(logits[3:], targets[3:])
            if not math.isfinite(partly) or grad[targets == IGNORED].any() or without or none.any():
                raise self.fault(
                    f"counts targets of {IGNORED}: it is {without:g} for a row of no others",
                    "leave them out, as cross_entropy does",
                )

    def _with_gradient(self, logits: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """The sum, and its gradient by the logits."""
        leaf = logits.clone().requires_grad_()
        found = self(leaf.clone(), targets)  # which it may change
        return found.item(), torch.autograd.grad(found, leaf)[0]
