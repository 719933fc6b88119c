"""The two functions that a caller gives to `minimind.train`: they read numbers and may end the run.

Both are called on every rank with the numbers of rank 0. One rank that asks for the end is enough.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minimind.errors import UsageError
from minimind.report.run_logger import RunLogger
from minimind.runtime.collectives import Ranks, run_on_all_ranks
from minimind.runtime.terminal import first_lines, shorten_line, trace_lines

Hook = Callable[[int, dict[str, Any]], bool | None]


def require_hooks(hooks: Mapping[str, Hook]) -> None:
    """Raise UsageError for one that cannot be called with a step and its numbers."""
    for name, hook in hooks.items():
        try:
            inspect.signature(hook).bind(0, {})
        except TypeError as error:  # no function, or one of other arguments
            raise UsageError(
                f"{name} = {hook!r}: {first_lines(error)}; give a function {name}(step, numbers)"
            ) from error
        except ValueError:  # a builtin that does not tell its signature
            continue


@dataclass
class Hooks:
    """The functions of the caller, and the step at which one of them has ended the run."""

    functions: Mapping[str, Hook]  # by name, on_step and on_eval
    ranks: Ranks
    logger: RunLogger
    stopped_at: int | None = None
    reason: str = ""  # why the run ends before its last step

    def call(self, name: str, step: int, numbers: dict[str, Any], last: int) -> None:
        """Call a function, if it is given; True on any rank ends a run at `step` before `last`.

        Collective. What it raises on one rank is a UsageError on all.
        """
        if (hook := self.functions.get(name)) is None:
            return
        with self.logger.pausing("own_code", name):
            given = self.ranks.from_rank_0(numbers)
            work = partial(answer, name, hook, step, given)
            ends = run_on_all_ranks(self.ranks, work, any)
        if ends and step < last:
            self.stopped_at, self.reason = step, f"stopped by {name} at step {step}"
            self.logger.end_at(step)


def answer(name: str, hook: Hook, step: int, numbers: dict[str, Any]) -> bool:
    """Whether a function asks for the end; raise UsageError for what it raises, or returns else."""
    try:
        returned: object = hook(step, numbers)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{name} raised {type(error).__name__}: {first_lines(error)}, at step {step}; correct"
            " it, and run again to continue",
            table=trace_lines(error),
        ) from error
    if returned is None or isinstance(returned, bool | np.bool_):
        return bool(returned)
    raise UsageError(
        f"{name} returned {shorten_line(repr(returned))} ({type(returned).__name__}) at step"
        f" {step}; return True to end the run, and False or None to continue"
    )
