"""YAML files of flags, shapes and sources: mappings without a key twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from minimind.errors import UsageError
from minimind.runtime.durable_files import read_small_text


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                problem = f"duplicate key {name}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _TextLoader(_Loader):
    """Loader that keeps every scalar as text: `010` is not octal, `no` is not false."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        kinds = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
        self.yaml_implicit_resolvers = {}
        self.yaml_constructors = {tag: _Loader.yaml_constructors[tag] for tag in (None, *kinds)}

    def construct_scalar(self, node: Any) -> Any:
        """Return the text of a node; raise MarkedYAMLError if it is empty."""
        if node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
            raise yaml.MarkedYAMLError(problem="the value is empty", problem_mark=node.start_mark)
        return super().construct_scalar(node)


def load_yaml(path: str, source: str) -> dict[str, Any]:
    """Load a mapping with YAML's types; `source` names its flag or variable in errors."""
    return _load(path, source, lambda text: yaml.load(text, _Loader))


def load_yaml_texts(path: str, source: str) -> dict[str, Any]:
    """Load a mapping with every scalar as text."""
    return _load(path, source, lambda text: yaml.load(text, _TextLoader))


def _load(path: str, source: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        document = parse(read_small_text(path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{source} {path}: {reason}; give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise UsageError(f"{where}: {error.problem}; correct the YAML there") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise UsageError(f"{path}: {error}; correct the YAML") from error
    if not isinstance(document, dict):
        fault = "is empty" if document is None else "is not a mapping"
        raise UsageError(f"{path}: {fault}; write `name: value` lines")
    return document


WEIGHTS = "a number from 2**-53 to 2**53"  # of sources; no sum or share of them is infinite or 0


def source_weight(text: str) -> float:
    """Parse the weight of a source, one of WEIGHTS; ValueError for another text."""
    value = float(text)
    if not 2**-53 <= value <= 2**53:
        raise ValueError(text)
    return value
