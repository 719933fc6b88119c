"""The packages of minimind/ and the direction of imports; `python -m tests.packages` prints them.

A module may import its own package and those below it in `PACKAGES`, except pairs of `FORBIDDEN`.
Imports inside functions count too. Only those of `SEAM` may import accelerate and deepspeed.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]

# From the top down.
PACKAGES = [
    "cli",
    "sweep",
    "launch",
    "train",
    "serve",
    "inference",
    "interop",
    "recovery",
    "checkpoint",
    "report",
    "engine",
    "architecture",
    "model",
    "data.quality",
    "data.prepare",
    "data.rows",
    "data.shards",
    "data.chat",
    "data.tokenizer",
    "data.text",
    "config.deepspeed",
    "config",
    "runtime",
    "errors",
]
FORBIDDEN = {("model", "data")}  # (package, one below it that it does not import)
SEAM = {"minimind.engine.build", "minimind.launch.accelerate_launch"}


def modules() -> dict[str, str]:
    """Source by dotted name, without `__init__.py` and `__main__.py`."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "minimind").rglob("*.py"))
        if not path.name.startswith("__")
    }


def package_of(module: str) -> str | None:
    """The longest entry of `PACKAGES` that `module` is or lies under; None for another name."""
    inside = module.removeprefix("minimind.")
    found = [name for name in PACKAGES if f"{inside}.".startswith(f"{name}.")]
    return max(found, key=len, default=None)


@cache
def imports_of(source: str) -> frozenset[str]:
    """Every dotted name that `source` imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def loaded_by(module: str, sources: dict[str, str]) -> set[str]:
    """`module` and all that importing it imports, of ours and others: no import in a function."""
    found, left = set(), [module]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _imports_at_once(ast.parse(sources.get(name, "")).body)
    return found & {*sources} | {name.partition(".")[0] for name in found - {*sources}}


def _imports_at_once(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= imports_of(ast.unparse(node))
        elif isinstance(node, ast.If):
            is_typing = "TYPE_CHECKING" in ast.unparse(node.test)
            names |= _imports_at_once(node.orelse if is_typing else [*node.body, *node.orelse])
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            names |= _imports_at_once(node.body)
    return names


def violations(sources: dict[str, str]) -> list[str]:
    """One sentence for each import against the direction, foreign to the seam, or in a cycle."""
    found = []
    graph = {}
    for module, source in sources.items():
        imported = imports_of(source)
        package = package_of(module)
        if package is None:
            found.append(f"{module} is in no package of PACKAGES")
            continue
        graph[module] = {name for name in imported if name in sources}
        for name in sorted(graph[module]):
            above = package_of(name)
            if above is not None and PACKAGES.index(above) < PACKAGES.index(package):
                found.append(f"{module} imports {name}; {above} is above {package}")
            if above is not None and (package, above.split(".")[0]) in FORBIDDEN:
                found.append(f"{module} imports {name}; {package} must not know {above}")
        libraries = {name.split(".")[0] for name in imported}
        if module not in SEAM and libraries & {"accelerate", "deepspeed"}:
            found.append(f"{module} imports accelerate or deepspeed; only {sorted(SEAM)} may")
    return found + [f"cycle: {' -> '.join(cycle)}" for cycle in _cycles(graph)]


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for name in sorted(graph.get(module, ())):
                visit(name, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return found


def table(sources: dict[str, str]) -> str:
    """Packages from the top down with their number of modules and lines, then the totals."""
    lines = {module: source.count("\n") for module, source in sources.items()}
    rows = [f"{'package':<18}{'modules':>8}{'lines':>8}"]
    for package in PACKAGES:
        own = [lines[module] for module in sources if package_of(module) == package]
        rows.append(f"{package:<18}{len(own):>8}{sum(own):>8,}")
    rows.append(f"{'in all':<18}{len(lines):>8}{sum(lines.values()):>8,}")
    rows.append(f"median module: {median(lines.values()):.0f} lines; imports go downwards only")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table(modules()))
    raise SystemExit("\n".join(violations(modules())))
