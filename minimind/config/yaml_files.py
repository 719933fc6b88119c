"""YAML files that people write: flags, presets, sources of text, the Accelerate YAML.

A flag's value is the text that stands there (`load_texts`); other files have YAML's own types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from minimind.errors import UsageError
from minimind.runtime.durable_files import read_small_text


class _Loader(yaml.SafeLoader):
    """PyYAML's, but a key written twice is an error: it would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                told = f"{name} is written twice"
                raise yaml.MarkedYAMLError(problem=told, problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


class _TextLoader(_Loader):
    """Every scalar as the text that stands there, as on a command line: 010 is 010, no is no."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        kinds = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
        self.yaml_implicit_resolvers = {}
        self.yaml_constructors = {tag: _Loader.yaml_constructors[tag] for tag in (None, *kinds)}

    def construct_scalar(self, node: Any) -> Any:
        """The text of a node; a MarkedYAMLError for an empty one."""
        if node.style is None and node.value in ("", "~", "null", "Null", "NULL"):
            raise yaml.MarkedYAMLError(
                problem="the value is empty, which no flag is; remove the line, or quote the text",
                problem_mark=node.start_mark,
            )
        return super().construct_scalar(node)


def load_yaml(path: str, source: str) -> dict[str, Any]:
    """The mapping in a YAML file, by YAML's types; `source` says in an error who named the file."""
    return _load(path, source, lambda text: yaml.load(text, _Loader))


def load_texts(path: str, source: str) -> dict[str, Any]:
    """The mapping in a YAML file, with every scalar as the text that stands there."""
    return _load(path, source, lambda text: yaml.load(text, _TextLoader))


def _load(path: str, source: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        text = read_small_text(path)
        found = parse(text)
    except OSError as error:
        told = error.strerror or str(error)
        raise UsageError(f"{source} {path}: {told}; give a readable YAML file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise UsageError(f"{where}: {error.problem}; mend the YAML there") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a 30th of February, for one
        raise UsageError(f"{path}: {error}; mend the YAML") from error
    if not isinstance(found, dict):
        held = "nothing" if found is None else type(found).__name__
        raise UsageError(f"{path}: holds {held}, not `name: value` lines; write those")
    return found
