"""A model from any source: its shape, its tensors one at a time under our names, its tokenizer.

Sources are training checkpoints, what `export --format minimind` and `checkpoint consolidate`
write, directories of Hugging Face's Llama, Mistral and Qwen, and MiniMind2's files. In each the
tensors must be exactly those of the shape. Special tokens that a model has no rows for get some.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from minimind.architecture.hf_models import foreign_config, model_of, transformers_model
from minimind.architecture.select import foreign_config_of
from minimind.checkpoint.directory import MANIFEST, Chosen, choose, read_chosen, read_manifest
from minimind.checkpoint.retention import with_best
from minimind.checkpoint.tensor_files import readable
from minimind.checkpoint.validation import read_config
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.data.tokenizer.vocabulary import JSON_NAME, MODEL_NAME, TOKENIZER_FILES
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.interop.foreign_config import ShapeFlags
from minimind.interop.formats import FORMATS, ORIGINS
from minimind.interop.job import CONFIG, EMBEDDING, HEAD, REPLACE
from minimind.interop.tensor_sources import (
    TRAINED,
    TensorSource,
    open_as_saved,
    open_checkpoint,
    open_tensors,
    require_known_prefix,
    require_trained,
)
from minimind.model.configuration import MiniMindConfig
from minimind.model.rotary import half_to_interleaved
from minimind.report.formats import skipped
from minimind.runtime import disk
from minimind.runtime.checked_json import read_foreign_object, require_listed, shown
from minimind.runtime.file_kinds import ADAPTER_WEIGHTS, base_of_adapter
from minimind.runtime.hub import local_model
from minimind.runtime.installed import install_packages
from minimind.runtime.locks import ReadLock
from minimind.runtime.terminal import first_lines


def match(
    source: TensorSource, path: Path, config: PretrainedConfig, called: Callable[[str], str] = str
) -> TensorSource:
    """The tensors of the model that `config` describes, a tied one once; else CheckpointError.

    As in transformers, names may lack the prefix of the base model (GPT-2 on the hub), and tensors
    that earlier versions stored and the model now computes are ignored. `called`: what such a file
    calls a tensor of the model. Nothing large is allocated.
    """
    cause = f"its {CONFIG} requires" if disk.is_dir(path) else "its other tensors require"
    if config.num_hidden_layers > len(source.shapes):  # before a module is made for each
        place = path / CONFIG if disk.is_dir(path) else path
        raise CheckpointError(
            f"{place}: has num_hidden_layers = {config.num_hidden_layers}, and the weights are"
            f" {len(source.shapes)} tensors; {REPLACE}"
        )
    with torch.device("meta"):
        model = model_of(config)
    expected, prefix = model.state_dict(), f"{model.base_model_prefix}."
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    require_known_prefix(
        source, path, {*expected, *(name.removeprefix(prefix) for name in expected)}
    )
    names = {}
    for name in source.shapes:
        full = name if name in expected else f"{prefix}{name}"
        if full in expected or not any(re.search(pattern, name) for pattern in ignored):
            names[full if full in expected else name] = name

    def named(full: str) -> str:
        name = names.get(full)
        return shown(source.file_names.get(name, name) if name else called(full))

    for tied, first in model.all_tied_weights_keys.items():
        expected.pop(tied)
        if tied not in names:
            continue
        if first in names and not _is_equal(source, names[tied], names[first]):
            raise CheckpointError(
                f"{path}: {named(tied)} is not {named(first)}, though {CONFIG} ties them; correct"
                " tie_word_embeddings there"
            )
        names.setdefault(first, names[tied])
        names.pop(tied)
    tensors = source.renamed(names)
    for name in sorted({*names, *expected}):
        label, shape, wanted = named(name), tensors.shapes.get(name), expected.get(name)
        if shape is None:
            fault = f"has no {label}, which {cause}"
        elif wanted is None:
            fault = f"has {label}, and {cause} no such tensor"
        elif shape != [*wanted.shape]:
            fault = f"{label} has shape {shape}, and {cause} {[*wanted.shape]}"
        elif tensors.dtypes[name].is_floating_point != wanted.is_floating_point():
            fault = f"{label} has dtype {tensors.dtypes[name]}, not {wanted.dtype}"
        else:
            continue
        raise CheckpointError(f"{path}: {fault}; {REPLACE}")
    return tensors


CHECKPOINT, OURS, TRANSFORMERS = "checkpoint", "minimind", "transformers"

T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """A validated model; no tensor has been read yet."""

    kind: str  # checkpoint, minimind (an export of ours), llama, minimind2 or transformers
    path: Path
    config: Any  # a MiniMindConfig or one of transformers
    tensors: TensorSource
    tokenizer: Path | None = None  # file or directory for load_tokenizer
    note: str = ""  # what was taken that the files do not say
    lock: ReadLock | None = None  # keeps a running job from deleting the checkpoint
    which: str = TRAINED  # weights of a checkpoint, or AVERAGE

    def fill(self, model: Any) -> None:
        """Copy the weights into a model of this shape; raise an error if one is not finite."""
        state = model.state_dict()
        for name in self.tensors.shapes:
            state[name].copy_(self.tensors.read_as(name, state[name].dtype))

    def set_special_ids(self, tokenizer: Tokenizer) -> None:
        """Give the configuration the ids of the tokenizer: files without one have none."""
        self.config.bos_token_id = tokenizer.bos_id if tokenizer.bos_id >= 0 else None
        self.config.eos_token_id, self.config.pad_token_id = tokenizer.eos_id, tokenizer.pad_id

    def release(self) -> None:
        """Unlock the checkpoint once nothing more is read from it."""
        if self.lock:
            self.lock.close()

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer; raise CheckpointError if it is missing or does not fit the embedding."""
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.path}: has no tokenizer; put its {MODEL_NAME} or {JSON_NAME} there, or give"
                " it as --tokenizer"
            )
        tokenizer = load_own(self.tokenizer, self.config.vocab_size)
        check_vocabulary(tokenizer, self.config.vocab_size)
        return tokenizer

    def with_tokenizer(self, path: str | Path) -> Weights:
        """The weights with another tokenizer.

        Raise CheckpointError unless it has an id for each row, or as many as their own.
        """
        given, rows = load_own(path, self.config.vocab_size), self.config.vocab_size
        if given.vocab_size < rows and self.tokenizer:
            rows = self.load_tokenizer().vocab_size
        check_vocabulary(given, rows, needs_all=True)
        return replace(self, tokenizer=Path(path))


