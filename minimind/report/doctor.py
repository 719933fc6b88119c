"""What stands out in a run, in plain sentences: what was seen, why it matters, what to do.

Each sentence is that of one rule of `RULES`. A rule that lacks its figures, or has too few of them,
is silent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from minimind.config.optimizers import OPTIMIZERS
from minimind.config.rules import Workload, learning_rate
from minimind.config.run_config import FLAGS
from minimind.errors import NumericError
from minimind.report import formats
from minimind.report.history import PAUSES, PHASES, Run, number, read_configuration
from minimind.report.placement import floors_of, last_bits

FEW = 20  # lines below which the shape of a curve says nothing
BALANCED = 100  # steps that experts may take to share the tokens


@dataclass(frozen=True)
class Finding:
    """A kind, by which it is known to programs, and its sentences."""

    kind: str
    text: str


class Case:
    """The figures of a run that rules read."""

    def __init__(self, run: Run, now: float) -> None:
        self.run, self.outcomes = run, run.outcomes(now)
        self.quiet = now - run.starts[-1].last_time if run.starts else math.nan  # seconds
        self.flags = {n: value for n, (value, _) in read_configuration(run.run_dir).flags.items()}
        self.step, self.lr, self.norm = map(run.column, ("step", "lr", "grad_norm"))
        self.loss = run.column("loss")
        self.smooth = _medians(self.loss)
        self.lines = len(self.loss)
        self.total_steps = number(run.fact("total_steps"), 0.0)
        self.vocabulary = number_of(self.flags.get("vocab_size"))
        stages = run.fact("stages")
        self.stages: list[Any] = stages if isinstance(stages, list) else []
        is_tuned = self.flags.get("task") == "sft" or run.fact("init_from") is not None
        self.is_fresh = not is_tuned and not self.stages and len(self.step) > 0
        self.is_fresh &= bool(self.lines and self.step[0] <= max(50.0, 0.05 * self.step[-1]))
        self.floors, self.bits = floors_of(run), last_bits(run)[1]
        floors = run.events("floors")
        self.of_text = floors[-1] if floors else {}

    def flag(self, name: str) -> str:
        """Its value in text, or a question mark."""
        return self.flags.get(name, "?")

    @property
    def end(self) -> float:
        """The usual loss of the last tenth of the lines."""
        return _median(self.loss[-max(3, self.lines // 10) :])

    @property
    def epochs(self) -> float:
        """How often the text was read; NaN where that is unknown."""
        order, rows = self.run.fact("order"), number(self.run.fact("rows_per_epoch"))
        a_step = number(order.get("rows_per_step")) if isinstance(order, dict) else math.nan
        return self.run.last_step * a_step / rows if rows > 0 else math.nan

    @property
    def excess_of_rate(self) -> float:
        """The highest rate over that of the rule for AdamW, or over Muon's default; else NaN."""
        muon, optimizer = number_of(self.flags.get("muon_lr")), self.flags.get("optimizer")
        is_original = self.flags.get("muon_scaling") != "match_rms_adamw"
        if optimizer == "muon" and is_original:
            return muon / OPTIMIZERS["muon"].defaults["muon_lr"]
        tokens = self.total_steps * number(self.run.fact("tokens_per_step"), 0.0)
        parameters = number(self.run.fact("parameters"))
        if optimizer not in ("adamw", "muon") or not (tokens and math.isfinite(parameters)):
            return math.nan
        suited = learning_rate(Workload(int(parameters), int(tokens), 1.0, int(self.total_steps)))
        highest = float(np.nanmax(self.lr)) if np.isfinite(self.lr).any() else math.nan
        return (muon if optimizer == "muon" else highest) / suited


def diagnose(run: Run, now: float) -> list[Finding]:
    """What every rule finds; a later rule is silent where an earlier one explains it."""
    case, found = Case(run, now), list[Finding]()
    if not run.starts:
        return found
    for rule, explained in RULES.items():
        if not explained & {one.kind for one in found}:
            found += rule(case)
    return found


def number_of(text: str | None) -> float:
    """The value of a flag, NaN unless it is a number."""
    try:
        return float(text or "")
    except ValueError:
        return math.nan


