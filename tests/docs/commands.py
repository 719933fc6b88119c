"""The commands that the READMEs and docs/ show, and whether what they name is there.

A fenced block tagged bash or sh is commands, one a line, lines that end in a backslash joined; a
block tagged otherwise, or not at all, has none. A block that cannot be run by a test says why in
the line before it, `<!-- needs: gpu -->`, with one or more of REASONS, separated by commas.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from minimind.cli import main as cli
from minimind.cli.command import OfRunFlags
from minimind.config.deepspeed.backend_choice import read_setup
from minimind.config.launcher_env import read_launch, with_dropped_config
from minimind.config.parse import parse_flags
from minimind.config.run_config import CONFIGS
from minimind.config.yaml_files import load_yaml
from minimind.errors import UsageError
from minimind.launch.plan import LaunchSettings, plan
from tests.conftest import ROOT
from tools.runs import MEETING

REASONS = ("gpu", "slurm", "hosts", "network", "hours", "other software")
SHELLS = ("bash", "sh")
OUTPUT = ("", "text", "python", "yaml", "json", "toml", "diff")
NEEDS = re.compile(r" *<!-- needs: (.+) -->")
FENCE = re.compile(r"( *)```(\S*)")
# What a page says once for a part of many commands.
STANDS_FOR = {"FLAGS": "--model tiny --data_path my_text.jsonl --out_dir out/mine"}
TRAINING = ("run_accelerate.sh", "train_pretrain.py", "train_pretrain_accelerate.py")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the reasons in the line before it."""

    page: str
    line: int
    language: str
    needs: tuple[str, ...]
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """What a shell is given, one by one; comments stay where they stand behind a command."""
        if self.language not in SHELLS:
            return []
        whole = re.sub(r"\\\n *", "", "\n".join(self.lines)).splitlines()
        found = [line.strip() for line in whole if line.strip()]
        return [_filled(line) for line in found if not line.startswith("#")]


def _filled(command: str) -> str:
    for name, text in STANDS_FOR.items():
        command = re.sub(rf"\b{name}\b", text, command)
    return command


def pages() -> list[Path]:
    """The pages whose commands are checked."""
    top = [ROOT / "README.md", ROOT / "README_zh.md", ROOT / "examples" / "README.md"]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = text.splitlines()
    begin: int | None = None
    for n, line in enumerate(lines):
        fence = FENCE.fullmatch(line.rstrip())
        if not fence:
            continue
        if begin is None:
            begin = n
            continue
        opening = FENCE.fullmatch(lines[begin].rstrip())
        assert opening
        before = NEEDS.fullmatch(lines[begin - 1]) if begin else None
        needs = tuple(before[1].split(", ")) if before else ()
        inside = tuple(one.removeprefix(opening[1]) for one in lines[begin + 1 : n])
        yield Block(page, begin + 1, opening[2], needs, inside)
        begin = None
    if begin is not None:
        raise ValueError(f"{page}:{begin + 1}: a block that does not end")


def files_in(blocks: Sequence[Block]) -> dict[str, str]:
    """The YAML files that blocks show, which are those that begin with their name as a comment."""
    shown = [block for block in blocks if block.language == "yaml"]
    named = [(re.match(r"# ([\w.-]+\.yaml)$", block.lines[0]), block) for block in shown]
    return {name[1]: "\n".join(block.lines) + "\n" for name, block in named if name}


