"""Mixture of experts: several feed-forwards in the place of one, of which each token visits a few.

Shape letters: B rows, T positions, N = B T tokens, X routed experts, C experts chosen by a token,
S = N C visits, E model width, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from minimind.model.bf16_matmul import Linear, widened
from minimind.model.configuration import MiniMindConfig


class Routing(NamedTuple):
    """How tokens chose among experts while training: a loss that asks for balance, and the load."""

    aux_loss: Tensor  # fp32 scalar, times aux_loss_alpha: what training adds to the cross-entropy
    load: Tensor  # fp32 (X,), or (L, X) of several layers: share of the visits, 1 / X if balanced


@dataclass
class MiniMindOutput(CausalLMOutputWithPast):
    """What the decoder returns; aux_loss and expert_load while a mixture of experts trains.

    loss_sum and targets are there for who asks for sums, in the place of loss and logits.
    """

    aux_loss: Tensor | None = None
    expert_load: Tensor | None = None
    loss_sum: Tensor | None = None  # fp32 scalar, cross-entropy in nats
    targets: Tensor | None = None  # int64 scalar, how many it sums


class MixtureOfExperts(nn.Module):
    """Shared experts, which every token visits, and routed ones, of which it chooses C by softmax.

    As MiniMind2 has it, after DeepSeekMoE (Dai et al. 2024, section 3). Nobody is turned away:
    there is no capacity, so the result is what computing every expert for every token and weighing
    by the gate would give. Every expert runs in every forward pass, be it on no token at all: its
    weights then get gradients of 0, so that no rank of DDP or ZeRO waits for them, and ranks meet
    in the same order. On a GPU the sizes of the groups are read back once per layer; nothing else
    waits for the device.
    """

    def __init__(self, config: MiniMindConfig, make_expert: Callable[[], nn.Module]):
        super().__init__()
        self.per_token = config.num_experts_per_tok
        self.alpha = config.aux_loss_alpha
        # The weight of a single choice would be 1, whatever the gate: it would learn nothing.
        self.is_normed = config.norm_topk_prob and self.per_token > 1
        self.gate = Linear(config.hidden_size, config.n_routed_experts)
        self.experts = nn.ModuleList(make_expert() for _ in range(config.n_routed_experts))
        self.shared_experts = nn.ModuleList(make_expert() for _ in range(config.n_shared_experts))

    def forward(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """(B, T, E), and while training what Routing has: flat, as `Block` hands it on."""
        scores_BTX = self.gate(x_BTE).softmax(-1, dtype=torch.float32)
        weights_BTC, chosen_BTC = scores_BTX.topk(self.per_token, dim=-1)
        if self.is_normed:
            weights_BTC = weights_BTC / weights_BTC.sum(-1, keepdim=True)
        is_chosen_BTX = torch.zeros_like(scores_BTX, dtype=torch.bool).scatter(-1, chosen_BTC, True)
        sizes = is_chosen_BTX.sum((0, 1)).tolist()  # shapes follow from it: the host has to know
        y_BTCE = self._visited(x_BTE, chosen_BTC, sizes)
        weights_BTC, y_BTCE = widened(weights_BTC.type_as(x_BTE), y_BTCE)
        out_BTE = (weights_BTC.unsqueeze(-2) @ y_BTCE).squeeze(-2).type_as(x_BTE)
        for expert in self.shared_experts:
            out_BTE = out_BTE + expert(x_BTE)
        if not self.training:
            return (out_BTE,)
        return out_BTE, *self._balance(scores_BTX, is_chosen_BTX)

    def _visited(self, x_BTE: Tensor, chosen_BTC: Tensor, sizes: list[int]) -> Tensor:
        """(B, T, C, E): what each chosen expert makes of a token; sizes are their visits.

        Visits are sorted by expert and put back. Both are permutations, whose gradients are summed
        in one order only: an index that repeats would be added up in any.
        """
        order_S = chosen_BTC.flatten().argsort(stable=True)
        x_BTCE = x_BTE.unsqueeze(-2).expand(*chosen_BTC.shape, -1)
        groups = x_BTCE.flatten(0, -2).index_select(0, order_S).split(sizes)
        y_SE = torch.cat([e(group) for e, group in zip(self.experts, groups, strict=True)])
        return y_SE.index_select(0, order_S.argsort()).view(x_BTCE.shape)

    def _balance(self, scores_BTX: Tensor, is_chosen_BTX: Tensor) -> Routing:
        """The loss of Switch Transformers (Fedus et al. 2022, section 2.2), row by row.

        alpha X sum(f P): f, the share of a row's visits that an expert got, and P, its mean score;
        alpha where both are uniform. The default of 0.01 is the one that they found to balance fast
        and not to disturb; MiniMind has had 0.01 and 0.1. By row (its seq_aux, after DeepSeek-V2)
        and averaged over rows, so that its mean over micro-batches and ranks is the mean over all
        rows of a step, however these were split up. Padding counts as any other token.
        """
        share_BX = is_chosen_BTX.float().mean(1) / self.per_token
        balance_B = scores_BTX.shape[-1] * (share_BX * scores_BTX.mean(1)).sum(-1)
        return Routing(self.alpha * balance_B.mean(), share_BX.mean(0))


def over_layers(routings: Sequence[Sequence[Tensor]]) -> Routing | None:
    """The losses of all layers added up, and their loads (L, X); None where none has any."""
    found = [Routing(*routing) for routing in routings if routing]
    if not found:
        return None
    aux_loss = torch.stack([routing.aux_loss for routing in found]).sum()
    return Routing(aux_loss, torch.stack([routing.load for routing in found]))
