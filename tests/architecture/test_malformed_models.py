"""Values of a config.json that transformers cannot use: status 2 and the file, before any work."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import minimind.train  # noqa: F401 (a module that is called)
from minimind.errors import UsageError
from tests.architecture.test_hf_models import CONFIGS, WIDE, described

train: Any = sys.modules["minimind.train"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"hidden_act": "swiglu"}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "x"}}),
    ("llama", {"text_config": 7}),
    ("llama", {"num_key_value_heads": 3}),
    ("llama", {"attention_dropout": 2.0}),
    ("llama", {"to_dict": {}}),
    ("qwen3", {"head_dim": 7}),
    ("gpt2", {"n_positions": "x"}),
]


@pytest.mark.parametrize(("kind", "report"), CASES, ids=[str(values) for _, values in CASES])
def test_a_malformed_file_is_named_in_a_dry_run_and_before_a_run_reads_its_text(
    kind, report, tmp_path
):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "a b c"}) + "\n")
    place = described(
        tmp_path / "place", {**CONFIGS.get(kind, {"model_type": kind, **WIDE}), **report}
    )
    given = {"model": f"hf:{place}", "data_path": [str(text)], "out_dir": str(tmp_path / "out")}
    given |= {"cache_dir": str(tmp_path / "cache"), "deepspeed_config": "none", "device": "cpu"}
    messages = []
    for more in ({"dry_run": True}, {"max_steps": 1}):
        with pytest.raises(UsageError) as caught:
            train({**given, **more})
        messages.append(str(caught.value))
    assert str(place) in messages[0]
    assert messages[0] == messages[1]
    assert sorted(tmp_path.iterdir()) == [place, text]
