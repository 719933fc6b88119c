"""What stands out in a run, in plain sentences: what was seen, why it matters, what to do.

A rule yields a kind, what is seen, advice and how sure it is. It looks at the training loss, at the
validation and at the floors of the text, as far as the run has them; one that lacks its figures, or
has too few of them, is silent. What a loss varies by chance is taken from the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from functools import cached_property

import numpy as np

from minimind.config.flags import FEWEST_PIECES, FIRST_EVAL_ROWS
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.rules import Workload, learning_rate
from minimind.errors import NumericError
from minimind.report import formats
from minimind.report.formats import PHASES, RECURRING
from minimind.report.history import Run, read_configuration, read_event
from minimind.report.placement import floors_of, last_bits
from minimind.report.slowness import Finding

FEW = 20  # lines below which the shape of a curve says nothing
FEWEST_ROWS = 8  # of a validation, below which a mixed text may look as one of its kinds alone
BALANCED = 100  # steps that experts may take to share the tokens
LION = 5.0  # rates of Lion are 3 to 10 times lower than those of AdamW (Chen et al. 2023)

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
Found = tuple[str, str, str, str]  # a kind, what is seen and why it matters, what to do, how sure

LOOK = "a lower --learning_rate, or look at their rows (nonfinite_rows.jsonl)"
PRECISION = {"float16": "--dtype bfloat16", "bfloat16": f"--dtype float32, {LOOK}"}
PRECISION["bf16-mixed"] = PRECISION["bfloat16"]
MIX = "mix the sources of both stages with weights"
KEPT = (
    "look at what your own code keeps (losses as tensors, lists), or save with --save_interval and"
    " restart"
)
LOOPS = "train longer, or look for copies in the text (`minimind data filter`)"
COPIES = "`minimind data filter` drops copies and near-copies"
INSPECT = "look at the text (`minimind data inspect DIR`)"


class Case:
    """The figures of a run that rules read; NaN, 0 or empty where they are unknown."""

    def __init__(self, run: Run, now: float) -> None:
        self.run, self.outcomes = run, run.outcomes(now)
        self.quiet = now - run.starts[-1].last_time if run.starts else math.nan  # seconds
        self.flags = {n: value for n, (value, _) in read_configuration(run.run_dir).flags.items()}
        self.step, self.lr, self.norm = map(run.column, ("step", "lr", "grad_norm"))
        self.loss = run.column("loss")
        self.smooth = _medians(self.loss)
        self.lines = len(self.loss)
        self.total_steps = run.fact("total_steps") or 0
        self.vocabulary = self.value("vocab_size")
        self.has_own_loss = bool(run.own_loss)  # of another scale than the cross-entropy
        is_known = self.vocabulary > 1 and not self.has_own_loss
        self.uniform = math.log(self.vocabulary) if is_known else math.nan  # nothing is learnt
        self.stages, self.order = run.fact("stages") or [], run.fact("order") or {}
        self.row_tokens = self.order.get("row_tokens") or math.nan
        self.rows_per_step = self.order.get("rows_per_step") or math.nan
        tokens = run.column("tokens")[-1:].sum()  # 0 without a line
        self.rows_read = float(tokens) / (self.row_tokens - 1 or math.nan)
        self.rows_per_epoch = run.figure("rows_per_epoch") or math.nan
        self.epochs = self.rows_read / self.rows_per_epoch  # how often the text was read
        self.is_sft = self.flags.get("task") == "sft"
        is_tuned = self.is_sft or run.fact("init_from") is not None
        begins = self.lines and self.step[0] <= max(50.0, 0.05 * self.step[-1])
        self.is_fresh = bool(begins) and not is_tuned and not self.stages
        self.floors, self.bits = floors_of(run), last_bits(run)
        self.unigram, self.trigram = (self.floors.get(n, math.nan) for n in ("unigram", "trigram"))
        self.evals = [e for e in run.events("eval") if math.isfinite(e["val_loss"])]
        self.losses = [e["val_loss"] for e in self.evals]
        self.last = self.evals[-1] if self.evals else read_event({"event": "eval"})
        floors = run.events("floors")
        self.text = floors[-1] if floors else read_event({"event": "floors"})
        self.is_of_few = self.text["rows"] < FEWEST_ROWS  # the floors: of no kind of text for sure

    def flag(self, name: str) -> str:
        """Its value in text, or a question mark."""
        return self.flags.get(name, "?")

    def value(self, name: str) -> float:
        """The value of a flag, NaN unless it is a number."""
        try:
            return float(self.flags.get(name, ""))
        except ValueError:
            return math.nan

    def late(self, name: str) -> float:
        """The median of a column over the last third of its lines; NaN of fewer than five."""
        values = self.run.column(name)
        values = values[len(values) - max(1, len(values) // 3) :]
        return _median(values) if np.isfinite(values).sum() >= 5 else math.nan

    @cached_property
    def width(self) -> int:
        """Lines of the windows whose medians are compared."""
        return max(3, self.lines // 10)

    @cached_property
    def end(self) -> float:
        """The usual loss of the last tenth of the lines."""
        return _median(self.loss[-self.width :])

    @cached_property
    def noise(self) -> float:
        """The standard deviation of the loss of one line around its course, by differences.

        The median of differences of neighbouring lines is that of a normal distribution times
        0.6745 and the root of two; a fall of the loss and a few spikes hardly move it. The first
        lines, in which the loss falls fast, are left out where there are enough others.
        """
        steps = np.abs(np.diff(self.loss[self.lines // 4 :] if self.lines >= FEW else self.loss))
        usual = _median(steps)
        return usual / (0.6745 * math.sqrt(2)) if math.isfinite(usual) else 0.0

    def error(self, lines: int) -> float:
        """The standard error of the median of so many lines."""
        return 1.2533 * self.noise / math.sqrt(max(1, lines))

    @cached_property
    def highest(self) -> float:
        """The highest learning rate of a line."""
        return float(np.nanmax(self.lr)) if np.isfinite(self.lr).any() else math.nan

    @property
    def peak(self) -> float:
        """The highest learning rate; the first step may have no line of its own."""
        return float(np.fmax(self.highest, self.value("learning_rate")))

    @property
    def excess_of_rate(self) -> float:
        """The highest rate over that of the rule for AdamW, or over Muon's default; else NaN."""
        muon, optimizer = self.value("muon_lr"), self.flags.get("optimizer")
        if optimizer == "muon" and self.flags.get("muon_scaling") != "match_rms_adamw":
            return muon / OPTIMIZERS["muon"].defaults["muon_lr"]
        tokens = self.total_steps * (self.run.fact("tokens_per_step") or 0)
        parameters = self.run.fact("parameters") or 0
        if optimizer in (None, "sgd") or not (tokens and parameters > 0):
            return math.nan
        suited = learning_rate(Workload(int(parameters), int(tokens), 1.0, int(self.total_steps)))
        suited /= LION if optimizer == "lion" else 1.0
        return (muon if optimizer == "muon" else self.highest) / suited

    @cached_property
    def gap(self) -> tuple[float, float]:
        """Nats by which validation is above training in the first pass, and the noise of that.

        NaN where no validation is in it, or one of so few rows that those of a mixed text may be
        of its rarer kind. A text is not known by heart after one reading, so that a gap is one of
        the texts.
        """
        first = self.rows_per_epoch / self.rows_per_step  # steps
        early = [e for e in self.evals if e["step"] <= first]
        is_unlike = self.stages or self.has_own_loss
        if not early or early[-1]["rows"] < FEWEST_ROWS or is_unlike or not self.lines:
            return math.nan, math.nan
        last = early[-1]
        near = np.argsort(np.abs(self.step - last["step"]), kind="stable")[: self.width]
        noise = math.hypot(self.error(len(near)), np.nan_to_num(last["val_loss_se"]))
        return last["val_loss"] - _median(self.loss[near]), noise


