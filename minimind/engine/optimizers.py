"""Parameter groups and their optimizer; Muon, Lion; muP; the average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr

from minimind.config.deepspeed.keys import IN_TORCH
from minimind.config.optimizers import ADAM_TYPES, NEWTON_SCHULZ, OPTIMIZERS, STACKS
from minimind.config.run_config import RunConfig
from minimind.engine.state import Fragment, ZeroState
from minimind.errors import UsageError
from minimind.model.decoder import ResidualOutput
from minimind.model.experts import MixtureOfExperts
from minimind.runtime.collectives import lost_peers
from minimind.runtime.device import HOST

HIDDEN, ROUTER, OUTPUT = "hidden matrices", "routers of experts", "final norm"
# Exponents of m. A router maps the width to a fixed number of experts, like the head.
INIT = {HIDDEN: -0.5, ROUTER: -1.0, OUTPUT: -1.0}
ADAMW = {HIDDEN: -1.0, ROUTER: -1.0, OUTPUT: -1.0}
# An update of Muon has a spectral norm of 1, which suits a hidden matrix of any width and is
# sqrt(m) too large for a router; match_rms_adamw multiplies it by the root of the width.
MUON = {"original": {HIDDEN: 0.0, ROUTER: -0.5}, "match_rms_adamw": {HIDDEN: -0.5, ROUTER: -1.0}}


def role_of(model: Any) -> dict[nn.Parameter, str]:
    """The role of each parameter that muP scales; the others keep initialization and rate."""
    roles: dict[nn.Parameter, str] = dict.fromkeys(hidden_matrices(model).values(), HIDDEN)
    for module in model.modules():
        gate: Any = module.gate.weight if isinstance(module, MixtureOfExperts) else None
        if gate in roles:
            roles[gate] = ROUTER
    return {**roles, model.model.norm.weight: OUTPUT}


def rate_factors(model: Any, run: RunConfig) -> dict[nn.Parameter, float]:
    """Factors of the learning rate other than 1, by parameter."""
    if run.width_ratio == 1.0:
        return {}
    powers = _powers_of_rate(run)
    factors = {p: run.width_ratio ** powers[role] for p, role in role_of(model).items()}
    return {p: factor for p, factor in factors.items() if factor != 1.0}


@torch.no_grad()
def scale_initial_weights(model: Any, run: RunConfig) -> None:
    """Scale freshly initialized weights from the base width's to those of this width.

    With --zero_init_outputs those that end a branch of the residual stream become 0.
    """
    for module in model.modules():
        if run.zero_init_outputs and isinstance(module, ResidualOutput):
            module.weight.zero_()
    if run.width_ratio == 1.0:
        return
    for p, role in role_of(model).items():
        p.mul_(run.width_ratio ** INIT[role])


def mup_line(run: RunConfig) -> str:
    """The factors in force as a line of the start summary; empty without muP."""
    if run.mup_base_dim is None:
        return ""
    m, powers = run.width_ratio, _powers_of_rate(run)
    parts = [f"dim / mup_base_dim = {m:.4g}"]
    for role in (HIDDEN, ROUTER, OUTPUT) if run.use_moe else (HIDDEN, OUTPUT):
        start = "" if run.init_from else f"initial size x {m ** INIT[role]:.4g}, "
        decay = "" if role == OUTPUT else f", weight decay x {m ** -powers[role]:.4g}"
        parts.append(f"{role}: {start}rate x {m ** powers[role]:.4g}{decay}")
    return f"muP      {'; '.join(parts)}; keep dim / n_heads = {run.dim / run.n_heads:g}"


def _powers_of_rate(run: RunConfig) -> dict[str, float]:
    return ADAMW | (MUON[run.muon["muon_scaling"]] if run.muon else {})


multi_tensor: Any = torch  # its operators on lists, which pyright does not find in torch
Groups = list[dict[str, Any]]
Row = tuple[float, float, float]
LINEAR = ("Conv1D",)  # GPT-2's class in transformers: a linear layer with its weight transposed


@dataclass(frozen=True)
class ShardedMatrix:
    """One Muon matrix: this rank's fragment, and the columns of the whole in the gathered rows."""

    shape: Sequence[int]
    fragment: Fragment
    columns: slice


