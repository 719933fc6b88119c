"""Flags of profiling, trackers and text samples."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.config.training_flags import flag

# Names of Accelerate.
TRACKERS = (
    *("wandb", "tensorboard", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab"),
    "trackio",
)


@dataclass(frozen=True)
class ReportFlags:
    """Outputs besides metrics.jsonl."""

    profile: bool = flag("print how each step's time is spent", False, "output")
    profile_interval: int = flag("optimizer steps between profile tables", 10, "output", at_least=1)
    trace_steps: str | None = flag(
        "FIRST:LAST: steps, both included, of which every rank writes a Chrome trace to"
        " out_dir/traces",
        None,
        "output",
    )
    peak_tflops: float | None = flag(
        "peak of one device in TFLOPS in --dtype, dense, for MFU (default: data sheet values of"
        " known NVIDIA GPUs)",
        None,
        "output",
        above=0.0,
    )
    report_to: str = flag(
        "trackers that receive all metrics, separated by commas: none, or"
        f" {', '.join(TRACKERS)}; a failing one never stops the run",
        "none",
        "output",
    )
    wandb_project: str = flag("project name in the trackers", "minimind", "output")
    wandb_run_name: str | None = flag(
        "run name in the trackers (default: the last folder of --out_dir)", None, "output"
    )
    sample_interval: int = flag(
        "optimizer steps between text samples; 0: none", 0, "output", at_least=0
    )
    sample_prompts: str | None = flag(
        "file of prompts for the samples: one per line, or .jsonl with a prompt field (default:"
        " one empty prompt)",
        None,
        "output",
    )

    def trackers(self) -> tuple[str, ...]:
        """Unique tracker names of --report_to; empty for `none`."""
        if self.report_to.strip() == "none":
            return ()
        names = (name.strip() for name in self.report_to.split(","))
        return tuple(dict.fromkeys(name for name in names if name))
