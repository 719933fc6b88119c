"""Shares and overlap of traces whose figures can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tools.gpu.trace import kind_of, overlap, shares

pytestmark = pytest.mark.long  # of the command, which is no part of the package


def event(name: str, start: float, length: float, cat: str = "kernel", tid: int = 7) -> Any:
    return {"ph": "X", "name": name, "ts": start, "dur": length, "cat": cat, "tid": tid}


STEP = event("data", 0, 100, "user_annotation")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_poi_fused_mul_silu_3", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "elementwise"),
        ("aten::mm", "matmul"),
        ("aten::copy_", "copies"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::mul", "elementwise"),
    ],
)
def test_work_is_known_by_its_name(name: str, kind: str):
    assert kind_of(name) == kind


def test_the_shares_of_a_gpu_are_those_of_the_clock():
    events = [
        STEP,
        event("aten::mm", 0, 90, "cpu_op"),  # what the host does meanwhile does not count
        event("nvjet_tst", 10, 40),
        event("triton_poi_fused", 60, 20),
        event("Memcpy DtoH", 80, 10, "gpu_memcpy"),
    ]
    expected = {"matmul": 0.4, "elementwise": 0.2, "copies": 0.1, "idle": 0.3}
    assert shares(events) == pytest.approx(expected)


def test_the_shares_of_a_cpu_are_the_operators_own_times():
    events = [
        STEP,
        event("aten::linear", 0, 60, "cpu_op"),
        event("aten::mm", 10, 40, "cpu_op"),
        event("aten::mul", 60, 20, "cpu_op"),
        event("aten::copy_", 65, 5, "cpu_op"),
    ]
    expected = {"matmul": 0.6, "elementwise": 0.15, "copies": 0.05, "idle": 0.2}
    assert shares(events) == pytest.approx(expected)


def test_communication_counts_as_hidden_where_other_kernels_run():
    events = [
        event("ncclDevKernel_AllReduce", 0, 20, tid=8),
        event("ncclDevKernel_AllReduce", 50, 20, tid=8),
        event("nvjet", 10, 45),
    ]
    assert overlap(events) == pytest.approx(15 / 40)
    assert overlap([event("nvjet", 0, 5)]) is None
