"""What can be done with the model of a finished run, as commands."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from minimind.checkpoint.retention import BEST, Saved, best_of
from minimind.config.flags import VAL_LOSS
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


def best_line(run: RunConfig, listed: Sequence[Saved], last_step: int) -> str:
    """The best checkpoint, how much better it is than the last one, and its name.

    Empty if none has a value, or the last one is the best.
    """
    best = best_of(listed)
    if best is None or best.value is None or best.step == last_step:
        return ""
    name = "validation loss" if best.by == VAL_LOSS else best.by
    apart = ""
    last = [one.value for one in listed if (one.step, one.by) == (last_step, best.by)]
    if last and last[0] is not None and math.isfinite(last[0]):
        side = "above" if math.copysign(1, best.value) < 0 else "below"  # a score is negated
        apart = f", {last[0] - best.value:.4f} {side} the last"
    place = shell_word(Path(run.out_dir) / BEST)
    return f"best: step {best.step:,}, {name} {abs(best.value):.4f}{apart}; --checkpoint {place}"
