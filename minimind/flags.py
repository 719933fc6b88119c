"""The command line, --config files and model presets -> one `RunConfig`, every value with a source.

Precedence: a flag on the command line > `--config FILE.yaml` > the model preset > the default.
(The Accelerate and DeepSpeed files come before the default; see train/literals.py.)
Standard library and PyYAML only, so that a mistake is told before torch is imported.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn

import yaml

from minimind.checks import check
from minimind.config import DISTRIBUTION, FLAGS, PROJECT, RunConfig
from minimind.errors import UsageError
from minimind.model_flags import HUGGING_FACE, SHAPE

_SPELLED = [
    *FLAGS,
    *(f"no-{name}" for name, spec in FLAGS.items() if isinstance(spec.default, bool)),
]
PRESETS = PROJECT / "configs" / "models"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists every flag")


def build_parser() -> argparse.ArgumentParser:
    """The parser behind --help: flags in groups, every value still the string that was typed."""
    parser = _Parser(
        prog="train_pretrain.py",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage="train_pretrain.py [--flag value ...]",
        description="Pretrain a MiniMind decoder under DeepSpeed ZeRO.",
    )
    parser.add_argument("--version", action="version", version=DISTRIBUTION)
    groups: dict[str, Any] = {}
    for name, spec in FLAGS.items():
        meta = spec.metadata
        group = groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        options: dict[str, Any] = {"dest": name, "help": _help(spec)}
        if isinstance(spec.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(spec)
            options["nargs"] = "+" if isinstance(spec.default, tuple) else None
        group.add_argument(f"--{name}", **options)
    return parser


def _help(spec: Any) -> str:
    default = spec.default
    known = default is not None and default is not MISSING
    shown = " ".join(default) if isinstance(default, tuple) else default
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else shown
    told = spec.metadata["help"] + (f" (default: {shown})" if known else "")
    return told.replace("%", "%%")  # argparse formats it


def _metavar(spec: Any) -> str:
    choices = spec.metadata.get("choices")
    kind = {"str": "TEXT", "tuple": "PATH"}.get(kind_of(spec), kind_of(spec).upper())
    return "{" + ",".join(choices) + "}" if choices else kind


def kind_of(spec: Any) -> str:
    """`int`, `float`, `str`, `bool` or `tuple`, read off the annotation."""
    return spec.type.split(" ")[0].split("[")[0]


def parse_flags(argv: Sequence[str]) -> RunConfig:
    """The run that `argv` asks for, every field with its source; raises UsageError."""
    return run_of(_given(argv), "--{name}")


def run_of(given: Mapping[str, Any], source: str) -> RunConfig:
    """The run with these flags by name, `source` saying how they were given; raises UsageError."""
    _known(given, "the arguments")
    values: dict[str, Any] = {}
    sources = dict.fromkeys(FLAGS, "default")

    def take(found: Mapping[str, Any], source_of: str) -> None:
        for name, raw in found.items():
            source = source_of.format(name=name)
            values[name], sources[name] = convert(name, raw, source), source

    from_file = load_yaml(given["config"], "--config") if "config" in given else {}
    _known(from_file, given.get("config"))
    if "config" in from_file:
        raise UsageError(f"'config' in {given['config']}: a file names no other; remove it")
    if preset := given.get("model", from_file.get("model")):
        take(load_preset(str(preset)), f"model {preset}")
    take(from_file, f"--config {given.get('config')}")
    take(given, source)
    run = RunConfig(**values, sources=sources)
    check(run)
    return run


def _given(argv: Sequence[str]) -> dict[str, Any]:
    namespace, unknown = build_parser().parse_known_args([_underscored(word) for word in argv])
    for word in unknown:
        if word.startswith("-") and len(word) > 1:
            name = word.split("=")[0]
            raise UsageError(f"unknown flag {name}; {nearest(name, [f'--{n}' for n in _SPELLED])}")
    if unknown:
        raise UsageError(f"unexpected argument {unknown[0]!r}; values follow a --flag")
    return vars(namespace)


def _underscored(word: str) -> str:
    """`--a-b=c` as `--a_b=c`, `--no_a` as `--no-a`; a word that is no flag as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    if name not in FLAGS and name.startswith("no_"):
        name = f"no-{name.removeprefix('no_')}"
    return f"--{name}{equals}{value}"


