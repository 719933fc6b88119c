"""`minimind train` and `minimind launch`: the start scripts of a checkout as commands."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from minimind.config.parse import build_parser
from minimind.errors import UsageError


def add_parsers(subs: Any) -> None:
    """Add both commands; their flags are those of train_pretrain.py and are parsed there."""
    more = " Takes the flags of train_pretrain.py; `minimind train --help` lists them."
    subs.add_parser(
        "train",
        add_help=False,
        help="pretrain in this process, as train_pretrain.py does",
        description=f"Pretrain in this process.{more}",
        example="minimind train --model tiny --data_path my_text.jsonl --out_dir out/mine",
    )
    subs.add_parser(
        "launch",
        add_help=False,
        help="pretrain on all GPUs, as run_accelerate.sh does",
        description=f"Pretrain on all GPUs, or on two CPU processes.{more}",
        example="minimind launch --model tiny --data_path my_text.jsonl --out_dir out/mine",
    )


def _prints_help(args: argparse.Namespace) -> bool:
    """Print the flags under the name of this command if --help is given; return whether it is."""
    is_given = not {"--help", "-h"}.isdisjoint(args.run_flags)
    if is_given:
        build_parser(f"minimind {args.command}").print_help()
    return is_given


def run_train(args: argparse.Namespace) -> None:
    """Train in this process; exits with the status of the run."""
    if _prints_help(args):
        return
    from minimind.launch.train_pretrain import run

    run(args.run_flags)


def run_launch(args: argparse.Namespace) -> None:
    """Replace this process by the launch script, with this Python unless PYTHON names another."""
    if _prints_help(args):
        return
    bash = shutil.which("bash")
    if bash is None:
        raise UsageError("minimind launch needs bash, which is not on PATH; install it")
    script = Path(__file__).resolve().parents[1] / "launch" / "run_accelerate.sh"
    os.environ.setdefault("PYTHON", sys.executable)
    os.execv(bash, [bash, str(script), *args.run_flags])
