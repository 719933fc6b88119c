"""What can be done with the model of a finished run, as commands."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from minimind.config.run_config import LAUNCH, RunConfig
from minimind.runtime import disk
from minimind.runtime.terminal import aligned


def minimind_command(python: str) -> str:
    """The installed `minimind` of an interpreter, else `PYTHON -m minimind`; quoted for a shell."""
    script = Path(python).parent / "minimind"
    path = script if disk.exists(script) else Path(python)
    near = os.path.relpath(path)
    command = shlex.quote(str(path) if near.startswith("..") else near)
    return command if path == script else f"{command} -m minimind"


def what_next(run: RunConfig) -> str:
    """A line for each command: what it is for, and how to type it."""
    command = minimind_command(sys.executable)
    place = shlex.quote(run.out_dir)
    form = "transformers" if run.hugging_face else "minimind" if run.use_moe else "llama"
    if run.task == "sft":
        lines = {
            "chat": f"{command} chat --checkpoint {place}",
            "measure": f"{command} eval --task sft --checkpoint {place} --data TALK.jsonl",
        }
    else:
        lines = {
            "write": f'{command} generate --checkpoint {place} --prompt "..."',
            "measure": f"{command} eval --checkpoint {place} --data TEXT.jsonl",
        }
        if run.hugging_face is None:
            talk = "--data_path TALK.jsonl --out_dir DIR"
            lines["fine-tune"] = f"{LAUNCH} --config sft --init_from {place} \\\n{'':13}{talk}"
    if run.hugging_face is None:
        lines["serve"] = f"{command} serve --checkpoint {place}"
    lines["export"] = f"{command} export --checkpoint {place} --format {form} --out DIR"
    lines["own text"] = f"{command} init --data_path TEXT.jsonl --hours 1"
    return aligned(lines.items(), indent="  ")
