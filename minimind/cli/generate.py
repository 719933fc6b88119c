"""`minimind generate` and `minimind chat`: continue prompts, or talk to a fine-tuned model."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import (
    add_model,
    add_sampling,
    at_least,
    json_variables,
    non_blank,
    non_empty,
    non_empty_path,
)
from minimind.errors import DataError, RunError, StorageError, UsageError
from minimind.inference.prompts import encode_prompt, read_prompts, read_text, strip_prompt
from minimind.runtime import disk
from minimind.runtime.durable_files import printing, require_writable, storing, write_whole
from minimind.runtime.terminal import for_stdout, phase

if TYPE_CHECKING:
    from minimind.inference.chat import Chat
    from minimind.inference.generate import GenerationResult, Sampling


# Defaults of the settings of a text, and of an answer.
TEXT: dict[str, Any] = {"max_new_tokens": 100, "temperature": 0.8}
ANSWER: dict[str, Any] = {"max_new_tokens": 512, "temperature": 0.7}


def add_parser(subs: Any) -> None:
    """Add the parser of `generate`."""
    parser = subs.add_parser(
        "generate",
        help="generate text with a checkpoint or an exported model",
        description="Generate text with a checkpoint or an exported model. Without a prompt, ask"
        " for one at a terminal, else read it from standard input.",
        example="minimind generate --checkpoint out --prompt 'Once upon a time' --temperature 0.7",
    )
    add_model(parser)
    add = parser.add_argument
    add("--prompt", help="text to continue; '' starts a document")
    add("--prompt_file", metavar="FILE", help="file whose content is the prompt")
    text = "one prompt per line (blank lines are skipped), or .jsonl with a prompt field"
    add("--prompts", metavar="FILE", help=f"{text}; prints JSON lines in order")
    text = "output file of --prompts (default: standard output)"
    add("--out", type=non_empty_path, metavar="FILE", help=text)
    add("--force", action="store_true", help="replace an earlier --out")
    add("--batch_size", type=at_least(1), default=16, help="prompts per batch")
    add_sampling(parser, **TEXT, what="text")
    add("--stop", nargs="+", default=[], metavar="TEXT", help="strings that end the text")


def run_generate(args: argparse.Namespace) -> int:
    """Print the generated text; the model's path and the speed go to stderr."""
    given = [n for n in ("prompt", "prompt_file", "prompts") if getattr(args, n) is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} were both given; give one of them")
    if args.out and args.prompts is None:
        raise UsageError("--out is for the answers to --prompts; give that, or redirect the output")
    if "" in args.stop:
        raise UsageError("--stop '' would end before any text; leave it out")
    if args.out:
        _check_out(args.out, args.force, args.prompts)
    # Files are read before gigabytes of weights are.
    if args.prompts is not None:
        prompts = read_prompts(args.prompts, "--prompts")
        _answer_file(args, prompts, _Generator(args))
        return 0
    prompt = args.prompt
    if args.prompt_file is not None:
        prompt = read_text(args.prompt_file, "--prompt_file")
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        _converse(args)
        return 0
    generator = _Generator(args)  # before standard input is read, which may be typed
    prompt = _read_stdin() if prompt is None else prompt
    if error := generator.check(prompt, 1):
        raise error
    speed = _continue(generator, prompt, 1)
    show("\n")
    print(speed, file=sys.stderr)
    return 0


def load(args: argparse.Namespace, stop: Sequence[str] = ()) -> tuple[Any, Any, Path, Sampling]:
    """The model on its device, its tokenizer, its path, and the settings of `add_sampling`."""
    from minimind.inference.generate import Sampling
    from minimind.inference.load_model import load_model

    names = ("max_new_tokens", "temperature", "top_p", "seed", "top_k", "repetition_penalty")
    sampling = Sampling(*(getattr(args, name) for name in names), stop=tuple(stop))
    device = device_of(args)
    model, tokenizer, path = load_model(args.checkpoint, args.model, args.tokenizer, args.weights)
    return model.to(device), tokenizer, path, sampling


