"""`minimind generate`: one prompt, a conversation with a terminal, or a file of prompts."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import add_model, at_least, finite, non_empty_path, penalty, share
from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.inference.prompts import prompt_of, read_prompts, read_text
from minimind.runtime.durable_files import printing, require_writable, storing, write_whole
from minimind.runtime.terminal import for_stdout, phase

if TYPE_CHECKING:
    from minimind.data.tokenizer.load import AnyTokenizer
    from minimind.inference.generate import Written
    from minimind.inference.sampling import Sampling


def add_parser(subs: Any) -> None:
    """`generate`."""
    added = subs.add_parser(
        "generate",
        help="text from a checkpoint or an exported model",
        description="Text from a checkpoint or an exported model, as it is generated. Without a"
        " prompt it asks for one at a terminal, and reads standard input elsewhere.",
        example="minimind generate --checkpoint out --prompt 'Once upon a time' --temperature 0.7",
    )
    add_model(added)
    add = added.add_argument
    add("--prompt", help="text to continue; '' begins a new document")
    add("--prompt_file", metavar="FILE", help="the prompt is what this file has")
    told = "a prompt a line (blank ones passed over), or .jsonl with a prompt field"
    add("--prompts", metavar="FILE", help=f"{told}; answers as JSON lines, in order")
    add(
        "--out",
        type=non_empty_path,
        metavar="FILE",
        help="where these go, instead of standard output",
    )
    add("--force", action="store_true", help="replace an earlier --out")
    add("--batch_size", type=at_least(1), default=16, help="prompts at once")
    add("--max_new_tokens", type=at_least(1), default=100, help="longest continuation")
    likeliest = "spread of the draw; 0: always the likeliest token"
    add("--temperature", type=finite, default=0.8, help=likeliest)
    many = "draw from so many of the likeliest tokens; 0: from all"
    add("--top_k", type=at_least(0), default=0, help=many)
    mass = "draw from the likeliest tokens whose probabilities add up to this; 1: from all"
    add("--top_p", type=share, default=0.9, help=mass)
    again = "above 1, tokens that the text has already become less likely; 1: off"
    add("--repetition_penalty", type=penalty, default=1.0, help=again)
    add("--stop", nargs="+", default=[], metavar="TEXT", help="end before any of these")
    drawn = "seed of the random numbers that each text draws its tokens by"
    add("--seed", type=at_least(0), default=42, help=drawn)


def run_generate(args: argparse.Namespace) -> int:
    """Print what is generated; from what, and how fast, on stderr."""
    given = [n for n in ("prompt", "prompt_file", "prompts") if getattr(args, n) is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} were both given; give one of them")
    if args.out and args.prompts is None:
        raise UsageError("--out is for the answers to --prompts; give that, or redirect the output")
    if "" in args.stop:
        raise UsageError("--stop '' would end before any text; leave it out")
    if args.out:
        _require_free(args.out, args.force, args.prompts)
    # Files are read before gigabytes of weights are.
    prompts = read_prompts(args.prompts, "--prompts") if args.prompts is not None else []
    prompt = args.prompt
    if args.prompt_file is not None:
        prompt = read_text(args.prompt_file, "--prompt_file")
    if not prompts and prompt is None and sys.stdin is not None and sys.stdin.isatty():
        _converse(args)
    elif prompts:
        _answer(args, prompts, _writer(args))
    else:
        writer = _writer(args)  # before standard input, which may be typed, is read for nothing
        _continue(_stdin() if prompt is None else prompt, writer)
    return 0


@dataclass(frozen=True)
class _Writer:
    """A model, and how it writes."""

    model: Any
    tokenizer: AnyTokenizer
    path: Path
    how: Sampling

    def write(
        self, prompts: Sequence[str], numbers: Sequence[int], show: Callable[[str], None] | None
    ) -> Written:
        """The continuations of prompts that have these numbers."""
        from minimind.inference.generate import write_on

        return write_on(self.model, self.tokenizer, prompts, self.how, show=show, numbers=numbers)

    def fault(self, prompt: str, number: int) -> RunError | None:
        """Why a prompt cannot be gone on with, if it cannot."""
        from minimind.inference.generate import ids_of

        try:
            ids_of(prompt, number, self.tokenizer, self.model.config.max_position_embeddings)
        except (UsageError, DataError) as error:
            return error
        return None


def _writer(args: argparse.Namespace) -> _Writer:
    from minimind.config.deepspeed.backend_choice import device_for
    from minimind.config.launcher_env import Launch
    from minimind.inference.load_model import load_model
    from minimind.inference.sampling import Sampling

    how = Sampling(
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        args.seed,
        args.top_k,
        args.repetition_penalty,
        tuple(args.stop),
    )
    device = device_for(args.device, "--device", Launch())
    model, tokenizer, path = load_model(args.checkpoint, args.model, args.tokenizer)
    return _Writer(model.to(device), tokenizer, path, how)


def _stdin() -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed; give --prompt")
    try:
        return prompt_of(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise DataError("standard input: not UTF-8; convert it, or use --prompt") from error


def _show(text: str) -> None:
    with printing():
        print(for_stdout(text), end="", flush=True)


def _continue(prompt: str, writer: _Writer) -> None:
    """Print a prompt and its continuation."""
    if fault := writer.fault(prompt, 1):
        raise fault
    _show(prompt)
    written = writer.write([prompt], [1], _show)
    _show("\n")
    print(f"[{writer.path}, {written.speed:.0f} tokens/s]", file=sys.stderr)


class _Loading:
    """A writer that is loaded in a thread, while the first prompt is typed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._future = self._pool.submit(_writer, args)
        self._is_asking = False
        self._future.add_done_callback(self._interrupt)

    def _interrupt(self, future: Future[_Writer]) -> None:
        """Where loading failed, end the wait for a prompt that nothing can be written to."""
        if self._is_asking and future.exception():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def failed(self) -> bool:
        """Whether there will be no writer; `get` raises why."""
        return self._future.done() and self._future.exception() is not None

    def ask(self) -> str:
        """The next prompt that is typed."""
        self._is_asking = True
        try:
            if self.failed():
                self.get()
            with printing():
                return input("> ")
        finally:
            self._is_asking = False

    def get(self) -> _Writer:
        """The writer, waited for."""
        with phase("loading the model", after=0.5):
            return self._future.result()


