"""`minimind train`, `minimind launch`, `minimind sweep` and `minimind coord_check`.

The first two are the start scripts of a checkout as commands.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minimind.config.arguments import at_least, non_empty_path
from minimind.config.parse import build_parser
from minimind.errors import UsageError
from minimind.runtime.durable_files import storing
from minimind.runtime.installed import install_extra


def add_parsers(subs: Any) -> None:
    """Add the commands; flags of train and launch are those of train_pretrain.py, parsed there."""
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
    parser = subs.add_parser(
        "sweep",
        help="search over flags with Optuna, a run per trial",
        description="Train runs with different flags, chosen by Optuna, stop those that validate"
        " badly, and print the best. The same command goes on after a stop or a kill.",
        example="minimind sweep sweep.yaml --out out/sweep",
    )
    add = parser.add_argument
    add("sweep", metavar="SWEEP.yaml", help="flags, dimensions and number of trials")
    text = "folder of the sweep: sweep.db, sweep.html and the out_dir of each trial"
    add("--out", type=non_empty_path, required=True, metavar="DIR", help=text)
    text = "trials at the same time (default: one per free GPU, one on a CPU)"
    add("--parallel", type=at_least(1), help=text)
    add("--debug", action="store_true", help="show tracebacks")
    _add_coord_check(subs)


def _add_coord_check(subs: Any) -> None:
    parser = subs.add_parser(
        "coord_check",
        help="whether training changes activations equally at every width (--mup_base_dim)",
        description="Train small models of several widths for a few steps on random text, with and"
        " without muP, and print the sizes of the changes of their activations; status 0 if those"
        " with muP do not depend on the width, else 1. Takes the flags of train_pretrain.py too"
        " (--dim, --n_heads, --learning_rate, --optimizer, ...): the model at the base width.",
        example="minimind coord_check --widths 64 128 256 --use_moe",
    )
    add = parser.add_argument
    text = "widths to compare, multiples of --dim (default: --dim, twice and four times that)"
    add("--widths", type=at_least(1), nargs="+", help=text)
    add("--steps", type=at_least(1), default=5, help="optimizer steps")
    add("--seeds", type=at_least(1), default=2, help="models of each width, averaged")
    add("--debug", action="store_true", help="show tracebacks")


def _prints_help(args: argparse.Namespace) -> bool:
    """Print the flags under the name of this command if --help is given; return whether it is."""
    is_given = not {"--help", "-h"}.isdisjoint(args.run_flags)
    if is_given:
        build_parser(f"minimind {args.command}").print_help()
    return is_given


def run_train(args: argparse.Namespace) -> None:
    """Train in this process; raise SystemExit with the status of the run."""
    if _prints_help(args):
        return
    from minimind.launch.train_pretrain import main

    sys.exit(main(args.run_flags))


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


def run_sweep(args: argparse.Namespace) -> int:
    """Run or continue a sweep; print its trials and write its page."""
    if find_spec("optuna") is None:
        raise UsageError(
            "minimind sweep needs the package optuna, which is not installed;"
            f" {install_extra('sweep')}"
        )
    from minimind.sweep.run import sweep

    with storing(f"--out {args.out}", "give another --out"):
        return sweep(args.sweep, args.out, args.parallel)


def run_coord_check(args: argparse.Namespace) -> int:
    """Print the coordinate check; return 0 if it is flat, else 1."""
    from minimind.sweep.coordinate_check import coordinate_check

    results = coordinate_check(args.run_flags, args.widths, args.steps, args.seeds)
    with_mup = next(iter(results.values()))
    print(f"\n{with_mup.verdict()}")
    return 0 if with_mup.is_flat else 1
