"""`minimind generate`: one prompt, a conversation with a terminal, or a file of prompts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.arguments import at_least, positive, share
from minimind.errors import DataError, UsageError
from minimind.files import storing, write_whole
from minimind.prompts import read_prompts, read_text

if TYPE_CHECKING:
    from minimind.writing import Sampling, Written

Write = Callable[..., "Written"]


def add_parser(subs: Any) -> None:
    """`generate`."""
    added = subs.add_parser(
        "generate",
        help="text from a checkpoint or an exported model",
        description="Text from a checkpoint or an exported model, as it is generated. Without a"
        " prompt it asks for one at a terminal, and reads standard input elsewhere.",
        allow_abbrev=False,
    )
    add = added.add_argument
    add("--checkpoint", metavar="PLACE", help="a run's out_dir, or a step_ directory")
    add("--model", metavar="DIR", help="a directory with config.json, safetensors and a tokenizer")
    add("--prompt", help="text to continue; '' begins a new document")
    add("--prompt_file", "--prompt-file", metavar="FILE", help="the prompt is what this file has")
    told = "a prompt a line (blank ones passed over), or .jsonl with a prompt field"
    add("--prompts", metavar="FILE", help=f"{told}; answers as JSON lines, in order")
    add("--out", type=Path, metavar="FILE", help="where these go, instead of standard output")
    add("--force", action="store_true", help="replace an earlier --out")
    add("--batch_size", "--batch-size", type=at_least(1), default=16, help="prompts at once (16)")
    add("--max_new_tokens", "--max-new-tokens", type=at_least(1), default=100)
    likeliest = "0: always the likeliest token"
    add("--temperature", type=at_least(0.0), default=0.8, help=likeliest)
    many = "draw from so many of the likeliest tokens (default: 0, from all)"
    add("--top_k", "--top-k", type=at_least(0), default=0, help=many)
    mass = "draw from the likeliest tokens of this mass"
    add("--top_p", "--top-p", type=share, default=0.9, help=mass)
    again = "above 1: what the text has already is less likely"
    add("--repetition_penalty", "--repetition-penalty", type=positive, default=1.0, help=again)
    add("--stop", nargs="+", default=[], metavar="TEXT", help="end before any of these")
    add("--seed", type=at_least(0), default=42)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--debug", action="store_true", help="show tracebacks")


def run_generate(args: argparse.Namespace) -> int:
    """Print what is generated; from what, and how fast, on stderr."""
    given = [n for n in ("prompt", "prompt_file", "prompts") if getattr(args, n) is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} were both given; give one of them")
    if args.out and args.prompts is None:
        raise UsageError("--out is for the answers to --prompts; give that, or redirect the output")
    if "" in args.stop:
        raise UsageError("--stop '' would end before any text; leave it out")
    write, path = _writer(args)
    if args.prompts is not None:
        _answer(args, write, path)
    elif given or not sys.stdin.isatty():
        _continue(_prompt(args), write, path)
    else:
        _converse(write, path)
    return 0


def _writer(args: argparse.Namespace) -> tuple[Write, Path]:
    """What writes on prompts with the model that was named, and where that is."""
    from minimind.launch import Launch
    from minimind.load_model import load_model
    from minimind.train.setup import device_for
    from minimind.writing import write_on

    if args.out:
        _require_free(args.out, args.force)
    how = _sampling(args)
    device = device_for(args.device, "--device", Launch())
    model, tokenizer, path = load_model(args.checkpoint, args.model)
    model = model.to(device)

    def write(
        prompts: list[str], show: Callable[[str], None] | None = None, first: int = 1
    ) -> Written:
        return write_on(model, tokenizer, prompts, how, show, first=first)

    return write, path


def _sampling(args: argparse.Namespace) -> Sampling:
    from minimind.writing import Sampling

    return Sampling(
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        args.seed,
        args.top_k,
        args.repetition_penalty,
        tuple(args.stop),
    )


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return args.prompt
    if args.prompt_file is not None:
        return read_text(args.prompt_file, "--prompt_file")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError("standard input: not UTF-8; convert it, or use --prompt") from error


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _continue(prompt: str, write: Write, path: Path) -> None:
    """Print a prompt and its continuation."""
    _show(prompt)
    written = write([prompt], _show)
    print()
    print(f"[{path}, {written.speed:.0f} tokens/s]", file=sys.stderr)


def _converse(write: Write, path: Path) -> None:
    """Ask for prompts until Ctrl-D; Ctrl-C stops a text and not the program."""
    print(f"{path}: Ctrl-C stops a text, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
            _show(prompt)
            written = write([prompt], _show)
            print(f"\n[{written.speed:.0f} tokens/s]", file=sys.stderr)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _answer(args: argparse.Namespace, write: Write, path: Path) -> None:
    """Write a JSON line for each prompt of a file, in its order."""
    prompts = read_prompts(args.prompts, "--prompts")
    lines: list[str] = []
    tokens, seconds = 0, 0.0
    for start in range(0, len(prompts), args.batch_size):
        batch = prompts[start : start + args.batch_size]
        written = write(batch, None, start + 1)
        for prompt, text in zip(batch, written.texts, strict=True):
            line = json.dumps({"prompt": prompt, "completion": text}, ensure_ascii=False)
            lines.append(line)
            if not args.out:
                _show(f"{line}\n")
        tokens, seconds = tokens + written.tokens, seconds + written.seconds
    if args.out:
        with storing(str(args.out), "free some space, or give another --out"):
            write_whole(args.out, "".join(f"{line}\n" for line in lines).encode())
    speed = f"{tokens / max(1e-9, seconds):.0f} tokens/s"
    print(f"[{path}, {len(prompts)} prompts, {speed}]", file=sys.stderr)


def _require_free(out: Path, force: bool) -> None:
    if out.exists() and not (force and out.is_file()):
        remedy = "which --force does not replace" if force else "or --force to replace it"
        raise UsageError(f"--out {out} exists; give another file, {remedy}")