def device_of(args: argparse.Namespace) -> Any:
    """The device of --device."""
    from minimind.config.deepspeed.backend_choice import device_for
    from minimind.config.launcher_env import Launch

    return device_for(args.device, "--device", Launch())


class _Generator:
    """A model and its sampling settings, loaded as the arguments specify."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.path, self.sampling = load(args, args.stop)

    def generate(
        self, prompts: Sequence[str], numbers: Sequence[int], on_text: Callable[[str], None] | None
    ) -> GenerationResult:
        """Continuations of the prompts with these numbers."""
        from minimind.inference.generate import generate_texts

        return generate_texts(
            self.model, self.tokenizer, prompts, self.sampling, on_text=on_text, numbers=numbers
        )

    def check(self, prompt: str, number: int) -> RunError | None:
        """The error that a prompt causes, if any."""
        try:
            max_positions = self.model.config.max_position_embeddings
            encode_prompt(prompt, number, self.tokenizer, max_positions)
        except (UsageError, DataError) as error:
            return error
        return None


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UsageError("standard input is closed; give --prompt")
    try:
        return strip_prompt(sys.stdin.read())
    except UnicodeDecodeError as error:
        raise DataError("standard input: not UTF-8; convert it, or use --prompt") from error


def show(text: str) -> None:
    """Print generated text at once, as it is."""
    with printing():
        print(for_stdout(text), end="", flush=True)


def _continue(generator: _Generator, prompt: str, number: int) -> str:
    """Print a prompt and its continuation as it is generated; return a line with the speed."""
    show(prompt)
    result = generator.generate([prompt], [number], show)
    return f"[{generator.path}, {result.tokens_per_second:.0f} tokens/s]"


class _Loading:
    """Load a model in a thread while the first prompt is typed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._future = ThreadPoolExecutor(max_workers=1).submit(_Generator, args)
        self._is_waiting = False
        self._future.add_done_callback(self._interrupt)

    def _interrupt(self, future: Future[_Generator]) -> None:
        """If loading failed, end the wait for a prompt."""
        if self._is_waiting and future.exception():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def raise_failure(self) -> None:
        if self._future.done():
            self._future.result()

    def read_prompt(self) -> str:
        self._is_waiting = True
        try:
            self.raise_failure()
            with printing():
                return input("> ")
        finally:
            self._is_waiting = False

    def wait(self) -> _Generator:
        with phase("loading the model", after=0.5):
            return self._future.result()


def _converse(args: argparse.Namespace) -> None:
    """Continue prompts from a terminal until Ctrl-D; Ctrl-C stops only the current text."""
    with suppress(ImportError):  # some builds of Python lack it
        import readline  # noqa: F401 (gives input() line editing and a history)
    print(f"{args.checkpoint or args.model}: Ctrl-C stops a text, Ctrl-D ends", file=sys.stderr)
    loading = _Loading(args)
    for number in count(1):
        try:
            prompt = loading.read_prompt()
            generator = loading.wait()
            if error := generator.check(prompt, number):
                print(error, file=sys.stderr)
            else:
                print(f"\n{_continue(generator, prompt, number)}", file=sys.stderr)
        except EOFError:
            return show("\n")
        except UnicodeDecodeError as error:
            print(f"not UTF-8 ({error.reason}); type it again", file=sys.stderr)
        except KeyboardInterrupt:
            show("\n")
            loading.raise_failure()


