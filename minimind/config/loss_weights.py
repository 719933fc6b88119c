"""The weights of --loss_weight: what a target of each source counts in the loss."""

from __future__ import annotations

from collections.abc import Sequence

from minimind.config.names import suggest
from minimind.config.yaml_files import WEIGHTS, source_weight
from minimind.errors import UsageError


def loss_weights(given: Sequence[str], names: Sequence[str]) -> tuple[float, ...] | None:
    """Weights of --loss_weight by the names of the sources, the smallest 1; None if none is given.

    Only their ratios count. Raise UsageError for a text that is not NAME=WEIGHT of a source.
    """
    weights: dict[str, float] = {}
    for text in given:
        name, _, weight = text.partition("=")
        where = f"--loss_weight {text}"
        if name not in names:
            hint = suggest(name, names, f"the sources are {', '.join(names)}")
            raise UsageError(f"{where}: {name} is not a source; {hint}")
        if name in weights:
            raise UsageError(f"{where}: {name} has two weights; give it one")
        if len(names) == 1:
            raise UsageError(
                f"{where}: {name} is the only source, so its weight has no effect; remove it"
            )
        try:
            weights[name] = source_weight(weight)
        except ValueError as error:
            raise UsageError(f"{where}: weight = {weight} is not {WEIGHTS}; give one") from error
    found = [weights.get(name, 1.0) for name in names]
    return tuple(one / min(found) for one in found) if weights else None
