"""The tasks of --eval_tasks and `minimind eval --tasks`: our own by name, and those of lm-eval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minimind.config.checks import given
from minimind.config.flags import VAL_LOSS
from minimind.config.names import suggest
from minimind.config.run_config import RunConfig
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.installed import install_extra

AVERAGE = "average"  # of (value - chance) / (1 - chance), over tasks with a chance
CHAT = ":chat"  # behind a name: asked in the model's chat template
LM_EVAL = "lm_eval"  # package of the extra `eval`


@dataclass(frozen=True)
class OwnTask:
    """A task that needs neither lm-eval nor a network."""

    what: str
    chance: float | None = None  # share that a guess has right; None: no share of right answers
    higher_is_better: bool = True
    reads_text: bool = True  # held-out text


OWN_TASKS = {
    "cloze": OwnTask("which of 4 continuations belongs to a held-out text", 0.25),
    "needle": OwnTask("which of 4 values followed a key earlier in the text", 0.25),
    "arithmetic": OwnTask("which of 4 numbers is the sum of two", 0.25, reads_text=False),
    "bits_per_byte": OwnTask("loss of held-out text, per source", higher_is_better=False),
    "repetition": OwnTask(
        "share of 4-token sequences that a greedy continuation repeats", higher_is_better=False
    ),
}


@dataclass(frozen=True)
class AskedTask:
    """A task as it was asked for."""

    name: str
    folder: str | None = None  # of task YAMLs of lm-eval; None: lm-eval's own
    as_chat: bool = False

    @property
    def is_own(self) -> bool:
        return self.folder is None and self.name in OWN_TASKS


def read_tasks(texts: Iterable[str], by: str) -> list[AskedTask]:
    """The tasks of some lists of names, separated by commas; `by` begins the message of an error.

    A name is one of OWN_TASKS, a task of lm-eval, or DIR/NAME[.yaml] for a task in a folder, and
    may end in CHAT. Raise UsageError for a name that cannot be any of these, or that comes twice.
    """
    found: dict[str, AskedTask] = {}
    for item in (item.strip() for text in texts for item in text.split(",")):
        path, as_chat = Path(item.removesuffix(CHAT)), item.endswith(CHAT)
        folder = None if path.name == str(path) and path.suffix != ".yaml" else str(path.parent)
        one = AskedTask(path.name.removesuffix(".yaml"), folder, as_chat)
        if one.name in ("", AVERAGE):
            raise UsageError(
                f"{by}: {item!r} is not the name of a task; give one of {', '.join(OWN_TASKS)}"
            )
        if folder is not None:
            _require_folder(folder, by)
        if one.name in found:
            raise UsageError(f"{by}: names {one.name} twice; remove one of them")
        if one.is_own and as_chat:
            raise UsageError(f"{by}: {one.name} asks in plain text; remove {CHAT}")
        if not one.is_own and find_spec(LM_EVAL) is None:
            near = suggest(one.name, [*OWN_TASKS], f"those are {', '.join(OWN_TASKS)}")
            raise UsageError(
                f"{by}: {item} is not a built-in task ({near}), but the tasks of lm-eval need the"
                f" package {LM_EVAL}, which is not installed; run {install_extra('eval')}"
            )
        found[one.name] = one
    return [*found.values()]


def _require_folder(folder: str, where: str) -> None:
    try:
        disk.entries(Path(folder).expanduser())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{where}: there is no folder {folder}; correct the path") from error
    except OSError as error:
        raise UsageError(
            f"{where}: {folder} cannot be read ({error.strerror}); correct the path or its"
            " permissions"
        ) from error


def tasks_of(run: RunConfig) -> list[AskedTask]:
    """The tasks of --eval_tasks; raise UsageError if the run cannot ask one."""
    if run.eval_tasks is None:
        return []
    tasks, by = read_tasks([run.eval_tasks], f"{given(run, 'eval_tasks')}"), given(run, "task")
    for one in tasks:
        if one.as_chat and run.task != "sft":
            raise UsageError(
                f"{given(run, 'eval_tasks')}: {one.name} asks in a chat template, and a run of"
                f" {by} has none; remove {CHAT}"
            )
        if one.is_own and OWN_TASKS[one.name].reads_text and run.task == "sft":
            raise UsageError(
                f"{given(run, 'eval_tasks')}: {one.name} reads held-out text, and {by} holds out"
                " conversations; remove it"
            )
    return tasks


def require_compared(run: RunConfig, has_chance: Mapping[str, bool]) -> None:
    """Raise UsageError if --keep_best_by is none of the scores; `has_chance` by their names."""
    names, by = [AVERAGE, *has_chance], given(run, "keep_best_by")
    if run.keep_best_by not in (VAL_LOSS, *names):
        hint = suggest(run.keep_best_by, [VAL_LOSS, *names], f"give one of {', '.join(names)}")
        raise UsageError(f"{by} is none of the scores; {hint}")
    if run.keep_best_by == AVERAGE and not any(has_chance.values()):
        raise UsageError(
            f"{by}: none of {', '.join(has_chance)} is a share of right answers; give one of them"
        )