@dataclass(frozen=True)
class Shards:
    """Matrices by the flat shard that the optimizer updates, and the ranks that share them.

    The gathered shards are `rows` of equal length: one vector at stages 1 and 2, a row per rank at
    stage 3, which divides each matrix. Fragments and columns ascend.
    """

    matrices: Mapping[int, list[ShardedMatrix]]  # matrices by id of the shard
    rows: int
    collectives: Any  # DeepSpeed's communication backend, whose calls comm_ms times
    process_group: dist.ProcessGroup | None


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for groups with `use_muon`, torch's fused AdamW for the others.

    muon_names are the parameters of the former, from `names` of each of these groups.
    """

    shards: Shards | None = None  # set after ZeRO has replaced the parameters by shards
    found_inf: Tensor | None = None  # 1 to skip the step; set by the backend
    # Elements of matrices of one shape that are iterated together, 0 for one by one: set by the
    # first update from STACKS, or by the checkpoint that is resumed.
    stack: int | None = None

    def __init__(self, groups: Groups, **options: Any) -> None:
        muon_groups = [{**group} for group in groups if group.get("use_muon")]
        names = [group.pop("names") for group in muon_groups]
        self.muon_names: frozenset[str] = frozenset().union(*names)
        others = [group for group in groups if not group.get("use_muon")]
        adamw = torch.optim.AdamW(others or [{"params": []}], fused=True, **options)
        muon = torch.optim.Muon(muon_groups)
        groups = [*adamw.param_groups, *muon.param_groups]
        super().__init__([group for group in groups if group["params"]], {"fused": True})
        self._adamw = adamw

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every group; whole matrices, or the shards that `shards` describes."""
        if self.found_inf is not None and self.found_inf.item():
            return
        for group in self.param_groups:
            if not group.get("use_muon"):
                self._step_adamw(group)
                continue
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                if self.stack is None:
                    self.stack = STACKS.get(p.device.type, 0)
            self._step_matrices([p for p in params if p.ndim == 2], group)
            for p in params:
                if p.ndim == 1 and self.shards:  # otherwise DeepSpeed steps for the state alone
                    self._step_shard(p, group, self.shards)

    def _step_adamw(self, group: dict[str, Any]) -> None:
        self._adamw.param_groups, self._adamw.state = [group], self.state
        if not group.get("is_cautious") or not group["weight_decay"]:
            self._adamw.step()
            return
        before = {p: p.clone() for p in group["params"] if p.grad is not None}
        self._adamw.param_groups = [{**group, "weight_decay": 0.0}]
        self._adamw.step()
        for p, weight in before.items():
            (kept,) = _cautiously_kept([weight], [p - weight], group)
            p.add_(weight * (kept - 1))

    def _step_matrices(self, matrices: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Update whole matrices."""
        for stack in stacks([p.shape for p in matrices], self.stack or 0):
            weights = [matrices[i] for i in stack]
            momenta = [self.state[p]["momentum_buffer"] for p in weights]
            update = torch.stack([p.grad for p in weights if p.grad is not None])
            _nesterov_(update.unbind(), momenta, group["momentum"])
            update = update.to(iteration_dtype(update.device))
            _change(weights, _orthogonal(update, group).unbind(), group)

    def _step_shard(self, flat: Tensor, group: dict[str, Any], shards: Shards) -> None:
        """Update a flat shard of matrices; collective."""
        assert flat.grad is not None
        update = flat.grad.clone()
        _nesterov_([update], [self.state[flat]["momentum_buffer"]], group["momentum"])
        update = update.to(iteration_dtype(flat.device))
        ranks = dist.get_world_size(shards.process_group)
        gathered = update.new_empty((ranks, update.numel()))
        gather = shards.collectives.all_gather_into_tensor
        gather(gathered.view(-1), update, group=shards.process_group)
        matrices = shards.matrices.get(id(flat), ())
        wholes = _parts(gathered.view(shards.rows, -1), [matrix.columns for matrix in matrices])
        places = [slice(f.offset, f.offset + f.length) for f in (m.fragment for m in matrices)]
        own = _parts(flat.detach(), places)
        for stack in stacks([matrix.shape for matrix in matrices], self.stack or 0):
            shape = matrices[stack[0]].shape
            x = torch.stack([wholes[i] for i in stack]) if len(stack) > 1 else wholes[stack[0]]
            x = x.reshape(len(stack), -1)[:, : prod(shape)].view(-1, *shape)
            changes = _orthogonal(x, group).flatten(1).unbind()
            fragments = [matrices[i].fragment for i in stack]
            parts = [
                change if f.length == len(change) else change.narrow(0, f.start, f.length)
                for change, f in zip(changes, fragments, strict=True)
            ]
            _change([own[i] for i in stack], parts, group)


def stacks(shapes: Iterable[Sequence[int]], most: int) -> Iterator[list[int]]:
    """Yield indices of matrices that are iterated together: equal shapes, up to `most` elements.

    Stacks of a shape are nearly equal; a matrix is alone where two are too many.
    """
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(tuple(shape), []).append(index)
    for shape, found in by_shape.items():
        count = -(-len(found) // max(1, most // prod(shape)))
        for k in range(count):
            yield found[len(found) * k // count : len(found) * (k + 1) // count]


def _parts(values: Tensor, places: Iterable[slice]) -> list[Tensor]:
    """Views of ascending places of the last dimension, by one operator."""
    sizes, end = [], 0
    for place in places:
        sizes += [place.start - end, place.stop - place.start]
        end = place.stop
    return list(values.split([*sizes, values.shape[-1] - end], dim=-1)[1::2])


def _nesterov_(grads: Sequence[Tensor], momenta: Sequence[Tensor], decay: float) -> None:
    """Update the momenta by the gradients, which become the Nesterov updates."""
    multi_tensor._foreach_lerp_(momenta, grads, 1 - decay)
    multi_tensor._foreach_lerp_(grads, momenta, decay)


def _change(weights: Sequence[Tensor], changes: Sequence[Tensor], group: Mapping[str, Any]) -> None:
    """Decay the weights, then add the changes."""
    kept: Any = 1 - group["lr"] * group["weight_decay"]
    if group.get("is_cautious"):
        kept = _cautiously_kept(weights, changes, group)
    multi_tensor._foreach_mul_(weights, kept)
    multi_tensor._foreach_add_(weights, changes)


def _cautiously_kept(
    weights: Sequence[Tensor], changes: Sequence[Tensor], group: Mapping[str, Any]
) -> Sequence[Tensor]:
    """Factors of the weights by a decay that is where a change, too, makes a weight smaller.

    Chen et al. 2025 (arXiv 2510.12402).
    """
    factors = multi_tensor._foreach_mul(weights, changes)
    multi_tensor._foreach_sign_(factors)
    multi_tensor._foreach_clamp_min_(factors, 0)  # 1 where the weight grows, else 0
    multi_tensor._foreach_sub_(factors, 1)
    multi_tensor._foreach_mul_(factors, group["lr"] * group["weight_decay"])
    multi_tensor._foreach_add_(factors, 1)
    return factors


def _orthogonal(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Changes of matrices by their updates, (matrices, rows, columns), in the iteration's dtype.

    They are orthogonalized, times the negative learning rate. A matrix alone is iterated as torch
    does it.
    """
    numbers = group["ns_coefficients"], group["ns_steps"], group["eps"]
    is_alone = len(update) == 1
    direction = newton_schulz(update[0] if is_alone else update, *numbers).view(update.shape)
    # With the strides of the weights the changes are added by one kernel.
    direction = direction.to(torch.float32, memory_format=torch.contiguous_format)
    return direction.mul_(-_adjust_lr(group["lr"], group["adjust_lr_fn"], update.shape[1:]))


def iteration_dtype(device: torch.device) -> torch.dtype:
    """dtype of the Newton-Schulz iterations: torch's bf16, but fp32 on a CPU that emulates bf16.

    By AVX2 alone the iterations of a matrix take 23 times as long in bf16 as in fp32.
    """
    is_fast = device.type != HOST.name or HOST.has_bf16
    return torch.bfloat16 if is_fast else torch.float32


def newton_schulz(update: Tensor, rows: Sequence[Row], steps: int, eps: float) -> Tensor:
    """The iteration of torch.optim.Muon in the dtype of `update`, by `rows` of NEWTON_SCHULZ.

    `update` is a matrix or a batch of them, (matrices, rows, columns).
    """
    is_batch, is_tall = update.ndim == 3, update.shape[-2] > update.shape[-1]
    norm = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True) if is_batch else update.norm()
    x = (update.mT if is_tall else update) / norm.clamp(min=eps)
    each = [rows[min(step, len(rows) - 1)] for step in range(steps)]
    # With a single row, as torch has it, the results of one matrix are torch's bit for bit.
    if len(rows) > 1 and x.dtype != torch.bfloat16 and 2 * x.shape[-1] > 3 * x.shape[-2]:
        while len(each) > 1:
            first, second, *each = each
            x = _two_iterations(x, first, second)
    product, add_product = _products(x)
    for a, b, c in each:
        gram = product(x, x.mT)
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _two_iterations(x: Tensor, first: Row, second: Row) -> Tensor:
    """Two iterations of wide matrices by products of their short side: fewer operations.

    In fp32 they are as exact as one by one (`benchmarks/newton_schulz.py`). In bf16 they are not,
    and neither are more than two in fp32: the Gram matrix has the squares of the singular values.
    """
    product, add_product = _products(x)
    gram = product(x, x.mT)
    a, b, c = first
    factor = add_product(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal(dim1=-2, dim2=-1).add_(a)
    gram = product(product(factor, gram), factor)
    a, b, c = second
    polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
    return product(add_product(factor, polynomial, factor, beta=a), x)


def _products(x: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The product, and the sum with one, of matrices or of batches: `@` takes four operators."""
    return (torch.mm, torch.addmm) if x.ndim == 2 else (torch.bmm, torch.baddbmm)


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable weights of linear layers other than the output head, by name."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    layers = [module for module in model.modules() if type(module).__name__ in LINEAR]
    layers += [module for module in model.modules() if isinstance(module, nn.Linear)]
    matrices = {id(module.weight) for module in layers} - {id(getattr(head, "weight", None))}
    return {
        name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in matrices
    }


def shards_of(
    engine: Any, collectives: Any, state: ZeroState, muon_names: Set[str]
) -> Shards | None:
    """Describe the sharded matrices `muon_names` of a DeepSpeed engine; None if none is sharded."""
    wrapper = engine.optimizer
    named = dict(engine.module.named_parameters())
    matrices: dict[int, list[ShardedMatrix]] = {}
    for f in state.fragments:
        p: Any = named[f.name]
        shape = tuple(getattr(p, "ds_shape", p.shape))
        if f.is_replicated or f.name not in muon_names:
            continue
        if hasattr(p, "ds_shape"):  # stage 3: every rank holds an equal part, padded at the end
            columns = slice(f.offset, f.offset + p.partition_numel())
        else:  # stages 1 and 2: the shards of all ranks are one vector
            start = dist.get_rank() * f.owner.numel() + f.offset - f.start
            columns = slice(start, start + prod(shape))
        matrices.setdefault(id(f.owner), []).append(ShardedMatrix(shape, f, columns))
    if all(f.is_replicated for f in state.fragments):
        return None
    groups = getattr(wrapper, "real_dp_process_group", None)
    group = groups[0] if groups else getattr(wrapper, "dp_process_group", None)
    divides_each = any(hasattr(p, "ds_shape") for p in named.values())
    rows = dist.get_world_size(group) if divides_each else 1
    return Shards(matrices, rows, collectives, group)


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023 (arXiv 2302.06675), with decoupled weight decay.

    The state is that of DeepSpeed's Lion: `exp_avg`, and a step count that no update reads.
    """

    found_inf: Tensor | None = None  # 1 to skip the step; set by the backend

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        if self.found_inf is not None and self.found_inf.item():
            return
        for group in self.param_groups:
            rate, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p))
                state["step"] += 1
                direction = state["exp_avg"].lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
                state["exp_avg"].lerp_(p.grad, 1 - beta2)


