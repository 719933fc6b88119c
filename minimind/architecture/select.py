"""The architecture of a run: our decoder, or a transformers model given by a config.json.

Both classes have config, build, identity, parameters, sizes, flops_per_token, vocabulary, costs
and start_summary_line. The scaling of rotary positions follows from --rope_scaling and the model
that the run starts from.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from minimind.architecture.hf_models import (
    IDS,
    foreign_config,
    is_bidirectional,
    matrices_and_embeddings,
    model_of,
    require_model,
    require_separate_documents,
    transformers_model,
)
from minimind.architecture.shape import flops_of, flops_per_token, is_frozen, shape_of
from minimind.config.flags import OF_EXPERTS, SHAPE
from minimind.config.origin import Origin, Rank
from minimind.config.run_config import RunConfig
from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.checked_json import (
    ELSEWHERE,
    read_checkpoint_config,
    read_foreign_object,
    shown,
)
from minimind.runtime.terminal import first_lines

SCALING = "rope_scaling."
# Fields of MiniMindConfig by flag, and keys of its rope_scaling.
PLAIN = {flag: f.name for flag, f in SHAPE.items() if not f.name.startswith(SCALING)}
ROTARY = {flag: SHAPE[flag].name.removeprefix(SCALING) for flag in SHAPE if flag not in PLAIN}


def scaling_of(run: RunConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` of the run's MiniMindConfig."""
    if run.rope_scaling is None:
        return None
    return {key: getattr(run, flag) for flag, key in ROTARY.items()}


def shape_flags(config: MiniMindConfig) -> dict[str, Any]:
    """Return the values of the flags that describe a model; those of its scaling come last."""
    scaling = config.rope_scaling or {}
    shape = {flag: getattr(config, name) for flag, name in PLAIN.items()}
    return shape | {flag: scaling.get(key) for flag, key in ROTARY.items()}


def extend(run: RunConfig, by: str, config: MiniMindConfig) -> tuple[RunConfig, MiniMindConfig]:
    """Return the run and the model that it continues, both with the scaling of --rope_scaling.

    Without the flag both are returned as they are. Raise UsageError if the lengths do not fit.
    """
    if run.rope_scaling is None:
        return run, config
    if run.rope_original_length is None:  # the length of the model before any scaling
        before = shape_flags(config)["rope_original_length"]
        length = before or config.max_position_embeddings
        run = run.with_values(Origin(by, Rank.DATA), rope_original_length=length)
    run, extended = run.with_complete_scaling(), deepcopy(config)
    extended.rope_scaling = scaling_of(run)
    return run, extended


def scaling_text(run: RunConfig) -> list[str]:
    """Return `rope yarn, 4 x 512 positions` for the start summary; nothing without scaling."""
    if run.rope_scaling is None:
        return []
    return [f"rope {run.rope_scaling}, {run.rope_factor:g} x {run.rope_original_length} positions"]


OURS = MiniMindConfig.model_type
# Keys of config.json that do not describe the model: provenance, dtype, generation, special ids.
NO_SHAPE = (
    *("transformers_version", "_name_or_path", "architectures", "use_cache", "torch_dtype"),
    *("dtype", *IDS),
)
# Raised by transformers for invalid values; not RuntimeError, which may be out of memory.
VALUE_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError)
# Not reported as ignored by `start_summary_line`: old names, and keys that are not of the model.
NOT_REPORTED = ("rope_theta", "rope_scaling", "auto_map", *NO_SHAPE)