def _median(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def _medians(values: np.ndarray) -> np.ndarray:
    """Running medians over a fortieth of the lines, at least three."""
    half = max(1, len(values) // 80)
    return np.array([_median(values[max(0, n - half) : n + half + 1]) for n in range(len(values))])


def _diverged(case: Case) -> Iterator[Finding]:
    lost = np.flatnonzero(~np.isfinite(case.loss))
    end = case.run.starts[-1].end or {}
    advice = (
        f"--learning_rate far below {case.flag('learning_rate')}, --spike_guard, or --grad_clip 1"
    )
    if len(lost):
        text = f"the loss is not a number at {len(lost):,} of {case.lines:,} lines, first at step"
        yield Finding(
            "diverged", f"{text} {case.step[lost[0]]:,.0f}: nothing is learnt from there; {advice}"
        )
    elif end.get("status") == NumericError.status:
        text = f"the run stopped at numbers that are not finite ({end.get('reason')})"
        yield Finding("diverged", f"{text}: it diverged; {advice}")
    elif case.end > 2 * math.log(max(case.vocabulary, 2)):
        uniform = math.log(case.vocabulary)
        yield Finding(
            "diverged",
            f"the loss is {case.end:,.2f} at the end, and a model that knows nothing has"
            f" {uniform:.2f} (ln {case.vocabulary:,.0f}): it diverged; {advice}",
        )
    elif case.lines >= FEW and not case.stages:
        at = int(np.nanargmin(case.smooth))
        best = float(case.smooth[at])
        if case.end - best > max(0.5, 0.15 * best):
            text = f"the loss rose from {best:.2f} at step {case.step[at]:,.0f}"
            yield Finding(
                "diverged",
                f"{text} to {case.end:.2f} at the end: what was learnt is lost; {advice}",
            )


def _stall(case: Case) -> tuple[float, float]:
    """Nats that the loss falls while the rate is near its peak, and after that."""
    high = np.flatnonzero(case.lr > 0.7 * np.nanmax(case.lr))
    if len(high) < FEW or len(high) > 0.9 * case.lines:
        return math.nan, math.nan
    begin, stop = int(high[0]), int(high[-1]) + 1
    part = max(3, (stop - begin) // 5)
    before, after = _median(case.loss[begin : begin + part]), _median(case.loss[stop - part : stop])
    return before - after, after - case.end


def _high_rate(case: Case) -> Iterator[Finding]:
    if not case.is_fresh or case.lines < FEW or not np.isfinite(case.smooth).all():
        return
    rate = f"--learning_rate {case.flag('learning_rate')}"
    muon = case.flags.get("muon_lr", "None")
    if case.flags.get("optimizer") == "muon" and math.isfinite(number_of(muon)):
        rate += f" and --muon_lr {muon}"
    start, most = float(case.smooth[0]), float(case.smooth.max())
    steady, decaying = _stall(case)
    excess = case.excess_of_rate
    times = f", {excess:,.0f} times what is usual," if excess >= 3 else ""
    advice = f"{rate}{times} is too high: a tenth of it, or --learning_rate auto"
    if most > start + 1.0:
        at = case.step[int(np.argmax(case.smooth))]
        text = f"the loss rises from {start:.2f} to {most:.2f} at step {at:,.0f}"
        yield Finding(
            "high_rate", f"{text}: updates are larger than the model can follow; {advice}"
        )
    elif excess >= 10 and decaying > 0.25 and steady < 1.5 * decaying:
        text = f"the loss falls by {steady:.2f} at a high rate, and by {decaying:.2f} as that falls"
        yield Finding("high_rate", f"{text}: most steps only shake the weights; {advice}")
    elif (
        excess >= 10
        and case.run.last_step >= 50
        and case.bits > case.floors.get("trigram", math.inf)
    ):
        text = f"validation ends at {case.bits:.3f} bits per byte, and a trigram reaches"
        text += f" {case.floors['trigram']:.3f}"
        yield Finding("high_rate", f"{text}: the model does not settle; {advice}")


def _low_rate(case: Case) -> Iterator[Finding]:
    warmup = number_of(case.flags.get("warmup_steps"))
    enough = max(30.0, 2 * warmup, min(500.0, case.total_steps / 2))  # steps
    if not case.is_fresh or case.lines < 10 or not case.run.last_step >= enough:
        return
    start = _median(case.loss[:3])
    fall, uniform = start - case.end, math.log(case.vocabulary) if case.vocabulary > 1 else math.nan
    is_new = start > 0.9 * uniform
    if not fall < (0.5 if is_new else 0.03 * start):
        return
    seen = f"the loss went from {start:.3f} to {case.end:.3f} in {case.run.last_step:,.0f} steps"
    part = max(3, case.lines // 4)
    noise = float(np.std(case.loss[-part:])) / math.sqrt(part)
    rate = f"--learning_rate {case.flag('learning_rate')}"
    if fall < 4 * noise:
        chance = f", and a model that knows nothing has {uniform:.3f} (ln {case.vocabulary:,.0f})"
        text = (
            f"{seen}{chance if is_new else ''}: nothing is learnt; look at the text and at {rate}"
        )
        yield Finding("nothing_learnt", f"{text}, --learning_rate auto")
        return
    norm = _median(case.norm)
    yield Finding(
        "low_rate",
        f"{seen}, about evenly, at gradient norms of {norm:.2f}: {rate} is too low for so few"
        " steps; 10 to 100 times it, or --learning_rate auto",
    )


def _repeats(case: Case) -> Iterator[Finding]:
    evals = [e for e in case.run.events("eval") if math.isfinite(number(e.get("val_loss")))]
    if len(evals) < 3 or not case.epochs >= 2:
        return
    losses = [number(e["val_loss"]) for e in evals]
    least, last = min(losses), losses[-1]
    is_rising = last > 1.02 * least and last - least > 0.03
    if is_rising and last - case.end > 0.2 and losses.index(least) < len(losses) - 2:
        at = number(evals[losses.index(least)]["step"])
        yield Finding(
            "repeats",
            f"validation rose from {least:.3f} at step {at:,.0f} to {last:.3f} while training"
            f" fell to {case.end:.3f}, after {case.epochs:.1f} passes over the text: it is"
            f" learnt by heart; --max_steps {at:.0f}, more text, a smaller model, or more"
            f" --weight_decay (it is {case.flag('weight_decay')}), and --keep_best 1",
        )


def _many_epochs(case: Case) -> Iterator[Finding]:
    """Sources whose weight makes them be read far more often than the others."""
    order = case.run.fact("order")
    mixture = order.get("mixture") if isinstance(order, dict) else None
    if not isinstance(mixture, dict) or case.stages:
        return
    sizes, weights = (np.array(mixture.get(n), float) for n in ("sizes", "weights"))
    rows = case.run.last_step * number(order.get("rows_per_step"), 0.0)
    read = rows * weights / weights.sum() / np.maximum(sizes, 1)
    most = int(np.argmax(read))
    others = np.delete(read, most)
    if len(others) and read[most] >= 8 and read[most] > 8 * np.median(others):
        yield Finding(
            "source_weight",
            f"source {most + 1} is read {read[most]:.0f} times and the others"
            f" {np.median(others):.1f}"
            " times: it is learnt by heart at the cost of the rest; a smaller weight for it, or"
            " more of its text",
        )


def _copies(case: Case) -> Iterator[Finding]:
    repeated, seen = (number(case.of_text.get(name)) for name in ("repeated", "seen"))
    remedy = "`minimind data filter` drops copies and near-copies"
    if repeated > 0.4:
        yield Finding(
            "copies",
            f"{formats.percent(repeated)} of the training text is a copy of other parts of it: an"
            f" epoch reads the same text again and again; {remedy}",
        )
    if seen > 0.3:
        yield Finding(
            "leak",
            f"{formats.percent(seen)} of the held-out text occurs word for word in the training"
            f" text: validation says little of new text; {remedy}, or give --val_path",
        )


def _order(case: Case) -> Iterator[Finding]:
    for stage in case.stages[1:]:
        steps = stage.get("steps") if isinstance(stage, dict) else None
        border = number(steps[0]) if isinstance(steps, list) and steps else math.nan
        before = case.loss[(case.step < border)][-10:]
        after = case.loss[(case.step >= border)][:3]  # a model soon learns the new kind
        if min(len(before), len(after)) >= 3 and _median(after) - _median(before) > 1.0:
            yield Finding(
                "order",
                f"the loss jumps from {_median(before):.2f} to {_median(after):.2f} at step"
                f" {border:,.0f}, where stage {stage.get('name')} begins: it reads text of another"
                " kind at once; mix the sources of both stages with weights",
            )


def _experts(case: Case) -> Iterator[Finding]:
    if case.run.last_step < BALANCED:
        return
    least = case.run.column("expert_least")
    if np.isfinite(least).sum() >= 5 and (usual := _median(least[-len(least) // 3 :])) < 0.02:
        most = _median(case.run.column("expert_most")[-len(least) // 3 :])
        yield Finding(
            "dead_experts",
            f"an expert gets {usual:.3f} of an even share of the tokens and another {most:.2f}: its"
            f" weights are carried and not trained; a larger --aux_loss_alpha than"
            f" {case.flag('aux_loss_alpha')}, or fewer --n_routed_experts",
        )


def _memory(case: Case) -> Iterator[Finding]:
    """Memory that grows on and on, not in a few jumps as caches and evaluations do."""
    memory = case.run.column("memory_mib")
    kept = memory[len(memory) // 4 :]
    if len(kept) < FEW or len(case.run.starts) > 1 or not np.isfinite(kept).all():
        return
    points = np.array([part.mean() for part in np.array_split(kept, 10)])
    growth, rises = float(points[-1] - points[0]), np.diff(points)
    if growth > max(32.0, 0.05 * points[0]) and (rises > 0.25 * growth / 9).sum() >= 8:
        steps = float(case.step[-1] - case.step[len(memory) // 4])
        slope = growth / max(1.0, steps) * 1000
        yield Finding(
            "memory",
            f"memory grows by {formats.memory(slope)} in 1,000 steps, evenly, to"
            f" {formats.memory(float(memory[-1]))}: a longer run ends out of memory; look at what"
            " your own code keeps (losses as tensors, lists), or save with --save_interval and"
            " restart",
        )


def _waits(case: Case) -> Iterator[Finding]:
    starts = case.run.starts
    spent = {
        name: sum(start.milliseconds()[name] for start in starts) for name in (*PHASES, *PAUSES)
    }
    stepping = sum(spent[name] for name in PHASES)
    waiting = case.run.column("data_ms") > 0.2 * case.run.column("step_ms")
    if spent["data"] > max(0.2 * stepping, 1000.0) and waiting.sum() >= 5:
        yield Finding(
            "data_waits",
            f"steps wait for rows for {formats.percent(spent['data'] / stepping)} of their time:"
            f" the device idles; --num_workers above {case.flag('num_workers')}, or a faster disk",
        )
    flags = {
        "evaluate": "eval_interval",
        "checkpoint": "save_interval",
        "sample": "sample_interval",
        "score": "eval_tasks_interval",
        "verify": "verify_interval",
    }
    for name, flag in flags.items():
        paused = case.run.column(f"{name}_ms") > 0
        if spent[name] > 1.5 * stepping and paused.sum() >= 5:
            share = formats.percent(spent[name] / sum(spent.values()))
            yield Finding(
                f"{name}_pauses",
                f"{share} of the time went into the pauses of --{flag} {case.flag(flag)}: the run"
                f" could take a fraction of it; a larger --{flag}",
            )


def _clipping(case: Case) -> Iterator[Finding]:
    clip, late = number_of(case.flags.get("grad_clip")), case.norm[case.lines // 2 :]
    if case.lines < FEW or not clip > 0 or not np.isfinite(late).any():
        return
    share, usual = float((late > clip).mean()), _median(late)
    if share > 0.95 and usual > 8 * clip:
        yield Finding(
            "clipping",
            f"{formats.percent(share)} of the later updates are clipped, at gradient norms of"
            f" {usual:.3g} and --grad_clip {clip:g}: only the direction of a gradient counts;"
            f" --grad_clip {float(f'{2 * usual:.1g}'):g}",
        )


def _precision(case: Case) -> Iterator[Finding]:
    counted = case.run.column("skipped")
    skipped = max(float(np.nanmax(counted, initial=0.0)), len(case.run.steps_of("step_skipped")))
    dtype = str(case.run.fact("dtype"))
    if skipped > (max(20.0, 0.05 * case.run.last_step) if dtype == "float16" else 0):
        look = "a lower --learning_rate, or look at their rows (nonfinite_rows.jsonl)"
        advice = {"float16": "--dtype bfloat16", "bfloat16": f"--dtype float32, {look}"}
        yield Finding(
            "precision",
            f"{formats.count(int(skipped), 'step')} of {case.run.last_step:,.0f} skipped, as"
            f" gradients were not finite in {dtype}: these rows taught nothing;"
            f" {advice.get(dtype, look)}",
        )


def _warmup(case: Case) -> Iterator[Finding]:
    warmup = number_of(case.flags.get("warmup_steps"))
    if not case.is_fresh or case.lines < 2 * FEW or not warmup < 0.02 * case.total_steps:
        return
    early = case.smooth[: case.lines // 5]
    low = np.minimum.accumulate(early)
    rise = early - low
    if rise.max() > 1.0 and case.end < low[int(rise.argmax())]:
        yield Finding(
            "warmup",
            f"the loss rises by {rise.max():.2f} at step {case.step[int(rise.argmax())]:,.0f} and"
            f" falls again: the first updates are too large; --warmup_steps"
            f" {case.total_steps * 0.05:.0f} in place of {warmup:.0f}",
        )


def _crashes(case: Case) -> Iterator[Finding]:
    kinds, last = [kind for kind, _ in case.outcomes], case.run.starts[-1]
    bad = sum(kind in ("crashed", "failed", "silent") for kind in kinds)
    saved = [number(event["step"]) for event in case.run.events("checkpoint_saved")]
    is_whole = bool(saved) and saved[-1] >= case.total_steps > 0
    if is_whole:
        again = f"all {formats.count(int(case.total_steps), 'step')} are trained and saved"
    elif saved:
        again = f"the same command goes on from step {saved[-1]:,.0f}"
    else:
        again = "the same command begins anew, as nothing was saved"
    at = f"at step {max(case.run.last_step, 0):,.0f} of {case.total_steps:,.0f}"
    if bad >= 3:
        lost = sum(start.lost_steps for start in case.run.starts)
        text = f"{bad} of {len(kinds)} starts ended in an error or without a word"
        advice = "mend what the first error of the log names"
        if lost:
            text += f", and {formats.count(lost, 'step')} had to be computed again"
            advice += f", and save more often (--save_interval below {case.flag('save_interval')})"
        yield Finding("crashes", f"{text}: {advice}")
    elif kinds[-1] == "failed":
        end = last.end or {}
        reason = str(end.get("reason") or "no reason is recorded").rstrip(".")
        which = "the run" if len(kinds) == 1 else "the last start"
        yield Finding(
            "failed",
            f"{which} ended {at} with exit status {end.get('status')} ({end.get('code')}):"
            f" {reason}; {again if is_whole else f'once that is mended, {again}'}",
        )
    elif kinds[-1] == "silent" and math.isfinite(case.quiet):
        yield Finding(
            "silent",
            f"the last line is {formats.duration(case.quiet)} old, {at}, and no end is recorded:"
            " the run hangs, or was killed, as by a host without memory; look at the end of its"
            f" log; {again}",
        )


def _validation(case: Case) -> Iterator[Finding]:
    evals = case.run.events("eval")
    tokens = number(evals[-1].get("tokens")) if evals else math.nan
    if tokens < 500 and case.flags.get("task") != "sft":
        rows = case.flags.get("eval_rows") or f"the {number(evals[-1].get('rows')):,.0f} of auto"
        yield Finding(
            "small_validation",
            f"validation reads {tokens:,.0f} tokens: its loss is off by about"
            f" {2.5 / math.sqrt(max(tokens, 1)):.2f} by chance; a larger --val_fraction than"
            f" {case.flag('val_fraction')}, for which a prepared folder is prepared anew, or more"
            f" --eval_rows than {rows}",
        )


def _vocabulary(case: Case) -> Iterator[Finding]:
    order, rows = case.run.fact("order"), number(case.run.fact("rows_per_epoch"))
    tokens = rows * number(order.get("row_tokens")) if isinstance(order, dict) else math.nan
    if case.is_fresh and tokens < 10 * case.vocabulary:
        fewer = max(FLAGS["vocab_size"].metadata["at_least"], int(tokens / 50))
        advice = f"--vocab_size {fewer} or more text" if fewer < case.vocabulary else "more text"
        yield Finding(
            "vocabulary",
            f"the text has {tokens:,.0f} tokens for a vocabulary of {case.vocabulary:,.0f}: most"
            f" pieces occur a few times only and are not learnt; {advice}",
        )


def _above_floors(case: Case) -> Iterator[Finding]:
    unigram, trigram = (case.floors.get(name, math.nan) for name in ("unigram", "trigram"))
    steps, advice = case.run.last_step, "more steps, a larger model, or --learning_rate auto"
    if steps >= 300 and case.bits > unigram:
        yield Finding(
            "above_unigram",
            f"validation is {case.bits:.3f} bits per byte, and counting single tokens gives"
            f" {unigram:.3f}: the model knows less than their frequencies; {advice}",
        )
    elif steps >= 300 and case.epochs >= 2 and case.bits > 1.25 * trigram:
        yield Finding(
            "above_trigram",
            f"validation is {case.bits:.3f} bits per byte, and a trigram of the training text has"
            f" {trigram:.3f}: the model makes little of its context; {advice}",
        )


def _samples(case: Case) -> Iterator[Finding]:
    samples = case.run.events("sample")
    last = [e for e in samples if number(e["step"]) == number(samples[-1]["step"])]
    shares = []
    for event in last:
        words = str(event.get("text") or "").split()
        grams = [*zip(words, words[1:], words[2:], strict=False)]
        if len(grams) >= 20:
            shares.append(1 - len({*grams}) / len(grams))
    if shares and min(shares) > 0.6:
        yield Finding(
            "repeating_samples",
            f"of every last sample {formats.percent(min(shares))} or more repeats what it says: the"
            " model is caught in a loop; train longer, or look for copies in the text (`minimind"
            " data filter`)",
        )


def _idle_rate(case: Case) -> Iterator[Finding]:
    if case.lines < FEW or not np.isfinite(case.lr).all() or not case.lr.max() > 0:
        return
    # The first step may have no line of its own.
    peak = np.fmax(case.lr.max(), number_of(case.flags.get("learning_rate")))
    after = case.lr[int(case.lr.argmax()) :]  # the warm-up
    share = float((after < 0.05 * peak).sum()) / case.lines
    if share > 0.3:
        schedule, advice = case.flag("schedule"), "a --min_lr_ratio of 0.1"
        if schedule == "inverse_sqrt":  # falls the more slowly, the longer the warm-up
            advice += f", or --warmup_steps {max(1, case.total_steps / 20):.0f}"
        yield Finding(
            "idle_rate",
            f"the learning rate is below a twentieth of its peak in {formats.percent(share)} of the"
            f" steps (--schedule {schedule}): these hardly train; {advice}",
        )


# Rules, and the kinds of findings that explain what a rule would see.
RATE = {"diverged", "high_rate", "low_rate", "nothing_learnt"}
RULES: dict[Any, set[str]] = {
    _diverged: set(),
    _high_rate: {"diverged"},
    _low_rate: RATE,
    _warmup: RATE,
    _idle_rate: set(),
    _repeats: set(),
    _many_epochs: set(),
    _copies: set(),
    _order: {"repeats"},
    _experts: set(),
    _clipping: {"diverged", "high_rate"},
    _precision: {"diverged"},
    _above_floors: {*RATE, "repeats", "idle_rate"},
    _vocabulary: set(),
    _validation: set(),
    _samples: set(),
    _memory: set(),
    _waits: set(),
    _crashes: {"diverged"},
}
