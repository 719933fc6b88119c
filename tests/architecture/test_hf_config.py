"""What of a config.json of transformers is refused before transformers acts on it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from minimind.architecture.hf_models import FETCHING, foreign_config
from minimind.errors import CheckpointError
from tests.conftest import ROOT
from tests.train.hub_kernels import ACCEPTED, LLAMA, REFUSED

# --- code from a hub ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "named"),
    [
        ({"_attn_implementation": "org/repo"}, "_attn_implementation = 'org/repo'"),
        ({"attn_implementation": "org/repo@rev:f"}, "attn_implementation = 'org/repo@rev:f'"),
        ({"attn_implementation": "flash_attention_2"}, "'flash_attention_2'"),
        ({"attn_implementation": "flash_attention_3"}, "'flash_attention_3'"),
        ({"attn_implementation": "paged|sdpa"}, "'paged|sdpa'"),
        ({"attn_implementation": {"": "eager", "text_config": "a/b"}}, "attn_implementation"),
        ({"attn_implementation": ["sdpa"]}, "attn_implementation"),
        ({"_attn_implementation_internal": "a/b"}, "_attn_implementation_internal"),
        ({"experts_implementation": "sonicmoe"}, "experts_implementation = 'sonicmoe'"),
        ({"_experts_implementation": "a/b"}, "_experts_implementation"),
        ({"linear_attention_implementation": "a/b"}, "linear_attention_implementation"),
        ({"text_config": {"attn_implementation": "a/b"}}, "text_config.attn_implementation"),
        ({"parts": [{"x": {"_attn_implementation": "a/b"}}]}, "parts.0.x._attn_implementation"),
        ({"text_config": {"auto_map": {"AutoModel": "a.B"}}}, "text_config.auto_map"),
        ({"attribute_map": {"x": "_attn_implementation"}, "x": "a/b"}, "attribute_map"),
    ],
)
def test_code_of_a_hub_is_refused_by_the_name_of_its_key(report, named):
    with pytest.raises(CheckpointError) as caught:
        foreign_config({**LLAMA, **report})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "report",
    [
        {"attn_implementation": "sdpa"},
        {"_attn_implementation": None},
        {"attn_implementation": {"": "eager"}},
        {"cache_implementation": "hybrid"},
        {"auto_map": None},
    ],
)
def test_what_transformers_has_of_its_own_is_taken(report):
    assert foreign_config({**LLAMA, **report}).hidden_size == LLAMA["hidden_size"]


def test_every_model_whose_code_asks_a_hub_is_known():
    """Those that call `get_kernel` themselves; the others ask by a name in their configuration."""
    models = Path(transformers.__file__).parent / "models"
    found = set()
    for file in models.glob("*/modeling_*.py"):
        text = file.read_text(encoding="utf-8")
        if "get_kernel(" not in text:
            continue
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        if any(isinstance(c.func, ast.Name) and c.func.id == "get_kernel" for c in calls):
            found.add(file.parent.name)
    assert {"rwkv", "yoso"} <= found
    causal = {
        kind
        for kind in CONFIG_MAPPING
        if kind.replace("-", "_") in found and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    }
    assert causal == {*FETCHING}


@pytest.mark.launch
def test_kernels_is_never_requested_code(tmp_path):
    """With a stub of that package installed, which transformers would use."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.hub_kernels", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["asked"] == []
    # `minimind plan` counts our own decoder only and ends with 2 in any case.
    assert found["ended"] == {
        **{name: [2, 2] for name in REFUSED},
        **{name: [0, 2] for name in ACCEPTED},
    }
