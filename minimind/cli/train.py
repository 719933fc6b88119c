"""`minimind train`, `minimind launch`, `minimind sweep`, `minimind tune`, `minimind coord_check`.

The first two are the start scripts of a checkout as commands.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from minimind.cli.command import Command, OfRunFlags, argument
from minimind.config.parse import build_parser
from minimind.errors import UsageError
from minimind.runtime.durable_files import storing
from minimind.runtime.installed import require_extra


@dataclass(kw_only=True)
class StartScript(OfRunFlags):
    """A command whose every flag, also --help and --debug, is of the run."""

    adds_help = False
    debug: bool = field(default=False, init=False)

    def print_help_if_asked(self, name: str) -> None:
        """Print the flags under the name of this command and exit if --help is given."""
        for at, word in enumerate(self.run_flags):
            if word in ("--help", "-h"):
                build_parser(f"minimind {name}").parse_args(self.run_flags[at : at + 2])


@dataclass(kw_only=True)
class Train(StartScript):
    """Pretrain in this process, as train_pretrain.py does.

    Takes the flags of train_pretrain.py; `minimind train --help all` lists them.
    """

    example = "minimind train --model tiny --data_path my_text.jsonl --out_dir out/mine"

    def execute(self) -> None:
        """Train in this process; raise SystemExit with the status of the run."""
        self.print_help_if_asked("train")
        from minimind.launch.train_pretrain import main

        sys.exit(main(self.run_flags))


@dataclass(kw_only=True)
class Launch(StartScript):
    """Pretrain on all GPUs, as run_accelerate.sh does.

    Without a GPU, on two CPU processes. Takes the flags of train_pretrain.py; `minimind train
    --help all` lists them.
    """

    example = "minimind launch --model tiny --data_path my_text.jsonl --out_dir out/mine"

    def execute(self) -> None:
        """Replace this process by the launcher, with this Python unless PYTHON names another.

        This does not return unless --help is given.
        """
        self.print_help_if_asked("launch")
        launcher = Path(__file__).resolve().parents[1] / "launch" / "launcher.py"
        python = os.environ.get("PYTHON") or sys.executable
        try:
            os.execvp(python, [python, str(launcher), python, *self.run_flags])
        except OSError as error:
            raise UsageError(
                f"PYTHON is {python}, which cannot be run ({error.strerror}); unset it, or name"
                " another"
            ) from error


@dataclass(kw_only=True)
class Sweep(Command):
    """Search over flags with Optuna; each trial is a run.

    Runs that validate badly are stopped, and the best is printed. After a stop or a kill, the same
    command continues the sweep.
    """

    example = "minimind sweep sweep.yaml --out_dir out/sweep"
    sweep: str = argument(metavar="SWEEP.yaml", is_positional=True)
    """flags, dimensions and number of trials"""
    out_dir: Path = argument(metavar="DIR")
    """folder of the sweep: sweep.json, sweep.html and the out_dir of each trial"""
    parallel: int | None = argument(None, ge=1)
    """trials at the same time (default: one per free GPU, one on a CPU)"""

    def execute(self) -> int:
        require_extra("sweep", "minimind sweep", "optuna")
        from minimind.sweep.run import sweep

        with storing(f"--out_dir {self.out_dir}", "give another --out_dir"):
            return sweep(self.sweep, self.out_dir, self.parallel)


@dataclass(kw_only=True)
class Tune(OfRunFlags):
    """Measure which settings train a run fastest on this machine.

    Only speed and memory change. The flags of train_pretrain.py follow a --. The processes are
    those of `minimind launch`. Given again after a kill, it resumes with the remaining time.
    """

    example = "minimind tune --minutes 30 -- --model tiny --data_path my_text.jsonl"
    out_dir: Path = argument(Path("out/tune"), metavar="DIR")
    """folder of the measurements: tune.json, a DeepSpeed JSON if one is needed, and each trial"""
    minutes: float = argument(30.0, gt=0)
    """time that all trials may take together"""

    def execute(self) -> int:
        from minimind.sweep.tune import tune

        with storing(f"--out_dir {self.out_dir}", "give another --out_dir"):
            return tune(self.run_flags, self.out_dir, self.minutes)


@dataclass(kw_only=True)
class CoordCheck(OfRunFlags):
    """Check that training changes activations equally at every width (--mup_base_dim).

    Small models of several widths are trained for a few steps on random text, with and without muP.
    The command prints how much the activations change; the status is 0 if with muP this does not
    depend on the width, else 1. Takes the flags of train_pretrain.py too (--dim, --n_heads,
    --learning_rate, --optimizer, ...): the model at the base width.
    """

    example = "minimind coord_check --widths 64 128 256 --use_moe"
    widths: list[int] | None = argument(None, nargs="+", ge=1)
    """widths to compare, multiples of --dim (default: 1, 2 and 4 times --dim)"""
    steps: int = argument(5, ge=1)
    """optimizer steps"""
    seeds: int = argument(2, ge=1)
    """number of models per width, whose results are averaged"""

    def execute(self) -> int:
        from minimind.sweep.coordinate_check import coordinate_check

        results = coordinate_check(self.run_flags, self.widths, self.steps, self.seeds)
        with_mup = next(iter(results.values()))
        print(f"\n{with_mup.verdict()}")
        return 0 if with_mup.is_flat else 1
