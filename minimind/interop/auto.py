"""The model for transformers' Auto classes: registered here, or as files for trust_remote_code.

Importing `minimind` registers nothing, as the registry belongs to the process and training does not
need it. Tools that load a directory by name without trust_remote_code do.

The files load without this package: every module that the decoder imports is included, with
relative imports; all else that they import comes with transformers.
"""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from transformers import AutoConfig

from minimind.errors import CheckpointError
from minimind.model import decoder
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.checked_json import read_object
from minimind.runtime.durable_files import read_small

AUTO_MAP = {
    "AutoConfig": "configuration.MiniMindConfig",
    "AutoModel": "decoder.MiniMindModel",
    "AutoModelForCausalLM": "decoder.MiniMindForCausalLM",
    "AutoModelForQuestionAnswering": "decoder.MiniMindForQuestionAnswering",
    "AutoModelForSequenceClassification": "decoder.MiniMindForSequenceClassification",
    "AutoModelForTokenClassification": "decoder.MiniMindForTokenClassification",
}
"""The "auto_map" of config.json: file and class by Auto class."""

_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(r"^([ \t]*)from minimind((?:\.\w+)*)\.(\w+) import ", re.MULTILINE)
_RELATIVE = re.compile(rb"^[ \t]*from \.(\w+) import ", re.MULTILINE)
_FILE = re.compile(r"\w+\.py")


def remote_code() -> dict[str, bytes]:
    """Content by file name, sorted, read from this package: what is exported is what ran."""
    files: dict[str, bytes] = {}
    pending = [(".model", entry.split(".")[0]) for entry in AUTO_MAP.values()]
    while pending:
        package, module = pending.pop()
        if f"{module}.py" in files:
            continue
        folder = _PACKAGE.joinpath(*package.split("."))
        source = (folder / f"{module}.py").read_text(encoding="utf-8")
        files[f"{module}.py"] = _IMPORT.sub(r"\1from .\3 import ", source).encode()
        pending += [(package, name) for _, package, name in _IMPORT.findall(source)]
    return dict(sorted(files.items()))


def remote_code_in(folder: Path) -> set[str]:
    """Names of these files in an export of any version, in which modules may have other names.

    They are what its "auto_map" names, and what that imports.
    """
    try:
        entries = read_object(folder / "config.json")[0].get("auto_map")
    except CheckpointError:
        return set()
    found: set[str] = set()
    pending = [
        str(entry).partition(".")[0]
        for entry in (entries if type(entries) is dict else {}).values()
    ]
    while pending:
        name = f"{pending.pop()}.py"
        if name not in found and _FILE.fullmatch(name) and (folder / name).is_file():
            found.add(name)
            pending += map(bytes.decode, _RELATIVE.findall(read_small(folder / name)))
    return found


def register() -> None:
    """Register model_type "minimind" with the Auto classes of AUTO_MAP; may be repeated.

    From then on they use these classes instead of the code in a directory.
    """
    AutoConfig.register(MiniMindConfig.model_type, MiniMindConfig, exist_ok=True)
    for name, entry in AUTO_MAP.items():
        if name != "AutoConfig":
            kind = getattr(decoder, entry.split(".")[1])
            getattr(transformers, name).register(MiniMindConfig, kind, exist_ok=True)
