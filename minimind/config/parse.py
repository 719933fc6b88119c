"""Parse the command line, --config files and model presets into a `RunConfig`.

Precedence: a flag on the command line > `--config FILE.yaml` > the model preset > the default.
Values of the Accelerate and DeepSpeed files override only the default (config_values.py).
Imports only the standard library and PyYAML, so errors appear before torch is imported.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from minimind.config.arguments import EXAMPLE, Formatter, PrintCompletion, format_default
from minimind.config.checks import check, conflicts
from minimind.config.foreign_flags import equivalent_flag, suggest
from minimind.config.model_flags import HUGGING_FACE, SHAPE
from minimind.config.run_config import CONFIGS, DISTRIBUTION, FLAGS, RunConfig, deepspeed_files
from minimind.config.yaml_files import files_by_name, load_yaml_texts
from minimind.errors import UsageError, fault_error
from minimind.runtime.file_kinds import adapter_in

_FLAG_NAMES = [
    *FLAGS,
    *(f"no-{name}" for name, spec in FLAGS.items() if isinstance(spec.default, bool)),
]
PRESETS, RECIPES = CONFIGS / "models", CONFIGS / "recipes"
EXIT_FLAGS = ("--help", "-h", "--version", "--print_completion")  # flags that exit


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists every flag")


@cache  # it takes longer than parsing
def build_parser(prog: str = "train_pretrain.py") -> argparse.ArgumentParser:
    """Build the parser; values stay strings until `convert`. `prog` is the command in --help."""
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        usage=f"{prog} [--flag value ...]",
        description="Pretrain a MiniMind decoder under DeepSpeed ZeRO.",
        formatter_class=Formatter,
        epilog=f"{EXAMPLE}\n  {prog} --data_path my_text.jsonl --model tiny --dry_run",
    )
    parser.add_argument("--version", action="version", version=DISTRIBUTION)
    known = {n: s.metadata["choices"] for n, s in FLAGS.items() if "choices" in s.metadata}
    # After `python`, a shell completes the words of Python itself.
    completed = {"action": PrintCompletion, "command": "run_accelerate.sh", "known": known}
    parser.add_argument("--print_completion", **completed)
    titles = dict.fromkeys(spec.metadata["group"] for spec in FLAGS.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for name, spec in FLAGS.items():
        options: dict[str, Any] = {"dest": name, "help": _help(spec)}
        if isinstance(spec.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(spec)
            options["nargs"] = "+" if isinstance(spec.default, tuple) else None
        groups[spec.metadata["group"]].add_argument(f"--{name}", **options)
    return parser


def _help(spec: Any) -> str:
    default = "off" if spec.default is False else format_default(spec.default)
    text = spec.metadata["help"] + (f" (default: {default})" if default else "")
    return text.replace("%", "%%")  # argparse formats it


def _metavar(spec: Any) -> str:
    choices = spec.metadata.get("choices")
    kind = {"str": "TEXT", "tuple": "PATH"}.get(type_name(spec), type_name(spec).upper())
    return "{" + ",".join(choices) + "}" if choices else kind


def type_name(spec: Any) -> str:
    """Return `int`, `float`, `str`, `bool` or `tuple`, from the annotation."""
    return spec.type.split(" ")[0].split("[")[0]


def parse_flags(argv: Sequence[str]) -> RunConfig:
    """Parse `argv`; raise a UsageError that lists all faults."""
    flags, faults = _parse_argv(argv)
    return build_config(flags, "--{name}", faults)


def build_config(given: Mapping[str, Any], source: str, faults: Sequence[str] = ()) -> RunConfig:
    """Build a RunConfig from `given` (name: value); `source` is a template such as "--{name}".

    Raise a UsageError that lists `faults` and all faults of the values.
    """
    all_faults = [*faults, *unknown_keys(given, "the arguments")]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(FLAGS, "default")
    invalid = set()
    for layer, source_of in _layers(given, source, all_faults):
        for name in layer:
            where = source_of.format(name=name)
            try:
                values[name], sources[name] = convert(name, layer[name], where), where
                if name == "deepspeed_config" and (file := deepspeed_files().get(values[name])):
                    values[name] = values[name] if os.path.exists(values[name]) else str(file)
            except UsageError as error:
                all_faults.append(str(error))
                invalid.add(name)
    run = RunConfig(**values, sources=sources)
    # An invalid field keeps its default: skip conflicts that mention it.
    of_invalid = re.compile("|".join(rf"\b{name} [=(]" for name in invalid) or "(?!)")
    all_faults += [conflict for conflict in conflicts(run) if not of_invalid.search(conflict)]
    if all_faults:
        raise fault_error(all_faults)
    return run if run.init_from else check(run.with_complete_scaling())


def _layers(
    given: Mapping[str, Any], source: str, faults: list[str]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the known fields of the preset, of --config and of `given`, highest precedence last."""
    from_file: Mapping[str, Any] = {}
    preset: Mapping[str, Any] = {}
    path = given.get("config")
    try:
        from_file = _load_config_file(path) if path is not None else {}
        faults += unknown_keys(from_file, path)
        if "config" in from_file:
            faults.append(f"'config' in {path}: a file cannot include another; remove it")
    except UsageError as error:
        faults.append(str(error))
    name = given.get("model", from_file.get("model"))
    try:
        preset = load_preset(str(name)) if name else {}
    except UsageError as error:
        faults.append(str(error))
    for layer, source_of in ((preset, f"model {name}"), (from_file, f"--config {path}")):
        yield {key: layer[key] for key in layer if key in FLAGS and key != "config"}, source_of
    yield {key: given[key] for key in given if key in FLAGS}, source


