"""Named tensors wherever they lie, one in memory at a time: checkpoints, safetensors, .pth files.

Headers are looked at before any number is read, and nothing is unpickled that could run.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch._weights_only_unpickler import (  # as torch.load raises it; nothing here unpickles
    UnpicklingError,  # pyright: ignore[reportPrivateImportUsage] (documented, not listed)
)

from minimind.checkpoint.reader import Contents
from minimind.checkpoint.tensor_files import Part, readable
from minimind.engine.optimizer_state import MASTER
from minimind.errors import CheckpointError, NumericError
from minimind.runtime.checked_json import FILE_NAME, OBJECT, read_object, require, shown

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
PICKLED = ("pytorch_model.bin", "*.pth", "*.pt")
ANEW = "get the file anew, or name another"
GGUF_MAGIC = b"GGUF"
WRITTEN_ONLY = (
    "is GGUF, which is written here and not read; name what it was exported from: a run, or a"
    " directory of safetensors"
)
SPELT = {  # in the header of a safetensors file
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
KINDS = {spelt: dtype for dtype, spelt in SPELT.items()}
# What torch.load says of a file whose bytes mean nothing to it.
MEANINGLESS = (RuntimeError, ValueError, TypeError, LookupError, EOFError, AttributeError)


@dataclass(frozen=True)
class Source:
    """Tensors by name: what their headers say, and how to read one."""

    place: Path
    shapes: Mapping[str, list[int]]
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    spelt: Mapping[str, str] = field(default_factory=dict)  # what the file calls those renamed

    def renamed(
        self, names: Mapping[str, str], turn: Callable[[str, Tensor], Tensor] | None = None
    ) -> Source:
        """The tensors that `names` has (new -> old), each as `turn(new, tensor)` makes it."""

        def read(name: str) -> Tensor:
            found = self.read(names[name])
            return turn(name, found) if turn else found

        return replace(
            self,
            shapes={new: self.shapes[old] for new, old in names.items()},
            dtypes={new: self.dtypes[old] for new, old in names.items()},
            read=read,
            spelt={new: self.spelt.get(old, old) for new, old in names.items()},
        )

    def parts(self, dtype: torch.dtype) -> list[Part]:
        """What a file of safetensors is written from: by name, floating-point ones as `dtype`."""
        found = []
        for name in sorted(self.shapes):
            kind = dtype if self.dtypes[name].is_floating_point else self.dtypes[name]
            shape = self.shapes[name]

            def read(name: str = name, kind: torch.dtype = kind) -> Tensor:
                return self.read_as(name, kind)

            size = torch.Size(shape).numel() * kind.itemsize
            found.append(Part(name, SPELT[kind], shape, size, read))
        return found

    def read_as(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor in `dtype`; an error that names it where its numbers are or become none."""
        found = self.read(name)
        cast = found.to(dtype)
        if cast.is_floating_point() and not torch.isfinite(cast).all():
            told = f"{self.place}: {self.spelt.get(name, name)} has numbers that"
            if torch.isfinite(found).all():
                raise NumericError(
                    f"{told} {str(dtype)[6:]} does not reach; export in another --dtype"
                )
            raise CheckpointError(f"{told} are not finite; {ANEW}")
        return cast


def of_checkpoint(directory: Path) -> Source:
    """The float32 weights of a training checkpoint, and the buffers that it keeps."""
    contents = Contents(directory)
    buffers = contents.buffers
    spelt = {name: buffers.get_slice(name) for name in buffers.keys()}
    kinds = {name: KINDS[part.get_dtype()] for name, part in spelt.items()}

    def read(name: str) -> Tensor:
        return buffers.get_tensor(name) if name in kinds else contents.read(MASTER, name)

    return Source(
        directory,
        {**{name: part.get_shape() for name, part in spelt.items()}, **contents.shapes},
        {**kinds, **dict.fromkeys(contents.shapes, torch.float32)},
        read,
    )


