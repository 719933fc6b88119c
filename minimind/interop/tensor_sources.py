"""Named tensors of checkpoints, safetensors and .pth files, read one at a time.

Headers are checked before any tensor is read, and no pickled code is run.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch._weights_only_unpickler import (  # torch.load raises it; nothing here unpickles
    UnpicklingError,  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)
)

from minimind.checkpoint.reader import Contents
from minimind.checkpoint.tensor_files import Part, readable
from minimind.config.names import no_such_file
from minimind.engine.state import AVERAGE, MASTER
from minimind.errors import CheckpointError, NumericError, UsageError
from minimind.interop.job import REPLACE
from minimind.runtime import disk
from minimind.runtime.checked_json import (
    CheckedJson,
    FileName,
    read_foreign_object,
    shown,
    validate,
)
from minimind.runtime.durable_files import require_regular
from minimind.runtime.file_kinds import (
    GGUF,
    IS_GGUF,
    OF_DEEPSPEED,
    SAFETENSORS,
    STATE,
    TORCH,
    form_of_folder,
    kind_of_file,
)
from minimind.runtime.terminal import first_lines

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED = "pytorch_model.bin"
# Index and whole file of a folder, in the order in which they are looked for; the pickled ones may
# be beside the state of a Trainer.
LAYOUTS = ((INDEX, WHOLE), ("", PICKLED), (PICKLED_INDEX, PICKLED))
# What torch.compile, DDP, FSDP, DeepSpeed and Lightning put between the names of modules.
WRAPPERS = re.compile(
    r"(?<![^.])(_orig_mod|module|_fsdp_wrapped_module|_fpw_module|_checkpoint_wrapped_module"
    r"|_forward_module)\."
)
# Under these names PEFT, TRL, distillation and training scripts keep a whole model. `model.` is one
# of them where what is below has a head, or a `model.` of its own.
HOLDER = "(base_model|pretrained_model|student|student_model|actor|policy|llm|net|network|_model)"
HOLDERS = re.compile(rf"{HOLDER}\.")
HELD = re.compile(rf"model\.(model|lm_head|tok_embeddings|{HOLDER})\.")
# Parts of names of what is not the weights themselves, and what to do.
OTHERWISE_SAVED = {
    r"base_layer|lora_\w+|modules_to_save": (
        "belongs to an adapter that is not merged; merge it into the model (merge_and_unload of"
        " PEFT), and name what this saves"
    ),
    r"_flat_param|flat_param_\d+": (
        "is a shard of FSDP without names; save the model with StateDictType.FULL_STATE_DICT"
    ),
}
# Files of weights that `form_of_folder` names: layouts of Mistral and of adapters.
OTHER_LAYOUT = re.compile(r"(consolidated|adapter_model)\b")
# Saved by transformers of 2023, recomputed since: ignored.
COMPUTED = re.compile(r"(.+\.)?rotary_emb\.inv_freq")
# Ends of the names of what is rotated, and so is in another order where other channels are paired.
ROTATED = tuple(
    f"self_attn.{side}_{what}"
    for side in "qk"
    for what in ("proj.weight", "proj.bias", "norm.weight")
)
TRAINED = "trained"  # a value of --weights, like AVERAGE
HEADER_SIZE = 8  # bytes, with the size of the header that follows
LARGEST_HEADER = 2**23  # bytes; of a file with 100 layers 100 KB
DTYPES = {  # names in the header of a safetensors file
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What torch.load raises for arbitrary bytes.
LOAD_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError)

Entry = tuple[str, list[int], torch.dtype, Callable[[], Tensor]]  # of a file: a tensor, unread


@dataclass(frozen=True)
class TensorSource:
    """Tensors by name: shapes and dtypes from the headers, and a function that reads one."""

    path: Path
    shapes: Mapping[str, list[int]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    file_names: Mapping[str, str] = field(default_factory=dict)  # tensor -> name in the file

    def renamed(self, names: Mapping[str, str]) -> TensorSource:
        """The tensors in `names` (new -> old)."""
        return replace(
            self,
            shapes={new: self.shapes[old] for new, old in names.items()},
            dtypes={new: self.dtypes[old] for new, old in names.items()},
            read=lambda name: self.read(names[name]),
            file_names={new: self.file_names.get(old, old) for new, old in names.items()},
        )

    def paired(self, convert: Callable[[Tensor, int], Tensor], head_dim: int) -> TensorSource:
        """The tensors, those that are rotated through `convert` of `model.rotary`."""

        def read(name: str) -> Tensor:
            value = self.read(name)
            return convert(value, head_dim) if name.endswith(ROTATED) else value

        return replace(self, read=read)

    def parts(self, dtype: str) -> list[Part]:
        """The tensors for a safetensors file, sorted by name, floating-point ones as `dtype`."""
        parts, floats = [], getattr(torch, dtype)
        for name in sorted(self.shapes):
            target = floats if self.dtypes[name].is_floating_point else self.dtypes[name]
            shape = self.shapes[name]

            def read(name: str = name, target: torch.dtype = target) -> Tensor:
                return self.read_as(name, target)

            size = torch.Size(shape).numel() * target.itemsize
            parts.append(Part(name, DTYPE_NAMES[target], shape, size, read))
        return parts

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor cast to `dtype`; raise an error if a value is or becomes non-finite."""
        value = self.read(name)
        cast = value.to(dtype)
        if cast.is_floating_point() and not torch.isfinite(cast).all():
            which = f"{self.path}: {self.file_names.get(name, name)} has numbers that"
            if torch.isfinite(value).all():
                raise NumericError(
                    f"{which} {str(dtype)[6:]} cannot represent; export in another --dtype"
                )
            raise CheckpointError(f"{which} are not finite; {REPLACE}")
        return cast


