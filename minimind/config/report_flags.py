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

    profile: bool = flag("print where each step's time went", False, "output")
    profile_interval: int = flag("optimizer steps between profile tables", 10, "output", at_least=1)
    trace_steps: str | None = flag(
        "FIRST:LAST, both included: steps of which every rank writes a Chrome trace to"
        " out_dir/traces",
        None,
        "output",
    )
    peak_tflops: float | None = flag(
        "10^12 FLOPs a second of one device in --dtype, dense, against which MFU is told (default:"
        " of NVIDIA's data sheets, for GPUs that are known)",
        None,
        "output",
        above=0.0,
    )
    report_to: str = flag(
        "trackers that get every figure of metrics.jsonl too, by commas: none, or"
        f" {', '.join(TRACKERS)}; one that fails never stops the run",
        "none",
        "output",
    )
    wandb_project: str = flag("project of the run in the trackers", "minimind", "output")
    wandb_run_name: str | None = flag(
        "name of the run there (default: the last folder of --out_dir)", None, "output"
    )
    sample_interval: int = flag(
        "optimizer steps between samples of text; 0: none", 0, "output", at_least=0
    )
    sample_prompts: str | None = flag(
        "file of what the samples begin with: a prompt a line, or .jsonl with a prompt field"
        " (default: one sample that begins a document)",
        None,
        "output",
    )

    def trackers(self) -> tuple[str, ...]:
        """Unique tracker names of --report_to; empty for `none`."""
        if self.report_to.strip() == "none":
            return ()
        names = (name.strip() for name in self.report_to.split(","))
        return tuple(dict.fromkeys(name for name in names if name))
