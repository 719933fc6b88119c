"""The decoder with the interface of transformers: checks, caches, masks, outputs, labels, heads.

Shape letters: B rows, T positions, S keys (cached ones included), E model width, V vocabulary,
L layers, X experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import Block, Decoder, PlainAttention, draw_weights
from minimind.model.dropout import dropout_of
from minimind.model.experts import ExpertBlock, combine_routings
from minimind.model.kernels import is_traced
from minimind.model.loss import IGNORED, chunked_loss, next_token_loss, own_sum
from minimind.model.masks import cache_sizes, document_positions, eos_starts, make_attention_mask
from minimind.model.rotary import Rotary, pos_cis_as_reals
from minimind.model.sequence import SequenceGroup

logger: Any = logging.get_logger(__name__)


@dataclass
class MiniMindModelOutput(BaseModelOutputWithPast):
    """Output without the output projection; aux_loss and expert_load as in MiniMindOutput."""

    aux_loss: Tensor | None = None
    expert_load: Tensor | None = None


@dataclass
class MiniMindOutput(CausalLMOutputWithPast):
    """Output of the decoder; aux_loss and expert_load while a mixture of experts trains.

    With loss_chunk_size, loss_sum and targets replace loss and logits.
    """

    aux_loss: Tensor | None = None
    expert_load: Tensor | None = None
    loss_sum: Tensor | None = None  # fp32 scalar, cross-entropy in nats
    targets: Tensor | None = None  # int64 scalar, number of targets in the sum


class DenseBlock(GradientCheckpointingLayer, Block):
    """A block of which transformers saves only the input for the backward pass, if asked to."""

    def compiled_methods(self) -> list[tuple[nn.Module, str]]:
        """Methods that --compile compiles."""
        return [(self, "forward")]


class MiniMindPreTrainedModel(PreTrainedModel):
    """What transformers asks of every model with this configuration."""

    config_class = MiniMindConfig
    config: MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": Block, "attentions": OutputRecorder(PlainAttention, 1)}  # noqa: RUF012 (declared mutable by the base class)
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012 (as above; both names)
    # DDP broadcasts buffers, and NCCL refuses complex numbers (gloo does not).
    _ddp_params_and_buffers_to_ignore: ClassVar[list[str]] = ["model.pos_cis", "model.pos_reals"]

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the tensors of a module that are not loaded from a checkpoint.

        pos_cis never is, so from_pretrained, which builds on the meta device, fills it here.
        transformers skips modules without tensors, such as Attention.
        """
        draw_weights(module, self.config.num_hidden_layers)
        if isinstance(module, MiniMindModel):
            initialization.copy_(module.pos_cis, module.build_pos_cis())
            initialization.copy_(module.pos_reals, pos_cis_as_reals(module.build_pos_cis()))


