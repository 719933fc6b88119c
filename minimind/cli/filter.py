"""`minimind data filter`: flags and output."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.cli.command import Cached, Output, argument, count_of_bytes, shared, utf8
from minimind.config.flags import FLAGS
from minimind.errors import Interrupted, UsageError
from minimind.runtime.durable_files import mebibytes
from minimind.runtime.object_cache import ObjectCache, open_cache

EXAMPLE = "minimind data filter my_text.jsonl --out dataset/clean --exact_dedup"
STEPS = ("min_chars", "max_chars", "languages", "rules", "classifier", "decontaminate")
STEPS += ("exact_dedup", "minhash")


def _label(text: str) -> tuple[str, float]:
    """Parse LABEL=P; raise ArgumentTypeError otherwise."""
    label, _, least = text.rpartition("=")
    try:
        probability = float(least)
    except ValueError:
        probability = -1.0
    if not label or not 0 <= probability <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not LABEL=P with P from 0 to 1, as hq=0.9")
    return label.removeprefix("__label__"), probability


@dataclass(kw_only=True)
class Filter(Cached, Output):
    """Remove documents by length, language, rules or labels, and repeated ones; list them."""

    example = EXAMPLE
    paths: list[str] = argument(nargs="+", metavar="PATH", is_positional=True)
    """files, directories, globs, datasets or URLs"""
    min_chars: int | None = argument(None, ge=1, metavar="N")
    """remove texts of fewer characters"""
    max_chars: int | None = argument(None, ge=1, metavar="N")
    """remove texts of more characters"""
    languages: str | None = argument(None, metavar="CODES")
    """remove texts in other languages than these, separated by commas (zh,en)"""
    # Text without words is en with 0.12.
    min_language_probability: float | None = argument(
        None, ge=0, lt=1, needs="languages", unset=0.5, metavar="P"
    )
    """minimum probability of the language"""
    rules: str | None = argument(None, metavar="NAMES")
    """remove texts by datatrove's rules of these names: gopher, c4, fineweb"""
    rules_words: str | None = argument(
        None, choices=("spacy", "plain"), needs="rules", unset="spacy"
    )
    """find words and sentences with spaCy, as datatrove does (spacy), or with regular expressions
    (plain)"""
    classifier: Path | None = argument(None, metavar="FILE")
    """remove texts by the labels that this supervised fastText model (.bin, .ftz) gives them"""
    classifier_keep: list[tuple[str, float]] = argument(
        (),
        nargs="+",
        parse=_label,
        needs="classifier",
        excludes={"classifier_remove": "each decides about all labels"},
        metavar="LABEL=P",
    )
    """keep texts with one of these labels, at least as probable as P"""
    classifier_remove: list[tuple[str, float]] = argument(
        (), nargs="+", parse=_label, needs="classifier", metavar="LABEL=P"
    )
    """remove texts with one of these labels, at least as probable as P"""
    decontaminate: list[str] = argument((), nargs="+", metavar="PATH")
    """remove texts that share 12 words in a row with a text of these files"""
    decontaminate_field: str | None = argument(
        None, parse=utf8, needs="decontaminate", metavar="NAME"
    )
    """field or column of the text (default: --text_field)"""
    exact_dedup: bool = argument(False)
    """remove texts that repeat an earlier one, also with other blanks"""
    minhash: bool = argument(False)
    """remove near-duplicates with datatrove's MinHash; one of each cluster stays"""
    minhash_ngrams: int | None = argument(None, ge=1, needs="minhash", unset=5, metavar="N")
    """words per n-gram"""
    minhash_buckets: int | None = argument(None, ge=1, needs="minhash", unset=14, metavar="N")
    """number of buckets"""
    minhash_hashes: int | None = argument(None, ge=1, needs="minhash", unset=8, metavar="N")
    """hashes per bucket"""
    text_field: str = shared("text_field", parse=utf8, metavar="NAME")
    """field or column of the text"""
    max_document_bytes: int = shared("max_document_bytes", default="64MiB", parse=count_of_bytes)
    """maximum bytes of a document in UTF-8"""
    on_bad_data: str = shared("on_bad_data")
    """stop at a bad document (error), or skip and list it in removed.ndjson"""
    max_bad_fraction: float = shared("max_bad_fraction")
    """fraction of the documents that may be bad"""
    processes: int = argument(1, ge=1)
    """number of processes that check documents; it does not change the output"""

    def execute(self) -> int:
        try:
            with open_cache(self.cache_dir, self.max_cache_gib) as cache:
                return _filter(self, cache)
        except KeyboardInterrupt as stop:
            raise Interrupted("stopped; run the same command again to continue") from stop


