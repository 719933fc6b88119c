"""What Hugging Face's tools ask of a model, against transformers' own Llama and Qwen3."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState  # noqa: TID251 (Trainer leaves one behind)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from minimind.interop import hf_folder
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tests.model.references import as_reference, build

IGNORED = -100


@pytest.fixture
def unregistered() -> Any:
    """The Auto classes as they were, again after the test."""
    yield
    CONFIG_MAPPING._extra_content.pop("minimind", None)
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(MiniMindConfig, None)


@pytest.fixture
def trainer_leaves() -> Any:
    """Reset the Accelerate state that Trainer leaves in this process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def ids_of(seed: int = 1, rows: int = 3, length: int = 40) -> Tensor:
    return torch.randint(97, (rows, length), generator=torch.manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_dim", [None, 12])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(("Llama", {}), ("Qwen2", {"qkv_bias": True}), ("Qwen3", {"qk_norm": True})),
        ("SmolLM3", {"no_rope_layer_interval": 2}),
        ("SmolLM3", {"no_rope_layer_interval": 1, "use_flash_attn": False}),
    ],
)
def test_logits_equal_those_of_transformers_own_model(
    kind: str, changes: dict[str, Any], head_dim: int | None, tied: bool
):
    model = build(**changes, head_dim=head_dim, tie_word_embeddings=tied)
    reference, ids_BT = as_reference(model), ids_of()
    expected = reference(ids_BT).logits
    assert type(reference).__name__ == f"{kind}ForCausalLM"
    assert expected.std() > 0.5
    torch.testing.assert_close(model(ids_BT).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_qk_norm_changes_the_logits_and_precedes_the_rotation():
    """Other gains, and gains in an order that fits other channels, are both seen."""
    model, ids_BT = build(qk_norm=True), ids_of()
    expected = model(ids_BT).logits
    gains = model.model.layers[0].self_attn.q_norm.weight
    assert gains.shape == (model.config.head_dim,)
    gains.copy_(gains.flip(0))
    assert (model(ids_BT).logits - expected).abs().max() > 1e-2


def test_qk_norm_weights_have_the_names_of_qwen3():
    ours = build(qk_norm=True, tie_word_embeddings=False).state_dict()
    theirs = as_reference(build(qk_norm=True, tie_word_embeddings=False)).state_dict()
    assert {n: w.shape for n, w in ours.items()} == {n: w.shape for n, w in theirs.items()}
    assert "model.layers.1.self_attn.k_norm.weight" in ours
    assert not [name for name in build().state_dict() if "q_norm" in name]


def some_ignored(ids_BT: Tensor) -> Tensor:
    labels = ids_BT.clone()
    labels[0, :15], labels[1, 20:], labels[2, ::3] = IGNORED, IGNORED, IGNORED
    return labels


@pytest.mark.parametrize("items", [None, 50, torch.tensor(50)])
def test_the_loss_and_its_gradients_are_those_of_transformers_own_model(items: Any):
    model = build()
    reference, ids_BT = as_reference(model), ids_of()
    labels = some_ignored(ids_BT)
    options = {} if items is None else {"num_items_in_batch": items}
    found = model(ids_BT, labels=labels, **options).loss
    expected = reference(ids_BT, labels=labels, **options).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    (found + expected).backward()
    torch.testing.assert_close(
        model.model.embed_tokens.weight.grad,
        reference.model.embed_tokens.weight.grad,
        rtol=1e-4,
        atol=1e-6,
    )


def test_shifted_labels_give_the_loss_that_transformers_gives_for_them():
    model = build()
    reference, ids_BT = as_reference(model), ids_of()
    shifted = some_ignored(ids_of(seed=2))
    expected = reference(ids_BT, labels=shifted, shift_labels=shifted).loss
    torch.testing.assert_close(model(ids_BT, shift_labels=shifted).loss, expected)


def test_trainer_detects_support_for_num_items_in_batch():
    """By a keyword in forward, as it looks; then micro-batches add up to the mean over all."""
    assert "num_items_in_batch" in inspect.signature(MiniMindForCausalLM.forward).parameters
    assert getattr(MiniMindForCausalLM, "accepts_loss_kwargs", True)
    model, ids_BT = build(), ids_of()
    labels = some_ignored(ids_BT)
    count = int((labels[:, 1:] != IGNORED).sum())
    parts = [
        model(ids, labels=targets, num_items_in_batch=count).loss
        for ids, targets in zip(ids_BT.split(1), labels.split(1), strict=True)
    ]
    torch.testing.assert_close(sum(parts), model(ids_BT, labels=labels).loss)


@torch.no_grad()
def test_auto_classes_load_the_model_once_registered(tmp_path: Path, unregistered: None):
    model = build(qk_norm=True)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="minimind"):
        AutoConfig.from_pretrained(tmp_path)
    hf_folder.register()
    hf_folder.register()
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MiniMindConfig)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, MiniMindForCausalLM)
    assert torch.equal(loaded(ids_of()).logits, model(ids_of()).logits)
    fresh = AutoModelForCausalLM.from_config(model.config)
    assert isinstance(fresh, MiniMindForCausalLM)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_saved_variant_loads_with_equal_logits(tmp_path: Path, tied: bool):
    model = build(qk_norm=True, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    loaded = MiniMindForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(loaded(ids_of()).logits, model(ids_of()).logits)
    low: Any = MiniMindForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert low.model.pos_cis.dtype == torch.complex64
    assert torch.equal(low.model.pos_cis, model.model.pos_cis)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_can_be_read_replaced_and_resized(tied: bool):
    model = build(tie_word_embeddings=tied)
    ids_BT, before = ids_of(), build(tie_word_embeddings=tied)(ids_of()).logits
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    model.resize_token_embeddings(110, mean_resizing=False)
    assert model.config.vocab_size == 110
    assert model.lm_head.weight.shape == model.get_input_embeddings().weight.shape == (110, 48)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    after = model(ids_BT, labels=ids_BT)
    torch.testing.assert_close(after.logits[..., :97], before)
    after.loss.backward()
    model.resize_token_embeddings(97)
    torch.testing.assert_close(model(ids_BT).logits, before)

    other = torch.nn.Embedding(97, 48)
    model.set_input_embeddings(other)
    model.tie_weights()
    assert model.model.embed_tokens is other
    assert (model.lm_head.weight is other.weight) == tied


def losses_in_trainer(model: Any, accumulation: int, place: Path) -> list[float]:
    """Of three steps over 8 rows each, whose numbers of targets differ from row to row."""
    rows = ids_of(seed=4, rows=24, length=20)
    labels = [[IGNORED] * (n % 4 * 6) + row[n % 4 * 6 :] for n, row in enumerate(rows.tolist())]
    data: Any = [
        {"input_ids": row, "labels": torch.tensor(targets)}
        for row, targets in zip(rows, labels, strict=True)
    ]
    arguments = TrainingArguments(
        str(place),
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_trainer_takes_the_same_steps_for_any_accumulation(tmp_path: Path, trainer_leaves: None):
    whole = losses_in_trainer(build(), 1, tmp_path)
    assert len(whole) == 3
    assert losses_in_trainer(build(), 4, tmp_path) == pytest.approx(whole, rel=1e-6)
    assert losses_in_trainer(as_reference(build()), 4, tmp_path) == pytest.approx(whole, rel=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")  # peft asks it
@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # generate() gives them
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "LoraConfig"])
def test_peft_trains_and_generates(kind: str):
    peft = pytest.importorskip("peft", reason="needs the extra: pip install -e '.[examples]'")
    more = {"target_modules": "all-linear"} if kind == "LoraConfig" else {"num_virtual_tokens": 4}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **more)
    model = peft.get_peft_model(build(), config)
    ids = ids_of()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    assert trained
    assert all(gradient is not None for gradient in trained)
    assert model.generate(input_ids=ids, max_new_tokens=3).shape == (len(ids), ids.shape[1] + 3)
