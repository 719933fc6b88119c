"""Which model suits a text and a time: a ladder of sizes, and the tokens that one is trained on.

The choice is a pure function of the text's size, the speed of the machine and the hours: neither
more text nor more time gives a smaller model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from minimind.architecture.shape import Shape, shape_of
from minimind.config.parse import parse_flags, words_of
from minimind.errors import DataError, UsageError

# Tokens per parameter of the lowest loss for a number of FLOPs, from so many parameters on: 20 by
# Hoffmann et al. (2022), whose smallest model has 44M. Below it is fewer: of two runs of equal
# FLOPs on the King James Bible, 0.41M parameters end at 1.187 bits per byte after 9.8 tokens per
# parameter, 1.84M at 1.175 after 0.54 (`strong`, one seed).
TOKENS_PER_PARAMETER = {0: 5.0, 20_000_000: 20.0}
# Where the text ends first: a model larger than that reads it to a lower loss, down to this ratio.
FEWEST_PER_PARAMETER = 1.0
MOST_EPOCHS = 4.0  # up to which a text read again is worth nearly as much as a new one (2305.16264)
FEWEST_STEPS = 100
ROWS = 2  # of the smallest step
HELD_OUT = 0.01  # --val_fraction
BYTES_OF_A_TOKEN = 4.0  # where sizes are judged, so that a larger vocabulary changes no choice
SMALLEST_TEXT = 100_000  # bytes: 1 % of it is four rows for validation
# Share of the time in which steps are taken; the rest is validation, saving and samples.
OF_STEPS = 0.9
# Bytes of text from which a vocabulary is as large.
VOCABULARIES = {0: 2048, 2_000_000: 4096, 50_000_000: 6400, 2_000_000_000: 16_384}


@dataclass(frozen=True)
class Size:
    """A size of the ladder: its flags, and the largest vocabulary that it is given."""

    name: str
    flags: Mapping[str, int | str]
    largest_vocab: int
    of: str  # what else has this shape

    def vocabulary(self, text: Text) -> int:
        """Pieces of the tokenizer for a text."""
        if text.vocab_size is not None:
            return text.vocab_size
        suited = max(size for least, size in VOCABULARIES.items() if least <= text.bytes)
        return min(suited, self.largest_vocab)

    def shape(self, vocab_size: int | None = None) -> Shape:
        """The shape with a head of its own, as the recipe `strong` has it."""
        shape = _shape(tuple(words_of({"tie_word_embeddings": False, **self.flags})))
        # Set after parsing: the text's own tokenizer may have fewer pieces than the flag allows.
        return replace(shape, vocab_size=vocab_size or self.largest_vocab)


@cache
def _shape(words: tuple[str, ...]) -> Shape:
    return shape_of(parse_flags(words))


def _flags(dim: int, n_layers: int, n_heads: int, n_kv_heads: int) -> Mapping[str, int]:
    heads = {"n_heads": n_heads, "n_kv_heads": n_kv_heads}
    return {"dim": dim, "n_layers": n_layers, **heads, "max_seq_len": 256}


# Upwards. Those that are no presets are of benchmarks/default_rules.py.
LADDER = (
    Size("0.3m", _flags(64, 3, 4, 2), 2048, "the smallest that the rules were fitted to"),
    Size("1m", _flags(128, 4, 4, 2), 4096, "of the runs that the rules were fitted to"),
    Size("tiny", {"model": "tiny"}, 4096, "the preset"),
    Size("8m", _flags(320, 6, 8, 2), 6400, "the largest that the rules were fitted to"),
    Size("26m", {"model": "26m"}, 6400, "the preset"),
    Size("64m", {"model": "64m"}, 6400, "the preset, of MiniMind-3's shape"),
    Size("104m", {"model": "104m"}, 16_384, "the preset"),
    Size("0.4b", {"model": "0.4b"}, 16_384, "the preset"),
)


def ladder(vocab_size: int | None) -> tuple[Size, ...]:
    """LADDER, with the vocabulary that a text already has."""
    if vocab_size is None:
        return LADDER
    return tuple(replace(size, largest_vocab=vocab_size) for size in LADDER)


@dataclass(frozen=True)
class Text:
    """A text, from a sample: bytes of documents, and bytes of a token by size of vocabulary.

    `vocab_size` is that of the tokenizer that it already has.

    Raise DataError without enough rows for any size.
    """

    bytes: float
    bytes_per_token: Callable[[int], float]
    held_out: float = HELD_OUT  # share of its documents
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.bytes < SMALLEST_TEXT:
            raise DataError(
                f"--data_path: the text has {self.bytes:,.0f} bytes, and the smallest model of"
                f" `minimind init` needs {SMALLEST_TEXT:,} (1 % of it for validation); add text"
            )


@dataclass(frozen=True)
class Choice:
    """A size, and how long it is trained."""

    size: Size
    vocab_size: int
    shape: Shape
    tokens: int  # to train on
    text_tokens: int  # of an epoch
    tokens_per_second: float
    limit: str  # what keeps it from being larger: time, text, memory or ladder
    start_seconds: float

    @property
    def epochs(self) -> float:
        return self.tokens / self.text_tokens

    @property
    def hours(self) -> float:
        """From the command to the end, at the speed that was measured or assumed."""
        return (self.start_seconds + self.tokens / self.tokens_per_second / OF_STEPS) / 3600


def choose(
    text: Text,
    hours: float,
    start_seconds: float,
    speed_of: Callable[[Size, float], float],
    has_room: Callable[[Size], bool] = lambda size: True,
) -> Choice:
    """The largest size that time, text and memory allow.

    `speed_of` has the tokens per second of a size on the whole machine in a run of so many seconds;
    it is asked in the order of the ladder, up to the first that is too large. Raise UsageError for
    a time that ends before the smallest is trained.
    """
    seconds = (hours * 3600 - start_seconds) * OF_STEPS
    if seconds <= 0:
        raise UsageError(
            f"--hours {hours:g} is over before the first step, which starts after about"
            f" {start_seconds:.0f} seconds; give --hours {_rounded_up(start_seconds / 1800)} or"
            " more"
        )
    sizes = ladder(text.vocab_size)
    chosen, limit = sizes[0], "the ladder"
    speeds: dict[str, float] = {}
    for size in sizes:
        parameters = size.shape().parameters
        if size is not sizes[0]:
            most = text.bytes * (1 - text.held_out) / BYTES_OF_A_TOKEN * MOST_EPOCHS
            if most < FEWEST_PER_PARAMETER * parameters:
                limit = "the text"
                break
            if not has_room(size):
                limit = "the memory"
                break
        speeds[size.name] = speed_of(size, seconds)
        ratio = max(ratio for least, ratio in TOKENS_PER_PARAMETER.items() if least <= parameters)
        if size is not sizes[0] and speeds[size.name] * seconds < ratio * parameters:
            limit = "the time"
            break
        chosen = size
    speed = speeds[chosen.name]
    vocab_size = chosen.vocabulary(text)
    shape = chosen.shape(vocab_size)
    text_tokens = round(text.bytes / text.bytes_per_token(vocab_size) * (1 - text.held_out))
    step = ROWS * shape.max_seq_len
    if speed * seconds < FEWEST_STEPS * step:
        least = (start_seconds + FEWEST_STEPS * step / speed / OF_STEPS) / 3600
        raise UsageError(
            f"--hours {hours:g} is too short for {FEWEST_STEPS} steps of the smallest model on this"
            f" machine (the first starts after about {start_seconds:.0f} seconds); give --hours"
            f" {_rounded_up(least)} or more"
        )
    tokens = int(min(speed * seconds, MOST_EPOCHS * text_tokens))
    return Choice(chosen, vocab_size, shape, tokens, text_tokens, speed, limit, start_seconds)


def _rounded_up(hours: float) -> str:
    """Two digits, not below `hours`."""
    digits = 2
    while hours * 10**digits < 10:
        digits += 1
    return f"{-(-hours * 10**digits // 1) / 10**digits:g}"
