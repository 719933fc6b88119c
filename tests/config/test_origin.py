"""Origins of values."""

from __future__ import annotations

import copy
import pickle

from minimind.config.origin import Origin, Rank, derived
from minimind.config.parse import parse_flags


def test_copies_of_an_origin_have_its_rank():
    origin = derived("GPU")
    for same in (copy.copy(origin), copy.deepcopy(origin), pickle.loads(pickle.dumps(origin))):
        assert isinstance(same, Origin)
        assert (same, same.rank) == ("derived: GPU", Rank.RULE)


def test_copies_of_a_run_know_what_was_given():
    run = pickle.loads(pickle.dumps(parse_flags(["--batch_size", "3"])))
    assert run.is_explicit("batch_size")
    assert not run.is_explicit("seed")