def open_checkpoint(directory: Path, weights: str = TRAINED) -> TensorSource:
    """The float32 weights and the buffers of a training checkpoint.

    weights=AVERAGE: the average of those that are trained. Raise UsageError if there is none.
    """
    contents = Contents(directory)
    averaged = contents.shards.kinds.get(AVERAGE, set()) if weights == AVERAGE else set[str]()
    if weights == AVERAGE and not averaged:
        raise UsageError(
            f"--weights {AVERAGE}: {directory} has no average; remove --weights, or train with"
            " --ema"
        )
    buffers = contents.buffers
    slices = {name: buffers.get_slice(name) for name in buffers.keys()}
    dtypes = {name: DTYPES[part.get_dtype()] for name, part in slices.items()}

    def read(name: str) -> Tensor:
        kind = AVERAGE if name in averaged else MASTER
        return buffers.get_tensor(name) if name in dtypes else contents.read(kind, name)

    return TensorSource(
        directory,
        {**{name: part.get_shape() for name, part in slices.items()}, **contents.shapes},
        {**dtypes, **dict.fromkeys(contents.shapes, torch.float32)},
        read,
    )


def require_trained(weights: str, place: str) -> None:
    """Raise UsageError for --weights ema of a place that is no checkpoint."""
    if weights != TRAINED:
        raise UsageError(
            f"--weights {weights}: {place} is not a checkpoint and has only one set of weights;"
            " remove --weights"
        )


def open_tensors(path: Path) -> TensorSource:
    """The tensors of a file, or of a directory in Hugging Face's layout; else CheckpointError.

    Names are those of the model itself, whatever wrapped it when it was saved, without tables that
    are computed.
    """
    return of_model(open_as_saved(path))


def of_model(source: TensorSource) -> TensorSource:
    """The tensors under the names of the model itself; see `open_tensors`."""
    saved = [name for name in source.shapes if not COMPUTED.fullmatch(name)]
    for part, what in OTHERWISE_SAVED.items():
        if odd := next(filter(re.compile(rf"(.*\.)?({part})(\..*)?").fullmatch, saved), None):
            raise CheckpointError(f"{source.path}: {shown(odd)} {what}")
    names = dict(zip(unwrapped(saved), saved, strict=True))
    return source.renamed(names if len(names) == len(saved) else {name: name for name in saved})


