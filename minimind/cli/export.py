"""`minimind export` and `minimind import`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from minimind.config.arguments import (
    add_weights,
    at_least,
    non_empty,
    non_empty_path,
    positive,
    size_in_bytes,
)
from minimind.errors import UsageError

FORMATS = ("minimind", "llama", "gguf", "transformers")
KINDS = ("minimind2", "minimind3", "llama")
DTYPES = ("float32", "bfloat16", "float16")


def add_parsers(subs: Any) -> None:
    """Add the parsers of `export` and `import`."""
    text = "Export a model for other software. Needs no GPU, and memory for one tensor"
    example = "minimind export --checkpoint out --format llama --out out/llama"
    parser = subs.add_parser("export", help=text, description=f"{text}.", example=example)
    add = parser.add_argument
    text = "a run's out_dir, a step_ directory, or a directory of `import` or `export`"
    add("--checkpoint", type=non_empty, required=True, metavar="PLACE", help=text)
    text = (
        "minimind: with our modeling code, for transformers; llama: for software that loads Llama;"
        " gguf; transformers: a run of --model hf:, in its own architecture"
    )
    add("--format", required=True, choices=FORMATS, help=text)
    add_weights(add)
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the tensors")
    text = "maximum size of a file of safetensors (default: 2GB)"
    add("--max_shard_size", type=size_in_bytes, help=text)
    text = "upload --out to this model of the Hugging Face Hub, which is made if there is none"
    add("--push_to_hub", type=non_empty, metavar="USER/NAME", help=text)
    text = "make the model of --push_to_hub private"
    add("--hub_private_repo", action="store_true", help=text)
    _add_out(parser)

    text = "Import the weights of other software, to train or to generate with"
    example = "minimind import --from llama path/to/llama --out out/imported"
    parser = subs.add_parser("import", help=text, description=f"{text}.", example=example)
    add = parser.add_argument
    add("source", type=non_empty_path, metavar="FILE|DIR", help="a file of weights, or a directory")
    text = "format of the source"
    add("--from", required=True, choices=KINDS, dest="kind", help=text)
    text = "tokenizer file or directory (default: the one in DIR)"
    add("--tokenizer", type=non_empty_path, help=text)
    shape = "for a file without config.json: "
    add("--n_heads", type=at_least(1), help=f"{shape}query heads")
    add("--n_kv_heads", type=at_least(1), help=f"{shape}key/value heads, as a check")
    add("--rope_theta", type=positive, help=f"{shape}rotary base")
    add("--norm_eps", type=positive, help=f"{shape}epsilon of the norms")
    add("--max_seq_len", type=at_least(1), help=f"{shape}maximum positions")
    _add_out(parser)


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=non_empty_path, required=True, help="new output folder")
    parser.add_argument("--force", action="store_true", help="replace an earlier --out")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def run_export(args: argparse.Namespace) -> int:
    """Write a model in another format and print a summary."""
    from minimind.interop.export import export, output, push_export  # imports torch
    from minimind.interop.model_card import is_ours
    from minimind.interop.weights import Weights, read_weights
    from minimind.runtime.hub import owned_model

    def write(weights: Weights) -> str:
        options = (args.out, args.format, args.dtype, args.max_shard_size, args.force)
        written = export(weights, weights.load_tokenizer(), *options)
        if written.note:
            print(f"{args.out}: {written.note}", file=sys.stderr)
        return written.summary(f"as {args.format} in {args.dtype}", weights.path, args.out)

    output(args.out, args.force).require_free()  # before gigabytes are hashed
    if args.hub_private_repo and not args.push_to_hub:
        raise UsageError("--hub_private_repo is for --push_to_hub; give both, or drop it")
    model = args.push_to_hub and owned_model(args.push_to_hub, args.hub_private_repo, is_ours)
    print(read_weights(args.checkpoint, write, args.weights), flush=True)
    if model:
        print(push_export(args.out, model, args.hub_private_repo, args.format))
    return 0


def run_import(args: argparse.Namespace) -> int:
    """Write a model made elsewhere in our format and print a summary."""
    from minimind.interop.export import export, output  # imports torch
    from minimind.interop.foreign_config import ShapeFlags, check_flags
    from minimind.interop.weights import load_weights_from

    output(args.out, args.force).require_free()
    names = ("n_heads", "n_kv_heads", "rope_theta", "norm_eps", "max_seq_len")
    flags = ShapeFlags(*(getattr(args, name) for name in names))
    weights = load_weights_from(args.source, flags, args.kind)
    check_flags(weights.path, weights.config, flags)
    if args.tokenizer:
        weights = weights.with_tokenizer(args.tokenizer)
    tokenizer = weights.load_tokenizer()
    ids = {"bos": tokenizer.bos_id if tokenizer.bos_id >= 0 else None}
    ids |= {"eos": tokenizer.eos_id, "pad": tokenizer.pad_id}
    for name, value in ids.items():  # files without a configuration have none
        setattr(weights.config, f"{name}_token_id", value)
    rows = weights.config.vocab_size
    spare = rows - tokenizer.vocab_size
    unused = f"{spare:,} of {rows:,} rows of the embedding have no id" if spare else ""
    if note := "; ".join(filter(None, (weights.note, unused))):
        print(f"{weights.path}: {note}", file=sys.stderr)
    written = export(weights, tokenizer, args.out, "minimind", force=args.force)
    print(written.summary("as minimind in float32", weights.path, args.out))
    return 0