def parameter_groups(
    model: nn.Module, weight_decay: float, apart: Iterable[nn.Parameter] = ()
) -> Groups:
    """Return two groups, without `apart`: matrices with weight decay, norm gains without."""
    excluded = {id(p) for p in apart}
    trainable = [p for p in model.parameters() if p.requires_grad and id(p) not in excluded]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def run_groups(model: nn.Module, run: RunConfig) -> Groups:
    """Return the parameter groups of the run's optimizer; those of Muon, the last, have `use_muon`.

    The rate of a group is `lr_scale` (1 if missing) times that of the schedule.
    """
    muon = run.muon
    matrices = hidden_matrices(model) if muon else {}
    if muon and not matrices:
        raise UsageError(
            f"--optimizer {run.optimizer} has no matrix to train (--freeze); give adamw"
        )
    groups = parameter_groups(model, run.weight_decay, matrices.values())
    if muon:
        group = {
            "params": [*matrices.values()],
            "names": frozenset(matrices),
            "use_muon": True,
            "lr": muon["muon_lr"],
            "lr_scale": muon["muon_lr"] / run.learning_rate,
            "weight_decay": run.weight_decay,
            "momentum": muon["muon_momentum"],
            "adjust_lr_fn": muon["muon_scaling"],
            "ns_steps": muon["muon_steps"],
            "ns_coefficients": NEWTON_SCHULZ[muon["muon_coefficients"]],
        }
        groups.append(group)
        groups = [{**one, "is_cautious": muon["cautious_weight_decay"]} for one in groups]
    factors = rate_factors(model, run)
    groups = [group for group in groups if group["params"]]  # DeepSpeed flattens no empty one
    return [part for group in groups for part in _by_factor(group, factors, run.learning_rate)]


