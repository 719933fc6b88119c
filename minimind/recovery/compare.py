"""Where two runs part: the first step and number that differ by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from minimind.checkpoint.directory import differences, read_manifest
from minimind.checkpoint.tools import is_one
from minimind.config.names import no_run
from minimind.errors import UsageError
from minimind.report.formats import listed
from minimind.report.history import number, typed
from minimind.runtime import disk
from minimind.runtime.durable_files import finite, storing
from minimind.runtime.event_log import EventLog
from minimind.runtime.terminal import printable

EPS = {"float32": 2.0**-23, "tf32": 2.0**-10, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EPS["bf16-mixed"] = EPS["bfloat16"]
EXACT, EXACT_KINDS = 1e-9, ("rows", "lr")  # what no rounding changes: token ids, the learning rate
# Rounding: two orders of the same sums differ by less than so many eps, relative to the norm. The
# table of tests/recovery/compared.py has what is named by it, and what is not.
ROUNDING = 16.0
# Kinds in the order of a step: those of its gradients, moments of any name, then weights.
COMPUTED = ("rows", "lr", "activation", "loss", "gradient", "grad_norm")
WEIGHTS, SCALARS = ("ema", "fp32"), ("lr", "loss", "grad_norm")
WEIGHT = 0.02  # root mean square of new weights
GROWTH = 10.0  # how much more than so far a difference may be at the next step that is compared
CLIPPED = 1e-4  # relative; DeepSpeed and torch add 1e-6 to the norm that they divide by
LAYOUT = ("world_size", "tensor_parallel", "sequence_parallel", "zero_stage", "backend")
LAYOUT += ("zero_update", "micro_batch_rows", "accumulation_steps", "compile", "device", "hardware")
NAMES = {
    **{"rows": "rows", "lr": "learning rate", "activation": "activations", "loss": "loss"},
    **{"gradient": "gradients", "clipping": "clipping", "grad_norm": "gradient norm"},
    **{"fp32": "weights", "ema": "averaged weights"},
}
NUMBERS = {"loss": float, "lr": float, "grad_norm": float, "rows": [int, int]}
KINDS: dict[str, dict[str, Any]] = {
    "run_start": {"identity": {"*": {}}, "dtype": str, "step": int, "versions": {"*": str}},
    "rolled_back": {"to": int},
    "step": NUMBERS,
    "fingerprint": {
        **NUMBERS,
        **{"lines": {"*": str}, "dtype": str, "numbers": {"*": {"*": [float] * 3}}},
    },
}
MOST_NAMED = 3  # places


@dataclass
class Side:
    """What is known of a run, a log or a checkpoint."""

    name: str
    identity: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    dtype: str = ""
    lines: dict[str, str] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)  # fields of events, by step
    unread: int = 0

    def forget(self, step: int) -> None:
        """Leave out the steps after `step`, which are taken again."""
        self.steps = {at: fields for at, fields in self.steps.items() if at <= step}

    def add(self, event: dict[str, Any]) -> None:
        """Add an event; raise as `typed` does if it is not one of ours."""
        name = event["event"]
        fields = typed(event, KINDS[name])
        if name == "run_start":
            self.forget(fields["step"])
            self.identity, self.dtype = fields["identity"], fields["dtype"]
            self.layout = {key: fields.get(key) for key in LAYOUT}
            self.layout |= {f"version of {key}": one for key, one in fields["versions"].items()}
        elif name == "rolled_back":
            self.forget(fields["to"])
        else:
            known = self.steps.setdefault(fields["step"], {})
            known.update(
                (key, fields[key]) for key in (*NUMBERS, "numbers") if event.get(key, []) != []
            )
            self.lines |= fields.get("lines", {})
            self.dtype = fields.get("dtype") or self.dtype


def read_side(place: str) -> Side:
    """Read an out_dir, a file of events, or a step_ directory; raise UsageError for another."""
    path = Path(place)
    if is_one(path):
        return _checkpoint(path)
    log = EventLog(path / "metrics.jsonl" if disk.is_dir(path) else path)
    if not disk.is_file(log.path):
        either = "give the --out_dir of a run, a file of events or a step_ directory"
        raise UsageError(no_run(place) or f"{place}: holds no metrics.jsonl; {either}")
    side = Side(place)
    with storing(str(log.path), "correct its permissions"):
        log.begins_anew()
        for event in log.new():
            if event["event"] in KINDS:
                try:
                    side.add(event)
                except (TypeError, ValueError, AttributeError, KeyError):
                    log.unread += 1
    side.unread = log.unread
    return side


def _checkpoint(path: Path) -> Side:
    """The weights and moments of a checkpoint, as the fingerprint of its step would have them."""
    from minimind.checkpoint.reader import Contents  # imports torch
    from minimind.recovery.fingerprints import Recorder, as_event

    contents, recorder = Contents(path), Recorder()
    for kind in contents.kinds:
        for name in contents.shards.kinds[kind]:
            recorder.add(kind, name, contents.read(kind, name))
    manifest = read_manifest(path)
    side = Side(str(path), manifest["identity"], {key: manifest.get(key) for key in LAYOUT})
    side.dtype = manifest["dtype"]
    side.steps[manifest["step"]] = as_event(manifest["step"], recorder.end())
    return side


@dataclass(frozen=True)
class Number:
    """One number of a step in both runs."""

    kind: str
    place: str
    values: tuple[Any, Any]  # a number each, or norm, sum and projection
    size: float  # of the difference, relative to the number or the norm
    limit: float = 0.0  # of rounding

    @property
    def parts(self) -> bool:
        """Whether it differs by more than rounding."""
        return not self.size <= self.limit


def _gap(a: float, b: float, scale: float) -> float:
    """Difference relative to `scale`; infinite if only one is finite."""
    if math.isnan(a) or math.isnan(b) or a == b:
        return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf
    return abs(a - b) / scale if scale else math.inf


def _size(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference of norm, sum and projection, relative to the norm.

    The sum of many numbers of one sign is rounded as such, and so compared with itself.
    """
    norm = max(a[0], b[0])
    scales = norm, max(norm, abs(a[1]), abs(b[1])), norm
    return max(map(_gap, a, b, scales))


