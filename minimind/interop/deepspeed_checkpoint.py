"""A training checkpoint of DeepSpeed, read without DeepSpeed: weights, moments, step.

    DIR/latest                                      the name of the newest folder
    DIR/global_stepN/
        mp_rank_00_model_states.pt                  counters, shapes in the order of the vectors
        zero_pp_rank_R_mp_rank_00_model_states.pt   the same at stage 3
        [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   flat fp32 weights and moments of rank R
        zero/NAME/fp32.pt exp_avg.pt exp_avg_sq.pt  in their place after ds_to_universal

Stages 1 and 2 cut one flat vector per group of the optimizer into equal parts; stage 3 cuts each
weight. At stage 0 the model file has it all, and an optimizer that numbers weights without names.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minimind.checkpoint.tensor_files import readable
from minimind.config.deepspeed.keys import DTYPES as NAMES
from minimind.config.flags import MIXED
from minimind.config.optimizers import ADAM, MOMENTUM, OPTIMIZERS
from minimind.engine.state import MASTER
from minimind.errors import CheckpointError
from minimind.interop.job import REPLACE
from minimind.interop.tensor_sources import require_stored, unpickled
from minimind.runtime import disk
from minimind.runtime.checked_json import MAX_INTEGER, PLAIN, shown
from minimind.runtime.durable_files import read_small, require_regular

OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_00_model_states\.pt")
OF_ALL = "mp_rank_00_model_states.pt"  # the file of the model, and of the first rank at stage 3
OF_STAGE_3 = f"zero_pp_rank_0_{OF_ALL}"
# The optimizer that kinds of state show.
OPTIMIZER_OF = {frozenset(row.kinds): name for name, row in OPTIMIZERS.items() if not row.package}
# Numbers of a group of an optimizer, and of a dynamic loss scaler.
NUMBERS = ("lr", "initial_lr", "weight_decay", "eps", "momentum")
SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
DTYPES = {getattr(torch, name): name for name in ("float32", "bfloat16", "float16")}
# Settings of a group that change an update; keys of groups of others that have Adam's state.
SWITCHES = ("use_muon", "decoupled_weight_decay", "bias_correction", "nesterov")
OTHERS = {"max_coeff": "LAMB", "momentum_decay": "NAdam"}


class Record:
    """Stands in for an object of DeepSpeed's: what it was made of, and no code."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


# Members of DeepSpeed's ZeroStageEnum, from 0.
STAGES = ("disabled", "optimizer_states", "gradients", "weights")


def member(enumeration: Any, name: Any) -> Record:
    """A stage by its name: how Python before 3.11.4 writes a member of an enumeration."""
    if enumeration is not Record or type(name) is not str or name not in STAGES:
        raise ValueError("its enumeration has a member that is not a stage of ZeRO")
    return Record(STAGES.index(name))


# Classes of DeepSpeed in these files.
RECORDS: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "deepspeed.runtime.zero.config.ZeroStageEnum",
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
        ),
        Record,
    ),
    "builtins.getattr": member,
}


