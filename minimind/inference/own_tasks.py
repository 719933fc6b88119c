"""The tasks of OWN_TASKS: their questions, made of held-out text, and the scores of a model.

Questions depend on the text, the tokenizer and the positions of the model alone. A question of
several choices is a row of tokens for each; the row with the least loss is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from minimind.config.tasks import OWN_TASKS
from minimind.data.prepare.prepared import Prepared
from minimind.data.rows.batches import windows_of
from minimind.data.shards.conversation_shards import PADDING
from minimind.data.shards.token_shards import TokenShards
from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import UsageError
from minimind.inference.engine import continue_ids
from minimind.inference.score import LossSums, row_losses, standard_error
from minimind.inference.scores import Score, Shares, share_right
from minimind.inference.text import Sampling

CHOICES = 4
LOGITS = 2**26  # of a batch, which bounds its memory
TOKENS = 8192  # of a batch
CONTEXT, CONTINUED = 64, 8  # tokens of a cloze before the choice, and of the choice
LONGEST_NEEDLE, PAIRS, PIECE = 1024, 4, 4  # tokens; keys and values; tokens of a key and a value
SHOTS = ((12, 7), (30, 25), (41, 18), (9, 14))  # sums that an arithmetic question begins with
PROMPT, GREEDY, REPEATED = 16, 64, 4  # tokens of a prompt, of its continuation, of a repeated run
PROMPTS = 16  # prompts of a batch
SEED = 20_170_612  # of the numbers and keys that are drawn


@dataclass(frozen=True)
class HeldOutText:
    """A split of prepared text, and the bytes that its tokens stand for by source."""

    shards: TokenShards
    sources: tuple[str, ...]
    bytes_per_id: Sequence[np.ndarray]

    @classmethod
    def of(cls, prepared: Prepared, split: str) -> HeldOutText:
        shards = prepared.val if split == "val" else prepared.train
        names = tuple(source["name"] for source in prepared.manifest["sources"])
        return cls(shards, names, prepared.bytes_per_id(split))


@dataclass(frozen=True)
class OwnQuestions:
    """The first `limit` questions of each task for a model of so many positions."""

    names: Sequence[str]
    text: HeldOutText | None  # None if no task reads it
    tokenizer: Tokenizer
    positions: int
    limit: int
    by: str  # begins the message of an error

    def require(self) -> None:
        """Make the questions of choices once; raise UsageError for a text that is too short."""
        for name in self.names:
            if name in _CHOICES_OF:
                _CHOICES_OF[name](self)
            elif name == "repetition":
                self.prompts()
            elif self.text is not None and not len(self.text.shards):
                raise UsageError(
                    f"{self.by}: {name} needs held-out text, and there is none; hold out some, or"
                    f" remove {name}"
                )

    def scores(self, model: Any, shares: Shares) -> dict[str, Score]:
        """Score each task (collective); raise StoppedError if a rank is asked to stop."""
        found: dict[str, Score] = {}
        for name in self.names:
            if name in _CHOICES_OF:
                questions, chance = _CHOICES_OF[name](self), OWN_TASKS[name].chance
                assert chance is not None
                found[name] = share_right(self._answers(model, questions, shares), chance)
            elif name == "bits_per_byte":
                found |= self._bits_per_byte(model, shares)
            else:
                found[name] = self._repetition(model, shares)
        return found

    def passages(self, least: int, most: int, number: int) -> list[np.ndarray]:
        """The first tokens of documents of at least `least`, without their end, spread evenly.

        There are `number` of them, or as many as there are documents.
        """
        assert self.text is not None
        ends = self.text.shards.document_ends()
        begins = np.concatenate(([0], ends[:-1]))
        long = np.flatnonzero(ends - begins - 1 >= least)
        chosen = long[np.linspace(0, len(long) - 1, min(number, len(long))).astype(int)]
        lengths = np.minimum(ends - begins - 1, most)
        return [self.text.shards.stretch(int(begins[n]), int(lengths[n])) for n in chosen]

    def prompts(self) -> list[list[int]]:
        """Beginnings of held-out documents."""
        found = [[*map(int, one)] for one in self.passages(PROMPT, PROMPT, self.limit)]
        self.need("repetition", 1, PROMPT, len(found) * (PROMPT < self.positions))
        return found

    def need(self, name: str, least: int, length: int, found: int) -> None:
        """Raise UsageError for fewer than `least` texts of `length` tokens."""
        if found < least:
            raise UsageError(
                f"{self.by}: {name} needs at least {least} different pieces of {length} tokens of"
                f" held-out text (max_seq_len = {self.positions}), but there are {found}; hold out"
                f" more text, or remove {name}"
            )

    def _answers(
        self, model: Any, questions: Sequence[tuple[list[np.ndarray], int]], shares: Shares
    ) -> list[bool]:
        rows = [row for choices, _ in questions for row in choices]
        losses = self._losses(model, rows, shares).reshape(len(questions), CHOICES)
        losses = np.where(np.isfinite(losses), losses, np.inf)
        right = [answer for _, answer in questions]
        return [int(own.argmin()) == n for own, n in zip(losses, right, strict=True)]

    def _losses(self, model: Any, rows: Sequence[np.ndarray], shares: Shares) -> np.ndarray:
        """Loss in nats over the targets of each row, float64; rows of similar lengths together."""
        order = sorted(range(len(rows)), key=lambda n: -len(rows[n]))
        budget, batches = min(TOKENS, LOGITS // self.tokenizer.vocab_size), []
        while order:
            size = max(1, budget // len(rows[order[0]]))
            batches.append(order[:size])
            order = order[size:]

        def compute(batch: Sequence[int]) -> list[float]:
            padded = np.full((len(batch), len(rows[batch[0]])), PADDING, dtype=np.int64)
            for number, at in enumerate(batch):
                padded[number, : len(rows[at])] = rows[at]
            device = next(model.parameters()).device
            losses, _ = row_losses(model, torch.from_numpy(padded).to(device), has_starts=False)
            return losses.tolist()

        found = np.empty(len(rows))
        found[[at for batch in batches for at in batch]] = shares.numbers(compute, batches)
        return found

    def _bits_per_byte(self, model: Any, shares: Shares) -> dict[str, Score]:
        assert self.text is not None
        eos_id = self.tokenizer.eos_id
        windows = windows_of(self.text.shards, self.positions, eos_id, most=self.limit)
        rows = [windows.tokens(number) for number in range(len(windows))]
        losses = self._losses(model, rows, shares)
        pairs = zip(rows, windows.sources, strict=True)
        sizes = np.array([self.text.bytes_per_id[source][row[1:]].sum() for row, source in pairs])
        found = {"bits_per_byte": _ratio(losses, sizes)}
        if len(self.text.sources) > 1:
            for number, name in enumerate(self.text.sources):
                own = windows.sources == number
                if own.any():
                    found[f"bits_per_byte/{name}"] = _ratio(losses[own], sizes[own])
        return found

    def _repetition(self, model: Any, shares: Shares) -> Score:
        prompts = self.prompts()
        batches = [prompts[at : at + PROMPTS] for at in range(0, len(prompts), PROMPTS)]

        def compute(batch: Sequence[list[int]]) -> list[float]:
            result = continue_ids(
                model,
                self.tokenizer,
                dict(enumerate(batch, 1)),
                Sampling(GREEDY, temperature=0.0),
                is_collective=shares.is_collective,
            )
            return [repeated_share(self.tokenizer.encode(text)) for text in result.texts]

        rates = shares.numbers(compute, batches)
        error = stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else None
        return Score(fmean(rates), None, error, len(rates), higher_is_better=False)


def repeated_share(tokens: Sequence[int]) -> float:
    """Share of the runs of REPEATED tokens that came before; 0 of a text without a second one."""
    runs = [tuple(tokens[at : at + REPEATED]) for at in range(len(tokens) - REPEATED + 1)]
    return 1 - len({*runs}) / len(runs) if runs else 0.0


def _ratio(losses: np.ndarray, sizes: np.ndarray) -> Score:
    """Bits per byte over some windows, with the standard error of a ratio of two sums."""
    sums = LossSums.of_rows(losses / math.log(2), sizes.astype(float), 0.0)
    error = standard_error([sums], [1.0])
    return Score(sums.mean, None, error, len(losses), higher_is_better=False)


Question = tuple[list[np.ndarray], int]  # a row for each choice, and the number of the right one


def _rows(context: Sequence[int], choices: Sequence[Sequence[int]], right: int) -> Question:
    """A question: `context`, then each of the choices, which alone are targets."""
    before = [~int(token) for token in context]
    return [np.array([*before, *map(int, one)], dtype=np.int64) for one in choices], right


def _placed(answer: Any, others: Sequence[Any], number: int) -> tuple[list[Any], int]:
    """The answer among the others, at a place that goes around with the number of the question."""
    right = number % CHOICES
    return [*others[:right], answer, *others[right:]], right


def _cloze(questions: OwnQuestions) -> list[Question]:
    """Continuations of CONTINUED tokens: the passage's own, and those of the three next ones."""
    most = min(CONTEXT, questions.positions - CONTINUED - 1) + CONTINUED
    passages = []
    if most >= 2 * CONTINUED:
        passages = questions.passages(2 * CONTINUED, most, max(CHOICES, questions.limit))
    distinct = {tuple(one[-CONTINUED:]) for one in passages}
    questions.need("cloze", CHOICES, 2 * CONTINUED, len(distinct))
    found, eos_id = [], questions.tokenizer.eos_id
    for number, passage in enumerate(passages[: questions.limit]):
        answer = tuple(passage[-CONTINUED:])
        following = (tuple(one[-CONTINUED:]) for one in passages[number + 1 :] + passages[:number])
        others = [*dict.fromkeys(one for one in following if one != answer)][: CHOICES - 1]
        choices, right = _placed(answer, others, number)
        found.append(_rows([eos_id, *passage[:-CONTINUED]], choices, right))
    return found


