"""Parse the command line, --config files and model presets into a `RunConfig`.

Precedence: a flag on the command line > `--config FILE.yaml` > the model preset > the default.
Values of the Accelerate and DeepSpeed files override only the default (deepspeed/adopt.py).
Imports only the standard library and PyYAML, so errors appear before torch is imported.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from minimind.config.checks import check, conflicts
from minimind.config.command_line import Parser, PrintCompletion, PrintHelp
from minimind.config.flags import AUTO, CODE, COMMON, EPOCH, FLAGS, RULED, SHAPE, Flag
from minimind.config.foreign_flags import equivalent_flag
from minimind.config.names import no_such_name, suggest, suggest_choice
from minimind.config.origin import DEFAULT, OPEN, Origin, Rank
from minimind.config.run_config import (
    CONFIGS,
    DISTRIBUTION,
    RECIPES,
    RunConfig,
    deepspeed_files,
    files_by_name,
)
from minimind.config.yaml_files import load_yaml_texts
from minimind.errors import UsageError, fault_error
from minimind.runtime import disk
from minimind.runtime.file_kinds import form_of_folder
from minimind.runtime.urls import HUB_PREFIX

PRESETS = CONFIGS / "models"
CHOICES = {name: flag.choices for name, flag in FLAGS.items() if flag.choices}


@cache  # it takes longer than parsing
def build_parser(prog: str = "train_pretrain.py") -> Parser:
    """Build the parser; values stay strings until `convert`. `prog` is the command in --help."""
    parser = Parser(
        prog=prog,
        argument_default=argparse.SUPPRESS,
        usage=f"{prog} [--flag value ...]",
        description="Pretrain a MiniMind decoder under DeepSpeed ZeRO.",
        example=f"{prog} --data_path my_text.jsonl --model tiny --dry_run",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=PrintHelp, common=COMMON)
    parser.add_argument("--version", action="version", version=DISTRIBUTION)
    # After `python`, a shell completes the words of Python itself.
    completed = {"action": PrintCompletion, "command": "run_accelerate.sh", "known": CHOICES}
    parser.add_argument("--print_completion", **completed)
    titles = dict.fromkeys(flag.group for flag in FLAGS.values())
    groups = {title: parser.add_argument_group(title) for title in titles}
    for name, flag in FLAGS.items():
        options: dict[str, Any] = {"dest": name, "help": _help(flag)}
        if flag.type == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(flag)
            if flag.repeats:
                options["action"] = "append"
            elif flag.type == "tuple":
                options["nargs"] = "+"
        groups[flag.group].add_argument(f"--{name}", **options)
    return parser


def _help(flag: Flag) -> str:
    default = flag.shown_default
    text = flag.help + (f" (default: {default})" if default else "")
    return text.replace("%", "%%")  # argparse formats it


def _metavar(flag: Flag) -> str:
    if flag.choices:
        return "{" + ",".join(flag.choices) + "}" + f"|{CODE}" * flag.takes_code
    name = {"str": "TEXT", "tuple": "PATH"}.get(flag.type, flag.type.upper())
    return flag.repeats or flag.metavar or name + f"|{EPOCH}" * flag.takes_epoch


def parse_flags(argv: Sequence[str]) -> RunConfig:
    """Parse `argv`; raise a UsageError that lists all faults."""
    flags, faults = _parse_argv(argv)
    return build_config(flags, "--{name}", faults)


def words_of(given: Mapping[str, Any]) -> list[str]:
    """The words that `parse_flags` reads as these flags, of values before or after `convert`."""
    words: list[str] = []
    for name, value in given.items():
        if FLAGS[name].type == "bool":
            words.append(f"--{name}" if _typed("bool", value) else f"--no-{name}")
            continue
        values = [*map(str, value)] if isinstance(value, list | tuple) else [str(value)]
        each = [[one] for one in values] if FLAGS[name].repeats else [values]
        for texts in each:
            # A single value is joined if argparse would read it as a flag.
            is_joined = len(texts) == 1 and texts[0].startswith("-")
            words += [f"--{name}={texts[0]}"] if is_joined else [f"--{name}", *texts]
    return words


def build_config(given: Mapping[str, Any], source: str, faults: Sequence[str] = ()) -> RunConfig:
    """Build a RunConfig from `given` (name: value); `source` is a template such as "--{name}".

    Raise a UsageError that lists `faults` and all faults of the values.
    """
    all_faults = [*faults, *unknown_keys(given, "the arguments")]
    values: dict[str, Any] = {}
    unset = {name: OPEN if name in RULED else DEFAULT for name in FLAGS}
    sources = dict(unset)
    invalid = set()
    for layer, source_of, rank in _layers(given, source, all_faults):
        for name in layer:
            where = source_of.format(name=name)
            if stands_for_auto(name, layer[name]):
                values.pop(name, None)
                sources[name] = unset[name]
                continue
            if stands_for_epoch(name, layer[name]):
                values.pop(name, None)
                sources[name] = Origin(where, Rank.OPEN)
                continue
            try:
                values[name] = convert(name, layer[name], where)
                sources[name] = Origin(where, rank)
                if name == "deepspeed_config":
                    values[name] = deepspeed_files().get(values[name], values[name])
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


def in_template(text: str) -> str:
    """`text` as a part of a source of `build_config`: braces of a path are characters."""
    return text.replace("{", "{{").replace("}", "}}")


def _layers(
    given: Mapping[str, Any], source: str, faults: list[str]
) -> Iterator[tuple[Mapping[str, Any], str, Rank]]:
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
    yield preset, in_template(f"model {name}"), Rank.PRESET
    known = {key: from_file[key] for key in from_file if key in FLAGS and key != "config"}
    yield known, in_template(f"--config {path}"), Rank.FILE
    yield {key: given[key] for key in given if key in FLAGS}, source, Rank.FLAG


def _load_config_file(name: Any) -> dict[str, Any]:
    """Load the recipe `name`, else the file."""
    recipes = files_by_name(RECIPES)
    if not isinstance(name, str | Path):
        raise UsageError(f"config = {name!r} is not a path; give a recipe or a file")
    if str(name) not in recipes and disk.is_absent(name):
        raise UsageError(f"--config {no_such_name(str(name), [*recipes], 'recipe')}")
    return load_yaml_texts(recipes.get(str(name), str(name)), "--config")


def _parse_argv(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values by flag, and one sentence per unknown argument."""
    parser = build_parser()
    faults = parser.unknown_flags(argv)
    try:
        namespace, unknown = parser.parse_known_args(argv)
    except UsageError as error:  # argparse ends at the first one
        return {}, [*faults, str(error)]
    if unknown and not faults:
        faults.append(f"unexpected argument {unknown[0]!r}; values follow a --flag")
    return vars(namespace), faults