def nearest(name: str, names: Sequence[str]) -> str:
    """What to do about a name that is not among `names`: the closest one, if any is close."""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else "--help lists every flag"


def _known(found: Mapping[str, Any], where: str | None) -> None:
    for name in found:
        if name not in FLAGS:
            raise UsageError(f"unknown key {name!r} in {where}; {nearest(name, list(FLAGS))}")


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


def load_yaml(path: str, source: str) -> dict[str, Any]:
    """The mapping in a YAML file; `source` says in an error who named the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = yaml.load(text, _Loader)
    except OSError as error:
        raise UsageError(f"{source} {path}: {error.strerror}; give a readable YAML file") from error
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


def load_preset(name: str) -> dict[str, Any]:
    """The shape fields of a preset or of a YAML file of one's own; none of hf:, read later."""
    if name.startswith(HUGGING_FACE):
        return {}
    path = PRESETS / f"{name}.yaml"
    known = sorted(p.stem for p in PRESETS.glob("*.yaml"))
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"--model {name}: no such preset or file; {nearest(name, known)}"
            f" Presets: {', '.join(known)}"
        )
    shape = load_yaml(str(path), "--model")
    for key in shape:
        if key not in SHAPE:
            raise UsageError(f"{path}: {key!r} is no shape field; {nearest(key, SHAPE)}")
    return shape


def convert(name: str, raw: Any, source: str) -> Any:
    """`raw` as the type of field `name`, within its limits; a UsageError names all three."""
    spec = FLAGS[name]
    kind = kind_of(spec)
    if raw is None and spec.default is None:
        return None
    try:
        value = _CONVERSIONS[kind](raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{name} = {raw!r} ({source}) is not {_WORDS[kind]}; give one") from error
    _within_limits(name, value, source, spec.metadata)
    return value


def _within_limits(name: str, value: Any, source: str, limits: Mapping[str, Any]) -> None:
    told = [
        (
            "choices",
            f"one of {', '.join(map(str, limits.get('choices', ())))}",
            lambda bound: value in bound,
        ),
        ("at_least", f"at least {limits.get('at_least')}", lambda bound: value >= bound),
        ("above", f"above {limits.get('above')}", lambda bound: value > bound),
        ("at_most", f"at most {limits.get('at_most')}", lambda bound: value <= bound),
        ("below", f"below {limits.get('below')}", lambda bound: value < bound),
    ]
    for limit, words, holds in told:
        if limit in limits and not holds(limits[limit]):
            raise UsageError(f"{name} = {value} ({source}) must be {words}; change it")


def _to_int(raw: Any) -> int:
    if isinstance(raw, bool) or (isinstance(raw, float) and raw != int(raw)):
        raise ValueError(raw)
    return int(raw)


def _to_float(raw: Any) -> float:
    value = float(raw)
    if isinstance(raw, bool) or not math.isfinite(value):
        raise ValueError(raw)
    return value


def _to_bool(raw: Any) -> bool:
    if not isinstance(raw, bool):
        raise ValueError(raw)
    return raw


def _to_str(raw: Any) -> str:
    if isinstance(raw, dict | list) or raw == "":
        raise ValueError(raw)
    return str(raw)


def _to_tuple(raw: Any) -> tuple[str, ...]:
    return tuple(map(_to_str, raw if isinstance(raw, list | tuple) else [raw]))


_CONVERSIONS = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_str,
    "tuple": _to_tuple,
}
_WORDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a text",
    "tuple": "a list of paths",
}