class MiniMindModel(Decoder, MiniMindPreTrainedModel):
    """The decoder with what transformers passes: padding, positions, documents and caches."""

    _ddp_params_and_buffers_to_ignore: ClassVar[list[str]] = ["pos_cis", "pos_reals"]

    def __init__(self, config: MiniMindConfig):
        MiniMindPreTrainedModel.__init__(self, config)
        Decoder.__init__(self, config)
        # Not a constant of the class: FSDP of Accelerate raises for a class that no module has.
        self._no_split_modules = {type(block).__name__ for block in self.layers}
        self.post_init()

    def make_block(self, layer: int) -> nn.Module:
        """The block of a layer, from 0."""
        return (ExpertBlock if self.config.use_moe else DenseBlock)(self.config, layer)

    @capture_outputs
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the interface of transformers)
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
        dropout: float = 0.0,
        dropout_keys: Tensor | None = None,
    ) -> MiniMindModelOutput:
        """Return final hidden states (B, T, E), and the routing of experts while training.

        input_ids (B, T) or inputs_embeds (B, T, E) are given. attention_mask (B, S) is 0 at
        padding, which may be on the left; positions skip padding unless position_ids are given.
        Of four dimensions, (B, 1, T, S), it is complete: boolean, or added to scores. Keys are
        cached if use_cache is True, by default where the configuration says so, in evaluation and
        without doc_mask; never while gradients are checkpointed. `cache` is what transformers calls
        past_key_values since 5.24; give it by one of the names. document_starts (B, T) is True
        where attention and positions restart, whatever doc_mask is; embeddings alone do not show
        documents. With `sequence` the result is of this rank's positions. `dropout` is a share
        of elements, and dropout_keys (B,) those of `row_keys`; without them nothing is dropped.

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
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        rows, length = given.shape[:2]
        cache = self._cache_of(past_key_values, cache, use_cache)
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
        is_bounded = position_ids is None and padding_BS is None  # below past + length
        if position_ids is None and not (padding_BS is None and starts_BT is None):
            position_ids = document_positions(past, padding_BS, starts_BT)
        if position_ids is None and is_traced():
            position_ids = torch.arange(length, device=given.device) + past
        if not is_traced():  # a graph is for any length, so that there is nothing to check
            end = past + length
            if position_ids is not None and not is_bounded:
                end = int(position_ids.max()) + 1  # read back from the device
            self.require_positions(end)
        at = slice(past, past + length) if position_ids is None else position_ids
        rotary = self.rotary_at(at)
        drops = None
        if dropout_keys is not None:
            sizes = 1 + 2 * len(self.layers), length, self.config.hidden_size
            drops = dropout_of(dropout_keys, dropout, *sizes)
        if sequence is not None:
            given = sequence.part(given, 1)
            cis = None if rotary.cis is None else sequence.part(rotary.cis, -2)
            rotary = Rotary(cis, sequence.part(rotary.reals, -2))
            if drops is not None:
                drops = drops._replace(keys=sequence.part(drops.keys, -1))
        x_BTE = self.embed_tokens(given) if inputs_embeds is None else given
        mask = None  # causal
        if not (attention_mask is None and starts_BT is None and cache is None):
            mask = make_attention_mask(
                self.config, x_BTE, past, attention_mask, starts_BT, keys, length
            )
        routings: list[Any] | None = [] if self.config.use_moe else None
        x_BTE = super().forward(x_BTE, rotary, mask, cache, sequence, also=routings, dropout=drops)
        out = MiniMindModelOutput(x_BTE, cache)
        if routings and (routing := combine_routings(routings)) is not None:
            out["aux_loss"], out["expert_load"] = routing
        return out

    def _cache_of(
        self, past_key_values: Cache | None, cache: Cache | None, use_cache: bool | None
    ) -> Cache | None:
        """The cache given by one of its names, or a new one where keys are cached."""
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one argument: give one.")
        cache = past_key_values if cache is None else cache
        if use_cache is None:
            use_cache = self.config.use_cache and not (self.training or self.config.doc_mask)
        if cache is None and not use_cache:
            return None
        recomputes = self.training and any(block.gradient_checkpointing for block in self.layers)
        if recomputes and cache is not None:
            raise ValueError(
                "a cache cannot be used while gradients are checkpointed: the backward pass would"
                " fill it twice; call eval(), or leave it out."
            )
        return DynamicCache(config=self.config) if cache is None and not recomputes else cache


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
        return [*of_blocks, (self.model.norm, "forward"), (self, "loss_of")]

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
        own_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
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
        loss_by_row both are of each row, (B,). An own_loss of logits and targets gives the sum, or
        the sums; it is not compiled.
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
        shared = dict(out)
        x_BTE = shared.pop("last_hidden_state")
        if loss_chunk_size is not None:
            assert shift_labels is not None
            own_BT = shift_labels if self.sequence is None else self.sequence.part(shift_labels, 1)
            if own_loss is None:
                loss_sum, targets = self.loss_of(x_BTE, own_BT, loss_chunk_size, loss_by_row)
            else:
                loss_sum, targets = own_sum(own_loss, self.lm_head(x_BTE), own_BT, loss_by_row)
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

    def loss_of(
        self, x_BTE: Tensor, targets_BT: Tensor, positions: int, by_row: bool
    ) -> tuple[Tensor, Tensor]:
        """`chunked_loss` of hidden states; compiled by itself."""
        return chunked_loss(self.lm_head, x_BTE, targets_BT, positions, by_row)


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


def enable_checkpointing(model: Any, enabled: bool = True, **options: Any) -> None:
    """Switch activation checkpointing of a transformers model's blocks on or off.

    `options` are those of torch.utils.checkpoint. transformers before 5.23 names the methods
    gradient_checkpointing_*; 5.23 deprecates these.
    """
    is_new = hasattr(model, "activation_checkpointing_enable")
    name = "activation_checkpointing" if is_new else "gradient_checkpointing"
    if enabled:
        getattr(model, f"{name}_enable")(options or None)
    else:
        getattr(model, f"{name}_disable")()
