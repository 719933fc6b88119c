"""A text that is generated: how its tokens are drawn, when it ends, and what of it can be shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from minimind.data.tokenizer.load import Tokenizer

CONTEXT = 8  # prompt tokens decoded with the continuation; a character has at most as many
INCOMPLETE = "\ufffd\ufdd1"  # at the end of a text whose last character the next token may complete
STOP, LENGTH = "stop", "length"  # how a text ends, in OpenAI's words


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; temperature 0 is greedy decoding, top_k 0 keeps all tokens."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 42
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def generator(self, number: int) -> torch.Generator:
        """Random generator of the text with this number, the same in any batch."""
        digest = sha256(f"{self.seed} {number}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


@dataclass(frozen=True)
class Likelihood:
    """Log-probability of a token, and the most likely tokens in its place, the first first.

    By the model alone: temperature, top_p and penalties do not change it.
    """

    token: int
    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Text:
    """A prompt and its continuation so far.

    `top` is the number of most likely tokens to record with every token, None for no likelihoods;
    with `is_prompt_scored` those of the prompt are recorded first, from its second token on. The
    thread that generates calls `on_text` and `on_end`; `is_cut` is set by another.
    """

    prompt: list[int]
    tokenizer: Tokenizer
    sampling: Sampling
    max_positions: int
    generator: torch.Generator
    ends: frozenset[int]  # tokens that end it
    on_text: Callable[[str], None] | None = None
    on_end: Callable[[], None] | None = None
    top: int | None = None
    is_prompt_scored: bool = False
    new: list[int] = field(default_factory=list)
    drawn: int = 0  # tokens, with the one that ends it
    likelihoods: list[Likelihood] = field(default_factory=list)
    text: str = ""
    shown: int = 0  # characters
    end: str = ""  # why it is finished
    error: Exception | None = None
    is_cut: bool = False  # nobody waits for it

    @property
    def has_left(self) -> bool:
        """Whether nothing more is computed for it."""
        return bool(self.end) or self.is_cut or self.error is not None

    def append(self, token: int) -> None:
        """Add a token; finish at the end of the document, a stop string or the length limit."""
        self.drawn += 1
        is_end = token in self.ends
        if not is_end:
            self.new.append(token)
        is_full = len(self.new) == self.sampling.max_new_tokens
        is_full |= len(self.prompt) + len(self.new) == self.max_positions
        self.end = STOP if is_end else LENGTH if is_full else ""
        if self.end or self.sampling.stop or self.on_text:
            self._update_text(is_full)

    def _update_text(self, is_full: bool) -> None:
        """Decode the new tokens and pass on the characters that no later token can change."""
        context = self.prompt[-CONTEXT:]  # without it a decoder may drop a leading space
        text = self.tokenizer.decode([*context, *self.new])[len(self.tokenizer.decode(context)) :]
        stops = [at for at in map(text.find, self.sampling.stop) if at >= 0]
        if stops:
            text, self.end = text[: min(stops)], STOP
        elif is_full:
            text = text.rstrip(INCOMPLETE)
        self.text = text
        if not self.end:
            text = text.rstrip(INCOMPLETE)
            starts = (stop[:size] for stop in self.sampling.stop for size in range(1, len(stop)))
            held_back = max((len(start) for start in starts if text.endswith(start)), default=0)
            text = text[: len(text) - held_back]
        if self.on_text and len(text) > self.shown:
            self.on_text(text[self.shown :])
            self.shown = len(text)

    def record(self, logits_TV: Tensor, tokens: Sequence[int]) -> None:
        """Record likelihoods of these tokens, each by the logits of its position."""
        assert self.top is not None
        logs = logits_TV.float().log_softmax(-1).cpu()
        values = logs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        best = logs.topk(self.top)
        for token, value, ids, logs_of_ids in zip(
            tokens, values, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            top = tuple(zip(ids, logs_of_ids, strict=True))
            self.likelihoods.append(Likelihood(token, value, top))
