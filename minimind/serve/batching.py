"""The one thread that runs the model: texts join and leave its batch between two tokens.

A text is prefilled alone and then continued with those that run, left-padded to the longest; each
has settings and a random generator of its own, so that it is what `continue_ids` gives for it. The
continuous batching of transformers is not used: it draws all texts from one generator, keeps stop
strings, and needs paged attention, which a MiniMind has not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from minimind.errors import NumericError, UsageError
from minimind.inference.generate import LENGTH, Sampling, Text, logits_processors

PREFILLED = 256  # positions of a prompt whose logits are held at once


class QueueFull(Exception):
    """More texts wait than the bound."""


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of a token, and the most likely tokens in its place, the first first.

    By the model alone: temperature, top_p and penalties do not change it.
    """

    token: int
    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(kw_only=True, eq=False)
class Queued(Text):
    """A text of the scheduler, which calls `on_end` in its thread, unless the text is cut off.

    `top` is the number of most likely tokens to record with every token, None for no likelihoods;
    with `is_prompt_scored` those of the prompt are recorded first, from its second token on.
    """

    on_end: Callable[[Queued], None]
    top: int | None = None
    is_prompt_scored: bool = False
    likelihoods: list[Likelihood] = field(default_factory=list)
    drawn: int = 0  # tokens, with the one that ends it
    is_cut: bool = False
    error: Exception | None = None

    @property
    def has_left(self) -> bool:
        """Whether nothing more is computed for it."""
        return self.is_finished or self.is_cut or self.error is not None

    def append(self, token: int) -> None:
        self.drawn += 1
        super().append(token)

    def record(self, logits_TV: Tensor, tokens: Sequence[int]) -> None:
        """Record likelihoods of these tokens, each by the logits of its position."""
        assert self.top is not None
        logs = logits_TV[:, : self.tokenizer.vocab_size].float().log_softmax(-1).cpu()
        values = logs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        best = logs.topk(self.top)
        for token, value, ids, logs_of_ids in zip(
            tokens, values, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            top = tuple(zip(ids, logs_of_ids, strict=True))
            self.likelihoods.append(Likelihood(token, value, top))


class Group:
    """Texts that run in one batch, with their keys and values: all but the last token of each."""

    def __init__(self, model: Any, text: Queued) -> None:
        """Prefill a text; its first token is drawn."""
        self._model = model
        self._device = next(model.parameters()).device
        self._takes_positions = "position_ids" in signature(model.forward).parameters
        name = cache_name(model)
        assert name is not None  # by require_cache
        self._cache_name = name
        self.texts = [text]
        self._cache: Any = DynamicCache(config=model.config)
        ids = text.prompt
        size = PREFILLED if text.is_prompt_scored else len(ids)
        self._mask_BS = torch.ones(1, 0, dtype=torch.long, device=self._device)
        logits_TV = torch.empty(0)
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            logits_TV = self._forward([part], 0 if text.is_prompt_scored else 1)[0]
            if text.is_prompt_scored and (targets := ids[start + 1 : start + size + 1]):
                text.record(logits_TV[: len(targets)], targets)
        if text.sampling.max_new_tokens:
            self._draw(logits_TV[-1:])
        else:
            text.end = LENGTH

    @property
    def can_grow(self) -> bool:
        """Whether others can join: sliding and recurrent layers have no place for padding."""
        return all(type(layer) is DynamicLayer for layer in self._cache.layers)

    def step(self) -> None:
        """Draw the next token of each text."""
        self._draw(self._forward([[text.new[-1]] for text in self.texts], 1)[:, -1])

    def drop_left(self) -> None:
        """Drop texts that have left, and the padding that no other needs."""
        kept = [n for n, text in enumerate(self.texts) if not text.has_left]
        if len(kept) == len(self.texts):
            return
        self.texts = [self.texts[n] for n in kept]
        if not kept:
            return
        rows = torch.tensor(kept, device=self._device)
        self._cache.batch_select_indices(rows)
        self._mask_BS = self._mask_BS[rows]
        padding = int(self._mask_BS.any(0).long().argmax())
        if padding:
            self._mask_BS = self._mask_BS[:, padding:]
            for layer in self._cache.layers:
                layer.keys = layer.keys[..., padding:, :]
                layer.values = layer.values[..., padding:, :]

    def take(self, other: Group) -> None:
        """Go on with the texts of another group too; both can grow."""
        size = max(self._mask_BS.shape[1], other._mask_BS.shape[1])
        masks = (self._mask_BS, other._mask_BS)
        self._mask_BS = torch.cat([F.pad(mask, (size - mask.shape[1], 0)) for mask in masks])
        for own, more in zip(self._cache.layers, other._cache.layers, strict=True):
            for name in ("keys", "values"):
                pair = (getattr(own, name), getattr(more, name))
                padded = [F.pad(one, (0, 0, size - one.shape[-2], 0)) for one in pair]
                setattr(own, name, torch.cat(padded))
        self.texts += other.texts

    def _forward(self, rows: list[list[int]], last: int) -> Tensor:
        """Logits (B, T, V) after these tokens, or of the last position; T differs from 1 once."""
        ids_BT = torch.tensor(rows, device=self._device)
        self._mask_BS = torch.cat([self._mask_BS, torch.ones_like(ids_BT)], 1)
        more: dict[str, Any] = {self._cache_name: self._cache}
        if self._takes_positions:
            positions_BS = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)
            more["position_ids"] = positions_BS[:, -ids_BT.shape[1] :]
        return self._model(
            input_ids=ids_BT,
            attention_mask=self._mask_BS,
            use_cache=True,
            logits_to_keep=last,
            **more,
        ).logits.float()

    def _draw(self, logits_BV: Tensor) -> None:
        """Append the next token to each text, by its settings."""
        finite = logits_BV.isfinite().all(-1).tolist()
        by_settings: dict[Sampling, list[int]] = {}
        for n, (text, is_finite) in enumerate(zip(self.texts, finite, strict=True)):
            if is_finite:
                alike = replace(text.sampling, max_new_tokens=1, seed=0, stop=())
                by_settings.setdefault(alike, []).append(n)
            else:
                text.error = NumericError("the logits are not finite; serve another checkpoint")
        for sampling, numbers in by_settings.items():
            texts = [self.texts[n] for n in numbers]
            rows = [text.prompt + text.new for text in texts]
            longest = max(map(len, rows))
            # Padded with a token of its own, so that the repetition penalty affects no other.
            ids: Any = torch.tensor([row[:1] * (longest - len(row)) + row for row in rows])
            process = logits_processors(
                sampling, texts[0].tokenizer.vocab_size, [text.generator for text in texts]
            )
            scores_BV = logits_BV[numbers]
            tokens = process(ids.to(self._device), scores_BV.clone()).argmax(-1).tolist()
            for text, token, scores_V in zip(texts, tokens, scores_BV, strict=True):
                if text.top is not None:
                    text.record(scores_V[None], [token])
                text.append(token)


