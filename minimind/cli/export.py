"""`minimind export` and `minimind import`: their words, what they print, their status."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from minimind.config.arguments import at_least, non_empty, non_empty_path, positive, size_in_bytes
from minimind.runtime.output_folder import NewFolder

FORMATS = ("minimind", "llama", "gguf", "transformers")
DTYPES = ("float32", "bfloat16", "float16")


def add_parsers(subs: Any) -> None:
    """`export` and `import`."""
    told = "A model as other software loads it. No GPU is needed, one tensor is in memory at a time"
    example = "minimind export --checkpoint out --format llama --out out/llama"
    added = subs.add_parser("export", help=told, description=f"{told}.", example=example)
    add = added.add_argument
    place = "a run's out_dir, a step_ directory, or what `import` or `export` wrote"
    add("--checkpoint", type=non_empty, required=True, metavar="PLACE", help=place)
    kinds = (
        "minimind: with our code, for transformers; llama: for whatever loads Llama; gguf;"
        " transformers: a run of --model hf:, as the model that it is"
    )
    add("--format", required=True, choices=FORMATS, help=kinds)
    add("--dtype", choices=DTYPES, default="float32", help="precision of the numbers")
    most = "largest size of a file of safetensors (default: 2GB)"
    add("--max_shard_size", type=size_in_bytes, help=most)
    _add_out(added)

    told = "Weights made elsewhere -> a directory of ours, to go on from or to generate with"
    example = "minimind import --from llama path/to/llama --out out/imported"
    added = subs.add_parser("import", help=told, description=f"{told}.", example=example)
    add = added.add_argument
    add("source", type=non_empty_path, metavar="FILE|DIR", help="a file of weights, or a directory")
    add(
        "--from",
        required=True,
        choices=("minimind2", "llama"),
        dest="kind",
        help="whose format it has",
    )
    add(
        "--tokenizer",
        type=non_empty_path,
        help="tokenizer, a file or directory (default: the one in DIR)",
    )
    shape = "of a file without config.json: "
    for name, told in (("n_heads", "query heads"), ("n_kv_heads", "key/value heads, to be sure")):
        add(f"--{name}", type=at_least(1), help=shape + told)
    for name, told in (("rope_theta", "base of its rotations"), ("norm_eps", "added in its norms")):
        add(f"--{name}", type=positive, help=shape + told)
    add("--max_seq_len", type=at_least(1), help=f"{shape}positions it was trained on")
    _add_out(added)


def _add_out(added: argparse.ArgumentParser) -> None:
    added.add_argument("--out", type=non_empty_path, required=True, help="a new folder")
    added.add_argument("--force", action="store_true", help="replace an earlier --out")
    added.add_argument("--debug", action="store_true", help="show tracebacks")


def run_export(args: argparse.Namespace) -> int:
    """Write a model in another format, and say what was written."""
    from minimind.interop.export import OWN, export, told  # imports torch
    from minimind.interop.weights import Weights, read_weights

    def write(found: Weights) -> str:
        how = (args.out, args.format, args.dtype, args.max_shard_size, args.force)
        done = export(found, found.load_tokenizer(), *how)
        if done.note:
            print(f"{args.out}: {done.note}", file=sys.stderr)
        return told(done, f"{args.format} in {args.dtype}", found.path, args.out)

    NewFolder(args.out, args.force, OWN, "export").require_free()  # before gigabytes are hashed
    print(read_weights(args.checkpoint, write))
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Write somebody else's model as one of ours, and say what was written."""
    from minimind.interop.export import OWN, export, told  # imports torch
    from minimind.interop.foreign_config import Given, require_said
    from minimind.interop.weights import load_weights_from

    NewFolder(args.out, args.force, OWN, "export").require_free()
    given = Given(args.n_heads, args.n_kv_heads, args.rope_theta, args.norm_eps, args.max_seq_len)
    found = load_weights_from(args.source, given, args.kind)
    require_said(found.path, found.config, given)
    if args.tokenizer:
        found = replace(found, tokenizer=args.tokenizer)
    tokenizer = found.load_tokenizer()
    found.adopt(tokenizer)
    done = export(found, tokenizer, args.out, "minimind", force=args.force)
    print(told(done, "minimind in float32", found.path, args.out))
    return 0
