"""A folder with the records of a teacher in place of a model, as --teacher.

A row of a text has the same tokens and the same number in every epoch, order and batch, on any
number of processes. So records by the numbers of rows serve each run on rows of this text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minimind.config.checks import given
from minimind.config.run_config import RunConfig
from minimind.data.prepare.prepared import Prepared
from minimind.data.shards.teacher_rows import TeacherRows
from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import UsageError
from minimind.model.distillation import Distillation, loss_name
from minimind.runtime.durable_files import fingerprint

TOKENIZER = "tokenizer"  # the folder of the tokenizer inside


@dataclass(frozen=True)
class TeacherFolder:
    """The records of a teacher, with the interface of `Teacher`."""

    place: str
    rows: TeacherRows

    @property
    def tokenizer_path(self) -> Path:
        return self.rows.folder / TOKENIZER

    @property
    def digest(self) -> str:
        return self.rows.facts["sums"]

    def sized(self, run: RunConfig) -> RunConfig:
        """Return the run with a teacher of no weights."""
        return replace(run, teacher_weights=0)

    def require_fit(
        self, run: RunConfig, tokenizer: Tokenizer, prepared: Prepared | None = None
    ) -> None:
        """Raise UsageError for a run that the records are not of."""
        for name, now in facts_of(run, tokenizer, prepared).items():
            if (recorded := self.rows.facts[name]) != now:
                raise UsageError(
                    f"{given(run, 'teacher')} has records for {name} = {str(recorded)[:12]}, and"
                    f" the run has {str(now)[:12]}; run `minimind data logits` with the flags of"
                    " this run, or train with those of the folder"
                )

    def distillation(self, run: RunConfig, _: int) -> Distillation:
        """The loss of the run."""
        facts, values = self.rows.facts, (run.distill_weight, run.distill_temperature)
        of = f"{facts['teacher'][:8]}, {facts['top_k']} ids and the rest"
        name = loss_name(f"{of} (records {self.digest[:8]})", *values)
        return Distillation(None, name, *values, rows=self.rows)


def facts_of(run: RunConfig, tokenizer: Tokenizer, prepared: Prepared | None) -> dict[str, Any]:
    """What the records of a teacher depend on, besides its weights.

    Raise UsageError for --stages, whose rows have several lengths. Without `prepared`, the facts of
    the text are left out.
    """
    if run.stages:
        raise UsageError(
            f"{given(run, 'stages')} changes the rows, and the records of a teacher are of one"
            f" length of rows; {given(run, 'stages').remove}, or give the teacher itself"
        )
    names = ("task", "max_seq_len", "doc_mask", "distill_temperature")
    facts = {name: getattr(run, name) for name in names} | {"tokenizer": tokenizer.fingerprint}
    if prepared is None:  # the text is not read yet
        return facts
    shards = prepared.manifest["splits"]["train"]["shards"]
    keys = ("source", "tokens", "sha256", "index_sha256")  # not the weights of the sources
    text = fingerprint([[shard[key] for key in keys] for shard in shards])
    return facts | {"text": text, "rows": prepared.train.rows(run.max_seq_len + 1)}
