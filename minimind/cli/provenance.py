"""`minimind data at` and `minimind data where`: the text behind a step, and the steps of a text."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import at_least
from minimind.errors import UsageError

if TYPE_CHECKING:
    from minimind.provenance.documents import Documents, Place
    from minimind.provenance.step_rows import Row

AT = "minimind data at out/mine --step 1200 --text"
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
    add("--top", type=at_least(1), default=10, help="documents listed with --steps")
    add("--text", action="store_true", help="print the text as well")

    text = "Steps of a run that read a document"
    where = actions.add_parser("where", help=text, description=f"{text}.", example=WHERE)
    where.add_argument("run", type=Path, metavar="RUN", help="the run's out_dir")
    text = "file of the text and line; of a table the row"
    where.add_argument("place", type=_place, metavar="FILE:LINE", help=text)
    for parser in (at, where):
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


def run_at(args: argparse.Namespace) -> int:
    """Print the rows of a step, or the documents of steps with a high loss."""
    from minimind.provenance.step_rows import documents_of, read_run, rows_at, stretch_of

    if (args.step is None) == (args.steps is None):
        given = "both were given" if args.step else "neither was given"
        raise UsageError(f"--step N or --steps A:B: {given}; give one")
    if args.steps is not None:
        if args.rank is not None or args.text:
            raise UsageError("--steps counts documents over all ranks; drop --rank and --text")
        return _run_suspects(args)
    stretch = stretch_of(read_run(args.run), args.step)
    documents = documents_of(stretch)
    rows = rows_at(stretch, documents, args.step, args.rank)
    numbers = {part.document for row in rows for part in row.parts}
    places = documents.places(numbers)
    if args.json:
        found = [_row_json(row, documents, places, args.text) for row in rows]
        print(json.dumps({"step": args.step, "rows": found}, ensure_ascii=False, indent=1))
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


def _run_suspects(args: argparse.Namespace) -> int:
    """Print the documents that are most often in steps with a high loss."""
    from minimind.provenance.step_rows import documents_of, read_run, suspects

    stretches = read_run(args.run)
    documents = documents_of(stretches[-1])
    found, high, logged = suspects(args.run, stretches, documents, args.steps)
    listed = found[: args.top]
    places = documents.places(one.document for one in listed)
    if args.json:
        rows = [{**asdict(one), **_place_json(places.get(one.document))} for one in listed]
        print(json.dumps({"high": high, "logged": logged, "documents": rows}, indent=1))
        return 0
    print(f"{len(high)} of {logged} logged steps have a loss above the running median")
    if listed:
        print(f"{'in them':>8} {'in all':>7}  {'document':>10}  place")
    for one in listed:
        place = _shown(places.get(one.document))
        print(f"{one.above:>8} {one.logged:>7}  {one.document:>10,}  {place}")
    _print_faults(documents)
    return 0


def run_where(args: argparse.Namespace) -> int:
    """Print the steps that read a document."""
    from minimind.provenance.step_rows import documents_of, read_run, steps_reading

    file, line = args.place
    stretches = read_run(args.run)
    documents = documents_of(stretches[-1])
    found, number = documents.find(file, line)
    reads = [] if number is None else steps_reading(stretches, documents, number)
    if args.json:
        steps = [{"step": step, "rank": rank, "row": row} for step, rank, row in reads]
        facts = {**_place_json(found.place), "split": found.split or None, "document": number}
        print(json.dumps({**facts, "reads": steps}, indent=1))
        return 0
    if number is None:
        reason = "held out for validation" if found.split else "no document: it was rejected"
        print(f"{found.place}: {reason}")
        return 0
    start, stop = documents.tokens(number)
    print(f"{found.place}: document {number:,}, {stop - start:,} tokens with its end token")
    for step, rank, row in reads:
        print(f"step {step:>9,}  rank {rank}  row {row:,}")
    if not reads:
        print("no step reads it: its rows are beyond the end of the run or in the tail of an epoch")
    return 0


def _row_json(
    row: Row, documents: Documents, places: dict[int, Place], with_text: bool
) -> dict[str, Any]:
    parts = []
    for part in row.parts:
        facts = {**asdict(part), **_place_json(places.get(part.document))}
        if with_text:
            facts["text"] = _text(documents, row, part.start, part.stop)
        parts.append(facts)
    return {**asdict(row), "parts": parts}


def _place_json(place: Place | None) -> dict[str, Any]:
    return asdict(place) if place else {"file": None, "line": None, "byte": None}


def _shown(place: Place | None) -> str:
    if place is None:
        return "?"
    return str(place) if place.byte is None else f"{place} (byte {place.byte:,})"


def _text(documents: Documents, row: Row, start: int, stop: int) -> str:
    """The text of tokens `start` to `stop` of a row."""
    tokens = documents.prepared.train.stretch(row.first_token + start, stop - start)
    return documents.prepared.tokenizer.decode(tokens.tolist())


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _print_faults(documents: Documents) -> None:
    for file, fault in documents.faults.items():
        print(f"? {fault if fault.startswith(file) else f'{file}: {fault}'}")