class Scheduler:
    """Texts in the order in which they came, at most `max_batch` at once.

    With `is_invariant` each is computed by itself, so that not even rounding depends on others.
    """

    def __init__(
        self, model: Any, max_batch: int, max_queue: int, is_invariant: bool = False
    ) -> None:
        self.max_queue = max_queue
        self._model = model
        self._max_batch = max_batch
        self._is_invariant = is_invariant
        self._waiting: deque[Queued] = deque()
        self._running: list[Queued] = []
        self._condition = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """Texts that run and that wait."""
        with self._condition:
            return len(self._running), len(self._waiting)

    def submit(self, texts: Sequence[Queued]) -> None:
        """Let texts wait for their turn; raise QueueFull if they are too many."""
        with self._condition:
            if self._is_closed or len(self._waiting) + len(texts) > self.max_queue:
                raise QueueFull
            self._waiting.extend(texts)
            self._condition.notify()

    def cut(self, texts: Sequence[Queued]) -> None:
        """Let texts leave at their next token, or the queue at once."""
        with self._condition:
            for text in texts:
                text.is_cut = True
            self._waiting = deque(text for text in self._waiting if not text.is_cut)

    def close(self) -> None:
        """Cut off all texts and wait for the end of the thread."""
        with self._condition:
            self._is_closed = True
            for text in (*self._waiting, *self._running):
                text.is_cut = True
            self._waiting.clear()
            self._condition.notify()
        self._thread.join()

    def _next(self) -> list[Queued] | None:
        """Texts that join the batch, once there is something to do; None at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self._waiting or self._running)
            if self._is_closed:
                return None
            room = min(len(self._waiting), self._max_batch - len(self._running))
            joining = [self._waiting.popleft() for _ in range(room)]
            self._running = [*self._running, *joining]
            return joining

    @torch.inference_mode()
    def _run(self) -> None:
        groups: list[Group] = []
        while (joining := self._next()) is not None:
            try:
                self._advance(groups, joining)
            except Exception as error:  # any bug fails this batch alone: the thread serves the next
                for text in self._running:
                    text.error = text.error or error
                groups.clear()
            left = [text for text in self._running if text.has_left]
            with self._condition:
                self._running = [text for text in self._running if not text.has_left]
            for text in left:
                if not text.is_cut:
                    text.on_end(text)

    def _advance(self, groups: list[Group], joining: list[Queued]) -> None:
        """A token for each text that runs, and two for one that joins."""
        for group in groups:
            group.drop_left()
        groups[:] = [group for group in groups if group.texts]
        for text in joining:
            if text.is_cut:
                continue
            new = Group(self._model, text)
            if text.has_left:
                continue
            if groups and new.can_grow and not self._is_invariant:
                groups[0].take(new)
            else:
                groups.append(new)
        for group in groups:
            group.step()


def cache_name(model: Any) -> str | None:
    """The argument of its forward() that takes keys and values; transformers 5.24 renamed it."""
    taken = signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), None)


def require_cache(model: Any) -> None:
    """Raise UsageError for a model that has no keys and values to keep between tokens."""
    with torch.inference_mode():
        ids = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
        found = model(input_ids=ids, use_cache=True)
    caches = [value for value in found.values() if isinstance(value, Cache)]
    layers = [layer for cache in caches for layer in getattr(cache, "layers", ())]
    keeps = any(getattr(layer, "keys", None) is not None for layer in layers)
    if not keeps or cache_name(model) is None:
        raise UsageError(
            f"{type(model).__name__} keeps no keys and values, without which it is not served; use"
            " minimind generate"
        )
