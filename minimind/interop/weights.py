"""A model wherever it lies: its shape, its weights one at a time by our names, its tokenizer.

Read are training checkpoints, what `export --format minimind` and `checkpoint consolidate` write,
directories of Hugging Face's Llama and Qwen3, and MiniMind2's files. Whatever it is, the tensors
are just those of the shape, or a CheckpointError names the first that is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from minimind.architecture.select import foreign_config_of
from minimind.checkpoint.choose import Chosen, choose, read_chosen
from minimind.checkpoint.directory import MANIFEST, read_manifest
from minimind.checkpoint.tensor_files import readable
from minimind.checkpoint.validation import read_config
from minimind.data.tokenizer.files import JSON_NAME, MODEL_NAME, TOKENIZER_FILES
from minimind.data.tokenizer.load import AnyTokenizer, load_tokenizer
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.interop.foreign_config import (
    LLAMA,
    MINIMIND2,
    ShapeFlags,
    layers_of,
    name_in,
    shape_of_llama,
    shape_of_minimind2,
    shape_of_tensors,
)
from minimind.interop.hf_weights import fitted
from minimind.interop.tensor_sources import CONFIG, Source, of_checkpoint, of_place, require_same
from minimind.interop.weight_names import (
    EMBEDDING,
    HEAD,
    MINIMIND2_TABLES,
    from_halves,
    from_minimind2,
)
from minimind.model.decoder import MiniMindConfig, MiniMindForCausalLM
from minimind.runtime.checked_json import ELSEWHERE, read_object, require_listed, shown
from minimind.runtime.locks import ReadLock

CHECKPOINT, OURS, TRANSFORMERS = "checkpoint", "minimind", "transformers"
ANEW = "get the file anew, or name another"

T = TypeVar("T")


@dataclass(frozen=True)
class Weights:
    """A model that has been looked at, and of which no tensor has been read yet."""

    kind: str  # checkpoint, minimind (an export of ours), llama, minimind2 or transformers
    path: Path
    config: Any  # a MiniMindConfig, or one of transformers'
    tensors: Source
    tokenizer: Path | None = None  # file or directory that load_tokenizer takes
    lock: ReadLock | None = None  # keeps a checkpoint of a run that goes on from being deleted

    def fill(self, model: Any) -> None:
        """Put the weights into a model of this shape, one after another; all are finite."""
        own = model.state_dict()
        for name in self.tensors.shapes:
            own[name].copy_(self.tensors.read_as(name, own[name].dtype))

    def release(self) -> None:
        """Nothing more is read of it."""
        if self.lock:
            self.lock.close()

    def load_tokenizer(self) -> AnyTokenizer:
        """Its tokenizer; a CheckpointError where that is not the one its embedding is for."""
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.path}: has no tokenizer; put its {MODEL_NAME} or {JSON_NAME} there, or give"
                " it as --tokenizer"
            )
        try:
            tokenizer = load_tokenizer(self.tokenizer)
        except DataError as error:  # whose way out is that of a run that has text
            told = str(error).split(";")[0]
            raise CheckpointError(f"{told}; {ANEW}") from error
        require_fitting(tokenizer, self.config)
        return tokenizer

    def adopt(self, tokenizer: AnyTokenizer) -> None:
        """Take the special ids from a tokenizer: files without a configuration tell none."""
        self.config.bos_token_id = tokenizer.bos_id if tokenizer.bos_id >= 0 else None
        self.config.eos_token_id = tokenizer.eos_id
        self.config.pad_token_id = tokenizer.pad_id


def require_fitting(tokenizer: AnyTokenizer, config: PretrainedConfig) -> None:
    """Nothing, or a CheckpointError where an embedding has another number of rows."""
    is_whole = isinstance(config, MiniMindConfig)  # else rows may be left over
    if tokenizer.vocab_size > config.vocab_size or (
        is_whole and tokenizer.vocab_size < config.vocab_size
    ):
        raise CheckpointError(
            f"{tokenizer.path}: has {tokenizer.vocab_size} pieces and the embedding"
            f" {config.vocab_size} rows; give the tokenizer that the model was trained with"
        )


def load_weights_from(
    place: str | Path, given: ShapeFlags | None = None, kind: str | None = None
) -> Weights:
    """What lies at `place`: a run or step directory, a directory with weights, or a file of them.

    `kind` says what it must be (llama, minimind2); without it, it is found out. `given` is what a
    file without a configuration does not tell. Raises a CheckpointError or a UsageError.
    """
    path = Path(place).expanduser()
    if is_checkpoint(path):
        _require_kind(path, CHECKPOINT, kind)
        return weights_of(choose(str(place)))
    source = of_place(path)
    found = _kind_of(path, source, kind)
    _require_kind(path, found, kind)
    kind = kind or found
    if kind == OURS:
        return _checked(kind, path, read_config(path), source)
    given = given or ShapeFlags()
    if kind == MINIMIND2:
        return _of_minimind2(path, source, given)
    return _of_llama(path, source, given)


def is_checkpoint(path: Path) -> bool:
    """Whether it is a training run's, or one of its steps."""
    is_run = (path / "checkpoints").is_dir() or path.name == "checkpoints"
    return is_run or (path / MANIFEST).exists()


