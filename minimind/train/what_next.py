"""What can be done with the model of a finished run, as commands."""

from __future__ import annotations

import sys

from minimind.config.paths import shell_word
from minimind.config.run_config import RunConfig
from minimind.runtime.installed import LAUNCH, minimind_command
from minimind.runtime.terminal import aligned


def what_next(run: RunConfig) -> str:
    """A line for each command: what it is for, and how to type it."""
    command = minimind_command(sys.executable)
    place = shell_word(run.out_dir)
    form = "transformers" if run.hugging_face else "minimind" if run.use_moe else "llama"
    if run.task == "sft":
        lines = {
            "chat": f"{command} chat --checkpoint {place}",
            "measure": f"{command} eval --task sft --checkpoint {place} --data_path TALK.jsonl",
        }
    else:
        lines = {
            "write": f'{command} generate --checkpoint {place} --prompt "..."',
            "measure": f"{command} eval --checkpoint {place} --data_path TEXT.jsonl",
        }
        if run.hugging_face is None:
            talk = "--data_path TALK.jsonl --out_dir DIR"
            lines["fine-tune"] = f"{LAUNCH} --config sft --init_from {place} \\\n{'':13}{talk}"
    if run.hugging_face is None:
        lines["serve"] = f"{command} serve --checkpoint {place}"
    lines["export"] = f"{command} export --checkpoint {place} --format {form} --out DIR"
    lines["own text"] = f"{command} init --data_path TEXT.jsonl --hours 1"
    return aligned(lines.items(), indent="  ", columns=sys.maxsize)  # to be copied
