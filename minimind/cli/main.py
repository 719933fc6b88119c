"""`minimind SUB`: what is done with a run beside training it."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from minimind.cli import data as data_commands
from minimind.cli import evaluate as eval_commands
from minimind.cli import export as weight_commands
from minimind.cli import generate as generate_commands
from minimind.cli import report as report_commands
from minimind.cli import tokenizer as tokenizer_commands
from minimind.config.arguments import (
    Parser,
    PrintCompletion,
    at_least,
    non_empty_path,
    positive,
    share,
    size_in_bytes,
)
from minimind.config.run_config import DISTRIBUTION
from minimind.errors import Interrupted, RunError, UsageError, known_error
from minimind.runtime.durable_files import escape_unencodable, printing
from minimind.runtime.terminal import guarded, printable

EXAMPLE = "minimind generate --checkpoint out --prompt 'Once upon a time'"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = Parser(
        prog="minimind", description="Tools for runs of train_pretrain.py.", example=EXAMPLE
    )
    parser.add_argument("--version", action="version", version=DISTRIBUTION)
    parser.add_argument("--print_completion", action=PrintCompletion, command="minimind")
    subs = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    generate_commands.add_parser(subs)
    _add_plan(subs)
    _add_checkpoint(subs)
    eval_commands.add_parser(subs)
    data_commands.add_parsers(subs)
    tokenizer_commands.add_parser(subs)
    weight_commands.add_parsers(subs)
    report_commands.add_parser(subs)
    return parser


def _add_plan(subs: Any) -> None:
    plan = subs.add_parser(
        "plan",
        help="what fits: memory, communication and FLOPs of every ZeRO stage",
        description="Memory, communication and FLOPs of every ZeRO stage, and which one fits."
        " Takes the flags of train_pretrain.py too (--model, --dim, --batch_size, --dtype,"
        " --deepspeed_config, ...), of the same names and limits.",
        example="minimind plan --model 104m --gpus 8 --memory 24GiB --batch_size 16",
    )
    plan.add_argument(
        "--gpus", "--world_size", type=at_least(1), default=1, help="processes, one for each GPU"
    )
    plan.add_argument(
        "--memory",
        type=size_in_bytes,
        help="memory of one GPU: 24GiB, 24GB (10^9 bytes), 80G (as GiB), 512MiB",
    )
    plan.add_argument(
        "--peak_tflops", type=positive, help="10^12 FLOPs a second of one GPU in --dtype, dense"
    )
    plan.add_argument("--mfu", type=share, default=0.4, help="share of the peak that is reached")
    plan.add_argument("--tokens", type=positive, help="tokens to train on, say 1e9")


def _add_checkpoint(subs: Any) -> None:
    told = "What lies in a run's folder, and whether it is whole. No GPU is needed."
    group = subs.add_parser(
        "checkpoint",
        help="list | verify | diff | consolidate | prune",
        description=told,
        example="minimind checkpoint verify out",
    )
    actions = group.add_subparsers(dest="action", required=True, parser_class=Parser)

    def action(name: str, told: str, words: str = "out") -> argparse.ArgumentParser:
        example = f"minimind checkpoint {name} {words}"
        added = actions.add_parser(name, help=told, description=f"{told}.", example=example)
        added.add_argument("--debug", action="store_true", help="show tracebacks")
        if name != "diff":
            added.add_argument("place", nargs="?", help="a run's out_dir, or a step_ directory")
            added.add_argument("--checkpoint", metavar="PLACE", help="the same as the place")
        return added

    added = action("list", "What is there, newest first, with what stepped aside or is unfinished")
    added.add_argument("--verify", action="store_true", help="hash every file as well")
    added.add_argument("--json", action="store_true", help="for programs: a list of objects")

    action("verify", "Hash every file and look for gaps inside; status 4 for any damage")

    added = action(
        "diff", "How two checkpoints differ; status 0 if they do not, else 1", "out/a out/b"
    )
    added.add_argument("places", nargs="+", metavar="PLACE", help="two of them")

    added = action(
        "consolidate",
        "Write whole tensors as safetensors, once the hashes are verified",
        "out --out out/whole",
    )
    added.add_argument("--out", type=non_empty_path, required=True, help="a new folder")
    told = "precision of the numbers"
    added.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=told)
    added.add_argument(
        "--max_shard_size", type=size_in_bytes, default="2GB", help="largest size of a file"
    )
    added.add_argument("--force", action="store_true", help="replace an earlier --out")

    added = action(
        "prune",
        "Delete older checkpoints and leftovers; status 8 while the run goes on",
        "out --keep 2 --dry_run",
    )
    added.add_argument(
        "--keep", type=at_least(1), required=True, help="valid checkpoints that stay"
    )
    added.add_argument(
        "--dry_run", action="store_true", help="print what would be deleted, and delete nothing"
    )


def run_plan(args: argparse.Namespace) -> None:
    """Print what every ZeRO stage would need, and what to type."""
    from minimind.estimate.plan import Machine, plan

    machine = Machine(args.gpus, args.memory, args.peak_tflops, args.mfu, args.tokens)
    print(plan(args.run_flags, machine))


def run_checkpoint(args: argparse.Namespace) -> int:
    """The exit status of `minimind checkpoint ACTION`."""
    from minimind.cli import checkpoint as checkpoint_commands

    return checkpoint_commands.ACTIONS[args.action](args)


COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "generate": generate_commands.run_generate,
    "eval": eval_commands.run_eval,
    "plan": run_plan,
    "checkpoint": run_checkpoint,
    "prepare": data_commands.run_prepare,
    "data": data_commands.run_data,
    "tokenizer": tokenizer_commands.run,
    "export": weight_commands.run_export,
    "import": weight_commands.run_import,
    "report": report_commands.run_report,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    escape_unencodable()
    with guarded():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args, args.run_flags = build_parser().parse_known_args(words)
        if args.run_flags and args.command != "plan":
            raise UsageError(
                f"unknown argument {args.run_flags[0]}; see minimind {args.command} --help"
            )
        status = COMMANDS[args.command](args) or 0
        with printing():
            print(end="", flush=True)  # which lets a closed one be
        return status
    except BrokenPipeError:  # whoever read is gone (`| head`); nor may Python flush to nobody
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return Interrupted.status
    except Exception as error:  # the one place that turns an ending into a line and a status
        told = known_error(error)
        if "--debug" in words or told is None:
            traceback.print_exception(error)
        code = told.code if told else RunError.code
        print(printable(f"minimind: error[{code}]: {told or error}"), file=sys.stderr)
        return told.status if told else RunError.status


if __name__ == "__main__":
    sys.exit(main())
