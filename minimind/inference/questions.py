"""The questions of all tasks that are asked, and the scores of a model: in training and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minimind.config.tasks import OWN_TASKS, AskedTask
from minimind.data.tokenizer.load import Tokenizer
from minimind.inference.own_tasks import HeldOutText, OwnQuestions
from minimind.inference.scores import Score, Shares

if TYPE_CHECKING:
    from minimind.inference.lm_eval_tasks import LmEvalTasks


@dataclass(frozen=True)
class Questions:
    """The questions of our own tasks, and those of lm-eval."""

    own: OwnQuestions
    of_lm_eval: LmEvalTasks | None

    @classmethod
    def of(
        cls,
        asked: Sequence[AskedTask],
        text: Callable[[], HeldOutText],
        tokenizer: Tokenizer,
        positions: int,
        limit: int,
        by: str,
    ) -> Questions:
        """Make or load the questions; `text` is called if a task reads it.

        `by` begins the message of a UsageError for what cannot be asked.
        """
        names = [one.name for one in asked if one.is_own]
        reads_text = any(OWN_TASKS[name].reads_text for name in names)
        own = OwnQuestions(names, text() if reads_text else None, tokenizer, positions, limit, by)
        own.require()
        others, loaded = [one for one in asked if not one.is_own], None
        if others:
            from minimind.inference.lm_eval_tasks import LmEvalTasks

            loaded = LmEvalTasks.load(others, tokenizer, positions, limit, by)
        return cls(own, loaded)

    def has_chance(self) -> dict[str, bool]:
        """Whether a score is a share of right answers, by task."""
        found = {name: OWN_TASKS[name].chance is not None for name in self.own.names}
        return found | (self.of_lm_eval.has_chance() if self.of_lm_eval else {})

    def scores(self, model: Any, shares: Shares) -> dict[str, Score]:
        """Score a model in eval mode (collective); raise StoppedError if a rank shall stop."""
        with _one_document(model):
            found = self.own.scores(model, shares)
            return found | (self.of_lm_eval.scores(model, shares) if self.of_lm_eval else {})


@contextmanager
def _one_document(model: Any) -> Iterator[None]:
    """Let a row be one text: ends of documents in it, such as its first token, divide nothing."""
    before = getattr(model.config, "doc_mask", None)
    if before is None:  # a model of transformers
        yield
        return
    model.config.doc_mask = False
    try:
        yield
    finally:
        model.config.doc_mask = before
