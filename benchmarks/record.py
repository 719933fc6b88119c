"""Results files: figures with the command, the machine and the versions."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from minimind.checkpoint.identity import hardware, source_commit, versions
from minimind.config.parse import parse_flags
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.device import HOST


def arguments(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with --out FILE.json that shows the module's docstring unwrapped."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    return parser


def record(out: Path | None, name: str, load_before: Any, **found: Any) -> None:
    """Write what `benchmarks.name` found to `out`, if given."""
    if out is None:
        return
    result = {
        # Paths of this machine are left out.
        "command": " ".join(
            [f"python -m benchmarks.{name}", *(word.split("/")[-1] for word in sys.argv[1:])]
        ),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpus": os.cpu_count(),
            "processor": hardware(torch.device("cpu")),
            "bf16": HOST.has_bf16,  # native bf16 instructions, which decide most figures
        },
        "threads": torch.get_num_threads(),
        "load": {"before": load_before, "after": os.getloadavg()},
        "commit": source_commit(),
        "versions": versions(),
        **found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def preset(name: str, max_seq_len: int | None = None) -> MiniMindForCausalLM:
    """A fresh model of a preset's shape, for rows of max_seq_len tokens or the preset's."""
    run = parse_flags(["--model", name])
    return MiniMindForCausalLM(
        MiniMindConfig(
            vocab_size=run.vocab_size,
            hidden_size=run.dim,
            num_hidden_layers=run.n_layers,
            num_attention_heads=run.n_heads,
            num_key_value_heads=run.n_kv_heads,
            max_position_embeddings=max_seq_len or run.max_seq_len,
            rope_theta=run.rope_theta,
        )
    )