def read_weights(place: str, use: Callable[[Weights], T]) -> T:
    """`use` of what lies at `place`; of a run's next checkpoint if one is removed meanwhile."""
    if is_checkpoint(Path(place).expanduser()):
        return read_chosen(place, lambda chosen: use(weights_of(chosen)))
    return use(load_weights_from(place))


def weights_of(chosen: Chosen) -> Weights:
    """Those of a training checkpoint.

    Neither DeepSpeed nor the number of processes that trained it is needed.
    """
    path = chosen.path
    for bad in chosen.rejected:
        print(f"{bad.path} is passed over: {bad.file} {bad.reason}", file=sys.stderr)
    manifest = read_manifest(path)
    there = [name for name in TOKENIZER_FILES if (path / name).exists()] or [MODEL_NAME]
    for name in there:
        require_listed(manifest, path / name)
    return replace(weights_in(path, of_checkpoint(path)), lock=chosen.lock)


def weights_in(path: Path, source: Source) -> Weights:
    """The same of a step directory that is chosen, and whose tensors are `source`."""
    manifest = read_manifest(path)
    if foreign := foreign_config_of(path, manifest):
        tensors = fitted(source, path, foreign)
        return Weights(CHECKPOINT, path, foreign, tensors, tokenizer_in(path))
    return _checked(CHECKPOINT, path, read_config(path, manifest), source)


def _kind_of(path: Path, source: Source, asked: str | None) -> str:
    """What a directory or file holds, by the names in it and what its configuration says."""
    if any(map(from_minimind2, source.shapes)):
        return MINIMIND2
    if asked == MINIMIND2 and not layers_of(source.shapes):
        return asked  # names of neither: the first is told
    if not path.is_dir():
        beside = path.with_name(CONFIG)
        if path.suffix == ".safetensors" and beside.is_file() and _is_ours(beside):
            raise UsageError(
                f"{path}: is part of a model of ours; name its directory, {path.parent}"
            )
        return LLAMA
    return OURS if _is_ours(path / CONFIG) else LLAMA


def _require_kind(path: Path, found: str, asked: str | None) -> None:
    """Nothing, or a UsageError where a place plainly holds something else than was asked for."""
    if asked in (None, found):
        return
    if found in (CHECKPOINT, OURS):
        is_what = "a run of ours" if found == CHECKPOINT else "an export of ours"
        raise UsageError(
            f"{path}: is {is_what}, and no import is needed; name it as it is to `minimind export`"
            " or --init_from"
        )
    raise UsageError(f"{path}: has the tensors of {found}, not of {asked}; give --from {found}")


def _is_ours(config: Path) -> bool:
    """Whether the pairs of rotary channels are adjacent; tensors and their names do not tell."""
    with readable(config, ANEW):
        found, _ = read_object(config)
    return found.get("model_type") == OURS and "use_flash_attn" in found


