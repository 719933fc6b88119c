"""Unpack a revision of the repository into a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def unpack(revision: str, folder: Path, *paths: str) -> Path:
    """Write the files of a revision, or those below `paths`, into `folder`; return it."""
    archive = subprocess.run(
        ["git", "archive", revision, *paths], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder
