"""`RunConfig`: one field per flag, and the source of each value; groups of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minimind import __version__
from minimind.config.flags import (
    CHANGEABLE,
    FLAGS,
    MAX_ROPE_FACTOR,
    MIXED,
    Data,
    Engine,
    Length,
    Model,
    Optimizer,
    Output,
    meets,
)
from minimind.config.optimizers import OPTIMIZERS, READ_BY
from minimind.config.origin import Origin, Rank, derived
from minimind.errors import UsageError
from minimind.runtime import disk
from minimind.runtime.installed import DISTRIBUTION_NAME, PACKAGE, PROJECT
from minimind.runtime.urls import HUB_PREFIX

DISTRIBUTION = f"{DISTRIBUTION_NAME} {__version__}"  # what --version prints
# A wheel has the folder inside the package (pyproject.toml).
CONFIGS = (PACKAGE if disk.is_dir(PACKAGE / "configs") else PROJECT) / "configs"
PATIENCE = 8  # spikes in a row until the run goes back
MARGIN = 8  # steps before the first of them whose rows are left out, too
REACH = MARGIN + PATIENCE + 1  # steps from the newest checkpoint to one that is surely before them
DEFAULT_DEEPSPEED_CONFIG, RECIPES = CONFIGS / "ds_config.json", CONFIGS / "recipes"
TEMPLATES = CONFIGS / "templates"


def files_by_name(folder: Path) -> dict[str, str]:
    """Paths of the shipped files in a folder, by the names that flags take: without suffix.

    A name always means the shipped file, also where the current directory has a file of that name.
    Backups of editors (`sft.yaml~`, `.sft.yaml.swp`) are left out.
    """
    found = sorted(disk.matching(folder, "[!.]*.*"))
    return {path.stem: str(path) for path in found if path.suffix in (".yaml", ".json", ".jinja")}


def deepspeed_files() -> dict[str, str]:
    """The shipped DeepSpeed files by the names that --deepspeed_config takes."""
    return {**files_by_name(CONFIGS / "deepspeed"), "zero2": str(DEFAULT_DEEPSPEED_CONFIG)}


@dataclass(frozen=True)
class ParallelLayout:
    """Ranks in groups of adjacent ranks; all ranks of a group read the same rows.

    `data_rank` is the number of a group, `data_size` the number of groups. Without model
    parallelism every rank is a group of its own.
    """

    world_size: int
    tensor: int = 1  # ranks that share each weight matrix
    sequence: int = 1  # ranks that share the positions of each row

    @property
    def group_size(self) -> int:
        """Ranks of a group."""
        return self.tensor * self.sequence

    @property
    def data_size(self) -> int:
        """Number of groups, over which the rows of a step are divided."""
        return self.world_size // self.group_size

    def data_rank(self, rank: int) -> int:
        """The group of a rank."""
        return rank // self.group_size

    def first_rank(self, data_rank: int) -> int:
        """The first rank of a group."""
        return data_rank * self.group_size

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first of its group: what all of them count is counted once."""
        return rank % self.group_size == 0

    def to_json(self) -> dict[str, int]:
        """Sizes above 1, for logs and manifests."""
        sizes = {"tensor_parallel": self.tensor, "sequence_parallel": self.sequence}
        return {name: size for name, size in sizes.items() if size > 1}


