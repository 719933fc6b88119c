"""Attention by blocks of documents against the dense mask; on a GPU its gradients too.

Shape letters: B rows, T positions, S keys, H query heads, K key/value heads, D channels.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.other_cards import CARDS
from minimind.model import kernels, masks
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.model.kernels import document_block_mask, flash_attention, has_flex_kernel
from minimind.model.loss import next_token_loss
from minimind.model.masks import boolean_mask
from tests.conftest import ROOT

EOS, V = 2, 50
CPU = torch.device("cpu")
uncompiled = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def starts(length: int, *borders: list[int]) -> Tensor:
    """Bool (B, T): for each row the positions at which a document begins."""
    return torch.tensor([[at in row for at in range(length)] for row in borders])


def drawn(length: int) -> Tensor:
    """Rows with borders all over, from one in two positions to one in 300."""
    draw = torch.manual_seed(length)
    return torch.stack(
        [torch.rand(length, generator=draw) < 1 / every for every in (2, 20, 100, 300)]
    )


LAYOUTS = {
    "one document": starts(256, [], [0]),
    "documents of one token": starts(200, list(range(200)), list(range(0, 200, 2))),
    "borders at and beside the edges of blocks": starts(
        384, [127], [128], [129], [0, 128, 256], [256, 383], [1, 255, 257]
    ),
    "a document over many blocks": starts(640, [1, 600], [130, 515]),
    "less than a block": starts(5, [], [2], [1, 2, 4]),
    "one token": starts(1, [], [0]),
    "drawn": drawn(777),
}
each_layout = pytest.mark.parametrize("starts_BT", LAYOUTS.values(), ids=LAYOUTS)


@each_layout
def test_the_blocks_are_those_of_the_whole_table(starts_BT: Tensor):
    blocks, (rows, length) = document_block_mask(starts_BT), starts_BT.shape
    expected = create_block_mask(blocks.mask_mod, rows, None, length, length, "cpu")
    assert blocks.seq_lengths == expected.seq_lengths
    for found, other in zip(blocks.as_tuple(), expected.as_tuple(), strict=True):
        if isinstance(other, Tensor):
            assert isinstance(found, Tensor)
            assert torch.equal(found, other)
    dense = boolean_mask(length, 0, None, starts_BT, CPU)
    at = torch.arange(length)
    assert dense is not None
    for row in range(rows):
        found = blocks.mask_mod(torch.tensor(row), at, at[:, None], at)
        assert found.tolist() == dense[row, 0].tolist()


@pytest.mark.sample(4)
@uncompiled
@each_layout
@pytest.mark.parametrize("key_heads", [6, 2, 1])
def test_what_comes_out_is_what_the_dense_mask_gives(starts_BT: Tensor, key_heads: int):
    rows, length = starts_BT.shape
    draw = torch.manual_seed(1)
    q = torch.randn(rows, 6, length, 16, generator=draw)
    k, v = torch.randn(2, rows, key_heads, length, 16, generator=draw)
    expected = flash_attention(q, k, v, boolean_mask(length, 0, None, starts_BT, CPU))
    found = flash_attention(q, k, v, document_block_mask(starts_BT))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def build(**changes: Any) -> MiniMindForCausalLM:
    shape: dict[str, Any] = {"vocab_size": V, "dim": 64, "n_layers": 3, "n_heads": 4}
    shape |= {"n_kv_heads": 2, "max_seq_len": 300, "eos_token_id": EOS, "doc_mask": True}
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(**{**shape, **changes}))
    with torch.no_grad():  # large enough that attention decides
        for weight in model.parameters():
            weight.copy_(weight + 0.15 * torch.randn(weight.shape))
    return model


def rows(length: int = 300) -> Tensor:
    return torch.randint(V, (3, length), generator=torch.manual_seed(2))  # a border in 50


@uncompiled
@torch.no_grad()
def test_a_model_makes_its_blocks_once_and_gives_the_same_logits(monkeypatch: pytest.MonkeyPatch):
    model, made = build(), []
    expected = model(rows()).logits
    monkeypatch.setattr(masks, "has_flex_kernel", lambda *_: True)
    monkeypatch.setattr(
        masks,
        "document_block_mask",
        lambda starts: made.append(document_block_mask(starts)) or made[-1],
    )
    torch.testing.assert_close(model(rows()).logits, expected, rtol=1e-5, atol=1e-5)
    assert len(made) == 1
    slow = build(use_flash_attn=False)
    for other, options in [
        (build(doc_mask=False), {}),
        (slow, {}),
        (model, {"attention_mask": torch.ones_like(rows())}),
        (model, {"use_cache": True}),
    ]:
        other(rows(), **options)
        assert len(made) == 1  # whoever cannot take them makes none


def test_blocks_are_for_gpus_and_heads_that_triton_multiplies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_gpu_compiler_fault", lambda *_: "")
    cuda = torch.device("cuda")
    assert has_flex_kernel(cuda, 16, 128, torch.float32)
    assert has_flex_kernel(cuda, 96, 300, torch.bfloat16)
    assert not has_flex_kernel(cuda, 8, 300, torch.float32)
    assert not has_flex_kernel(cuda, 64, 127, torch.float32)
    assert not has_flex_kernel(CPU, 64, 300, torch.float32)


def test_without_a_compiler_the_mask_of_documents_is_a_tensor(monkeypatch: pytest.MonkeyPatch):
    """Flex attention is compiled also in a model that is not."""
    monkeypatch.setattr(kernels, "compiler_fault", lambda device, _: f"none for {device}")
    kernels._gpu_compiler_fault.cache_clear()
    assert not has_flex_kernel(torch.device("cuda"), 64, 300, torch.float32)
    kernels._gpu_compiler_fault.cache_clear()


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make the CUDA device one whose blocks can have so many KiB of shared memory."""
    monkeypatch.setattr(kernels, "_gpu_compiler_fault", lambda *_: "")

    def become(kib: int) -> None:
        card = SimpleNamespace(shared_memory_per_block=48 * 2**10)
        if kib > 64:  # ROCm names no other
            card.shared_memory_per_block_optin = kib * 2**10
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)

    return become


