"""--init_from: the shape, the tokenizer and the weights that a new run begins with.

Where a checkpoint of the run itself is resumed there is nothing to begin: the shape is then that
checkpoint's, and what --init_from names need not be there any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.checks import check
from minimind.config import RunConfig
from minimind.data.prepare import is_prepared
from minimind.errors import CheckpointError, UsageError
from minimind.foreign_shapes import Given
from minimind.model.configuration import MiniMindConfig
from minimind.train.build import with_decided
from minimind.train.checkpoint import Rejected, newest_valid, read_manifest
from minimind.train.claims import read_config
from minimind.train.resume import meant
from minimind.weights import Weights, load_weights_from

# Flag -> what the configuration of a model calls it. The length of a row no weight depends on.
SHAPE = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "qk_norm": "qk_norm",
    "tie_word_embeddings": "tie_word_embeddings",
    "use_moe": "use_moe",
    "n_routed_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "n_shared_experts": "n_shared_experts",
    "norm_topk_prob": "norm_topk_prob",
}


@dataclass(frozen=True)
class Initial:
    """A run with the shape of what it begins from, and the weights, if it begins."""

    run: RunConfig
    weights: Weights | None = None

    def origin(self, resumed: Mapping[str, Any]) -> dict[str, str] | None:
        """For the record: what place the weights came from, and of what kind it is.

        The manifest of the checkpoint that a run was resumed from remembers it.
        """
        if resumed:
            return resumed.get("init_from")
        return self.weights and {"place": str(self.weights.path), "kind": self.weights.kind}

    def line(self) -> str:
        """The same for whoever looks on; nothing where --init_from was not given."""
        if self.weights:
            return f"weights  from {self.weights.path} ({self.weights.kind})"
        place = self.run.init_from
        return f"weights  those resumed: --init_from {place} is ignored" if place else ""


def read_initial(run: RunConfig) -> Initial:
    """What `run` begins with; no weight is read yet.

    A UsageError where a flag says another shape, or leaves out what the place does not tell.
    """
    if run.init_from is None:
        return Initial(run)
    found = meant(Path(run.out_dir) / "checkpoints", run.resume)
    path, _ = newest_valid(found, _misshapen)
    if path is not None:
        config = MiniMindConfig(**read_config(path, read_manifest(path)))
        return Initial(_shaped(run, f"checkpoint {path}", config, path))
    weights = load_weights_from(run.init_from, _given(run))
    by = f"--init_from {run.init_from}"
    return Initial(_shaped(run, by, weights.config, weights.tokenizer), weights)


def _misshapen(path: Path) -> Rejected | None:
    try:
        read_config(path, read_manifest(path))
    except CheckpointError as error:
        return Rejected(path, "config.json", str(error))
    return None


def _given(run: RunConfig) -> Given:
    """What flags say of a file that has no configuration: only those that were given."""

    def said(name: str) -> Any:
        return getattr(run, name) if run.sources[name] != "default" else None

    names = ("n_heads", "n_kv_heads", "rope_theta", "norm_eps")
    return Given(*map(said, names), max_seq_len=run.max_seq_len)


def _shaped(run: RunConfig, by: str, config: MiniMindConfig, tokenizer: Path | None) -> RunConfig:
    shape = {flag: getattr(config, name) for flag, name in SHAPE.items()}
    run = with_decided(run, by, shape, over_presets=False)
    length = config.max_position_embeddings
    if run.sources["max_seq_len"] == "default" and length != run.max_seq_len:
        run = run.with_values(by, max_seq_len=length)
    if run.tokenizer is None and not is_prepared(run.data_path[0]):
        if tokenizer is None:
            raise UsageError(
                f"{by} has no tokenizer; give the one it was trained with (--tokenizer)"
            )
        run = run.with_values(by, tokenizer=str(tokenizer))
    check(run)
    return run