def load_own(path: str | Path, rows: int) -> Tokenizer:
    """The tokenizer of a model with that many rows; raise CheckpointError if it cannot be read."""
    try:
        return load_tokenizer(path, rows)
    except DataError as error:  # its remedy is for training text
        raise CheckpointError(f"{str(error).split(';')[0]}; {REPLACE}") from error


def check_vocabulary(tokenizer: Tokenizer, rows: int, needs_all: bool = False) -> None:
    """Raise CheckpointError if the embedding has fewer rows than the tokenizer ids, or needs_all
    and has more.
    """
    ids = tokenizer.vocab_size
    if ids > rows or (needs_all and ids < rows):
        names = [name for name in (MODEL_NAME, JSON_NAME) if name != tokenizer.path.name]
        beside = [name for name in names if disk.lexists(tokenizer.path.with_name(name))]
        raise CheckpointError(
            f"{tokenizer.path}: has {ids} pieces and the embedding {rows} rows; give the tokenizer"
            f" that the model was trained with{f' ({beside[0]} is beside it)' if beside else ''}"
        )


def find_tokenizer(path: Path) -> Path | None:
    """The directory, if it has a tokenizer."""
    return path if any(disk.lexists(path / name) for name in (MODEL_NAME, JSON_NAME)) else None


def is_checkpoint(path: Path) -> bool:
    """Whether the path is a run directory or one of its step directories."""
    is_run = disk.is_dir(path / "checkpoints") or path.name == "checkpoints"
    return is_run or disk.exists(path / MANIFEST)


def load_weights_from(
    place: str | Path, flags: ShapeFlags | None = None, origin: str | None = None
) -> Weights:
    """The model at `place`: a run or step directory, a directory with weights, a file of them, or
    one of the Hub.

    `origin` (a value of `import --from`) is the expected format, by default any; `flags` describe
    a file without a configuration. Raise CheckpointError or UsageError.
    """
    path = with_best(local_model(place))
    if is_checkpoint(path):
        _require_import(origin, f"{path}: is a run of ours")
        return load_checkpoint_weights(choose(str(path)))
    if base := base_of_adapter(path):
        return _merged(path, base)
    return weights_of(path, open_tensors(path), flags or ShapeFlags(), origin)


