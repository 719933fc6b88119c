"""Conversations to fine-tune on: what the functions of this Python's standard library do.

    python examples/stdlib_conversations.py out/sample/talk.jsonl
One question and one answer per function: the first paragraph of its docstring. docs/fine_tuning.md
trains on them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "argparse ast base64 bisect cmath collections contextlib copy csv dataclasses datetime decimal"
    " dis email.utils enum fractions functools glob gzip hashlib heapq html inspect io itertools"
    " json locale logging math operator os os.path pathlib platform pprint queue random re sched"
    " secrets shutil signal socket statistics string struct subprocess tarfile tempfile textwrap"
    " threading time traceback types typing unicodedata urllib.parse uuid warnings zipfile zlib"
).split()
LONGEST = 200  # characters of an answer


def pairs() -> Iterator[tuple[str, str]]:
    """Questions and answers."""
    for module in MODULES:
        found = vars(importlib.import_module(module))
        for name, value in sorted(found.items()):
            text = inspect.getdoc(value) if callable(value) and not name.startswith("_") else None
            first = " ".join((text or "").split("\n\n")[0].split())
            if 20 < len(first) <= LONGEST:
                yield f"What does {module}.{name} do?", first


def main(out: Path) -> None:
    """Write the conversations, shuffled."""
    lines = [
        json.dumps(
            {
                "conversations": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
        for question, answer in pairs()
    ]
    random.Random(0).shuffle(lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{out}: {len(lines):,} conversations")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
