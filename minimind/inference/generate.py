"""Prompts -> their continuations, one token after another, with a key/value cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minimind.data.tokenizer.load import AnyTokenizer
from minimind.errors import DataError, UsageError
from minimind.inference.sampling import Sampling, chooser

BEFORE = 8  # tokens of a prompt that are decoded with what follows: more than a character has
BROKEN = "\ufffd\ufdd1"  # ends a text of which the next token may complete a character


@dataclass(frozen=True)
class Written:
    """What was generated: of each prompt its continuation, and how long all took."""

    texts: tuple[str, ...]
    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / max(1e-9, self.seconds)


@dataclass
class _Text:
    """One prompt and what has come of it so far."""

    prompt: list[int]
    tokenizer: AnyTokenizer
    how: Sampling
    positions: int
    random: torch.Generator
    show: Callable[[str], None] | None = None
    new: list[int] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    ended: bool = False

    def take(self, token: int) -> None:
        """Go on by a token, to the end of the document, a stop, or the last position."""
        if self.ended:
            return
        is_end = token == self.tokenizer.eos_id
        if not is_end:
            self.new.append(token)
        is_full = len(self.new) == self.how.max_new_tokens
        is_full |= len(self.prompt) + len(self.new) == self.positions
        self.ended = is_end or is_full
        if self.ended or self.how.stop or self.show:
            self._read(cut=is_full)

    def _read(self, cut: bool) -> None:
        text = self._decoded()
        found = [at for at in map(text.find, self.how.stop) if at >= 0]
        if found:
            text, self.ended = text[: min(found)], True
        elif cut:  # perhaps within the bytes of one character
            text = text.rstrip(BROKEN)
        self.text = text
        certain = len(text) if self.ended else self._certain(text)
        if self.show and certain > self.shown:
            self.show(text[self.shown : certain])
            self.shown = certain

    def _decoded(self) -> str:
        """What is new, as it reads behind the prompt: a decoder may take a first space away."""
        before = self.prompt[-BEFORE:]
        return self.tokenizer.decode([*before, *self.new])[len(self.tokenizer.decode(before)) :]

    def _certain(self, text: str) -> int:
        """Characters that no later token can change, nor make the beginning of a stop."""
        text = text.rstrip(BROKEN)
        certain = len(text)
        for stop in self.how.stop:
            begun = [size for size in range(1, len(stop)) if text.endswith(stop[:size])]
            certain = min(certain, len(text) - max(begun, default=0))
        return certain


def ids_of(prompt: str, number: int, tokenizer: AnyTokenizer, positions: int) -> list[int]:
    """A prompt's ids; an error with its number where they leave no position to go on at."""
    try:
        ids = [*tokenizer.encode(prompt)] or [tokenizer.eos_id]  # after a document's end, a new one
    except DataError as error:
        raise DataError(f"prompt {number}: {error}") from error
    if len(ids) >= positions:
        raise UsageError(
            f"prompt {number} has {len(ids)} tokens and the model {positions} positions; shorten it"
        )
    return ids


def write_on(
    model: Any,
    tokenizer: AnyTokenizer,
    prompts: Sequence[str],
    how: Sampling,
    show: Callable[[str], None] | None = None,
    synced: bool = False,
    numbers: Sequence[int] | None = None,
) -> Written:
    """The continuations of all prompts, generated together, each as it would be alone.

    Each stops at the end-of-document token, at a stop, which is left out, or where the positions
    the model was trained on are used up. `show` gets the text of a single prompt as it comes.
    `synced`: a forward pass is collective, so no rank stops before the others. By its number, 1
    and on unless given, a prompt is told of, and draws.
    """
    positions = model.config.max_position_embeddings
    texts = []
    for number, prompt in zip(numbers or range(1, len(prompts) + 1), prompts, strict=True):
        ids = ids_of(prompt, number, tokenizer, positions)
        texts.append(_Text(ids, tokenizer, how, positions, how.random_of(number), show))
    started = time.perf_counter()
    while unfinished := [text for text in texts if not text.ended]:
        _go_on(model, tokenizer, unfinished, how, synced)
    seconds = time.perf_counter() - started
    return Written(tuple(t.text for t in texts), sum(len(t.new) for t in texts), seconds)


def _known_only(pieces: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Logits without those of rows that an embedding has beyond the tokenizer's ids."""

    def cut(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :pieces]

    return cut


@torch.no_grad()
def _go_on(
    model: Any, tokenizer: AnyTokenizer, texts: list[_Text], how: Sampling, synced: bool
) -> None:
    """Generate until all texts have ended, or the longest has no position left.

    What is on its left pads a shorter one: it is not seen, and no position is counted for it.
    """
    rows = [text.prompt + text.new for text in texts]
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = torch.full((len(rows), longest), tokenizer.pad_id)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, (row, pad) in enumerate(zip(rows, padding, strict=True)):
        ids[number, pad:], mask[number, pad:] = torch.tensor(row), 1

    def watch(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for text, token in zip(texts, ids[:, -1].tolist(), strict=True):
            text.take(token)
        return torch.tensor([text.ended for text in texts], device=ids.device)

    device = next(model.parameters()).device
    choose = chooser(how, padding, [text.random for text in texts])
    model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=min(how.max_new_tokens - len(texts[0].new), texts[0].positions - longest),
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        use_cache=True,
        do_sample=False,
        logits_processor=[_known_only(tokenizer.vocab_size), choose],
        stopping_criteria=[watch],
        synced_gpus=synced,
    )
