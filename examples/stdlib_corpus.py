"""A corpus that every machine has: what the running Python says about itself.

    python examples/stdlib_corpus.py OUT.jsonl [--max_megabytes 12]

The topics of its language reference, a document each, then one document a module: the docstrings
with the signatures of what they describe. All are sorted by name, so the same interpreter always
writes the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

DOCUMENT_BYTES = 64_000
SHORTEST = 200  # characters of a document
SKIPPED = {
    *("test", "tests", "site-packages", "dist-packages", "__pycache__"),
    *("encodings", "idlelib", "lib2to3", "distutils", "pydoc_data", "turtledemo"),
}


def modules(library: Path) -> Iterator[str]:
    """The text of every module but tests, tables and old tools, in the order of their names."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(library).parts):
            try:
                text = path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip() and "\0" not in text:
                yield text


def sources(library: Path) -> Iterator[str]:
    """The modules, each up to a limit."""
    return (whole_lines(text, DOCUMENT_BYTES) for text in modules(library))


def topics(library: Path) -> Iterator[str]:
    """The language reference, as help("try") shows it; none where the library lacks it."""
    path = library / "pydoc_data" / "topics.py"
    for node in ast.parse(path.read_bytes()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            texts = ast.literal_eval(node.value)
            yield from (f"{texts[name].strip()}\n" for name in sorted(texts))


def pages(library: Path) -> Iterator[str]:
    """The reference, and what every module says about itself: its docstring, and its outline."""
    yield from (whole_lines(text, DOCUMENT_BYTES) for text in topics(library))
    for text in modules(library):
        module = ast.parse(text)
        page = "\n".join([*documented(module), "", *outline(module)]).strip()
        if len(page) >= SHORTEST:
            yield whole_lines(f"{page}\n", DOCUMENT_BYTES)


def outline(parent: ast.AST, indent: str = "") -> list[str]:
    """The functions and classes of a module or class, each with its signature and docstring."""
    blocks = []
    for node in ast.iter_child_nodes(parent):
        inner: list[str] = []
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(map(ast.unparse, node.bases))
            head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
            inner = outline(node, f"{indent}    ")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            head = f"def {node.name}({ast.unparse(node.args)}):"
        else:
            continue
        doc = documented(node)
        if doc or inner:
            lines = [head, *(f"    {line}" if line else "" for line in doc), ""]
            own = "\n".join(f"{indent}{line}" if line else "" for line in lines)
            blocks.append("\n".join([own, *inner]))
    return blocks


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documented(node: Documented) -> list[str]:
    """The lines of a docstring with its quotes; none if there is no docstring."""
    lines = (ast.get_docstring(node) or "").split("\n")
    if lines == [""]:
        return []
    return [f'"""{lines[0]}', *lines[1:], '"""'] if lines[1:] else [f'"""{lines[0]}"""']


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
    for text in pages(library):
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
