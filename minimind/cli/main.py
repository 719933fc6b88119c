"""`minimind COMMAND`: tools for training runs."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn

from minimind.cli.checkpoint import CHECKPOINT
from minimind.cli.command import Command, Group, OfRunFlags, add_commands, command_of
from minimind.cli.compare import Compare
from minimind.cli.data import DATA, Prepare
from minimind.cli.environment import Env
from minimind.cli.evaluate import Eval
from minimind.cli.export import Export, Import
from minimind.cli.generate import Chat, Generate
from minimind.cli.init import Init
from minimind.cli.plan import Plan
from minimind.cli.report import Doctor, Report, Scaling
from minimind.cli.serve import Serve
from minimind.cli.tokenizer import TOKENIZER
from minimind.cli.train import CoordCheck, Launch, Sweep, Train, Tune
from minimind.config.command_line import Parser, PrintCompletion, parser_of, unknown_argument
from minimind.config.foreign_flags import equivalent_command
from minimind.config.names import is_of_other_locale, suggest, utf8_fault
from minimind.config.parse import CHOICES
from minimind.config.parse import build_parser as run_parser
from minimind.config.paths import ORIGINS, naming_flags
from minimind.config.run_config import DISTRIBUTION
from minimind.errors import Interrupted, RunError, UsageError, known_error
from minimind.runtime import disk
from minimind.runtime.durable_files import escape_unencodable, printing
from minimind.runtime.exit import leave
from minimind.runtime.panics import panics_caught
from minimind.runtime.terminal import guarded, print_traceback, printable, shorten_line
from minimind.runtime.urls import begins_as_url, masked, masked_text

EXAMPLE = "minimind generate --checkpoint out --prompt 'Once upon a time'"
COMMANDS: Mapping[str, type[Command] | Group] = {
    "train": Train,
    "launch": Launch,
    "sweep": Sweep,
    "tune": Tune,
    "coord_check": CoordCheck,
    "init": Init,
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "plan": Plan,
    "checkpoint": CHECKPOINT,
    "eval": Eval,
    "prepare": Prepare,
    "data": DATA,
    "tokenizer": TOKENIZER,
    "export": Export,
    "import": Import,
    "report": Report,
    "doctor": Doctor,
    "compare": Compare,
    "scaling": Scaling,
    "env": Env,
}
# Arguments that may not be URLs, unlike text, prepared data and prompts.
OF_THIS_HOST = ("checkpoint", "model", "place", "places", "source", "sweep", "out")
OF_THIS_HOST += ("out_dir", "tokenizer", "chat_template", "prompts", "prompt_file", "sources")
OF_THIS_HOST += ("cache_dir", "classifier")


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
    classes = {name: one for name, one in COMMANDS.items() if isinstance(one, type)}
    of_run = [name for name, one in classes.items() if issubclass(one, OfRunFlags)]
    completed = {"command": "minimind", "known": CHOICES, "run": run_parser, "of_run": of_run}
    parser.add_argument("--print_completion", action=PrintCompletion, **completed)
    subs = parser.add_subparsers(
        dest="command", required=True, parser_class=Parser, metavar="COMMAND"
    )
    add_commands(subs, COMMANDS)
    return parser


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
                f"{masked(text)}: is a URL, but only a local path works here; give one"
            )


def _run(argv: list[str]) -> int:
    try:
        if word := next(filter(is_of_other_locale, argv), None):
            raise UsageError(f"{word!a} {utf8_fault(word)}")
        parser = build_parser()
        if argv and argv[0][:1] != "-" and argv[0] not in COMMANDS:
            every = "minimind --help lists every command"
            hint = equivalent_command(argv[0]) or suggest(argv[0], [*COMMANDS], every)
            raise UsageError(f"unknown command {shorten_line(argv[0])}; {hint}")
        group = COMMANDS.get(argv[0]) if argv else None
        if isinstance(group, Group) and len(argv) > 1 and argv[1][:1] != "-":
            name, word = argv[:2]
            if word not in group.commands:
                hint = suggest(word, [*group.commands], f"see minimind {name} --help")
                raise UsageError(f"unknown command {name} {shorten_line(word)}; {hint}")
        if not argv or (len(argv) == 1 and isinstance(group, Group)):
            parser_of(parser, argv).print_help()  # which commands there are
            return UsageError.status
        args, others = parser.parse_known_args(argv)
        if others and not issubclass(args.command_class, OfRunFlags):
            raise UsageError(unknown_argument(parser_of(parser, argv), others[0]))
        _require_paths(args, argv)
        command = command_of(args, others)
        with panics_caught(), naming_flags(vars(command), ORIGINS | {**command.origins}):
            status = command.execute() or 0
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
