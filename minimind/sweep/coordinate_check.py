"""Coordinate check of muP: the size of activations over widths after a few optimizer steps.

With muP the changes that training makes to every kind of activation have the same size at every
width: the slope of log size over log width is near 0 (Yang et al. 2022, appendix D). The sizes at
step 0 are no criterion, as muP's logits begin smaller in wider models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minimind.architecture.hf_models import model_of
from minimind.architecture.select import minimind_config
from minimind.config.checks import as_typed, check, given
from minimind.config.deepspeed.resolve import ResolvedConfig
from minimind.config.deepspeed.rules import unread_flag_faults
from minimind.config.origin import Origin, Rank
from minimind.config.parse import parse_flags
from minimind.config.run_config import RunConfig
from minimind.engine.engine import mean_loss, text_inputs
from minimind.engine.optimizers import run_groups, scale_initial_weights
from minimind.engine.plain_backend import PlainBackend
from minimind.errors import UsageError, fault_error
from minimind.model.experts import MixtureOfExperts

ORIGIN = Origin("minimind coord_check", Rank.DATA)
# They replace the defaults of training, so that a check takes seconds on a CPU.
DEFAULTS = {
    **{"dim": 64, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "vocab_size": 512},
    **{"max_seq_len": 32, "batch_size": 4, "learning_rate": 2e-3},
}
# A check always runs in float32 in this process, with one micro-batch per step.
FIXED = {
    "dropout": 0.0,
    "dtype": "float32",
    "tf32": False,
    "compile": "off",
    "accumulation_steps": 1,
    "ema": None,
}
# A slope within it is flat. Measured with 2 layers, 5 steps and widths of 64 to 256: at most 0.19
# with muP (AdamW, Muon, experts, tied or not); without it 0.5 to 3 for all kinds but the embedding.
TOLERANCE = 0.25
# The router's logits start smaller in wide models, so its slope may be negative.
MAY_SHRINK = ("router",)
FOLLOWERS = 2  # tokens that may follow a token in the random text


@dataclass(frozen=True)
class Coordinates:
    """Root mean squares of activations by kind, one for each width; means over layers and seeds."""

    widths: Sequence[int]
    changes: Mapping[str, Sequence[float]]  # of the difference to step 0

    def slope(self, kind: str) -> float:
        """Slope of the log of the change over the log of the width."""
        x, y = np.log(self.widths), np.log(self.changes[kind])
        return float((y * (x - x.mean())).sum() / ((x - x.mean()) ** 2).sum())

    @property
    def is_flat(self) -> bool:
        """Whether the slope of every kind is within the tolerance; some may fall."""
        lowest = {kind: -np.inf if kind in MAY_SHRINK else -TOLERANCE for kind in self.changes}
        return all(lowest[kind] <= self.slope(kind) <= TOLERANCE for kind in self.changes)

    def verdict(self) -> str:
        """A sentence on whether it is flat."""
        bound = "every slope is" if self.is_flat else "not every slope is"
        also = [f" ({kind}: or below)" for kind in MAY_SHRINK if kind in self.changes]
        flat = f"{'' if self.is_flat else 'not '}flat with muP"
        return f"{flat}: {bound} within {TOLERANCE} of 0{''.join(also)}"

    def table(self) -> str:
        """Change at each width and slope, a line for each kind."""
        rows = [["width", *map(str, self.widths), "slope"]]
        for kind, values in self.changes.items():
            rows.append([kind, *(f"{value:.4f}" for value in values), f"{self.slope(kind):+.2f}"])
        return "\n".join(f"  {row[0]:<16}{''.join(f'{c:>9}' for c in row[1:])}" for row in rows)


def coordinate_check(
    words: Sequence[str], widths: Sequence[int] | None, steps: int, seeds: int
) -> dict[str, Coordinates]:
    """Measure and print the coordinates with muP, then those without; return them by title.

    `words` are flags of training at the width --dim.
    """
    run = _run_of(words)
    widths = sorted({*widths}) if widths else [run.dim, 2 * run.dim, 4 * run.dim]
    if len(widths) < 2:
        raise UsageError(f"--widths {widths[0]}: a slope needs two widths or more; name others too")
    print(f"changes of activations in {steps} steps, root mean square")
    titles = {f"muP, mup_base_dim {run.mup_base_dim or run.dim}": True, "without muP": False}
    results = {}
    for title, is_mup in titles.items():
        results[title] = measure(runs_of_widths(run, widths, is_mup), steps, seeds)
        print(f"\n{title}\n{results[title].table()}", flush=True)
    return results


def _run_of(words: Sequence[str]) -> RunConfig:
    """The flags of training, with the defaults of a check."""
    run = parse_flags(words)
    if run.hugging_face is not None:
        raise UsageError(
            f"--model {run.model} is a model of transformers, but muP is for the built-in decoder;"
            " remove --model"
        )
    defaults = {k: v for k, v in DEFAULTS.items() if run.sources[k].rank <= Rank.DEFAULT}
    faults = [fault.sentence for fault in unread_flag_faults(run)]
    faults += [
        f"{given(run, name)} has no effect: a coordinate check sets {name} to {as_typed(value)};"
        f" {given(run, name).remove}"
        for name, value in FIXED.items()
        if run.is_explicit(name) and getattr(run, name) != value
    ]
    if faults:
        raise fault_error(faults)
    return run.with_values(ORIGIN, **defaults, **FIXED)


def runs_of_widths(run: RunConfig, widths: Sequence[int], is_mup: bool) -> list[RunConfig]:
    """The run at each width: heads and feed-forward grow with it, head_dim stays.

    Raise UsageError for a width that does not fit them.
    """
    base = run.mup_base_dim or run.dim
    runs = []
    for width in widths:
        grown: dict[str, Any] = {"n_heads": run.n_heads, "n_kv_heads": run.n_kv_heads}
        if run.hidden_dim is not None:
            grown["hidden_dim"] = run.hidden_dim
        for name, value in grown.items():
            if value * width % run.dim:
                raise UsageError(
                    f"--widths {width}: {name} = {value} ({run.sources[name]}) at dim = {run.dim}"
                    f" does not grow to a whole number; name multiples of {run.dim}"
                )
            grown[name] = value * width // run.dim
        grown |= {"dim": width, "mup_base_dim": base if is_mup else None}
        runs.append(run.with_values(ORIGIN, **grown))
        check(runs[-1])
    return runs


def measure(runs: Sequence[RunConfig], steps: int, seeds: int) -> Coordinates:
    """Train each run for `steps` steps on random text, once per seed, and measure it."""
    measured = [[_measure_one(run, steps, run.seed + n) for n in range(seeds)] for run in runs]
    changes = {
        kind: [float(np.mean([seed[kind] for seed in seeds_of_run])) for seeds_of_run in measured]
        for kind in measured[0][0]
    }
    return Coordinates([run.dim for run in runs], changes)


def _measure_one(run: RunConfig, steps: int, seed: int) -> dict[str, float]:
    """Root mean square of the changes since step 0, averaged over layers."""
    torch.manual_seed(seed)
    model = model_of(minimind_config(run, bos_token_id=None, eos_token_id=0, pad_token_id=None))
    scale_initial_weights(model, run)
    backend = PlainBackend(model, model, ResolvedConfig(run, "single"), run_groups(model, run))
    rows = random_text(run, seed)
    before = activations(model, rows[:, :-1])
    for _ in range(steps):
        backend.begin(run.learning_rate)
        backend.backward(mean_loss(model(**text_inputs(rows), loss_chunk_size=0)))
        backend.update(is_last=True)
    after = activations(model, rows[:, :-1])
    changes = {kind: (after[kind] - before[kind]).flatten(1) for kind in after}
    return {kind: float(x.pow(2).mean(1).sqrt().mean()) for kind, x in changes.items()}


def random_text(run: RunConfig, seed: int) -> Tensor:
    """Rows (batch_size, max_seq_len + 1) in which one of two tokens follows each token."""
    draw = torch.Generator().manual_seed(seed)
    follower = torch.randint(run.vocab_size, (run.vocab_size, FOLLOWERS), generator=draw)
    columns = [torch.randint(run.vocab_size, (run.batch_size,), generator=draw)]
    for _ in range(run.max_seq_len):
        chosen = torch.randint(FOLLOWERS, (run.batch_size,), generator=draw)
        columns.append(follower[columns[-1], chosen])
    return torch.stack(columns, dim=1)


@torch.no_grad()
def activations(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Activations by kind, each stacked over layers (L, B, T, channels)."""
    layers = model.model.layers
    kinds = {
        "embedding": [model.model.embed_tokens],
        "attention": [layer.self_attn for layer in layers],
        "router": [one.mlp.gate for one in layers if isinstance(one.mlp, MixtureOfExperts)],
        "feed-forward": [layer.mlp for layer in layers],
        "residual stream": [*layers],
        "logits": [model.lm_head],
    }
    outputs: dict[str, list[Tensor]] = {kind: [] for kind, modules in kinds.items() if modules}

    def keep(kind: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs[kind].append(output[0] if isinstance(output, tuple) else output)

        return hook

    hooks = [m.register_forward_hook(keep(kind)) for kind, ms in kinds.items() for m in ms]
    model.eval()
    model(input_ids=tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {kind: torch.stack(values).float() for kind, values in outputs.items()}
