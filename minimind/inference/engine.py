"""The one decoding loop: texts in a batch, with a key/value cache, join and leave between tokens.

`generate` of transformers is not used: it draws all texts from one generator, keeps stop strings,
and computes a text that has ended until the last one has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import NumericError
from minimind.inference.prompts import encode_prompt
from minimind.inference.text import LENGTH, Sampling, Text
from minimind.runtime.device import widened

PREFILLED = 256  # positions of a prompt whose logits are held at once, where each is scored


def next_tokens(logits_BV: Tensor, texts: Sequence[Text]) -> list[int]:
    """Draw the next token of each text, from its own generator; their settings are alike.

    In float64 where the device has it, and less the maximum, so that division by a temperature
    close to 0 leaves one.
    """
    how, nothing = texts[0].sampling, torch.LongTensor()  # of ids, where a processor reads none
    if how.repetition_penalty != 1:
        ids: Any = torch.tensor(_padded([text.prompt + text.new for text in texts]))
        penalty = RepetitionPenaltyLogitsProcessor(float(how.repetition_penalty))
        logits_BV = penalty(ids.to(logits_BV.device), logits_BV.clone())
    scores: Any = widened(logits_BV)
    scores = scores - scores.amax(-1, keepdim=True)
    if not how.temperature:
        return scores.argmax(-1).tolist()
    scores = TemperatureLogitsWarper(float(how.temperature))(nothing, scores)
    if how.top_k:
        scores = TopKLogitsWarper(how.top_k)(nothing, scores)
    if how.top_p < 1:
        scores = TopPLogitsWarper(how.top_p)(nothing, scores)
    points = torch.stack([torch.rand(1, generator=text.generator) for text in texts])
    cumulative = scores.softmax(-1).cumsum(-1)
    points = points.to(scores) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True)[:, 0].tolist()


def _padded(rows: Sequence[list[int]]) -> list[list[int]]:
    """Left-padded with the first token of each, so that a repetition penalty affects no other."""
    longest = max(map(len, rows))
    return [row[:1] * (longest - len(row)) + row for row in rows]


class Batch:
    """Texts that are continued together, left-padded to the longest of them.

    The cache, of whatever kind the model returns, has all tokens of a text but the last. A model
    without one computes every position anew.
    """

    def __init__(self, model: Any, texts: Sequence[Text]) -> None:
        """Draw the first token of each text; a text whose prompt is scored comes alone."""
        self.texts = [*texts]
        self._model = model
        self._device = next(model.parameters()).device
        self._parameters = signature(model.forward).parameters
        self._cache: dict[str, Any] = {}
        logits_BV = self._prefill()
        for text in texts:
            if not text.sampling.max_new_tokens:
                text.end = LENGTH
        self._draw(logits_BV)

    @property
    def can_grow(self) -> bool:
        """Whether texts can join and leave: other layers have no place for padding."""
        return all(type(layer) is DynamicLayer for layer in self._layers)

    @property
    def _layers(self) -> list[Any]:
        return [one for cache in self._cache.values() for one in getattr(cache, "layers", [None])]

    def step(self) -> None:
        """Draw the next token of each text."""
        if not self._cache:
            return self._draw(self._prefill())
        last = [[(text.new or text.prompt)[-1]] for text in self.texts]
        ids_B1 = torch.tensor(last, device=self._device)
        self._draw(self._forward(ids_B1, torch.ones_like(ids_B1), 1)[:, -1])

    def drop_left(self) -> None:
        """Drop texts that have left, and the padding that no other needs."""
        kept = [n for n, text in enumerate(self.texts) if not text.has_left]
        if not kept:
            self.texts = []
        if len(kept) == len(self.texts) or not self.can_grow:
            return
        self.texts = [self.texts[n] for n in kept]
        rows = torch.tensor(kept, device=self._device)
        self._mask_BS = self._mask_BS[rows]
        padding = int(self._mask_BS.any(0).long().argmax())
        self._mask_BS = self._mask_BS[:, padding:]
        for layer in self._layers:
            layer.batch_select_indices(rows)
            layer.keys = layer.keys[..., padding:, :]
            layer.values = layer.values[..., padding:, :]

    def join(self, other: Batch) -> None:
        """Go on with the texts of another batch too; both can grow."""
        size = max(self._mask_BS.shape[1], other._mask_BS.shape[1])
        masks = (self._mask_BS, other._mask_BS)
        self._mask_BS = torch.cat([F.pad(mask, (size - mask.shape[1], 0)) for mask in masks])
        for own, more in zip(self._layers, other._layers, strict=True):
            for name in ("keys", "values"):
                pair = (getattr(own, name), getattr(more, name))
                padded = [F.pad(one, (0, 0, size - one.shape[-2], 0)) for one in pair]
                setattr(own, name, torch.cat(padded))
        self.texts += other.texts

    def _prefill(self) -> Tensor:
        """Logits (B, V) after all tokens; the likelihoods of a scored prompt are recorded."""
        rows = [text.prompt + text.new for text in self.texts]
        ids_BT = torch.tensor(_padded(rows), device=self._device)
        length = ids_BT.shape[1]
        masks = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
        mask_BT = torch.tensor(masks, device=self._device)
        self._mask_BS = mask_BT[:, :0]
        if not self.texts[0].is_prompt_scored or self.texts[0].drawn:
            return self._forward(ids_BT, mask_BT, 1)[:, -1]
        (text,), logits_1TV, start, size = self.texts, torch.empty(0), 0, PREFILLED
        while start < length:
            part = slice(start, start + size)
            logits_1TV = self._forward(ids_BT[:, part], mask_BT[:, part], 0)
            if size < length and not (self._cache and self.can_grow):  # no cache of keys alone
                self._cache, self._mask_BS, size = {}, mask_BT[:, :0], length
                continue
            if targets := text.prompt[start + 1 : start + size + 1]:
                text.record(logits_1TV[0, : len(targets), : text.tokenizer.vocab_size], targets)
            start += size
        return logits_1TV[:, -1]

    def _forward(self, ids_BT: Tensor, mask_BT: Tensor, last: int) -> Tensor:
        """Logits (B, T, V) after these tokens, or of the last positions."""
        self._mask_BS = torch.cat([self._mask_BS, mask_BT], 1)
        positions_BS = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)
        optional = {"position_ids": positions_BS[:, -ids_BT.shape[1] :], "logits_to_keep": last}
        inputs = self._model.prepare_inputs_for_generation(
            ids_BT,
            attention_mask=self._mask_BS,
            use_cache=True,
            is_first_iteration=not self._cache,
            **{name: value for name, value in optional.items() if name in self._parameters},
            **self._cache,
        )
        out = self._model(**inputs)
        # What is returned by the name of an argument is what the next tokens need.
        self._cache = {name: out[name] for name in out if name in self._parameters}
        return out.logits[:, -last:].float()

    def _draw(self, logits_BV: Tensor) -> None:
        """Append the next token to each text, by its settings."""
        logits_BV = logits_BV[:, : self.texts[0].tokenizer.vocab_size]
        finite = logits_BV.isfinite().all(-1).tolist()
        alike: dict[Any, list[int]] = {}
        for n, (text, is_finite) in enumerate(zip(self.texts, finite, strict=True)):
            how = text.sampling
            if not is_finite:
                text.error = NumericError("the logits are not finite; use another checkpoint")
            elif not text.has_left:
                settings = (how.temperature, how.top_k, how.top_p, how.repetition_penalty)
                alike.setdefault(settings, []).append(n)
        for numbers in alike.values():
            texts, own_BV = [self.texts[n] for n in numbers], logits_BV[numbers]
            for text, token, own_V in zip(texts, next_tokens(own_BV, texts), own_BV, strict=True):
                if text.top is not None:
                    text.record(own_V[None], [token])
                text.append(token)


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


def generate_texts(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    is_collective: bool = False,
    numbers: Sequence[int] | None = None,
) -> GenerationResult:
    """Generate one continuation per prompt in one batch; none depends on the others.

    A text ends before the end-of-document token, before a stop string, after `max_new_tokens`, or
    at the last position. `on_text` receives the text of a single prompt as it is generated.
    `is_collective`: a forward pass is, so no rank stops before the others. `numbers` (default: 1,
    2, ...) name the prompts in errors and select their random generators.
    """
    max_positions = model.config.max_position_embeddings
    by_number = {
        number: encode_prompt(prompt, number, tokenizer, max_positions)
        for number, prompt in zip(numbers or range(1, len(prompts) + 1), prompts, strict=True)
    }
    return continue_ids(model, tokenizer, by_number, sampling, on_text, is_collective)


@torch.no_grad()
def continue_ids(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Mapping[int, list[int]],
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    is_collective: bool = False,
    end_ids: Iterable[int] = (),
) -> GenerationResult:
    """Generate one continuation for the token ids of each prompt, by number; see `generate_texts`.

    `end_ids` end a text too, as the end of a document does. Raise NumericError for logits that are
    not finite.
    """
    if not prompts:
        return GenerationResult((), 0, 0.0)
    ends = frozenset((tokenizer.eos_id, *end_ids))
    places = tokenizer, sampling, model.config.max_position_embeddings
    texts = [
        Text(ids, *places, sampling.generator(number), ends, on_text)
        for number, ids in prompts.items()
    ]
    started = time.perf_counter()
    batch = Batch(model, texts)
    batch.drop_left()
    device = next(model.parameters()).device
    while _goes_on(batch, device) if is_collective else batch.texts:
        if batch.texts:
            batch.step()
            batch.drop_left()
        else:  # the others need this rank's part of a forward pass
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    seconds = time.perf_counter() - started
    if error := next((text.error for text in texts if text.error), None):
        raise error
    return GenerationResult(tuple(t.text for t in texts), sum(len(t.new) for t in texts), seconds)


def _goes_on(batch: Batch, device: torch.device) -> bool:
    """Whether any rank has a text left (collective)."""
    left = torch.tensor(len(batch.texts), device=device)
    dist.all_reduce(left)
    return bool(left)
