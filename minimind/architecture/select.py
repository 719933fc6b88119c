"""What is trained: a decoder of ours, by the flags, or a model of transformers, by its config.json.

Everything that a run asks of the one kind it asks of the other; nobody else tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from minimind.architecture.hf_config import IDS, first_line, foreign_config, require_model
from minimind.architecture.hf_models import (
    matrix_weights,
    model_of,
    sees_what_follows,
    transformers_model,
)
from minimind.config.checks import OF_EXPERTS
from minimind.config.run_config import RunConfig
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.estimate.costs import flops_per_token
from minimind.estimate.shape import shape_of
from minimind.model.configuration import MiniMindConfig
from minimind.model.widths import feed_forward_width
from minimind.runtime.checked_json import ELSEWHERE, read_object, shown, told_by_config

OURS = MiniMindConfig.model_type
# Of a config.json: who wrote it, and what the tokenizer, --dtype and generation decide.
NO_SHAPE = (
    *("transformers_version", "_name_or_path", "architectures", "use_cache", "torch_dtype"),
    *("dtype", *IDS),
)
# What transformers raises of a value, the tokenizer's ids included. RuntimeError is of memory too.
OF_VALUES = (ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError)
# Names of transformers 4 that 5 reads and calls otherwise.
FORMER = ("rope_theta", "rope_scaling", "auto_map", *NO_SHAPE)


class Own:
    """The MiniMind decoder, which the shape flags describe."""

    def config(self, run: RunConfig, tokenizer: AnyTokenizer) -> MiniMindConfig:
        """Its configuration, with the tokenizer's special ids."""
        return MiniMindConfig(
            vocab_size=run.vocab_size,
            hidden_size=run.dim,
            intermediate_size=run.hidden_dim,
            num_hidden_layers=run.n_layers,
            num_attention_heads=run.n_heads,
            num_key_value_heads=run.n_kv_heads,
            max_position_embeddings=run.max_seq_len,
            rope_theta=run.rope_theta,
            rms_norm_eps=run.norm_eps,
            use_flash_attn=run.use_flash_attn,
            doc_mask=run.doc_mask,
            qk_norm=run.qk_norm,
            use_moe=run.use_moe,
            n_routed_experts=run.n_routed_experts,
            num_experts_per_tok=run.num_experts_per_tok,
            n_shared_experts=run.n_shared_experts,
            aux_loss_alpha=run.aux_loss_alpha,
            norm_topk_prob=run.norm_topk_prob,
            tie_word_embeddings=run.tie_word_embeddings,
            bos_token_id=tokenizer.bos_id if tokenizer.bos_id >= 0 else None,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
        )

    def build(self, run: RunConfig, tokenizer: AnyTokenizer) -> Any:
        """The model in fp32, its weights drawn from torch's random numbers."""
        return model_of(self.config(run, tokenizer))

    def identity(self, run: RunConfig) -> dict[str, Any]:
        """What of it may not change on resume."""
        return {
            "dim": run.dim,
            "n_layers": run.n_layers,
            "n_heads": run.n_heads,
            "n_kv_heads": run.n_kv_heads,
            "hidden_dim": run.hidden_dim or feed_forward_width(run.dim),
            "vocab_size": run.vocab_size,
            "rope_theta": run.rope_theta,
            "norm_eps": run.norm_eps,
            "doc_mask": run.doc_mask,
            "qk_norm": run.qk_norm,
            "tie_word_embeddings": run.tie_word_embeddings,
            "use_moe": run.use_moe,
            **({name: getattr(run, name) for name in OF_EXPERTS} if run.use_moe else {}),
        }

    def flops_per_token(self, run: RunConfig) -> int:
        """Of one forward and backward pass."""
        return flops_per_token(shape_of(run))

    def costs(self, run: RunConfig) -> str:
        """Nothing: `minimind plan` counts them."""
        return ""

    def line(self) -> str:
        """What whoever looks on should know of it, beyond the flags."""
        return ""


