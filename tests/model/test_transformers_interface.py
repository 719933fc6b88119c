"""The decoder behaves as a model of transformers does: outputs, inputs, caches, heads, tracing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import StaticCache, Trainer, TrainingArguments
from transformers.utils.generic import find_labels

from minimind.engine.build import leave_process_group
from minimind.model import causal_lm
from minimind.model.causal_lm import MiniMindForCausalLM, MiniMindModel
from tests.model.references import build

IDS = torch.randint(4, 97, (2, 9), generator=torch.manual_seed(6))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"use_flash_attn": False},
    "experts": {"use_moe": True},
    "documents": {"doc_mask": True},
    "norms": {"qk_norm": True},
    "biases": {"qkv_bias": True, "head_dim": 12},
}


@pytest.fixture(params=VARIANTS.values(), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest) -> MiniMindForCausalLM:
    return build(**request.param).eval()


def test_hidden_states_are_those_between_the_layers(model: MiniMindForCausalLM):
    out = model(IDS, output_hidden_states=True)
    states = out.hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert torch.equal(states[0], model.model.embed_tokens(IDS))
    assert torch.equal(states[-1], model.model(IDS).last_hidden_state)
    assert torch.equal(model.lm_head(states[-1]), out.logits)
    model.config.output_hidden_states = True
    assert len(model(IDS).hidden_states) == len(states)


def test_attentions_are_the_weights_of_each_layer(model: MiniMindForCausalLM):
    expected = model(IDS).logits
    model.set_attn_implementation("eager")
    out = model(IDS, output_attentions=True)
    assert len(out.attentions) == model.config.num_hidden_layers
    torch.testing.assert_close(out.logits, expected, rtol=1e-5, atol=1e-5)
    for weights in out.attentions:
        assert weights.shape == (2, model.config.num_attention_heads, 9, 9)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert not weights.triu(1).any()
    model.set_attn_implementation("sdpa")
    assert model(IDS, output_attentions=True).attentions == ()  # as of every model there


def test_an_attention_that_it_does_not_have_is_an_error():
    config = build().config
    with pytest.raises(ValueError, match=r"flash_attention_2|Flash Attention"):
        MiniMindForCausalLM._from_config(config, attn_implementation="flash_attention_2")


def test_return_dict_false_gives_a_tuple(model: MiniMindForCausalLM):
    loss, logits, cache, states = model(
        IDS, labels=IDS, use_cache=True, output_hidden_states=True, return_dict=False
    )
    expected = model(IDS, labels=IDS, use_cache=True)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(logits, expected.logits)
    assert cache.get_seq_length() == 9
    assert len(states) == model.config.num_hidden_layers + 1
    model.config.return_dict = False
    assert torch.equal(model(IDS, use_cache=False)[0], expected.logits)


def test_embeddings_take_the_place_of_ids():
    model = build().eval()
    embeddings = model.get_input_embeddings()(IDS)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(IDS).logits)
    embeddings = embeddings.detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=IDS).loss.backward()
    assert embeddings.grad is not None
    assert embeddings.grad.abs().sum() > 0
    for wrong in ({}, {"input_ids": IDS, "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="one of input_ids and inputs_embeds"):
            model(**wrong)


def test_keys_are_cached_where_the_configuration_or_the_caller_says_so():
    model = build().eval()
    assert model(IDS).past_key_values.get_seq_length() == 9
    assert model(IDS, use_cache=False).past_key_values is None
    assert model.train()(IDS).past_key_values is None
    assert model(IDS, use_cache=True).past_key_values is not None
    model.eval().config.use_cache = False
    assert model(IDS).past_key_values is None
    assert model(IDS, use_cache=True).past_key_values is not None
    documents = build(doc_mask=True).eval()  # whose mask a cache would switch off
    assert documents(IDS).past_key_values is None


@pytest.mark.parametrize(
    "name", ["labls", "attn_mask", "token_type_ids", "inputs_embed", "output_router_logits"]
)
def test_unknown_keywords_are_errors(name: str):
    for kind in (MiniMindForCausalLM, causal_lm.MiniMindForSequenceClassification, MiniMindModel):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            kind(build().config)(IDS, **{name: IDS})


@torch.no_grad()
def test_a_mask_of_four_dimensions_is_taken_as_it_is(model: MiniMindForCausalLM):
    padding = torch.ones_like(IDS)
    padding[0, :3] = 0
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    expected = model(IDS, attention_mask=padding, use_cache=True).logits  # no document mask
    visible = torch.ones(9, 9, dtype=torch.bool).tril() & padding[:, None, None].bool()
    visible = visible | torch.eye(9, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    added = torch.zeros(visible.shape).masked_fill(~visible, lowest)
    for mask in (visible, visible.long(), added):
        options = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        torch.testing.assert_close(model(IDS, **options).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_logits_to_keep_is_a_number_or_indices(model: MiniMindForCausalLM):
    logits = model(IDS).logits
    assert torch.equal(model(IDS, logits_to_keep=2).logits, logits[:, -2:])
    at = torch.tensor([0, 4])
    assert torch.equal(model(IDS, logits_to_keep=at).logits, logits[:, at])


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_heads_learn(kind: str):
    config = build().config
    config.num_labels = 3
    model = getattr(causal_lm, f"MiniMindFor{kind}")(config).eval()
    labels = torch.tensor([0, 2])
    labels = labels if kind == "SequenceClassification" else labels[:, None].repeat(1, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(IDS, labels=labels).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]
    assert find_labels(type(model)) == ["labels"]


def test_span_head():
    model = causal_lm.MiniMindForQuestionAnswering(build().config).eval()
    at = torch.tensor([1, 3])
    out = model(IDS, start_positions=at, end_positions=at + 2)
    assert out.start_logits.shape == out.end_logits.shape == (2, 9)
    out.loss.backward()
    assert find_labels(type(model)) == ["start_positions", "end_positions"]


def test_trainer_evaluates_and_keeps_the_best(tmp_path: Any, request: pytest.FixtureRequest):
    request.addfinalizer(leave_process_group)  # Accelerate's state would outlast the test
    rows: Any = [{"input_ids": row, "labels": row} for row in IDS.tolist()]
    options = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model = build()
    trainer = Trainer(model=model, args=options, train_dataset=rows, eval_dataset=rows)
    assert trainer.label_names == ["labels"]
    trainer.train()
    with torch.no_grad():
        expected = model.eval()(IDS, labels=IDS).loss
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)


class Logits(nn.Module):
    def __init__(self, model: MiniMindForCausalLM):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(ids, attention_mask=mask, use_cache=False).logits


def exported_for_every_size(model: MiniMindForCausalLM, is_padded: bool) -> None:
    def given(rows: int, length: int) -> tuple[Tensor, ...]:
        ids = torch.randint(2, 97, (rows, length), generator=torch.manual_seed(7))
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        return (ids, mask) if is_padded else (ids,)

    dims = {0: Dim("B"), 1: Dim("T")}
    shapes = {"ids": dims, **({"mask": dims} if is_padded else {})}
    graph = torch.export.export(Logits(model), given(2, 8), dynamic_shapes=shapes).module()
    for inputs in (given(2, 8), given(3, 13), given(2, 30)):
        torch.testing.assert_close(graph(*inputs), Logits(model)(*inputs), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_exported_graph_is_for_every_length_and_batch():
    exported_for_every_size(build().eval(), is_padded=False)


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("is_padded", [False, True])
def test_every_variant_is_exported(model: MiniMindForCausalLM, is_padded: bool):
    exported_for_every_size(model, is_padded)


@torch.no_grad()
@pytest.mark.parametrize("name", ["plain", "eager"])  # a trace fixes the experts' sizes
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # read by torch
def test_a_trace_is_for_every_length(name: str):
    model = build(**VARIANTS[name]).eval()
    trace: Any = torch.jit.trace(Logits(model), (IDS,))
    for length in (2, 9, 30):
        ids = torch.randint(4, 97, (3, length), generator=torch.manual_seed(length))
        torch.testing.assert_close(trace(ids), Logits(model)(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@torch.no_grad()
def test_the_whole_model_is_one_graph_with_a_static_cache_too(model: MiniMindForCausalLM):
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(IDS, use_cache=False).logits
    torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected)
    expected = model(IDS, use_cache=True).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    pieces = [compiled(ids, past_key_values=cache).logits for ids in IDS.split([6, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_moe", [False, True])
def test_every_class_that_is_not_to_be_split_is_in_the_model(use_moe: bool):
    """FSDP of Accelerate raises for one that is not."""
    model = build(use_moe=use_moe)
    blocks = {type(block).__name__ for block in model.model.layers}
    assert model._no_split_modules == model.model._no_split_modules == blocks
