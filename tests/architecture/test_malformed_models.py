"""Values of a config.json that transformers cannot use: status 2 and the key, before any work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import minimind.train  # noqa: F401 (a module that is called)
from minimind.errors import UsageError
from tests.architecture.test_hf_models import CONFIGS, WIDE, described

train: Any = sys.modules["minimind.train"]
LLAMA: dict[str, tuple[Any, str]] = {
    "an activation": ("swiglu", "hidden_act"),
    "a number for a name": (3, "hidden_act"),
    "a rotation": ({"rope_type": "linaer", "factor": 2}, "rope_scaling = {'rope_type': 'linaer'"),
    "no factor": ({"rope_type": "linear"}, "rope_scaling"),
    "a factor of text": (
        {"rope_type": "linear", "factor": "x"},
        "rope_scaling = {'rope_type': 'linear', 'factor': 'x'",
    ),
    "yarn of text": ({"rope_type": "yarn", "factor": 4, "beta_fast": "a"}, "rope_scaling = "),
    "llama3 without": ({"rope_type": "llama3", "factor": 8}, "rope_scaling"),
    "a list of rotations": ([1], "rope_scaling = [1]"),
    "a base of text": ({"rope_theta": "x", "rope_type": "default"}, "rope_parameters = "),
    "a number for rotations": (5, "rope_parameters = 5"),
    "a text base": ("abc", "rope_theta = 'abc'"),
    "no base": (None, "rope_theta = None"),
    "a part": ({"a": 1}, "text_config = {'a': 1}"),
    "a part that is a number": (7, "text_config = 7"),
    "no head width": (0, "head_dim = 0"),
    "an odd head": (15, "head_dim = 15"),
    "a negative head": (-2, "head_dim = -2"),
    "three key heads": (3, "num_key_value_heads = 3"),
    "no key heads": (0, "num_key_value_heads = 0"),
    "negative key heads": (-1, "num_key_value_heads = -1"),
    "five heads": (5, "num_attention_heads = 5"),
    "no heads": (0, "num_attention_heads = 0"),
    "a negative width": (-1, "intermediate_size = -1"),
    "an epsilon": ("x", "rms_norm_eps = 'x'"),
    "dropout above 1": (2.0, "attention_dropout = 2.0"),
    "kinds of layers": (["x", "y"], "layer_types = ['x', 'y']"),
    "a number of layers": (5, "layer_types = 5"),
    "labels": (5, "id2label = 5"),
    "a dtype": ("float17", "dtype = 'float17'"),
    "a method": ({}, "to_dict = {}"),
    "a class": (3, "__class__ = 3"),
    "states": ("x", "output_hidden_states = 'x'"),
    "a window of text": ("x", "sliding_window = 'x'"),
    "by layer": ([{}], "per_layer_config = [{}]"),
}
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"hidden_act": "siluu"}, "hidden_act = 'siluu'"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types = ['full_attention']"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ("qwen3", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ("qwen3", {"head_dim": 7}, "head_dim = 7"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    ("gpt_neox", {"rotary_pct": 5.0}, "rotary_pct = 5.0"),
    ("gpt2", {"activation_function": "gelo"}, "activation_function = 'gelo'"),
    ("gpt2", {"n_inner": -3}, "n_inner = -3"),
    ("gpt2", {"resid_pdrop": 2.0}, "resid_pdrop = 2.0"),
    ("gpt2", {"embd_pdrop": -1.0}, "embd_pdrop = -1.0"),
    ("gpt2", {"attn_pdrop": None}, "attn_pdrop = None"),
    ("gpt2", {"n_head": 5}, "n_head = 5"),
    ("gpt2", {"n_embd": 30}, "n_embd"),
    ("gpt2", {"n_positions": "x"}, "n_positions = 'x'"),
]
CASES = [("llama", {named.split(" =")[0]: v}, named) for v, named in LLAMA.values()]
CASES += OTHERS


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    file.write_text(json.dumps({"text": "a b c"}) + "\n")
    return file


@pytest.mark.sample(6)
@pytest.mark.parametrize(("kind", "report", "named"), CASES, ids=[str(c[1])[:40] for c in CASES])
def test_the_key_is_named_in_a_dry_run_and_before_a_run_reads_its_text(
    kind, report, named, text, tmp_path
):
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
    assert named in messages[0]
    assert str(place) in messages[0]
    assert messages[0] == messages[1]
    assert sorted(tmp_path.iterdir()) == [place]
