"""The optimizers: one row for each value of --optimizer, and what follows from the rows.

Configuration, engine, checkpoints and estimates of memory read the same row. The engine imports a
class when it builds the optimizer, so that this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ADAM, MOMENTUM = ("exp_avg", "exp_avg_sq"), "momentum_buffer"

# Coefficients (a, b, c) of a x + b x^3 + c x^5, by which each iteration of Muon changes the
# singular values; a row for each iteration, the last for all further ones.
_POLAR_EXPRESS = (  # Amsel et al. 2025 (arXiv 2505.16932), for singular values from 0.001
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
NEWTON_SCHULZ = {
    "quintic": ((3.4445, -4.7750, 2.0315),),  # of torch.optim.Muon
    # Values that rounding lifts above the interval would grow: 1 % of it is left free, as there.
    "polar_express": (
        *((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}
# Elements of matrices of one shape that Muon iterates together, by the type of the device; 0, as
# for types that are not here: one by one. A checkpoint records the number, and a resume keeps it.
STACKS = {
    # Measured (`benchmarks/newton_schulz.py`): such stacks take 0.15 to 0.93 of the time in fp32 on
    # one core, larger ones up to 1.22.
    "cpu": 2**16,
    # Counted, not measured: a stack takes the host as many operators as a matrix, and 104m has 9
    # stacks of 112 matrices. Products of larger matrices keep the device busier than the host. In
    # bf16 a stack of so many elements takes 160 MiB, as one matrix of 4,096 x 4,096.
    "cuda": 2**24,
}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer; its class takes the groups, `lr`, and what `flags` and `params` say."""

    name: str  # in checkpoints and messages
    path: str  # dotted name of the class
    state: tuple[str, ...]  # names of its fp32 numbers per weight, 4 bytes each
    blocks: int = 0  # elements that share a scale, where a number of the state has 8 bits
    orthogonalizes: bool = False  # Muon: a hidden matrix has a momentum instead of this state
    types: tuple[str, ...] = ()  # of a block in the DeepSpeed file that names it
    keeps_block: bool = True  # DeepSpeed builds it from such a block, which else becomes flags
    twins: tuple[str, ...] = ()  # other classes with this state
    zero_twins: tuple[str, ...] = ()  # those that have checkpoints under ZeRO only
    flags: tuple[str, ...] = ()  # that it reads and another optimizer does not
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of flags that are its own
    # A checkpoint does not record these values: runs had them before there were flags for them.
    unrecorded: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)  # parameter of a block: own flag
    fixed: Mapping[str, Any] = field(default_factory=dict)  # parameters without a flag
    normalizes: bool = True  # the size of an update does not follow that of the gradient
    copies: int = 0  # of a weight or shard in fp32 that an update makes, beyond those of AdamW
    copies_on_cpu: int = 0  # the same beyond `copies`, where a CPU computes it
    package: str = ""  # an extra of this name installs it

    @property
    def class_name(self) -> str:
        """Name of the class without its module."""
        return self.path.rpartition(".")[2]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of all state, of which a weight of Muon has one kind or the other."""
        return (*self.state, MOMENTUM) if self.orthogonalizes else self.state


_EARLY_MUON = {"muon_steps": 5, "muon_coefficients": "quintic", "cautious_weight_decay": False}
OPTIMIZERS = {
    "adamw": Optimizer(
        "AdamW",
        "torch.optim.AdamW",
        ADAM,
        types=("Adam", "AdamW"),
        twins=("Adam", "FusedAdam"),
        zero_twins=("DeepSpeedCPUAdam",),
        flags=("beta1", "beta2"),
        fixed={"eps": 1e-8},
    ),
    "adamw_8bit": Optimizer(
        "AdamW8bit",
        "minimind.engine.eight_bit.AdamW8bit",
        ADAM,
        blocks=256,
        flags=("beta1", "beta2"),
        fixed={"eps": 1e-8},
        copies_on_cpu=5,  # the moments, the gradient, and two for the root of the second moment
        package="bitsandbytes",
    ),
    "muon": Optimizer(
        "Muon",
        "minimind.engine.optimizers.MuonWithAdamW",
        ADAM,
        orthogonalizes=True,
        types=("Muon",),
        keeps_block=False,
        flags=(
            *("beta1", "beta2", "muon_lr", "muon_momentum", "muon_scaling"),
            *("muon_steps", "muon_coefficients", "cautious_weight_decay"),
        ),
        defaults={
            **{"muon_lr": 0.02, "muon_momentum": 0.95, "muon_scaling": "original"},
            **_EARLY_MUON,
        },
        unrecorded=_EARLY_MUON,
        params={"muon_lr": "muon_lr", "momentum": "muon_momentum"},
    ),
    "lion": Optimizer(
        "Lion",
        "minimind.engine.optimizers.Lion",
        ("exp_avg",),
        types=("Lion",),
        zero_twins=("FusedLion", "DeepSpeedCPULion"),
        flags=("beta1", "beta2"),
        copies=1,
    ),
    "sgd": Optimizer(
        "SGD",
        "torch.optim.SGD",
        (MOMENTUM,),
        types=("SGD",),
        flags=("sgd_momentum",),
        defaults={"sgd_momentum": 0.9},
        params={"momentum": "sgd_momentum"},
        normalizes=False,
    ),
}

ADAM_TYPES = OPTIMIZERS["adamw"].types
FLAG_OF_TYPE = {kind: flag for flag, row in OPTIMIZERS.items() for kind in row.types}
# DeepSpeed's types whose state checkpoints hold.
RESUMABLE = tuple(kind for row in OPTIMIZERS.values() if row.keeps_block for kind in row.types)
# Optimizers that read a flag, the first of which a message names; other flags are read by all.
READ_BY = {
    name: tuple(flag for flag, row in OPTIMIZERS.items() if name in row.flags)
    for row in OPTIMIZERS.values()
    for name in row.flags
}
# Classes that update weights with and without ZeRO, and all classes, with the names of their state.
BARE_CLASSES = {
    name: row.kinds for row in OPTIMIZERS.values() for name in (row.class_name, *row.twins)
}
KINDS_OF_CLASS = BARE_CLASSES | {
    name: row.kinds for row in OPTIMIZERS.values() for name in row.zero_twins
}