@dataclass(frozen=True)
class MiniMind:
    """The MiniMind decoder, described by the shape flags.

    Its embedding may have more `rows` than the tokenizer ids; by default it has as many.
    """

    rows: int | None = None

    def with_rows(self, run: RunConfig) -> RunConfig:
        """Return the run with the vocabulary of the weights."""
        return replace(run, vocab_size=self.rows or run.vocab_size)

    def config(self, run: RunConfig, tokenizer: Tokenizer) -> MiniMindConfig:
        """The configuration, with the tokenizer's special ids."""
        return minimind_config(
            self.with_rows(run),
            bos_token_id=tokenizer.bos_id if tokenizer.bos_id >= 0 else None,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
        )

    def build(self, run: RunConfig, tokenizer: Tokenizer) -> Any:
        """Build the model in fp32, initialized from torch's random state."""
        return model_of(self.config(run, tokenizer))

    def identity(self, run: RunConfig) -> dict[str, Any]:
        """Values that must not change on resume."""
        unread = {
            "head_dim",
            *(() if run.use_moe else OF_EXPERTS),
            *(() if run.rope_scaling else ROTARY),
        }
        names = [name for name, field in SHAPE.items() if field.group == "model"]
        shape = {name: getattr(run, name) for name in names if name not in unread}
        if run.head_width != run.dim / run.n_heads:
            shape["head_dim"] = run.head_width
        return {**shape, "hidden_dim": run.feed_forward_width, "doc_mask": run.doc_mask}

    def parameters(self, run: RunConfig) -> int:
        return shape_of(self.with_rows(run)).parameters

    def sizes(self, run: RunConfig) -> dict[str, int]:
        """Elements of each parameter by name; a tied head has none."""
        return shape_of(self.with_rows(run)).named

    def flops_per_token(self, run: RunConfig) -> int:
        """FLOPs of one token's forward and backward pass."""
        return flops_per_token(shape_of(self.with_rows(run)))

    def vocabulary(self, run: RunConfig) -> int:
        """Width of the logits."""
        return self.with_rows(run).vocab_size

    def with_vocabulary(self, vocab_size: int) -> MiniMind:
        return MiniMind(vocab_size)

    def costs(self, run: RunConfig) -> str:
        """Empty: `minimind plan` estimates them."""
        return ""

    def start_summary_line(self) -> str:
        """A line for the start summary; empty, since the flags describe the model."""
        return ""


def minimind_config(run: RunConfig, **ids: Any) -> MiniMindConfig:
    """The configuration of the MiniMind decoder with these special ids."""
    return MiniMindConfig(
        **{field: getattr(run, flag) for flag, field in PLAIN.items()},
        rope_scaling=scaling_of(run),
        use_flash_attn=run.use_flash_attn,
        doc_mask=run.doc_mask and run.task != "sft",  # rows say where conversations start
        **ids,
    )