@dataclass
class ForeignCheckpoint:
    """A checkpoint; the tensors are views of mapped files, not read yet."""

    folder: Path
    file: Path  # of the model, which errors name
    software: str  # with its version
    step: int = 0
    skipped: int = 0
    rows: int = 0  # that all steps read
    config: Mapping[str, Any] = field(default_factory=dict)  # of DeepSpeed
    stage: int | None = 0  # None: it is universal
    processes: int = 1
    unknown: tuple[str, ...] = ()  # groups of settings that the software does not save
    dtype: str = "float32"  # of the weights in training
    groups: Sequence[Mapping[str, Any]] = ()  # of the optimizer: its numbers
    members: Sequence[Sequence[str]] = ()  # the weights of each group
    shapes: dict[str, list[int]] = field(default_factory=dict)
    # The views that make up a weight or a moment, by kind and by name of the weight.
    pieces: dict[str, dict[str, list[Tensor]]] = field(default_factory=dict)
    updates: int | None = None  # that the optimizer counts
    has_schedule: bool = False  # the rate of a group is then not the peak
    scheduler_step: int | None = None  # of a scheduler of DeepSpeed's
    scaler: dict[str, float] = field(default_factory=dict)  # counters of the loss scaler

    @property
    def kinds(self) -> list[str]:
        """The kinds of moments that any weight has."""
        return sorted({*self.pieces} - {MASTER})

    @property
    def optimizer(self) -> str:
        """A key of OPTIMIZERS, by the state; CheckpointError for one that is not known."""
        kinds = frozenset(self.kinds)
        if any(group.get("use_muon") for group in self.groups) and MOMENTUM in kinds:
            return "muon"
        if kinds not in OPTIMIZER_OF:
            has = " and ".join(sorted(kinds)) or "no moments"
            raise CheckpointError(
                f"{self.folder}: its optimizer has {has}, and only AdamW, Adam, Lion, Muon and SGD"
                " are known; import its weights alone (zero_to_fp32.py, --from llama)"
            )
        return OPTIMIZER_OF[kinds]

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The numbers of the group of the optimizer that decays most, and is not Muon's."""
        groups = [one for one in self.groups if not one.get("use_muon")]
        return max(groups, key=lambda group: group.get("weight_decay") or 0, default={})

    @property
    def low_precision(self) -> str | None:
        """Name of the dtype of weights of which the file has no float32 copy; None if it has all.

        It is that of the first of them.
        """
        views = (view for views in self.pieces[MASTER].values() for view in views)
        return next((str(v.dtype)[6:] for v in views if v.dtype != torch.float32), None)

    def _configured(self, block: str) -> Mapping[str, Any]:
        """The parameters of the optimizer or the scheduler in the configuration of DeepSpeed."""
        found: Any = self.config.get(block)
        params = found.get("params") if isinstance(found, Mapping) else None
        return params if isinstance(params, Mapping) else {}

    @property
    def autocast(self) -> str | None:
        """The dtype of products under autocast, empty if it is the default of the device."""
        block: Any = self.config.get("torch_autocast")
        if not isinstance(block, Mapping) or block.get("enabled") is not True:
            return None
        return NAMES.get(str(block.get("dtype")).removeprefix("torch."), "")

    @property
    def peak(self) -> float | None:
        """The learning rate before any schedule; None if no file has it."""
        rates = [self.numbers.get("initial_lr")]
        if self.has_schedule:  # a warmup of DeepSpeed's ends at a rate of its own
            rates.append(self._configured("scheduler").get("warmup_max_lr"))
            rates.append(self._configured("optimizer").get("lr"))
        else:
            rates.append(self.numbers.get("lr"))
        return next(filter(_is_number, rates), None)

    @property
    def is_coupled(self) -> bool:
        """Whether Adam adds the decay to the gradient, which AdamW does not."""
        in_file = self._configured("optimizer").get("adam_w_mode")
        return in_file is False or self.numbers.get("decoupled_weight_decay") is False

    @property
    def decayed_otherwise(self) -> int:
        """How many weights a run of ours decays and this optimizer does not, or the reverse."""
        decay, count = self.numbers.get("weight_decay"), 0
        for group, names in zip(self.groups, self.members, strict=False):
            for name in names:
                is_decayed = decay and len(self.shapes[name]) > 1
                count += group.get("weight_decay") != (decay if is_decayed else 0)
        return count if decay else 0

    @property
    def grad_clip(self) -> float | None:
        """The norm to which gradients are clipped; 0: they are not, None: no file says it."""
        if "lr" in self.unknown:
            return None
        norm: Any = self.config.get("gradient_clipping")
        return float(norm) if _is_number(norm) else 0.0

    @property
    def untrained(self) -> list[str]:
        """Weights without moments, where others have them."""
        moments = {name for kind in self.kinds for name in self.pieces[kind]}
        return sorted({*self.shapes} - moments) if moments else []

    def moments_of(self, name: str) -> list[str]:
        """The kinds of moments of a weight; CheckpointError if they are not those of an update."""
        own = [kind for kind in self.kinds if name in self.pieces[kind]]
        if not own and self.optimizer != "muon":  # it was not trained
            return self.kinds
        if own not in ([self.kinds] if self.optimizer != "muon" else [[*ADAM], [MOMENTUM]]):
            has = " and ".join(own) or "no moments"
            raise CheckpointError(f"{self.folder}: has {has} of {shown(name)}; {REPLACE}")
        return own

    def read(self, kind: str, name: str) -> Tensor:
        """A weight, or a moment of one, as float32; of a weight that was not trained zeros."""
        shape, views = self.shapes[name], self.pieces[kind].get(name)
        if views is None:
            return torch.zeros(shape)
        with readable(self.folder, REPLACE):
            return torch.cat([view.float() for view in views]).view(shape)


