"""`minimind prepare` and `minimind data`: inspect or filter a text, find the text of a step."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.cli.command import (
    Cached,
    Group,
    OfRun,
    OfRunFlags,
    Output,
    argument,
    count_of_bytes,
    shared,
    utf8,
)
from minimind.cli.filter import Filter
from minimind.errors import DataError, Interrupted, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.object_cache import ObjectCache, open_cache
from minimind.runtime.terminal import aligned
from minimind.runtime.urls import masked

if TYPE_CHECKING:
    from minimind.data.prepare.inspect import Inspection
    from minimind.data.prepare.prepare import PrepareRequest
    from minimind.data.prepare.prepared import Prepared
    from minimind.recovery.documents import Documents, Place, Placed
    from minimind.recovery.step_rows import Row, RunLog


OPTIONS = ("text_field", "max_document_bytes", "val_fraction")
SHARES = "the shares decide it"
OVER_RANKS = "documents are counted over all ranks"
INSPECT = "minimind data inspect dataset/tokens"
BAR = 40  # characters of the longest bar


def _share(text: str) -> tuple[int, int]:
    """Parse `I/N` to (i, n), with i from 0; raise ArgumentTypeError otherwise."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I from 0 to N - 1")
    return int(part), int(parts)


@dataclass(kw_only=True)
class Prepare(Cached, Output):
    """Tokenize text into a folder of shards, for any number of runs.

    --data_path of a run takes the folder. The same command resumes after a kill. On several
    machines: --shard I/N on each, then --merge.
    """

    example = "minimind prepare my_text.jsonl --out dataset/tokens"
    paths: list[str] = argument((), nargs="*", metavar="PATH", is_positional=True)
    """text files, directories, globs or dataset directories"""
    data_path: list[str] = argument((), nargs="+", metavar="PATH")
    """more text, as PATH"""
    source: list[str] | None = argument(None, repeats="SOURCE", metavar="NAME=PATH")
    """a named source of text, also as NAME=PATH:WEIGHT; repeat the flag for more sources, or for
    more paths of one"""
    sources: Path | None = argument(None)
    """YAML file of sources: {NAME: {paths: [...], weight: 2}}"""
    tokenizer: str | None = argument(None, metavar="PATH")
    """tokenizer, a file or a directory (default: train one on the text)"""
    vocab_size: int | None = shared("vocab_size", default=None, ge=1, le=None)
    """number of pieces of a trained tokenizer"""
    val_fraction: float | None = shared("val_fraction", default=None)
    val_path: str | None = argument(None, parse=utf8, metavar="PATH")
    """text that is used for validation only, instead of --val_fraction; auto takes the validation
    parts of folders"""
    text_field: str | None = shared("text_field", default=None, parse=utf8, metavar="NAME")
    max_document_bytes: int | None = argument(None, parse=count_of_bytes)
    """maximum bytes of a document in UTF-8 (default: 64MiB; 2MiB with a Hugging Face --tokenizer,
    8MiB with a SentencePiece model that is not plain BPE, since these encode a document at once)"""
    on_bad_data: str | None = shared("on_bad_data", default=None)
    max_bad_fraction: float | None = shared("max_bad_fraction", default=None)
    """fraction of the documents that may be bad"""
    allow_lossy_tokenizer: bool = argument(False)
    """continue although the tokenizer loses more than 0.1 % of the text of a source"""
    shard: tuple[int, int] | None = argument(None, parse=_share, metavar="I/N")
    """encode share I (from 0) of N, and do not merge"""
    merge: bool = argument(
        False,
        excludes={
            "shard": "a share is merged when all are done",
            **dict.fromkeys(("paths", "data_path", "source", "sources"), SHARES),
            **dict.fromkeys(("tokenizer", "vocab_size", "val_path", *OPTIONS), SHARES),
            **dict.fromkeys(("on_bad_data", "shard_bytes", "processes", "ray"), SHARES),
        },
    )
    """merge the output of all --shard I/N"""
    shard_bytes: int | None = argument(None, parse=count_of_bytes)
    """bytes of input per shard file (default: from the total size, at least 16MiB)"""
    processes: int | None = argument(None, ge=1)
    """tokenizing processes (default: one per 8 cores)"""
    ray: str | None = argument(None, nargs="?", const="local", metavar="ADDRESS")
    """encode on Ray: on a cluster (auto, HOST:PORT, ray://HOST:PORT), or without a value on this
    host"""

    def execute(self) -> int:
        """Prepare and print a summary; raise Interrupted, naming what Ctrl-C leaves."""
        from minimind.data.prepare.dataset_folder import draft_of

        try:
            with open_cache(self.cache_dir, self.max_cache_gib) as cache:
                return _prepare(self, cache)
        except KeyboardInterrupt as stop:
            draft = draft_of(disk.resolve(self.out.expanduser()))
            if not disk.exists(draft):
                raise Interrupted("stopped before anything was written; run it again") from stop
            raise Interrupted(
                f"stopped; {draft} keeps what is done, and the same command resumes from it"
            ) from stop


