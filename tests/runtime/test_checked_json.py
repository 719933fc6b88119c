"""Models of untrusted JSON: what they refuse, and how the message names it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from minimind.checkpoint.validation import (
    Counters,
    FileEntry,
    Manifest,
    Mixture,
    ModelConfig,
    State,
)
from minimind.errors import CheckpointError
from minimind.runtime.checked_json import CheckedJson, Count, Positive, Shape, validate

COUNTERS = {
    **{"global_steps": 1, "skipped_steps": 0, "loss_scaler": {}, "scheduler_iteration": None},
    "muon_stack": None,
}
STATE = {"parameters": {"w": [2, 3]}, "optimizer_step": 1, "counters": COUNTERS}
ENTRY = {"name": "a.bin", "bytes": 1, "sha256": "0" * 64}


class Sample(CheckedJson):
    count: Count = 0
    rate: Positive = 1.0
    shape: Shape = []  # noqa: RUF012 (pydantic copies defaults)
    flag: bool = False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": True}, "has count = True, which should be a valid integer"),
        ({"count": 1.0}, "has count = 1.0, which should be a valid integer"),
        ({"count": "1"}, "has count = '1', which should be a valid integer"),
        ({"count": -1}, "has count = -1, which should be greater than or equal to 0"),
        ({"count": 2**53 + 1}, "has count = a huge number, which should be less than or equal to"),
        ({"count": 10**400}, "has count = a huge number, which should be"),
        ({"rate": math.nan}, "has rate = nan, which should be a finite number"),
        ({"rate": math.inf}, "has rate = inf, which should be a finite number"),
        ({"rate": 10**400}, "has rate = a huge number, which should be a valid number"),
        ({"rate": 10**20}, "has rate = a huge number, which should be less than or equal to"),
        ({"rate": 1e20}, "has rate = 1e+20, which should be less than or equal to"),
        ({"rate": 0}, "has rate = 0, which should be greater than 0"),
        ({"rate": True}, "has rate = True, which should be a valid number"),
        ({"shape": [1] * 9}, "has shape = [1, 1, 1, 1, 1, 1, 1, 1, 1], which has too many items"),
        ({"shape": [0]}, "has shape.0 = 0, which should be greater than or equal to 1"),
        ({"flag": 1}, "has flag = 1, which should be a valid boolean"),
    ],
)
def test_a_value_of_another_type_or_range_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(CheckpointError) as caught:
        validate(Sample, values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (Counters, {**COUNTERS, "more": 1}, "has the unknown field more"),
        (FileEntry, {**ENTRY, "x\n\x1b": 1}, r"has the unknown field 'x\n\x1b'"),
        (FileEntry, {**ENTRY, "name": "a\n"}, r"has name = 'a\n', which is not a valid name"),
        (FileEntry, {**ENTRY, "sha256": "0" * 63 + "G"}, "has sha256 = '00"),
        (FileEntry, {**ENTRY, "name": "\ud800"}, r"has name = '\ud800', which is not valid"),
        (State, {**STATE, "parameters": {"a\x1b": [1]}}, r"has parameters.'a\x1b', which is not"),
        (State, {**STATE, "parameters": {"[key]": [1]}}, "has parameters.'[key]', which is not"),
        (State, {**STATE, "parameters": {"\ud800": [1]}}, r"has parameters.'\ud800', which is not"),
        (State, {**STATE, "parameters": 1}, "has parameters = 1, which should be an object"),
        (State, {**STATE, "counters": 1}, "has counters = 1, which should be an object"),
        (State, {**STATE, "parameters": {"w": [-1]}}, "has parameters.w.0 = -1, which"),
        (Manifest, {"step": 1}, "has no tokens"),
        (ModelConfig, {"vocab_size": 0}, "has vocab_size = 0, which"),
    ],
)
def test_the_message_names_the_field_on_one_line(model: Any, values: dict[str, Any], message: str):
    with pytest.raises(CheckpointError) as caught:
        validate(model, values)
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()


def test_validation_of_a_long_list_ends_at_its_first_fault():
    with pytest.raises(ValidationError) as caught:
        Mixture.model_validate({"sizes": [0] * 1000, "weights": [0] * 1000})
    assert caught.value.error_count() == 2


def test_a_prefix_is_put_before_the_name():
    with pytest.raises(CheckpointError, match=r"^has order\.count = None, which"):
        validate(Sample, {"count": None}, "order.")