def _by_factor(
    group: dict[str, Any], factors: Mapping[nn.Parameter, float], learning_rate: float
) -> Groups:
    """Split a group by the factor of its rate, 1 first; each part decays as the whole did."""
    by_factor: dict[float, list[nn.Parameter]] = {1.0: []}
    for p in group["params"]:
        by_factor.setdefault(factors.get(p, 1.0), []).append(p)
    if len(by_factor) == 1:
        return [group]
    scale = group.get("lr_scale", 1.0)
    return [
        {
            **group,
            "params": params,
            "lr": learning_rate * scale * factor,
            "lr_scale": scale * factor,
            "weight_decay": group["weight_decay"] / factor,
        }
        for factor, params in by_factor.items()
        if params
    ]


def optimizer_of(groups: Groups, run: RunConfig) -> torch.optim.Optimizer:
    """The optimizer of --optimizer, with fused kernels where it is torch's."""
    row = OPTIMIZERS[run.optimizer]
    options: dict[str, Any] = {"lr": run.learning_rate}
    if "beta1" in row.flags:
        options["betas"] = run.beta1, run.beta2
    if row.keeps_block:  # Muon's own values are in its groups
        options |= {key: run.optimizer_values[flag] for key, flag in row.params.items()}
    module, _, name = row.path.rpartition(".")
    if module == "torch.optim":  # fused: it heeds found_inf, by which a step is skipped
        options["fused"] = True
    return getattr(import_module(module), name)(groups, **options)