def _load_config_file(name: Any) -> dict[str, Any]:
    """Load the recipe `name`, else the file."""
    recipes = files_by_name(RECIPES)
    if not isinstance(name, str | Path):
        raise UsageError(f"config = {name!r} is no path; give a recipe or a file")
    if str(name) not in recipes and not os.path.exists(name):
        hint = suggest(str(name), list(recipes), f"give a file or {', '.join(recipes)}")
        raise UsageError(f"--config {name}: no such recipe or file; {hint}")
    return load_yaml_texts(recipes.get(str(name), str(name)), "--config")


def _parse_argv(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by flag, and one sentence per unknown argument."""
    faults = _unknown_flags(argv)
    try:
        namespace, unknown = build_parser().parse_known_args([_normalize_flag(w) for w in argv])
    except UsageError as error:  # argparse ends at the first one
        return {}, [*faults, str(error)]
    if unknown and not faults:
        faults.append(f"unexpected argument {unknown[0]!r}; values follow a --flag")
    return vars(namespace), faults


def _unknown_flags(argv: Sequence[str]) -> list[str]:
    """Return one sentence per unknown flag."""
    spelled = [f"--{name}" for name in _FLAG_NAMES]
    return [
        unknown_flag(word, spelled)
        for word in dict.fromkeys(argv)
        if re.match(r"--?[A-Za-z]", word)
        and _normalize_flag(word).split("=")[0] not in (*spelled, *EXIT_FLAGS)
    ]


def unknown_flag(word: str, known: Sequence[str]) -> str:
    """Describe an unknown flag and suggest its equivalent or the closest known one."""
    name = word.split("=")[0]
    return f"unknown flag {name}; {equivalent_flag(word) or suggest(name, known)}"


def _normalize_flag(word: str) -> str:
    """Rewrite `--a-b=c` to `--a_b=c` and `--no_a` to `--no-a`; other words stay."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    if name not in FLAGS and name.startswith("no_"):
        name = f"no-{name.removeprefix('no_')}"
    return f"--{name}{equals}{value}"


def unknown_keys(values: Mapping[str, Any], where: str | None) -> list[str]:
    """Return one sentence per key that is no flag; `where` names the source."""
    unknown = [name for name in values if name not in FLAGS]
    hints = [equivalent_flag(str(name)) or suggest(name, list(FLAGS)) for name in unknown]
    return [f"unknown key {n!r} in {where}; {hint}" for n, hint in zip(unknown, hints, strict=True)]


def load_preset(name: str) -> dict[str, Any]:
    """Load the shape fields of a preset or YAML file; empty for hf:, which is read later."""
    if name.startswith(HUGGING_FACE):
        return {}
    presets = files_by_name(PRESETS)
    path = presets.get(name, name)
    if not Path(path).is_file():
        known = list(presets)
        raise UsageError(
            f"--model {name}: no such preset or file;"
            f" {suggest(name, known, 'give one')} ({', '.join(known)})"
        )
    shape = load_yaml_texts(path, "--model")
    for key in shape:
        if key not in SHAPE:
            raise UsageError(f"{path}: {key!r} is not a shape field; {suggest(key, SHAPE)}")
    return shape


def config_file(place: str) -> Path:
    """Return the config.json that --model hf:`place` names; raise UsageError if missing."""
    path = Path(place).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if adapter := adapter_in(path.parent):
            raise UsageError(f"--model hf:{place}: {adapter}")
        raise UsageError(f"--model hf:{place}: has no config.json; name a directory that has one")
    return path


def convert(name: str, raw: Any, source: str) -> Any:
    """Convert `raw` to the type of field `name`; raise UsageError outside its limits."""
    spec = FLAGS[name]
    kind = type_name(spec)
    if raw is None and spec.default is None:
        return None
    try:
        value = _CONVERSIONS[kind](raw)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{name} = {raw!r} ({source}) is not {_KIND_NAMES[kind]}; give one"
        ) from error
    _within_limits(name, value, source, spec.metadata)
    return value


def _within_limits(name: str, value: Any, source: str, limits: Mapping[str, Any]) -> None:
    rules = [
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
    for limit, requirement, holds in rules:
        if limit in limits and not holds(limits[limit]):
            raise UsageError(f"{name} = {value} ({source}) must be {requirement}; change it")


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
    if isinstance(raw, str) and raw.lower() in ("true", "false"):  # of a YAML file
        return raw.lower() == "true"
    if not isinstance(raw, bool):
        raise ValueError(raw)
    return raw


def _to_str(raw: Any) -> str:
    if isinstance(raw, dict | list) or raw == "":
        raise ValueError(raw)
    return str(raw)


def _to_tuple(raw: Any) -> tuple[str, ...]:
    if raw in ([], ()):
        raise ValueError(raw)
    return tuple(map(_to_str, raw if isinstance(raw, list | tuple) else [raw]))


_CONVERSIONS = {
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "str": _to_str,
    "tuple": _to_tuple,
}
_KIND_NAMES = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a non-empty string",
    "tuple": "a list of paths",
}