def numbers_of(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Number]:
    """The numbers that both have, in the order in which a step computes them."""
    if "rows" in a and "rows" in b and a["rows"] != b["rows"]:
        yield Number("rows", "positions", (a["rows"], b["rows"]), math.inf)
    ones, others = (fields.get("numbers", {}) for fields in (a, b))
    for kind in (*COMPUTED, *sorted({*ones} - {*COMPUTED, *WEIGHTS}), *WEIGHTS):
        if kind in SCALARS and kind in a and kind in b:
            one, other = a[kind], b[kind]
            yield Number(kind, "", (one, other), _gap(one, other, max(abs(one), abs(other))))
        places, of_other = ones.get(kind, {}), others.get(kind, {})
        for place in reversed(places) if kind == "gradient" else places:
            if place in of_other:
                pair = places[place], of_other[place]
                yield Number(kind, place, pair, _size(*pair))


@dataclass
class Comparison:
    """What two runs have in common, and where they part."""

    sides: tuple[Side, Side]
    eps: float
    steps: list[int] = field(default_factory=list)  # that are compared
    recorded: int = 0  # of them with fingerprints on both sides
    step: int | None = None  # at which they part
    found: list[Number] = field(default_factory=list)  # what parts there
    first: tuple[int, Number] | None = None  # the first difference of any size
    sizes: dict[str, float] = field(default_factory=dict)  # the largest within rounding, by kind
    equal_weights: bool = False  # weights were recorded a step before, and did not part

    @property
    def settings(self) -> list[str]:
        """Settings that decide numbers, and differ."""
        a, b = self.sides
        return [*map(str, differences(a.identity, b.identity))] if a.identity and b.identity else []

    @property
    def layouts(self) -> list[str]:
        """What may change rounding, and differs."""
        a, b = (side.layout for side in self.sides)
        names = [name for name in a if name in b and a[name] != b[name]]
        return [f"{name}: {a[name]} -> {b[name]}" for name in names]


