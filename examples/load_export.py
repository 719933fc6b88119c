"""Load what `minimind export` wrote where the package minimind is not, and compare the logits.

    python load_export.py DIR REFERENCE

REFERENCE is what scripts/check_export.py left: ids, their logits, and a text with its ids. For the
format minimind the model's code is run from DIR: do that with directories of your own alone.
"""

from __future__ import annotations

import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class Blocked(MetaPathFinder):
    """Lets nobody import minimind, also where it is installed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Nothing, or an ImportError for the package."""
        if fullname.split(".")[0] == "minimind":
            raise ModuleNotFoundError("minimind is blocked here", name=fullname)


def main(directory: Path, reference: Path) -> int:
    """Print the largest difference; 1 if it is more than rounding, or if any id differs."""
    sys.meta_path.insert(0, Blocked())
    import torch
    import transformers
    from safetensors.torch import load_file

    held = load_file(reference / "logits.safetensors")
    expected = json.loads((reference / "text.json").read_text(encoding="utf-8"))
    options: dict[str, Any] = {"dtype": torch.float32}
    if (directory / "model.gguf").exists():
        options |= {"gguf_file": "model.gguf", "head_dim": expected["head_dim"]}
    else:
        config = json.loads((directory / "config.json").read_text())
        options["trust_remote_code"] = "auto_map" in config
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    with torch.no_grad():
        difference = float((model(input_ids=held["ids"]).logits - held["logits"]).abs().max())
    trusted = {"trust_remote_code": options.get("trust_remote_code", False)}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **trusted)
    same = tokenizer.encode(expected["text"]) == expected["ids"]
    print(
        f"{directory.name}: {type(model).__name__} by transformers {transformers.__version__},"
        f" without minimind: largest logit difference {difference:.2g} over"
        f" {held['ids'].numel():,} positions; {'the same' if same else 'OTHER'} ids for"
        f" {len(expected['ids'])} tokens of text"
    )
    return 0 if difference <= 1e-5 and same and "minimind" not in sys.modules else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
