"""`minimind COMMAND`: tools for training runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from minimind.architecture.costs import ASSUMED_MFU, GPUS, known_gpu, named_gpu
from minimind.cli import data as data_commands
from minimind.cli import environment as environment_commands
from minimind.cli import evaluate as eval_commands
from minimind.cli import export as weight_commands
from minimind.cli import generate as generate_commands
from minimind.cli import init as init_commands
from minimind.cli import report as report_commands
from minimind.cli import serve as serve_commands
from minimind.cli import tokenizer as tokenizer_commands
from minimind.cli import train as train_commands
from minimind.config.arguments import (
    Parser,
    PrintCompletion,
    add_weights,
    at_least,
    is_of_other_locale,
    non_empty_path,
    parser_of,
    positive,
    share,
    size_in_bytes,
    utf8_fault,
)
from minimind.config.parse import equivalent_command, suggest
from minimind.config.paths import ORIGINS, naming_flags
from minimind.config.run_config import DISTRIBUTION
from minimind.errors import CheckpointError, Interrupted, RunError, UsageError, known_error
from minimind.runtime import disk
from minimind.runtime.durable_files import escape_unencodable, printing
from minimind.runtime.exit import leave
from minimind.runtime.panics import panics_caught
from minimind.runtime.terminal import guarded, print_traceback, printable, shorten_line
from minimind.runtime.urls import begins_as_url, masked, masked_text

EXAMPLE = "minimind generate --checkpoint out --prompt 'Once upon a time'"


@cache  # it takes longer than parsing
def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = Parser(
        prog="minimind",
        description="Pretrain small language models on DeepSpeed: train, evaluate, generate,"
        " export.",
        example=EXAMPLE,
    )
    parser.add_argument("--version", action="version", version=DISTRIBUTION)
    parser.add_argument("--print_completion", action=PrintCompletion, command="minimind")
    subs = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    train_commands.add_parsers(subs)
    init_commands.add_parser(subs)
    generate_commands.add_parser(subs)
    generate_commands.add_chat_parser(subs)
    serve_commands.add_parser(subs)
    _add_plan(subs)
    _add_checkpoint(subs)
    eval_commands.add_parser(subs)
    data_commands.add_parsers(subs)
    tokenizer_commands.add_parser(subs)
    weight_commands.add_parsers(subs)
    report_commands.add_parsers(subs)
    environment_commands.add_parser(subs)
    return parser


def _add_plan(subs: Any) -> None:
    parser = subs.add_parser(
        "plan",
        help="what fits: memory, communication and FLOPs of every ZeRO stage",
        description="Print memory, communication and FLOPs of every ZeRO stage, and which ones fit."
        " Takes the flags of train_pretrain.py too (--model, --dim, --batch_size, --dtype,"
        " --deepspeed_config, ...), with the same names and ranges.",
        example="minimind plan --model 104m --gpus 8 --memory 24GiB --batch_size 16",
    )
    add = parser.add_argument
    text = "processes, one per GPU"
    add("--gpus", "--world_size", type=at_least(1), default=1, help=text)
    text = "memory of one GPU: 24GiB, 24GB (10^9 bytes), 80G (as GiB), 512MiB (default: that of"
    text += " --gpu_model)"
    add("--memory", type=size_in_bytes, help=text)
    text = "model of the GPUs, for memory and peak (also h100, 4090, a100-40gb)"
    names = [gpu.name for gpu in GPUS if gpu.memory]
    add("--gpu_model", type=named_gpu, choices=names, help=text)
    text = "10^12 FLOPs a second of one GPU in --dtype, dense (default: that of --gpu_model)"
    add("--peak_tflops", type=positive, help=text)
    text = "fraction of the peak that is reached"
    add("--mfu", type=share, help=f"{text} (default {ASSUMED_MFU})")
    add("--tokens", type=positive, help="tokens to train on, such as 1e9")


def _add_checkpoint(subs: Any) -> None:
    group = subs.add_parser(
        "checkpoint",
        help="list | verify | diff | consolidate | average | prune",
        description="Contents of a run's folder, and whether they are intact. No GPU is needed.",
        example="minimind checkpoint verify out",
    )
    actions = group.add_subparsers(dest="action", required=True, parser_class=Parser)

    def add_action(name: str, text: str, words: str = "out") -> Callable[..., Any]:
        example = f"minimind checkpoint {name} {words}"
        parser = actions.add_parser(name, help=text, description=f"{text}.", example=example)
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        if name not in ("diff", "average"):
            parser.add_argument("place", nargs="?", help="a run's out_dir, or a step_ directory")
            parser.add_argument("--checkpoint", metavar="PLACE", help="same as place")
        return parser.add_argument

    text = (
        "List checkpoints, newest first, and why each is kept; then those set aside or unfinished"
    )
    add = add_action("list", text)
    add("--verify", action="store_true", help="also verify the hash of every file")
    add("--json", action="store_true", help="print a JSON list")

    add_action("verify", "Verify the hash and the content of every file; status 4 for any damage")

    text = "Compare two checkpoints; status 0 if they are equal, else 1"
    add = add_action("diff", text, "out/a out/b")
    add("places", nargs="+", metavar="PLACE", help="two out_dirs or step_ directories")

    text = "Merge the shards into safetensors files, after verifying their hashes"
    consolidate = add_action("consolidate", text, "out --out out/whole")
    text = "Write the mean of the weights of several checkpoints as safetensors files"
    average = add_action("average", text, "out/a out/b --out out/mean")
    text = "out_dirs or step_ directories, two or more"
    average("places", nargs="+", metavar="PLACE", help=text)
    for add in (consolidate, average):
        add_weights(add)
        add("--out", type=non_empty_path, required=True, help="new output folder")
        text = "dtype of the tensors"
        add("--dtype", choices=("float32", "bfloat16"), default="float32", help=text)
        text = "maximum size of a file"
        add("--max_shard_size", type=size_in_bytes, default="2GB", help=text)
        add("--force", action="store_true", help="replace an earlier --out")

    text = "Delete older checkpoints and leftovers; status 8 while the run is active"
    add = add_action("prune", text, "out --keep 2 --dry_run")
    add("--keep", type=at_least(1), help="newest valid checkpoints to keep (default: as the run)")
    text = "also keep multiples of this step; 0: none (default: as the run)"
    add("--keep_every", type=at_least(0), help=text)
    text = "also keep this many by validation loss; 0: none (default: as the run)"
    add("--keep_best", type=at_least(0), help=text)
    text = "only print what would be deleted"
    add("--dry_run", action="store_true", help=text)


def run_plan(args: argparse.Namespace) -> None:
    """Print what every ZeRO stage needs, and the command to start."""
    from minimind.architecture.plan import Machine, plan

    gpu = args.gpu_model and known_gpu(args.gpu_model)
    peak = args.peak_tflops or (gpu.peak_tflops if gpu else None)
    memory = args.memory or (gpu.memory * 2**30 if gpu else None)
    machine = Machine(args.gpus, memory, peak, args.mfu, args.tokens)
    print(plan(args.run_flags, machine))


def run_checkpoint(args: argparse.Namespace) -> int:
    """Run `minimind checkpoint ACTION` and return its exit status."""
    from minimind.cli import checkpoint as checkpoint_commands

    return checkpoint_commands.ACTIONS[args.action](args)


TAKE_RUN_FLAGS = ("plan", "train", "launch", "coord_check")
# Arguments that may not be URLs, unlike text, prepared data and prompts.
OF_THIS_HOST = ("checkpoint", "model", "place", "places", "run", "source", "sweep", "out")
OF_THIS_HOST += ("out_dir", "tokenizer", "chat_template", "prompts", "prompt_file", "sources")
OF_THIS_HOST += ("cache_dir", "classifier")
# Where a name of a flag of a run has another meaning.
OF_COMMANDS = {
    "import": {"source": CheckpointError},
    "checkpoint": {"place": CheckpointError, "places": CheckpointError},
    **{name: {"model": CheckpointError} for name in ("generate", "chat", "serve", "eval")},
}
COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "train": train_commands.run_train,
    "launch": train_commands.run_launch,
    "init": init_commands.run_init,
    "sweep": train_commands.run_sweep,
    "coord_check": train_commands.run_coord_check,
    "generate": generate_commands.run_generate,
    "chat": generate_commands.run_chat,
    "serve": serve_commands.run_serve,
    "eval": eval_commands.run_eval,
    "plan": run_plan,
    "checkpoint": run_checkpoint,
    "prepare": data_commands.run_prepare,
    "data": data_commands.run_data,
    "tokenizer": tokenizer_commands.run,
    "export": weight_commands.run_export,
    "import": weight_commands.run_import,
    "report": report_commands.run_report,
    "doctor": report_commands.run_doctor,
    "scaling": report_commands.run_scaling,
    "env": environment_commands.run_env,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    escape_unencodable()
    with guarded():
        return _run(sys.argv[1:] if argv is None else list(argv))


def _require_paths(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Raise UsageError for a URL in place of a path: it would make a folder like "s3:"."""
    given: set[str] = set()  # arguments as paths, which join the slashes of a URL
    for value in (getattr(args, name, None) for name in OF_THIS_HOST):
        values = value if isinstance(value, list) else [value]
        given |= {str(Path(item)) for item in values if isinstance(item, str | Path)}
    for text in (re.sub(r"^--?\w+=", "", word) for word in argv):
        is_url = begins_as_url(text) and str(Path(text)) in given
        if is_url and not disk.seems_there(text):
            raise UsageError(
                f"{masked(text)}: is a URL, and a path of this host is needed; give one"
            )


