"""--model hf: and --init_from: the shape, the tokenizer and the weights that a new run begins with.

Where a checkpoint of the run itself is resumed there is nothing to begin: the shape is then that
checkpoint's, and what --init_from names need not be there any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimind.architecture.hf_config import POSITIONS
from minimind.architecture.select import Architecture, HuggingFace, Own, config_file, hugging_face
from minimind.checkpoint.choose import newest_valid
from minimind.checkpoint.directory import Rejected, read_manifest, rejected
from minimind.checkpoint.resume import meant
from minimind.checkpoint.validation import read_config
from minimind.config.checks import check
from minimind.config.model_flags import SHAPE as FLAGS_OF_SHAPE
from minimind.config.run_config import RunConfig
from minimind.data.prepare.prepare import is_prepared
from minimind.data.tokenizer.load import AnyTokenizer, load_tokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.interop.foreign_config import ShapeFlags
from minimind.interop.weights import (
    Weights,
    find_tokenizer,
    load_transformers_weights,
    load_weights_from,
)
from minimind.model.activation_checkpointing import recompute_blocks
from minimind.model.configuration import MiniMindConfig
from minimind.train.build import with_decided

FREE = ("max_seq_len", "vocab_size")  # of the rows and of the tokenizer, within the model's
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
    architecture: Architecture
    weights: Weights | None = None

    def build(self, run: RunConfig, tokenizer: AnyTokenizer) -> Any:
        """The model that `run`, now resolved, begins with, before an engine cuts or copies it."""
        torch.manual_seed(run.seed)
        model = self.architecture.build(run, tokenizer)
        if run.gradient_checkpointing:
            recompute_blocks(model)
        if self.weights:
            self.weights.fill(model)
            self.weights.release()
        return model

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
    if run.hugging_face is not None:
        path = config_file(run.hugging_face)
        if found := hugging_face(path):
            return _of_transformers(run, found, path.parent)
        run = _with_shape(run, f"--model {run.model}", MiniMindConfig(**read_config(path.parent)))
        run = run.with_values("its config.json", model=None)
    if run.init_from is None:
        return Initial(run, Own())
    if path := _begun(run, _misshapen):
        config = MiniMindConfig(**read_config(path, read_manifest(path)))
        return Initial(_shaped(run, f"checkpoint {path}", config, path), Own())
    weights = load_weights_from(run.init_from, _given(run))
    by = f"--init_from {run.init_from}"
    if not isinstance(weights.config, MiniMindConfig):
        raise UsageError(
            f"{by} is a model of transformers; give --model hf:{weights.path} beside it"
        )
    return Initial(_shaped(run, by, weights.config, weights.tokenizer), Own(), weights)


def _of_transformers(run: RunConfig, model: HuggingFace, folder: Path) -> Initial:
    """The same where a config.json of transformers decides the shape, and its folder what else.

    Flags of the shape that it does not tell have no value.
    """
    by, read = f"model {run.model}", model.read
    run = run.with_values(by, **dict.fromkeys(name for name in FLAGS_OF_SHAPE if name not in FREE))
    run = run.with_values(
        by, dim=read.hidden_size, n_layers=read.num_hidden_layers, n_heads=read.num_attention_heads
    )
    for name, most in (("max_seq_len", POSITIONS), ("vocab_size", "vocab_size")):
        value, limit = getattr(run, name), getattr(read, most)
        if value > limit and run.is_explicit(name):
            raise UsageError(
                f"{name} = {value} ({run.sources[name]}), but --model {run.model} has {most} ="
                f" {limit}; lower it, or raise that"
            )
        run = run.with_values(by, **{name: limit}) if value > limit else run
    model.require_recomputable(run)
    if run.tokenizer is None and not is_prepared(run.data_path[0]):
        own = (
            find_tokenizer(folder) if folder == Path(run.hugging_face or "").expanduser() else None
        )
        run = run.with_values(by, tokenizer=str(own)) if own else run
    if run.tokenizer is not None:
        model.require_room(load_tokenizer(run.tokenizer).vocab_size, f"--tokenizer {run.tokenizer}")
    if run.init_from is None or _begun(run, _unreadable):
        return Initial(run, model)
    return Initial(run, model, load_transformers_weights(run.init_from, read))


def _begun(run: RunConfig, check: Callable[[Path], Rejected | None]) -> Path | None:
    """The checkpoint that the run goes on from, where it does."""
    return newest_valid(meant(Path(run.out_dir) / "checkpoints", run.resume), check)[0]


def _unreadable(path: Path) -> Rejected | None:
    try:
        read_manifest(path)
    except CheckpointError as error:
        return rejected(path, "manifest.json", error)
    return None


def _misshapen(path: Path) -> Rejected | None:
    try:
        read_config(path, read_manifest(path))
    except CheckpointError as error:
        return rejected(path, "config.json", error)
    return None


def _given(run: RunConfig) -> ShapeFlags:
    """What flags say of a file that has no configuration: only those that were given."""

    def said(name: str) -> Any:
        return getattr(run, name) if run.sources[name] != "default" else None

    names = ("n_heads", "n_kv_heads", "rope_theta", "norm_eps")
    return ShapeFlags(*map(said, names), max_seq_len=run.max_seq_len)


def _shaped(run: RunConfig, by: str, config: MiniMindConfig, tokenizer: Path | None) -> RunConfig:
    run = _with_shape(run, by, config)
    if run.tokenizer is None and not is_prepared(run.data_path[0]):
        if tokenizer is None:
            raise UsageError(
                f"{by} has no tokenizer; give the one it was trained with (--tokenizer)"
            )
        run = run.with_values(by, tokenizer=str(tokenizer))
    check(run)
    return run


def _with_shape(run: RunConfig, by: str, config: MiniMindConfig) -> RunConfig:
    shape = {flag: getattr(config, name) for flag, name in SHAPE.items()}
    run = with_decided(run, by, shape, over_presets=False)
    length = config.max_position_embeddings
    if run.sources["max_seq_len"] == "default" and length != run.max_seq_len:
        run = run.with_values(by, max_seq_len=length)
    return run