@dataclass(frozen=True)
class HuggingFace:
    """A causal language model of transformers, described by a config.json."""

    path: str
    values: Mapping[str, Any]  # content of the file
    parsed: PretrainedConfig

    def config(self, run: RunConfig, tokenizer: Tokenizer) -> PretrainedConfig:
        """The configuration with the tokenizer's ids; raise UsageError if they do not fit."""
        self.require_embedding_rows(tokenizer.vocab_size, str(tokenizer.path))
        config = deepcopy(self.parsed)
        for name, value in special_ids(tokenizer).items():
            setattr(config, name, value)
        if not run.use_flash_attn:
            config._attn_implementation = "eager"
        return config

    def require_embedding_rows(self, vocab_size: int, by: str) -> None:
        """Raise UsageError if the tokenizer has more pieces than the embedding has rows."""
        if vocab_size > self.parsed.vocab_size:
            raise UsageError(
                f"{by}: has {vocab_size} pieces, more than vocab_size ="
                f" {self.parsed.vocab_size} of {self.path}; use a smaller tokenizer, or raise it"
            )

    def vocabulary(self, run: RunConfig) -> int:
        """Width of the logits."""
        return self.parsed.vocab_size

    def with_vocabulary(self, vocab_size: int) -> HuggingFace:
        parsed = deepcopy(self.parsed)
        parsed.vocab_size = vocab_size
        return replace(self, values={**self.values, "vocab_size": vocab_size}, parsed=parsed)

    def require_gradient_checkpointing(self, run: RunConfig) -> None:
        """Raise UsageError if the model does not support --gradient_checkpointing."""
        model = self._meta_model() if run.gradient_checkpointing else None
        if model is not None and not model.supports_gradient_checkpointing:
            raise UsageError(
                f"gradient_checkpointing = True ({run.sources['gradient_checkpointing']}), which"
                f" {type(model).__name__} of transformers does not support; remove it"
            )

    def build(self, run: RunConfig, tokenizer: Tokenizer) -> Any:
        """Build the model in fp32; raise UsageError if it is not causal."""
        try:
            model = model_of(self.config(run, tokenizer))
            is_causal = not is_bidirectional(model)
        except VALUE_ERRORS as error:
            raise UsageError(f"{self.path}: {first_lines(error, 2)}; correct it there") from error
        if not is_causal:
            raise UsageError(
                f"{self.path}: {type(model).__name__} attends to later tokens;"
                " name a causal language model (some need is_decoder: true)"
            )
        if run.task == "sft":
            require_separate_documents(model)
        return model

    def identity(self, run: RunConfig) -> dict[str, Any]:
        """Return the keys that describe the model: none may change on resume."""
        return {name: self.values[name] for name in sorted({*self.values} - {*NO_SHAPE})}

    def parameters(self, run: RunConfig) -> int:
        return sum(self.sizes(run).values())

    def sizes(self, run: RunConfig) -> dict[str, int]:
        """Elements of each parameter by name; a tied head has none."""
        return {name: p.numel() for name, p in self._meta_model().named_parameters()}

    def flops_per_token(self, run: RunConfig) -> int:
        """FLOPs of one token's forward and backward pass, counted as those of our decoder."""
        model = self._meta_model()
        matrices, embeddings = matrices_and_embeddings(model)
        trained = {name for name, _ in model.named_parameters() if not is_frozen(name, run.freeze)}
        heads = self.parsed.num_attention_heads
        width = heads * (getattr(self.parsed, "head_dim", None) or self.parsed.hidden_size // heads)
        layers, products = self.parsed.num_hidden_layers, width * run.max_seq_len
        return flops_of(matrices, trained, embeddings, layers, products)

    def costs(self, run: RunConfig) -> str:
        """Parameters and FLOPs; the memory of such a model is not estimated."""
        return (
            f"parameters  {self.parameters(run):,}: {self.parsed.model_type} of transformers,"
            f" by {self.path}\n"
            f"FLOPs       {self.flops_per_token(run) / 1e9:.3g} G per token\n"
            "memory estimated for the MiniMind decoder only"
        )

    def _meta_model(self) -> Any:
        with torch.device("meta"):
            return transformers_model(self.parsed, dtype=torch.float32)

    def start_summary_line(self) -> str:
        """A line for the start summary, with the keys that transformers does not read."""
        known = {*type(self.parsed)().to_dict(), *self.parsed.attribute_map, *NOT_REPORTED}
        unknown = sorted(name for name in self.values if name not in known)
        ignored = f"; ignored keys: {', '.join(map(shown, unknown))}" if unknown else ""
        return (
            f"model    {self.parsed.model_type} of transformers, by {self.path}, with the"
            f" tokenizer's special ids{ignored}"
        )


Architecture = MiniMind | HuggingFace


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Special ids of a tokenizer by the names of transformers' configuration.

    pad_token_id is None if it is the eos id: nn.Embedding does not train row padding_idx.
    """
    return {
        "bos_token_id": tokenizer.bos_id if tokenizer.bos_id >= 0 else None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": None if tokenizer.pad_id == tokenizer.eos_id else tokenizer.pad_id,
    }


def hugging_face(path: Path) -> HuggingFace | None:
    """Read a config.json; None for a MiniMind model. Raise UsageError if unsupported."""
    try:
        values = read_foreign_object(path)
        if values.get("model_type") == OURS:
            return None
        original = deepcopy(values)  # transformers writes into nested objects
        config = foreign_config(values)
        require_model(original)
        return HuggingFace(str(path), values, config)
    except CheckpointError as error:
        raise UsageError(f"--model hf:{path}: {error}; name another, or correct it") from error


def foreign_config_of(directory: Path, manifest: dict[str, Any]) -> PretrainedConfig | None:
    """Return the configuration of a checkpoint of a transformers model; None for ours.

    Raise CheckpointError, naming the file, if it cannot be used.
    """
    values = read_checkpoint_config(directory, manifest)
    if values.get("model_type", OURS) == OURS:
        return None
    try:
        return foreign_config(values)
    except CheckpointError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}; {ELSEWHERE}") from error
