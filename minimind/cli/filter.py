"""`minimind data filter`: flags and output."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from minimind.config.arguments import (
    add_cache,
    at_least,
    count_of_bytes,
    fraction,
    non_empty_path,
    utf8,
)
from minimind.config.flags import FLAGS
from minimind.errors import UsageError
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.object_cache import ObjectCache
from minimind.runtime.urls import named

EXAMPLE = "minimind data filter my_text.jsonl --out dataset/clean --exact_dedup"
STEPS = ("min_chars", "max_chars", "languages", "rules", "classifier", "decontaminate")
STEPS += ("exact_dedup", "minhash")
MIN_PROBABILITY = 0.5  # text without words is en with 0.12
MINHASH = {"ngrams": "words of an n-gram (default: 5)", "buckets": "buckets (default: 14)"}
MINHASH |= {"hashes": "hashes of a bucket (default: 8)"}


def add_parser(actions: Any) -> None:
    """Add the parser of `data filter`."""
    text = (
        "Remove documents by length, language, rules, labels and as repeated; count and list each"
    )
    parser = actions.add_parser("filter", help=text, description=f"{text}.", example=EXAMPLE)
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="files, directories, globs, datasets, URLs")
    add("--out", type=non_empty_path, required=True, help="new output folder")
    add("--min_chars", type=at_least(1), metavar="N", help="remove texts of fewer characters")
    add("--max_chars", type=at_least(1), metavar="N", help="remove texts of more characters")
    text = "remove texts in other languages than these, separated by commas (zh,en)"
    add("--languages", metavar="CODES", help=text)
    text = f"--languages: least probability of the language (default: {MIN_PROBABILITY})"
    add("--min_language_probability", type=fraction, metavar="P", help=text)
    text = "remove texts by datatrove's rules of these names: gopher, c4, fineweb"
    add("--rules", metavar="NAMES", help=text)
    text = (
        "--rules: words and sentences of spaCy, as in datatrove, or by expressions (default: spacy)"
    )
    add("--rules_words", choices=("spacy", "plain"), help=text)
    text = "remove texts by their labels of this supervised fastText model (.bin, .ftz)"
    add("--classifier", type=non_empty_path, metavar="FILE", help=text)
    text = "--classifier: keep texts with one of these labels, at least as probable as P"
    add("--classifier_keep", nargs="+", type=_label, default=[], metavar="LABEL=P", help=text)
    text = "--classifier: remove texts with one of these labels, at least as probable as P"
    add("--classifier_remove", nargs="+", type=_label, default=[], metavar="LABEL=P", help=text)
    text = "remove texts that have 12 words in a row in common with a text of these"
    add("--decontaminate", nargs="+", default=[], metavar="PATH", help=text)
    text = "--decontaminate: field or column of the text (default: --text_field)"
    add("--decontaminate_field", type=utf8, metavar="NAME", help=text)
    text = "remove texts that were read before, but for blanks; the first one stays"
    add("--exact_dedup", action="store_true", help=text)
    text = "remove near-duplicates, by MinHash of datatrove; one of each cluster stays"
    add("--minhash", action="store_true", help=text)
    for name, text in MINHASH.items():
        add(f"--minhash_{name}", type=at_least(1), metavar="N", help=f"--minhash: {text}")
    field, bad = FLAGS["text_field"].default, FLAGS["max_bad_fraction"].default
    add("--text_field", type=utf8, default=field, help="field or column of the text")
    text = "longest document, in UTF-8"
    add("--max_document_bytes", type=count_of_bytes, default="64MiB", help=text)
    text = "stop at a bad document (error), or skip and list it"
    add("--on_bad_data", choices=("error", "skip"), default="error", help=text)
    text = "fraction of the documents that may be bad"
    add("--max_bad_fraction", type=fraction, default=bad, help=text)
    text = "processes that check documents; the output is the same for any number"
    add("--processes", type=at_least(1), default=1, help=text)
    add_cache(parser, "cache of objects of storage, for PATHs that are URLs")
    add("--force", action="store_true", help="replace an earlier --out")
    add("--debug", action="store_true", help="show tracebacks")


def _label(text: str) -> tuple[str, float]:
    """Parse LABEL=P; raise ArgumentTypeError otherwise."""
    label, _, least = text.rpartition("=")
    try:
        probability = float(least)
    except ValueError:
        probability = -1.0
    if not label or not 0 <= probability <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no LABEL=P with P from 0 to 1, as hq=0.9")
    return label.removeprefix("__label__"), probability


def run(args: argparse.Namespace, cache: ObjectCache) -> int:
    """Filter, and print the table of the report."""
    from minimind.data.prepare.encode import MAX_REMARKS
    from minimind.data.quality.filter import FilterRequest, filter_text
    from minimind.data.quality.near_duplicates import MinHash
    from minimind.data.quality.records import field_of
    from minimind.data.text.documents import ReadOptions
    from minimind.data.text.inputs import print_left_out
    from minimind.report.formats import count

    if not any(getattr(args, name) for name in STEPS):
        flags = ", ".join(f"--{name}" for name in STEPS)
        raise UsageError(f"data filter: no step was given; give one or more of {flags}")
    if args.min_chars and args.max_chars and args.min_chars > args.max_chars:
        raise UsageError(
            f"--min_chars {args.min_chars} is more than --max_chars {args.max_chars}; no text has"
            " both, change one"
        )
    given = {name: getattr(args, f"minhash_{name}") for name in MINHASH}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not args.minhash:
        raise UsageError(f"--minhash_{next(iter(given))} without --minhash; give --minhash too")
    probability = args.min_language_probability
    if probability is not None and not args.languages:
        raise UsageError("--min_language_probability without --languages; give --languages too")
    if args.rules_words and not args.rules:
        raise UsageError("--rules_words without --rules; give --rules too")
    if args.decontaminate_field and not args.decontaminate:
        raise UsageError("--decontaminate_field without --decontaminate; give --decontaminate too")
    if bool(args.classifier_keep) + bool(args.classifier_remove) != bool(args.classifier):
        raise UsageError(
            "--classifier FILE goes with one of --classifier_keep and --classifier_remove; give"
            " these two"
        )
    languages = args.languages.split(",") if args.languages else []
    rules = args.rules.split(",") if args.rules else []
    request = FilterRequest(
        tuple(args.paths),
        ReadOptions(args.text_field, args.max_document_bytes),
        args.on_bad_data == "skip",
        args.max_bad_fraction,
        args.min_chars,
        args.max_chars,
        args.exact_dedup,
        MinHash(**given) if args.minhash else None,
        tuple(language.strip() for language in languages),
        MIN_PROBABILITY if probability is None else probability,
        tuple(rule.strip() for rule in rules),
        args.rules_words or "spacy",
        tuple(args.decontaminate),
        args.decontaminate_field or args.text_field,
        args.classifier and args.classifier.expanduser(),
        tuple(args.classifier_keep),
        tuple(args.classifier_remove),
        args.processes,
    )
    print_left_out(args.paths)
    report = filter_text(request, args.out, args.force, cache)
    _print_report(report)
    if lost := report["lost_bytes"]:
        verb = "is" if lost == 1 else "are"
        print(f"note   {count(lost, 'byte')} of the files {verb} lost", file=sys.stderr)
    for path, what in request.reading.remarks[:MAX_REMARKS]:
        print(f"note   {named(str(path))}{what}", file=sys.stderr)
    field = field_of(request.reading)
    read = "" if field == FLAGS["text_field"].default else f" --text_field {shlex.quote(field)}"
    print(f"done: --data_path {args.out}{read}")
    return 0


def _print_report(report: dict[str, Any]) -> None:
    rows = {"read": report["read"], "rejected": report["rejected"], **report["removed"]}
    rows |= {"cut": report["cut"]} if report["cut"]["documents"] else {}
    rows["kept"] = report["kept"]
    width = max(16, *map(len, rows))
    for name, counts in rows.items():
        share, size = counts["documents"] / report["read"]["documents"], counts["bytes"]
        print(f"{name:<{width}} {counts['documents']:>14,} {share:>8.2%} {mebibytes(size):>14}")
