"""Tasks of lm-eval-harness: their scores, and the table of `minimind eval --lm_eval`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import at_least, non_empty
from minimind.config.names import suggest
from minimind.config.run_config import RunConfig
from minimind.config.tasks import LM_EVAL, OWN_TASKS, AskedTask
from minimind.data.tokenizer.vocabulary import JSON_NAME, write_tokenizer
from minimind.errors import UsageError
from minimind.inference.scores import Score, Shares, standard_error
from minimind.runtime.durable_files import printing
from minimind.runtime.installed import install_extra

if TYPE_CHECKING:
    from minimind.data.tokenizer.load import AnyTokenizer

# Flags of `minimind eval` that select the text, with their defaults.
OF_TEXT = {
    **{"data": None, "split": None, "max_seq_len": None, "max_rows": None, "doc_mask": True},
    **{"text_field": "text", "max_document_bytes": None, "on_bad_data": "error"},
    **{"max_bad_fraction": 0.05, "task": "pretrain", "train_on": None, "chat_template": None},
    **{"template_date": None, "allow_lossy_tokenizer": False},
}
OF_TASKS = {"include_path": None, "chat": False, "limit": None, "dtype": "float32"}
OF_OWN_TASKS = ("data", "split", "limit", "dtype")  # of these, flags that --tasks has, too


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Add --lm_eval and what belongs to it."""
    add = parser.add_argument
    text = "tasks of lm-eval-harness, instead of --data"
    add("--lm_eval", nargs="+", type=non_empty, metavar="TASK", help=text)
    text = "folder of tasks of your own"
    add("--include_path", type=non_empty, metavar="DIR", help=text)
    add("--chat", action="store_true", help="format the requests by the model's chat template")
    text = f"questions per task (default: all; of --tasks {RunConfig.eval_tasks_limit})"
    add("--limit", type=at_least(1), help=text)
    text = "tasks as --eval_tasks of training names them, scored as in training; --data is the text"
    text += " that they are made of (default: the held-out text of the checkpoint's run)"
    add("--tasks", nargs="+", type=non_empty, metavar="NAME", help=text)
    text = "with --tasks: precision; that of a run gives the scores that it logged"
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help=text)


def require_of_kind(args: argparse.Namespace) -> None:
    """Raise UsageError unless --data, --lm_eval or --tasks is given, with its own flags only."""
    if args.tasks is not None and args.lm_eval is not None:
        raise UsageError("--tasks and --lm_eval were given; give --tasks alone, which takes both")
    if args.tasks is None and (args.data is None) == (args.lm_eval is None):
        count = "neither was" if args.data is None else "both were"
        raise UsageError(f"of --data (text) and --lm_eval (tasks) {count} given; give one of them")
    others, kind = OF_TASKS, "--data"
    if args.lm_eval is not None:
        others, kind = {**OF_TEXT, "dtype": "float32"}, "--lm_eval"
    if args.tasks is not None:
        others, kind = {**OF_TASKS, **OF_TEXT}, "--tasks"
        others = {name: one for name, one in others.items() if name not in OF_OWN_TASKS}
    for name, default in others.items():
        if getattr(args, name) != default:
            raise UsageError(f"--{name} has no effect with {kind}; drop it")


def run_tasks(args: argparse.Namespace, device: str, processes: int) -> None:
    """Evaluate the tasks and print lm-eval's table, or its results as JSON.

    Raise UsageError if several processes were started, or for --chat without a chat template.
    """
    from minimind.inference.load_model import load_model

    if processes > 1:
        raise UsageError(
            f"--lm_eval runs in one process, and {processes} were started; drop the launcher"
        )
    way_out = "`lm_eval ls tasks` lists those of lm-eval, and --include_path DIR adds a folder"
    manager = manager_of(args.lm_eval, args.include_path, "--lm_eval", way_out)
    model, tokenizer, path = load_model(args.checkpoint, args.model, args.tokenizer, args.weights)
    if args.chat:
        require_template(tokenizer, path, "--chat")
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    from minimind.inference.shared_lm import SharedLM

    model.config.doc_mask = False  # a request is one document
    evaluate: Any = simple_evaluate  # its decorator hides its parameters, like HFLM's
    found = evaluate(
        model=SharedLM(
            model.to(device), _transformers_tokenizer(tokenizer), Shares(), args.batch_size
        ),
        tasks=args.lm_eval,
        task_manager=manager,
        limit=args.limit,
        apply_chat_template=args.chat,
        log_samples=False,
    )
    with printing():
        if args.json:
            print(json.dumps({"model": str(path), "chat": args.chat, "tasks": found["results"]}))
        else:
            print(f"{path}\n{make_table(found)}")


@cache  # lm-eval looks through thousands of files
def _task_manager(folder: str | None, has_defaults: bool) -> Any:
    """lm-eval's index of tasks: of a folder, of lm-eval itself, or of both."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=folder, include_defaults=has_defaults)


def manager_of(names: Sequence[str], folder: str | None, by: str, way_out: str) -> Any:
    """The index that has these tasks, of `folder` first; raise UsageError if there is none.

    `by` begins the message, `way_out` ends it.
    """
    try:
        own = _task_manager(folder, False) if folder is not None else None
        if own is not None and {*names} <= {*own.all_tasks}:
            return own
        manager = _task_manager(folder, True)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{by} needs the package {LM_EVAL}, which is not installed; {install_extra('eval')}"
        ) from error
    known = {*manager.all_tasks}
    if unknown := [name for name in names if name not in known]:
        near = suggest(unknown[0], [*OWN_TASKS, *sorted(known)], way_out)
        raise UsageError(f"{by}: {unknown[0]} is no task; {near}")
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
        tokenizer: AnyTokenizer,
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
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise UsageError(
                    f"{by}: {one.name}: its questions cannot be read ({reason}); lm-eval fetches"
                    " them from the Hugging Face Hub unless its YAML names files"
                ) from error
            for name, task in tasks.items():
                if task.get_config("output_type") == "generate_until":
                    from minimind.inference.shared_lm import require_settings

                    require_settings(
                        task.get_config("generation_kwargs"), positions, f"{by}: {name}"
                    )
            kinds[one.as_chat].update(tasks)
        return cls(*kinds, _transformers_tokenizer(tokenizer), limit)

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
    way_out = f"`lm_eval ls tasks` lists those of lm-eval; {', '.join(OWN_TASKS)} are there, too"
    return manager_of([one.name], one.folder, by, way_out)


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


def require_template(tokenizer: AnyTokenizer, path: Path, by: str) -> None:
    """Raise UsageError for a model without a chat template, or with one that does not fit."""
    from minimind.inference.chat import template_of

    if not tokenizer.templates.by_name:
        raise UsageError(
            f"{by}: {path} has no chat template beside its tokenizer; ask in plain text, or"
            " fine-tune with --task sft"
        )
    template_of(tokenizer, None, path)  # one that does not fit is an error


def _transformers_tokenizer(tokenizer: AnyTokenizer) -> Any:
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
