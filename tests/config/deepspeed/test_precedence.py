"""Who decides a value that flag, YAML, DeepSpeed file and launcher may give: a truth table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minimind.config.deepspeed.document import get, put
from minimind.config.deepspeed.resolve import resolve
from minimind.config.launcher_env import read_launch
from minimind.config.parse import parse_flags
from minimind.config.rules import with_dtype
from minimind.errors import UsageError


class Setting(NamedTuple):
    """A flag, its key of the file and its variable, with two values of each: `a` and `b`."""

    flag: str
    key: str
    variable: str
    flags: tuple[Any, Any]
    literals: tuple[Any, Any]
    variables: tuple[str, str]


SETTINGS = [
    Setting(
        *("grad_clip", "gradient_clipping", "GRADIENT_CLIPPING"),
        *((0.5, 0.7), (0.5, 0.7), ("0.5", "0.7")),
    ),
    Setting(
        *("accumulation_steps", "gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS"),
        *((4, 2), (4, 2), ("4", "2")),
    ),
    Setting(
        *("dtype", "fp16.enabled", "MIXED_PRECISION"),
        *(("float16", "float32"), (True, False), ("fp16", "no")),
    ),
]
# What each gives (`-`: nothing), and who decides; `!` is a refusal that names the two that differ.
# The launcher's `auto` and `no` are as nothing; the file's `auto` and null take the run's value.
TABLE = """
flag  yaml  file  launcher  decides
-     -     -     -         default
-     -     auto  -         default
-     -     -     auto      default
a     -     -     -         flag
-     a     -     -         yaml
-     -     a     -         file
-     -     -     a         launcher
a     a     -     -         flag
a     b     -     -         flag
a     -     auto  -         flag
a     -     a     -         flag
a     -     b     -         ! file flag
-     a     auto  -         yaml
-     a     a     -         yaml
-     a     b     -         ! file yaml
a     b     a     -         flag
a     -     -     auto      flag
a     -     -     a         flag
-     a     -     a         yaml
-     -     auto  a         launcher
-     -     a     a         launcher
-     -     b     a         ! file launcher
a     -     auto  a         flag
a     -     a     a         flag
a     -     b     a         ! file flag
-     a     a     a         yaml
"""
ROWS = [line.split(maxsplit=4) for line in TABLE.strip().splitlines()[1:]]
# Only for values that are numbers: the launcher's other precision is to give none.
DIFFERENT = [
    ["a", "-", "-", "b", "! launcher flag"],
    ["-", "a", "-", "b", "! launcher yaml"],
    ["-", "-", "a", "b", "! file launcher"],
]


# A precision that is off is no value; the tests below have it.
CASES = [
    pytest.param(setting, row, id=f"{setting.flag} {' '.join(row)}")
    for setting in SETTINGS
    for row in ROWS + DIFFERENT
    if setting.flag != "dtype" or (row not in DIFFERENT and row[2] != "b")
]


@pytest.mark.parametrize(("setting", "row"), CASES)
def test_who_decides(setting: Setting, row: list[str], tmp_path: Path):
    flag, yaml, file, launcher, decides = row
    argv, config_file = [], tmp_path / "run.yaml"
    if flag != "-":
        argv += [f"--{setting.flag}", str(setting.flags["ab".index(flag)])]
    if yaml != "-":
        config_file.write_text(f"{setting.flag}: {setting.flags['ab'.index(yaml)]}\n")
        argv += ["--config", str(config_file)]
    document: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    if file != "-":
        literal = file if file == "auto" else setting.literals["ab".index(file)]
        put(document, setting.key, literal)
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}
    if launcher != "-":
        said = launcher if launcher == "auto" else setting.variables["ab".index(launcher)]
        environ[f"ACCELERATE_{setting.variable}"] = said
    launch = read_launch(environ)
    field = setting.variable.lower()
    sources = {
        "flag": f"--{setting.flag}",
        "yaml": f"--config {config_file}",
        "file": f"ds.json: {setting.key}",
        "launcher": f"accelerate launch (YAML or flag): {field}",
    }

    def decided() -> Any:
        return resolve(document, "ds.json", parse_flags(argv), 2, "cuda", launch=launch)

    if decides.startswith("!"):
        with pytest.raises(UsageError) as caught:
            decided()
        for who in decides.split()[1:]:
            assert sources[who] in str(caught.value)
        return
    found = decided()
    if decides == "default":
        assert not found.run.is_explicit(setting.flag)
    else:
        assert found.run.sources[setting.flag] == sources[decides]
        assert getattr(found.run, setting.flag) == setting.flags[0]
    expected = getattr(found.run, setting.flag)
    if setting.flag == "dtype":
        expected = expected == "float16"
    assert get(found.config, setting.key) == expected


@pytest.mark.parametrize(
    ("line", "file", "dtype", "source"),
    [
        ("", {"bf16": False}, "float32", "ds.json: bf16.enabled"),
        ("", {"bf16": False, "fp16": False}, "float32", "ds.json: bf16.enabled"),
        ("", {"fp16": False}, "bfloat16", "auto: cuda has bf16 instructions"),
        ("--dtype float32", {"bf16": False}, "float32", "--dtype"),
        ("--dtype float16", {"bf16": False}, "float16", "--dtype"),
        ("--dtype float16", {"bf16": "auto", "fp16": "auto"}, "float16", "--dtype"),
    ],
)
def test_a_block_of_a_precision_that_is_off(line: str, file: Any, dtype: str, source: str):
    document = {block: {"enabled": value} for block, value in file.items()}
    document["zero_optimization"] = {"stage": 1}
    given = with_dtype(parse_flags(line.split()), "cuda", has_bf16=True)
    run = resolve(document, "ds.json", given, 2, "cuda").run
    assert (run.dtype, run.sources["dtype"]) == (dtype, source)


@pytest.mark.parametrize(
    ("file", "launcher", "source"),
    [
        (None, None, "DeepSpeed's default: no stage is named"),
        (2, None, "ds.json"),
        (None, "2", "accelerate launch (YAML or flag): zero_stage"),
        ("auto", "2", "accelerate launch (YAML or flag): zero_stage"),
        (2, "2", "ds.json"),
        (1, "2", ""),
    ],
)
def test_a_field_of_the_launcher_is_a_key_of_the_file(file: Any, launcher: str | None, source: str):
    document = {} if file is None else {"zero_optimization": {"stage": file}}
    environ = {"ACCELERATE_USE_DEEPSPEED": "true"}
    environ |= {} if launcher is None else {"ACCELERATE_DEEPSPEED_ZERO_STAGE": launcher}
    run, launch = parse_flags([]), read_launch(environ)
    if not source:
        with pytest.raises(UsageError, match=r"zero_optimization\.stage is 1 .* zero_stage = 2"):
            resolve(document, "ds.json", run, 2, "cpu", launch=launch)
        return
    found = resolve(document, "ds.json", run, 2, "cpu", launch=launch)
    assert found.zero_stage == (0 if file is None and launcher is None else 2)
    assert found.sources["zero_optimization.stage"] == source
