"""`minimind eval`: what is read, the model that is asked, and the table it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import add
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minimind.config.arguments import add_model, at_least, count_of_bytes, fraction, utf8
from minimind.errors import DataError, UsageError
from minimind.runtime.durable_files import printing, storing

if TYPE_CHECKING:
    from minimind.data.prepare.prepare import Prepared
    from minimind.data.tokenizer.load import AnyTokenizer
    from minimind.train.evaluate import LossSums
    from minimind.train.evaluate_texts import Part

SPLITS = {"train": ("train",), "val": ("val",), "all": ("train", "val")}


def add_parser(subs: Any) -> None:
    """`eval`."""
    added = subs.add_parser(
        "eval",
        help="loss, perplexity and bits per byte of a model on text",
        description="Loss, perplexity and bits per byte of text, of each source and of all, in"
        " one process or in several: torchrun --nproc-per-node 2 -m minimind eval ...",
        example="minimind eval --checkpoint out --data held_out.jsonl",
    )
    add_model(added)
    add = added.add_argument
    told = "text, each path a source of its own; or folders that `minimind prepare` wrote"
    add("--data", nargs="+", required=True, metavar="PATH", help=told)
    split = "part of a prepared folder (default: val); raw text is read whole"
    add("--split", choices=tuple(SPLITS), help=split)
    add("--batch_size", type=at_least(1), default=8, help="windows at once")
    add(
        "--max_seq_len",
        type=at_least(1),
        help="tokens of a window (default: the positions of the model)",
    )
    rows = "windows of each source in a split, and then to the document's end (default: all)"
    add("--max_rows", type=at_least(1), help=rows)
    masks = argparse.BooleanOptionalAction
    apart = "each document by itself; off: as packed rows are read, one after another"
    add("--doc_mask", action=masks, help=apart)
    added.set_defaults(doc_mask=True)  # Python 3.10 would write a default of its own into the help
    told = "field or column that has the text"
    add("--text_field", type=utf8, default="text", help=told)
    told = "longest document of raw text (default: 64MiB, less with some tokenizers)"
    add("--max_document_bytes", type=count_of_bytes, help=told)
    bad = "what is no document of raw text ends this (error), or is passed over and told"
    add("--on_bad_data", choices=("error", "skip"), default="error", help=bad)
    share = "share of the documents that may be bad, with skip"
    add("--max_bad_fraction", type=fraction, default=0.05, help=share)
    add("--cache_dir", default="~/.cache/minimind", help="where tokens are kept")
    add("--json", action="store_true", help="for programs: one object")


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate, and print what was found; of several processes only the first one prints."""
    from minimind.config.deepspeed.backend_choice import device_for
    from minimind.config.launcher_env import read_launch
    from minimind.engine.build import forward_only
    from minimind.inference.load_model import load_model
    from minimind.train.evaluate_texts import score

    _require_once(args.data)
    launch = read_launch(os.environ)
    device = device_for(args.device, "--device", launch)
    model, tokenizer, path = load_model(args.checkpoint, args.model, args.tokenizer)
    model.config.doc_mask = False  # the windows say what is seen together
    length = _window(args.max_seq_len, model.config.max_position_embeddings)
    with _copy_of(tokenizer) as copy:
        prepared = [_prepared(p, tokenizer, copy, args, launch.rank == 0) for p in args.data]
    parts = [
        part
        for place, found in zip(args.data, prepared, strict=True)
        for part in _parts(place, found, length, args)
    ]
    with forward_only(device, dist_timeout=600) as accelerator:
        found = score(accelerator, model, parts, tokenizer.piece_bytes(), args.batch_size)
        is_first = accelerator.is_main_process
    if is_first:
        told = [count for part in parts for count in part.text_bytes]
        with printing():
            _print(found, path, None in told, args.json)
    return 0


def _require_once(places: list[str]) -> None:
    """Nothing, or a UsageError for text that would count twice."""
    from minimind.data.prepare.prepare import is_prepared
    from minimind.data.text.inputs import find_files, require_once

    paths: list[Path] = []
    for place in places:
        is_folder = is_prepared(place)
        paths += [Path(place).expanduser()] if is_folder else find_files([place])
    require_once(paths, "")


def _window(asked: int | None, positions: int) -> int:
    if asked is not None and asked > positions:
        raise UsageError(
            f"--max_seq_len {asked} is more than the {positions} positions of the model; lower it"
        )
    return asked or positions


@contextmanager
def _copy_of(tokenizer: AnyTokenizer) -> Iterator[str]:
    """A folder with the files of the tokenizer: a run that goes on may delete the original."""
    from minimind.data.tokenizer.files import write_tokenizer

    with storing("a temporary folder", "free some space, or name another place by TMPDIR"):
        folder = TemporaryDirectory()
    with folder as place:
        write_tokenizer(place, tokenizer.files())
        yield place


