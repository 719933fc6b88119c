"""Configuration: short names against Hugging Face names, what is derived, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from minimind.architecture.select import minimind_config
from minimind.checkpoint.validation import ModelConfig
from minimind.config import flags
from minimind.config.parse import parse_flags
from minimind.model.configuration import MiniMindConfig

SHORT_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
SHAPE: dict[str, Any] = {
    "dim": 64,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 1,
    "hidden_dim": 96,
    "max_seq_len": 32,
}


def test_short_names_construct_and_read_the_hugging_face_fields():
    config = MiniMindConfig(**SHAPE)
    for short, field in SHORT_NAMES.items():
        assert getattr(config, short) == getattr(config, field) == SHAPE[short]
    assert config.head_dim == 16


@pytest.mark.parametrize(("width", "hidden_width"), [(512, 1408), (768, 2048), (192, 512)])
def test_hidden_width_is_eight_thirds_of_the_width_rounded_up_to_64(width: int, hidden_width: int):
    assert MiniMindConfig(hidden_size=width).intermediate_size == hidden_width
    assert MiniMindConfig(dim=width).intermediate_size == hidden_width


def test_every_field_survives_saving(tmp_path: Path):
    config = MiniMindConfig(
        **SHAPE,
        vocab_size=99,
        rms_norm_eps=1e-6,
        rope_theta=12345.5,
        use_flash_attn=False,
        doc_mask=True,
        tie_word_embeddings=False,
        bos_token_id=4,
        eos_token_id=5,
        pad_token_id=6,
    )
    config.save_pretrained(tmp_path)
    loaded = MiniMindConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.rope_theta == 12345.5
    assert loaded.tie_word_embeddings is False
    assert "dim" not in config.to_dict()


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"dim": 66, "n_heads": 4}, "hidden_size=66 cannot be divided by num_attention_heads=4."),
        (
            {"dim": 64, "n_heads": 4, "n_kv_heads": 3},
            "num_attention_heads=4 cannot be divided by num_key_value_heads=3.",
        ),
        ({"dim": 12, "n_heads": 4}, r"head_dim=3 .* must be even"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is not supported by MiniMind"),
    ],
)
def test_impossible_shape_is_refused_in_one_sentence(shape: dict, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        MiniMindConfig(**shape)


def test_flags_configuration_and_checkpoints_have_the_same_fields():
    names = {row.name.partition(".")[0] for row in flags.SHAPE.values()}
    others = {"use_flash_attn", "doc_mask", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {*ModelConfig.model_fields} == names | others
    for alias, name in MiniMindConfig.attribute_map.items():
        assert flags.SHAPE[alias].name == name
    default, by_flags = MiniMindConfig().to_dict(), minimind_config(parse_flags([])).to_dict()
    assert [by_flags.get(name) for name in names] == [default.get(name) for name in names]