def compare(a: Side, b: Side) -> Comparison:
    """Compare step by step up to the first that parts; raise UsageError without a common one."""
    eps = max(EPS.get(side.dtype, EPS["float32"]) for side in (a, b))
    result = Comparison((a, b), eps)
    for step in sorted({*a.steps} & {*b.steps}):
        taken = [Taken(side, step) for side in (a, b)]
        is_known = all(one.is_right and one.norm and one.before < math.inf for one in taken)
        fields = [one.unclipped() if is_known else one.fields for one in taken]
        rate = max((abs(number(one.get("lr"), 0.0)) for one in fields), default=0.0)
        numbers = [*numbers_of(*fields)]
        # Clipping divides by a norm that is rounded, and the moments hold what it leaves.
        of_norm = max((one.size for one in numbers if one.kind == "grad_norm"), default=0.0)
        numbers = [_judged(one, result, rate, of_norm) for one in numbers]
        if not numbers:
            continue
        result.steps.append(step)
        result.recorded += all("numbers" in one for one in fields)
        differing = [one for one in numbers if one.size > EXACT * (one.kind in EXACT_KINDS)]
        if differing and result.first is None:
            result.first = step, differing[0]
        if found := [number for number in numbers if number.parts]:
            wrong = [n for n, one in enumerate(taken) if not one.is_right]
            if len(wrong) == 1 and _is_scaled(found):
                found.insert(0, taken[wrong[0]].fault("AB"[wrong[0]]))
            result.step, result.found = step, found
            before = (side.steps.get(step - 1, {}).get("numbers", {}) for side in (a, b))
            result.equal_weights = all("fp32" in numbers for numbers in before)
            return result
        for one in differing:
            result.sizes[one.kind] = max(one.size, result.sizes.get(one.kind, 0.0))
    if not result.steps:
        raise UsageError(
            f"{a.name} and {b.name} have no number of the same step; give runs with the same"
            " --log_interval or --fingerprints"
        )
    return result


def _judged(one: Number, result: Comparison, rate: float, of_norm: float) -> Number:
    """The number with the limit of rounding, which grows from step to step by way of weights.

    Adam divides a gradient by its size, so that the rounding of a small one moves its weight by up
    to the `rate`. Such gradients are rare: of the norm it is the root of eps. A bias that it moves
    shows in the sum of the next activations, as it is added to every token; runs without any
    difference before have no such bias. `of_norm` is the difference of the step's gradient norms.
    """
    if one.kind in EXACT_KINDS:
        return replace(one, limit=EXACT)
    # A moment holds the gradients of all steps.
    is_moment = one.kind not in COMPUTED + WEIGHTS
    kinds = (one.kind, "fp32") + ("gradient",) * is_moment
    so_far = max(result.sizes.get(kind, 0.0) for kind in kinds)
    if is_moment and of_norm <= ROUNDING * result.eps:
        so_far = max(so_far, of_norm)
    is_moved = one.kind in WEIGHTS or (one.kind == "activation" and result.first)
    of_update = rate / WEIGHT * result.eps**0.5 if is_moved else 0.0
    return replace(one, limit=max(ROUNDING * result.eps, of_update, GROWTH * so_far))


class Taken:
    """The gradients of a step, which the optimizer takes after clipping."""

    def __init__(self, side: Side, step: int) -> None:
        self.fields = side.steps[step]
        gradients = self.fields.get("numbers", {}).get("gradient", {})
        self.norm = math.hypot(*(values[0] for values in gradients.values()))
        self.before = self.fields.get("grad_norm", math.nan)  # clipping; NaN if it is not known
        clip = number(side.identity.get("lr", {}).get("grad_clip"), 0.0) or math.inf
        # The norm that they should have. Of a log by another program the limit is not known.
        self.right = min(self.before, clip) if side.identity else self.norm
        self.is_right = not (self.norm and abs(self.norm - self.right) > CLIPPED * self.right)

    def unclipped(self) -> dict[str, Any]:
        """The fields with the gradients before clipping."""
        scale, numbers = self.before / self.right, self.fields["numbers"]
        scaled = {
            place: [value * scale for value in values]
            for place, values in numbers["gradient"].items()
        }
        return {**self.fields, "numbers": {**numbers, "gradient": scaled}}

    def fault(self, place: str) -> Number:
        """That the norm is not the right one."""
        size = _gap(self.norm, self.right, self.right)
        return Number("clipping", place, (self.right, self.norm), size, CLIPPED)


def _is_scaled(found: Sequence[Number]) -> bool:
    """Whether gradients or their norm part first, most places only by a factor of their own."""
    gradients = [number for number in found if number.kind == "gradient"]
    scaled = sum(factor_of([number]) is not None for number in gradients)
    return found[0].kind in ("gradient", "grad_norm") and 2 * scaled >= len(gradients)


def factor_of(numbers: Sequence[Number]) -> float | None:
    """The one factor by which all numbers differ; None if there is none."""
    pairs = [pair for one in numbers for pair in zip(*one.values, strict=True)]
    ratio = numbers[0].values[1][0] / (numbers[0].values[0][0] or math.nan)
    limit = numbers[0].limit
    norms = [one.values[1][0] for one in numbers for _ in range(3)]
    fits = (abs(x * ratio - y) <= 4 * limit * n for (x, y), n in zip(pairs, norms, strict=True))
    return ratio if math.isfinite(ratio) and abs(ratio - 1) > limit and all(fits) else None


