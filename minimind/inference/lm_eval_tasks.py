"""Tasks of lm-eval-harness, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minimind.config.names import suggest
from minimind.config.tasks import LM_EVAL, OWN_TASKS, AskedTask
from minimind.data.tokenizer.vocabulary import JSON_NAME, write_tokenizer
from minimind.errors import UsageError
from minimind.inference.scores import Score, Shares, standard_error
from minimind.runtime.installed import require_extra

if TYPE_CHECKING:
    from minimind.data.tokenizer.load import Tokenizer


@cache  # lm-eval looks through thousands of files
def _task_manager(folder: str | None, has_defaults: bool) -> Any:
    """lm-eval's index of tasks: of a folder, of lm-eval itself, or of both."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder, include_defaults=has_defaults)


def manager_of(names: Sequence[str], folder: str | None, by: str, way_out: str) -> Any:
    """The index that has these tasks, of `folder` first; raise UsageError if there is none.

    `by` begins the message, `way_out` ends it.
    """
    require_extra("eval", by, LM_EVAL)
    own = _task_manager(folder, False) if folder is not None else None
    if own is not None and {*names} <= {*own.all_tasks}:
        return own
    manager = _task_manager(folder, True)
    known = {*manager.all_tasks}
    if unknown := [name for name in names if name not in known]:
        near = suggest(unknown[0], [*OWN_TASKS, *sorted(known)], way_out)
        raise UsageError(f"{by}: {unknown[0]} is not a task; {near}")
    return manager


METRICS = ("acc_norm", "acc", "exact_match", "em")  # shares of right answers; the first is reported
FEWSHOT_SEED = 1234  # as that of lm-eval's own command


@dataclass(frozen=True)
class LmEvalTasks:
    """Loaded tasks of lm-eval, by whether they are asked in the chat template."""

    plain: Mapping[str, Any]
    chats: Mapping[str, Any]
    tokenizer: Any
    limit: int | None

    @classmethod
    def load(
        cls,
        asked: Sequence[AskedTask],
        tokenizer: Tokenizer,
        positions: int,
        limit: int | None,
        by: str,
    ) -> LmEvalTasks:
        """Load the tasks with their questions; raise UsageError if that fails."""
        kinds: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for one in asked:
            manager = require_task(one, by)
            try:
                tasks = _loaded(manager, one.name)
            except (OSError, ValueError) as error:  # of the library that fetches data sets
                raise unread(f"{by} {one.name}", error) from error
            for name, task in tasks.items():
                if task.get_config("output_type") == "generate_until":
                    from minimind.inference.shared_lm import require_settings

                    require_settings(
                        task.get_config("generation_kwargs"), positions, f"{by}: {name}"
                    )
            kinds[one.as_chat].update(tasks)
        return cls(*kinds, transformers_tokenizer(tokenizer), limit)

    def has_chance(self) -> dict[str, bool]:
        """Whether a score is a share of right answers, by task."""
        every = {**self.plain, **self.chats}
        return {name: not {*METRICS}.isdisjoint(task.aggregation()) for name, task in every.items()}

    def scores(self, model: Any, shares: Shares) -> dict[str, Score]:
        """Score each task (collective); raise StoppedError if a rank is asked to stop."""
        from lm_eval import evaluate

        from minimind.inference.shared_lm import SharedLM

        ask: Any = evaluate  # its decorator hides its parameters
        found: dict[str, Score] = {}
        for tasks, as_chat in ((self.plain, False), (self.chats, True)):
            if not tasks:
                continue
            for task in tasks.values():
                task.set_fewshot_seed(FEWSHOT_SEED)  # the same examples each time
            results = ask(
                SharedLM(model, self.tokenizer, shares),
                dict(tasks),
                limit=self.limit,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=as_chat,
            )
            for name, task in tasks.items():
                found[name] = self._score(name, task, results)
        return found

    def _score(self, name: str, task: Any, results: Mapping[str, Any]) -> Score:
        values = {
            key.partition(",")[0]: value
            for key, value in reversed(results["results"][name].items())
            if "," in key and "_stderr," not in key and isinstance(value, int | float)
        }
        metric = next((one for one in METRICS if one in values), None)
        number = results["n-samples"][name]["effective"]
        if metric is None:
            metric = [*values][-1]  # the first of the task
            is_higher = results["higher_is_better"][name].get(metric, True)
            return Score(values[metric], None, None, number, bool(is_higher))
        chance = 0.0
        if task.get_config("output_type") == "multiple_choice":
            docs = [doc for _, doc in task.doc_iterator(limit=self.limit)]
            chance = sum(1 / len(task.doc_to_choice(doc)) for doc in docs) / len(docs)
        value = float(values[metric])
        return Score(value, chance, standard_error(value, number), number)


def require_task(one: AskedTask, by: str) -> Any:
    """lm-eval's index with this task; raise UsageError if there is none."""
    way_out = (
        f"`lm_eval ls tasks` lists the tasks of lm-eval; {', '.join(OWN_TASKS)} are there, too"
    )
    return manager_of([one.name], one.folder, by, way_out)


def unread(what: str, error: Exception) -> UsageError:
    """The error for tasks whose questions cannot be fetched."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UsageError(
        f"{what}: the questions cannot be read ({reason}); connect to the Hugging Face Hub, from"
        " which lm-eval fetches them, or give a task whose YAML names files"
    )


def _loaded(manager: Any, name: str) -> dict[str, Any]:
    """The tasks of a name, which may be that of a group."""
    if hasattr(manager, "load"):
        tasks = manager.load([name])["tasks"]
    else:  # lm-eval 0.4.10
        from lm_eval.tasks import get_task_dict

        tasks = get_task_dict([name], manager)
    for task in tasks.values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return tasks


def require_template(tokenizer: Tokenizer, path: Path, by: str) -> None:
    """Raise UsageError for a model without a chat template, or with one that does not fit."""
    from minimind.inference.chat import template_of

    if not tokenizer.templates.by_name:
        raise UsageError(
            f"{by}: {path} has no chat template beside its tokenizer; ask in plain text, or"
            " fine-tune with --task sft"
        )
    template_of(tokenizer, None, path)  # one that does not fit is an error


def transformers_tokenizer(tokenizer: Tokenizer) -> Any:
    """The tokenizer as lm-eval needs it, with the ids of training."""
    from transformers import PreTrainedTokenizerFast

    if JSON_NAME not in tokenizer.exported:
        raise UsageError(
            f"{tokenizer.path}: has no {JSON_NAME}, which lm-eval needs; evaluate on text, or train"
            " with another tokenizer"
        )
    with TemporaryDirectory() as folder:
        write_tokenizer(folder, tokenizer.exported)
        return PreTrainedTokenizerFast.from_pretrained(folder)
