"""Tasks of lm-eval-harness on a checkpoint or an export, for `minimind eval --lm_eval`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import at_least, non_empty
from minimind.data.tokenizer.vocabulary import JSON_NAME, write_tokenizer
from minimind.errors import UsageError
from minimind.runtime.durable_files import printing

if TYPE_CHECKING:
    from minimind.data.tokenizer.load import AnyTokenizer

# Flags of `minimind eval` that select the text, with their defaults.
OF_TEXT = {
    **{"data": None, "split": None, "max_seq_len": None, "max_rows": None, "doc_mask": True},
    **{"text_field": "text", "max_document_bytes": None, "on_bad_data": "error"},
    **{"max_bad_fraction": 0.05, "task": "pretrain", "train_on": None, "chat_template": None},
    **{"template_date": None, "allow_lossy_tokenizer": False},
}
OF_TASKS = {"include_path": None, "chat": False, "limit": None}


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Add --lm_eval and what belongs to it."""
    add = parser.add_argument
    text = "tasks of lm-eval-harness, instead of --data"
    add("--lm_eval", nargs="+", type=non_empty, metavar="TASK", help=text)
    text = "folder of tasks of your own"
    add("--include_path", type=non_empty, metavar="DIR", help=text)
    add("--chat", action="store_true", help="format the requests by the model's chat template")
    add("--limit", type=at_least(1), help="questions per task (default: all)")


def require_of_kind(args: argparse.Namespace) -> None:
    """Raise UsageError unless either --data or --lm_eval is given, with its own flags only."""
    if (args.data is None) == (args.lm_eval is None):
        count = "neither was" if args.data is None else "both were"
        raise UsageError(f"of --data (text) and --lm_eval (tasks) {count} given; give one of them")
    others, kind = (OF_TASKS, "--data") if args.lm_eval is None else (OF_TEXT, "--lm_eval")
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
    manager = _task_manager(args)
    model, tokenizer, path = load_model(args.checkpoint, args.model, args.tokenizer, args.weights)
    if args.chat:
        _require_template(tokenizer, path)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    model.config.doc_mask = False  # a request is one document
    evaluate: Any = simple_evaluate  # its decorator hides its parameters, like HFLM's
    wrapper: Any = HFLM
    found = evaluate(
        model=wrapper(
            pretrained=model.to(device),
            tokenizer=_transformers_tokenizer(tokenizer),
            max_length=model.config.max_position_embeddings,
            batch_size=args.batch_size,
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


def _task_manager(args: argparse.Namespace) -> Any:
    """lm-eval's index of tasks; UsageError if it lacks one, or if lm-eval is not installed."""
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise UsageError(
            "--lm_eval needs the package lm_eval, which is not installed; pip install lm_eval"
        ) from error
    if args.include_path is not None:
        own = TaskManager(include_path=args.include_path, include_defaults=False)
        if {*args.lm_eval} <= {*own.all_tasks}:  # the tasks of lm-eval take seconds to list
            return own
    manager = TaskManager(include_path=args.include_path)
    if unknown := [name for name in args.lm_eval if name not in manager.all_tasks]:
        raise UsageError(
            f"--lm_eval {unknown[0]}: lm-eval has no such task; `lm_eval ls tasks` lists its own,"
            " and --include_path DIR adds a folder of yours"
        )
    return manager


def _require_template(tokenizer: AnyTokenizer, path: Path) -> None:
    from minimind.inference.chat import template_of

    if not tokenizer.templates.by_name:
        raise UsageError(
            f"--chat: {path} has no chat template beside its tokenizer; drop --chat, or"
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
