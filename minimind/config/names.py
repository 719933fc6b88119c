"""What to say of a name that is not known, or is not UTF-8."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from minimind.config.foreign_flags import equivalent_flag
from minimind.runtime import disk


def suggest(name: str, names: Sequence[str], otherwise: str = "--help all lists every flag") -> str:
    """Suggest the name closest to an unknown one; `otherwise` if none is close."""
    plain = {known.lstrip("-"): known for known in names}
    word = str(name).lstrip("-")
    close = [known for known in plain if sorted(known) == sorted(word)]  # letters out of order
    longer = [known for known in plain if known.startswith(word)]
    close += longer if len(longer) == 1 and len(word) > 3 else []
    close += difflib.get_close_matches(word, plain, n=1, cutoff=0.8)
    return f"did you mean {plain[close[0]]}?" if close else otherwise


MOST_NAMES = 1000  # of a folder, that are compared with one that is not there


def no_such_file(path: Path) -> str:
    """Describe a path that is not there: from which folder it is read, and the closest name."""
    where, names = "", []
    with suppress(OSError):  # the folder is not there either, or closed
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        names = [entry.name for entry in islice(disk.entries(path.parent), MOST_NAMES)]
    hint = suggest(path.name, names, "correct the path")
    return f"{path}: there is no such file or directory{where}; {hint}"


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
        return "is not UTF-8; rename it, or give another one"
    return (
        f"is UTF-8, which this Python takes for {sys.getfilesystemencoding()}, by its locale; unset"
        " PYTHONUTF8, or set LC_ALL=C.UTF-8"
    )


def is_of_other_locale(text: str) -> bool:
    """Whether a text that `is_utf8` refuses is UTF-8 that was decoded as something else."""
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return not is_utf8(text)