def lines_of_prose(text: str) -> list[str]:
    """The whole command lines of training that stand outside of blocks, most of them in tables."""
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`([^`\n]+ (?:FLAGS|\.\.\.)[^`\n]*)`", prose)
    whole = [span for span in found if any(f"{name} " in span for name in TRAINING)]
    return [_filled(span.replace("...", "FLAGS")) for span in whole]


def all_blocks() -> list[Block]:
    """Those of all pages."""
    return [
        block
        for path in pages()
        for block in blocks_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


def check(command: str, any_program: bool = False) -> None:
    """Nothing, or a UsageError where a program, a flag, a file or a target is not there.

    The settings of a training command are resolved as by its --dry_run, in this process.
    """
    for words in _simple_commands(command):
        environ: dict[str, str] = {}
        while words and (variable := re.fullmatch(r"([A-Z_]+)=(.*)", words[0], re.DOTALL)):
            environ[variable[1]] = variable[2]
            words = words[1:]
        program, *given = words
        program = program.removeprefix(".venv/bin/")
        if program in CHECKS:
            try:
                CHECKS[program](given, environ)
            except SystemExit as report:  # --help
                if report.code:
                    raise UsageError(f"{command}: ends with {report.code}") from report
        elif program not in ORDINARY and not any_program:
            raise UsageError(f"{program} is no program of this project")


def _simple_commands(command: str) -> list[list[str]]:
    """The words of each command of a pipeline or a list, without redirections."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    keys_without_effect = False
    for word in lexer:
        if keys_without_effect:
            keys_without_effect = False
        elif set(word) <= set("<>"):
            keys_without_effect = True
        elif set(word) <= set("|&;"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


Environ = Mapping[str, str]


def dry_run(flags: Sequence[str], environ: Environ, launcher: Sequence[str] = ()) -> None:
    """Resolve flags, launcher and files as a worker does in this environment."""
    run = parse_flags(flags)
    launch = with_dropped_config(read_launch(environ), run.deepspeed_config, launcher)
    read_setup(run, launch).resolve()


def _by_script(flags: Sequence[str], environ: Environ) -> None:
    """A dry run of run_accelerate.sh, without GPUs."""
    path = environ.get("CONFIG_FILE", str(CONFIGS / "accelerate_config.yaml"))
    settings = LaunchSettings(load_yaml(path, "CONFIG_FILE"), path, environ)
    dry_run(flags, _ranks(plan(settings, 0)["num_processes"]) | _deepspeed(settings.document))


def _ranks(processes: int) -> dict[str, str]:
    return {"WORLD_SIZE": str(processes), "RANK": "0", "LOCAL_RANK": "0", **MEETING}


def _deepspeed(document: Mapping[str, Any]) -> dict[str, str]:
    """The variables in which Accelerate passes the DeepSpeed file of its YAML."""
    if document.get("distributed_type") != "DEEPSPEED":
        return {}
    file = document["deepspeed_config"]["deepspeed_config_file"]
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file}


def _minimind(given: Sequence[str], environ: Environ) -> None:
    args, rest = cli.build_parser().parse_known_args(given)
    if args.command == "train":
        dry_run(rest, environ)
    elif issubclass(args.command_class, OfRunFlags):
        _by_script([word for word in rest if word != "--"], environ)
    elif rest:
        raise UsageError(f"minimind {args.command} knows no {rest[0]}")


def _bash(given: Sequence[str], environ: Environ) -> None:
    script, *flags = given
    if script != "run_accelerate.sh":
        raise UsageError(f"bash {script}: only run_accelerate.sh is known")
    _by_script(flags, environ)


def _sbatch(given: Sequence[str], environ: Environ) -> None:
    at = given.index("scripts/slurm.sbatch")
    _by_script(given[at + 1 :], environ)


def _make(given: Sequence[str], environ: Environ) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = re.findall(r"^([a-z-]+):|^([A-Z_]+) *[?:]=", text, re.MULTILINE)
    for word in given:
        if (word.split("=")[0] if "=" in word else word) not in {t or v for t, v in known}:
            raise UsageError(f"make knows no {word}")


def _python(given: Sequence[str], environ: Environ, launcher: Sequence[str] = ()) -> None:
    if given[0] == "-c":
        compile(given[1], "-c", "exec")
        return None
    if given[0] == "-m":
        module, *words = given[1:]
        if module == "minimind":
            return _minimind(words, environ)
        path = ROOT / f"{module.replace('.', '/')}.py"
        folder = path.with_suffix("") / "__main__.py"
        path, words = folder if folder.is_file() else path, words
    else:
        path, words = ROOT / given[0], given[1:]
    if not path.is_file():
        raise UsageError(f"there is no {path.relative_to(ROOT)}")
    if path.name in TRAINING:
        dry_run(words, environ, launcher)
    else:  # a script of this project takes the flags that it names
        _among(words, _options_in(path), path.name)


def _launcher(
    package: str, source: str, counts: Sequence[str] = ()
) -> Callable[[Sequence[str], Environ], None]:
    """The check of a launcher whose own flags are named in this file of a package.

    The product of its flags `counts` is the number of processes.
    """

    def checked(given: Sequence[str], environ: Environ) -> None:
        spec = find_spec(package)
        assert spec
        assert spec.origin
        path = Path(spec.origin).parent / source
        begins = [word == "-m" or word.endswith(".py") for word in given]
        at = begins.index(True) if True in begins else len(given)
        _among(given[:at], _options_in(path), source)
        flags = dict(pairwise(given[:at]))
        processes = math.prod(int(flags.get(name, 1)) for name in counts)
        document = load_yaml(flags["--config_file"], "") if "--config_file" in flags else {}
        if "--use_deepspeed" in flags:
            block = {"deepspeed_config_file": flags["--deepspeed_config_file"]}
            document = {"distributed_type": "DEEPSPEED", "deepspeed_config": block}
        launched = dict(environ) | _ranks(processes) | _deepspeed(document)
        if given[at:]:
            _python(given[at:], launched, (package, "launch", *given))

    return checked


def _accelerate(given: Sequence[str], environ: Environ) -> None:
    if not given or given[0] not in ("launch", "config", "env"):
        raise UsageError(f"accelerate {' '.join(given[:1])}: only launch, config and env are known")
    if given[0] == "launch":
        _launcher("accelerate", "commands/launch.py", ["--num_processes"])(given[1:], environ)


def _pip(given: Sequence[str], environ: Environ) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    known = set(re.findall(r"^(\w+) = ", section, re.MULTILINE))
    for extras in re.findall(r"(?:minimind|\.)\[([\w,]+)\]", " ".join(given)):
        if unknown := set(extras.split(",")) - known:
            raise UsageError(f"pip: no extra {unknown}")


def _options_in(path: Path) -> set[str]:
    """The strings of a Python file that begin as an option does."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    texts = (node.value for node in tree if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and text.startswith("-")}


def _among(given: Sequence[str], known: set[str], whose: str) -> None:
    for word in given:
        name = word.split("=")[0]
        if re.match(r"--?[a-zA-Z]", name) and name not in known | {"--help"}:
            raise UsageError(f"{whose} knows no {name}")


CHECKS: dict[str, Callable[[Sequence[str], Environ], None]] = {
    "minimind": _minimind,
    "bash": _bash,
    "sbatch": _sbatch,
    "make": _make,
    "python": _python,
    "pip": _pip,
    "accelerate": _accelerate,
    "torchrun": _launcher("torch", "distributed/run.py", ["--nnodes", "--nproc_per_node"]),
    "deepspeed": _launcher("deepspeed", "launcher/runner.py", ["--num_gpus"]),
}
ORDINARY = ("echo", "printf", "cat", "lm_eval", "source")
