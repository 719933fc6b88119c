"""What flat partitions leave to DeepSpeed's own update.

tests/distributed/zero_updates.py sets the same in DeepSpeed files, and trains both ways.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimind.engine import flat_partitions
from minimind.engine.flat_partitions import READ, REPLACED, reason_against

COVERED: dict[str, Any] = {
    **dict.fromkeys((*READ, *REPLACED)),
    **{"cpu_offload": False, "zenflow": False, "has_moe_layers": False},
    **{"use_separate_grad_accum": False, "gradient_predivide_factor": 1.0},
    **{"dtype": torch.bfloat16, "ipg_buckets": {torch.bfloat16: None}},
    **{"round_robin_bit16_padding": [[0, 0], [0]], "params_in_partition": [[1], []]},
    **{"contiguous_gradients": True, "reduce_scatter": True},
    **{"use_multi_rank_bucket_allreduce": True, "_is_muon_group": staticmethod(lambda _: False)},
}
ALWAYS = {
    "offload_optimizer": {"cpu_offload": True},
    "zenflow": {"zenflow": True},
    "MoE layers of DeepSpeed": {"has_moe_layers": True},
    "data_types.grad_accum_dtype": {"use_separate_grad_accum": True},
    "parameter_alignment": {"round_robin_bit16_padding": [[0, 0], [3]]},
    "communication_data_type": {"ipg_buckets": {torch.float32: None}},
    "gradient_predivide_factor": {"reduce_scatter": False, "gradient_predivide_factor": 3.0},
    "Muon of DeepSpeed": {"_is_muon_group": staticmethod(bool)},
}
AMONG_RANKS = {
    "contiguous_gradients = false": {"contiguous_gradients": False},
    "reduce_scatter = false": {"reduce_scatter": False},
    "use_multi_rank_bucket_allreduce = false": {"use_multi_rank_bucket_allreduce": False},
}


def wrapper(name: str = "DeepSpeedZeroOptimizer", without: str = "", **changes: Any) -> Any:
    """What DeepSpeed's wrapper shows of itself."""
    known = {name: value for name, value in (COVERED | changes).items() if name != without}
    return type(name, (), known)()


def reason(found: Any, ranks: int = 1) -> str:
    if hasattr(found, "partition_count"):
        found.partition_count = [ranks]
    return reason_against(found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_shipped_options_are_covered(ranks: int):
    assert not reason(wrapper(), ranks)


@pytest.mark.parametrize(("named", "changes"), ALWAYS.items())
def test_an_option_that_is_not_covered_is_named(named: str, changes: dict[str, Any]):
    assert reason(wrapper(**changes)) == named
    assert reason(wrapper(**changes), 2).startswith(named)


@pytest.mark.parametrize(("named", "changes"), AMONG_RANKS.items())
def test_an_option_that_matters_among_ranks_only_is_named_there(
    named: str, changes: dict[str, Any]
):
    assert not reason(wrapper(**changes))
    assert reason(wrapper(**changes), 2) == named


def test_every_reason_is_named():
    changes: dict[str, Any] = {}
    for options in (*ALWAYS.values(), *AMONG_RANKS.values()):
        changes |= options
    assert reason(wrapper(**changes), 4) == ", ".join([*ALWAYS, *AMONG_RANKS])


@pytest.mark.parametrize("name", [*READ, *REPLACED])
def test_a_wrapper_without_a_name_is_not_touched(name: str):
    assert reason(wrapper(without=name)) == f"its wrapper has no {name}"


def test_another_wrapper_or_version_is_not_touched(monkeypatch: pytest.MonkeyPatch):
    assert reason(wrapper("BF16_Optimizer")) == "data_types.grad_accum_dtype"
    assert reason(wrapper("DeepSpeedZeroOptimizer_Stage3")) == "stage 3"
    assert reason(wrapper("FP16_Optimizer")) == "its wrapper is FP16_Optimizer"
    monkeypatch.setattr(flat_partitions, "untested_deepspeed", lambda: "0.20.0")
    assert reason(wrapper()) == f"DeepSpeed 0.20.0 is not the tested {flat_partitions.TESTED}"
