"""What Optuna proposes: the parameters of the next trial, and which trial is to be stopped.

Its study is in memory, made of the results that the folders of the trials tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState

from minimind.sweep.sweep_file import Dimension, Range, Sweep, points
from minimind.sweep.trial import RECORD, Result, damaged

SAMPLERS = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
# What samplers learn from: also a trial that was pruned or diverged, but none that failed.
STATES = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}


class Proposals:
    """Reads `results`, to which the caller adds trials as they end.

    Raise StorageError for a result in `place` whose parameters are none of the sweep.
    """

    def __init__(self, sweep: Sweep, results: Mapping[str, Result], place: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._results = sweep, results
        self._distributions = {n: distribution_of(n, d) for n, d in sweep.dimensions.items()}
        self._pruner = optuna.pruners.MedianPruner(
            sweep.pruner_startup_trials, sweep.pruner_warmup_steps
        )
        self._study, self._known = optuna.create_study(), 0
        for one in results.values():
            try:
                self._trial(one, TrialState.RUNNING)
            except ValueError as error:
                raise damaged(place / one.folder / RECORD) from error

    def parameters(self, number: int) -> dict[str, Any]:
        """The parameters of trial `number`.

        It has a seed of its own, so that a sweep that was killed proposes the same ones.
        """
        seed = int(np.random.SeedSequence([self._sweep.seed, number]).generate_state(1)[0])
        study = self._told()
        study.sampler = SAMPLERS[self._sweep.sampler](seed=seed)
        return study.ask(self._distributions).params

    def is_to_be_pruned(self, curve: Mapping[int, float]) -> bool:
        """Whether to stop the trial after the last validation of its curve, all finite."""
        if self._sweep.pruner == "none":
            return False
        trial = optuna.create_trial(
            state=TrialState.RUNNING, intermediate_values=dict(curve), params={}, distributions={}
        )
        return self._pruner.prune(self._told(), trial)

    def _told(self) -> optuna.Study:
        """The study of the trials that have ended, in the order of their folders."""
        ended = [one for _, one in sorted(self._results.items()) if one.state in STATES]
        if len(ended) != self._known:
            self._study, self._known = optuna.create_study(), len(ended)
            for one in ended:
                value = one.metric if one.state == "done" else None
                self._study.add_trial(self._trial(one, STATES[one.state], value))
        return self._study

    def _trial(self, one: Result, state: TrialState, value: float | None = None) -> FrozenTrial:
        return optuna.create_trial(
            state=state,
            value=value,
            params=one.parameters,
            distributions=self._distributions,
            intermediate_values=one.finite,
        )


def distribution_of(name: str, dimension: Dimension) -> BaseDistribution:
    """Optuna's form of a dimension; choices are texts, as in SWEEP.yaml."""
    values = points(name, dimension)
    if not isinstance(dimension, Range):
        return CategoricalDistribution(values)
    low, high = values[0], values[-1]
    step = values[1] - low if dimension.step and len(values) > 1 else None
    if isinstance(low, int):
        return IntDistribution(low, high, log=dimension.log, step=step or 1)
    return FloatDistribution(low, high, log=dimension.log, step=step)
