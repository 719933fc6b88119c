"""The one thread that runs the model: texts join and leave its batch between two tokens.

A text is prefilled alone and then continued with those that run; each has settings and a random
generator of its own, so that it is what `minimind generate` gives for it. The continuous batching
of transformers is not used: it draws all texts from one generator, keeps stop strings, and needs
paged attention, which a MiniMind has not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from minimind.inference.engine import Batch
from minimind.inference.text import Text


class QueueFull(Exception):
    """More texts wait than the bound."""


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
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []
        self._condition = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> tuple[int, int]:
        """Texts that run and that wait."""
        with self._condition:
            return len(self._running), len(self._waiting)

    def submit(self, texts: Sequence[Text]) -> None:
        """Let texts wait for their turn; raise QueueFull if they are too many."""
        with self._condition:
            if self._is_closed or len(self._waiting) + len(texts) > self.max_queue:
                raise QueueFull
            self._waiting.extend(texts)
            self._condition.notify()

    def cut(self, texts: Sequence[Text]) -> None:
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

    def _next(self) -> list[Text] | None:
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
        batches: list[Batch] = []
        while (joining := self._next()) is not None:
            try:
                self._advance(batches, joining)
            except Exception as error:  # any bug fails this batch alone: the thread serves the next
                for text in self._running:
                    text.error = text.error or error
                batches.clear()
            left = [text for text in self._running if text.has_left]
            with self._condition:
                self._running = [text for text in self._running if not text.has_left]
            for text in left:
                if text.on_end and not text.is_cut:
                    text.on_end()

    def _advance(self, batches: list[Batch], joining: list[Text]) -> None:
        """A token for each text that runs, and two for one that joins."""
        for batch in batches:
            batch.drop_left()
        batches[:] = [batch for batch in batches if batch.texts]
        for text in joining:
            if text.is_cut:
                continue
            new = Batch(self._model, [text])
            if text.has_left:
                continue
            if batches and new.can_grow and not self._is_invariant:
                batches[0].join(new)
            else:
                batches.append(new)
        for batch in batches:
            batch.step()
