"""The rows of tests/refusals/*.yaml: command lines, their files and environment, and refusals.

A file is `base:`, what all its rows share, and `rows:`. The keys are the fields of Row.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from minimind.config.deepspeed.document import put
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG

FOLDER = Path(__file__).parent
STATUSES = {
    "": 0,
    "E_USAGE": 2,
    "E_DATA": 3,
    "E_CHECKPOINT": 4,
    "E_STORAGE": 5,
    "E_LOCKED": 8,
    "E_RENDEZVOUS": 9,
}
REPEATED = re.compile(r"<(\S+) x (\d+)>")  # "<0 x 400>" is 400 zeros
BYTE = re.compile(r"<byte (\w\w)>")  # "<byte ff>" is a byte that is not UTF-8


@dataclass(frozen=True)
class Row:
    """A command line that is refused, and what its error has to name."""

    where: str  # file and line of the row
    program: str = "train_pretrain"
    argv: str = ""
    json: dict[str, Any] = field(default_factory=dict)  # edits of the shipped DeepSpeed file
    config: str = ""  # content of the file run.yaml, given with --config
    files: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str | None] = field(default_factory=dict)  # null: not set
    launcher: str = "torchrun"  # command line of the parent process
    gpus: int = 0
    error: str = "E_USAGE"  # name of the error, which decides the status; "" for none
    faults: int = 1
    leaves: tuple[str, ...] = ()  # folders that the command may leave behind
    names: tuple[str, ...] = ()
    near: dict[str, Any] | None = None  # changes that make the row right

    def neighbour(self) -> Row:
        """The row with the changes of `near`: it ends with 0, unless they give an error."""
        near = {"error": "", **(self.near or {})}
        near["json"] = {**self.json, **near["json"]}
        return Row(**{**vars(self), "near": None, **near})


def written_out(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row, with its DeepSpeed keys at full length."""
    edits = given.get("json", {}).items()
    full = {re.sub(r"^zero\.", "zero_optimization.", key): value for key, value in edits}
    return {**given, "json": full, "names": tuple(str(name) for name in given.get("names", ()))}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with these changes, of objects inside it too; null removes a member of an object."""
    both = {**base, **changes}
    for name in base.keys() & changes.keys():
        if isinstance(base[name], dict) and isinstance(changes[name], dict):
            members = merged(base[name], changes[name])
            both[name] = {key: value for key, value in members.items() if value is not None}
    return both


def rows_of(path: Path) -> list[Row]:
    """The rows of one file, each with the values of `base` that it does not replace."""
    tree = yaml.compose(path.read_text(), Loader=yaml.CSafeLoader)
    content = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    base = content.get("base", {})
    lines = next(value.value for key, value in tree.value if key.value == "rows")
    known = {item.name for item in fields(Row)}
    rows = []
    for node, given in zip(lines, content["rows"], strict=True):
        where = f"{path.stem}:{node.start_mark.line + 1}"
        assert given.keys() <= known, f"{where}: {given.keys() - known}"
        assert given["names"], where
        if "near" in given:
            given["near"] = written_out(given["near"])
        row = {**base, **written_out(given), "where": where}
        row["argv"] = f"{base.get('argv', '')} {given.get('argv', '')}".strip()
        for name in ("files", "environ"):
            row[name] = merged(base.get(name, {}), given.get(name, {}))
        rows.append(Row(**row))
    return rows


def all_rows() -> list[Row]:
    """The rows of every file."""
    return [row for path in sorted(FOLDER.glob("*.yaml")) for row in rows_of(path)]


def expanded(text: str) -> str:
    """`text` with its repetitions and bytes written out."""
    text = BYTE.sub(lambda match: os.fsdecode(bytes.fromhex(match[1])), text)
    return REPEATED.sub(lambda match: match[1] * int(match[2]), text)


def write_file(name: str, content: Any) -> None:
    """Write a file of a row: text, or JSON of a mapping or a list.

    A name that ends with "/" is an empty folder; null is a named pipe; {to: X} a symbolic link.
    """
    path = Path(expanded(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith("/"):
        path.mkdir(exist_ok=True)
    elif content is None:
        os.mkfifo(path)
    elif isinstance(content, dict) and content.keys() == {"to"}:
        path.symlink_to(content["to"])
    else:
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_bytes(os.fsencode(expanded(text)))


def write_files(row: Row) -> None:
    """Write the files of `row` into the current directory."""
    for name, content in row.files.items():
        write_file(name, content)
    if row.config:
        Path("run.yaml").write_text(expanded(row.config))
    if row.program != "train_pretrain":
        return
    if "text.jsonl" not in row.files:
        Path("text.jsonl").write_text('{"text": "a few words of text"}\n' * 50)
    if "ds.json" not in row.files:
        document = json.loads(DEFAULT_DEEPSPEED_CONFIG.read_text())
        for key, value in row.json.items():
            put(document, key, value)
        Path("ds.json").write_text(expanded(json.dumps(document, indent=2)))


def command_line(row: Row) -> list[str]:
    """The arguments of `row`: the flags that every row of a run has, then its own."""
    words = [expanded(word) for word in shlex.split(row.argv)]
    if row.program != "train_pretrain":
        return words
    shared = {
        "--data_path": "" if "--source" in words else "text.jsonl",
        "--cache_dir": "cache",
        "--out_dir": "out",
        "--config": "run.yaml" if row.config and "--model" not in words else "",
        "--device": "" if row.gpus else "cpu",
        "--deepspeed_config": "" if "accelerate" in row.launcher else "ds.json",
    }
    given = {word.partition("=")[0] for word in words}
    shared = {flag: value for flag, value in shared.items() if value and flag not in given}
    return [word for pair in shared.items() for word in pair] + words