def of_place(place: Path) -> Source:
    """The tensors of a file, or of a folder as Hugging Face libraries lay it out.

    A CheckpointError in one sentence for whatever cannot be read, with code in it or without.
    """
    if not place.exists():
        raise CheckpointError(f"{place}: there is no such file or directory; correct the path")
    if not place.is_dir():
        return of_safetensors([place]) if place.suffix == ".safetensors" else of_pickled(place)
    if (place / INDEX).exists():
        return of_safetensors(_indexed(place / INDEX), place)
    if (place / WHOLE).exists():
        return of_safetensors([place / WHOLE], place)
    found = sorted({path for pattern in PICKLED for path in place.glob(pattern)})
    if not found and (written := sorted(place.glob("*.gguf"))):
        raise CheckpointError(f"{written[0]}: {WRITTEN_ONLY}")
    if len(found) != 1:
        told = f"{len(found)} of {', '.join(PICKLED)}" if found else "none of torch's"
        raise CheckpointError(
            f"{place}: has neither {WHOLE} nor {INDEX}, and {told}; name the file itself"
        )
    return of_pickled(found[0])


def of_safetensors(files: list[Path], place: Path | None = None) -> Source:
    """The tensors of safetensors files, none of them in two."""
    where: dict[str, tuple[Path, safe_open]] = {}
    shapes, dtypes = {}, {}
    for path in files:
        with readable(path, ANEW):
            opened = safe_open(path, framework="pt")
            for name in opened.keys():
                part = opened.get_slice(name)
                if name in where:
                    raise CheckpointError(f"holds {shown(name)}, as {where[name][0].name} does")
                if part.get_dtype() not in KINDS:
                    raise CheckpointError(f"holds {shown(name)} as {part.get_dtype()}")
                where[name] = path, opened
                shapes[name], dtypes[name] = part.get_shape(), KINDS[part.get_dtype()]

    def read(name: str) -> Tensor:
        path, opened = where[name]
        with readable(path, ANEW):
            return opened.get_tensor(name)

    return Source(place or files[0], shapes, dtypes, read)


def require_same(source: Source, path: Path, own: Mapping[str, list[int]]) -> None:
    """Nothing, or a CheckpointError with the first tensor that is missing, extra or misshapen."""
    by = f"its {CONFIG} asks for" if path.is_dir() else "its other tensors ask for"
    for name in sorted({*source.shapes, *own}):
        told = shown(source.spelt.get(name, name))
        found, asked = source.shapes.get(name), own.get(name)
        if found == asked:
            continue
        if found is None:
            raise CheckpointError(f"{path}: has no {told}, which {by}; {ANEW}")
        if asked is None:
            raise CheckpointError(f"{path}: has {told}, and {by} no such tensor; {ANEW}")
        raise CheckpointError(f"{path}: {told} is of shape {found}, and {by} {asked}; {ANEW}")


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, all of them in its own folder."""
    with readable(index, ANEW):
        told, _ = read_object(index)
        require(told, {"weight_map": OBJECT})
        names = {*told["weight_map"].values()} if told["weight_map"] else set()
        for name in names:
            if type(name) is not str or not FILE_NAME.fullmatch(name):
                raise CheckpointError(f"names a file outside its folder: {shown(name)}")
    return [index.with_name(name) for name in sorted(names)]


def of_pickled(path: Path) -> Source:
    """The tensors of a file of torch.save, mapped and not read, with no code of its own run."""
    with readable(path, ANEW):
        with path.open("rb") as file:
            is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    if is_gguf:
        raise CheckpointError(f"{path}: {WRITTEN_ONLY}")
    with readable(path, ANEW):
        if not zipfile.is_zipfile(path):
            raise CheckpointError("is no file that torch.save wrote since version 1.6")
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except UnpicklingError as error:
            raise CheckpointError("holds more than tensors, and code is not run") from error
        except MEANINGLESS as error:
            told = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"is damaged ({shown(told)})") from error
        if type(found) is not dict and not isinstance(found, Mapping):
            raise CheckpointError(f"holds {type(found).__name__}, not tensors by name")
        for name, value in found.items():
            _require_tensor(name, value)
    return Source(
        path,
        {name: list(value.shape) for name, value in found.items()},
        {name: value.dtype for name, value in found.items()},
        found.__getitem__,
    )


def _require_tensor(name: object, value: object) -> None:
    if type(name) is not str or not isinstance(value, Tensor):
        raise CheckpointError(f"holds {shown(name)} of type {type(value).__name__}, no tensor")
    if value.layout != torch.strided or value.dtype not in (*SPELT, torch.complex64):
        raise CheckpointError(f"holds {shown(name)} as {value.dtype}, {value.layout}")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise CheckpointError(f"holds {shown(name)} of {list(value.shape)} in fewer bytes")