def step_folder(place: Path) -> Path:
    """The folder of one step at `place`, or of the newest below it; CheckpointError if none."""
    tags = (place / name for name in ("latest", "latest_universal"))
    latest = next(filter(disk.is_file, tags), None)
    if latest and not any(map(MODEL.fullmatch, _names(place))):
        with readable(latest, REPLACE):
            tag = read_small(latest).decode(errors="replace").strip()
        is_name = re.fullmatch(r"[^/\0]{1,200}", tag) and tag != ".."
        if not is_name or not disk.is_dir(place / tag):
            raise CheckpointError(f"{latest}: names {shown(tag)}, which is not there; {REPLACE}")
        return place / tag
    return place


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in disk.entries(folder)) if disk.is_dir(folder) else []


def read_deepspeed(folder: Path) -> ForeignCheckpoint:
    """The checkpoint of one step; raise CheckpointError for what is damaged or not known."""
    names = [name for name in _names(folder) if name.endswith("_states.pt")]
    if disk.is_dir(folder / "zero") and OF_ALL in names:
        names = [name for name in names if name != OF_STAGE_3]  # an export of ours has it for both
    with readable(folder, REPLACE):
        models, optimizers = _by_rank(MODEL, names), _by_rank(OPTIMIZER, names)
    if other := next((n for n in names if n not in (*models, *optimizers)), None):
        raise CheckpointError(
            f"{folder / other}: is of experts, pipelines or tensor parallelism, which are not read;"
            " convert it by the software that wrote it"
        )
    if not models:
        raise CheckpointError(
            f"{folder}: has no {OF_ALL}; name a folder global_stepN of DeepSpeed,"
            " or the one above it (checkpoint-N of the Trainer)"
        )
    states = [_load(folder / name) for name in models]
    file, state = folder / models[0], states[0]
    with as_laid_out(file):
        version = state["ds_version"]
        if not PLAIN.fullmatch(version):
            raise ValueError(f"{shown(version)} is not a version")
        config = state["ds_config"]  # earlier versions keep the path of its file
        found = ForeignCheckpoint(
            folder,
            file,
            f"DeepSpeed {version}",
            step=count(state["global_steps"]),
            skipped=count(state["skipped_steps"]),
            rows=count(state["global_samples"]),
            config=config if isinstance(config, Mapping) else {},
            processes=count(state["dp_world_size"]),
            unknown=() if isinstance(config, Mapping) else ("lr",),
        )
        dtypes = [value.dtype for value in state["module"].values() if value.is_floating_point()]
        found.dtype = DTYPES[dtypes[0]]
        if found.autocast == "bfloat16":
            found.dtype = MIXED
        schedule = state.get("lr_scheduler")
        found.has_schedule = schedule is not None
        if isinstance(schedule, Mapping) and "last_batch_iteration" in schedule:
            found.scheduler_step = count(1 + schedule["last_batch_iteration"]) - 1
    zero = [_load(folder / name) for name in optimizers]
    if is_universal := not zero and disk.is_dir(folder / "zero"):
        _read_universal(found, state)
    with as_laid_out(folder):
        buffers = {*state["buffer_names"]}
        module = {name: value for name, value in state["module"].items() if name not in buffers}
        if zero:
            _read_zero(found, states, [one["optimizer_state_dict"] for one in zero])
        if zero or is_universal:
            _add_frozen(found, states, module)
        elif state["optimizer"] is None:
            raise CheckpointError("has no files *_optim_states.pt, which hold weights and moments")
        else:
            read_replicated(found, module, state["optimizer"])
        found.groups = normalized(found.groups)
        require_complete(found)
    return found


