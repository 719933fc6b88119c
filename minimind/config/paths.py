"""Which flag named a path that cannot be read or written, and with which status the program ends.

Readers convert what they expect. What else the disk refuses, an OSError of a path at or below the
value of a flag, gets its sentence here.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path
from typing import Any

from minimind.errors import (
    CURES,
    CheckpointError,
    DataError,
    RunError,
    StorageError,
    UsageError,
    is_of_disk,
)
from minimind.runtime.urls import is_url, masked

# The error for each flag, of runs and of commands. A command may replace some (`origins`).
ORIGINS: dict[str, type[RunError]] = {
    **dict.fromkeys(("data_path", "val_path", "source", "tokenizer", "skip_rows"), DataError),
    **dict.fromkeys(("paths", "directory", "decontaminate", "classifier"), DataError),
    **dict.fromkeys(("init_from", "teacher", "resume", "checkpoint", "place"), CheckpointError),
    **dict.fromkeys(("config", "model", "deepspeed_config", "chat_template"), UsageError),
    **dict.fromkeys(("stages", "sources", "eval_tasks", "sweep", "tools"), UsageError),
    **dict.fromkeys(("sample_prompts", "prompts", "prompt_file"), DataError),
    **dict.fromkeys(("out", "out_dir", "cache_dir", "mirror"), StorageError),
    "places": StorageError,
}
POSITIONAL = ("paths", "directory", "place", "places", "sweep")
WRITTEN = ("out", "out_dir", "cache_dir", "mirror")


def shell_word(path: str | Path) -> str:
    """`path` for a command line: quoted, and absolute where it would be read as a flag or a ~."""
    text = str(path)
    return shlex.quote(os.path.abspath(text) if text.startswith(("-", "~")) else text)


@contextmanager
def naming_flags(
    values: Mapping[str, Any], origins: Mapping[str, type[RunError]] = ORIGINS
) -> Iterator[None]:
    """Convert an OSError of a path that a flag of `values` named into the error of that flag.

    Other errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if (named := error_of(error, values, origins)) is None:
            raise
        raise named from error


def error_of(
    error: OSError, values: Mapping[str, Any], origins: Mapping[str, type[RunError]] = ORIGINS
) -> RunError | None:
    """The error of the flag whose value is the path of `error`, or is the folder nearest to it."""
    if not is_of_disk(error):
        return None
    place = os.path.abspath(os.fsdecode(error.filename))
    found = [
        (len(root), name, text)
        for name in origins
        for text in _texts(values.get(name))
        if (root := _root(text)) and f"{place}/".startswith(root)
    ]
    if not found:
        return None
    _, name, text = max(found)
    flag = "" if name in POSITIONAL else f"--{name} "
    verb = "written" if name in WRITTEN else "read"
    where = "" if place == os.path.abspath(text) else f"{os.fsdecode(error.filename)} "
    remedy = f"give another {flag.strip()}" if name in WRITTEN else "correct the path"
    cure = CURES.get(error.errno or 0, "correct its permissions")
    also = "" if cure == remedy else f", or {cure}"
    return origins[name](
        f"{flag}{masked(text)}: {where}cannot be {verb} ({error.strerror}); {remedy}{also}"
    )


def _texts(value: Any) -> Iterable[str]:
    """The paths in the value of a flag; of NAME=PATH:WEIGHT, what may be the path too."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, str | Path) and str(one):
            text = str(one).removeprefix("file://").removeprefix("hf:")
            yield text
            if "=" in text:
                yield (path := text.partition("=")[2])
                yield path.rpartition(":")[0]


def _root(text: str) -> str:
    """The folder or file that a path or pattern begins with, with a slash; "" for a URL."""
    if not text or is_url(text):
        return ""
    parts = Path(os.path.expanduser(text)).parts
    fixed = next((n for n, part in enumerate(parts) if has_magic(part)), len(parts))
    return os.path.join(os.path.abspath(Path(*parts[:fixed])), "")