@pytest.mark.parametrize(("kib", "widest"), [(64, 128), (99, 128), (163, 256), (227, 256)])
def test_wide_heads_have_blocks_where_their_kernel_fits(
    kib: int, widest: int, on_a_card: Callable[[int], None]
):
    """Triton takes the power of two from head_dim on; float32 has twice the bytes."""
    on_a_card(kib)
    for head_dim in (64, 96, 128, 160, 256):
        found = has_flex_kernel(torch.device("cuda"), head_dim, 300, torch.bfloat16)
        assert found == (head_dim <= widest)
        found = has_flex_kernel(torch.device("cuda"), head_dim, 300, torch.float32)
        assert found == (head_dim <= widest // 2)


def test_blocks_are_chosen_only_where_the_compiled_kernels_fit(on_a_card: Callable[[int], None]):
    """Each recorded row of benchmarks.other_cards is one kernel that fits its card or does not."""
    (path,) = (ROOT / "benchmarks" / "results").glob("other_cards-*.json")
    fits: dict[tuple[str, str, int], bool] = {}
    for row in json.loads(path.read_text())["rows"]:
        place = row["capability"], row["dtype"], row["head_dim"]
        fits[place] = fits.get(place, True) and row["fits"]
    for (capability, name, head_dim), is_fitting in fits.items():
        on_a_card(CARDS[capability][0])
        if name == "tf32":  # chosen as float32 is
            assert is_fitting or not fits[capability, "float32", head_dim]
            continue
        found = has_flex_kernel(torch.device("cuda"), head_dim, 300, getattr(torch, name))
        assert found == is_fitting, (capability, name, head_dim)


def test_a_gpu_without_bf16_has_blocks_for_other_dtypes(monkeypatch: pytest.MonkeyPatch):
    """torch would leave flex attention in bf16 uncompiled there, with all scores in memory."""
    wants: list[torch.dtype] = []

    def fault(needs_bf16: bool) -> str:
        return "no bf16" if needs_bf16 else ""

    def kernel(_: Any, __: Any, ___: Any, dtype: torch.dtype) -> bool:
        wants.append(dtype)
        return False

    monkeypatch.setattr(kernels, "_gpu_compiler_fault", fault)
    cuda = torch.device("cuda")
    assert has_flex_kernel(cuda, 64, 300, torch.float16)
    assert not has_flex_kernel(cuda, 64, 300, torch.bfloat16)
    monkeypatch.setattr(masks, "has_flex_kernel", kernel)
    build()(rows())
    with torch.autocast("cpu", torch.bfloat16):
        build()(rows())
    build().bfloat16()(rows())
    assert wants == [torch.float32, torch.bfloat16, torch.bfloat16]


@torch.no_grad()
def test_other_documents_are_no_reason_to_compile_again():
    graphs = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    attend = torch.compile(
        kernels.document_attention, backend=counting, fullgraph=True, dynamic=False
    )
    q = torch.randn(2, 4, 300, 16)
    for borders in ([], [5], [128, 200], list(range(300))):
        attend(q, q, q, document_block_mask(starts(300, borders, [7])))
    assert len(graphs) == 1


@pytest.mark.gpu
@each_layout
def test_the_blocks_on_a_gpu_are_those_on_the_cpu(starts_BT: Tensor):
    pairs = (document_block_mask(where).as_tuple() for where in (starts_BT.cuda(), starts_BT))
    for found, expected in zip(*pairs, strict=True):
        if isinstance(expected, Tensor):
            assert isinstance(found, Tensor)
            assert torch.equal(found.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [300, 256, 40])
def test_gradients_on_a_gpu_are_those_of_the_dense_mask(length: int, n_kv_heads: int):
    cuda = torch.device("cuda", 0)

    def gradients(device: torch.device) -> dict[str, Tensor]:
        model: Any = build(n_kv_heads=n_kv_heads)
        model.to(device)
        ids = rows(length + 1).to(device)
        loss_sum, count = next_token_loss(model(ids[:, :-1]).logits, ids[:, 1:])
        (loss_sum / count).backward()
        return {name: p.grad.cpu() for name, p in model.named_parameters()}

    kernel = has_flex_kernel(cuda, build().config.head_dim, length, torch.float32)
    assert kernel == (length >= 128)
    found = gradients(cuda)
    for name, gradient in gradients(CPU).items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * scale)
