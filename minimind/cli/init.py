"""`minimind init`: a commented run.yaml for a text, a machine and the hours there are.

Nothing heavy is imported before the questions are answered.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

from minimind.architecture.costs import known_gpu, named_gpu
from minimind.cli.command import OutputFile, argument, count_of_bytes, non_empty, shared, utf8
from minimind.cli.plan import DATA_SHEETS
from minimind.config.flags import DEVICES, EVAL_TIME, FEWEST_PIECES, FIRST_EVAL_ROWS
from minimind.config.parse import build_config
from minimind.config.paths import shell_word
from minimind.config.rules import FEWEST_DOCUMENTS, held_out_of
from minimind.config.run_config import CONFIGS
from minimind.errors import DataError, RunError, UsageError
from minimind.report.formats import count
from minimind.runtime import disk
from minimind.runtime.durable_files import storing, write_whole
from minimind.runtime.installed import LAUNCH
from minimind.runtime.terminal import aligned, phase, printable, shorten_line
from minimind.runtime.urls import HUB_PREFIX, begins_as_url, masked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from minimind.architecture.choice import Choice, Size, Text
    from minimind.train.start import Plan

HOURS = 1.0
RECIPE = {"config": "strong"}
TOO_FEW = (
    f"nothing, so the run is not validated: it takes {FEWEST_DOCUMENTS} documents, such as a .jsonl"
    " file with a paragraph a line (a .txt file is one document), or --val_path of the run"
)
MARK = "# Written by `minimind init`"
SAMPLE_BYTES, PARTS = 2**20, 16  # of the text, in places that are spread over it
# Imports, tokenizer, first step and samples of a small text; on a GPU compiling too.
START_SECONDS = {"cpu": 30.0}
SLOWEST_START = 4.0  # 115 s with ten processes on each core
MOST_EVALUATIONS = 10  # of a run
LARGEST_TRIED = 26_700_000  # parameters of a run of the recipe `strong` that ended
MOST_TOKENS = 10**12  # for which the batch has the largest micro-batch of its rule
PREPARED_PER_SECOND = 2e6  # bytes of text per process, assumed
SLOWER = {"measured": 1.5, "assumed": 2.0}  # the far end of the forecast


@dataclass(kw_only=True)
class Init(OutputFile):
    """Write a commented run.yaml for your text, your machine and your time.

    It has the model, vocabulary and length of the run, each with its reason. What no flag gives is
    asked on a terminal.
    """

    example = "minimind init --data_path my_text.jsonl --hours 2"
    paths: list[str] = argument((), nargs="*", parse=non_empty, metavar="TEXT", is_positional=True)
    """text files or folders, or one of `minimind prepare`, as --data_path of a run"""
    data_path: list[str] = argument((), nargs="+", parse=non_empty, metavar="TEXT")
    """more text, as TEXT"""
    text_field: str | None = shared("text_field", default=None, parse=utf8, metavar="NAME")
    """field or column of the text"""
    max_document_bytes: int | None = argument(None, parse=count_of_bytes)
    """maximum bytes of a document in UTF-8 (default: 64MiB)"""
    on_bad_data: str | None = shared("on_bad_data", default=None)
    """stop at a bad document (error), or skip it, here and in the run"""
    hours: float | None = argument(None, gt=0, unset=HOURS)
    """hours from the command that starts the run to its end"""
    out: Path = argument(Path("run.yaml"))
    """YAML file to write; prompts for its samples are written beside it"""
    out_dir: str | None = argument(None, parse=non_empty, metavar="DIR")
    """folder of the run (default: out/ and the name of the text)"""
    gpus: int | None = argument(None, ge=1)
    """number of GPUs (default: all of this machine)"""
    gpu_model: str | None = argument(None, parse=named_gpu, choices=DATA_SHEETS, metavar="NAME")
    """model of the GPUs, such as H100 or 4090, also of another machine (default: the model in this
    machine); an unknown name lists the known ones"""
    device: str = argument("auto", choices=DEVICES)
    """where the run computes; auto uses a GPU if there is one"""
    yes: bool = argument(False)
    """ask nothing, and take the defaults"""
    force: bool = argument(False)  # the default of --out may be taken, too
    """replace a file that this command wrote at --out"""

    def execute(self) -> None:
        prompts = self._prompts_beside()
        self.data_path = [*self.paths, *self.data_path]
        _ask(self)
        self.out_dir = self.out_dir or _usual_folder(self.data_path)
        from minimind.architecture.choice import choose

        began = perf_counter(), process_time()
        prepared = prepared_folder(self)
        sample = (
            prepared_sample(prepared) if prepared else read_sample(self.data_path, **self.reading())
        )
        # What else runs slows the start, too.
        slowed = (perf_counter() - began[0]) / max(1e-3, process_time() - began[1])
        text = sample.text
        machine = find_machine(self, text.vocab_size)
        of_text = f"{_size(text.bytes)} in about {count(round(sample.documents), 'document')}"
        print(f"text       {shorten_line(' '.join(self.data_path), 50)}: {of_text}")
        print(f"machine    {machine.name}; {machine.how}", flush=True)
        start = START_SECONDS.get(machine.device, 60.0)
        start += 0 if prepared else text.bytes / PREPARED_PER_SECOND
        start *= min(max(slowed, 1.0), SLOWEST_START) if machine.kind == "measured" else 1.0
        with phase("trying tokenizers and the steps of models", after=0.5):
            room = partial(has_room, self.data_path, machine)
            choice = choose(text, self.in_force("hours"), start, machine.speed_of, room)
        step = machine.processes * choice.shape.max_seq_len
        if choice.tokens < step:
            raise DataError(
                f"{' '.join(self.data_path)}: gives {choice.tokens:,} tokens of training, fewer"
                f" than the {step:,} of one step on {machine.processes:,} processes; add text, or"
                " lower --gpus"
            )
        plan = rehearsed(self.data_path, machine, choice.size, choice.tokens)
        assert plan.schedule is not None  # --max_tokens decides it
        steps, rows = plan.schedule.total_steps, plan.run.rows_per_step(machine.processes)
        content = yaml_text(self, choice, sample, machine, prompts, steps, rows)
        with storing(str(self.out), "give another --out"):
            write_whole(self.out, content.encode())
            write_whole(prompts, "".join(f"{one}\n" for one in sample.prompts).encode())
        print(f"\n{expectation(choice, sample, machine, self.in_force('hours'), steps, rows)}\n")
        if disk.exists(Path(self.out_dir).expanduser() / "checkpoints"):
            print(
                f"note       {self.out_dir} holds a run, which continues only with its own"
                " settings;"
            )
            print("           for a new run give another --out_dir\n")
        is_named = self.gpus is not None or self.gpu_model is not None
        processes = f"NUM_PROCESSES={machine.processes} " if is_named else ""
        print(f"{self.out} explains each number. Start:")
        print(f"  {processes}{LAUNCH} --config {shell_word(self.out)}")

    def reading(self) -> dict[str, Any]:
        """The flags that are given on how the text is read."""
        names = ("text_field", "max_document_bytes", "on_bad_data")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _prompts_beside(self) -> Path:
        """Return the file of the prompts; raise UsageError if it or --out is taken."""
        self.require_free(self.out, lambda head: not head or head.startswith(MARK))
        self.require_place(self.out)
        prompts = self.out.with_suffix(".prompts.txt")
        if disk.lexists(prompts) and not disk.lexists(self.out):
            raise UsageError(
                f"--out {self.out}: {prompts}, which goes beside it, exists; give another"
            )
        return prompts


def _ask(args: Init) -> None:
    """Fill in text, hours and folder from the terminal; raise UsageError without one."""
    is_asked = not args.yes and not args.data_path
    if args.data_path:
        for path in args.data_path:
            _require_local(path)
    elif not (is_asked and sys.stdin.isatty()):
        raise UsageError(
            "no text is given, and minimind init only asks for it in a terminal; give --data_path"
            " TEXT... and --hours N"
        )
    if is_asked:
        while True:
            answer = _answer("Text: files or folders", "")
            try:
                words = shlex.split(answer)
                for path in words:
                    _require_local(path)
            except (RunError, ValueError) as error:  # ValueError: a quotation that is not closed
                print(f"  {error}")
                continue
            if words:
                break
        args.data_path = words
        while args.hours is None:
            with suppress(ValueError):
                hours = float(_answer("Hours you have", f"{HOURS:g}"))
                args.hours = hours if 0 < hours < float("inf") else None
            if args.hours is None:
                print("  give a number above 0, such as 2 or 0.5")
        if args.out_dir is None:
            args.out_dir = _answer("Folder of the run", _usual_folder(words))


def _usual_folder(paths: list[str]) -> str:
    return f"out/{Path(paths[0]).name.partition('.')[0] or 'text'}"


def _answer(question: str, default: str) -> str:
    hint = f" [{default}]" if default else ""
    try:
        return input(f"{question}{hint}: ").strip() or default
    except EOFError:
        print()  # the line of the question has not ended
        raise UsageError(
            "the input ended before every question was answered; give --data_path TEXT... and"
            " --hours N, or answer again"
        ) from None


def _require_local(path: str) -> None:
    """Raise UsageError for text of another machine, DataError for what is none."""
    if begins_as_url(path) or path.startswith(HUB_PREFIX):
        raise UsageError(
            f"--data_path {masked(path)}: is not on this machine, and init has to read a sample of"
            " it; fetch it, or give a local part of it"
        )
    from minimind.data.prepare.prepared import is_prepared
    from minimind.data.text.inputs import find_files

    if not is_prepared(path):
        find_files([path])


def prepared_folder(args: Init) -> Path | None:
    """The folder that `minimind prepare` wrote; raise UsageError for one among other text."""
    from minimind.data.prepare.prepared import is_prepared

    found = [path for path in args.data_path if is_prepared(path)]
    if not found:
        return None
    if len(args.data_path) > 1:
        raise UsageError(
            f"--data_path {found[0]}: was written by `minimind prepare` and cannot be combined with"
            " other text; give it alone"
        )
    for name, value in args.reading().items():
        raise UsageError(
            f"--{name} {value} has no effect on {found[0]}, which `minimind prepare` wrote;"
            f" remove --{name}"
        )
    return Path(found[0]).expanduser()


@dataclass(frozen=True)
class Sample:
    """What a sample of a text says of it."""

    text: Text
    documents: float
    prompts: list[str]  # openings of documents


def prepared_sample(folder: Path) -> Sample:
    """A sample of the training text of a folder, whose tokens are counted.

    Raise DataError for one of conversations.
    """
    from minimind.architecture.choice import Text
    from minimind.data.prepare.prepared import open_text

    prepared = open_text(folder)
    tokens, tokenizer = prepared.train, prepared.tokenizer
    ends = tokens.document_ends()
    every = max(1, len(ends) // PARTS)  # documents, of which there may be millions
    begins = [0, *ends[every - 1 : -1 : every].tolist()]
    most = SAMPLE_BYTES // max(1, len(begins)) // 4  # tokens of each
    places = [
        (begin, min(most, end - begin))
        for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True)
    ]
    texts = [tokenizer.decode(tokens.stretch(*place).tolist()) for place in places]
    splits = prepared.manifest["splits"]
    size, documents, counted = (
        sum(split[what] for split in splits.values())
        for what in ("text_bytes", "documents", "tokens")
    )
    held_out = splits["val"]["tokens"] / max(1, counted)
    text = Text(size, lambda _: size / max(1, counted), held_out, tokenizer.vocab_size)
    return Sample(text, documents, openings(texts))


def openings(texts: list[str]) -> list[str]:
    """Prompts for samples of the run."""
    found = (" ".join(text.split()[:4]) for text in texts)
    return [one for one in found if one and len(one) < 60][:3] or ["The"]


def read_sample(paths: list[str], on_bad_data: str = "error", **reading: Any) -> Sample:
    """Read about SAMPLE_BYTES of the text; raise DataError for what a run would refuse.

    `reading` has fields of ReadOptions.
    """
    from minimind.architecture.choice import Text
    from minimind.data.prepare.encode import documents_of, ignore, refuse
    from minimind.data.text.documents import ReadOptions
    from minimind.data.text.formats import segments_of
    from minimind.data.text.inputs import find_files, require_once

    files = find_files(paths)
    require_once(files)
    segments = [part for file in files for part in segments_of(file, SAMPLE_BYTES)]
    total = sum(part.weight for part in segments)
    every = max(1, -(-len(segments) // PARTS))
    chosen = segments[::every]
    most = SAMPLE_BYTES // len(chosen)
    options = ReadOptions(**reading)
    on_bad = ignore if on_bad_data == "skip" else refuse
    texts: list[str] = []
    text_bytes = read_bytes = 0
    for segment in chosen:
        size = read = before = 0
        for text, read, _ in documents_of([segment], options, on_bad):
            if segment.start and not before:  # the bytes before it are of another document
                before = read
                continue
            size += len(text.encode())
            texts.append(text[:most])
            if size >= most:
                break
        text_bytes += size
        read_bytes += read - before
    if not texts:
        raise DataError(
            f"--data_path {masked(paths[0])}: no document that was read is usable; remove"
            " --on_bad_data skip to see why"
        )
    joined = "\n".join(texts)
    quarter = max(1, len(joined) // 4)
    share = total / max(1, read_bytes)
    documents = len(texts) * share
    bytes_per_token = partial(_bytes_per_token, joined[:quarter], joined[quarter:])
    text = Text(text_bytes * share, bytes_per_token, held_out_of(documents))
    return Sample(text, documents, openings(texts))


def _bytes_per_token(held_out: str, training: str, vocab_size: int) -> float:
    """Bytes per token of a text, by a tokenizer that is trained on another."""
    from minimind.data.tokenizer.load import load_tokenizer
    from minimind.data.tokenizer.sentencepiece import train_tokenizer

    with TemporaryDirectory() as folder:
        path = Path(folder) / "sample.model"
        train_tokenizer([training], vocab_size, path)
        return len(held_out.encode()) / max(1, len(load_tokenizer(path).encode(held_out)))


@dataclass(frozen=True)
class Machine:
    """What a run is on here."""

    name: str
    device: str
    processes: int
    how: str  # how the speed is known
    kind: str  # measured or assumed
    speed_of: Callable[[Size, float], float]
    memory: int  # bytes for a process
    is_elsewhere: bool  # named, and perhaps not here

    @property
    def deepspeed_config(self) -> str:
        return "none" if self.processes == 1 or self.device == "cpu" else "zero2"


def rehearsed(data_path: list[str], machine: Machine, size: Size, max_tokens: int) -> Plan:
    """What the start of a run decides on a machine, which may be another than this."""
    from minimind.config.launcher_env import Launch
    from minimind.train.start import rehearse

    launch = Launch(world_size=machine.processes, is_elsewhere=machine.is_elsewhere)
    flags = {
        **RECIPE,
        "data_path": data_path,
        "max_tokens": max_tokens,
        "deepspeed_config": machine.deepspeed_config,
        "device": machine.device,
        "dry_run": True,
        **size.flags,
    }
    return rehearse(build_config(flags, "--{name}"), launch)


def has_room(data_path: list[str], machine: Machine, size: Size) -> bool:
    """Whether the memory of a machine suffices for a size, in the largest micro-batch of a run."""
    from minimind.architecture.costs import memory
    from minimind.architecture.plan import fits, layout_of

    plan = rehearsed(data_path, machine, size, MOST_TOKENS)
    layout = layout_of(plan.run, machine.processes, plan.resolved.config, machine.device)
    return fits(memory(size.shape(), layout), machine.memory)


def find_machine(args: Init, vocab_size: int | None = None) -> Machine:
    """The GPUs that are named or here, else two processes of the CPU, as the start takes them.

    `vocab_size` is that of the text, if it has a tokenizer.
    """
    from minimind.architecture.costs import ASSUMED_MFU
    from minimind.architecture.shape import flops_per_token

    gpu = known_gpu(args.gpu_model) if args.gpu_model else None
    device, processes, memory, name = "cuda", args.gpus or 1, 0, args.gpu_model
    is_elsewhere = gpu is not None
    if gpu is None:
        import torch

        from minimind.runtime.device import HOST, accelerator, device_kind

        kind = device_kind(args.device) if args.device != "auto" else accelerator()
        if not kind.is_available():
            if args.device not in ("auto", "cpu") or args.gpus:
                raise UsageError(
                    f"--device {args.device} --gpus {args.gpus or 1}: no such device is here; give"
                    " --gpu_model for another machine"
                )
            kind = HOST
        device, memory = kind.name, kind.memory()
        processes = args.gpus or max(1, kind.count()) if kind is not HOST else 2
        name = kind.model_of(torch.device(device))
        gpu = known_gpu(name) if device == "cuda" else None
        memory //= processes if kind is HOST else 1
    else:
        memory = gpu.memory * 2**30

    if gpu is not None:
        reached = ASSUMED_MFU * gpu.peak_tflops * 1e12 * processes  # FLOPs a second

        def assumed(size: Size, _: float) -> float:
            return reached / flops_per_token(size.shape())

        how = f"speed by an assumed {ASSUMED_MFU:.0%} of the peak, not measured"
        name = f"{processes} x {name}"
        return Machine(name, device, processes, how, "assumed", assumed, memory, is_elsewhere)
    from minimind.runtime.environment import usable_cores
    from minimind.sweep.step_time import measured_steps

    threads = max(1, usable_cores() // processes)
    measured = measured_steps([*measured_runs(vocab_size)], device, processes, threads)
    shown = "CPU processes" if device == "cpu" else device
    how = "speed measured in a few steps, beside whatever else runs now"

    def speed(size: Size, seconds: float) -> float:
        return speed_by_steps(size, seconds, processes, next(measured), next(measured))

    name = f"{processes} {shown}, {name}"
    return Machine(name, device, processes, how, "measured", speed, memory, is_elsewhere)


def measured_runs(vocab_size: int | None = None) -> Iterator[dict[str, Any]]:
    """The flags of the two runs of each size of the ladder whose steps are measured."""
    from minimind.architecture.choice import ladder

    recipe = {**RECIPE, "embedding_init": "random"}  # bigrams change no time, and need more pieces
    for size in ladder(vocab_size):
        pieces = max(FEWEST_PIECES, size.largest_vocab)  # the text's own tokenizer may have fewer
        for rows in (1, _most_rows(size)):
            yield {**recipe, "vocab_size": pieces, "batch_size": rows, **size.flags}


def _most_rows(size: Size) -> int:
    return max(2, 2048 // size.shape().max_seq_len)


def speed_by_steps(size: Size, seconds: float, processes: int, one: float, most: float) -> float:
    """Tokens per second of a run, by the time of a step of one row and of the most that are
    measured: the shorter the run, the fewer are the rows that share what each step takes.
    """
    from minimind.config.rules import suited_rows

    rows, length = _most_rows(size), size.shape().max_seq_len
    per_row = max(0.0, most - one) / (rows - 1)
    while True:
        speed = processes * rows * length / (one + (rows - 1) * per_row)
        tokens = int(speed * seconds)
        suited = suited_rows(processes, length, tokens, tokens // length, "Muon") // processes
        if suited >= rows or rows == 1:
            return speed
        rows = suited


def yaml_text(
    args: Init,
    choice: Choice,
    sample: Sample,
    machine: Machine,
    prompts: Path,
    steps: int,
    rows: int,
) -> str:
    """The file: a reason behind each value. `rows` are those of one of the steps."""
    from minimind.architecture.choice import MOST_EPOCHS

    data = json.dumps(args.data_path, ensure_ascii=False)
    per_parameter = choice.tokens / choice.shape.parameters
    text = sample.text
    bytes_per_token = text.bytes * (1 - text.held_out) / choice.text_tokens
    every = max(1, steps // MOST_EVALUATIONS)
    # Rows of the first evaluation. A forward pass takes a third of the time of a step, per token.
    tokens_of_one = FIRST_EVAL_ROWS * choice.shape.max_seq_len / 3
    affordable = int(EVAL_TIME * choice.tokens / tokens_of_one)
    evaluations = max(2, min(MOST_EVALUATIONS, affordable))
    recipe = (CONFIGS / "recipes" / "strong.yaml").read_text(encoding="utf-8")
    if choice.tokens < 500_000:
        recipe = recipe.replace("_rate: 0.008", "_rate: 0.002")
    if choice.shape.parameters > 2 * LARGEST_TRIED:
        untried = "; untried for so large a model: lower it if the loss jumps"
        recipe = re.sub(r"^(\w*_rate|muon_lr): .*", rf"\g<0>{untried}", recipe, flags=re.MULTILINE)
    lines = [
        f"{MARK} for {_size(text.bytes)} of text, {args.in_force('hours'):g} hours,",
        f"# and {machine.name}. Flags of the command line win over this file.",
        f"# Paths are as from {printable(os.getcwd())}, where it was written.",
        f"data_path: {data} # your text",
        _held_out_line(sample),
        *(
            f"{name}: {json.dumps(value, ensure_ascii=False)} # --{name}"
            for name, value in args.reading().items()
        ),
        f"out_dir: {json.dumps(args.out_dir, ensure_ascii=False)} # log, checkpoints, report",
        "",
        f"# The model: {choice.shape.parameters:,} parameters; {choice.limit} allows no more.",
        *(f"{name}: {value} # {choice.size.of}" for name, value in choice.size.flags.items()),
        f"vocab_size: {choice.vocab_size} # by the size of the text; {bytes_per_token:.2f} bytes"
        " per token in a sample"
        if text.vocab_size is None
        else f"# The tokenizer of the folder has {text.vocab_size:,} pieces, {bytes_per_token:.2f}"
        " bytes per token.",
        "",
        f"max_tokens: {choice.tokens} # {per_parameter:.3g} per parameter, {choice.epochs:.3g}"
        f" epochs (at most {MOST_EPOCHS:g})",
        f"# batch_size: auto, {rows} rows a step, chosen from the tokens of the run: about"
        f" {steps:,} steps",
        "# warmup_steps and weight_decay: as Muon has them by default",
        f"deepspeed_config: {machine.deepspeed_config} # fits"
        + (" without ZeRO, which takes longer" if machine.deepspeed_config == "none" else ""),
        f"save_interval: {every} # a tenth of the run; also every 30 minutes (save_minutes)",
        f"eval_interval: {-(-steps // evaluations)} # {evaluations} times",
        f"sample_interval: {max(1, steps // 4)} # a text for each prompt, four times",
        f"sample_prompts: {json.dumps(str(prompts), ensure_ascii=False)} # openings of your text",
    ]
    if args.device != "auto":
        lines.append(f"device: {args.device} # --device")
    return "\n".join([*lines, "", "# The recipe `strong`:", recipe])


def _held_out_line(sample: Sample) -> str:
    text = sample.text
    if text.vocab_size is not None:  # a prepared folder
        return f"# Held out when it was prepared: {text.held_out:.2%} of the tokens."
    documents = f"of about {sample.documents:,.0f} documents, for validation"
    which = "" if text.held_out else f", which takes {FEWEST_DOCUMENTS}"
    return f"val_fraction: {text.held_out:g} # {documents}{which}"


def expectation(
    choice: Choice, sample: Sample, machine: Machine, hours: float, steps: int, rows: int
) -> str:
    """The table of what to expect."""
    from minimind.architecture.choice import MOST_EPOCHS

    slowest = choice.hours * SLOWER[machine.kind]
    text, share = sample.text, sample.text.held_out
    is_validated, too_few = share > 0, TOO_FEW
    validated = f"{share:.2g} of the documents (about {share * sample.documents:,.0f})"
    if text.vocab_size is not None:
        kept = round(share * text.bytes / text.bytes_per_token(choice.vocab_size))
        is_validated = kept > choice.shape.max_seq_len
        validated = f"{share:.2g} of the tokens ({kept:,}), chosen when the text was prepared"
        too_few = "no row, so the run is not validated: prepare it with a larger --val_fraction"
    limit = f"{choice.limit} allows no larger model"
    if choice.epochs > 0.99 * MOST_EPOCHS:
        limit += f"; {MOST_EPOCHS:g} epochs of the text take less than {hours:g} hours: add text"
    table = {
        "model": f"{choice.size.name}, {choice.shape.parameters:,} parameters, vocabulary"
        f" {choice.vocab_size:,}",
        "tokens": f"{choice.tokens:,}, {choice.tokens / choice.shape.parameters:.3g} per parameter",
        "epochs": f"{choice.epochs:.3g} of {choice.text_tokens:,} tokens",
        "held out": validated if is_validated else too_few,
        "steps": f"about {steps:,} of {rows} rows of {choice.shape.max_seq_len} tokens",
        "hours": (
            f"{choice.hours:.2g} to {slowest:.2g} ({machine.kind}: {choice.tokens_per_second:,.0f}"
            " tokens/s)"
        ),
        "limit": limit,
    }
    lines = [(name, wrap(value, 80)) for name, value in table.items()]
    return aligned((name * (not n), part) for name, parts in lines for n, part in enumerate(parts))


def _size(text_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if text_bytes >= unit:
            return f"{text_bytes / unit:.3g} {name}"
    return f"{text_bytes:.0f} bytes"
