"""Shape, tokenizer and weights that a new run starts from: --model hf: and --init_from.

A run that resumes one of its own checkpoints takes the shape from there, and what --init_from names
may be gone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minimind.architecture.hf_models import POSITIONS
from minimind.architecture.select import (
    Architecture,
    HuggingFace,
    MiniMind,
    extend,
    hugging_face,
    shape_flags,
)
from minimind.architecture.shape import is_frozen
from minimind.checkpoint.directory import Rejected, newest_valid, rejected
from minimind.checkpoint.resume import Manifests
from minimind.checkpoint.validation import read_config
from minimind.config.checks import check
from minimind.config.flags import SHAPE
from minimind.config.origin import BY_TASK, Origin, Rank
from minimind.config.parse import config_file
from minimind.config.run_config import RunConfig
from minimind.config.template_variables import template_variables
from minimind.data.prepare.prepared import Prepared
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.engine.optimizers import scale_initial_weights
from minimind.errors import CheckpointError, UsageError
from minimind.model.causal_lm import enable_checkpointing
from minimind.model.configuration import MiniMindConfig
from minimind.runtime import disk
from minimind.runtime.urls import named
from minimind.train.bigrams import start_as_bigrams
from minimind.train.text import Text, with_derived_values

if TYPE_CHECKING:
    from minimind.interop.foreign_config import ShapeFlags
    from minimind.interop.weights import Weights

# Flags of the shape that a model of transformers only bounds.
FREE = ("max_seq_len", "vocab_size")
# Shape flags that change neither weights nor outputs.
NOT_OF_WEIGHTS = ("max_seq_len", "aux_loss_alpha")


@dataclass(frozen=True)
class InitialModel:
    """A run with the shape of its initial model, and the weights unless it resumes."""

    run: RunConfig
    architecture: Architecture
    weights: Weights | None = None
    grown_from: int | None = None  # rows of the weights before `with_special_tokens`
    template_line: str = ""  # of the start summary; empty without conversations

    def with_special_tokens(self, before: Tokenizer, after: Tokenizer) -> InitialModel:
        """Return the run with `after`, which has added ids to `before`, and rows for the new ids.

        `before` is the tokenizer of `self.run`; one with another number of ids is refused. Rows
        without an id are used first.
        """
        from minimind.interop.weights import check_vocabulary, grow_vocabulary

        values = {"tokenizer": str(after.path), "vocab_size": after.vocab_size}
        run = self.run.with_values(BY_TASK, **values)
        architecture = self.architecture
        if isinstance(architecture, HuggingFace):
            rows = architecture.parsed.vocab_size
        else:
            rows = architecture.rows or before.vocab_size
            if self.weights:
                check_vocabulary(before, self.run.vocab_size, needs_all=True)
        if after.vocab_size <= rows:
            return replace(self, run=run)
        architecture = architecture.with_vocabulary(after.vocab_size)
        if self.weights is None:  # those of a checkpoint of this run
            return replace(self, run=run, architecture=architecture)
        weights = grow_vocabulary(self.weights, after.vocab_size)
        return InitialModel(run, architecture, weights, rows, self.template_line)

    def build(self, run: RunConfig, prepared: Prepared) -> Any:
        """Build the initial model of the resolved `run`, before an engine shards or copies it.

        muP scales random weights only, and not those of --init_from.
        """
        torch.manual_seed(run.seed)
        model = self.architecture.build(run, prepared.tokenizer)
        for name, p in model.named_parameters():
            p.requires_grad_(not is_frozen(name, run.freeze))
        if run.gradient_checkpointing:
            enable_checkpointing(model)
        if self.weights:
            self.weights.fill(model)
            self.weights.release()
        else:
            scale_initial_weights(model, run)
            if run.embedding_init == "bigrams":
                start_as_bigrams(model, prepared.train)
        return model

    def origin(self, resumed: Mapping[str, Any]) -> dict[str, str] | None:
        """Place and kind of the initial weights; of a resumed run, as its manifest records them."""
        if resumed:
            return resumed.get("init_from")
        return self.weights and {"place": named(str(self.weights.path)), "kind": self.weights.kind}

    def line(self) -> str:
        """The `weights` line of the start summary; empty without --init_from."""
        if self.weights:
            note = f"; {self.weights.note}" if self.weights.note else ""
            line = f"weights  from {named(str(self.weights.path))} ({self.weights.kind}){note}"
            if self.grown_from is None:
                return line
            return (
                f"{line}, vocabulary {self.grown_from:,} -> {self.weights.config.vocab_size:,}:"
                " new rows are the mean of the others"
            )
        path = self.run.init_from
        return f"weights  from the checkpoint: --init_from {path} is ignored" if path else ""


def read_initial(run: RunConfig, text: Text, saved: Manifests) -> InitialModel:
    """Return the initial model of `run`; reads configurations, no weights.

    `saved` are the checkpoints to resume from. Raise UsageError if a flag contradicts the shape, or
    the shape is incomplete.
    """
    if run.hugging_face is not None:
        path = config_file(run.hugging_face)
        if config_path := hugging_face(path):
            return _of_transformers(run, text, saved, config_path, path.parent)
        run = _with_shape(run, f"--model {run.model}", MiniMindConfig(**read_config(path.parent)))
        run = run.with_values(Origin("its config.json", Rank.DATA), model=None)
    if run.init_from is None:
        return InitialModel(run, MiniMind())
    if path := _newest(saved, read_config):
        manifest = saved[path]
        assert not isinstance(manifest, CheckpointError)  # `_newest` passes those over
        config = MiniMindConfig(**read_config(path, manifest))
        ids = manifest["identity"].get("model", {}).get("vocab_size", config.vocab_size)
        if run.task == "sft":
            run = with_vocabulary_of(run, path, ids)
        run = _with_shape_and_tokenizer(run, text, f"checkpoint {path}", config, path, ids)
        return InitialModel(run, MiniMind(config.vocab_size))
    from minimind.interop.weights import load_weights_from

    weights = load_weights_from(run.init_from, _shape_flags(run))
    by = f"--init_from {run.init_from}"
    if not isinstance(weights.config, MiniMindConfig):
        raise UsageError(
            f"{by} is a model of transformers; give --model hf:{weights.path} beside it"
        )
    run, config = extend(run, by, weights.config)
    own, ids = None, config.vocab_size
    has_all = run.tokenizer is not None and load_tokenizer(run.tokenizer).vocab_size == ids
    if weights.tokenizer is not None and not has_all:
        tokenizer = weights.load_tokenizer()
        own, ids = tokenizer.path, tokenizer.vocab_size
    run = _with_shape_and_tokenizer(run, text, by, config, own, ids)
    if run.rope_theta != config.rope_theta:
        note = f"rope_theta {run.rope_theta:g} in place of {config.rope_theta:g}"
        weights = replace(weights, note=note)
    return InitialModel(run, MiniMind(config.vocab_size), weights)


def fine_tuned(initial: InitialModel, saved: Manifests) -> InitialModel:
    """Return the model of --task sft: with the chat template's tokens, blind across conversations.

    The template is that of --chat_template, of the tokenizer, or ours. Raise UsageError without
    weights to start from, and for a template that does not fit.
    """
    from minimind.data.chat.template import ChatTemplate, date_of, require_read
    from minimind.data.prepare.chat_tokenizer import chat_tokenizer, chosen_template

    run = initial.run.with_values(BY_TASK, doc_mask=True)
    is_resumed = initial.weights is None and _newest(saved) is not None
    if run.tokenizer is None or not (initial.weights or is_resumed):
        raise UsageError(
            "--task sft needs a model to start from; give --init_from, a run's out_dir for example"
        )
    before = load_tokenizer(run.tokenizer)
    template, name, line = chosen_template(run.chat_template, before)
    if told := date_of(template, run.template_date):
        run, line = run.with_values(BY_TASK, template_date=told), f"{line}, which is told {told}"
    elif run.template_date is not None:
        raise UsageError(
            f"template_date = {run.template_date} ({run.sources['template_date']}) has no effect:"
            f" the chat template {name} does not ask for the date; remove it"
        )
    initial = replace(initial, template_line=line)
    after = chat_tokenizer(before, template, name, Path(run.cache_dir).expanduser())
    variables = template_variables(run.chat_template_kwargs)
    require_read(variables, template, name)
    ChatTemplate(template, after, name, variables=variables)
    if after.vocab_size == before.vocab_size:
        run = run.with_values(BY_TASK, tokenizer=str(after.path.parent))
        return replace(initial, run=run)
    if is_resumed and isinstance(initial.architecture, MiniMind):
        if after.vocab_size == run.vocab_size:  # that of the checkpoint; --tokenizer lacks some
            return replace(initial, run=run.with_values(BY_TASK, tokenizer=str(after.path)))
        raise UsageError(
            f"out_dir {run.out_dir} holds a run whose tokenizer lacks special tokens of the chat"
            " template, such as a pretraining run; give another --out_dir"
        )
    return replace(initial, run=run).with_special_tokens(before, after)


def _of_transformers(
    run: RunConfig, text: Text, saved: Manifests, model: HuggingFace, folder: Path
) -> InitialModel:
    """Return the initial model described by a config.json of transformers.

    Flags of the shape that it does not define become None.
    """
    from minimind.interop.weights import find_tokenizer, load_own, load_transformers_weights

    origin, config = Origin(f"model {run.model}", Rank.PRESET), model.parsed
    run = run.with_values(origin, **dict.fromkeys(name for name in SHAPE if name not in FREE))
    run = run.with_values(
        origin,
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
    )
    for name, field in (("max_seq_len", POSITIONS), ("vocab_size", "vocab_size")):
        value, limit = getattr(run, name), getattr(config, field)
        if value > limit and run.is_explicit(name):
            raise UsageError(
                f"{name} = {value} ({run.sources[name]}), but --model {run.model} has {field} ="
                f" {limit}; lower {name}, or raise {field}"
            )
        run = run.with_values(origin, **{name: limit}) if value > limit else run
    model.require_gradient_checkpointing(run)
    if run.tokenizer is None and text.folder is None:
        is_file = disk.is_file(Path(run.hugging_face or "").expanduser())
        if own := None if is_file else find_tokenizer(folder):
            path = load_own(own, config.vocab_size).path
            run = run.with_values(origin, tokenizer=str(path))
    if run.tokenizer is not None:
        model.require_embedding_rows(
            load_tokenizer(run.tokenizer).vocab_size, f"--tokenizer {run.tokenizer}"
        )
    if run.init_from is None or _newest(saved):
        return InitialModel(run, model)
    return InitialModel(run, model, load_transformers_weights(run.init_from, config))


def with_vocabulary_of(run: RunConfig, checkpoint: Path, rows: int) -> RunConfig:
    """Return the run with the rows of a checkpoint, which include added special tokens.

    Raise UsageError if --vocab_size is neither with nor without them.
    """
    if run.is_explicit("vocab_size"):
        special, before = {*load_tokenizer(checkpoint).special_tokens().values()}, rows
        while before - 1 in special:
            before -= 1
        if not before <= run.vocab_size <= rows:
            raise UsageError(
                f"vocab_size = {run.vocab_size} ({run.sources['vocab_size']}), but {checkpoint} has"
                f" {rows}; remove it"
            )
    return run.with_values(BY_TASK, vocab_size=rows)


def _newest(
    saved: Manifests, read: Callable[[Path, dict[str, Any]], Any] = lambda path, manifest: None
) -> Path | None:
    """Return the newest checkpoint whose manifest is readable and of which `read` succeeds.

    Raise AllDamaged if there are checkpoints and none is.
    """

    def damage(path: Path) -> Rejected | None:
        manifest = saved[path]
        if isinstance(manifest, CheckpointError):
            return rejected(path, "manifest.json", manifest)
        try:
            read(path, manifest)
        except CheckpointError as error:
            return rejected(path, "config.json", error)
        return None

    return newest_valid([*saved], damage)[0]


def _shape_flags(run: RunConfig) -> ShapeFlags:
    """Flags given for a weights file that has no configuration; None for those not given."""
    from minimind.interop.foreign_config import ShapeFlags

    names = ("n_heads", "n_kv_heads", "rope_theta", "norm_eps")
    values = [
        getattr(run, name) if run.sources[name].rank > Rank.DEFAULT else None for name in names
    ]
    if run.rope_scaling:  # max_seq_len is the length to reach
        return ShapeFlags(*values, max_seq_len=run.rope_original_length, is_scaled=True)
    return ShapeFlags(*values, max_seq_len=run.max_seq_len)


def _with_shape_and_tokenizer(
    run: RunConfig, text: Text, by: str, config: MiniMindConfig, tokenizer: Path | None, ids: int
) -> RunConfig:
    run = _with_shape(run, by, config, ids)
    if run.tokenizer is None and text.folder is None:
        if tokenizer is None:
            raise UsageError(
                f"{by} has no tokenizer; give the one it was trained with (--tokenizer)"
            )
        run = run.with_values(Origin(by, Rank.DATA), tokenizer=str(tokenizer))
    check(run)
    return run


def _with_shape(
    run: RunConfig, by: str, config: MiniMindConfig, ids: int | None = None
) -> RunConfig:
    """Return the run with the shape of a model whose tokenizer has `ids`, by default all rows.

    --rope_theta takes precedence over its base; a preset's does not.
    """
    values = shape_flags(config) | ({} if ids is None else {"vocab_size": ids})
    shape = {name: v for name, v in values.items() if name not in NOT_OF_WEIGHTS}
    if run.sources["rope_theta"].rank > Rank.DATA:
        del shape["rope_theta"]
    run = with_derived_values(run, by, shape, above=Rank.DEFAULT)
    length = config.max_position_embeddings
    if run.sources["max_seq_len"].rank is Rank.DEFAULT and length != run.max_seq_len:
        run = run.with_values(Origin(by, Rank.DATA), max_seq_len=length)
    return run