def require_complete(found: ForeignCheckpoint) -> None:
    """Raise CheckpointError, without the path, unless all numbers of each weight are there."""
    for kind, pieces in found.pieces.items():
        for name, views in pieces.items():
            if type(name) is not str:
                raise CheckpointError(f"has a weight whose name is {_brief(name)}")
            for view in views:
                require_stored(f"{kind} of {name}", view)
            have, need = sum(view.numel() for view in views), math.prod(found.shapes[name])
            if have != need or not all(view.is_floating_point() for view in views):
                raise CheckpointError(f"has {have} of {need} numbers of {kind} of {shown(name)}")


@contextmanager
def as_laid_out(path: Path) -> Iterator[None]:
    """Convert what values of another type raise in the block to a CheckpointError."""
    with readable(path, REPLACE):
        try:
            yield
        except (
            *(LookupError, TypeError, ValueError, AttributeError, RuntimeError),
            OverflowError,  # of a count that is infinite
        ) as error:
            what = f"{type(error).__name__}: {shown(str(error))}"
            raise CheckpointError(f"has another layout than is known here ({what})") from error


def _by_rank(pattern: re.Pattern[str], names: list[str]) -> list[str]:
    found = {name: int(match[1] or 0) for name in names if (match := pattern.fullmatch(name))}
    ranks = sorted(found.values())
    if ranks != [*range(len(ranks))]:
        raise CheckpointError(
            f"has files of the ranks {shown(ranks)}, and needs one of each from 0"
        )
    return sorted(found, key=found.__getitem__)


def _load(file: Path) -> dict[str, Any]:
    if type(state := load_pickle(file)) is not dict:
        raise CheckpointError(f"{file}: holds {type(state).__name__}, no state; {REPLACE}")
    return state


def load_pickle(file: Path) -> Any:
    """What is in a file of torch.save; raise CheckpointError unless each record is whole."""
    with readable(file, REPLACE):
        require_regular(file)
        _require_intact(file)
    return unpickled(file, RECORDS)


def _require_intact(file: Path) -> None:
    """Raise CheckpointError, without the path, unless each record has its checksum."""
    try:
        with zipfile.ZipFile(file) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > disk.stat(file).st_size:
                raise CheckpointError("is damaged (it unpacks to more than its size)")
            if any(entry.compress_type for entry in archive.infolist()):
                raise CheckpointError("is compressed, and torch.save does not compress")
            damaged = archive.testzip()
    # zipfile raises each of these for some damage: of the directory, a method, a flag, a size.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"is damaged ({shown(str(error))})") from error
    if damaged:
        raise CheckpointError(f"is damaged ({shown(damaged)} does not match its checksum)")


def count(value: Any) -> int:
    """The value, if it is a number of things; else ValueError."""
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise ValueError(f"{_brief(value)} is not a count")
    return value


def _brief(value: Any) -> str:
    """A value for an error; the text of lists that hold one another many times has no end."""
    is_plain = value is None or type(value) in (bool, int, float, str)
    return shown(value) if is_plain else f"a {type(value).__name__}"


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_INTEGER


