"""What to say of a name that is not known, or is not UTF-8."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from minimind.config.foreign_flags import equivalent_flag, equivalent_value
from minimind.runtime import disk
from minimind.runtime.urls import HUB_PREFIX


def suggest(name: str, names: Sequence[str], otherwise: str = "--help all lists every flag") -> str:
    """Suggest the name closest to an unknown one; `otherwise` if none is close."""
    found = closest(name, names)
    return f"did you mean {found}?" if found else otherwise


def suggest_choice(value: Any, choices: Sequence[str], otherwise: str) -> str:
    """Suggest the choice that a value stands for elsewhere, or is closest; else `otherwise`."""
    found = equivalent_value(str(value), choices)
    return f"did you mean {found}?" if found else suggest(str(value), choices, otherwise)


def no_such_name(name: str, shipped: Sequence[str], kind: str) -> str:
    """Describe a value that is neither a shipped name nor a file; name the closest, and all."""
    every = ", ".join(shipped)
    if found := closest(name, shipped):
        hint = f"did you mean {found}? ({every})"
    else:
        hint = _near_path(Path(name).expanduser()) or f"give a file, or {every}"
    return f"{name}: there is no such {kind} or file; {hint}"


# What flags are called in other commands or by torchrun, where the letters are not close.
OTHER_NAMES = {"out": "out_dir", "world_size": "gpus", "keep": "keep_last"}


def closest(name: str, names: Sequence[str]) -> str | None:
    """The name that an unknown one is a slip of; None if none is close."""
    plain = {known.lstrip("-"): known for known in names}
    word = str(name).lstrip("-")
    close = [known for known in (OTHER_NAMES.get(word),) if known in plain]
    close += [known for known in plain if sorted(known) == sorted(word)]  # letters out of order
    longer = [known for known in plain if known.startswith(word)]
    close += longer if len(longer) == 1 and len(word) > 3 else []
    close += difflib.get_close_matches(word, plain, n=1, cutoff=0.8)
    return plain[close[0]] if close else None


MOST_NAMES = 1000  # of a folder, that are compared with one that is not there
CORRECT = "correct the path"


def no_such_file(path: Path, otherwise: str = CORRECT) -> str:
    """Describe a path that is not there: from which folder it is read, and the closest one."""
    where = ""
    with suppress(OSError):  # the folder is not there either
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
    return f"{path}: there is no such file or directory{where}; {_near_path(path) or otherwise}"


def _near_path(path: Path) -> str:
    """Suggest the path that is there and of which a missing one is a slip; "" without one."""
    missing = path
    with suppress(OSError):  # a folder is closed
        while missing.parent != missing and not disk.lexists(missing.parent):
            missing = missing.parent
        names = [entry.name for entry in islice(disk.entries(missing.parent), MOST_NAMES)]
        if found := closest(missing.name, names):
            meant = missing.with_name(found) / path.relative_to(missing)
            return f"did you mean {meant}?" if disk.exists(meant) else ""
    return ""


RUN_MARKS = ("metrics.jsonl", "checkpoints")  # the out_dir of a run has one of them
MODEL_MARKS = ("manifest.json", "config.json", "*.gguf", "*.safetensors", "*.bin", "*.pth", "*.pt")
OF_RUN = "give the --out_dir of a run"
MOST_RUNS = 3  # that are named


def not_there(place: str | Path, flag: str = "", otherwise: str = CORRECT) -> str:
    """Describe a place that is not there, after its `flag`; "" for one of the Hub, or for none.

    "" too for one in a closed folder: its reader says so, with the status of the command.
    """
    if not str(place) or str(place).startswith(HUB_PREFIX):
        return ""
    path = Path(place).expanduser()
    with suppress(OSError):
        if not disk.lexists(path):
            return f"{flag}{no_such_file(path, otherwise)}"
    return ""


def no_run(place: str | Path, flag: str = "") -> str:
    """Describe a place that is not there, or a folder with runs in it, where one run is needed.

    "" for any other: its reader knows more of it. `flag` is such as "--checkpoint ".
    """
    is_path = str(place) and not str(place).startswith(HUB_PREFIX)
    if (fault := not_there(place, flag, OF_RUN)) or not is_path:
        return fault
    path = Path(place).expanduser()
    try:
        marks = (*RUN_MARKS, *MODEL_MARKS)
        if path.name == "checkpoints" or any(any(disk.matching(path, mark)) for mark in marks):
            return ""
        runs = _runs_below(path)
    except OSError:  # a file, or a closed folder
        return ""
    if not runs:
        return ""
    newest, *others = runs[:MOST_RUNS]
    is_this = f"but contains one; give {flag}{newest}"
    if others:
        before = ", ".join(map(str, others))
        is_this = f"but contains {len(runs)}; give {flag}{newest} (the newest), or {before}"
    return f"{flag}{path}: is not a run, {is_this}"


def _runs_below(folder: Path) -> list[Path]:
    """The runs in a folder, or else in those in it; the newest first, by their last change."""
    found: dict[Path, float] = {}
    for pattern in (f"{depth}/{mark}" for depth in ("*", "*/*") for mark in RUN_MARKS):
        if pattern.startswith("*/*/") and found:
            break
        for mark in islice(disk.matching(folder, pattern, hidden=False), MOST_NAMES):
            found[mark.parent] = max(found.get(mark.parent, 0.0), disk.stat(mark).st_mtime)
    return sorted(found, key=lambda run: (-found[run], str(run)))


def unknown_flag(word: str, known: Sequence[str]) -> str:
    """Describe an unknown flag and suggest its equivalent or the closest known one."""
    name = word.split("=")[0]
    return f"unknown flag {name}; {equivalent_flag(word) or suggest(name, known)}"


def is_utf8(text: str) -> bool:
    """Whether an argument was valid UTF-8; Python decodes other bytes to surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def utf8_fault(text: str) -> str:
    """What is wrong with a text that `is_utf8` refuses, and the remedy, to follow its name."""
    if not is_of_other_locale(text):
        return "is not UTF-8; write it in UTF-8, or give another"
    return (
        f"is UTF-8, but the locale has Python read it as {sys.getfilesystemencoding()}; unset"
        " PYTHONUTF8, or set LC_ALL=C.UTF-8"
    )


def is_of_other_locale(text: str) -> bool:
    """Whether a text that `is_utf8` refuses is UTF-8 that was decoded as something else."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return not is_utf8(text)