def _filter(args: Filter, cache: ObjectCache) -> int:
    from minimind.data.prepare.encode import MAX_REMARKS
    from minimind.data.quality.records import field_of
    from minimind.data.quality.request import FilterRequest, Steps
    from minimind.data.text.documents import ReadOptions
    from minimind.data.text.inputs import print_left_out
    from minimind.report.formats import count

    if not any(getattr(args, name) for name in STEPS):
        flags = ", ".join(f"--{name}" for name in STEPS)
        raise UsageError(f"minimind data filter has nothing to do; give one or more of {flags}")
    if args.min_chars and args.max_chars and args.min_chars > args.max_chars:
        raise UsageError(
            f"--min_chars {args.min_chars} is more than --max_chars {args.max_chars}; no text has"
            " both; change one of them"
        )
    if args.classifier and not (args.classifier_keep or args.classifier_remove):
        raise UsageError(
            "--classifier has no effect without --classifier_keep or --classifier_remove; add one"
            " of them, or remove --classifier"
        )
    languages, least = _names(args.languages), args.in_force("min_language_probability")
    foreign_field = args.decontaminate_field or args.text_field
    numbers = {name: args.in_force(f"minhash_{name}") for name in ("ngrams", "buckets", "hashes")}
    steps = Steps(
        min_chars=args.min_chars,
        max_chars=args.max_chars,
        languages=languages,
        min_language_probability=least if languages else None,
        rules=_names(args.rules),
        rules_words=args.in_force("rules_words") if args.rules else None,
        classifier=args.classifier and str(args.classifier.expanduser()),
        classifier_keep=dict(args.classifier_keep),
        classifier_remove=dict(args.classifier_remove),
        decontaminate=tuple(args.decontaminate),
        decontaminate_field=foreign_field if args.decontaminate else None,
        exact_dedup=args.exact_dedup,
        minhash=numbers if args.minhash else None,
    )
    steps.require_usable()  # before datatrove, which may be missing, is imported
    from minimind.data.quality.filter import filter_text

    request = FilterRequest(
        tuple(args.paths),
        steps,
        ReadOptions(args.text_field, args.max_document_bytes),
        args.on_bad_data == "skip",
        args.max_bad_fraction,
        args.processes,
    )
    print_left_out(args.paths)
    report = filter_text(request, args.out, cache, args.force)
    _print_report(report)
    if lost := report["lost_bytes"]:
        verb = "is" if lost == 1 else "are"
        print(f"note   {count(lost, 'byte')} of the files {verb} lost", file=sys.stderr)
    for remark in report["remarks"][:MAX_REMARKS]:
        print(f"note   {remark}", file=sys.stderr)
    field = field_of(request.reading)
    read = "" if field == FLAGS["text_field"].default else f" --text_field {shlex.quote(field)}"
    print(f"done: --data_path {args.out}{read}")
    return 0


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _print_report(report: dict[str, Any]) -> None:
    rows = {"read": report["read"], "rejected": report["rejected"], **report["removed"]}
    rows |= {"cut": report["cut"]} if report["cut"]["documents"] else {}
    rows["kept"] = report["kept"]
    width = max(16, *map(len, rows))
    for name, counts in rows.items():
        share, size = counts["documents"] / report["read"]["documents"], counts["bytes"]
        print(f"{name:<{width}} {counts['documents']:>14,} {share:>8.2%} {mebibytes(size):>14}")
