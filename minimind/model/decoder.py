"""The MiniMind decoder: model, initialization, loss as sum and count, interface of transformers.

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
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from minimind.model.activation_checkpointing import is_traced
from minimind.model.attention import (
    SequenceGroup,
    cache_sizes,
    document_positions,
    eos_starts,
    make_attention_mask,
)
from minimind.model.configuration import MiniMindConfig
from minimind.model.experts import MiniMindModelOutput, MiniMindOutput, combine_routings
from minimind.model.layers import Attention, Block, ResidualOutput, RMSNorm
from minimind.model.rotary import Rotary, build_pos_cis, pos_cis_as_reals
from minimind.runtime.device import device_kind

IGNORED = -100  # target without loss, as in transformers


def next_token_loss(
    logits: Tensor, targets: Tensor, ignore_index: int = IGNORED, by_row: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy in nats (fp32 scalar) and the number of targets (int64).

    With `by_row` both are (B,), of each row.

    logits (B, T, V) at position t predict targets (B, T) at position t, already shifted. A sum, not
    a mean: a mean of means is wrong if counts differ, and only the caller knows over which
    micro-batches and ranks to divide. If all targets are ignored, sum and gradients are 0.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} do not fit"
            f" logits of shape {tuple(logits.shape)}: each position needs one target."
        )
    loss = F.cross_entropy(
        logits.float().flatten(0, -2),
        targets.flatten(),
        ignore_index=ignore_index,
        reduction="none" if by_row else "sum",
    )
    if by_row:
        return loss.view_as(targets).sum(-1), (targets != ignore_index).sum(-1)
    return loss, (targets != ignore_index).sum()


def mean_with_nan_grads(loss_sum: Tensor, count: Tensor, also: Tensor | None = None) -> Tensor:
    """Return loss_sum / count, with NaN gradients if loss_sum or `also` is not finite.

    An infinite loss can have zero gradients, which would go unnoticed. This way the reduced
    gradient shows the fault on every rank, and nothing is read back to the host.
    """
    values = [value.detach() for value in (loss_sum, also) if value is not None]
    return loss_sum / sum((value - value for value in values), start=count)  # adds 0 or NaN


logger: Any = logging.get_logger(__name__)


class MiniMindPreTrainedModel(PreTrainedModel):
    """What transformers asks of every model with this configuration."""

    config_class = MiniMindConfig
    config: MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": Block, "attentions": Attention}  # noqa: RUF012 (declared mutable by the base class)
    _no_split_modules = {"Block"}  # noqa: RUF012 (likewise)
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012 (as above; both names)
    # DDP broadcasts buffers, and NCCL refuses complex numbers (gloo does not).
    _ddp_params_and_buffers_to_ignore: ClassVar[list[str]] = ["model.pos_cis", "model.pos_reals"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the tensors of a module: matrices normal with std 0.02, norms 1, biases 0.

        The residual stream sums 2 * n_layers branches, so their output projections are scaled by
        the inverse root of that (GPT-2, Radford et al. 2019, section 2.3). `initialization` skips
        tensors loaded from a checkpoint. pos_cis never is, so from_pretrained, which builds on the
        meta device, fills it here. transformers skips modules without tensors, such as Attention.
        """
        std = 0.02
        if isinstance(module, ResidualOutput):
            branches = 2 * self.config.num_hidden_layers
            initialization.normal_(module.weight, std=std / branches**0.5)
        elif isinstance(module, nn.Linear | nn.Embedding):
            initialization.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, MiniMindModel):
            initialization.copy_(module.pos_cis, module.build_pos_cis())
            initialization.copy_(module.pos_reals, pos_cis_as_reals(module.build_pos_cis()))


