"""Continue prompts with `model.generate` of transformers, many at a time, with a key/value cache.

A stopping criterion decodes, streams and ends each text: a streamer of transformers cannot end a
row, and `stop_strings` needs a tokenizer of transformers and keeps the stop string in the text.
Sampling settings are applied by logits processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import NumericError
from minimind.inference.prompts import encode_prompt
from minimind.runtime.device import widened


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


def logits_processors(
    sampling: Sampling, vocab_size: int, generators: Sequence[torch.Generator]
) -> LogitsProcessorList:
    """Processors that apply the settings in `generate(do_sample=False)`.

    `generate(do_sample=True)` draws all rows from one global generator, which would make a text
    depend on the rest of its batch. So the last processor draws a token for each row, from one of
    `generators`, and rules out all others.
    """

    def check(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Drop the logits beyond the vocabulary; shift the others to a maximum of 0.

        In float64 where the device has it, so that division by a temperature close to 0 leaves
        a maximum.
        """
        scores = widened(scores[:, :vocab_size])
        if not scores.isfinite().all():
            raise NumericError(
                f"the logits of token {input_ids.shape[1]} are not finite; generate from another"
                " checkpoint"
            )
        return scores - scores.amax(-1, keepdim=True)

    def draw(input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V): 0 for a token drawn from the softmax of each row, -inf elsewhere."""
        points = torch.stack([torch.rand(1, generator=generator) for generator in generators])
        cumulative = scores.softmax(-1).cumsum(-1)
        points = points.to(scores) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, points, right=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)

    first: list[Any] = [check]
    if sampling.repetition_penalty != 1:
        first.insert(0, RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if not sampling.temperature:
        return LogitsProcessorList(first)
    warpers = [TemperatureLogitsWarper(float(sampling.temperature))]
    warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    return LogitsProcessorList([*first, *warpers, draw])


CONTEXT = 8  # prompt tokens decoded with the continuation; a character has at most as many
INCOMPLETE = "\ufffd\ufdd1"  # at the end of a text whose last character the next token may complete


@dataclass(frozen=True)
class GenerationResult:
    """One continuation per prompt, the number of tokens generated and the time it took."""

    texts: tuple[str, ...]
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second over all prompts."""
        return self.tokens / max(1e-9, self.seconds)


STOP, LENGTH = "stop", "length"  # how a text ends, in OpenAI's words


@dataclass
class Text:
    """A prompt and its continuation so far."""

    prompt: list[int]
    tokenizer: Tokenizer
    sampling: Sampling
    max_positions: int
    generator: torch.Generator
    ends: frozenset[int]  # tokens that end it
    on_text: Callable[[str], None] | None = None
    new: list[int] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    end: str = ""  # why it is finished

    @property
    def is_finished(self) -> bool:
        return bool(self.end)

    def append(self, token: int) -> None:
        """Add a token; finish at the end of the document, a stop string or the length limit."""
        if self.is_finished:
            return
        is_end = token in self.ends
        if not is_end:
            self.new.append(token)
        is_full = len(self.new) == self.sampling.max_new_tokens
        is_full |= len(self.prompt) + len(self.new) == self.max_positions
        self.end = STOP if is_end else LENGTH if is_full else ""
        if self.is_finished or self.sampling.stop or self.on_text:
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
        if not self.is_finished:
            text = text.rstrip(INCOMPLETE)
            starts = (stop[:size] for stop in self.sampling.stop for size in range(1, len(stop)))
            held_back = max((len(start) for start in starts if text.endswith(start)), default=0)
            text = text[: len(text) - held_back]
        if self.on_text and len(text) > self.shown:
            self.on_text(text[self.shown :])
            self.shown = len(text)


def generate_texts(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    synced_gpus: bool = False,
    numbers: Sequence[int] | None = None,
) -> GenerationResult:
    """Generate one continuation per prompt in one batch; none depends on the others.

    A text ends before the end-of-document token, before a stop string, after `max_new_tokens`, or
    at the last position. `on_text` receives the text of a single prompt as it is generated.
    `synced_gpus`: a forward pass is collective, so no rank stops before the others. `numbers`
    (default: 1, 2, ...) name the prompts in errors and select their random generators.
    """
    max_positions = model.config.max_position_embeddings
    by_number = {
        number: encode_prompt(prompt, number, tokenizer, max_positions)
        for number, prompt in zip(numbers or range(1, len(prompts) + 1), prompts, strict=True)
    }
    return continue_ids(model, tokenizer, by_number, sampling, on_text, synced_gpus)


def continue_ids(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Mapping[int, list[int]],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    synced_gpus: bool = False,
    end_ids: Iterable[int] = (),
) -> GenerationResult:
    """Generate one continuation for the token ids of each prompt, by number; see `generate_texts`.

    `end_ids` end a text too, as the end of a document does.
    """
    ends = frozenset((tokenizer.eos_id, *end_ids))
    places = tokenizer, sampling, model.config.max_position_embeddings
    texts = [
        Text(ids, *places, sampling.generator(number), ends, on_text)
        for number, ids in prompts.items()
    ]
    started = time.perf_counter()
    while unfinished := [text for text in texts if not text.is_finished]:
        _generate_batch(model, unfinished, synced_gpus)
    seconds = time.perf_counter() - started
    return GenerationResult(tuple(t.text for t in texts), sum(len(t.new) for t in texts), seconds)


@torch.no_grad()
def _generate_batch(model: Any, texts: list[Text], synced_gpus: bool) -> None:
    """Generate until all texts are finished or the longest has no position left."""
    tokenizer, sampling = texts[0].tokenizer, texts[0].sampling
    rows = [text.prompt + text.new for text in texts]
    longest = max(map(len, rows))
    # Left-padded with its own first token, so that the repetition penalty affects no other.
    ids = torch.tensor([[row[0]] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])

    def update(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for text, token in zip(texts, ids[:, -1].tolist(), strict=True):
            text.append(token)
        return torch.tensor([text.is_finished for text in texts], device=ids.device)

    device = next(model.parameters()).device
    remaining = sampling.max_new_tokens - len(texts[0].new)
    generators = [text.generator for text in texts]
    model.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=min(remaining, texts[0].max_positions - longest),
        eos_token_id=[*texts[0].ends],
        pad_token_id=tokenizer.pad_id,
        use_cache=True,
        do_sample=False,
        logits_processor=logits_processors(sampling, tokenizer.vocab_size, generators),
        stopping_criteria=[update],
        synced_gpus=synced_gpus,
    )
