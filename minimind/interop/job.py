"""A model to be written, and the names that every format knows. Loads without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minimind.data.tokenizer.load import Tokenizer

CONFIG = "config.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
REPLACE = "get the file again, or name another"


@dataclass(frozen=True)
class Job:
    """A model to be written, in a format that has been chosen."""

    name: str  # of the run
    kind: str  # `Format.model_type`
    config: Any  # a MiniMindConfig, or one of transformers
    tokenizer: Tokenizer
    dtype: str
    end: int | None = None  # the id that ends a turn of the chat template
    max_shard_bytes: int | None = None
    has_code: bool = True  # whether the model's code goes along