def _require_import(origin: str | None, what: str) -> None:
    if origin:
        raise UsageError(
            f"{what}, and no import is needed; name it as it is to `minimind export` or --init_from"
        )


def weights_of(
    path: Path, source: TensorSource, flags: ShapeFlags, origin: str | None = None
) -> Weights:
    """The model of these tensors, in the format that their names and configuration show.

    Where they show none it is the expected one: then the error is about its first tensor.
    """
    expected = ORIGINS[origin or "llama"]
    shown_by = (form for form in FORMATS.values() if form.detect(path, source.shapes))
    form = next(shown_by, expected)
    if not form.origins:
        _require_import(origin, f"{path}: is an export of ours")
    elif origin and form is not expected:
        raise UsageError(
            f"{path}: has the tensors of {form.name}, not of {expected.name}; give --from"
            f" {form.name}"
        )
    require_known_prefix(source, path, {one.from_ours(EMBEDDING) for one in ORIGINS.values()})
    names = {}
    for theirs in source.shapes:
        ours = form.to_ours(theirs)
        if ours is None:
            raise CheckpointError(
                f"{path}: {shown(theirs)} is not a tensor of a dense model of the format"
                f" {form.name}, and no other can be imported; name the file of one"
            )
        if ours:
            names[ours] = theirs
    tensors = source.renamed(names)
    shape, note = form.read_config(path, tensors.shapes, flags)
    if "tie_word_embeddings" not in shape:
        has_both = {HEAD, EMBEDDING} <= {*tensors.shapes}
        is_tied = _is_equal(tensors, HEAD, EMBEDDING) if has_both else HEAD not in tensors.shapes
        shape["tie_word_embeddings"] = is_tied
    if form.rotates_half(form.name):
        tensors = tensors.paired(half_to_interleaved, shape["head_dim"])
    return replace(_matched(form.name, path, shape, tensors, form.from_ours), note=note)


def read_weights(place: str, use: Callable[[Weights], T], weights: str = TRAINED) -> T:
    """`use` of the model at `place`, repeated if a run deletes that checkpoint meanwhile."""
    path = local_model(place)
    if is_checkpoint(path):
        return read_chosen(str(path), lambda chosen: use(load_checkpoint_weights(chosen, weights)))
    require_trained(weights, place)
    return use(load_weights_from(path))


def load_checkpoint_weights(chosen: Chosen, weights: str = TRAINED) -> Weights:
    """The model of a training checkpoint; skipped checkpoints are printed to stderr."""
    for bad in chosen.rejected:
        print(skipped(bad.path, bad.file, bad.reason), file=sys.stderr)
    return replace(read_checkpoint_weights(chosen.path, weights), lock=chosen.lock)


def read_checkpoint_weights(path: Path, weights: str = TRAINED) -> Weights:
    """The model of a step directory, whose hashes have been verified."""
    manifest = read_manifest(path)
    for name in [one for one in TOKENIZER_FILES if disk.exists(path / one)] or [MODEL_NAME]:
        require_listed(manifest, path / name)
    source = open_checkpoint(path, weights)
    if config := foreign_config_of(path, manifest):
        found = Weights(CHECKPOINT, path, config, match(source, path, config), find_tokenizer(path))
    else:
        found = _matched(CHECKPOINT, path, read_config(path, manifest), source)
    return replace(found, which=weights)


def load_transformers_weights(place: str, config: PretrainedConfig) -> Weights:
    """The weights of a model of transformers, from a run or as save_pretrained writes them."""
    path = with_best(local_model(place))
    if not is_checkpoint(path):
        tensors = match(open_tensors(path), path, config)
        return Weights(TRANSFORMERS, path, config, tensors)
    weights = load_checkpoint_weights(choose(str(path)))
    tensors = match(weights.tensors, weights.path, config)
    return replace(weights, config=config, tensors=tensors)


