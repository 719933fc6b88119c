"""The MiniMind decoder: the whole model, its initialisation and its Hugging Face face.

Shape letters: B rows, T positions, S keys (cached ones included), D channels per head, E model
width, V vocabulary.
"""

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization

from minimind.model.attention_mask import document_starts, own_positions, visible_in_layers
from minimind.model.bf16_matmul import Linear
from minimind.model.caches import cached
from minimind.model.configuration import MiniMindConfig
from minimind.model.experts import MiniMindOutput, Routing, over_layers
from minimind.model.layers import Block, ResidualOutput, RMSNorm
from minimind.model.loss import IGNORED, next_token_loss
from minimind.model.rotary import build_pos_cis, cos_sin


class MiniMindModel(nn.Module):
    """Token embedding, blocks and final norm, with the one pos_cis table all blocks share.

    pos_cis is complex64 and no part of the state dict: three numbers of the configuration
    determine it, so a checkpoint cannot disagree with them. pos_reals is it for compiled code.
    """

    pos_cis: Tensor
    pos_reals: Tensor

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("pos_cis", self.build_pos_cis(), persistent=False)
        self.register_buffer("pos_reals", cos_sin(self.pos_cis), persistent=False)

    def build_pos_cis(self) -> Tensor:
        """A fresh complex64 (max_position_embeddings, D/2) table on the default device."""
        config = self.config
        return build_pos_cis(config.head_dim, config.max_position_embeddings, config.rope_theta)

    def _apply(self, fn: Any, recurse: bool = True) -> "MiniMindModel":
        """Rebuild pos_cis wherever the module moves: .to(bfloat16) would drop its imaginary part,
        and .to_empty() would leave it uninitialised.
        """

        def move(tensor: Tensor) -> Tensor:
            if not tensor.is_complex():
                return fn(tensor)
            device = fn(torch.empty(0, device=tensor.device)).device
            return self.build_pos_cis().to(device)

        super()._apply(move, recurse)
        self.pos_reals = cos_sin(self.pos_cis)  # not rounded to what was asked of the weights
        return self

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Routing | None]:
        """Final hidden states (B, T, E), and while experts train how tokens were routed.

        The arguments are those of MiniMindForCausalLM.
        """
        rows, length = input_ids.shape
        past, keys = (0, length) if cache is None else cached(cache, length)
        if attention_mask is not None and attention_mask.shape != (rows, past + length):
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} must be"
                f" {(rows, past + length)}: one entry per position, cached ones included."
            )
        border = self.config.eos_token_id if self.config.doc_mask and cache is None else None
        starts_BT = None if border is None else document_starts(input_ids, attention_mask, border)
        is_below = (
            position_ids is None and attention_mask is None
        )  # past + length, and not read back
        if position_ids is None:
            position_ids = own_positions(past, attention_mask, starts_BT)
        end = past + length if is_below or position_ids is None else int(position_ids.max()) + 1
        is_split = torch.compiler.is_compiling() and cache is None  # caches are of eager code too
        turn = self._turn_at(past, end, position_ids, is_split)
        x_BTE = self.embed_tokens(input_ids)
        visible = visible_in_layers(self.config, x_BTE, past, attention_mask, starts_BT, keys)
        routings = []
        for block in self.layers:
            x_BTE, *routing = block(x_BTE, turn, visible, cache)
            routings.append(routing)
        return self.norm(x_BTE), over_layers(routings)

    def _turn_at(self, past: int, end: int, position_ids: Tensor | None, is_split: bool) -> Tensor:
        """(T, D/2) for the positions from past to end, (B, T, D/2) for given ones below end.

        From pos_cis, or from pos_reals, (2, ...), where channels are split.
        """
        if end > len(self.pos_cis):
            raise ValueError(
                f"position {end - 1} is beyond max_position_embeddings={len(self.pos_cis)}:"
                " shorten the input or raise max_position_embeddings."
            )
        chosen = slice(past, end) if position_ids is None else position_ids
        return self.pos_reals[:, chosen] if is_split else self.pos_cis[chosen]


class MiniMindForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with its output projection, trainable by our loop and by Hugging Face tools."""

    config_class = MiniMindConfig
    config: MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = {"Block"}  # noqa: RUF012 (declared mutable by the base class)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (likewise)
    # DDP broadcasts buffers, and NCCL refuses complex numbers (gloo does not).
    _ddp_params_and_buffers_to_ignore: ClassVar[list[str]] = ["model.pos_cis", "model.pos_reals"]

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Fill what the module itself owns: matrices from a normal of 0.02, norms with 1.

        2 * n_layers branches add up in the residual stream, so the projections that end one are
        divided by the root of that (GPT-2, Radford et al. 2019, section 2.3). `initialization`
        skips what a checkpoint has filled. That is never pos_cis, so from_pretrained, which
        builds on the meta device, gets its values here. transformers passes over modules that own
        no tensor, such as Attention: what they hold cannot be drawn from there.
        """
        std = 0.02
        if isinstance(module, ResidualOutput):
            branches = 2 * self.config.num_hidden_layers
            initialization.normal_(module.weight, std=std / branches**0.5)
        elif isinstance(module, nn.Linear | nn.Embedding):
            initialization.normal_(module.weight, std=std)
        elif isinstance(module, RMSNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, MiniMindModel):
            initialization.copy_(module.pos_cis, module.build_pos_cis())
            initialization.copy_(module.pos_reals, cos_sin(module.build_pos_cis()))

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None, **_: Any) -> Tensor | None:
        """The mask as it is; generate() would give it four dimensions for a cache of fixed size."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        summed_by: int | None = None,
        **kwargs: Any,
    ) -> MiniMindOutput:
        """Logits (B, T, V), or (B, logits_to_keep, V) for the last positions when that is not 0.

        attention_mask (B, S) is 0 at padding, which may stand on the left; without position_ids,
        positions count the others. shift_labels (B, T) are targets already shifted; labels (B, T)
        are input_ids, shifted here. Targets of -100 are ignored, and the loss is the mean over the
        rest (0 where none is left), or their sum over num_items_in_batch, which Trainer counts over
        all micro-batches of a step. While experts train their aux_loss is in it, and given by
        itself to who has no targets here. While gradients are checkpointed nothing is cached.
        Other keywords, which Hugging Face's tools pass, are ignored.

        summed_by gives loss_sum and targets of shift_labels in the place of loss and logits: from
        the logits of all positions when it is 0, of so many at a time when not.
        """
        recomputes = self.training and any(
            block.gradient_checkpointing for block in self.model.layers
        )
        if recomputes and past_key_values is not None:
            raise ValueError(
                "past_key_values cannot be used while gradients are checkpointed, for the backward"
                " pass would fill them twice: call eval(), or leave them out."
            )
        if use_cache and past_key_values is None and not recomputes:
            past_key_values = DynamicCache(config=self.config)
        x_BTE, routing = self.model(input_ids, attention_mask, position_ids, past_key_values)
        if summed_by is not None:
            assert shift_labels is not None
            loss_sum, targets = self._summed_loss(x_BTE, shift_labels, summed_by)
            return MiniMindOutput(loss_sum=loss_sum, targets=targets, **_routed(routing))
        logits = self.lm_head(x_BTE[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            if shift_labels is not None:
                raise ValueError("labels and shift_labels were both given: give one of them.")
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if shift_labels is not None:
            loss_sum, count = next_token_loss(logits, shift_labels)
            items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            aux_loss = 0 if routing is None else routing.aux_loss * count  # by its share of items
            loss = (loss_sum + aux_loss) / items
        return MiniMindOutput(loss, logits, past_key_values, **_routed(routing))

    def _summed_loss(
        self, x_BTE: Tensor, targets_BT: Tensor, positions: int
    ) -> tuple[Tensor, Tensor]:
        """loss_sum and targets, from the logits of so many positions at a time; 0: of all.

        In parts, logits are made once more in the backward pass and never held: at a vocabulary of
        V, 2 V bytes or more a token for E V multiplications.
        """
        if not positions:
            return next_token_loss(self.lm_head(x_BTE), targets_BT)

        def sums_of(x_NE: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
            return next_token_loss(self.lm_head(x_NE), targets_N)

        parts = zip(
            x_BTE.flatten(0, 1).split(positions), targets_BT.flatten().split(positions), strict=True
        )
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # draws nothing
        found = [again(sums_of, *part) for part in parts]
        loss_sum, targets = (torch.stack(sums).sum() for sums in zip(*found, strict=True))
        return loss_sum, targets


def _routed(routing: Routing | None) -> dict[str, Any]:
    """What the output has of a mixture of experts."""
    return {} if routing is None else {"aux_loss": routing.aux_loss, "expert_load": routing.load}
