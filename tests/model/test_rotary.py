"""The complex rotation against explicit 2x2 matrices in float64, and the properties it must have.

Shape letters: B rows, T positions, H heads, D channels per head.
"""

import pytest
import torch
from torch import Tensor

from minimind.model.decoder import apply_rotary
from minimind.model.kernels import apply_rotary_real
from minimind.model.rotary import build_pos_cis, pos_cis_as_reals

D, LONGEST, THETA = 16, 512, 1e4


def rotate_by_matrices(x_BTHD: Tensor, first_position: int) -> Tensor:
    out = torch.empty_like(x_BTHD, dtype=torch.float64)
    for t in range(x_BTHD.shape[1]):
        for j in range(D // 2):
            angle = torch.tensor((first_position + t) * THETA ** (-2 * j / D), dtype=torch.float64)
            rotary = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
            pair = x_BTHD[:, t, :, 2 * j : 2 * j + 2].double()
            out[:, t, :, 2 * j : 2 * j + 2] = pair @ rotary.T
    return out


@pytest.fixture(scope="module")
def pos_cis() -> Tensor:
    return build_pos_cis(D, LONGEST, THETA)


@pytest.mark.parametrize("first_position", [0, 500])
def test_rotation_equals_2x2_matrices_on_adjacent_pairs(pos_cis: Tensor, first_position: int):
    x_BTHD = torch.randn(2, 12, 3, D, generator=torch.manual_seed(0))
    rotated = apply_rotary(x_BTHD, pos_cis[first_position : first_position + 12])
    expected = rotate_by_matrices(x_BTHD, first_position)
    torch.testing.assert_close(rotated.double(), expected, rtol=0, atol=2e-6)


def test_score_depends_on_the_distance_alone(pos_cis: Tensor):
    q, k = torch.randn(2, 1, 1, 1, D, generator=torch.manual_seed(1))
    scores = torch.stack(
        [
            (apply_rotary(q, pos_cis[t : t + 1]) * apply_rotary(k, pos_cis[t - 2 : t - 1])).sum()
            for t in range(2, LONGEST)
        ]
    )
    torch.testing.assert_close(scores, scores[:1].expand_as(scores), rtol=0, atol=2e-5)
    assert (apply_rotary(q, pos_cis[5:6]) * apply_rotary(k, pos_cis[4:5])).sum() != scores[0]


def test_table_has_unit_length_and_starts_without_a_turn(pos_cis: Tensor):
    assert pos_cis.shape == (LONGEST, D // 2)
    assert pos_cis.dtype == torch.complex64
    torch.testing.assert_close(pos_cis.abs(), torch.ones(LONGEST, D // 2), rtol=0, atol=2e-7)
    assert torch.equal(pos_cis[0], torch.ones(D // 2, dtype=torch.complex64))


def test_each_row_can_have_its_own_positions(pos_cis: Tensor):
    x_BTHD = torch.randn(2, 4, 3, D, generator=torch.manual_seed(2))
    positions_BT = torch.tensor([[0, 1, 2, 3], [7, 9, 300, 8]])
    rotated = apply_rotary(x_BTHD, pos_cis[positions_BT])
    for row in range(2):
        alone = apply_rotary(x_BTHD[row : row + 1], pos_cis[positions_BT[row]])
        assert torch.equal(rotated[row : row + 1], alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_is_rotated_in_fp32_and_rounded_once(
    pos_cis: Tensor, dtype: torch.dtype
):
    x_BTHD = torch.randn(2, 20, 3, D, generator=torch.manual_seed(3)).to(dtype)
    rotated = apply_rotary(x_BTHD, pos_cis[300:320])
    assert rotated.dtype == dtype
    assert torch.equal(rotated, apply_rotary(x_BTHD.float(), pos_cis[300:320]).to(dtype))


def test_bf16_cannot_distinguish_positions_beyond_256():
    positions = torch.arange(258)
    rounded = positions.to(torch.bfloat16).long()
    assert torch.equal(rounded[:257], positions[:257])
    assert rounded[257] == rounded[256]


def test_table_survives_constructors_that_cast_to_bf16(
    pos_cis: Tensor, monkeypatch: pytest.MonkeyPatch
):
    def casting(constructor):
        def construct(*args, **kwargs):
            tensor = constructor(*args, **kwargs)
            return tensor.bfloat16() if tensor.is_floating_point() else tensor

        return construct

    for name in ("arange", "ones", "zeros", "empty", "full", "tensor", "linspace"):
        monkeypatch.setattr(torch, name, casting(getattr(torch, name)))
    assert torch.equal(build_pos_cis(D, LONGEST, THETA), pos_cis)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_branch_in_reals_agrees_with_the_complex_one(pos_cis: Tensor, dtype: torch.dtype):
    x_BTHD = torch.randn(2, 12, 3, D, generator=torch.manual_seed(4)).to(dtype)
    for at in (slice(12), torch.tensor([[*range(12)], [*range(5, 17)]])):
        reals = pos_cis_as_reals(pos_cis)[:, at]
        torch.testing.assert_close(
            apply_rotary_real(x_BTHD, reals), apply_rotary(x_BTHD, pos_cis[at]), rtol=0, atol=1e-6
        )