def _merged(path: Path, place: str) -> Weights:
    """A Llama, Mistral or Qwen at `place` with the LoRA adapter in `path` added, by PEFT.

    All of it is in memory.
    """
    try:
        import peft  # pyright: ignore[reportMissingImports] (optional)
    except ImportError as error:
        raise UsageError(
            f"{path}: holds a LoRA adapter of {place}, which the package peft merges;"
            f" {install_packages('peft')}"
        ) from error
    base = local_model(place)
    with readable(base / CONFIG, REPLACE):
        config = foreign_config(read_foreign_object(base / CONFIG))
    weights = load_transformers_weights(str(base), config)
    model = transformers_model(config, dtype=torch.float32)
    weights.fill(model)
    with readable(path, REPLACE):
        held = {*open_as_saved(path / ADAPTER_WEIGHTS).shapes}
        try:
            with warnings.catch_warnings(action="ignore"):  # of what is compared next
                adapted = peft.PeftModel.from_pretrained(model, str(path))
            for one in adapted.peft_config.values():
                one.base_model_name_or_path = str(base)  # else it asks the Hub for the name
            if held != {*peft.get_peft_model_state_dict(adapted)}:
                raise ValueError("its tensors are not those of its configuration")
            merged = adapted.merge_and_unload().state_dict()
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CheckpointError(
                f"is not an adapter of {base} ({first_lines(error, 1)})"
            ) from error
    shapes = {name: list(value.shape) for name, value in merged.items()}
    dtypes = {name: value.dtype for name, value in merged.items()}
    source = TensorSource(path, shapes, dtypes, merged.__getitem__)
    found = weights_of(base, source, ShapeFlags())
    return replace(found, path=path, tokenizer=find_tokenizer(path) or find_tokenizer(base))


def _is_equal(source: TensorSource, one: str, other: str) -> bool:
    is_alike = source.shapes[one] == source.shapes[other]
    return is_alike and torch.equal(source.read(one), source.read(other))


def _matched(
    kind: str,
    path: Path,
    shape: dict[str, Any],
    source: TensorSource,
    called: Callable[[str], str] = str,
) -> Weights:
    """The weights of a MiniMind decoder of that shape."""
    try:
        config = MiniMindConfig(**shape)
        tensors = match(source, path, config, called)
    except (ValueError, RuntimeError) as error:  # RuntimeError: sizes beyond int64
        place = path / CONFIG if disk.is_dir(path) else path
        raise CheckpointError(
            f"{place}: does not fit the weights ({first_lines(error)}); {REPLACE}"
        ) from error
    return Weights(kind, path, config, tensors, find_tokenizer(path))


def grow_vocabulary(
    weights: Weights, vocab_size: int, joined: Mapping[int, Sequence[int]] | None = None
) -> Weights:
    """Return the weights with `vocab_size` rows in each tensor that has a row per id.

    These are read as float32: the rows of the file, then their mean, or for a new id the mean of
    the rows of the old ids that it has in `joined`. Raise UsageError for a model whose other
    tensors depend on the size of its vocabulary.
    """
    config, source = deepcopy(weights.config), weights.tensors
    rows = config.vocab_size
    most = config.vocab_size = max(vocab_size, rows + 1)  # shows which tensors have a row per id
    with torch.device("meta"):
        state = model_of(config).state_dict()
    config.vocab_size = vocab_size = max(vocab_size, rows)
    grown = {name for name in source.shapes if [*state[name].shape] != source.shapes[name]}
    for name in sorted(grown):
        old, new = source.shapes[name], [*state[name].shape]
        if old != [rows, *old[1:]] or new != [most, *old[1:]]:
            raise UsageError(
                f"{weights.path}: {source.file_names.get(name, name)} of shape {old} would be of"
                f" shape {new} with {most} ids; give a model with rows for them"
            )

    def read(name: str) -> Tensor:
        value = source.read(name)
        if name not in grown:
            return value
        value = value.float()
        mean = value.mean(0, keepdim=True)
        larger = torch.cat([value, mean.expand(vocab_size - len(value), *mean.shape[1:])])
        for row, ids in (joined or {}).items():
            larger[row] = value[[*ids]].mean(0)
        return larger

    shapes = {**source.shapes, **{n: [vocab_size, *source.shapes[n][1:]] for n in grown}}
    dtypes = {**source.dtypes, **dict.fromkeys(grown, torch.float32)}
    return replace(
        weights, config=config, tensors=replace(source, shapes=shapes, dtypes=dtypes, read=read)
    )
