"""`minimind eval`: prepare text or conversations, score them and print a table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minimind.cli.command import (
    Cached,
    argument,
    count_of_bytes,
    iso_date,
    json_variables,
    non_empty,
    shared,
    utf8,
)
from minimind.cli.model import OfChat
from minimind.config.flags import MIXED
from minimind.config.run_config import RunConfig
from minimind.errors import DataError, UsageError
from minimind.inference.lm_eval_tasks import (
    manager_of,
    require_template,
    transformers_tokenizer,
    unread,
)
from minimind.report.formats import scores_table
from minimind.runtime.durable_files import printing, storing
from minimind.runtime.terminal import aligned

if TYPE_CHECKING:
    from minimind.data.chat.template import ChatTemplate
    from minimind.data.prepare.prepared import Prepared
    from minimind.data.tokenizer.load import Tokenizer
    from minimind.inference.score import LossSums, Part
    from minimind.runtime.object_cache import ObjectCache

COLUMNS = {  # columns of the table: name and format by field
    "loss": ("loss", ".4f"),
    "loss_se": ("+-", ".4f"),
    "perplexity": ("perplexity", ",.2f"),
    "bits_per_byte": ("bits/byte", ".4f"),
    "tokens": ("tokens", ","),
    "targets": ("targets", ","),
    "conversations": ("conversations", ","),
}
SPLITS = {"train": ("train",), "val": ("val",), "all": ("train", "val")}


TASKS = dict.fromkeys(("lm_eval", "tasks"), "tasks have their questions")
CONVERSATIONS = {"task=sft": "--task sft reads conversations"}


@dataclass(kw_only=True)
class Eval(OfChat, Cached):
    """Measure loss and perplexity on text or conversations, or run tasks of lm-eval.

    Text also has bits per byte; the perplexity of conversations is per target. Results are per
    source and in total, in one process or several: torchrun --nproc-per-node 2 -m minimind eval ...
    """

    example = "minimind eval --checkpoint out --data_path held_out.jsonl"
    data_path: list[str] = argument(
        (),
        nargs="+",
        excludes={"lm_eval": "each says what is scored; --tasks takes both"},
        metavar="PATH",
    )
    """text, one source per path; or folders of `minimind prepare`"""
    split: str | None = argument(
        None,
        choices=tuple(SPLITS),
        excludes={"lm_eval": TASKS["lm_eval"], **CONVERSATIONS},
        unset="val",
    )
    """part of a prepared folder; raw text is read whole"""
    batch_size: int = argument(8, ge=1)
    """windows per batch"""
    max_seq_len: int | None = argument(None, ge=1, excludes=TASKS)
    """tokens per window (default: the model's context length, or the longest conversation)"""
    max_rows: int | None = argument(None, ge=1, excludes={**TASKS, **CONVERSATIONS})
    """maximum windows per source, spread over its text (default: all)"""
    doc_mask: bool = argument(True, excludes={**TASKS, **CONVERSATIONS})
    """evaluate each document separately; off: packed rows"""
    task: str = argument("pretrain", choices=("pretrain", "sft"), excludes=TASKS)
    """text, or conversations with a chat template"""
    train_on: str | None = argument(
        None,
        choices=("assistant", "last", "all"),
        needs="task=sft",
        excludes=TASKS,
        unset="assistant",
    )
    """turns on which the loss is computed, as in training"""
    chat_template: str | None = argument(
        None, parse=non_empty, needs="task=sft", excludes=TASKS, metavar="FILE"
    )
    chat_template_kwargs: dict[str, Any] | None = argument(
        None, parse=json_variables, needs="task=sft", excludes=TASKS, metavar="JSON"
    )
    """variables of the template as a JSON object, as in training"""
    template_date: str | None = argument(
        None, parse=iso_date, needs="task=sft", excludes=TASKS, unset="2024-07-26", metavar="DATE"
    )
    """date shown to chat templates that print today's date, as in training"""
    text_field: str = shared(
        "text_field", parse=utf8, excludes={**TASKS, **CONVERSATIONS}, metavar="NAME"
    )
    """field or column of the text"""
    max_document_bytes: int | None = argument(None, parse=count_of_bytes, excludes=TASKS)
    """maximum bytes of a document of raw text (default: 64MiB, less with some tokenizers)"""
    on_bad_data: str = shared("on_bad_data", excludes=TASKS)
    """stop at a bad document (error), or skip and report it"""
    max_bad_fraction: float = shared("max_bad_fraction", excludes=TASKS)
    """fraction of documents that may be bad, with skip"""
    allow_lossy_tokenizer: bool = argument(False, excludes=TASKS)
    """continue although the tokenizer loses more than 0.1 % of the text"""
    cache_dir: str = shared("cache_dir", metavar="DIR")
    """cache of the tokens, and of what is fetched from URLs"""
    max_cache_gib: float | None = shared("max_cache_gib")
    json: bool = argument(False)
    """print a JSON object"""
    lm_eval: list[str] = argument((), nargs="+", parse=non_empty, metavar="TASK")
    """tasks of lm-eval-harness, instead of --data_path"""
    include_path: str | None = argument(None, parse=non_empty, needs="lm_eval", metavar="DIR")
    """folder of tasks of your own"""
    chat: bool = argument(False, needs="lm_eval", excludes={"tasks": TASKS["tasks"]})
    """format the requests by the model's chat template"""
    limit: int | None = argument(None, ge=1)
    """questions per task (default: all, with --tasks 100)"""
    tasks: list[str] = argument(
        (),
        nargs="+",
        parse=non_empty,
        excludes={"lm_eval": "--tasks takes the tasks of both"},
        metavar="NAME",
    )
    """tasks, named and scored as by --eval_tasks in training; they are made from the text of
    --data_path (default: the held-out text of the checkpoint's run)"""
    dtype: str = argument(
        "float32",
        choices=("float32", MIXED, "bfloat16", "float16"),
        needs="tasks",
        excludes={"lm_eval": "--dtype is for --tasks"},
    )
    """precision of the model; with the --dtype of a run the scores are those that it logged"""

    def execute(self) -> None:
        """Evaluate a model; of several processes only the first one prints."""
        if not (self.data_path or self.lm_eval or self.tasks):
            raise UsageError(
                "there is nothing to evaluate; give --data_path TEXT, --tasks TASK, or --lm_eval"
                " TASK"
            )
        if self.limit is not None and not (self.lm_eval or self.tasks):
            raise UsageError(
                f"--limit {self.limit} has no effect without --lm_eval or --tasks; give --max_rows,"
                " or remove --limit"
            )
        self.require_there()
        from minimind.config.launcher_env import read_launch
        from minimind.runtime.object_cache import open_cache

        launch = read_launch(os.environ)
        device = self.chosen_device(launch)
        if self.lm_eval:
            _score_lm_eval(self, device, launch.world_size)
            return
        score = _score_tasks if self.tasks else _score
        with open_cache(self.cache_dir, self.max_cache_gib) as cache:
            score(self, cache, device, launch.rank)


def _score(args: Eval, cache: ObjectCache, device: str, rank: int) -> None:
    """Print the results on `device`, a part of them computed by each process."""
    from minimind.data.chat.template import date_of, require_read
    from minimind.data.prepare.prepared import is_prepared
    from minimind.data.prepare.remote import local_data
    from minimind.engine.build import evaluation_accelerator
    from minimind.inference.chat import template_of
    from minimind.inference.score import part_of_conversations, score

    local = local_data(args.data_path, cache)
    model, tokenizer, path = args.load()
    template = template_of(tokenizer, args.chat_template, path) if args.task == "sft" else None
    _set_documents(model, template is not None)
    if template and args.template_date and not date_of(template.source, None):
        raise UsageError(
            f"--template_date {args.template_date} has no effect: {template.name} does not ask for"
            " the date; remove --template_date"
        )
    if template:
        require_read(args.chat_template_kwargs or (), template.source, template.name)
    positions = model.config.max_position_embeddings
    if args.max_seq_len is not None and args.max_seq_len > positions:
        raise UsageError(
            f"--max_seq_len {args.max_seq_len} is more than the {positions} positions of the model;"
            " lower it"
        )
    with _copied(tokenizer) as folder:
        opened = (tokenizer, folder, template, args, rank)
        data = {place: _open_data(place, paths, *opened) for place, paths in local.items()}
    length = args.max_seq_len
    if template is None:
        length, parts = length or positions, []
        for place, paths in local.items():
            parts += _parts(place, data[place], is_prepared(paths[0]), length, args)
    else:
        parts = [part_of_conversations(place, data[place], positions, length) for place in data]
    with evaluation_accelerator(device, dist_timeout=600) as accelerator:
        sums = score(accelerator, model, parts, tokenizer.piece_bytes(), args.batch_size)
    if rank == 0:
        with printing():
            _print_results(sums, parts, path, args.json)


def _score_tasks(args: Eval, cache: ObjectCache, device: str, rank: int) -> None:
    """Print the scores of --tasks, whose questions the processes share."""
    import torch

    from minimind.config.tasks import read_tasks
    from minimind.engine.build import evaluation_accelerator
    from minimind.engine.compile import compute_in
    from minimind.inference.own_tasks import HeldOutText
    from minimind.inference.questions import Questions
    from minimind.inference.scores import Shares, fields_of
    from minimind.runtime.collectives import Ranks

    asked = read_tasks(args.tasks, "--tasks")
    model, tokenizer, path = args.load()
    with _copied(tokenizer) as folder:
        opened = (tokenizer, folder, None, args, rank)
        limit = RunConfig.eval_tasks_limit if args.limit is None else args.limit
        questions = Questions.of(
            asked,
            lambda: HeldOutText.of(*_held_out(args, path, cache, opened)),
            tokenizer,
            model.config.max_position_embeddings,
            limit,
            "--tasks",
        )
    for one in asked:
        if one.as_chat:
            require_template(tokenizer, path, f"--tasks {one.name}:chat")
    with evaluation_accelerator(device, dist_timeout=600) as accelerator:
        of_weights = "float32" if args.dtype == MIXED else args.dtype
        model.to(accelerator.device, getattr(torch, of_weights))
        compute_in(args.dtype, model, accelerator.device.type)
        ranks = Ranks(timedelta(seconds=600))
        shares = Shares(
            group=ranks.rank, size=ranks.world_size, add=ranks.sum_over_ranks, gather=ranks.gather
        )
        found = fields_of(questions.scores(model, shares))
    if rank:
        return
    with printing():
        if args.json:
            print(json.dumps({"model": str(path), **found}, ensure_ascii=False))
            return
        print(f"{path}\n{aligned(scores_table(found), '<>')}")


def _score_lm_eval(args: Eval, device: str, processes: int) -> None:
    """Evaluate tasks and print lm-eval's table, or its results as JSON.

    Raise UsageError if several processes were started, or for --chat without a chat template.
    """
    if processes > 1:
        raise UsageError(
            f"--lm_eval runs in one process, and {processes} were started; start it without the"
            " launcher"
        )
    way_out = "`lm_eval ls tasks` lists the tasks of lm-eval, and --include_path DIR adds a folder"
    manager = manager_of(args.lm_eval, args.include_path, "--lm_eval", way_out)
    model, tokenizer, path = args.load()
    if args.chat:
        require_template(tokenizer, path, "--chat")
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    from minimind.inference.scores import Shares
    from minimind.inference.shared_lm import SharedLM

    model.config.doc_mask = False  # a request is one document
    evaluate: Any = simple_evaluate  # its decorator hides its parameters, like HFLM's
    shared = SharedLM(
        model.to(device), transformers_tokenizer(tokenizer), Shares(), args.batch_size
    )
    try:
        found = evaluate(
            model=shared,
            tasks=args.lm_eval,
            task_manager=manager,
            limit=args.limit,
            apply_chat_template=args.chat,
            log_samples=False,
        )
    except OSError as error:
        if (
            error.errno is not None
        ):  # of a disk; those of `datasets` for a Hub out of reach have none
            raise
        raise unread(f"--lm_eval {' '.join(args.lm_eval)}", error) from error
    with printing():
        if args.json:
            print(json.dumps({"model": str(path), "chat": args.chat, "tasks": found["results"]}))
        else:
            print(f"{path}\n{make_table(found)}")


def _held_out(
    args: Eval, path: Path, cache: ObjectCache, opened: tuple[Any, ...]
) -> tuple[Prepared, str]:
    """The text of --data_path, or of the run of a checkpoint, and its split."""
    from minimind.checkpoint.directory import step_of
    from minimind.data.prepare.prepared import is_prepared
    from minimind.data.prepare.remote import local_data
    from minimind.recovery.step_rows import documents_of, read_run

    if args.data_path:
        if len(args.data_path) > 1:
            raise UsageError(
                f"--tasks reads one text, and --data_path names {len(args.data_path)}; give one"
            )
        ((place, paths),) = local_data(args.data_path, cache).items()
        split = "train" if not is_prepared(paths[0]) or args.split == "train" else "val"
        return _open_data(place, paths, *opened), split
    if args.checkpoint is None:
        raise UsageError("--tasks of held-out text needs --data_path with --model; name some text")
    log = read_run(path.parents[1])
    stretch = log.at(step_of(path))
    return documents_of(stretch, cache=cache).prepared, "val"


def _set_documents(model: Any, is_chat: bool) -> None:
    """Leave the documents of a row to `score`; raise UsageError for a model that ignores them."""
    from minimind.architecture.hf_models import require_separate_documents
    from minimind.model.configuration import MiniMindConfig

    if isinstance(model.config, MiniMindConfig):
        model.config.doc_mask = False
    elif is_chat:
        require_separate_documents(model)


@contextmanager
def _copied(tokenizer: Tokenizer) -> Iterator[str]:
    """A temporary folder with the tokenizer files: a running job may delete the original."""
    from minimind.data.tokenizer.vocabulary import write_tokenizer

    with storing("a temporary folder", "name another place by TMPDIR"):
        folder = TemporaryDirectory()
    with folder as directory:
        write_tokenizer(directory, tokenizer.files())
        yield directory


def _open_data(
    place: str,
    paths: tuple[str, ...],
    tokenizer: Tokenizer,
    folder: str,
    template: ChatTemplate | None,
    args: Eval,
    rank: int,
) -> Prepared:
    """Tokens of a prepared folder, or of raw text or conversations through the cache.

    `paths` are local files of `place`, `folder` has those of the tokenizer; only rank 0 prints.
    """
    from minimind.data.chat.template import date_of
    from minimind.data.prepare.prepare import PrepareRequest, prepare_for_run
    from minimind.data.prepare.prepared import holds_conversations, is_prepared, open_text
    from minimind.data.shards.manifest import Options
    from minimind.data.text.inputs import Source, print_left_out
    from minimind.data.tokenizer.load import longest_document

    if is_prepared(paths[0]):
        path = Path(paths[0]).expanduser()
        if template is not None:
            raise UsageError(
                f"{place}: holds prepared conversations; give the files themselves"
                if holds_conversations(path)
                else f"{place}: holds text, and --task sft reads files of conversations; remove"
                " --task sft"
            )
        prepared = open_text(path)
        if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{place}: was prepared with another tokenizer than the model's; prepare its text"
                f" again with --tokenizer {tokenizer.path}, or give the text itself"
            )
        if rank == 0:
            _print_notices(place, prepared)
        return prepared
    if args.split not in (None, "all"):
        raise UsageError(f"--split {args.split}: {place} is raw text; remove --split")
    max_bytes = args.max_document_bytes or longest_document(folder)
    conversations = {}
    if template is not None:
        conversations = {
            "chat_template": template.source,
            "train_on": args.in_force("train_on"),
            "template_date": date_of(template.source, args.template_date),
            "chat_template_kwargs": args.chat_template_kwargs,
        }
    options = Options(
        text_field=args.text_field, max_document_bytes=max_bytes, val_fraction=0.0, **conversations
    )
    request = PrepareRequest(
        (Source("data", paths),),
        folder,
        options=options,
        skips_bad=args.on_bad_data == "skip",
        max_bad_fraction=args.max_bad_fraction,
        allow_lossy=args.allow_lossy_tokenizer,
        progress=rank == 0,
    )
    prepared = prepare_for_run(request, Path(args.cache_dir).expanduser())
    if rank == 0:
        print_left_out(paths)
        _print_notices(place, prepared)
    return prepared