def unwrapped(names: Sequence[str]) -> list[str]:
    """The names in the model itself of tensors that wrappers saved, in this order."""
    names, before = [WRAPPERS.sub("", name) for name in names], []
    while names != before:
        before = names
        holder = "model." if any(map(HELD.match, names)) else ""
        names = [name.removeprefix(holder) for name in names]
        names = [name[match.end() :] if (match := HOLDERS.match(name)) else name for name in names]
    return names


def require_known_prefix(source: TensorSource, path: Path, expected: Iterable[str]) -> None:
    """Raise CheckpointError if the names are those `expected` behind a prefix, which it names."""
    known = {*expected}
    if known & {*source.shapes}:
        return
    for name in source.shapes:
        prefix, rest = "", name
        while rest and rest not in known:
            part, _, rest = rest.partition(".")
            prefix += f"{part}."
        if rest:
            raise CheckpointError(
                f"{path}: {shown(source.file_names.get(name, name))} would be {rest} without the"
                f" prefix {shown(prefix)}, which no wrapper known here writes; save the model"
                " inside, or rename its tensors"
            )


def open_as_saved(path: Path) -> TensorSource:
    """`open_tensors` under the names in the files."""
    if not disk.exists(path):
        raise CheckpointError(no_such_file(path))
    if not disk.is_dir(path):
        return _open_files([path], path)
    for index, whole in LAYOUTS:
        if index and disk.exists(path / index):
            return _open_files(_read_index(path / index, whole), path)
        if whole and disk.exists(path / whole):
            return _open_files([path / whole], path)
    pickled = sorted((*disk.matching(path, "*.pth"), *disk.matching(path, "*.pt")))
    files = [file for file in pickled if not STATE.search(file.name)]
    if len(files) != 1:
        others = (*files, *disk.matching(path, "*.safetensors"))
        named = [file for file in others if not OTHER_LAYOUT.match(file.name)]
        if form := "" if named else form_of_folder(path):
            raise CheckpointError(f"{path}: {form}")
        count = f"{len(files)} files .pth or .pt" if files else "no .pth or .pt"
        raise CheckpointError(
            f"{path}: has neither {WHOLE} nor {PICKLED}, nor an index of either, and {count}; name"
            " the file itself"
        )
    return _open_files(files, files[0])


def _open_files(files: list[Path], path: Path) -> TensorSource:
    """The tensors of files of safetensors or of torch.save; no name may occur twice."""
    owners: dict[str, tuple[Path, Callable[[], Tensor]]] = {}
    shapes, dtypes = {}, {}
    for file in files:
        entries = _of_safetensors if file.suffix == ".safetensors" else _of_pickle
        for name, shape, dtype, read in entries(file):
            if name in owners:
                other = owners[name][0].name
                raise CheckpointError(f"{file}: holds {shown(name)}, as {other} does; {REPLACE}")
            owners[name], shapes[name], dtypes[name] = (file, read), shape, dtype

    def read_one(name: str) -> Tensor:
        file, read = owners[name]
        with readable(file, REPLACE):
            return read()

    return TensorSource(path, shapes, dtypes, read_one)


def _of_safetensors(file: Path) -> Iterator[Entry]:
    with readable(file, REPLACE):
        _require_header(file)
        handle = safe_open(file, framework="pt")
        for name in handle.keys():
            part = handle.get_slice(name)
            if part.get_dtype() not in DTYPES:
                raise CheckpointError(f"holds {shown(name)} as {part.get_dtype()}")
            read = partial(handle.get_tensor, name)
            yield name, part.get_shape(), DTYPES[part.get_dtype()], read