def _run(argv: list[str]) -> int:
    try:
        if word := next(filter(is_of_other_locale, argv), None):
            raise UsageError(f"{word!a} {utf8_fault(word)}")
        if argv and argv[0][:1] != "-" and argv[0] not in COMMANDS:
            every = "minimind --help lists every command"
            hint = equivalent_command(argv[0]) or suggest(argv[0], [*COMMANDS], every)
            raise UsageError(f"unknown command {shorten_line(argv[0])}; {hint}")
        parser = build_parser()
        args, args.run_flags = parser.parse_known_args(argv)
        if args.run_flags and args.command not in TAKE_RUN_FLAGS:
            name, below = args.run_flags[0].partition("=")[0], parser_of(parser, argv)
            names = [*below._option_string_actions] if name.startswith("--") else []
            raise UsageError(
                f"unknown argument {name}; {suggest(name, names, f'see {below.prog} --help')}"
            )
        _require_paths(args, argv)
        origins = ORIGINS | OF_COMMANDS.get(args.command, {})
        with panics_caught(), naming_flags(vars(args), origins):
            status = COMMANDS[args.command](args) or 0
        with printing():
            print(end="", flush=True)  # a closed standard output is ignored
        return status
    except BrokenPipeError:  # the reader has ended (`| head`); Python must not flush to it either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return Interrupted.status
    except Exception as error:  # the one place that maps errors to a line and a status
        known = known_error(error)
        if "--debug" in argv or known is None:
            print_traceback(error)
        code = known.code if known else RunError.code
        text = masked_text(f"minimind: error[{code}]: {known or error}")
        print(printable(text), file=sys.stderr)
        return known.status if known else RunError.status


def run() -> NoReturn:
    """Run the command line and end the process."""
    at_once = False
    try:
        status = main()
    except SystemExit as end:  # of --help, or of a run
        status = end.code if isinstance(end.code, int) else 0
        at_once = status != 0
    leave(status, at_once)


if __name__ == "__main__":
    run()
