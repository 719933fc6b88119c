"""lm-eval's model of transformers, whose requests the ranks share. Imported with lm-eval only."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import lm_eval.api.task
import torch
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import GenerationConfig

from minimind.errors import UsageError
from minimind.inference.scores import Shares

BASE: Any = HFLM  # decorators hide the parameters of its methods
BATCH = 8  # requests
WHOLE = 2**30  # requests of a batch of lm-eval: all, which are divided here

# Names that lm-eval has for the most tokens of an answer, the first of them wins, and its default.
ANSWER_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
ANSWER_LIMIT = 256

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of a model that is loaded already
# Building requests shows a bar, which no argument switches off; `tqdm` is that module's import.
lm_eval.api.task.tqdm = partial(tqdm, disable=True)  # pyright: ignore[reportPrivateImportUsage]


class SharedLM(BASE):
    """A loaded model on all ranks: each asks for all answers, and computes its part of them.

    lm-eval itself divides questions, so that a batch, and the last bits of its results, depend on
    the number of ranks.
    """

    def __init__(self, model: Any, tokenizer: Any, shares: Shares, batch_rows: int = BATCH) -> None:
        length = model.config.max_position_embeddings
        # Without a cache of logits a batch is one forward pass.
        options = {"max_length": length, "batch_size": WHOLE, "logits_cache": False}
        super().__init__(model, tokenizer=tokenizer, **options)
        self._shares, self._rows = shares, batch_rows

    def _loglikelihood_tokens(self, requests: Any, *_: Any, **__: Any) -> list[tuple[float, bool]]:
        def key(number: int) -> tuple[int, tuple[int, ...]]:
            tokens = (*requests[number][1], *requests[number][2])
            return -len(tokens), tokens

        order = sorted(range(len(requests)), key=key)
        batches = [order[at : at + self._rows] for at in range(0, len(order), self._rows)]
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        twice = [[number for at in batch for number in (at, at)] for batch in batches]

        def compute(batch: Sequence[int]) -> list[float]:
            own = [requests[number] for number in batch[::2]]
            answers = BASE._loglikelihood_tokens(self, own, disable_tqdm=True)
            return [float(number) for answer in answers for number in answer]

        numbers = iter(self._shares.numbers(compute, twice))
        for number in order:
            found[number] = (next(numbers), bool(next(numbers)))
        return found

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Texts by batches of each rank; by all ranks alike where a forward pass is collective."""
        batches: list[tuple[int, Any]] = []  # number in its task, requests
        for name, of_task in groupby(requests, attrgetter("task_name")):
            own = [*of_task]
            require_settings(own[0].args[1], self.max_length, f"--lm_eval {name}")  # of the task
            parts = [own[at : at + self._rows] for at in range(0, len(own), self._rows)]
            batches += enumerate(parts)
        shares, found = self._shares, dict[int, list[str]]()
        step, place = (1, 0) if shares.is_collective else (shares.size, shares.group)
        for first in range(0, len(batches), step):
            shares.go_on()
            if (number := first + place) < len(batches):
                found[number] = self._texts(*batches[number])
        every = {number: texts for part in shares.gather(found) for number, texts in part.items()}
        return [text for number in range(len(batches)) for text in every[number]]

    def _texts(self, seed: int, requests: Any) -> list[str]:
        """Texts of one batch; a task draws the same on any number of ranks, beside any others."""
        devices = [self.device] if self.device.type in ("cuda", "xpu") else []
        with torch.random.fork_rng(devices, device_type=self.device.type):
            torch.manual_seed(seed)
            return super().generate_until(requests, disable_tqdm=True)


def require_settings(settings: Mapping[str, Any] | None, positions: int, by: str) -> None:
    """Raise UsageError for a task whose generation_kwargs do not suit the model or transformers.

    Else a run ends where it is scored for the first time.
    """
    settings = settings or {}
    given = (one for name in ANSWER_LIMITS if (one := settings.get(name)) is not None)
    most = int(next(given, ANSWER_LIMIT))
    if most >= positions:
        raise UsageError(
            f"{by} generates up to {most} tokens, and the model has {positions} positions; lower"
            " max_gen_toks of the generation_kwargs in its YAML, or train with a longer"
            " --max_seq_len"
        )
    if settings.get("do_sample") and not float(settings.get("temperature") or 0) > 0:
        raise UsageError(
            f"{by} has do_sample, but no temperature above 0, in the generation_kwargs of its YAML;"
            " add temperature: 1.0, or remove do_sample"
        )
    others = {name: one for name, one in settings.items() if name not in ("until", *ANSWER_LIMITS)}
    unknown = [*others.keys() - vars(GenerationConfig())]
    if unknown or others.get("num_return_sequences", 1) != 1:  # a question has one answer
        name = unknown[0] if unknown else "num_return_sequences"
        raise UsageError(
            f"{by} has {name} in the generation_kwargs of its YAML, with which no answer can be"
            " generated; remove it"
        )
