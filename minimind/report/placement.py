"""Where the validation of a run lies: among floors of its text, and in the band of a reference."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from minimind.report import formats
from minimind.report.history import Run, read_configuration
from minimind.runtime import disk

REFERENCES = Path(__file__).parent / "reference"
NAMES = {"unigram": "the unigram", "trigram": "the trigram"}
# Flags that make two runs comparable, besides text, rows of a step and length.
SHAPE = (
    *("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len", "use_moe"),
    *("optimizer", "schedule", "embedding_init", "tie_word_embeddings"),
)
TEXTS, SPAN, LENGTH = (
    ("zlib", "xz"),
    0.03,
    0.1,
)  # relative: of zlib and xz on the held-out text, and of the tokens
SPREADS, LEAST_SPREAD = 3.0, 0.01  # of the seeds, and of the value


def floors_of(run: Run) -> dict[str, float]:
    """Bits per byte of the held-out text by name, the least first; empty without the event."""
    found = [event["bits"] for event in run.events("floors")][-1:]
    finite = [(name, bits) for one in found for name, bits in one.items() if math.isfinite(bits)]
    return dict(sorted(finite, key=lambda pair: pair[1]))


def last_bits(run: Run) -> float:
    """Bits per byte of the last validation; NaN without one."""
    evals = run.events("eval")
    return evals[-1]["val_bpb"] if evals else math.nan


def placement(run: Run) -> str:
    """`validation 1.599 bits per byte, better than zlib (2.334)`; empty if it is unknown."""
    floors, bits = floors_of(run), last_bits(run)
    if not floors or not math.isfinite(bits):
        return ""
    sides = {"better than": [n for n in floors if bits < floors[n]]}
    sides["worse than"] = [name for name in floors if name not in sides["better than"]]
    parts = [
        f"{side} {formats.listed([f'{NAMES.get(n, n)} ({floors[n]:.3f})' for n in names])}"
        for side, names in sides.items()
        if names
    ]
    text = f"validation {bits:.3f} bits per byte, {', '.join(parts)}"
    return "; ".join(filter(None, (text, _among_references(run, floors, bits))))


def band(curve: dict[str, Any], tokens: float) -> tuple[float, float]:
    """Least and most bits per byte that the seeds make likely after so many tokens."""
    seeds = np.array([np.interp(tokens, curve["tokens"], one) for one in curve["val_bpb"]])
    spread = float(seeds.std(ddof=1)) if len(seeds) > 1 else 0.0
    half = max(SPREADS * spread, LEAST_SPREAD * float(seeds.mean()))
    return float(seeds.mean()) - half, float(seeds.mean()) + half


def _among_references(run: Run, floors: dict[str, float], bits: float) -> str:
    """`within the band of tiny-strong (1.587 to 1.619, 3 seeds)`; empty without a reference."""
    tokens = float(run.tokens_at(np.array([run.events("eval")[-1]["step"]]))[0])
    flags, size = read_configuration(run.run_dir).flags, run.fact("tokens_per_step")
    total = run.figure("total_steps") * run.figure("tokens_per_step")
    for path in sorted(disk.matching(REFERENCES, "*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        is_near = all(abs(floors.get(n, math.inf) / found["text"][n] - 1) < SPAN for n in TEXTS)
        for curve in found["curves"] if is_near else ():
            is_comparable = (
                all(flags.get(name, ("",))[0] == one for name, one in curve["flags"].items())
                and size == curve["tokens_per_step"]
                and abs(total / curve["total_tokens"] - 1) < LENGTH
            )
            if is_comparable and curve["tokens"][0] <= tokens:
                low, high = band(curve, tokens)
                side = "below" if bits < low else "above" if bits > high else "within"
                seeds = formats.count(len(curve["seeds"]), "seed")
                return f"{side} the band of {curve['name']} ({low:.3f} to {high:.3f}, {seeds})"
    return ""