def _print_notices(place: str, prepared: Prepared) -> None:
    """Say which documents, keys of conversations and parts of the text are not evaluated."""
    from minimind.data.tokenizer.lossless import loss_lines

    lines = []
    rejected = prepared.manifest["rejected"]
    if bad := rejected["count"]:
        count = f"{bad:,} of {bad + prepared.manifest['documents']:,} documents"
        lost = f", {rejected['bytes']:,} bytes are lost" if rejected["bytes"] else ""
        lines.append(f"{count} are bad and skipped{lost}, the first: {prepared.first_rejected}")
    lines += prepared.remarks
    if ignored := prepared.manifest.get("ignored"):
        lines.append(f"ignored keys beside the turns: {', '.join(ignored)}")
    for line in [*lines, *loss_lines(prepared.manifest["sources"])]:
        print(f"{place}: {line}", file=sys.stderr)


def _parts(place: str, prepared: Prepared, is_folder: bool, length: int, args: Eval) -> list[Part]:
    """The windows of each split to be read."""
    from minimind.data.rows.batches import windows_of
    from minimind.inference.score import Part

    splits, sources = ("train",), prepared.manifest["sources"]
    names = (place,) * len(sources)
    if is_folder:
        splits = SPLITS[args.in_force("split")]
        prefix = f"{place}:" if len(args.data_path) > 1 else ""
        names = tuple(prefix + source["name"] for source in sources)
    parts = []
    for split in splits:
        shards = prepared.train if split == "train" else prepared.val
        eos_id = prepared.tokenizer.eos_id
        windows = windows_of(shards, length, eos_id, args.doc_mask, args.max_rows)
        means = tuple(prepared.mean_bytes(number, split) for number in range(len(sources)))
        if args.max_rows is not None:
            text_bytes = (None,) * len(sources)
        else:
            text_bytes = tuple(source["split_bytes"][split] for source in sources)
        parts.append(Part(windows, names, text_bytes, means))
    if not sum(len(part.windows) for part in parts):
        raise DataError(
            f"{place}: its {splits[0]} split holds no text; give --split train, or prepare it with"
            " a larger --val_fraction"
        )
    return parts


