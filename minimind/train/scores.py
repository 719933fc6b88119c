"""Scores of tasks during training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.config.checks import given
from minimind.config.flags import VAL_LOSS
from minimind.config.run_config import RunConfig
from minimind.config.tasks import AVERAGE, require_compared, tasks_of
from minimind.data.prepare.prepared import Prepared
from minimind.engine.compile import uncompiled
from minimind.engine.engine import Engine
from minimind.inference.own_tasks import HeldOutText
from minimind.inference.questions import Questions
from minimind.inference.scores import Shares, StoppedError, fields_of
from minimind.runtime.collectives import lost_peers, on_rank_0
from minimind.runtime.event_log import EventLog
from minimind.runtime.process import StopRequest


@dataclass(frozen=True)
class Scores:
    """The questions of a run, and how its ranks share them."""

    questions: Questions
    by: str  # what --keep_best compares
    stop: StopRequest
    metrics: Path

    @classmethod
    def of(cls, run: RunConfig, prepared: Prepared, stop: StopRequest) -> Scores:
        """Make the questions; raise UsageError for one that cannot be asked."""
        questions = Questions.of(
            tasks_of(run),
            lambda: HeldOutText.of(prepared, "val"),
            prepared.tokenizer,
            run.max_seq_len,
            run.eval_tasks_limit,
            f"{given(run, 'eval_tasks')}",
        )
        require_compared(run, questions.has_chance())
        metrics = Path(run.out_dir) / "metrics.jsonl"
        return cls(questions, run.keep_best_by, stop, metrics)

    def compute(self, engine: Engine) -> dict[str, Any] | None:
        """The fields of a `scores` event, with those of a moving average of weights (collective).

        None if a rank is asked to stop. Neither the model nor the random state changes.
        """
        started, shares = time.perf_counter(), self.shares(engine)
        engine.backend.forward.eval()
        try:
            with lost_peers(), uncompiled(engine.model):
                found = fields_of(self.questions.scores(engine.model, shares))
                if average := engine.average:
                    with average.in_force():
                        of_average = fields_of(self.questions.scores(engine.model, shares))
                    found |= {f"ema_{name}": value for name, value in of_average.items()}
        except StoppedError:
            return None
        return {"seconds": time.perf_counter() - started, **found}

    def shares(self, engine: Engine) -> Shares:
        """How the ranks of the run share batches."""
        parallel = engine.parallel
        return Shares(
            group=engine.data_rank,
            size=parallel.data_size,
            counts=parallel.is_first(engine.rank),
            is_collective=engine.resolved.zero_stage == 3 and engine.world_size > 1,
            add=engine.sum_over_ranks,
            gather=engine.gather,
            is_stopping=lambda: bool(self.stop.reason),
        )

    def compared(self, fields: Mapping[str, Any]) -> float | None:
        """What --keep_best compares of a `scores` event, lower for better; None if not a score."""
        if self.by == VAL_LOSS:
            return None
        if self.by == AVERAGE:
            return -fields[AVERAGE]
        task = fields["tasks"][self.by]
        return -task["value"] if task["higher_is_better"] else task["value"]

    def lacks(self, engine: Engine, step: int) -> bool:
        """Whether no scores of a step are logged, as seen by rank 0 (collective).

        Those of a step that was trained again since do not count.
        """

        def looked_up() -> bool:
            lacks = True
            for event in EventLog(self.metrics).events("run_start", "scores"):
                if event["event"] == "run_start":
                    lacks |= event["step"] < step
                elif event["step"] == step:
                    lacks = False
            return lacks

        return on_rank_0(engine, looked_up)
