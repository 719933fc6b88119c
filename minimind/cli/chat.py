"""`minimind chat`: talk to a fine-tuned model at a terminal, or ask it one question."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.cli.generate import load, show
from minimind.config.arguments import add_model, add_sampling
from minimind.errors import UsageError
from minimind.runtime.durable_files import printing

if TYPE_CHECKING:
    from minimind.inference.chat import Chat

HELP = "/reset forgets the conversation, /save FILE writes it, Ctrl-C stops an answer, Ctrl-D ends"


def add_parser(subs: Any) -> None:
    """Add the parser of `chat`."""
    parser = subs.add_parser(
        "chat",
        help="talk to a model that was fine-tuned on conversations",
        description="Talk to a model that was fine-tuned on conversations (--task sft), by the chat"
        " template that is stored with it.",
        example="minimind chat --checkpoint out/sft",
    )
    add_model(parser)
    add = parser.add_argument
    add("--once", metavar="TEXT", help="answer this text on standard output and exit")
    add("--system", metavar="TEXT", help="system message before the first turn")
    add("--chat_template", metavar="FILE", help="Jinja template instead of the stored one")
    add_sampling(parser, max_new_tokens=512, temperature=0.7, what="answer")


def run_chat(args: argparse.Namespace) -> int:
    """Print the answers; what is not part of them goes to stderr."""
    if args.once is None and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError("standard input is no terminal; give --once")
    chat = _load(args)
    if args.once is not None:
        chat.ask(args.once, show)
        show("\n")
        return 0
    with suppress(ImportError):  # some builds of Python lack it
        import readline  # noqa: F401 (gives input() line editing and a history)
    print(f"{args.checkpoint or args.model}: {HELP}", file=sys.stderr)
    while True:
        try:
            with printing():
                line = input("> ")
            _answer(chat, line)
        except EOFError:
            show("\n")
            return 0
        except UnicodeDecodeError as error:
            print(f"not UTF-8 ({error.reason}); type it again", file=sys.stderr)
        except KeyboardInterrupt:
            show("\n")


def _load(args: argparse.Namespace) -> Chat:
    from minimind.inference.chat import Chat, template_of

    model, tokenizer, path, sampling = load(args)
    template = template_of(tokenizer, args.chat_template, path)
    return Chat(model, tokenizer, template, sampling, args.system)


def _answer(chat: Chat, line: str) -> None:
    """Do what a line asks for: a command, or an answer."""
    command, _, rest = line.strip().partition(" ")
    if not line.strip():
        return
    if command == "/reset":
        chat.reset()
        return
    if command == "/save" and rest:
        try:
            chat.save(Path(rest).expanduser())
        except (OSError, UsageError) as error:
            print(f"not saved: {error}", file=sys.stderr)
        return
    if command.startswith("/"):
        print(f"{command}: no such command; {HELP}", file=sys.stderr)
        return
    before = chat.forgotten
    try:
        chat.ask(line, show)
    except UsageError as error:
        print(error, file=sys.stderr)
    show("\n")
    if chat.forgotten > before:
        print(f"[the first {chat.forgotten} turns no longer fit the model]", file=sys.stderr)
