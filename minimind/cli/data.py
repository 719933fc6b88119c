"""`minimind prepare` and `minimind data`: inspect or filter a text, find the text of a step."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.cli import filter as filter_command
from minimind.config.arguments import (
    add_cache,
    at_least,
    count_of_bytes,
    fraction,
    non_empty_path,
    utf8,
)
from minimind.config.command_line import Parser
from minimind.config.flags import FLAGS
from minimind.errors import DataError, Interrupted, UsageError
from minimind.runtime import disk
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.terminal import aligned
from minimind.runtime.urls import masked

if TYPE_CHECKING:
    from minimind.data.prepare.inspect import Inspection
    from minimind.data.prepare.prepare import PrepareRequest
    from minimind.data.prepare.prepared import Prepared
    from minimind.recovery.documents import Documents, Place, Placed
    from minimind.recovery.step_rows import Row, RunLog
    from minimind.runtime.object_cache import ObjectCache


OPTIONS = ("text_field", "max_document_bytes", "val_fraction")
NOT_OF_A_MERGE = (
    "tokenizer",
    "vocab_size",
    *OPTIONS,
    "val_path",
    "on_bad_data",
    "shard_bytes",
    "processes",
    "ray",
)
LONGEST = (
    "longest document, in UTF-8 (default: 64MiB; 2MiB with a Hugging Face --tokenizer, 8MiB"
    " with a SentencePiece model that is not plain BPE: these encode a document at once)"
)
INSPECT = "minimind data inspect dataset/tokens"
BAR = 40  # characters of the longest bar


def add_parsers(subs: Any) -> None:
    """Add the parsers of `prepare` and `data`."""
    added = subs.add_parser(
        "prepare",
        help="tokenize text into a folder of shards, for any number of runs",
        description="Tokenize text into a folder of shards for --data_path. The same command"
        " resumes after a kill. On several machines: --shard I/N on each, then --merge.",
        example="minimind prepare my_text.jsonl --out dataset/tokens",
    )
    add = added.add_argument
    add("paths", nargs="*", metavar="PATH", help="files, directories, globs, dataset directories")
    add("--data_path", nargs="+", default=[], metavar="PATH", help="more of them")
    sources = "NAME=PATH or NAME=PATH:WEIGHT; repeat it for more sources or more paths of one"
    add("--source", action="append", default=[], help=sources)
    add("--sources", type=Path, help="YAML file: {NAME: {paths: [...], weight: 2}}")
    add("--out", type=non_empty_path, required=True, help="new output folder")
    add("--tokenizer", help="model or directory (default: train one on the text)")
    add(
        "--vocab_size",
        type=at_least(1),
        help=f"pieces of a trained tokenizer{_default('vocab_size')}",
    )
    add(
        "--val_fraction",
        type=fraction,
        help=f"fraction of documents held out, by hash{_default('val_fraction')}",
    )
    held_out = "text that is held out in place of a fraction; auto: validation parts of folders"
    add("--val_path", type=utf8, metavar="PATH", help=held_out)
    add("--text_field", type=utf8, help=f"field or column of the text{_default('text_field')}")
    add("--max_document_bytes", type=count_of_bytes, help=LONGEST)
    policy = "stop at a bad document (error), or skip and list it (default: error)"
    add("--on_bad_data", choices=("error", "skip"), help=policy)
    limit = f"fraction of the documents that may be bad{_default('max_bad_fraction')}"
    add("--max_bad_fraction", type=fraction, help=limit)
    lossy = "go on although the tokenizer loses more than 0.1 %% of the text of a source"
    add("--allow_lossy_tokenizer", action="store_true", help=lossy)
    add("--shard", type=_share, metavar="I/N", help="encode share I (from 0) of N, do not merge")
    add("--merge", action="store_true", help="merge the output of all --shard I/N")
    size = "bytes of input per shard file (default: from the total size, at least 16MiB)"
    add("--shard_bytes", type=count_of_bytes, help=size)
    add("--processes", type=at_least(1), help="tokenizing processes (default: one per 8 cores)")
    cluster = "encode on Ray: a cluster (auto, HOST:PORT, ray://HOST:PORT), or this host"
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help=cluster)
    add_cache(added, "cache of objects of storage, for PATHs that are URLs")
    add("--force", action="store_true", help="replace an earlier --out")
    add("--debug", action="store_true", help="show tracebacks")
    _add_data(subs)


def _add_data(subs: Any) -> None:
    text = "Filter text; inspect prepared data; the text behind a step of a run."
    actions_of = "filter | inspect | at | where"
    group = subs.add_parser("data", help=actions_of, description=text, example=INSPECT)
    actions = group.add_subparsers(dest="action", required=True, parser_class=Parser)
    purpose = "Counts, lengths, duplicates and rows; status 3 if a file has changed"
    inspect = actions.add_parser(
        "inspect", help=purpose, description=f"{purpose}.", example=INSPECT
    )
    folder = "a folder that `minimind prepare` wrote"
    inspect.add_argument("directory", metavar="DIR", help=f"{folder}, or its URL")
    add_cache(inspect, "cache of objects of storage, for a DIR that is a URL")
    inspect.add_argument("--rows", type=at_least(0), default=3, help="rows shown as text")
    inspect.add_argument("--row_tokens", type=at_least(1), default=128, help="tokens shown per row")
    inspect.add_argument("--no_verify", action="store_true", help="do not hash the files again")
    inspect.add_argument("--json", action="store_true", help="print a JSON object")
    inspect.add_argument("--debug", action="store_true", help="show tracebacks")
    filter_command.add_parser(actions)
    add_actions(actions)


def _default(name: str) -> str:
    """Format the default that a flag shares with a run's flag."""
    return f" (default: {FLAGS[name].default})"


