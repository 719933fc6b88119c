"""`minimind chat`: talk to a fine-tuned model at a terminal, or ask it one question."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.cli.generate import load, show
from minimind.config.arguments import add_model, add_sampling, non_blank, non_empty
from minimind.errors import UsageError
from minimind.runtime.durable_files import printing
from minimind.runtime.terminal import phase

if TYPE_CHECKING:
    from minimind.inference.chat import Chat

HELP = "/reset begins anew, /save FILE writes it all, Ctrl-C stops an answer, Ctrl-D ends"


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
    text = "answer this text on standard output and exit"
    add("--once", type=non_blank, metavar="TEXT", help=text)
    add("--system", type=non_blank, metavar="TEXT", help="system message before the first turn")
    add(
        "--chat_template",
        type=non_empty,
        metavar="FILE",
        help="Jinja template instead of the stored one",
    )
    add_sampling(parser, max_new_tokens=512, temperature=0.7, what="answer")


def run_chat(args: argparse.Namespace) -> int:
    """Print the answers; what is not part of them goes to stderr."""
    if args.once is None and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError("standard input is no terminal; give --once")
    if args.chat_template is None:
        require_stored_template(args)
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


def require_stored_template(args: argparse.Namespace) -> None:
    """Raise UsageError if the model has no chat template; takes milliseconds."""
    from minimind.inference.stored_template import no_template, place_without_template

    if place := place_without_template(args.checkpoint, args.model, args.tokenizer):
        raise no_template(place)


def _load(args: argparse.Namespace) -> Chat:
    from minimind.inference.chat import Chat, template_of

    with phase("loading the model"):
        model, tokenizer, path, sampling = load(args)
    template = template_of(tokenizer, args.chat_template, path)
    return Chat(model, tokenizer, template, sampling, args.system)


def _answer(chat: Chat, line: str) -> None:
    """Do what a line asks for: a command, or an answer."""
    command, _, rest = line.strip().partition(" ")
    if not command:
        return
    if command == "/reset":
        chat.reset()
    elif command == "/save":
        _save(chat, rest.strip())
    elif command == "/help":
        print(HELP, file=sys.stderr)
    elif command.startswith("/"):
        print(f"{command}: no such command; {HELP}", file=sys.stderr)
    else:
        _ask(chat, line)


def _save(chat: Chat, name: str) -> None:
    if not name:
        print("/save needs a file; write /save talk.jsonl", file=sys.stderr)
        return
    try:
        chat.save(Path(name).expanduser())
        print(f"saved to {name}", file=sys.stderr)
    except UsageError as error:
        print(f"not saved: {error}", file=sys.stderr)
    except (OSError, RuntimeError, ValueError) as error:  # a disk, ~NAME, or a NUL in the name
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        print(f"not saved: {name}: {reason}; give another file", file=sys.stderr)


def _ask(chat: Chat, line: str) -> None:
    before = chat.forgotten
    try:
        chat.ask(line, show)
    except UsageError as error:
        print(error, file=sys.stderr)
        return
    except KeyboardInterrupt:
        show("\n")
        print("[stopped; question and answer are forgotten]", file=sys.stderr)
        return
    show("\n")
    if chat.forgotten > before:
        print(f"[the first {chat.forgotten} turns no longer fit the model]", file=sys.stderr)
