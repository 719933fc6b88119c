"""Mixture of experts: each token is routed to a few of several feed-forward networks.

A block with experts has more outputs than its hidden states, in training: the routing.

Shape letters: B rows, T positions, N = B T tokens, X routed experts, C experts per token,
S = N C visits, E model width, L layers.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import Block, FeedForward
from minimind.model.dropout import Dropout


class Routing(NamedTuple):
    """Routing of tokens to experts in training: the balance loss and the load."""

    aux_loss: Tensor  # fp32 scalar with aux_loss_alpha, added to the cross-entropy
    load: Tensor  # fp32 (X,), or (L, X) over layers: share of visits, 1 / X if balanced


class MixtureOfExperts(nn.Module):
    """Shared experts for every token, and C routed experts per token, chosen by softmax.

    As in MiniMind2, after DeepSeekMoE (Dai et al. 2024, section 3). There is no capacity limit and
    no token is dropped. Every expert runs in every forward pass, even on no token: its weights then
    get zero gradients, so that DDP and ZeRO ranks run the same collectives in the same order. On a
    GPU the group sizes are read back once per layer; nothing else waits for the device.
    """

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.per_token = config.num_experts_per_tok
        self.alpha = config.aux_loss_alpha
        # A single normalized weight would always be 1, and the gate would learn nothing.
        self.is_normed = config.norm_topk_prob and self.per_token > 1
        self.gate = nn.Linear(config.hidden_size, config.n_routed_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.n_routed_experts))
        self.shared_experts = nn.ModuleList(
            FeedForward(config) for _ in range(config.n_shared_experts)
        )

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """All but the routed experts, whose shapes differ in every batch."""
        return [(self, "_route"), (self, "_combine")]

    def forward(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """Output (B, T, E), followed by the fields of Routing in training."""
        weights_BTC, experts_BTC, sizes_X, *routing = self._route(x_BTE)
        sizes = sizes_X.tolist()  # needed on the host: shapes depend on it
        y_BTCE = self._run_experts(x_BTE, experts_BTC, sizes)
        return self._combine(x_BTE, weights_BTC, y_BTCE), *routing

    def _route(self, x_BTE: Tensor) -> tuple[Tensor, ...]:
        """Weights and experts (B, T, C), visits of each expert (X,), and Routing in training."""
        scores_BTX = self.gate(x_BTE).softmax(-1, dtype=torch.float32)
        weights_BTC, experts_BTC = scores_BTX.topk(self.per_token, dim=-1)
        if self.is_normed:
            weights_BTC = weights_BTC / weights_BTC.sum(-1, keepdim=True)
        is_chosen_BTX = torch.zeros_like(scores_BTX, dtype=torch.bool).scatter(
            -1, experts_BTC, True
        )
        routing = self._balance_loss(scores_BTX, is_chosen_BTX) if self.training else ()
        return weights_BTC.type_as(x_BTE), experts_BTC, is_chosen_BTX.sum((0, 1)), *routing

    def _combine(self, x_BTE: Tensor, weights_BTC: Tensor, y_BTCE: Tensor) -> Tensor:
        """Weighted sum (B, T, E) of the chosen experts, plus the shared ones."""
        out_BTE = (weights_BTC.unsqueeze(-2) @ y_BTCE).squeeze(-2).type_as(x_BTE)
        for expert in self.shared_experts:
            out_BTE = out_BTE + expert(x_BTE)
        return out_BTE

    def _run_experts(self, x_BTE: Tensor, experts_BTC: Tensor, sizes: list[int]) -> Tensor:
        """Outputs (B, T, C, E) of each token's experts; sizes are the visits of each expert.

        Visits are sorted by expert and restored. Both are permutations, whose gradients are
        deterministic: repeated indices would be summed in any order.
        """
        order_S = experts_BTC.flatten().argsort(stable=True)
        x_BTCE = x_BTE.unsqueeze(-2).expand(*experts_BTC.shape, -1)
        groups = x_BTCE.flatten(0, -2).index_select(0, order_S).split(sizes)
        y_SE = torch.cat(
            [expert(group) for expert, group in zip(self.experts, groups, strict=True)]
        )
        return y_SE.index_select(0, order_S.argsort()).view(x_BTCE.shape)

    def _balance_loss(self, scores_BTX: Tensor, is_chosen_BTX: Tensor) -> Routing:
        """Balance loss of Switch Transformers (Fedus et al. 2022, section 2.2), per row.

        alpha X sum(f P), with f the share of a row's visits to an expert and P its mean score;
        alpha if both are uniform. Their default of 0.01 balances fast without disturbing training;
        MiniMind has used 0.01 and 0.1. It is averaged over rows (seq_aux, after DeepSeek-V2), so
        the mean over micro-batches and ranks does not depend on how rows are split. Padding counts
        like other tokens.
        """
        share_BX = is_chosen_BTX.float().mean(1) / self.per_token
        balance_B = scores_BTX.shape[-1] * (share_BX * scores_BTX.mean(1)).sum(-1)
        return Routing(self.alpha * balance_B.mean(), share_BX.mean(0))


class ExpertBlock(GradientCheckpointingLayer, Block):
    """A block with a mixture of experts."""

    feed_forward = MixtureOfExperts

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (Decoder takes both)
        self, x_BTE: Tensor, *context: Any, dropout: Dropout | None = None
    ) -> tuple[Tensor, ...]:
        """Output (B, T, E), followed by the fields of Routing in training.

        Returned, so that the gradient passes through what wraps a block (FSDP, checkpointing).
        Flat, because reentrant checkpointing finds no gradient in a nested tuple.
        """
        x_BTE, normed_BTE = self._attend(x_BTE, *context, dropout=dropout)
        y_BTE, *routing = self.mlp(normed_BTE)
        return x_BTE + (y_BTE if dropout is None else dropout(y_BTE, 1)), *routing

    def _attend(
        self, x_BTE: Tensor, *context: Any, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        """Add the attention; return the residual stream and the input of the feed-forward."""
        y_BTE = self.self_attn(self.input_layernorm(x_BTE), *context)
        x_BTE = x_BTE + (y_BTE if dropout is None else dropout(y_BTE, 0))
        return x_BTE, self.post_attention_layernorm(x_BTE)

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """Methods that --compile compiles: all, except for the routed experts."""
        experts: Any = self.mlp
        return [(self, "_attend"), *experts.compiled_methods()]


def combine_routings(routings: Iterable[Sequence[Tensor]]) -> Routing | None:
    """Sum the losses of all layers and stack their loads (L, X); None: of no routing."""
    layers = [Routing(*routing) for routing in routings if routing]
    if not layers:
        return None
    aux_loss = torch.stack([routing.aux_loss for routing in layers]).sum()
    return Routing(aux_loss, torch.stack([routing.load for routing in layers]))