def _share(text: str) -> tuple[int, int]:
    """Parse `I/N` to (i, n), with i from 0; raise ArgumentTypeError otherwise."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no I/N with I from 0 to N - 1")
    return int(part), int(parts)


def run_prepare(args: argparse.Namespace) -> int:
    """Prepare and print a summary; raise Interrupted, naming what Ctrl-C leaves."""
    from minimind.data.prepare.dataset_folder import draft_of
    from minimind.runtime.object_cache import open_cache

    try:
        with open_cache(args.cache_dir, args.max_cache_gib) as cache:
            return _prepare(args, cache)
    except KeyboardInterrupt as stop:
        draft = draft_of(disk.resolve(args.out.expanduser()))
        if not disk.exists(draft):
            raise Interrupted("stopped before anything was written; run it again") from stop
        raise Interrupted(
            f"stopped; {draft} keeps what is done, and the same command resumes from it"
        ) from stop


def _prepare(args: argparse.Namespace, cache: ObjectCache) -> int:
    from minimind.data.prepare.dataset_folder import merge_folder, prepare_folder
    from minimind.data.prepare.ray_tasks import require_usable

    if args.merge and args.shard:
        raise UsageError("--merge and --shard were both given; give one of them")
    if args.merge and (args.paths or args.data_path or args.source or args.sources):
        raise UsageError("--merge takes no text; leave it out, the shares determine it")
    if args.merge and (given := _given(args, NOT_OF_A_MERGE)):
        name = next(iter(given))
        raise UsageError(f"--merge takes no --{name}; leave it out, the shares determine it")
    if args.ray is not None:
        require_usable(args.ray, args.shard, args.processes)
    if args.merge:
        policy = args.max_bad_fraction, args.allow_lossy_tokenizer
        prepared = merge_folder(args.out, args.force, *policy)
    else:
        prepared = prepare_folder(_request(args, cache), args.out, args.shard, args.force)
    if prepared is None:
        part, parts = args.shard
        print(f"share {part} of {parts} is done; --merge when all are: {args.out}.part")
    else:
        _print_prepared(prepared)
    return 0


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the flags among these that were given."""
    values = ((name, getattr(args, name)) for name in names)
    return {name: value for name, value in values if value is not None}


def _request(args: argparse.Namespace, cache: ObjectCache) -> PrepareRequest:
    from minimind.data.prepare.prepare import PrepareRequest
    from minimind.data.prepare.remote import local_text
    from minimind.data.prepare.work_units import Options
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
    sources += [parse_source(text) for text in args.source]
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
                f"--val_path {args.val_path}: is of no one of {len(sources)} sources; drop it, or"
                " prepare a single source"
            )
        if args.val_fraction:
            raise UsageError(
                f"--val_path {args.val_path} is all that is held out, and --val_fraction"
                f" {args.val_fraction} holds out a part of the text; drop one of them"
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


def _require_same_vocab_size(args: argparse.Namespace) -> None:
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
                " says nothing of it; raise --val_fraction, or add documents"
            )


