"""A supervised fastText model as datatrove's filter, and the labels that its file has."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from minimind.data.quality.near_duplicates import require_datatrove
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.installed import install_extra

MAGIC, SUPERVISED = 793712314, 3
PREFIX = "__label__"
LABELS_SHOWN = 8


def require_classifier(path: Path, labels: Sequence[str]) -> None:
    """Raise UsageError if the model lacks one of the labels, or a package is missing."""
    require_datatrove("--classifier")
    try:
        import fasttext  # noqa: F401 (only to see whether it is installed)
    except ModuleNotFoundError as error:
        raise UsageError(
            "--classifier needs fasttext-predict, which is not installed;"
            f" {install_extra('quality')}"
        ) from error
    known = _labels_of(path)
    for label in labels:
        if label not in known:
            near = get_close_matches(label, known, 2, 0.5) or known[:2]
            some = (
                f"{', '.join(known)}"
                if len(known) <= LABELS_SHOWN
                else f"such as {' or '.join(near)}"
            )
            raise UsageError(
                f"--classifier {path}: {label!r} is none of its {len(known)} labels, {some};"
                " correct it"
            )


def _labels_of(path: Path) -> list[str]:
    """Read the labels, and the sizes of all else; raise UsageError for another file.

    The library hangs, or ends the process, at a file that is cut off.
    """
    try:
        if not disk.stat(path).st_size:
            raise ValueError("is empty")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end, labels = _read(data)
            is_whole = end <= len(data)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--classifier {path}: cannot be read ({reason}); correct it") from error
    except ValueError as error:
        raise UsageError(f"--classifier {path}: {error}; give a .bin or .ftz file") from error
    except struct.error:
        is_whole, labels = False, []
    if not is_whole:
        raise UsageError(f"--classifier {path}: is cut off; copy the file again")
    return labels


def _read(data: mmap.mmap) -> tuple[int, list[str]]:
    """The size of a model by its numbers, and the labels; raise ValueError or struct.error."""
    at = 0

    def read(form: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(f"<{form}")
        return found

    def skip_quantizer() -> None:
        nonlocal at
        dim, *_ = read("4i")
        at += 4 * 256 * dim

    def skip_matrix(is_quantized: bool) -> None:
        nonlocal at
        has_norms = is_quantized and read("?")[0]
        rows, columns = read("2q")
        if not is_quantized:
            at += 4 * rows * columns
            return
        (codes,) = read("i")
        at += codes
        skip_quantizer()
        if has_norms:
            at += rows
            skip_quantizer()

    if data[:4] != struct.pack("<i", MAGIC):
        raise ValueError("is no model of fastText")
    model = read("2i12id")[9]
    if model != SUPERVISED:
        raise ValueError("is a model of fastText without labels, not a supervised one")
    size, _, _, _, pruned = read("3i2q")
    labels = []
    for _ in range(size):
        end = data.find(b"\0", at)
        name, at = data[at:end], end + 1
        if end < 0:
            raise struct.error
        _, is_label = read("q?")
        if is_label:
            labels.append(name.decode().removeprefix(PREFIX))
    at += 8 * max(pruned, 0)
    (is_quantized,) = read("?")
    skip_matrix(is_quantized)
    (is_output_quantized,) = read("?")
    skip_matrix(is_quantized and is_output_quantized)
    return at, labels


def classifier_filter(
    path: Path, keep: Sequence[tuple[str, float]], remove: Sequence[tuple[str, float]]
) -> Any:
    """datatrove's filter of the labels with their least scores; one of the lists is empty."""
    import fasttext
    from datatrove.pipeline.filters import FastTextClassifierFilter

    # `new` would ask for fasttext-numpy2-wheel, which has the module of fasttext-predict, and the
    # filter's own loading for a part of the module that the latter lacks.
    found = object.__new__(FastTextClassifierFilter)
    found.__init__(str(path), list(keep) or None, list(remove) or None)
    found._model = fasttext.load_model(str(path))
    return found
