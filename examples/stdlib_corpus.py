"""A corpus that every machine has: the source of the running Python's own standard library.

    python examples/stdlib_corpus.py OUT.jsonl [--max_megabytes 12]

One document a file, sorted by name, so the same interpreter always writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DOCUMENT_BYTES = 64_000
SKIPPED = {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}


def sources(library: Path) -> Iterator[str]:
    """The text of every module but the tests, in the order of their names."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(library).parts):
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip() and "\0" not in text:
                yield whole_lines(text, DOCUMENT_BYTES)


def whole_lines(text: str, limit_bytes: int) -> str:
    """The text, or as many of its first lines as fit."""
    content = text.encode()
    if len(content) <= limit_bytes:
        return text
    start = content[:limit_bytes]
    return start[: start.rfind(b"\n") + 1].decode() or start.decode(errors="ignore")


def corpus(library: Path, limit_bytes: int) -> list[bytes]:
    """Lines of JSON, no more of them than fit."""
    lines: list[bytes] = []
    size = 0
    for text in sources(library):
        line = json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"
        size += len(line)
        if size > limit_bytes:
            break
        lines.append(line)
    return lines


def write_if_changed(path: Path, content: bytes) -> None:
    """Replace the file in one go, or leave it alone when it already says this."""
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> None:
    """Write the corpus and say how large it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--max_megabytes", type=float, default=12, help="stop before this size")
    args = parser.parse_args(argv)
    lines = corpus(Path(sysconfig.get_paths()["stdlib"]), int(args.max_megabytes * 1e6))
    content = b"".join(lines)
    write_if_changed(args.out, content)
    print(f"{len(lines)} documents, {len(content) / 1e6:.1f} MB, {args.out}")


if __name__ == "__main__":
    main()