def _prepared(
    place: str, tokenizer: AnyTokenizer, copy: str, args: argparse.Namespace, is_first: bool
) -> Prepared:
    """Tokens of a prepared folder, or of raw text by way of the cache.

    `copy` is a folder with the files of the tokenizer.
    """
    from minimind.data.prepare.prepare import Asked, is_prepared, open_prepared, prepare_for_run
    from minimind.data.prepare.work_units import Options, Source
    from minimind.data.tokenizer.load import longest_document

    if not is_prepared(place):
        if args.split not in (None, "all"):
            raise UsageError(f"--split {args.split}: {place} is raw text; leave --split out")
        most = args.max_document_bytes or longest_document(copy)
        asked = Asked(
            (Source("data", (place,)),),
            copy,
            options=Options(args.text_field, most, val_fraction=0.0),
            skips_bad=args.on_bad_data == "skip",
            max_bad_fraction=args.max_bad_fraction,
            progress=is_first,
        )
        found = prepare_for_run(asked, Path(args.cache_dir).expanduser())
        if is_first and (bad := found.manifest["rejected"]["count"]):
            whole = bad + found.manifest["documents"]
            told = f"{bad:,} of {whole:,} documents are bad and passed over"
            print(f"{place}: {told}, the first: {found.first_rejected}", file=sys.stderr)
        return found
    found = open_prepared(Path(place).expanduser())
    if found.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{place}: was prepared with another tokenizer than the model's; prepare its text again"
            f" with --tokenizer {tokenizer.path}, or give the text itself"
        )
    return found


def _parts(place: str, prepared: Prepared, length: int, args: argparse.Namespace) -> list[Part]:
    """The windows of each split that is read."""
    from minimind.data.loader.eval_windows import windows_of
    from minimind.data.prepare.prepare import is_prepared
    from minimind.train.evaluate_texts import Part

    is_folder = is_prepared(place)
    splits = SPLITS[args.split or "val"] if is_folder else ("train",)
    sources = prepared.manifest["sources"]
    names = tuple(_name(place, source["name"], args.data, is_folder) for source in sources)
    parts = []
    for split in splits:
        shards = prepared.train if split == "train" else prepared.val
        eos_id = prepared.tokenizer.eos_id
        windows = windows_of(shards, length, eos_id, args.doc_mask, args.max_rows)
        whole = prepared.manifest["splits"][split]["text_bytes"]
        if args.max_rows is not None:
            known = (None,) * len(sources)
        elif len(sources) == 1:
            known = (whole,)
        else:
            known = tuple(source.get("split_bytes", {}).get(split) for source in sources)
        parts.append(Part(windows, names, known))
    if not sum(len(part.windows) for part in parts):
        raise DataError(
            f"{place}: its {splits[0]} split holds no text; give --split train, or prepare it with"
            " a larger --val_fraction"
        )
    return parts


def _name(place: str, source: str, places: list[str], is_folder: bool) -> str:
    """What a source is called: by its folder too where there are several."""
    if not is_folder:
        return place
    return source if len(places) == 1 else f"{place}:{source}"


def _print(found: Mapping[str, LossSums], path: Path, is_counted: bool, as_json: bool) -> None:
    """What was found; `is_counted`: the bytes of some text are not known, but of its tokens."""
    whole = reduce(add, found.values())
    if as_json:
        told = {
            "model": str(path),
            **_figures(whole),
            "bytes_of": "tokens" if is_counted else "text",
        }
        if len(found) > 1:
            told["by_source"] = {name: _figures(sums) for name, sums in found.items()}
        print(json.dumps(told, ensure_ascii=False))
        return
    wide = max(len(name) for name in (*found, "source"))
    print(path)
    print(f"{'source':<{wide}} {'loss':>8} {'perplexity':>11} {'bits/byte':>10} {'tokens':>13}")
    rows = [*found.items()] + ([("all", whole)] if len(found) > 1 else [])
    for name, sums in rows:
        print(
            f"{name:<{wide}} {sums.mean:>8.4f} {sums.perplexity:>11,.2f}"
            f" {sums.bits_per_byte:>10.4f} {int(sums.tokens):>13,}"
        )
    if is_counted:
        print("bits/byte: over the bytes of the tokens; those of the text are not known here")


def _figures(sums: LossSums) -> dict[str, Any]:
    return {
        "loss": sums.mean,
        "perplexity": sums.perplexity,
        "bits_per_byte": sums.bits_per_byte,
        "tokens": int(sums.tokens),
        "bytes": int(sums.text_bytes),
    }