def normalized(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups that are used; ValueError unless they are numbers."""
    return [*map(_numbers, groups)]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {key: group[key] for key in NUMBERS if key in group}
    betas = [*group["betas"]] if "betas" in group else []
    if bad := [one for one in (*kept.values(), *betas) if not _is_number(one)]:
        raise ValueError(f"{_brief(bad[0])} is not a setting of an optimizer")
    if len(betas) not in (0, 2):
        raise ValueError(f"{len(betas)} betas are not two")
    is_radam = "decoupled_weight_decay" in group and "betas" in group and "amsgrad" not in group
    other = "RAdam" if is_radam else next((OTHERS[key] for key in group if key in OTHERS), None)
    if other:
        raise CheckpointError(f"is of {other}, an optimizer that is not known here")
    kept |= {"betas": betas} if betas else {}
    return kept | {key: group[key] is True for key in SWITCHES if key in group}


def _scaler(state: Any) -> dict[str, float]:
    """The counters of a loss scaler that grows and shrinks; empty if one is missing.

    At stage 0 DeepSpeed's scaler waits for no second overflow, and saves no hysteresis.
    """
    held = {"cur_hysteresis": 1, **state} if isinstance(state, Mapping) else {}
    found = {name: held[name] for name in SCALER if _is_number(held.get(name))}
    return found if len(found) == len(SCALER) else {}


def _read_zero(
    found: ForeignCheckpoint, states: list[dict[str, Any]], parts: list[dict[str, Any]]
) -> None:
    """Stages 1 to 3; `parts` are the optimizers of the ranks, in order."""
    first, shapes = parts[0], states[0]["param_shapes"]
    counts = first["partition_count"]
    counts = {*map(count, counts if isinstance(counts, list) else [counts])}
    if counts != {len(parts)}:
        raise CheckpointError(
            f"has the optimizers of {len(parts)} ranks, and was written by {max(counts)}"
        )
    found.processes = len(parts)
    is_sharded = "fp32_flat_groups" in first
    masters = "fp32_flat_groups" if is_sharded else "single_partition_of_fp32_groups"
    bases = [one["optimizer_state_dict" if is_sharded else "base_optimizer_state"] for one in parts]
    if isinstance(bases[0], list):  # of "elastic_checkpoint", the state of each group
        flats = bases
    else:
        found.groups = bases[0]["param_groups"]
        order = [number for group in found.groups for number in group["params"]]
        flats = [[base["state"].get(number, {}) for number in order] for base in bases]
        found.members = _members(found.groups, shapes)
    found.stage = 3 if is_sharded else _stage(first)
    found.scaler = _scaler(getattr(first.get("loss_scaler"), "state", None))
    _read_updates(found, flats)
    vectors = {MASTER: [one[masters] for one in parts]}
    kinds = _kinds(state for rank in flats for state in rank)
    vectors |= {kind: [[one.get(kind) for one in rank] for rank in flats] for kind in kinds}
    for kind, of_ranks in vectors.items():
        if is_sharded:
            order = {name: shape for group in shapes for name, shape in group.items()}
            found.pieces[kind] = dict(_of_shards(order, of_ranks))
            continue
        gaps = first.get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        found.pieces[kind] = {}
        for number, (group, gap) in enumerate(zip(shapes, gaps, strict=True)):
            order = [(name, shape, g) for (name, shape), g in zip(group.items(), gap, strict=True)]
            vector = [rank[number] for rank in of_ranks]
            if any(one is not None for one in vector):
                found.pieces[kind] |= _in_turn(order, vector)
    found.shapes = _shapes(shapes)


def _shapes(groups: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    return {name: [*map(count, shape)] for group in groups for name, shape in group.items()}


def _add_frozen(
    found: ForeignCheckpoint, states: Sequence[Mapping[str, Any]], module: Mapping[str, Tensor]
) -> None:
    """Add what the optimizer does not have: stages 2 and 3 save it apart, stage 1 in the model."""
    shapes = states[0].get("frozen_param_shapes")
    if shapes is not None:
        names = {name: [*map(count, shape)] for name, shape in shapes.items()}
        held = {name: [one["frozen_param_fragments"][name] for one in states] for name in names}
    else:
        trained = {*found.shapes, *(states[0].get("shared_params") or {})}
        names = {name: [*value.shape] for name, value in module.items() if name not in trained}
        held = {name: [module[name]] for name in names}
    for name, shape in names.items():
        found.shapes[name] = shape
        found.pieces[MASTER][name] = [*_cut(held[name], 0, math.prod(shape))]


def _stage(state: Mapping[str, Any]) -> int:
    """The stage by DeepSpeed's enumeration; its optimizer of stage 1 in bf16 does not say it."""
    return count(getattr(state.get("zero_stage"), "args", (1,))[0])


def _members(
    groups: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """The weights of each group, whose `params` number vectors that hold several."""
    return [[name for one in group["params"] for name in shapes[one]] for group in groups]


def _read_universal(found: ForeignCheckpoint, state: Mapping[str, Any]) -> None:
    """A folder of DeepSpeed's ds_to_universal, which has a file of each weight and kind."""
    zero = found.folder / "zero"
    common = _load(zero / "optimizer_state.pt")
    with as_laid_out(found.folder):
        shapes = state["param_shapes"]
        found.stage, found.groups = None, common["param_groups"]
        found.members, found.shapes = _members(found.groups, shapes), _shapes(shapes)
        base = common.get("optimizer_state_dict") or {"state": {}}  # of stage 3
        states = [*base["state"].values()]
        if odd := next((n for n in found.shapes if not re.fullmatch(r"\w[\w.-]{0,300}", n)), None):
            raise CheckpointError(f"has a weight {shown(odd)}, which names no folder")
    for name in found.shapes:
        held = zero / name
        others = {file.stem: file for file in sorted(disk.matching(held, "*.pt"))}
        for kind, file in {MASTER: held / f"{MASTER}.pt", **others}.items():
            value = load_pickle(file)
            if kind == "step":
                states.append({"step": value})
                continue
            with as_laid_out(file):
                value = value["param"] if isinstance(value, Mapping) else value
                found.pieces.setdefault(kind, {})[name] = [value.view(-1)]
    with as_laid_out(found.folder):
        _read_updates(found, [states])


def _in_turn(
    order: Iterable[tuple[str, Sequence[int], int]], vector: Sequence[Tensor]
) -> Iterator[tuple[str, list[Tensor]]]:
    """Views of weights that follow one another in a vector, with a gap behind each."""
    start = 0
    for name, shape, gap in order:
        yield name, [*_cut(vector, start, math.prod(shape))]
        start += math.prod(shape) + gap
    _require_used(start, vector, 2 * len(vector))


def _of_shards(
    shapes: Mapping[str, Sequence[int]], of_ranks: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[str, list[Tensor]]]:
    """Views of weights of which each rank has an equal part, padded at the end."""
    start = 0
    for name, shape in shapes.items():
        share = -(-math.prod(shape) // len(of_ranks))
        held = [view for rank in of_ranks for view in _cut(rank, start, share)]
        yield name, [*_cut(held, 0, math.prod(shape))]
        start += share
    for rank in of_ranks:
        _require_used(start, rank, 1)


def _require_used(end: int, vector: Sequence[Tensor], alignment: int) -> None:
    """Raise CheckpointError unless the vector ends behind its weights, but for padding."""
    numbers = sum(part.numel() for part in vector)
    if numbers - end >= alignment:
        raise CheckpointError(f"has {numbers - end} numbers of no weight behind {end} of weights")


def _cut(vector: Sequence[Tensor], start: int, length: int) -> Iterator[Tensor]:
    """Views of `length` elements of tensors that follow one another."""
    end, at = start + length, 0
    for part in vector:
        first, last = max(start, at), min(end, at + part.numel())
        if first < last:
            yield part.view(-1)[first - at : last - at]
        at += part.numel()


def read_replicated(
    found: ForeignCheckpoint, module: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Stage 0: the optimizer of torch, or DeepSpeed's wrapper of one with fp32 copies.

    `module` has the weights by name.
    """
    base = state.get("optimizer_state_dict", state)
    found.groups, moments = base["param_groups"], base["state"]
    found.scaler = _scaler(state)
    seen: dict[int, str] = {}  # a tied weight stands there under each of its names
    for name, value in module.items():
        seen.setdefault(value.data_ptr(), name)
    found.shapes = {name: [*module[name].shape] for name in seen.values()}
    _read_updates(found, [[*moments.values()]])
    numbers = [group["params"] for group in found.groups]
    flat = state.get("fp32_groups_flat")
    copies = flat or [p for group in state.get("fp32_groups", ()) for p in group]
    counts = [one.numel() for one in flat] if flat else [len(group) for group in numbers]
    sizes = {name: math.prod(shape) if flat else 1 for name, shape in found.shapes.items()}
    found.members = names = _grouped(found, counts, sizes)
    if flat:
        order = [[(name, found.shapes[name], 0) for name in group] for group in names]
        vectors = {MASTER: flat}
        vectors |= {
            kind: [moments[n][kind] for group in numbers for n in group]
            for kind in _kinds(moments.values())
        }
        for kind, of_groups in vectors.items():
            pairs = zip(order, of_groups, strict=True)
            found.pieces[kind] = {n: v for o, flat in pairs for n, v in _in_turn(o, [flat])}
        return
    each = [name for group in names for name in group]
    place = dict(zip(each, (n for group in numbers for n in group), strict=True))
    held = dict(zip(each, copies, strict=True)) if copies else {name: module[name] for name in each}
    found.pieces[MASTER] = {name: [value.view(-1)] for name, value in held.items()}
    for kind in _kinds(moments.values()):
        found.pieces[kind] = {}
        for name, number in place.items():
            if kind in moments.get(number, {}):
                value = moments[number][kind]
                if [*value.shape] != found.shapes[name]:
                    raise CheckpointError(
                        f"has {kind} number {number} not of the shape of {shown(name)}"
                    )
                found.pieces[kind][name] = [value.view(-1)]


def _grouped(
    found: ForeignCheckpoint, counts: list[int], sizes: Mapping[str, int]
) -> list[list[str]]:
    """The weights of each group of an optimizer that numbers them, in its order.

    Training scripts have one group, or one of matrices, which decay, and one of the rest; in each
    the weights are in the order of the model. Raise CheckpointError for other groups.
    """
    whole = [*found.shapes]
    matrices = [name for name in whole if len(found.shapes[name]) > 1]
    others = [name for name in whole if len(found.shapes[name]) < 2]
    for groups in ([whole], [matrices, others], [others, matrices]):
        if counts == [sum(sizes[name] for name in group) for group in groups]:
            return groups
    raise CheckpointError(
        f"has groups of {counts} weights without names, neither one of all nor matrices and the"
        " rest; save it at ZeRO stage 1, which names them"
    )


def _kinds(states: Iterable[Mapping[str, Any]]) -> list[str]:
    """Kinds of state that have a number for each element; CheckpointError for one unknown."""
    kinds = {
        kind
        for state in states
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1
    }
    if unknown := kinds - {*ADAM, MOMENTUM}:
        raise CheckpointError(f"has {shown(min(unknown))} of an optimizer that is not known here")
    return sorted(kinds)


def _read_updates(
    found: ForeignCheckpoint, of_ranks: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """The updates that the optimizer counts, the same for all weights."""
    counts = {int(one["step"]) for rank in of_ranks for one in rank if "step" in one}
    counts |= {int(group["step"]) for group in found.groups if "step" in group}
    if len(counts) > 1:
        raise CheckpointError(
            f"counts {min(counts)} updates of one weight and {max(counts)} of another"
        )
    has_state = any(one for rank in of_ranks for one in rank)
    found.updates = count(counts.pop()) if counts else 0 if has_state else None