def _converse(args: argparse.Namespace) -> None:
    """Ask for prompts until Ctrl-D; Ctrl-C stops a text and not the program."""
    with suppress(ImportError):  # some builds of Python lack it
        import readline  # noqa: F401 (from here on input() has line editing and a history)
    print(f"{args.checkpoint or args.model}: Ctrl-C stops a text, Ctrl-D ends", file=sys.stderr)
    loading = _Loading(args)
    for number in count(1):
        try:
            prompt = loading.ask()
            writer = loading.get()
            if fault := writer.fault(prompt, number):
                print(fault, file=sys.stderr)
                continue
            _show(prompt)
            written = writer.write([prompt], [number], _show)
            print(f"\n[{writer.path}, {written.speed:.0f} tokens/s]", file=sys.stderr)
        except EOFError:
            return _show("\n")
        except UnicodeDecodeError as error:
            print(f"not UTF-8 ({error.reason}); type it again", file=sys.stderr)
        except KeyboardInterrupt:
            _show("\n")
            if loading.failed():
                loading.get()


def _answer(args: argparse.Namespace, prompts: list[str], writer: _Writer) -> None:
    """Write a JSON line for each prompt of a file, in its order.

    One that cannot be gone on with is answered with why, and told at the end as the error it is.
    """
    faults = {n: fault for n, p in enumerate(prompts, 1) if (fault := writer.fault(p, n))}
    if len(faults) == len(prompts):
        raise _refusal(args, faults, prompts)
    lines: list[str] = []
    tokens, seconds = 0, 0.0
    for start in range(0, len(prompts), args.batch_size):
        batch = dict(enumerate(prompts[start : start + args.batch_size], start + 1))
        good = {number: prompt for number, prompt in batch.items() if number not in faults}
        written = writer.write([*good.values()], [*good], None)
        texts = dict(zip(good, written.texts, strict=True))
        for number, prompt in batch.items():
            line = _line(prompt, texts.get(number), faults.get(number))
            lines.append(line)
            if not args.out:
                _show(line)
        tokens, seconds = tokens + written.tokens, seconds + written.seconds
    if args.out:
        with storing(str(args.out), "free some space, or give another --out"):
            write_whole(args.out, "".join(lines).encode())
    speed = f"{tokens / max(1e-9, seconds):.0f} tokens/s"
    print(f"[{writer.path}, {len(prompts) - len(faults)} prompts, {speed}]", file=sys.stderr)
    if faults:
        raise _refusal(args, faults, prompts)


def _refusal(
    args: argparse.Namespace, faults: Mapping[int, RunError], prompts: Sequence[str]
) -> RunError:
    first = next(iter(faults.values()))
    told = f"{len(faults)} of {len(prompts)} prompts cannot be gone on with, the first"
    return type(first)(f"--prompts {args.prompts}: {told}: {first}")


def _line(prompt: str, text: str | None, fault: RunError | None) -> str:
    told = {"prompt": prompt, "completion": text}
    if fault:
        told["error"] = str(fault)
    is_odd = fault is not None  # perhaps for what cannot be written as it is
    return json.dumps(told, ensure_ascii=is_odd) + "\n"


def _require_free(out: Path, force: bool, prompts: str) -> None:
    """Nothing, or what stands in the way of the answers, before they are worked for."""
    if os.path.lexists(out) and not (force and out.is_file()):
        remedy = "which --force does not replace" if force else "or --force to replace it"
        raise UsageError(f"--out {out} exists; give another file, {remedy}")
    if os.path.exists(out) and os.path.exists(prompts) and out.samefile(prompts):
        raise UsageError(f"--out {out} is where the prompts are; give another file")
    if not os.path.isdir(out.parent):
        raise StorageError(
            f"--out {out}: there is no folder {out.parent}; make it, or give another"
        )
    try:
        require_writable(out)
    except OSError as error:
        told = f"cannot be written ({error.strerror})"
        raise StorageError(f"--out {out}: {told}; give another file") from error