def _of_minimind2(path: Path, source: Source, given: ShapeFlags) -> Weights:
    names = {}
    for theirs in source.shapes:
        ours = from_minimind2(theirs)
        if ours:
            names[ours] = theirs
        elif not MINIMIND2_TABLES.fullmatch(theirs):
            raise CheckpointError(
                f"{path}: {shown(theirs)} is no tensor of a dense MiniMind2 model, and only those"
                " are brought in; name the file of one"
            )
    shapes = {ours: source.shapes[theirs] for ours, theirs in names.items()}
    is_told = path.is_dir() and (path / CONFIG).exists()
    if is_told:
        claimed = shape_of_minimind2(path / CONFIG, shapes, given)
    else:
        claimed = shape_of_tensors(path, shapes, given, MINIMIND2)
    tensors = source.renamed(names)
    claimed["tie_word_embeddings"] = _is_tied(tensors)
    return _checked(MINIMIND2, path, claimed, tensors)


def _of_llama(path: Path, source: Source, given: ShapeFlags) -> Weights:
    if path.is_dir():
        claimed = shape_of_llama(path / CONFIG)
    else:
        claimed = shape_of_tensors(path, source.shapes, given)
        claimed["tie_word_embeddings"] = _is_tied(source)
    head_dim = claimed["hidden_size"] // claimed["num_attention_heads"]
    names = {name: name for name in source.shapes}
    turned = source.renamed(names, lambda name, value: from_halves(name, value, head_dim))
    return _checked(LLAMA, path, claimed, turned)


def _is_tied(source: Source) -> bool:
    """Whether the head is the embedding: there is no other, or it has the same numbers."""
    if HEAD not in source.shapes or EMBEDDING not in source.shapes:
        return HEAD not in source.shapes
    if source.shapes[HEAD] != source.shapes[EMBEDDING]:
        return False
    return torch.equal(source.read(HEAD), source.read(EMBEDDING))


def _checked(kind: str, path: Path, claimed: dict[str, Any], source: Source) -> Weights:
    """The weights, once every tensor is one of the claimed shape; nothing larger is made before."""
    misfit = f"{path / CONFIG if path.is_dir() else path}: does not fit the weights"
    layers = layers_of(source.shapes)
    if claimed["num_hidden_layers"] != layers:
        told = f"num_hidden_layers: {layers} -> {claimed['num_hidden_layers']}"
        raise CheckpointError(f"{misfit} ({told}); {ELSEWHERE}")
    try:
        config = MiniMindConfig(**claimed)
        with torch.device("meta"):
            own = MiniMindForCausalLM(config).state_dict()
    except (ValueError, RuntimeError) as error:  # the latter of sizes that int64 cannot hold
        told = str(error).splitlines()[0]
        raise CheckpointError(f"{misfit} ({told}); {ELSEWHERE}") from error
    if config.tie_word_embeddings:
        own.pop(HEAD)
        source = _without_head(source)
    spelt = {name: name_in(kind, name) for name in own} | dict(source.spelt)
    own_shapes = {name: list(v.shape) for name, v in own.items()}
    require_same(replace(source, spelt=spelt), path, own_shapes)
    for name, value in own.items():
        if source.dtypes[name].is_floating_point != value.is_floating_point():
            told = f"{source.spelt.get(name, name)} is of {source.dtypes[name]}, not {value.dtype}"
            raise CheckpointError(f"{path}: {told}; {ANEW}")
    return Weights(kind, path, config, source, tokenizer_in(path))


def tokenizer_in(path: Path) -> Path | None:
    """The tokenizer of a directory, if it has one."""
    found = [name for name in (MODEL_NAME, JSON_NAME) if (path / name).is_file()]
    return path / found[0] if found else None


def weights_of_transformers(place: str, config: PretrainedConfig) -> Weights:
    """Those at `place` of a model of transformers: of a run, or as save_pretrained writes them."""
    path = Path(place).expanduser()
    if not is_checkpoint(path):
        return Weights(TRANSFORMERS, path, config, fitted(of_place(path), path, config))
    found = weights_of(choose(place))
    return replace(found, config=config, tensors=fitted(found.tensors, found.path, config))


def _without_head(source: Source) -> Source:
    if HEAD in source.shapes and not _is_tied(source):
        raise CheckpointError(
            f"{source.place}: {source.spelt.get(HEAD, HEAD)} is not the embedding, though"
            " config.json ties them; correct tie_word_embeddings there"
        )
    return source.renamed({name: name for name in source.shapes if name != HEAD})
