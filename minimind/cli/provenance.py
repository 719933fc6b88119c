"""`minimind data at` and `minimind data where`: the text behind a step, and the steps of a text."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import add_cache, at_least
from minimind.errors import UsageError

if TYPE_CHECKING:
    from minimind.provenance.documents import Documents, Place, Placed
    from minimind.provenance.step_rows import Row
    from minimind.storage.object_cache import ObjectCache

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
    from minimind.provenance.step_rows import documents_of, read_run, rows_at

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
    stretch = read_run(args.run).at(args.step)
    documents = documents_of(stretch, args.data, cache)
    rows = rows_at(stretch, documents, args.step, args.rank)
    numbers = {part.document for row in rows for part in row.parts}
    places = documents.places(numbers)
    if args.json:
        found = [_row_json(row, documents, places, args.text) for row in rows]
        _print_json({"step": args.step, "rows": found, "faults": documents.faults})
        return 0
    count = f"{len(rows)} rows, {len(numbers)} documents"
    print(f"step {args.step}: {count}; rows of {stretch.row_tokens} tokens")
    for row in rows:
        print(f"\nrank {row.rank}, micro-batch {row.micro_batch}, row {row.row:,}")
        for part in row.parts:
            place = _shown(places.get(part.document))
            print(f"{f'{part.start}-{part.stop - 1}':>11}  {place}  document {part.document:,}")
            if args.text:
                print(_indented(_text(documents, row, part.start, part.stop)))
    _print_faults(documents)
    return 0


def _run_rows(args: argparse.Namespace) -> int:
    """Print the rows of steps, as a file for --skip_rows."""
    from minimind.data.loader.skip_rows import skip_rows_text
    from minimind.provenance.step_rows import read_run

    if args.text or args.json or args.top is not None or args.rank is not None:
        raise UsageError("--rows prints row numbers alone; drop --text, --json, --top and --rank")
    log, steps = read_run(args.run), args.steps or range(args.step, args.step + 1)
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
    from minimind.provenance.documents import place_json
    from minimind.provenance.high_losses import suspects
    from minimind.provenance.step_rows import documents_of, read_run

    log = read_run(args.run)
    texts = log.texts(args.steps)
    if len(texts) > 1:
        raise UsageError(
            f"--steps {args.steps.start}:{args.steps.stop - 1}: the run read other text from step"
            f" {texts[1][0].steps.start} on; give steps of one text"
        )
    documents = documents_of(texts[0][-1] if texts else log.at(args.steps.start), args.data, cache)
    found, high, logged = suspects(log, documents, args.steps)
    listed = found[: args.top or TOP]
    places = documents.places(one.document for one in listed)
    if args.json:
        rows = [{**asdict(one), **place_json(places.get(one.document))} for one in listed]
        facts = {"high": high, "logged": logged, "documents": rows}
        _print_json({**facts, "faults": documents.faults})
        return 0
    print(f"{len(high)} of {logged} logged steps have a loss above the running median")
    if listed:
        print(f"{'in them':>8} {'expected':>9} {'score':>6}  {'document':>10}  place")
    for one in listed:
        place = _shown(places.get(one.document))
        expected = one.logged * len(high) / logged
        count = f"{one.high:>8} {expected:>9.1f} {one.score:>6.1f}"
        print(f"{count}  {one.document:>10,}  {place}")
    _print_faults(documents)
    return 0


def run_where(args: argparse.Namespace, cache: ObjectCache) -> int:
    """Print the steps that read a document, for each text that the run read."""
    from minimind.provenance.documents import place_json
    from minimind.provenance.step_rows import documents_of, read_run, steps_reading
    from minimind.storage.object_cache import named

    file, line = args.place
    log = read_run(args.run)
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
    from minimind.provenance.documents import place_json

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


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _print_faults(documents: Documents) -> None:
    for file, fault in documents.faults.items():
        print(f"? {file}: {fault}")