def _needle(questions: OwnQuestions) -> list[Question]:
    """Four keys, each with its value, anywhere in a held-out text; one key comes again at the end.

    Keys and values are drawn from the tokens of the text. The wrong choices are values of the other
    keys, so that it does not help to know what came before, but where.
    """
    assert questions.text is not None
    shards, length = questions.text.shards, min(LONGEST_NEEDLE, questions.positions)
    filler = length - 1 - PAIRS * 2 * PIECE - 2 * PIECE  # without the first token, and the question
    needed = max(length, 1 + 2 * PIECE * (PAIRS + 1) + PAIRS)
    questions.need("needle", 1, needed, int(filler >= PAIRS and len(shards) > length))
    found, eos_id = [], questions.tokenizer.eos_id
    for number in range(questions.limit):
        draw = np.random.default_rng((SEED, number))
        begin = int(draw.integers(0, len(shards) - filler))
        text = shards.stretch(begin, filler)
        places = draw.integers(0, len(shards), size=(PAIRS, 2 * PIECE)).ravel().tolist()
        drawn = np.array([shards.stretch(place, 1)[0] for place in places])
        pairs = drawn.reshape(PAIRS, 2, PIECE)
        cuts = np.sort(draw.integers(0, filler + 1, size=PAIRS))
        parts = np.split(text, cuts)
        context = [eos_id, *parts[0]]
        for pair, part in zip(pairs, parts[1:], strict=True):
            context += [*pair.ravel(), *part]
        asked = number % PAIRS
        others = [pairs[n, 1] for n in range(PAIRS) if n != asked]
        choices, right = _placed(pairs[asked, 1], others, number // PAIRS)
        found.append(_rows([*context, *pairs[asked, 0]], choices, right))
    return found


def _arithmetic(questions: OwnQuestions) -> list[Question]:
    """Sums of two numbers after some that are solved; wrong ones are off in one digit."""
    encode, found = questions.tokenizer.encode, []
    shots = "".join(f"{a} + {b} = {a + b}\n" for a, b in SHOTS)
    for number in range(questions.limit):
        draw = np.random.default_rng((SEED, number))
        a, b = (int(part) for part in draw.integers(11, 40, size=2))
        signs = draw.choice((-1, 1), size=3)
        wrong = [a + b + int(sign) * off for sign, off in zip(signs, (1, 10, 11), strict=True)]
        choices, right = _placed(a + b, wrong, number)
        prompt = f"{shots}{a} + {b} ="
        size, rows = len(encode(prompt)), []
        for choice in choices:
            ids = encode(f"{prompt} {choice}")
            row, _ = _rows([questions.tokenizer.eos_id, *ids[:size]], [ids[size:]], 0)
            rows.append(row[0][-questions.positions - 1 :])
        found.append((rows, right))
    return found


_CHOICES_OF: dict[str, Callable[[OwnQuestions], list[Question]]] = {
    "cloze": _cloze,
    "needle": _needle,
    "arithmetic": _arithmetic,
}