def unknown_keys(values: Mapping[str, Any], where: str | None) -> list[str]:
    """Return one sentence per key that is no flag; `where` names the source."""
    unknown = [name for name in values if name not in FLAGS]
    hints = [equivalent_flag(str(name)) or suggest(name, list(FLAGS)) for name in unknown]
    return [f"unknown key {n!r} in {where}; {hint}" for n, hint in zip(unknown, hints, strict=True)]


def load_preset(name: str) -> dict[str, Any]:
    """Load the shape fields of a preset or YAML file; empty for hf:, which is read later."""
    if name.startswith(HUB_PREFIX):
        return {}
    presets = files_by_name(PRESETS)
    path = presets.get(name, name)
    try:
        is_file = disk.is_file(Path(path))
    except OSError as error:
        raise UsageError(
            f"--model {name}: cannot be read ({error.strerror}); correct the path or its"
            " permissions"
        ) from error
    if not is_file:
        raise UsageError(f"--model {no_such_name(name, [*presets], 'preset')}")
    shape = load_yaml_texts(path, "--model")
    for key in shape:
        if key not in SHAPE:
            raise UsageError(
                f"{path}: {key!r} is not a flag of the shape; {suggest(key, [*SHAPE])}"
            )
    return shape


def config_file(place: str) -> Path:
    """Return the config.json that --model hf:`place` names, of the Hub if it is no local path.

    Raise UsageError if it is missing.
    """
    from minimind.runtime.hub import local_model

    path = local_model(f"{HUB_PREFIX}{place}", weights=False)
    path = path / "config.json" if disk.is_dir(path) else path
    if not disk.is_file(path):
        if form := form_of_folder(path.parent):
            raise UsageError(f"--model hf:{place}: {form}")
        raise UsageError(f"--model hf:{place}: has no config.json; give a directory that has one")
    return path


def stands_for_auto(name: str, raw: Any) -> bool:
    """Whether `raw` leaves a flag to its rule or its default, as if it were not given."""
    return raw == AUTO and FLAGS[name].may_be_auto


def stands_for_epoch(name: str, raw: Any) -> bool:
    """Whether `raw` is "epoch" for an interval, whose steps the start counts."""
    return raw == EPOCH and FLAGS[name].takes_epoch


TYPES = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a non-empty string",
    "tuple": "a list of one text or more",
}


def convert(name: str, raw: Any, source: str) -> Any:
    """Convert `raw` to the type of field `name`; raise UsageError outside its limits."""
    flag = FLAGS[name]
    if raw is None and flag.default is None:
        return None
    try:
        value = _typed(flag.type, raw)
    except (TypeError, ValueError, OverflowError) as error:
        wanted = TYPES[flag.type] + f", nor {EPOCH}" * flag.takes_epoch
        wanted += f", nor {AUTO}" * flag.may_be_auto
        raise UsageError(f"{name} = {raw!r} ({source}) is not {wanted}; give one") from error
    if requirement := flag.unmet(value):
        hint = suggest_choice(value, flag.choices, "change it")
        raise UsageError(f"{name} = {value} ({source}) must be {requirement}; {hint}")
    return value


def _typed(kind: str, raw: Any) -> Any:
    """A text, or a value of Python, as a key of `TYPES`; raise ValueError or TypeError."""
    if kind == "tuple":
        items = raw if isinstance(raw, list | tuple) else [raw]
        if not items:
            raise ValueError(raw)
        return tuple(_typed("str", item) for item in items)
    if kind == "str":
        if isinstance(raw, dict | list) or raw == "":
            raise ValueError(raw)
        return str(raw)
    if kind == "bool":
        text = str(raw).lower() if isinstance(raw, bool | str) else ""
        if text not in ("true", "false"):
            raise ValueError(raw)
        return text == "true"
    value = int(raw) if kind == "int" else float(raw)
    is_cut = kind == "int" and isinstance(raw, float) and raw != value
    if isinstance(raw, bool) or is_cut or not math.isfinite(value):
        raise ValueError(raw)
    return value