def _answer_file(args: argparse.Namespace, prompts: list[str], generator: _Generator) -> None:
    """Write a JSON line for each prompt of a file, in order.

    A prompt that cannot be continued gets an error in its line; the first of them is raised last.
    """
    errors = {n: error for n, p in enumerate(prompts, 1) if (error := generator.check(p, n))}
    summary = None
    if first := next(iter(errors.values()), None):
        text = f"{len(errors)} of {len(prompts)} prompts cannot be continued, the first"
        summary = type(first)(f"--prompts {args.prompts}: {text}: {first}")
        if len(errors) == len(prompts):
            raise summary
    lines: list[str] = []
    tokens, seconds = 0, 0.0
    for start in range(0, len(prompts), args.batch_size):
        batch = dict(enumerate(prompts[start : start + args.batch_size], start + 1))
        valid = {number: prompt for number, prompt in batch.items() if number not in errors}
        result = generator.generate([*valid.values()], [*valid], None)
        texts = dict(zip(valid, result.texts, strict=True))
        for number, prompt in batch.items():
            answer = {"prompt": prompt, "completion": texts.get(number)}
            if error := errors.get(number):
                answer["error"] = str(error)
            # A prompt in error may not be writable as it is.
            lines.append(json.dumps(answer, ensure_ascii=error is not None) + "\n")
            if not args.out:
                show(lines[-1])
        tokens, seconds = tokens + result.tokens, seconds + result.seconds
    if args.out:
        with storing(str(args.out), "give another --out"):
            write_whole(args.out, "".join(lines).encode())
    speed = f"{tokens / max(1e-9, seconds):.0f} tokens/s"
    print(f"[{generator.path}, {len(prompts) - len(errors)} prompts, {speed}]", file=sys.stderr)
    if summary:
        raise summary


def _has_answers(path: Path) -> bool:
    """Whether a file begins with a line that --out has; an empty one has nothing to lose."""
    if disk.is_symlink(path) or not disk.is_file(path):
        return False
    with open(path, "rb") as file:
        line = file.readline(2**24)
    return not line or (line.startswith(b'{"prompt": ') and b', "completion": ' in line)


def _check_out(out: Path, force: bool, prompts: str) -> None:
    """Raise UsageError or StorageError if the answers cannot be written to `out`."""
    if disk.same_file(out, prompts):
        raise UsageError(f"--out {out} is where the prompts are; give another file")
    if disk.lexists(out) and not force:
        raise UsageError(f"--out {out} exists; give another file, or --force to replace it")
    if disk.lexists(out) and not _has_answers(out):
        raise UsageError(
            f"--out {out} has no answers of `generate`, and --force replaces nothing else; give"
            " another file"
        )
    if not disk.is_dir(out.parent):
        raise StorageError(
            f"--out {out}: there is no folder {out.parent}; make it, or give another"
        )
    try:
        require_writable(out)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise StorageError(f"--out {out}: {reason}; give another file") from error


HELP = (
    "/reset begins anew, /think hides or shows thoughts, /save FILE writes it all, Ctrl-C stops an"
    " answer, Ctrl-D ends"
)


def add_chat_parser(subs: Any) -> None:
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
    text = "file with a JSON list of the tools that the model may call"
    add("--tools", type=non_empty_path, metavar="FILE", help=text)
    text = 'variables of the template as a JSON object, such as {"enable_thinking": false}'
    add("--chat_template_kwargs", type=json_variables, metavar="JSON", help=text)
    add(
        "--chat_template",
        type=non_empty,
        metavar="FILE",
        help="Jinja template, or name of a shipped one, instead of the stored one",
    )
    add_sampling(parser, **ANSWER, what="answer")


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
    from minimind.inference.chat import Chat, read_tools, template_of

    tools = read_tools(args.tools) if args.tools else None
    with phase("loading the model"):
        model, tokenizer, path, sampling = load(args)
    variables = args.chat_template_kwargs
    template = template_of(tokenizer, args.chat_template, path, variables=variables)
    return Chat(model, tokenizer, template, sampling, args.system, tools)


def _answer(chat: Chat, line: str) -> None:
    """Do what a line asks for: a command, or an answer."""
    command, _, rest = line.strip().partition(" ")
    if not command:
        return
    if command == "/reset":
        chat.reset()
    elif command == "/save":
        _save(chat, rest.strip())
    elif command == "/think":
        chat.shows_thoughts = not chat.shows_thoughts
        print(f"thoughts are {'shown' if chat.shows_thoughts else 'hidden'}", file=sys.stderr)
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
    if called := chat.called:
        print(f"[it calls {', '.join(called)}; type what that answers]", file=sys.stderr)
    if chat.forgotten > before:
        print(f"[the first {chat.forgotten} turns no longer fit the model]", file=sys.stderr)
