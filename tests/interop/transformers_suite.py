"""Our decoder in the harness of transformers' own tests; test_transformers_suites.py runs it.

It is copied among these tests, so that `tests` below is their package and not ours. The classes are
those whose code an export has (test_remote_code.py).
"""

from __future__ import annotations

import random
import unittest
from typing import Any, ClassVar

from transformers.models.auto import modeling_auto as auto

from minimind.interop.hf_folder import register
from minimind.model import causal_lm
from minimind.model.configuration import MiniMindConfig
from tests.generation.test_utils import GenerationTesterMixin  # pyright: ignore[reportMissingImports] (theirs)
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask  # pyright: ignore[reportMissingImports] (theirs)

BASE, CAUSAL = causal_lm.MiniMindModel, causal_lm.MiniMindForCausalLM
HEADS = (
    causal_lm.MiniMindForSequenceClassification,
    causal_lm.MiniMindForTokenClassification,
    causal_lm.MiniMindForQuestionAnswering,
)
register()
# The harness looks up here which class is a base model, and which labels a head takes.
auto.MODEL_MAPPING_NAMES["minimind"] = BASE.__name__
auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["minimind"] = CAUSAL.__name__
auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES["minimind"] = HEADS[0].__name__
auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES["minimind"] = HEADS[1].__name__
auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES["minimind"] = HEADS[2].__name__


class ModelTester:
    """Shape of the small model, and what it is given."""

    batch_size, seq_length, is_training = 13, 7, True
    encoder_seq_length = key_length = seq_length
    vocab_size, hidden_size, intermediate_size = 99, 32, 48
    num_hidden_layers, num_attention_heads, num_key_value_heads = 2, 4, 2
    num_labels = 3

    def __init__(self, **more: Any) -> None:
        self.more = more

    def get_config(self) -> MiniMindConfig:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        names += ("num_attention_heads", "num_key_value_heads", "num_labels")
        return MiniMindConfig(**{name: getattr(self, name) for name in names}, **self.more)

    def prepare_config_and_inputs_for_common(self) -> tuple[MiniMindConfig, dict[str, Any]]:
        shape = [self.batch_size, self.seq_length]
        ids = ids_tensor(shape, self.vocab_size, rng=random.Random(0)).clamp(min=4)
        return self.get_config(), {"input_ids": ids, "attention_mask": random_attention_mask(shape)}


class DenseTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (BASE, CAUSAL, *HEADS)
    all_generative_model_classes = (CAUSAL,)
    pipeline_model_mapping: ClassVar[dict[str, Any]] = {}
    test_can_init_all_missing_weights_before_2023 = True  # older models are left out
    more: ClassVar[dict[str, Any]] = {}

    def setUp(self) -> None:
        self.model_tester = ModelTester(**self.more)


class ExpertsTest(DenseTest):
    more: ClassVar[dict[str, Any]] = {"use_moe": True}


class NormedTest(DenseTest):
    more: ClassVar[dict[str, Any]] = {"qk_norm": True, "tie_word_embeddings": False}