@dataclass(frozen=True)
class HuggingFace:
    """A causal language model of transformers, which a config.json describes."""

    place: str
    told: Mapping[str, Any]  # the file
    read: PretrainedConfig

    def config(self, run: RunConfig, tokenizer: AnyTokenizer) -> PretrainedConfig:
        """The file's, with the tokenizer's ids; a UsageError where these do not fit into it."""
        self.require_room(tokenizer.vocab_size, str(tokenizer.path))
        config = deepcopy(self.read)
        for name, value in special_ids(tokenizer).items():
            setattr(config, name, value)
        if not run.use_flash_attn:
            config._attn_implementation = "eager"
        return config

    def require_room(self, vocab_size: int, by: str) -> None:
        """Nothing, or a UsageError for a tokenizer with ids that the embedding has no row for."""
        if vocab_size > self.read.vocab_size:
            raise UsageError(
                f"{by}: has {vocab_size} pieces, and {self.place} vocab_size ="
                f" {self.read.vocab_size}; take a smaller tokenizer, or raise it there"
            )

    def require_recomputable(self, run: RunConfig) -> None:
        """Raise a UsageError for --gradient_checkpointing of a model that does not support it."""
        model = self._outline() if run.gradient_checkpointing else None
        if model is not None and not model.supports_gradient_checkpointing:
            raise UsageError(
                f"gradient_checkpointing = True ({run.sources['gradient_checkpointing']}), which"
                f" {type(model).__name__} of transformers does not support; drop it"
            )

    def build(self, run: RunConfig, tokenizer: AnyTokenizer) -> Any:
        """The model in fp32; a UsageError for one that does not predict what follows."""
        try:
            model = model_of(self.config(run, tokenizer))
            is_causal = not sees_what_follows(model)
        except OF_VALUES as error:
            raise UsageError(f"{self.place}: {first_line(error)}; correct it there") from error
        if not is_causal:
            raise UsageError(
                f"{self.place}: its {type(model).__name__} sees the tokens that it is to predict;"
                " name a causal language model (of some, is_decoder makes one)"
            )
        return model

    def identity(self, run: RunConfig) -> dict[str, Any]:
        """What of it may not change on resume: all that the file says of the model."""
        return {name: self.told[name] for name in sorted({*self.told} - {*NO_SHAPE})}

    def flops_per_token(self, run: RunConfig) -> int:
        """Of one forward and backward pass, counted as costs.py counts ours."""
        weights = matrix_weights(self._outline())
        heads = self.read.num_attention_heads
        width = heads * (getattr(self.read, "head_dim", None) or self.read.hidden_size // heads)
        return 6 * weights + 12 * self.read.num_hidden_layers * width * run.max_seq_len

    def costs(self, run: RunConfig) -> str:
        """Parameters and FLOPs; the memory of such a model is not known beforehand."""
        parameters = sum(p.numel() for p in self._outline().parameters())
        return (
            f"parameters  {parameters:,}: {self.read.model_type} of transformers, by {self.place}\n"
            f"FLOPs       {self.flops_per_token(run) / 1e9:.3g} G per token\n"
            "memory      not counted: that is done for our own decoder alone"
        )

    def _outline(self) -> Any:
        """The model without numbers."""
        with torch.device("meta"):
            return transformers_model(self.read, dtype=torch.float32)

    def line(self) -> str:
        """The same as of ours; and what of the file transformers does not read."""
        known = {*type(self.read)().to_dict(), *self.read.attribute_map, *FORMER}
        unknown = sorted(name for name in self.told if name not in known)
        passed = f"; it does not know {', '.join(map(shown, unknown))} there" if unknown else ""
        return (
            f"model    {self.read.model_type} of transformers, by {self.place}, with the"
            f" tokenizer's special ids{passed}"
        )


Architecture = Own | HuggingFace


def special_ids(tokenizer: AnyTokenizer) -> dict[str, int | None]:
    """A tokenizer's ids by the names that a configuration of transformers has for them.

    A pad that text has too would get no gradient: transformers keeps the row of it as it is.
    """
    return {
        "bos_token_id": tokenizer.bos_id if tokenizer.bos_id >= 0 else None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": None if tokenizer.pad_id == tokenizer.eos_id else tokenizer.pad_id,
    }


def config_file(place: str) -> Path:
    """The config.json that a directory or file means; a UsageError where there is none."""
    path = Path(place).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"--model hf:{place}: has no config.json; name a directory that has one")
    return path


def hugging_face(path: Path) -> HuggingFace | None:
    """What a config.json describes, None if it is of ours; a UsageError if it cannot be trained."""
    try:
        told, _ = read_object(path.resolve())  # a hub's cache is made of links
        if told.get("model_type") == OURS:
            return None
        original = deepcopy(told)  # transformers writes into nested objects
        config = foreign_config(told)
        require_model(original)
        return HuggingFace(str(path), told, config)
    except CheckpointError as error:
        raise UsageError(f"--model hf:{path}: {error}; name another, or mend it") from error


def foreign_config_of(directory: Path, manifest: dict[str, Any]) -> PretrainedConfig | None:
    """What the config.json of a checkpoint of transformers' says; None of ours.

    A CheckpointError names the file.
    """
    told = told_by_config(directory, manifest)
    if told.get("model_type", OURS) == OURS:
        return None
    try:
        return foreign_config(told)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}; {ELSEWHERE}") from error