def _print_sources(sources: list[dict[str, Any]]) -> None:
    rows = [("source", "weight", "documents", "text", "tokens", "bytes/token")]
    for source in sources:
        text, tokens = source["text_bytes"], sum(source["tokens"].values())
        weight = "" if source["weight"] is None else f"{source['weight']:g}"
        sizes = (f"{source['documents']:,}", mebibytes(text), f"{tokens:,}")
        rows.append((source["name"], weight, *sizes, f"{text / max(1, tokens):.2f}"))
    print(aligned(rows, "<>"))


def run_data(args: argparse.Namespace) -> int:
    """Run one action of `minimind data`."""
    from minimind.runtime.object_cache import open_cache

    actions = {"filter": filter_command.run, "inspect": _run_inspect}
    actions |= {"at": run_at, "where": run_where}
    with open_cache(args.cache_dir, args.max_cache_gib) as cache:
        return actions[args.action](args, cache)


def _run_inspect(args: argparse.Namespace, cache: ObjectCache) -> int:
    """Print a summary of a folder; return 3, and print the damage, if a file has changed."""
    from minimind.data.prepare.inspect import damage, inspect
    from minimind.data.prepare.prepared import NEEDED, missing_of, open_prepared
    from minimind.data.prepare.remote import local_folder

    place, args.directory = args.directory, Path(local_folder(args.directory, cache))
    missing = missing_of(args.directory)
    if len(missing) == len(NEEDED):
        raise DataError(
            f"{masked(place)}: holds no prepared data; name a folder that `minimind prepare` wrote"
        )
    if missing:
        raise DataError(
            f"{masked(place)}: has no {missing[0]}, so it is no prepared data; restore it, or"
            " prepare the text again"
        )
    damaged = [] if args.no_verify else list(damage(args.directory))
    if damaged:
        print("\n".join(f"{args.directory}: DAMAGED: {fault}" for fault in damaged))
        return DataError.status
    inspection = inspect(open_prepared(args.directory), args.rows, args.row_tokens)
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


AT = "minimind data at out/mine --step 1200 --text"
TOP = 10  # documents listed with --steps
WHERE = "minimind data where out/mine my_text.jsonl:512"


def add_actions(actions: Any) -> None:
    """Add the parsers of `data at` and `data where`."""
    text = "Rows, documents, files and lines that a step of a run reads"
    at = actions.add_parser("at", help=text, description=f"{text}.", example=AT)
    add = at.add_argument
    add("run", type=Path, metavar="RUN", help="the run's out_dir")
    add("--step", type=at_least(1), help="step, as in the log")
    text = "of steps A to B: documents in those with a loss above the running median"
    add("--steps", type=_steps, metavar="A:B", help=text)
    add("--rank", type=at_least(0), help="only the rows of this process")
    text = "print the rows of the steps, as a file for --skip_rows"
    add("--rows", action="store_true", help=text)
    add("--top", type=at_least(1), help="documents listed with --steps (default: 10)")
    add("--text", action="store_true", help="print the text as well")

    text = "Steps of a run that read a document"
    where = actions.add_parser("where", help=text, description=f"{text}.", example=WHERE)
    where.add_argument("run", type=Path, metavar="RUN", help="the run's out_dir")
    text = "file of the text and line; of a table the row"
    where.add_argument("place", type=_place, metavar="FILE:LINE", help=text)
    for parser in (at, where):
        text = "folder or URL of the prepared text, if it is not where the run read it"
        parser.add_argument("--data", metavar="DIR", help=text)
        add_cache(parser, "cache of objects of storage, for text at URLs")
        parser.add_argument("--json", action="store_true", help="print a JSON object")
        parser.add_argument("--debug", action="store_true", help="show tracebacks")


def _steps(text: str) -> range:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is no A:B with 1 <= A <= B")
    return range(int(first), int(last) + 1)