def _print_results(
    sums: Mapping[str, LossSums], parts: Sequence[Part], path: Path, as_json: bool
) -> None:
    from minimind.inference.score import figures_of

    named = {name: [part for part in parts if name in part.names] for name in sums}
    figures = {name: figures_of([one], named[name]) for name, one in sums.items()}
    total = figures_of([*sums.values()], parts)
    if "bytes" in total:
        is_exact = all(None not in part.text_bytes for part in parts)
        total["bytes_of"] = "text" if is_exact else "tokens"
    if as_json:
        by_source = {"by_source": figures} if len(sums) > 1 else {}
        print(json.dumps({"model": str(path), **total, **by_source}, ensure_ascii=False))
        return
    columns = {key: COLUMNS[key] for key in COLUMNS if key in total}
    rows = [["source", *(name for name, _ in columns.values())]]
    for name, one in [*figures.items(), *([("all", total)] if len(sums) > 1 else [])]:
        cells = ((one[key], form) for key, (_, form) in columns.items())
        rows.append([name, *("" if value is None else f"{value:{form}}" for value, form in cells)])
    print(f"{path}\n{aligned(rows, '<>')}")
    if total.get("bytes_of") == "tokens":
        print(
            "bits/byte: counted over the bytes of the tokens, as the bytes of the text are not"
            " known here"
        )
    if total.get("cut") or total.get("dropped"):
        print(
            f"longer than a row: {total['cut']:,} conversations are cut after an answer,"
            f" {total['dropped']:,} are left out"
        )
