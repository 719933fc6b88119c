"""`minimind generate` and `minimind chat`: continue prompts, or talk to a fine-tuned model."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from minimind.cli.command import OutputFile, argument, non_blank
from minimind.cli.model import ANSWER, OfChat, Sampled
from minimind.errors import DataError, RunError, UsageError
from minimind.inference.prompts import encode_prompt, read_prompts, read_text, strip_prompt
from minimind.runtime import disk
from minimind.runtime.durable_files import printing, storing, write_whole
from minimind.runtime.terminal import for_stdout, phase

if TYPE_CHECKING:
    from minimind.inference.chat import Chat as Conversation
    from minimind.inference.engine import GenerationResult


@dataclass(kw_only=True)
class Generate(Sampled, OutputFile):
    """Generate text with a checkpoint or an exported model.

    Without a prompt, ask for one at a terminal, else read it from standard input.
    """

    example = "minimind generate --checkpoint out --prompt 'Once upon a time' --temperature 0.7"
    or_text: ClassVar = ", or give a text to continue as --prompt"
    prompt: str | None = argument(
        None, excludes=dict.fromkeys(("prompt_file", "prompts"), "both are prompts")
    )
    """text to continue; '' starts a document"""
    prompt_file: str | None = argument(
        None, metavar="FILE", excludes={"prompts": "both are prompts"}
    )
    """file whose content is the prompt"""
    prompts: str | None = argument(None, metavar="FILE")
    """file with one prompt per line (blank lines are skipped), or .jsonl with a prompt field;
    prints JSON lines in order"""
    out: Path | None = argument(None, needs="prompts", metavar="FILE")
    """output file (default: standard output)"""
    batch_size: int = argument(16, ge=1)
    """prompts per batch; it does not change the random numbers of a prompt"""
    stop: list[str] = argument((), nargs="+", metavar="TEXT")
    """strings that end the text"""

    def execute(self) -> None:
        """Print the generated text; the model's path and the speed go to stderr."""
        if "" in self.stop:
            raise UsageError("--stop '' would end before any text; remove it")
        if self.out and self.prompts is not None:
            if disk.same_file(self.out, self.prompts):
                raise UsageError(f"--out {self.out} is the file of the prompts; give another file")
            self.require_free(self.out, _are_answers)
            self.require_place(self.out)
        # Files are read before gigabytes of weights are.
        if self.prompts is not None:
            prompts = read_prompts(self.prompts, "--prompts")
            _answer_file(self, prompts, _Generator(self))
            return
        prompt = self.prompt
        if self.prompt_file is not None:
            prompt = read_text(self.prompt_file, "--prompt_file")
        if prompt is None and sys.stdin is not None and sys.stdin.isatty():
            _converse(self)
            return
        generator = _Generator(self)  # before standard input is read, which may be typed
        prompt = _read_stdin() if prompt is None else prompt
        if error := generator.check(prompt, 1):
            raise error
        speed = _continue(generator, prompt, 1)
        show("\n")
        print(speed, file=sys.stderr)


def _are_answers(head: str) -> bool:
    """Whether a file begins as --out does; an empty one has nothing to lose."""
    line = head.partition("\n")[0]
    return not head or (line.startswith('{"prompt": ') and ', "completion": ' in line)


class _Generator:
    """A model and its sampling settings, loaded as the arguments specify."""

    def __init__(self, args: Generate) -> None:
        self.model, self.tokenizer, self.path, self.sampling = args.load_to_sample(args.stop)

    def generate(
        self, prompts: Sequence[str], numbers: Sequence[int], on_text: Callable[[str], None] | None
    ) -> GenerationResult:
        """Continuations of the prompts with these numbers."""
        from minimind.inference.engine import generate_texts

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

    def __init__(self, args: Generate) -> None:
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


def _converse(args: Generate) -> None:
    """Continue prompts from a terminal until Ctrl-D; Ctrl-C stops only the current text."""
    with suppress(ImportError):  # some builds of Python lack it
        import readline  # noqa: F401 (gives input() line editing and a history)
    print(f"{args.checkpoint or args.model}: Ctrl-C stops a text, Ctrl-D quits", file=sys.stderr)
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


def _answer_file(args: Generate, prompts: list[str], generator: _Generator) -> None:
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


HELP = (
    "/reset starts a new conversation, /think shows or hides thoughts, /save FILE saves the"
    " conversation, Ctrl-C stops an answer, Ctrl-D quits"
)


@dataclass(kw_only=True)
class Chat(OfChat, Sampled):
    """Talk to a model that was fine-tuned on conversations.

    Such a model is trained with --task sft, and its chat template is stored with it.
    """

    example = "minimind chat --checkpoint out/sft"
    once: str | None = argument(None, parse=non_blank, metavar="TEXT")
    """answer this text on standard output and exit"""
    system: str | None = argument(None, parse=non_blank, metavar="TEXT")
    """system message before the first turn"""
    tools: Path | None = argument(None, metavar="FILE")
    """file with a JSON list of the tools that the model may call"""
    max_new_tokens: int = argument(ANSWER["max_new_tokens"], ge=1)
    temperature: float = argument(ANSWER["temperature"], ge=0)

    def execute(self) -> None:
        """Print the answers; what is not part of them goes to stderr."""
        if self.once is None and (sys.stdin is None or not sys.stdin.isatty()):
            raise UsageError("standard input is not a terminal; give --once")
        chat = _load(self)
        if self.once is not None:
            chat.ask(self.once, show)
            show("\n")
            return
        with suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401 (gives input() line editing and a history)
        print(f"{self.checkpoint or self.model}: {HELP}", file=sys.stderr)
        while True:
            try:
                with printing():
                    line = input("> ")
                _answer(chat, line)
            except EOFError:
                show("\n")
                return
            except UnicodeDecodeError as error:
                print(f"not UTF-8 ({error.reason}); type it again", file=sys.stderr)
            except KeyboardInterrupt:
                show("\n")


def _load(args: Chat) -> Conversation:
    args.require_there()
    from minimind.inference.chat import Chat as Conversation
    from minimind.inference.chat import read_tools, template_of

    tools = read_tools(args.tools) if args.tools else None
    with phase("loading the model"):
        model, tokenizer, path, sampling = args.load_to_sample([])
    variables = args.chat_template_kwargs
    template = template_of(tokenizer, args.chat_template, path, variables=variables)
    return Conversation(model, tokenizer, template, sampling, args.system, tools)


def _answer(chat: Conversation, line: str) -> None:
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


def _save(chat: Conversation, name: str) -> None:
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


def _ask(chat: Conversation, line: str) -> None:
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
        print(f"[it calls {', '.join(called)}; type what the call returns]", file=sys.stderr)
    if chat.forgotten > before:
        print(f"[the first {chat.forgotten} turns no longer fit the model]", file=sys.stderr)