def _prepare(args: Prepare, cache: ObjectCache) -> int:
    from minimind.data.prepare.dataset_folder import merge_folder, prepare_folder
    from minimind.data.prepare.ray_tasks import require_usable

    if args.ray is not None:
        require_usable(args.ray, args.shard, args.processes)
    if args.merge:
        policy = args.max_bad_fraction, args.allow_lossy_tokenizer
        prepared = merge_folder(args.out, args.force, *policy)
    else:
        prepared = prepare_folder(_request(args, cache), args.out, args.shard, args.force)
    if prepared is None:
        assert args.shard is not None
        part, parts = args.shard
        print(f"share {part} of {parts} is done; --merge when all are: {args.out}.part")
    else:
        _print_prepared(prepared)
    return 0


def _given(args: Prepare, names: Sequence[str]) -> dict[str, Any]:
    """Return the flags among these that were given."""
    values = ((name, getattr(args, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def _request(args: Prepare, cache: ObjectCache) -> PrepareRequest:
    from minimind.data.prepare.prepare import PrepareRequest
    from minimind.data.prepare.remote import local_text
    from minimind.data.shards.manifest import Options
    from minimind.data.text.inputs import (
        Source,
        join_sources,
        parse_source,
        print_left_out,
        read_sources,
        val_paths,
    )
    from minimind.data.tokenizer.load import longest_document

    paths = (*args.paths, *args.data_path)
    sources = [Source("data", paths)] if paths else []
    sources += [parse_source(text) for text in args.source or ()]
    sources += read_sources(args.sources) if args.sources else []
    if not sources:
        raise UsageError("no text was named; give PATHs, --source NAME=PATH or --sources FILE.yaml")
    given_paths = [path for one in sources for path in one.paths]
    print_left_out(given_paths, args.val_path)
    held_out = local_text(val_paths(args.val_path, given_paths), cache)
    sources = join_sources([replace(one, paths=local_text(one.paths, cache)) for one in sources])
    _require_same_vocab_size(args)
    most: dict[str, Any] = {"max_document_bytes": longest_document(args.tokenizer)}
    if held_out:
        if len(sources) > 1:
            raise UsageError(
                f"--val_path {args.val_path}: cannot be shared by {len(sources)} sources; remove"
                " it, or prepare a single source"
            )
        if args.val_fraction:
            raise UsageError(
                f"--val_path {args.val_path} and --val_fraction {args.val_fraction} both choose the"
                " validation text; remove one of them"
            )
        most["val_fraction"] = 0.0
    return PrepareRequest(
        sources,
        args.tokenizer,
        options=Options(**(most | _given(args, OPTIONS))),
        skips_bad=args.on_bad_data == "skip",
        allow_lossy=args.allow_lossy_tokenizer,
        unit_bytes=args.shard_bytes,
        processes=args.processes,
        ray=args.ray,
        val_path=held_out,
        **_given(args, ("vocab_size", "max_bad_fraction")),
    )


def _require_same_vocab_size(args: Prepare) -> None:
    """Raise UsageError if --vocab_size is not that of --tokenizer."""
    from minimind.data.tokenizer.load import load_tokenizer

    if args.tokenizer is None or args.vocab_size is None:
        return
    if args.vocab_size != (actual := load_tokenizer(args.tokenizer).vocab_size):
        raise UsageError(
            f"--vocab_size {args.vocab_size}: --tokenizer {args.tokenizer} has {actual}; leave one"
            " of them out"
        )


def _print_prepared(prepared: Prepared) -> None:
    manifest = prepared.manifest
    _print_sources(manifest["sources"])
    for split, counts in manifest["splits"].items():
        print(f"{split:<6} {counts['tokens']:>14,} tokens, {counts['documents']:,} documents")
    _print_rejected(manifest["rejected"])
    for remark in prepared.remarks:
        print(f"note   {remark}")
    _print_notices(manifest["sources"])
    print(f"done: --data_path {prepared.directory}")


def _print_rejected(rejected: dict[str, Any]) -> None:
    from minimind.data.shards.manifest import how_skipped

    if rejected["count"]:
        print(f"bad    {rejected['count']:>14,} {how_skipped(rejected)}: {rejected['first']}")


def _print_notices(sources: list[dict[str, Any]]) -> None:
    """Print what the tokenizer loses, and which sources of several have no held-out text."""
    from minimind.data.tokenizer.lossless import loss_lines

    for line in loss_lines(sources):
        print(f"lossy  {line}")
    held_out = {source["name"]: source["tokens"]["val"] for source in sources}
    if without := [name for name, tokens in held_out.items() if not tokens]:
        if len(without) < len(sources):
            print(
                f"note   no document of {', '.join(without)} is held out, so the validation loss"
                " says nothing about it; raise --val_fraction, or add documents"
            )


def _print_sources(sources: list[dict[str, Any]]) -> None:
    rows = [("source", "weight", "documents", "text", "tokens", "bytes/token")]
    for source in sources:
        text, tokens = source["text_bytes"], sum(source["tokens"].values())
        weight = "" if source["weight"] is None else f"{source['weight']:g}"
        sizes = (f"{source['documents']:,}", mebibytes(text), f"{tokens:,}")
        rows.append((source["name"], weight, *sizes, f"{text / max(1, tokens):.2f}"))
    print(aligned(rows, "<>"))


@dataclass(kw_only=True)
class Inspect(Cached):
    """Print counts, lengths, duplicates and rows; the status is 3 if a file has changed."""

    example = INSPECT
    directory: str = argument(metavar="DIR", is_positional=True)
    """a folder that `minimind prepare` wrote, or its URL"""
    rows: int = argument(3, ge=0)
    """number of rows shown as text"""
    row_tokens: int = argument(128, ge=1)
    """tokens shown per row"""
    no_verify: bool = argument(False)
    """do not hash the files again"""
    json: bool = argument(False)
    """print a JSON object"""

    def execute(self) -> int:
        with open_cache(self.cache_dir, self.max_cache_gib) as cache:
            return _inspect(self, cache)


def _inspect(args: Inspect, cache: ObjectCache) -> int:
    from minimind.data.prepare.inspect import damage, inspect
    from minimind.data.prepare.prepared import NEEDED, missing_of, open_prepared
    from minimind.data.prepare.remote import local_folder

    directory = Path(local_folder(args.directory, cache))
    missing = missing_of(directory)
    if len(missing) == len(NEEDED):
        raise DataError(
            f"{masked(args.directory)}: holds no prepared data; name a folder that `minimind"
            " prepare` wrote"
        )
    if missing:
        raise DataError(
            f"{masked(args.directory)}: has no {missing[0]}, so it is not prepared data; restore"
            " it, or prepare the text again"
        )
    damaged = [] if args.no_verify else list(damage(directory))
    if damaged:
        print("\n".join(f"{directory}: DAMAGED: {fault}" for fault in damaged))
        return DataError.status
    inspection = inspect(open_prepared(directory), args.rows, args.row_tokens)
    if args.json:
        print(inspection.to_json())
    else:
        _print_inspection(inspection)
        print("" if args.no_verify else "\nall files match their hashes")
    return 0


def _print_inspection(inspection: Inspection) -> None:
    _print_sources(inspection.sources)
    for split, counts in inspection.splits.items():
        print(f"{split:<6} {counts['tokens']:>14,} tokens, {counts['documents']:,} documents")
    _print_rejected(inspection.rejected)
    _print_notices(inspection.sources)
    print("\ntokens of a document, up to")
    most = max((count for _, count in inspection.lengths), default=1)
    for longest, count in inspection.lengths:
        print(f"{longest:>12,} {count:>12,} {'#' * -(-BAR * count // most)}")
    print(f"\n{inspection.duplicate_share:.2%} of {inspection.compared:,} documents repeat another")
    for duplicate in inspection.duplicates:
        print(f"{duplicate.times:>8,} times, {duplicate.tokens:,} tokens: {duplicate.text}")
    print("".join(f"\n{row}" for row in inspection.rows))


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B with 1 <= A <= B")
    return range(int(first), int(last) + 1)


def _line(text: str) -> tuple[str, int]:
    file, _, line = text.rpartition(":")
    if not (file and line.isdecimal() and int(line)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:LINE with lines from 1")
    return file, int(line)


@dataclass(kw_only=True)
class OfText(OfRun, Cached):
    """A command that looks up the text of a run."""

    data_path: str | None = argument(None, metavar="DIR")
    """folder or URL of the prepared text, if it is not where the run read it"""
    json: bool = argument(False)
    """print a JSON object"""


@dataclass(kw_only=True)
class At(OfText):
    """List the rows, documents, files and lines that a step of a run reads."""

    example = "minimind data at out/mine --step 1200 --text"
    step: int | None = argument(None, ge=1, excludes={"steps": "they are one question each"})
    """step whose rows are listed, as in the log"""
    steps: range | None = argument(
        None, parse=_steps, excludes=dict.fromkeys(("rank", "text"), OVER_RANKS), metavar="A:B"
    )
    """list the documents of the steps from A to B whose loss is above the running median"""
    rank: int | None = argument(None, ge=0)
    """only the rows of this process"""
    rows: bool = argument(
        False, excludes=dict.fromkeys(("text", "json", "top", "rank"), "it prints only row numbers")
    )
    """print the rows of the steps in the form of a --skip_rows file"""
    top: int | None = argument(None, ge=1, needs="steps", unset=10)
    """maximum documents listed"""
    text: bool = argument(False)
    """print the text as well"""

    def execute(self) -> int:
        with open_cache(self.cache_dir, self.max_cache_gib) as cache:
            return _at(self, cache)


@dataclass(kw_only=True)
class Where(OfText):
    """List the steps of a run that read a document."""

    example = "minimind data where out/mine my_text.jsonl:512"
    line: tuple[str, int] = argument(parse=_line, metavar="FILE:LINE", is_positional=True)
    """file of the text and line; of a table the row"""

    def execute(self) -> int:
        with open_cache(self.cache_dir, self.max_cache_gib) as cache:
            return _where(self, cache)


def _at(args: At, cache: ObjectCache) -> int:
    from minimind.recovery.step_rows import documents_of, rows_at

    steps = args.steps
    if args.rows and args.step is not None:
        steps = range(args.step, args.step + 1)
    if steps is not None:
        return _print_rows(args, steps) if args.rows else _print_suspects(args, steps, cache)
    if args.step is None:
        raise UsageError("no step was named; give --step N or --steps A:B")
    stretch = _read_run(Path(args.checkpoint)).at(args.step)
    documents = documents_of(stretch, args.data_path, cache)
    rows = rows_at(stretch, documents, args.step, args.rank)
    numbers = {part.document for row in rows for part in row.parts}
    places = documents.places(numbers)
    if args.json:
        objects = [_row_json(row, documents, places, args.text) for row in rows]
        _print_json({"step": args.step, "rows": objects, "faults": documents.faults})
        return 0
    count = f"{len(rows)} rows, {len(numbers)} documents"
    print(f"step {args.step}: {count}; rows of {stretch.row_tokens} tokens")
    for row in rows:
        print(f"\nrank {row.rank}, micro-batch {row.micro_batch}, row {row.row:,}")
        for part in row.parts:
            place = _shown(places.get(part.document))
            print(f"{f'{part.start}-{part.stop - 1}':>11}  {place}  document {part.document:,}")
            if args.text:
                lines = _text(documents, row, part.start, part.stop).splitlines()
                print("\n".join(f"    {line}" for line in lines))
    _print_faults(documents)
    return 0


def _read_run(run_dir: Path) -> RunLog:
    """The log of a run; damage of its records is named on standard error."""
    from minimind.recovery.step_rows import read_run

    log = read_run(run_dir)
    for warning in log.run.warnings:
        print(f"note: {warning}", file=sys.stderr)
    return log


def _print_rows(args: At, steps: range) -> int:
    """Print the rows of steps, as a file for --skip_rows."""
    from minimind.data.rows.skip_rows import skip_rows_text

    log = _read_run(Path(args.checkpoint))
    stretches = [log.at(step) for step in steps]
    if len(kinds := {(one.data["fingerprint"], one.row_tokens) for one in stretches}) > 1:
        raise UsageError(
            f"--steps {steps.start}:{steps.stop - 1}: the text, or the length of its rows, changed"
            " within these steps; give steps between two changes"
        )
    rows: set[int] = set()
    for step, stretch in zip(steps, stretches, strict=True):
        rows.update(stretch.order.rows_for(step - 1, 0, 1).tolist())
    ((fingerprint, row_tokens),) = kinds
    print(skip_rows_text(rows, row_tokens, fingerprint), end="")
    return 0


def _print_suspects(args: At, steps: range, cache: ObjectCache) -> int:
    """Print the documents whose steps have a high loss more often than expected."""
    from minimind.recovery.documents import place_json
    from minimind.recovery.step_rows import documents_of, suspects

    log = _read_run(Path(args.checkpoint))
    texts = log.texts(steps)
    if len(texts) > 1:
        raise UsageError(
            f"--steps {steps.start}:{steps.stop - 1}: the text changed at step"
            f" {texts[1][0].steps.start}; give steps before it, or from it on"
        )
    documents = documents_of(texts[0][-1] if texts else log.at(steps.start), args.data_path, cache)
    found, high, logged = suspects(log, documents, steps)
    listed = found[: args.in_force("top")]
    places = documents.places(suspect.document for suspect in listed)
    if args.json:
        rows = [
            {**asdict(suspect), **place_json(places.get(suspect.document))} for suspect in listed
        ]
        facts = {"high": high, "logged": logged, "documents": rows}
        _print_json({**facts, "faults": documents.faults})
        return 0
    print(f"{len(high)} of {logged} logged steps have a loss above the running median")
    if listed:
        print(f"{'in them':>8} {'expected':>9} {'score':>6}  {'document':>10}  place")
    for suspect in listed:
        place = _shown(places.get(suspect.document))
        expected = suspect.logged * len(high) / logged
        count = f"{suspect.high:>8} {expected:>9.1f} {suspect.score:>6.1f}"
        print(f"{count}  {suspect.document:>10,}  {place}")
    _print_faults(documents)
    return 0


def _where(args: Where, cache: ObjectCache) -> int:
    from minimind.recovery.documents import place_json
    from minimind.recovery.step_rows import documents_of, steps_reading

    file, line = args.line
    log = _read_run(Path(args.checkpoint))
    texts = [stretches[-1] for stretches in log.texts()] or [log.at(1)]
    unknown, places = None, []
    for stretch in texts:
        documents = documents_of(stretch, args.data_path if len(texts) == 1 else None, cache)
        try:
            found, number = documents.find(file, line)
        except UsageError as error:  # the file may be part of another text
            unknown = unknown or error
            continue
        reads = [] if number is None else steps_reading(log, documents, number)
        steps = [{"step": step, "rank": rank, "row": row} for step, rank, row in reads]
        facts = {**place_json(found.place), "split": found.split or None, "document": number}
        places.append({**facts, "data": str(documents.prepared), "reads": steps})
        if not args.json:
            if len(texts) > 1:
                print(f"{documents.prepared}:")
            _print_reads(found, number, documents, reads)
    if unknown and not places:
        raise unknown
    if args.json:
        _print_json({"texts": places})
    return 0


def _print_reads(
    found: Placed, number: int | None, documents: Documents, reads: list[tuple[int, int, int]]
) -> None:
    if number is None:
        reason = "held out for validation" if found.split else "no document: it was rejected"
        print(f"{found.place}: {reason}")
        return
    start, stop = documents.tokens(number)
    print(f"{found.place}: document {number:,}, {stop - start:,} tokens with its end token")
    for step, rank, row in reads:
        print(f"step {step:>9,}  rank {rank}  row {row:,}")
    if not reads:
        print("no logged step has read it")


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))


def _row_json(
    row: Row, documents: Documents, places: dict[int, Place], with_text: bool
) -> dict[str, Any]:
    from minimind.recovery.documents import place_json

    parts = []
    for part in row.parts:
        facts = {**asdict(part), **place_json(places.get(part.document))}
        if with_text:
            facts["text"] = _text(documents, row, part.start, part.stop)
        parts.append(facts)
    return {**asdict(row), "parts": parts}


def _shown(place: Place | None) -> str:
    if place is None:
        return "?"
    return str(place) if place.byte is None else f"{place} (byte {place.byte:,})"


def _text(documents: Documents, row: Row, start: int, stop: int) -> str:
    return documents.prepared.text(row.first_token + start, stop - start)


def _print_faults(documents: Documents) -> None:
    for file, fault in documents.faults.items():
        print(f"? {file}: {fault}")


@dataclass(kw_only=True)
class Logits(OfRunFlags, Output):
    """Write what a teacher says of the rows of a run, for the --teacher of any number of runs.

    At each target: the likeliest ids with their probabilities, and the probability of all others
    together. The flags of train_pretrain.py follow a --; of them --teacher is the model, and
    --batch_size the rows that it reads at once.
    """

    example = "minimind data logits --out data/big -- --teacher out/big --data_path my_text.jsonl"
    top_k: int = argument(64, ge=1)
    """number of ids at each target"""

    def execute(self) -> None:
        """Write the folder, in this process; print its size, and how much of it the ids have."""
        from minimind.train.record_teacher import record_teacher

        try:
            record_teacher(self.run_flags, self.out, self.force, self.top_k)
        except KeyboardInterrupt as stop:
            raise Interrupted("stopped; run the same command again to continue") from stop


DATA = Group(
    "Filter text, inspect prepared data, record a teacher, or find the text of a step of a run.",
    INSPECT,
    {"inspect": Inspect, "filter": Filter, "logits": Logits, "at": At, "where": Where},
)