def _require_header(file: Path) -> None:
    """Raise OSError unless it is a regular file, CheckpointError for a header that is too large."""
    require_regular(file)
    with open(file, "rb") as content:
        size = int.from_bytes(content.read(HEADER_SIZE), "little")
    if kind := kind_of_file(file, SAFETENSORS):
        raise CheckpointError(f"is {kind}, not safetensors")
    if not 2 <= size <= LARGEST_HEADER:
        limits = f"fewer than 2 or more than {LARGEST_HEADER:,} bytes"
        raise CheckpointError(f"has a header of {limits}, unlike safetensors")


class WeightIndex(CheckedJson):
    """The file of each tensor, beside the index."""

    weight_map: dict[str, FileName]


def _read_index(index: Path, whole: str) -> list[Path]:
    """The files that an index lists, all in its own directory, where no other model may be."""
    with readable(index, REPLACE):
        content = read_foreign_object(index)
        validate(WeightIndex, content)
        files = {*content["weight_map"].values()}
        if whole not in files and disk.lexists(index.with_name(whole)):
            raise CheckpointError(f"stands beside {whole}, which it does not list")
        if missing := sorted(name for name in files if not disk.lexists(index.with_name(name))):
            count = f"{len(missing)} of its {len(files)} files"
            raise CheckpointError(f"has {count} not beside it ({missing[0]} for one)")
    return [index.with_name(name) for name in sorted(files)]


def unpickled(file: Path, records: Mapping[str, Any] | None = None) -> Any:
    """What torch.save wrote: tensors, memory-mapped, and plain values, by torch's own unpickler.

    It looks up no class: those named in `records` are made of the type that is there. Raise
    CheckpointError for all else.
    """
    with readable(file, REPLACE):
        require_regular(file)
        kind = kind_of_file(file, TORCH)
        if kind and kind.name != GGUF:
            raise CheckpointError(f"is {kind}, not {TORCH}")
    if kind:
        raise CheckpointError(f"{file}: {IS_GGUF}")
    allowed: list[Any] = [(made, name) for name, made in (records or {}).items()]
    with readable(file, REPLACE):
        with open(file, "rb") as content:
            if not zipfile.is_zipfile(content):
                raise CheckpointError(
                    "is not a zip file, as torch.save has written since torch 1.6"
                )
        try:
            with torch.serialization.safe_globals(allowed):
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except UnpicklingError as error:
            raise CheckpointError("holds more than tensors, and code is not run") from error
        except LOAD_ERRORS as error:
            raise CheckpointError(f"is damaged ({shown(first_lines(error))})") from error


def _of_pickle(file: Path) -> Iterator[Entry]:
    """The tensors by name of a file of torch.save."""
    if file.name.endswith(OF_DEEPSPEED) and (form := form_of_folder(file.parent)):
        raise CheckpointError(f"{file}: {form}")
    tensors = unpickled(file)
    with readable(file, REPLACE):
        if not isinstance(tensors, Mapping):
            raise CheckpointError(f"holds {type(tensors).__name__}, not tensors by name")
    for name, value in tensors.items():
        if isinstance(value, Mapping) and any(isinstance(v, Tensor) for v in value.values()):
            raise CheckpointError(
                f"{file}: has weights under {shown(name)}, beside what else training saved; save"
                f" these alone (torch.save(torch.load(FILE)[{shown(name)}], 'model.pth')), and name"
                " that file"
            )
    with readable(file, REPLACE):
        for name, value in tensors.items():
            if type(name) is not str or not isinstance(value, Tensor):
                kind = type(value).__name__
                raise CheckpointError(f"holds {shown(name)} of type {kind}, no tensor")
            require_stored(name, value)
            yield name, [*value.shape], value.dtype, partial(Tensor.detach, value)


def require_stored(name: str, value: Tensor) -> None:
    """Raise CheckpointError, without the file, for a tensor that its bytes do not make."""
    if value.layout != torch.strided or value.dtype not in (*DTYPE_NAMES, torch.complex64):
        raise CheckpointError(f"holds {shown(name)} as {value.dtype}, {value.layout}")
    if value.untyped_storage().nbytes() < value.nbytes:
        raise CheckpointError(f"holds {shown(name)} of {list(value.shape)} in fewer bytes")
