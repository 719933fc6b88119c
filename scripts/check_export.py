"""Export a run in each format, load it in a fresh virtual environment without this package, and
print the largest difference between the logits.

    .venv/bin/python scripts/check_export.py --checkpoint out/mine [--format llama] [--python FILE]

Without --python an environment is made, of the versions in constraints.txt; with it that
interpreter is used, and the import of minimind blocked there. examples/load_export.py does the
loading.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

if not __package__:  # run as a script: the package is that of this checkout, whichever is installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import_module("minimind")
    del sys.path[0]
import torch
from safetensors.torch import save_file

from minimind.errors import RunError
from minimind.interop.export import export
from minimind.interop.formats import WRITTEN
from minimind.interop.weights import TRANSFORMERS, Weights, load_weights_from
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.runtime.exit import leave

ROOT = Path(__file__).resolve().parent.parent
FORMATS = [name for name in WRITTEN if name != TRANSFORMERS]
NEEDED = ("torch", "transformers", "safetensors", "gguf", "accelerate")  # the last two for gguf
TEXT = "The quick brown fox, 1234 times:\n  \u6625\u7720\u4e0d\u89ba\u66c9 </s>\t...\n"
POSITIONS = 1024


def write_reference(weights: Weights, folder: Path) -> None:
    """The logits of the checkpoint for random ids, and the ids of a text."""
    model = MiniMindForCausalLM(weights.config).eval()
    weights.fill(model)
    length = min(128, weights.config.max_position_embeddings)
    shape, draw = (-(-POSITIONS // length), length), torch.Generator().manual_seed(1)
    ids = torch.randint(weights.config.vocab_size, shape, generator=draw)
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, folder / "logits.safetensors")
    told = {"text": TEXT, "ids": weights.load_tokenizer().encode(TEXT)}
    told["head_dim"] = weights.config.head_dim  # which transformers does not read of qwen3's gguf
    (folder / "text.json").write_text(json.dumps(told), encoding="utf-8")


def fresh_python(folder: Path) -> Path:
    """The interpreter of a new virtual environment that has what loading takes, and no more."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *NEEDED], check=True)
    return python


def check(weights: Weights, forms: Sequence[str], python: Path | None) -> int:
    """0 if every format gives the checkpoint's logits, else 1; what differs is printed."""
    statuses = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_reference(weights, folder)
        python = python.absolute() if python else fresh_python(folder / "venv")
        environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environ |= {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
        for form in forms:
            export(weights, weights.load_tokenizer(), folder / form, form)
            command = [python, ROOT / "examples" / "load_export.py", folder / form, folder]
            done = subprocess.run(list(map(str, command)), env=environ, cwd=folder)
            statuses.append(done.returncode)
    return int(any(statuses))


def main() -> int:
    """The same of the command line; the status of the error where nothing can be exported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="a run's out_dir, or an export")
    parser.add_argument("--format", choices=FORMATS, action="append", help="again for more of them")
    parser.add_argument("--python", type=Path, help="an interpreter to use as it is")
    args = parser.parse_args()
    try:
        return check(load_weights_from(args.checkpoint), args.format or FORMATS, args.python)
    except RunError as error:
        print(f"check_export: error[{error.code}]: {error}", file=sys.stderr)
        return error.status


if __name__ == "__main__":
    leave(main())