class MiniMindModel(MiniMindPreTrainedModel):
    """Token embedding, blocks and final norm, with the pos_cis table that all blocks share.

    pos_cis is complex64 and not in the state dict: the configuration determines it. pos_reals
    holds the same values for compiled code.
    """

    pos_cis: Tensor
    pos_reals: Tensor
    _ddp_params_and_buffers_to_ignore: ClassVar[list[str]] = ["pos_cis", "pos_reals"]

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, n) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("pos_cis", self.build_pos_cis(), persistent=False)
        self.register_buffer("pos_reals", pos_cis_as_reals(self.pos_cis), persistent=False)
        self.post_init()

    def build_pos_cis(self) -> Tensor:
        """Build the complex64 table (max_position_embeddings, D/2) on the default device."""
        config = self.config
        return build_pos_cis(
            config.head_dim, config.max_position_embeddings, config.rope_theta, config.rope_scaling
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "MiniMindModel":
        """Rebuild pos_cis when the module moves: .to(bfloat16) would drop its imaginary part, and
        .to_empty() would leave it uninitialized. It stays on the CPU where there are no complex
        operators.
        """

        def move(tensor: Tensor) -> Tensor:
            if not tensor.is_complex():
                return fn(tensor)
            device = fn(torch.empty(0, device=tensor.device)).device
            return self.build_pos_cis().to(device if device_kind(device).has_complex else "cpu")

        super()._apply(move, recurse)
        reals = pos_cis_as_reals(self.pos_cis)  # not rounded to the dtype of the weights
        self.pos_reals = reals.to(self.pos_reals.device)
        return self

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        document_starts: Tensor | None = None,
        sequence: SequenceGroup | None = None,
        cache: Cache | None = None,
    ) -> MiniMindModelOutput:
        """Return final hidden states (B, T, E), and the routing of experts while training.

        input_ids (B, T) or inputs_embeds (B, T, E) are given. attention_mask (B, S) is 0 at
        padding, which may be on the left; positions skip padding unless position_ids are given.
        Of four dimensions, (B, 1, T, S), it is complete: boolean, or added to scores. Keys are
        cached if use_cache is True, by default where the configuration says so, in evaluation and
        without doc_mask; never while gradients are checkpointed. `cache` is what transformers calls
        past_key_values since 5.24; give it by one of the names. document_starts (B, T) is True
        where attention and positions restart, whatever doc_mask is; embeddings alone do not show
        documents. With `sequence` the result is of this rank's positions.

        capture_outputs collects what output_attentions and output_hidden_states ask for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give one of input_ids and inputs_embeds, and not both.")
        if output_attentions and self.config.is_fused:
            logger.warning_once(
                "output_attentions=True gives no attentions, as fused kernels return no weights:"
                " give attn_implementation='eager' to from_pretrained, or call"
                " set_attn_implementation('eager')."
            )
        if cache is None:
            cache = past_key_values
        elif past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one argument: give one.")
        recomputes = self.training and any(
            getattr(block, "gradient_checkpointing", False) for block in self.layers
        )
        if recomputes and cache is not None:
            raise ValueError(
                "a cache cannot be used while gradients are checkpointed: the backward pass would"
                " fill it twice; call eval(), or leave it out."
            )
        if use_cache is None:
            use_cache = self.config.use_cache and not (self.training or self.config.doc_mask)
        if use_cache and cache is None and not recomputes:
            cache = DynamicCache(config=self.config)
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        rows, length = given.shape[:2]
        past, keys = (0, length) if cache is None else cache_sizes(cache, length)
        padding_BS = None if attention_mask is None or attention_mask.ndim == 4 else attention_mask
        if padding_BS is not None and not is_traced() and padding_BS.shape != (rows, past + length):
            raise ValueError(
                f"attention_mask of shape {tuple(padding_BS.shape)} must be"
                f" {(rows, past + length)}: one entry per position, cached ones included."
            )
        starts_BT = document_starts
        if starts_BT is None and self.config.doc_mask and cache is None and input_ids is not None:
            assert self.config.eos_token_id is not None
            starts_BT = eos_starts(input_ids, padding_BS, self.config.eos_token_id)
        # Then positions are below past + length, and their maximum need not be read back.
        is_bounded = position_ids is None and padding_BS is None
        if position_ids is None:
            position_ids = document_positions(past, padding_BS, starts_BT)
        if is_traced():  # for any length, so that there is nothing to check
            if position_ids is None:
                position_ids = torch.arange(length, device=given.device) + past
            rotary = self._rotary_at(position_ids)
        else:
            end = past + length
            if position_ids is not None and not is_bounded:
                end = int(position_ids.max()) + 1
            if end > len(self.pos_cis):
                raise ValueError(
                    f"position {end - 1} is beyond max_position_embeddings={len(self.pos_cis)}:"
                    " shorten the input or raise max_position_embeddings."
                )
            rotary = self._rotary_at(slice(past, end) if position_ids is None else position_ids)
        if sequence is not None:
            assert input_ids is not None
            input_ids = sequence.part(input_ids, 1)
            cis, reals = rotary
            rotary = Rotary(
                None if cis is None else sequence.part(cis, -2), sequence.part(reals, -2)
            )
        x_BTE = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = make_attention_mask(
            self.config, x_BTE, past, attention_mask, starts_BT, keys, length
        )
        routings = []
        for block in self.layers:
            x_BTE, *routing = block(x_BTE, rotary, mask, cache, sequence)
            routings.append(routing)
        out = MiniMindModelOutput(self.norm(x_BTE), cache)
        if (routing := combine_routings(routings)) is not None:
            out["aux_loss"], out["expert_load"] = routing
        return out

    def _rotary_at(self, index: Tensor | slice) -> Rotary:
        """Rotation at the positions `index`."""
        reals = self.pos_reals[:, index]
        return Rotary(self.pos_cis[index] if self.pos_cis.device == reals.device else None, reals)


class MiniMindForCausalLM(MiniMindPreTrainedModel, GenerationMixin):
    """The decoder with its output projection, trainable by our loop and by transformers."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (declared mutable by the base class)

    def __init__(self, config: MiniMindConfig):
        super().__init__(config)
        # Before the model draws its weights, so that a seed gives what it gave before.
        lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.model = MiniMindModel(config)
        self.lm_head = lm_head
        self.sequence: SequenceGroup | None = None  # ranks that divide the positions of a loss
        self.post_init()

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """Methods of modules that --compile compiles, each by itself.

        The blocks share their code. Gradients of a block are complete, and can be reduced, when its
        own backward pass ends.
        """
        blocks: Any = self.model.layers
        of_blocks = [method for block in blocks for method in block.compiled_methods()]
        return [*of_blocks, (self.model.norm, "forward"), (self, "_chunked_loss")]

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        loss_chunk_size: int | None = None,
        loss_by_row: bool = False,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MiniMindOutput:
        """Return logits (B, T, V), or those of the positions logits_to_keep: the last ones, if not
        0, or those of a tensor of indices.

        labels (B, T) are input_ids, shifted here; the keyword shift_labels (B, T) gives shifted
        targets instead. Targets of -100 are ignored. The loss is the mean over the others (0 if
        there are none), or their sum divided by num_items_in_batch, which Trainer counts over all
        micro-batches of a step. With experts in training it includes aux_loss, which is also
        returned. The other arguments are those of MiniMindModel.

        With loss_chunk_size, return loss_sum and targets of shift_labels (of this rank's positions
        with `sequence`) instead of loss and logits: all logits at once if 0, else so many. With
        loss_by_row both are of each row, (B,).
        """
        # Not a parameter: transformers' Trainer waits for every parameter that is named a label.
        shift_labels = kwargs.pop("shift_labels", None)
        if loss_chunk_size is not None:
            use_cache, kwargs["sequence"] = False, self.sequence
        out = self.model(
            *(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache),
            return_dict=True,
            cache=cache,
            **kwargs,
        )
        shared = {name: out[name] for name in out if name != "last_hidden_state"}
        x_BTE = out.last_hidden_state
        if loss_chunk_size is not None:
            assert shift_labels is not None
            own_BT = shift_labels if self.sequence is None else self.sequence.part(shift_labels, 1)
            loss_sum, targets = self._chunked_loss(x_BTE, own_BT, loss_chunk_size, loss_by_row)
            return MiniMindOutput(loss_sum=loss_sum, targets=targets, **shared)
        last = logits_to_keep
        kept = last if isinstance(last, Tensor) else slice(-last, None)  # all if 0
        logits = self.lm_head(x_BTE[:, kept])
        loss = None
        if labels is not None and shift_labels is None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        if shift_labels is not None:
            loss_sum, count = next_token_loss(logits, shift_labels)
            items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            aux_loss = 0 if out.aux_loss is None else out.aux_loss * count  # as a share of items
            loss = (loss_sum + aux_loss) / items
        return MiniMindOutput(loss=loss, logits=logits, **shared)

    def _chunked_loss(
        self, x_BTE: Tensor, targets_BT: Tensor, positions: int, by_row: bool
    ) -> tuple[Tensor, Tensor]:
        """Return loss_sum and targets from the logits of `positions` positions at a time; 0: all.

        Chunks are recomputed in the backward pass, so logits are never held: this saves 2 V bytes
        or more per token for E V multiplications.
        """
        if not positions:
            return next_token_loss(self.lm_head(x_BTE), targets_BT, by_row=by_row)

        def chunk_loss(x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return next_token_loss(self.lm_head(x), targets, by_row=by_row)

        if by_row:  # so many positions of all rows together
            positions = max(1, positions // len(targets_BT))
            parts = zip(x_BTE.split(positions, 1), targets_BT.split(positions, 1), strict=True)
        else:
            x_NE, targets_N = x_BTE.flatten(0, 1), targets_BT.flatten()
            parts = zip(x_NE.split(positions), targets_N.split(positions), strict=True)
        recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        sums = [recompute(chunk_loss, *part) for part in parts]
        loss_sum, targets = (torch.stack(values).sum(0) for values in zip(*sums, strict=True))
        return loss_sum, targets


# The heads of transformers are made by AutoModel there, which does not know this code.


class MiniMindForSequenceClassification(GenericForSequenceClassification, MiniMindPreTrainedModel):
    """The decoder with a score of each label, taken at the last token of a row."""

    accepts_loss_kwargs = False  # the loss is a mean, whatever num_items_in_batch Trainer counts

    def __init__(self, config: MiniMindConfig):
        MiniMindPreTrainedModel.__init__(self, config)
        self.num_labels: Any = config.num_labels
        self.model = MiniMindModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class MiniMindForTokenClassification(GenericForTokenClassification, MiniMindPreTrainedModel):
    """The decoder with a score of each label at every token."""

    accepts_loss_kwargs = False

    def __init__(self, config: MiniMindConfig):
        MiniMindPreTrainedModel.__init__(self, config)
        self.num_labels: Any = config.num_labels
        self.model = MiniMindModel(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", None) or 0.1)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


class MiniMindForQuestionAnswering(GenericForQuestionAnswering, MiniMindPreTrainedModel):
    """The decoder with the scores of a span's first and last token."""

    accepts_loss_kwargs = False

    def __init__(self, config: MiniMindConfig):
        MiniMindPreTrainedModel.__init__(self, config)
        self.model = MiniMindModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()
