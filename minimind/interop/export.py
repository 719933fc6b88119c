"""Write a model in one of `FORMATS`: `minimind export` and `import`, `checkpoint consolidate` and
`average`. One tensor (of each checkpoint) at a time is in memory, whatever the size of the model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch

from minimind.checkpoint.directory import differences, read_manifest
from minimind.checkpoint.reader import Contents
from minimind.data.chat.template import ChatTemplate, own_template
from minimind.data.tokenizer.load import Tokenizer
from minimind.data.tokenizer.vocabulary import TOKENIZER_FILES
from minimind.errors import CheckpointError, StorageError, UsageError
from minimind.interop.formats import FORMATS
from minimind.interop.hf_folder import has_remote_code, remote_code
from minimind.interop.job import Job
from minimind.interop.model_card import NAME as CARD
from minimind.interop.model_card import is_edited, model_card
from minimind.interop.model_card import is_ours as is_card
from minimind.interop.tensor_sources import INDEX, TRAINED, WHOLE, TensorSource
from minimind.interop.weights import (
    OURS,
    TRANSFORMERS,
    Weights,
    check_vocabulary,
    read_checkpoint_weights,
)
from minimind.interop.write_folder import SHARDS, WrittenModel, is_ours, new_folder
from minimind.model.rotary import interleaved_to_half
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.filesystem import NoAnswer
from minimind.runtime.hub import Repository, push
from minimind.runtime.output_folder import NewFolder

FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, INDEX, WHOLE, SHARDS)


def output(out: Path, force: bool, author: str = "export") -> NewFolder:
    """The folder of an export, and with `force` of an earlier one.

    Raise UsageError for an earlier one whose model card was edited.
    """
    card = out / CARD
    replaceable = (*FILES, *filter(None, (form.file for form in FORMATS.values())))
    with storing(str(out), "give another --out"):
        if force and has_remote_code(out):
            replaceable += (*remote_code(),)
        has_card = force and disk.is_file(card) and not disk.is_symlink(card)
    if has_card:
        with storing(str(card), "give another --out"):
            content = card.read_bytes()
        if is_edited(content):
            raise UsageError(
                f"--out {out} has a {CARD} that was edited after the export, and --force would"
                " replace it; move it away, or give another folder"
            )
        replaceable += (CARD,) if is_card(content) else ()
    return NewFolder(out, force, replaceable, author, is_ours)


def export(
    weights: Weights,
    tokenizer: Tokenizer,
    out: Path,
    form: str,
    dtype: str = "float32",
    max_shard_bytes: int | None = None,
    force: bool = False,
    author: str = "export",
) -> WrittenModel:
    """Write the model to a new folder `out` as `form`, a name of FORMATS.

    With another author than "export" the weights alone: no code of the model, and no card. Raise
    UsageError, StorageError or CheckpointError, and leave `out` as it was.
    """
    out = disk.resolve(out)
    if out == disk.resolve(weights.path):
        raise UsageError(f"--out {out} is the source; give another folder")
    folder = output(out, force, author)
    folder.require_free()
    to, config = FORMATS[form], weights.config
    if (config.model_type == OURS) == (form == TRANSFORMERS):
        taken, what, other = "the MiniMind decoder", config.model_type, TRANSFORMERS
        if form == TRANSFORMERS:
            taken, what, other = "runs of --model hf:", "MiniMind", "llama, or minimind"
        raise UsageError(
            f"--format {form} is for {taken}, and {weights.path} is a {what} model; give --format"
            f" {other}"
        )
    if max_shard_bytes is not None and to.file:
        raise UsageError(
            f"--max_shard_size has no effect with --format {form}, which is one file; remove it"
        )
    check_vocabulary(tokenizer, config.vocab_size)
    end, note_on_template = _end_of_turn(tokenizer)
    is_whole = author == "export"
    name, kind = run_name(weights.path), to.model_type(config)
    job = Job(name, kind, config, tokenizer, dtype, end, max_shard_bytes, is_whole)
    source = weights.tensors
    if to.rotates_half(kind):
        source = source.paired(interleaved_to_half, config.head_dim)
    parts = to.parts(job, source)
    texts, note_on_ids = to.files(job)
    if is_whole:
        texts[CARD] = model_card(weights, job, to, note_on_ids)
    with new_folder(folder, parts, texts) as draft:
        files, note = to.write(job, parts, draft)
    notes = filter(None, (note_on_ids, note_on_template, note))
    return WrittenModel(files, weights.tensors.shapes, parts, "; ".join(notes) or None)


def consolidate(
    paths: Sequence[Path],
    out: Path,
    dtype: str,
    max_shard_bytes: int,
    force: bool,
    weights: str = TRAINED,
) -> WrittenModel:
    """Export a verified checkpoint without code and card; of several the mean of each weight.

    The float32 files are the same byte for byte for any number of processes and any ZeRO stage.
    """
    found = read_checkpoint_weights(paths[0], weights)
    author = "consolidate"
    if len(paths) > 1:
        found, author = replace(found, tensors=average(paths, weights)), "average"
    form = OURS if found.config.model_type == OURS else TRANSFORMERS
    tokenizer = found.load_tokenizer()
    return export(found, tokenizer, out, form, dtype, max_shard_bytes, force, author)


def average(paths: Sequence[Path], weights: str = TRAINED) -> TensorSource:
    """The mean of the weights of several checkpoints, summed in float64.

    Buffers are those of the first. Raise CheckpointError if a checkpoint has another model or
    tokenizer.
    """
    first, *others = (read_manifest(path)["identity"] for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        groups = ("model", "tokenizer")
        saved, its = ({group: side.get(group, {}) for group in groups} for side in (first, other))
        if changed := differences(saved, its):
            raise CheckpointError(
                f"{path} has another model or tokenizer than {paths[0]}"
                f" ({'; '.join(map(str, changed))}); average checkpoints of one model"
            )
    sources = [read_checkpoint_weights(path, weights).tensors for path in paths]
    parameters = Contents(paths[0]).shapes

    def read(name: str) -> torch.Tensor:
        if name not in parameters:
            return sources[0].read(name)
        values = [source.read(name) for source in sources]
        total = reduce(torch.add, (value.double() for value in values))
        return (total / len(values)).to(values[0].dtype)

    return replace(sources[0], read=read)


def push_export(out: Path, model: Repository, private: bool, form: str) -> str:
    """Upload an export; return the line that says where it is.

    What an earlier export left and this one lacks is deleted, but for a GGUF, which stands beside
    another format. A model card that was edited there stays.
    """
    stale = () if FORMATS[form].file else (*FILES, *remote_code())

    def stays(card: bytes) -> bool:
        return is_edited(card) or not is_card(card)

    try:
        url, is_kept = push(model, out, private, stale, stays)
    except NoAnswer as error:
        raise StorageError(
            f"{str(error).split('; ')[0]}; {out} has the export: give the same command with --force"
        ) from error
    own = f"; its {CARD} is not as an export wrote it, and stays" if is_kept else ""
    return f"{url}: has the files of {out}{own}"


def run_name(path: Path) -> str:
    """Return the run's name for a step directory, else that of the directory or file."""
    path = disk.resolve(path)
    named = path.parent.parent if path.parent.name == "checkpoints" else path
    return os.fsencode(named.stem if disk.is_file(named) else named.name).decode(errors="replace")


def _end_of_turn(tokenizer: Tokenizer) -> tuple[int | None, str | None]:
    """Return the id that ends a turn of the chat template, if there is one, and a note if a text
    ends it or the template does not fit; the files are kept as they are.
    """
    if tokenizer.chat_template is None or (template := own_template(tokenizer)) is None:
        return None, None
    try:
        chat = ChatTemplate(template[0], tokenizer, template[1])
        end, texts = chat.end_of_turn, chat.text_ends
    except UsageError as error:
        return None, f"the chat template is kept, and minimind chat does not take it: {error}"
    note = f"answers end with the text {texts[0]!r}, no token; name it as a stop" if texts else None
    return end, note