@dataclass(frozen=True)
class RunConfig(Engine, Output, Data, Model, Optimizer, Length):
    """All flags of a run. A step is an optimizer step over all processes."""

    sources: Mapping[str, Origin] = field(default_factory=dict, compare=False)
    # Their number, once it is known; None without a teacher, 0 for records of one.
    teacher_weights: int | None = field(default=None, compare=False)

    def is_explicit(self, name: str) -> bool:
        """Whether the user set the value: in any source except defaults, rules and presets."""
        return self.sources[name].rank > Rank.PRESET

    def in_force(self, name: str) -> Any:
        """The value of a flag, or the one that holds where it is not given."""
        value = getattr(self, name)
        return FLAGS[name].unset if value is None else value

    def meets(self, condition: str) -> bool:
        """Whether a condition of `Flag` holds."""
        return meets(self, FLAGS, condition)

    @property
    def own_loss(self) -> str | None:
        """MODULE:FUNCTION of --loss; None for the cross-entropy."""
        return self.loss if ":" in self.loss else None

    @property
    def open_flags(self) -> list[str]:
        """Flags that the start decides, by rules or by the checkpoint."""
        return [name for name in self._undecided if not FLAGS[name].takes_epoch]

    @property
    def per_epoch(self) -> list[str]:
        """Intervals of "epoch" whose steps are not counted yet; their values are placeholders."""
        return [name for name in self._undecided if FLAGS[name].takes_epoch]

    @property
    def _undecided(self) -> list[str]:
        return [name for name, source in self.sources.items() if source.rank is Rank.OPEN]

    @property
    def has_open_accumulation(self) -> bool:
        """Whether accumulation_steps follows from a batch that the start decides."""
        return "batch_size" in self.open_flags and not self.is_explicit("accumulation_steps")

    @property
    def hugging_face(self) -> str | None:
        """PLACE of --model hf:PLACE; None for the built-in decoder."""
        name = self.model or ""
        return name.removeprefix(HUB_PREFIX) if name.startswith(HUB_PREFIX) else None

    @property
    def unread_flags(self) -> list[str]:
        """Flags that the optimizer does not read."""
        return [name for name, optimizers in READ_BY.items() if self.optimizer not in optimizers]

    @property
    def optimizer_values(self) -> dict[str, Any]:
        """Values of the flags that only this optimizer reads, defaults included."""
        defaults = dict(OPTIMIZERS[self.optimizer].defaults)
        if self.muon_scaling == "match_rms_adamw" and "muon_lr" in defaults:
            defaults["muon_lr"] = self.learning_rate
        given = {name: getattr(self, name) for name in defaults}
        return defaults | {name: value for name, value in given.items() if value is not None}

    @property
    def weight_dtype(self) -> str:
        """dtype of the model's weights and gradients."""
        return "float32" if self.dtype == MIXED else self.dtype

    @property
    def product_dtype(self) -> str:
        """dtype of matrix products."""
        return "bfloat16" if self.dtype == MIXED else self.dtype

    @property
    def muon(self) -> dict[str, Any]:
        """Values of the flags of --optimizer muon; empty for another optimizer."""
        return self.optimizer_values if OPTIMIZERS[self.optimizer].orthogonalizes else {}

    @property
    def guard(self) -> dict[str, Any]:
        """Numbers of --spike_guard; empty without it."""
        if not self.spike_guard:
            return {}
        names = {"factor": "spike_factor", "window": "spike_window"}
        names["max_rollbacks"] = "max_rollbacks"
        return {key: self.in_force(name) for key, name in names.items()}

    @property
    def head_width(self) -> int:
        """Channels per head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def feed_forward_width(self) -> int:
        """Width of the feed-forward; its default as in the model, which does not import this."""
        return self.hidden_dim or 64 * -(-8 * self.dim // (3 * 64))

    def trackers(self) -> tuple[str, ...]:
        """Unique tracker names of --report_to; empty for `none`."""
        if self.report_to.strip() == "none":
            return ()
        names = (name.strip() for name in self.report_to.split(","))
        return tuple(dict.fromkeys(name for name in names if name))

    @property
    def width_ratio(self) -> float:
        """dim / mup_base_dim; 1 without muP."""
        return 1.0 if self.mup_base_dim is None else self.dim / self.mup_base_dim

    def with_complete_scaling(self) -> RunConfig:
        """Return the run with rope_factor and max_seq_len, of which one may be given.

        Without rope_original_length it is returned as it is. Raise UsageError if the two are
        missing or do not fit.
        """
        if self.rope_scaling is None or self.rope_original_length is None:
            return self
        original, has_length = self.rope_original_length, self.is_explicit("max_seq_len")
        length, factor = self.max_seq_len, self.rope_factor
        by = self.sources["rope_original_length"]
        if factor is not None and not has_length:
            by_factor = f"{factor:g} x {original}"
            return self.with_values(
                Origin(by_factor, Rank.DATA), max_seq_len=int(factor * original)
            )
        rows = f"max_seq_len = {length} ({self.sources['max_seq_len']})"
        if factor is not None:
            reached = math.ceil(factor * original)  # the factor may be rounded
            if length > reached:
                raise UsageError(
                    f"{rows} is longer than the {reached} positions of {factor:g} x {original}"
                    f" ({self.sources['rope_factor']}); lower it, or raise --rope_factor"
                )
            return self
        if not has_length or length <= original:
            raise UsageError(
                f"rope_scaling = {self.rope_scaling} ({self.sources['rope_scaling']}) extends rows"
                f" of {original} tokens ({by}) without a length to reach; give --rope_factor, or a"
                " larger --max_seq_len"
            )
        if length > MAX_ROPE_FACTOR * original:
            raise UsageError(
                f"{rows} is {length / original:g} times the {original} positions of"
                f" rope_original_length ({by}), and rope_factor is at most {MAX_ROPE_FACTOR};"
                " lower --max_seq_len"
            )
        return self.with_values(
            Origin(f"max_seq_len {length} / {original}", Rank.DATA), rope_factor=length / original
        )

    @property
    def is_divided(self) -> bool:
        """Whether several processes share a row."""
        return self.tensor_parallel * self.sequence_parallel > 1

    def parallel(self, world_size: int) -> ParallelLayout:
        """How so many processes divide rows; raise UsageError if they are no whole groups."""
        size, names = self.tensor_parallel * self.sequence_parallel, []
        for name in ("tensor_parallel", "sequence_parallel"):
            if (given := getattr(self, name)) > 1:
                names.append(f"{name} = {given} ({self.sources[name]})")
        if world_size % size:
            raise UsageError(
                f"{' x '.join(names)} does not divide {world_size} processes; start a multiple of"
                f" {size} (NUM_PROCESSES, or --gpus of minimind plan)"
            )
        return ParallelLayout(world_size, self.tensor_parallel, self.sequence_parallel)

    def micro_batch_rows(self, world_size: int) -> int:
        """Rows per micro-batch and process; raise UsageError if they do not divide evenly.

        With --global_batch_size some may be padding.
        """
        data_size = self.parallel(world_size).data_size
        if self.global_batch_size is not None:
            return -(-self.global_batch_size // (data_size * self.micro_batches(world_size)))
        if not self.split_batches:
            return self.batch_size
        if "batch_size" in self.open_flags:
            return max(1, self.batch_size // data_size)
        if self.batch_size % data_size:
            rows = self.batch_size * self.accumulation_steps
            way_out = f", or give --global_batch_size {rows} instead" * (self.stages is None)
            raise UsageError(
                f"batch_size = {self.batch_size} ({self.sources['batch_size']}) cannot be split"
                f" over {data_size} processes (--split_batches); make it a multiple of"
                f" them{way_out}"
            )
        return self.batch_size // data_size

    def rows_per_step(self, world_size: int) -> int:
        """Rows of an optimizer step, over all processes, without padding."""
        return self.global_batch_size or self.padded_rows(world_size)

    def padded_rows(self, world_size: int) -> int:
        """The same with rows of padding: what all processes compute."""
        data_size = self.parallel(world_size).data_size
        return self.micro_batch_rows(world_size) * self.micro_batches(world_size) * data_size

    def micro_batches(self, world_size: int) -> int:
        """Micro-batches of a process and step: as few as --batch_size lets --global_batch_size."""
        if self.global_batch_size is None:
            return self.accumulation_steps
        return -(-self.global_batch_size // (self.parallel(world_size).data_size * self.batch_size))

    def with_micro_batches(self, world_size: int) -> RunConfig:
        """Return the run with the accumulation_steps that --global_batch_size needs.

        Raise UsageError if the processes cannot divide the rows of a step.
        """
        rows, data_size = self.global_batch_size, self.parallel(world_size).data_size
        padded = self.padded_rows(world_size)
        if rows is None:
            return self
        given = f"global_batch_size = {rows} ({self.sources['global_batch_size']})"
        if self.is_explicit("accumulation_steps"):
            raise UsageError(
                f"{given} and accumulation_steps = {self.accumulation_steps}"
                f" ({self.sources['accumulation_steps']}) both decide the micro-batches of a step;"
                " remove one of them (--batch_size limits the rows of a micro-batch)"
            )
        if rows < data_size:
            raise UsageError(
                f"{given} is fewer rows than the {data_size} processes that divide them; raise it,"
                " or start fewer (NUM_PROCESSES, or --gpus of minimind plan)"
            )
        more = f" and {padded - rows} of padding" if padded > rows else ""
        words = f"{rows} rows{more} as {data_size} x {padded // data_size}"
        number = self.micro_batches(world_size)
        return self.with_values(derived(words), accumulation_steps=number)

    def allowed_changes(self) -> frozenset[str]:
        """Groups named by --allow_change; raise UsageError for an unknown one."""
        if self.allow_change is None:
            return frozenset()
        names = [name.strip() for name in self.allow_change.split(",")]
        for name in names:
            if name not in CHANGEABLE:
                raise UsageError(
                    f"allow_change = {self.allow_change} ({self.sources['allow_change']}): {name!r}"
                    f" is not one of {', '.join(CHANGEABLE)}; name one of those"
                )
        return frozenset(names)

    def with_values(self, origin: Origin, /, **values: Any) -> RunConfig:
        """Return a copy with these values, which come from `origin`."""
        sources = {**self.sources, **dict.fromkeys(values, origin)}
        return replace(self, **values, sources=sources)