def trial_optimizer(name: str | None, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Build a torch optimizer with `params` on two small groups and take a step.

    Raises what torch raises for its parameters. If DeepSpeed would compile the optimizer, or there
    is none, returns AdamW, whose groups suit schedulers too.
    """
    options = {key: value for key, value in params.items() if key != "torch_adam"}
    if name in ADAM_TYPES:
        is_torch = params.get("torch_adam") is True
        decoupled = options.pop("adam_w_mode", True) or name == "AdamW"
        options.pop("fp32_optimizer_states", None)
        optimizer_class: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
    else:
        is_torch = name in IN_TORCH
        optimizer_class = getattr(torch.optim, name or "", None)
    weights = [torch.zeros((2, 2), requires_grad=True), torch.zeros(2, requires_grad=True)]
    groups = [{"params": [weight]} for weight in weights]
    if not is_torch:
        return torch.optim.AdamW(groups)
    optimizer = optimizer_class(groups, **options)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    if not options.get("capturable"):  # requires a GPU
        optimizer.step()
    return optimizer


class HasState(Protocol):
    """A backend."""

    def state(self) -> ZeroState:
        """This rank's fp32 weights and moments."""
        ...


class WeightAverage:
    """average = decay x average + (1 - decay) x weights after every step; starts at the weights.

    After n steps the decay is at most (1 + n) / (10 + n), so that the random start is forgotten.
    """

    def __init__(self, backend: HasState, decay: float) -> None:
        self._backend, self._decay = backend, decay
        trained = [f.owner for f in backend.state().fragments if not f.is_frozen]
        self._owners = [*{id(owner): owner for owner in trained}.values()]
        self._values = [owner.detach().clone() for owner in self._owners]

    @property
    def values(self) -> Mapping[int, Tensor]:
        """The average by the id of the tensor it is the average of."""
        return {id(owner): v for owner, v in zip(self._owners, self._values, strict=True)}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after `step`, counted from 0, into the average."""
        decay = min(self._decay, (1 + step) / (10 + step))
        multi_tensor._foreach_lerp_(self._values, self._owners, 1 - decay)

    def state(self) -> ZeroState:
        """The backend's state with the average."""
        return replace(self._backend.state(), averages=self.values)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the model compute with the average inside the block (collective).

        An exception ends the run and leaves the average in force: swapping back would wait for
        ranks that are gone.
        """
        self._swap()
        yield
        self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        state = self._backend.state()
        with lost_peers():
            state.prepare()
        for owner, value in zip(self._owners, self._values, strict=True):
            weights = owner.detach().clone()
            owner.copy_(value)
            value.copy_(weights)
        with lost_peers():
            state.refresh()
