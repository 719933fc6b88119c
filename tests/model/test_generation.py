"""generate(): with any cache, without one, in a batch and alone, always the same greedy tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache, cache_utils

from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from tests.model.references import CACHE, as_reference

V, NEW, PAD = 97, 200, 3
LENGTHS = (13, 4, 9)


def build(**changes: Any) -> Any:
    """Weights large enough that no two logits are near each other."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": V, "dim": 32, "n_layers": 2, "n_heads": 4}
    model = MiniMindForCausalLM(
        MiniMindConfig(**{**shape, "n_kv_heads": 2, "max_seq_len": 256, **changes})
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            weight.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build()


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    draw = torch.manual_seed(1)
    return [torch.randint(4, V, (1, length), generator=draw) for length in LENGTHS]


@pytest.fixture(scope="module")
def batch(prompts: list[Tensor]) -> dict[str, Tensor]:
    """The three prompts with padding on the left."""
    ids_BT = torch.full((len(prompts), max(LENGTHS)), PAD)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, -prompt.shape[1] :], mask_BT[row, -prompt.shape[1] :] = prompt[0], 1
    return {"input_ids": ids_BT, "attention_mask": mask_BT}


def greedy(model: Any, inputs: dict[str, Tensor], new: int = NEW, **options: Any) -> Tensor:
    limits = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    out = model.generate(**inputs, **limits, pad_token_id=PAD, **options)
    return out[:, inputs["input_ids"].shape[1] :]


@pytest.fixture(scope="module")
def expected(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What is generated without a cache, every position computed anew for every token."""
    found = greedy(model, batch, use_cache=False)
    assert found.shape == (3, NEW)
    assert len(found.unique()) > 30
    return found


def test_each_prompt_alone_gives_the_tokens_of_its_row(
    model: Any, prompts: list[Tensor], expected: Tensor
):
    for row, prompt in enumerate(prompts):
        assert torch.equal(greedy(model, {"input_ids": prompt}, use_cache=True)[0], expected[row])


def test_the_same_weights_as_llama_give_the_same_tokens(
    model: Any, batch: dict[str, Tensor], expected: Tensor
):
    assert torch.equal(greedy(as_reference(model), batch), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_every_cache_of_transformers_gives_the_tokens_of_no_cache(
    kind: str, model: Any, batch: dict[str, Tensor], expected: Tensor
):
    assert torch.equal(greedy(model, batch, cache_implementation=kind), expected)


@pytest.mark.parametrize("use_flash_attn", [True, False])
@pytest.mark.parametrize("room", [80, 256])
def test_a_cache_of_ones_own_may_be_longer_than_what_is_generated(
    room: int, use_flash_attn: bool, batch: dict[str, Tensor], expected: Tensor
):
    model = build(use_flash_attn=use_flash_attn)
    cache = StaticCache(config=model.config, max_cache_len=room)
    found = greedy(model, batch, new=60, **{CACHE: cache})
    assert torch.equal(found, expected[:, :60])


def test_a_cache_of_fixed_size_serves_a_prompt_without_padding_in_pieces(
    model: Any, prompts: list[Tensor]
):
    ids = prompts[0]
    cache = StaticCache(config=model.config, max_cache_len=40)
    with torch.no_grad():
        pieces = [model(piece, past_key_values=cache).logits for piece in ids.split(4, dim=1)]
        expected = model(ids).logits
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-5, atol=1e-5)


def test_beams_reorder_the_cache(model: Any, batch: dict[str, Tensor]):
    searches = (greedy(model, batch, 20, num_beams=3, use_cache=on) for on in (True, False))
    assert torch.equal(*searches)


@pytest.mark.parametrize(
    "changes",
    [{"qk_norm": True}, {"qkv_bias": True, "head_dim": 12}, {"no_rope_layer_interval": 2}],
)
def test_other_heads_generate_the_same_with_and_without_a_cache(
    changes: dict[str, Any], batch: dict[str, Tensor]
):
    model = build(**changes)
    assert torch.equal(
        greedy(model, batch, 40, use_cache=True), greedy(model, batch, 40, use_cache=False)
    )


def refused(kind: str, config: MiniMindConfig) -> Any:
    windows = MiniMindConfig(n_layers=2, dim=32, n_heads=4)
    windows.sliding_window = 8
    caches: dict[str, Any] = {
        "DynamicSlidingWindowLayer": lambda: DynamicCache(config=windows),
        "StaticSlidingWindowLayer": lambda: StaticCache(config=windows, max_cache_len=64),
        "Fp8QuantizedLayer": lambda: QuantizedCache("fp8", config=config),
        "EncoderDecoderCache": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    }
    return caches[kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "DynamicSlidingWindowLayer",
        "StaticSlidingWindowLayer",
        pytest.param(
            "Fp8QuantizedLayer",
            marks=pytest.mark.skipif(
                not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has none"
            ),
        ),
        "EncoderDecoderCache",
    ],
)
def test_a_cache_that_forgets_or_rounds_is_refused(kind: str, model: Any, batch: dict[str, Tensor]):
    report = f"the cache has a {kind}, which MiniMind does not support: give a"
    with pytest.raises(ValueError, match=report):
        greedy(model, batch, 4, **{CACHE: refused(kind, model.config)})


def test_a_cache_that_is_full_is_refused(model: Any, prompts: list[Tensor]):
    cache = StaticCache(config=model.config, max_cache_len=15)
    with torch.no_grad():
        model(prompts[0], past_key_values=cache)
        with pytest.raises(ValueError, match="room for 15 positions and holds 13, so that 4 more"):
            model(prompts[1], past_key_values=cache)