Rule = Callable[[Case], Iterator[Found]]
# Rules in their order, the kinds of findings that explain what one would see, and its least lines.
RULES: dict[Rule, tuple[Set[str], int]] = {}
STOPPED = {"diverged", "spikes"}
RATE = {*STOPPED, "high_rate", "low_rate", "nothing_learnt", "weight_decay", "long_warmup"}
TEXT = {"other_text", "chance", "word_order", "tokenizer", "short_rows"}


def rule(explained_by: Set[str] = frozenset(), least: int = 0) -> Callable[[Rule], Rule]:
    """Add a rule, which is silent where one of the kinds was found, or with fewer lines."""

    def add(judge: Rule) -> Rule:
        RULES[judge] = explained_by, least
        return judge

    return add


def diagnose(run: Run, now: float) -> list[Finding]:
    """What every rule finds."""
    case, found = Case(run, now), list[Finding]()
    for judge, (explained_by, least) in RULES.items() if run.starts else ():
        if case.lines >= least and not explained_by & {one.kind for one in found}:
            found += [Finding(*one) for one in judge(case)]
    return found


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _medians(values: np.ndarray) -> np.ndarray:
    """Running medians over a fortieth of the lines, at least three; at 2,000 to 4,000 places."""
    half, every = max(1, len(values) // 80), max(1, len(values) // 2000)
    places = range(0, len(values), every)
    found = np.array([_median(values[max(0, n - half) : n + half + 1]) for n in places])
    return found.repeat(every)[: len(values)]


def _sure(value: float, likely: float, certain: float) -> str:
    """How sure a value makes, from the values on that make it likely and certain.

    Either may be the larger one.
    """
    if likely > certain:
        value, likely, certain = -value, -likely, -certain
    return CERTAIN if value >= certain else LIKELY if value >= likely else POSSIBLE


@rule()
def _diverged(case: Case) -> Iterator[Found]:
    lost = np.flatnonzero(~np.isfinite(case.loss))
    end = case.run.starts[-1].end or {}
    reason = end.get("reason") or "no reason is recorded"
    advice = f"--learning_rate far below {case.flag('learning_rate')}"
    advice += "" if case.flag("spike_guard") == "true" else ", --spike_guard"
    advice += ", or --grad_clip 1" if case.flag("grad_clip") not in ("1.0", "1") else ""
    if len(lost):
        text = f"the loss is not a number at {len(lost):,} of {case.lines:,} lines, first at step"
        text += f" {case.step[lost[0]]:,.0f}: nothing is learnt from then on"
        yield "diverged", text, advice, CERTAIN
    elif end.get("status") == NumericError.status and case.run.steps_of("step_skipped"):
        text = f"the run stopped at numbers that are not finite ({reason})"
        yield "diverged", f"{text}: it diverged", advice, CERTAIN
    elif end.get("status") == NumericError.status:
        yield from _spikes(case, reason.split(";")[0])
    elif case.end > 2 * case.uniform:
        text = f"the loss ends at {case.end:,.2f}, while a model that has learnt nothing has"
        text += f" {case.uniform:.2f} (ln {case.vocabulary:,.0f}): it diverged"
        yield "diverged", text, advice, CERTAIN
    elif case.lines >= FEW and not case.stages:
        yield from _rise(case, advice)


def _spikes(case: Case, reason: str) -> Iterator[Found]:
    back = sum(kind == "rolled back" for kind, _ in case.outcomes)
    times = formats.count(back, "rollback") if back else "no checkpoint to go back to"
    text = f"loss or gradient norm stayed far above their earlier values, with {times}, until the"
    text += f" run stopped ({reason}): the numbers are finite, but the updates are too large"
    advice = f"--learning_rate below {case.flag('learning_rate')}"
    clip = case.value("grad_clip")
    advice += ", --grad_clip 1" if not 0 < clip <= 1 else f", --grad_clip below {clip:g}"
    yield "spikes", text, f"{advice}, or look at the rows of rolled_back-*.txt", CERTAIN


def _rise(case: Case, advice: str) -> Iterator[Found]:
    """A loss whose end is above its least window, beyond noise, and a validation that agrees.

    The least of many windows is low by chance: by about the root of twice the logarithm of their
    number, in standard errors.
    """
    width, error = case.width, case.error(case.width)
    begins = range(0, case.lines - width, max(1, width // 2))
    windows = np.array([_median(case.loss[n : n + width]) for n in begins])
    if not np.isfinite(windows).any():
        return
    at = int(np.nanargmin(windows))
    best, start = float(windows[at]), float(case.smooth[0])
    by_chance = error * math.sqrt(2 * math.log(len(windows) + 1))
    rise = case.end - best
    excess = (rise - by_chance) / max(error * math.sqrt(2), 1e-9)  # standard errors
    if excess < 4 or rise < max(0.3, 0.15 * (start - best)):
        return
    begin, step = begins[at], float(case.step[begins[at] + width // 2])
    later = [e["val_loss"] for e in case.evals if e["step"] > case.step[begin]]
    text = f"the loss rose from {best:.2f} at step {step:,.0f} to {case.end:.2f} at the end"
    if len(case.evals) > 1 and later:
        lifted = later[-1] - min(case.losses)
        if lifted < 0.25 * rise:  # training read text that is harder, or a few rows by chance
            return
        text += f", and validation from {min(case.losses):.2f} to {later[-1]:.2f}"
        sure = CERTAIN if excess >= 8 else LIKELY
    else:
        sure = _sure(excess, 8, 24)
    yield "diverged", f"{text}: what was learnt is lost", advice, sure


@rule(STOPPED, least=5)
def _weight_decay(case: Case) -> Iterator[Found]:
    """A decay that takes away within a few steps what an update adds.

    The most that the rule of passes gives is 0.94; with less it is the rate that is too high.
    """
    decay = case.value("weight_decay")
    rate = case.value("muon_lr") if case.flag("optimizer") == "muon" else case.peak
    memory = 1 / (rate * decay) if rate > 0 and decay > 0 else math.inf  # steps
    if not decay > 2 or memory > min(40.0, case.total_steps / 4):
        return
    if case.bits < case.trigram:  # it learns in spite of it
        return
    text = f"--weight_decay {decay:g} at a rate of {rate:.2g} makes weights forget in {memory:.1f}"
    text += " steps: they stay near zero, and the model learns token frequencies at most"
    if math.isfinite(case.bits + case.trigram):
        text += f" (validation {case.bits:.3f} bits per byte, trigram {case.trigram:.3f})"
    sure = _sure(memory, 20, 8)
    yield "weight_decay", text, "--weight_decay 0.1, or --weight_decay auto", sure


@rule(STOPPED)
def _long_warmup(case: Case) -> Iterator[Found]:
    """A rate that rises in most of the steps."""
    warmup = case.value("warmup_steps")
    share = warmup / case.total_steps if case.total_steps else 0.0
    known = np.isfinite(case.lr)
    if known.sum() >= 5 and case.run.last_step >= 0.9 * case.total_steps:  # as it was
        rising = case.step[known][case.lr[known] >= 0.99 * case.highest]
        is_risen = case.lr[known][0] < 0.5 * case.highest
        share = float(rising[0]) / case.total_steps if is_risen else 0.0
    if case.total_steps < 20 or not share >= 0.5:
        return
    text = f"the learning rate rises during {formats.percent(min(share, 1.0))} of the"
    text += f" {case.total_steps:,.0f} steps: most steps have too low a rate, and few or"
    text += " none are left for the decay, where a loss falls most"
    advice = f"--warmup_steps {max(1, case.total_steps / 10):.0f}, or --warmup_steps auto"
    yield "long_warmup", text, advice, _sure(share, 0.5, 0.8)


@rule({*STOPPED, "weight_decay"}, least=FEW)
def _high_rate(case: Case) -> Iterator[Found]:
    if not case.is_fresh or case.has_own_loss or not np.isfinite(case.smooth).all():
        return
    rate = f"--learning_rate {case.flag('learning_rate')}"
    if case.flags.get("optimizer") == "muon" and math.isfinite(case.value("muon_lr")):
        rate += f" and --muon_lr {case.flag('muon_lr')}"
    start, most = float(case.smooth[0]), float(case.smooth.max())
    steady, decaying = _stall(case)
    excess = case.excess_of_rate
    times = f", {excess:,.0f} times what is usual," if excess >= 3 else ""
    lower = (
        "--learning_rate auto" if str(case.flag("optimizer")).startswith("adamw") else "the default"
    )
    advice = f"{rate}{times} is too high: a tenth of it, or {lower}"
    if most - start > 1.0 + 6 * case.error(3):
        at = case.step[int(np.argmax(case.smooth))]
        text = (
            f"the loss rises from {start:.2f} to {most:.2f} at step {at:,.0f}: updates are larger"
        )
        yield "high_rate", f"{text} than the model can follow", advice, CERTAIN
    elif excess >= 10 and decaying > 0.25 + 4 * case.error(case.width) and steady < 1.5 * decaying:
        text = f"the loss falls by {steady:.2f} while the rate is high, and by {decaying:.2f} as it"
        text += " falls: most steps only shake the weights"
        yield "high_rate", text, advice, _sure(excess, 10, 30)
    elif excess >= 10 and case.run.last_step >= 50 and case.bits > case.trigram:
        text = f"validation ends at {case.bits:.3f} bits per byte, while a trigram reaches"
        text += f" {case.trigram:.3f}: the model does not settle"
        sure = CERTAIN if case.bits > case.unigram else LIKELY
        yield "high_rate", text, advice, sure


def _stall(case: Case) -> tuple[float, float]:
    """Nats that the loss falls while the rate is near its peak, and after that."""
    high = np.flatnonzero(case.lr > 0.7 * np.nanmax(case.lr))
    if len(high) < FEW or len(high) > 0.9 * case.lines:
        return math.nan, math.nan
    begin, stop = int(high[0]), int(high[-1]) + 1
    part = max(3, (stop - begin) // 5)
    before, after = _median(case.loss[begin : begin + part]), _median(case.loss[stop - part : stop])
    return before - after, after - case.end


@rule(RATE, least=10)
def _low_rate(case: Case) -> Iterator[Found]:
    warmup = case.value("warmup_steps")
    enough = max(30.0, 2 * warmup, min(500.0, case.total_steps / 2))  # steps
    if not case.is_fresh or not case.run.last_step >= enough:
        return
    start = _median(case.loss[:3])
    fall, uniform = start - case.end, case.uniform
    is_new = start > 0.9 * uniform
    if not fall < (0.5 if is_new else 0.03 * start):
        return
    text = f"the loss went from {start:.3f} to {case.end:.3f} in {case.run.last_step:,.0f} steps"
    rate = f"--learning_rate {case.flag('learning_rate')}"
    if fall < 4 * case.error(max(3, case.lines // 4)):
        chance = f" (a model that has learnt nothing has {uniform:.3f}, ln {case.vocabulary:,.0f})"
        text += f"{chance if is_new else ''}: nothing is learnt"
        advice = f"look at the text and at {rate}, --learning_rate auto"
        yield "nothing_learnt", text, advice, CERTAIN if is_new else LIKELY
        return
    text += f", about evenly, at gradient norms of {_median(case.norm):.2f}: {rate} is too low for"
    advice = "10 to 100 times it, or --learning_rate auto"
    yield "low_rate", f"{text} so few steps", advice, CERTAIN if is_new else LIKELY


@rule(RATE, least=2 * FEW)
def _warmup(case: Case) -> Iterator[Found]:
    warmup = case.value("warmup_steps")
    if not case.is_fresh or case.has_own_loss or not warmup < 0.02 * case.total_steps:
        return
    early = case.smooth[: case.lines // 5]
    low = np.minimum.accumulate(early)
    at = int((early - low).argmax())
    rise = float(early[at] - low[at])
    if rise > 1.0 + 6 * case.error(3) and case.end < low[at]:
        text = f"the loss rises by {rise:.2f} at step {case.step[at]:,.0f} and falls again: the"
        advice = f"--warmup_steps {case.total_steps * 0.05:.0f} in place of {warmup:.0f}"
        yield "warmup", f"{text} first updates are too large", advice, LIKELY


@rule(least=FEW)
def _idle_rate(case: Case) -> Iterator[Found]:
    if not np.isfinite(case.lr).all() or not case.lr.max() > 0:
        return
    after = case.lr[int(case.lr.argmax()) :]  # the warm-up
    share = float((after < 0.05 * case.peak).sum()) / case.lines
    if share > 0.3:
        schedule, advice = case.flag("schedule"), "a --min_lr_ratio of 0.1"
        if schedule == "inverse_sqrt":  # falls the more slowly, the longer the warm-up
            advice += f", or --warmup_steps {max(1, case.total_steps / 20):.0f}"
        text = f"the learning rate is below a twentieth of its peak in {formats.percent(share)} of"
        text += f" the steps (--schedule {schedule}): these hardly train"
        yield "idle_rate", text, advice, _sure(share, 0.3, 0.4)


@rule()
def _chance(case: Case) -> Iterator[Found]:
    """Text that nothing can predict."""
    share = case.text["chance"]
    if share >= 0.2:
        text = f"{formats.percent(share)} of the training text looks random"
        text += (
            " (hexadecimal or base64 digits, tables of numbers, noise): no model can predict it,"
        )
        text += " and it takes that share of the training"
        if case.bits > min(case.floors.values(), default=math.inf):
            name = min(case.floors, key=lambda one: case.floors[one])
            text += f"; validation is {case.bits:.3f} bits per byte, while {name} needs"
            text += f" {case.floors[name]:.3f}"
        yield "chance", text, f"{INSPECT}, and leave such documents out", _sure(share, 0.2, 0.3)


@rule({"chance"})
def _word_order(case: Case) -> Iterator[Found]:
    bits, pairs = (case.text[name] for name in ("word_order", "word_pairs"))
    if pairs >= 1000 and bits < (0.2 if pairs >= 3000 else 0.1):
        text = f"a word tells {max(0.0, bits):.2f} bits about the next one, and at least 0.3 in any"
        text += " language: the order of words is lost (or the text is lists), so that only the"
        text += " frequencies of words can be learnt"
        yield (
            "word_order",
            text,
            f"{INSPECT}, and at how it was prepared",
            _sure(bits, 0.2, 0.1 if pairs >= 3000 else 0.0),
        )


@rule({"diverged"})
def _other_text(case: Case) -> Iterator[Found]:
    """Held-out text of another kind than the training text."""
    if case.is_sft:
        return
    least = min((case.floors[n] for n in ("zlib", "xz", "zstd") if n in case.floors), default=0.0)
    is_known = case.text["trained"] >= 20_000
    ratio = case.trigram / least if least and is_known else math.nan
    # A text that repeats itself, as a log does, is one that compressors know better as well.
    own = case.text["own_unigram"]
    is_unlike = ratio > 1.4 and case.unigram > 1.25 * own and not case.is_of_few
    gap, noise = case.gap
    is_apart = gap > max(1.0, 8 * noise)
    if not (is_unlike or is_apart):
        return
    parts = []
    if is_apart:
        parts.append(f"validation is {gap:.2f} nats above training within the first pass")
    if is_unlike:
        parts.append(
            f"a trigram of the training text needs {case.trigram:.2f} bits per byte for the"
            f" held-out text, where a compressor that has read nothing needs {least:.2f}"
        )
    text = f"{' and '.join(parts)}: the held-out text differs in kind (language, subject, form)"
    text += " from the training text, so validation does not measure what the model learns"
    path = case.flags.get("val_path")
    advice = f"text like the training text in place of --val_path {path}, or --val_fraction 0.01"
    if not path or path == "None":
        advice = "a larger --val_fraction, so that it has text of every kind"
    sure = CERTAIN if (is_apart and is_unlike) or gap > 3 or case.unigram > 2.5 * own else LIKELY
    yield "other_text", text, advice, sure


@rule()
def _tokenizer(case: Case) -> Iterator[Found]:
    """A vocabulary of which the text uses single bytes."""
    size, last = case.text["bytes_per_token"], case.last
    if math.isnan(size):
        size = last["val_loss"] / max(1e-9, last["val_bpb"] * math.log(2))
    if case.vocabulary >= 1000 and size < 1.4 and not case.is_sft:
        text = f"a token covers {size:.2f} bytes of the text, with a vocabulary of"
        text += f" {case.vocabulary:,.0f}: the tokenizer is for another language or kind of text,"
        text += " so that rows hold little text and most of the vocabulary is not used"
        advice = "a tokenizer of this text (without --tokenizer one is trained)"
        yield "tokenizer", text, advice, _sure(size, 1.4, 1.2)


@rule()
def _short_rows(case: Case) -> Iterator[Found]:
    """Rows that are far shorter than the documents."""
    row, document = case.row_tokens - 1, case.text["document_tokens"]
    if case.stages or case.is_sft or not row <= 32:
        return
    if document >= 8 * row or (math.isnan(document) and row <= 16):
        text = f"a row has {row:.0f} tokens"
        text += f" and a document {document:,.0f}" if math.isfinite(document) else ""
        text += f": on average the model sees {row / 2:.0f} earlier tokens, and nothing further"
        text += " back"
        sure = _sure(row, 32, 16) if math.isfinite(document) else LIKELY
        yield "short_rows", text, "--max_seq_len 256 with fewer rows in a step", sure


@rule({"other_text"})
def _repeats(case: Case) -> Iterator[Found]:
    if len(case.evals) < 3 or not case.epochs >= 2 or case.has_own_loss:
        return
    least, last = min(case.losses), case.losses[-1]
    noise, best = float(np.nan_to_num(case.last["val_loss_se"])), case.losses.index(least)
    is_rising = last > 1.02 * least and last - least > max(0.03, noise)
    if is_rising and last - case.end > 0.2 and best < len(case.evals) - 2:
        at = case.evals[best]["step"]
        text = f"validation rose from {least:.3f} at step {at:,.0f} to {last:.3f} while training"
        text += f" fell to {case.end:.3f}, after {case.epochs:.1f} passes over the text: it is"
        advice = f"--max_steps {at:.0f}, more text, a smaller model, or more --weight_decay (it is"
        advice += f" {case.flag('weight_decay')}), and --keep_best 1 --patience 3"
        sure = CERTAIN if last > 1.05 * least and last - least > 3 * noise else LIKELY
        yield "repeats", f"{text} learnt by heart", advice, sure


@rule()
def _ended_early(case: Case) -> Iterator[Found]:
    kind, text = case.outcomes[-1]
    if kind == "done" and text.startswith("ended early"):  # not by a function of the user's own
        advice = (
            f"--patience above {case.flag('patience')} with --allow_change schedule to train on"
        )
        yield "ended_early", f"the run {text}", advice, POSSIBLE


@rule()
def _many_epochs(case: Case) -> Iterator[Found]:
    """Sources whose weight makes them be read far more often than the others."""
    mixture = case.order.get("mixture") or {"sizes": [], "weights": []}
    sizes, weights = (np.array(mixture[name], float) for name in ("sizes", "weights"))
    if case.stages or not len(sizes) == len(weights) > 1:
        return
    read = case.rows_read * weights / weights.sum() / np.maximum(sizes, 1)
    most = int(np.argmax(read))
    others = np.delete(read, most)
    if read[most] >= 8 and read[most] > 8 * np.median(others):
        text = f"source {most + 1} is read {read[most]:.0f} times and the others"
        text += f" {np.median(others):.1f} times: it is learnt by heart at the cost of the rest"
        yield "source_weight", text, "a smaller weight for it, or more of its text", LIKELY


@rule()
def _copies(case: Case) -> Iterator[Found]:
    repeated, seen = (case.text[name] for name in ("repeated", "seen"))
    if repeated > 0.4:
        text = f"{formats.percent(repeated)} of the training text is a copy of other parts of it"
        yield "copies", f"{text}: an epoch reads the same text again and again", COPIES, CERTAIN
    if seen > 0.3 and not case.is_of_few:
        text = f"{formats.percent(seen)} of the held-out text occurs word for word in the training"
        text += " text: validation says little about new text"
        yield "leak", text, f"{COPIES}, or give --val_path", CERTAIN


@rule({"repeats"})
def _order(case: Case) -> Iterator[Found]:
    for stage in case.stages[1:] if not case.has_own_loss else ():
        border = stage["steps"][0]
        before = case.loss[case.step < border][-10:]
        after = case.loss[case.step >= border][:3]  # a model soon learns the new kind
        jump = _median(after) - _median(before)
        if min(len(before), len(after)) >= 3 and jump > 1.0 + 3 * case.error(3):
            text = f"the loss jumps from {_median(before):.2f} to {_median(after):.2f} at step"
            text += f" {border:,.0f}, where stage {stage.get('name')} begins: its text is of"
            yield "order", f"{text} another kind", MIX, LIKELY


@rule()
def _experts(case: Case) -> Iterator[Found]:
    least, most = (case.late(f"expert_{which}") for which in ("least", "most"))
    if case.run.last_step >= BALANCED and least < 0.02:
        text = f"one expert gets {least:.3f} times an even share of the tokens, and another"
        text += f" {most:.2f} times: the weights of the first are hardly trained"
        advice = f"a larger --aux_loss_alpha than {case.flag('aux_loss_alpha')}, or fewer"
        yield "dead_experts", text, f"{advice} --n_routed_experts", CERTAIN


@rule({*STOPPED, "high_rate"}, least=FEW)
def _clipping(case: Case) -> Iterator[Found]:
    clip, late = case.value("grad_clip"), case.norm[case.lines // 2 :]
    if not clip > 0 or not np.isfinite(late).any():
        return
    share, usual = float((late > clip).mean()), _median(late)
    if share > 0.95 and usual > 8 * clip:
        text = f"{formats.percent(share)} of the later updates are clipped, at gradient norms of"
        text += f" {usual:.3g} and --grad_clip {clip:g}: only the direction of a gradient counts"
        yield "clipping", text, f"--grad_clip {float(f'{2 * usual:.1g}'):g}", LIKELY


@rule({"diverged"})
def _precision(case: Case) -> Iterator[Found]:
    counted = case.run.column("skipped")
    skipped = max(float(np.nanmax(counted, initial=0.0)), len(case.run.steps_of("step_skipped")))
    dtype = str(case.run.fact("dtype"))
    if skipped > (max(20.0, 0.05 * case.run.last_step) if dtype == "float16" else 0):
        text = f"{formats.count(int(skipped), 'step')} of {case.run.last_step:,.0f} skipped, as"
        text += f" gradients were not finite in {dtype}: these rows taught nothing"
        yield "precision", text, PRECISION.get(dtype, LOOK), CERTAIN


@rule({*RATE, *TEXT, "repeats", "idle_rate"})
def _above_floors(case: Case) -> Iterator[Found]:
    advice = "more steps, a larger model, or --learning_rate auto"
    text = f"validation is {case.bits:.3f} bits per byte, and"
    if case.run.last_step >= 300 and case.bits > case.unigram:
        text += f" token frequencies alone give {case.unigram:.3f}: the model knows less than these"
        sure = _sure(case.bits / case.unigram, 1.0, 1.1)
        yield "above_unigram", f"{text} frequencies", advice, sure
    elif case.run.last_step >= 300 and case.epochs >= 2 and case.bits > 1.25 * case.trigram:
        text += f" a trigram of the training text has {case.trigram:.3f}: the model hardly uses its"
        yield "above_trigram", f"{text} context", advice, LIKELY


@rule()
def _vocabulary(case: Case) -> Iterator[Found]:
    tokens = case.rows_per_epoch * case.row_tokens
    if case.is_fresh and tokens < 10 * case.vocabulary:
        fewer = max(FEWEST_PIECES, int(tokens / 50))
        text = f"the text has {tokens:,.0f} tokens for a vocabulary of {case.vocabulary:,.0f}: most"
        text += " pieces occur a few times only and are not learnt"
        less = f"--vocab_size {fewer} or " if fewer < case.vocabulary else ""
        yield "vocabulary", text, f"{less}more text", _sure(tokens / case.vocabulary, 10, 5)


@rule()
def _validation(case: Case) -> Iterator[Found]:
    """Few held-out tokens; of a short run that --eval_rows auto validates on few, nothing."""
    tokens, rows, noise = (case.last[name] for name in ("tokens", "rows", "val_loss_se"))
    if not tokens < 500 or case.is_sft:
        return
    noise = 2.5 / math.sqrt(max(tokens, 1)) if math.isnan(noise) else noise
    text, given = f"validation reads {tokens:,.0f} tokens", case.flags.get("eval_rows")
    if given or not rows < case.last["held_out"]:
        text += f": its loss is off by about {noise:.2f} by chance"
        advice = f"a larger --val_fraction than {case.flag('val_fraction')} (a prepared folder has"
        advice += " to be prepared again)"
        advice += f", or more --eval_rows than {given}" if given else ", or more text"
        yield "small_validation", text, advice, CERTAIN
    elif len(case.evals) >= 10:
        text += f", as --eval_rows auto keeps {len(case.evals):,} of them short: their losses are"
        text += f" off by about {noise:.2f} by chance"
        advice = f"a larger --eval_interval than {case.flag('eval_interval')}, or --eval_rows"
        yield "small_validation", text, f"{advice} {FIRST_EVAL_ROWS}", POSSIBLE


@rule()
def _samples(case: Case) -> Iterator[Found]:
    samples = case.run.events("sample")
    words = (e["text"].split() for e in samples if e["step"] == samples[-1]["step"])
    grams = [[*zip(w, w[1:], w[2:], strict=False)] for w in words]
    shares = [1 - len({*one}) / len(one) for one in grams if len(one) >= 20]
    if shares and min(shares) > 0.6:
        text = f"{formats.percent(min(shares))} or more of every last sample is repetition:"
        yield "repeating_samples", f"{text} the model is caught in a loop", LOOPS, LIKELY


@rule()
def _memory(case: Case) -> Iterator[Found]:
    """Memory that grows on and on, not in a few jumps as caches and evaluations do."""
    memory = case.run.column("memory_mib")
    kept = memory[len(memory) // 4 :]
    if len(kept) < FEW or len(case.run.starts) > 1 or not np.isfinite(kept).all():
        return
    points = np.array([part.mean() for part in np.array_split(kept, 10)])
    growth, rises = float(points[-1] - points[0]), np.diff(points)
    if growth > max(32.0, 0.05 * points[0]) and (rises > 0.25 * growth / 9).sum() >= 8:
        slope = growth / max(1.0, float(case.step[-1] - case.step[len(memory) // 4])) * 1000
        text = f"memory grows steadily, by {formats.memory(slope)} in 1,000 steps, to"
        text += f" {formats.memory(float(memory[-1]))}: a longer run will run out of memory"
        yield "memory", text, KEPT, LIKELY


@rule()
def _waits(case: Case) -> Iterator[Found]:
    spent = case.run.spent(case.run.starts)
    stepping = sum(spent[name] for name in PHASES)
    waiting = case.run.column("data_ms") > 0.2 * case.run.column("step_ms")
    if spent["data"] > max(0.2 * stepping, 1000.0) and waiting.sum() >= 5:
        text = f"steps wait for rows for {formats.percent(spent['data'] / stepping)} of their time:"
        advice = f"--num_workers above {case.flag('num_workers')}, or a faster disk"
        yield "data_waits", f"{text} the device idles", advice, CERTAIN
    for name, pause in RECURRING.items():
        paused = case.run.column(f"{name}_ms") > 0
        if spent[name] > 1.5 * stepping and paused.sum() >= 5:
            share = formats.percent(spent[name] / sum(spent.values()))
            flag = f"--{pause.flag}"
            text = f"{share} of the time went into the pauses of {flag} {case.flag(pause.flag)}:"
            text += " the run could be much shorter"
            yield f"{name}_pauses", text, f"a larger {flag}", CERTAIN


@rule(STOPPED)
def _crashes(case: Case) -> Iterator[Found]:
    kinds, last = [kind for kind, _ in case.outcomes], case.run.starts[-1]
    bad = sum(kind in ("crashed", "failed", "silent") for kind in kinds)
    saved = [event["step"] for event in case.run.events("checkpoint_saved")]
    is_whole = bool(saved) and saved[-1] >= case.total_steps > 0
    if is_whole:
        again = f"all {formats.count(int(case.total_steps), 'step')} are trained and saved"
    elif saved:
        again = f"the same command continues from step {saved[-1]:,.0f}"
    else:
        again = "the same command starts from the beginning, as nothing was saved"
    at = f"at step {max(case.run.last_step, 0):,.0f} of {case.total_steps:,.0f}"
    if bad >= 3:
        lost = sum(start.lost_steps for start in case.run.starts)
        text = f"{bad} of {len(kinds)} starts ended in an error or without a recorded end"
        advice = "fix what the first error of the log names"
        if lost:
            text += f", and {formats.count(lost, 'step')} had to be computed again"
            advice += f", and save more often (--save_interval below {case.flag('save_interval')})"
        yield "crashes", f"{text}: the cause is still there", advice, CERTAIN
    elif last.end and kinds[-1] == "failed":
        reason = (last.end["reason"] or "no reason is recorded").rstrip(".")
        which = "the run" if len(kinds) == 1 else "the last start"
        text = f"{which} ended {at} with exit status {last.end['status']} ({last.end['code']}):"
        advice = again if is_whole else f"once that is fixed, {again}"
        yield "failed", f"{text} {reason}", advice, CERTAIN
    elif kinds[-1] == "silent" and math.isfinite(case.quiet):
        text = f"the last line is {formats.duration(case.quiet)} old, {at}, and no end is recorded:"
        text += " the run hangs, or was killed, perhaps for lack of memory"
        if not case.run.pace:
            text += ", or has not come to its second line yet"
        sure = CERTAIN if case.run.pace else LIKELY
        yield "silent", text, f"look at the end of its log; {again}", sure