def described(result: Comparison) -> str:
    """What `minimind compare` prints of two runs."""
    a, b = result.sides
    rows = [("A", a.name), ("B", b.name)]
    rows += [("settings", text) for text in result.settings]
    rows += [("layout", text) for text in result.layouts]
    first, last, count = result.steps[0], result.steps[-1], len(result.steps)
    steps = f"step {first}" if count == 1 else f"{count:,} steps, {first} to {last}"
    without = "no fingerprints on both sides: give both runs --fingerprints N to find the block"
    kept = f"{result.recorded:,} of them with fingerprints" if result.recorded else without
    rows.append(("compared", f"{steps}; {kept}"))
    if result.step is None or (result.first and result.first[0] < result.step):
        rows.append(("rounding", _rounding(result)))
    if result.step is not None:
        number, *others = result.found
        rows.append(("parts", f"at step {result.step}: {cause(result)}"))
        if 0 < number.limit and math.isfinite(number.size):
            size = f"it differs by {number.size:.1e}, and rounding by at most {number.limit:.1e}"
            rows.append(("size", size))
        kinds = dict.fromkeys(one.kind for one in others if one.kind != number.kind)
        if kinds:
            rows.append(("then", listed([NAMES.get(kind, kind) for kind in kinds])))
    return printable("\n".join(f"{name:<14}{text}" for name, text in rows))


def _rounding(result: Comparison) -> str:
    """How far the runs differ where they do not part."""
    if result.first is None:
        return "equal, to the last digit"
    step, one = result.first
    name, place = NAMES.get(one.kind, one.kind), f" of {one.place}" * bool(one.place)
    text = f"first at step {step}, {name}{place}, by {one.size:.1e}"
    largest = max(result.sizes, key=lambda kind: result.sizes[kind])
    most = f"at most {result.sizes[largest]:.1e} ({NAMES.get(largest, largest)})"
    return f"{text}; {most}, as rounding by {result.eps:.1e} grows"


def cause(result: Comparison) -> str:
    """The first that parts, in words: kind, place and line."""
    number, step = result.found[0], result.step or 0
    one, other = number.values
    a, b = result.sides
    alike = [found for found in result.found if found.kind == number.kind]
    if number.kind == "rows":
        if number.place == "positions":
            return f"rows {one[0]}:{one[1]} -> {other[0]}:{other[1]}"
        are_same = all(_gap(one[n], other[n], one[0]) < EXACT for n in (0, 1))
        return f"{number.place}: {'the same tokens in other rows' if are_same else 'other tokens'}"
    if number.kind == "clipping":
        return (
            f"norm or clipping of {number.place}: the optimizer takes gradients of norm"
            f" {other:.6g}, which the gradient norm and --grad_clip make {one:.6g}"
        )
    name = NAMES.get(number.kind, number.kind)
    if number.kind in SCALARS:
        late = [s for s, t in ((a, b), (b, a)) if number.kind == "lr" and _is_late(s, t, step)]
        of = f"; {late[0].name} has that of the step before" if late else ""
        return f"{name} {one:.6g} -> {other:.6g}{of}"
    places = [found.place for found in alike]
    more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    some = f"{', '.join(places[:MOST_NAMED])}{more}"
    if len(alike) > 1 and (factor := factor_of(alike)) is not None:
        return f"{name} by a factor of {factor:.6g}, of {some}"
    where, code = some, "optimizer"
    if number.kind in COMPUTED:
        where = code = number.place
    at = (a.lines | b.lines).get(code)
    is_of_weights = number.kind == "activation" and result.equal_weights
    agreed = ", though the optimizer's weights before it agree" if is_of_weights else ""
    return f"{name} of {where}{f' ({at})' if at else ''}{agreed}"


def _is_late(side: Side, other: Side, step: int) -> bool:
    """Whether a side has the learning rate that the other had one step before."""
    before = other.steps.get(step - 1, {}).get("lr", math.nan)
    return _gap(side.steps[step]["lr"], before, before) < EXACT


def as_json(result: Comparison) -> dict[str, Any]:
    """What --json prints."""
    first = result.first and {"step": result.first[0], **asdict(result.first[1])}
    return finite(
        {
            "parts": result.step is not None,
            "step": result.step,
            "cause": cause(result) if result.found else None,
            "found": [asdict(number) for number in result.found],
            "first_difference": first,
            "rounding": result.sizes,
            "settings": result.settings,
            "layout": result.layouts,
            "steps": result.steps,
            "fingerprints": result.recorded,
        }
    )