def _place(text: str) -> tuple[str, int]:
    file, _, line = text.rpartition(":")
    if not (file and line.isdecimal() and int(line)):
        raise argparse.ArgumentTypeError(f"{text!r} is no FILE:LINE with lines from 1")
    return file, int(line)


def run_at(args: argparse.Namespace, cache: ObjectCache) -> int:
    """Print the rows of a step, or the documents of steps with a high loss."""
    from minimind.recovery.step_rows import documents_of, rows_at

    if (args.step is None) == (args.steps is None):
        given = "both were given" if args.step else "neither was given"
        raise UsageError(f"--step N or --steps A:B: {given}; give one")
    if args.rows:
        return _run_rows(args)
    if args.steps is not None:
        if args.rank is not None or args.text:
            raise UsageError("--steps counts documents over all ranks; drop --rank and --text")
        return _run_suspects(args, cache)
    if args.top is not None:
        raise UsageError("--top lists documents of --steps A:B; drop it, or give --steps")
    stretch = _read_run(args.run).at(args.step)
    documents = documents_of(stretch, args.data, cache)
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


def _run_rows(args: argparse.Namespace) -> int:
    """Print the rows of steps, as a file for --skip_rows."""
    from minimind.data.rows.order import skip_rows_text

    if args.text or args.json or args.top is not None or args.rank is not None:
        raise UsageError("--rows prints row numbers alone; drop --text, --json, --top and --rank")
    log, steps = _read_run(args.run), args.steps or range(args.step, args.step + 1)
    stretches = [log.at(step) for step in steps]
    if len(kinds := {(one.data["fingerprint"], one.row_tokens) for one in stretches}) > 1:
        raise UsageError(
            f"--steps {steps.start}:{steps.stop - 1}: the run read other text, or rows of another"
            " length, in a part of them; give steps of one"
        )
    rows: set[int] = set()
    for step, stretch in zip(steps, stretches, strict=True):
        rows.update(stretch.order.rows_for(step - 1, 0, 1).tolist())
    ((fingerprint, row_tokens),) = kinds
    print(skip_rows_text(rows, row_tokens, fingerprint), end="")
    return 0


def _run_suspects(args: argparse.Namespace, cache: ObjectCache) -> int:
    """Print the documents whose steps have a high loss more often than expected."""
    from minimind.recovery.documents import place_json
    from minimind.recovery.step_rows import documents_of, suspects

    log = _read_run(args.run)
    texts = log.texts(args.steps)
    if len(texts) > 1:
        raise UsageError(
            f"--steps {args.steps.start}:{args.steps.stop - 1}: the run read other text from step"
            f" {texts[1][0].steps.start} on; give steps of one text"
        )
    documents = documents_of(texts[0][-1] if texts else log.at(args.steps.start), args.data, cache)
    found, high, logged = suspects(log, documents, args.steps)
    listed = found[: args.top or TOP]
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


def run_where(args: argparse.Namespace, cache: ObjectCache) -> int:
    """Print the steps that read a document, for each text that the run read."""
    from minimind.recovery.documents import place_json
    from minimind.recovery.step_rows import documents_of, steps_reading
    from minimind.runtime.urls import named

    file, line = args.place
    log = _read_run(args.run)
    texts = [stretches[-1] for stretches in log.texts()] or [log.at(1)]
    unknown, places = None, []
    for stretch in texts:
        documents = documents_of(stretch, args.data if len(texts) == 1 else None, cache)
        try:
            found, number = documents.find(file, line)
        except UsageError as error:  # the file may be part of another text
            unknown = unknown or error
            continue
        reads = [] if number is None else steps_reading(log, documents, number)
        steps = [{"step": step, "rank": rank, "row": row} for step, rank, row in reads]
        facts = {**place_json(found.place), "split": found.split or None, "document": number}
        places.append({**facts, "data": named(str(documents.prepared.directory)), "reads": steps})
        if not args.json:
            if len(texts) > 1:
                print(f"{named(str(documents.prepared.directory))}:")
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
    """The text of tokens `start` to `stop` of a row."""
    return documents.prepared.text(row.first_token + start, stop - start)


def _print_faults(documents: Documents) -> None:
    for file, fault in documents.faults.items():
        print(f"? {file}: {fault}")
