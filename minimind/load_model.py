"""A model and its tokenizer from wherever they lie: a training checkpoint or a model directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minimind.data.load_tokenizer import AnyTokenizer, load_tokenizer
from minimind.errors import CheckpointError, DataError, UsageError
from minimind.generate import load_checkpoint
from minimind.train.claims import read_object

CONFIG = "config.json"
AGAIN = "export it again, or name another"
FOLLOWS = ("rotary_emb.inv_freq",)  # tensors that older files have, though the shape tells them


def load_model(checkpoint: str | None, directory: str | None) -> tuple[Any, AnyTokenizer, Path]:
    """The fp32 model on the CPU, its tokenizer, and where they were found; exactly one is given.

    A CheckpointError where the weights do not fit what the directory says of them.
    """
    if (checkpoint is None) == (directory is None):
        found = "neither was" if checkpoint is None else "both were"
        raise UsageError(
            f"of --checkpoint (a run's) and --model (an exported directory) {found} given;"
            " give one of them"
        )
    if checkpoint is not None:
        return load_checkpoint(checkpoint)
    assert directory is not None
    return load_directory(Path(directory).expanduser())


def load_directory(path: Path) -> tuple[Any, AnyTokenizer, Path]:
    """The same of a directory with config.json, safetensors and a tokenizer."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path}: has no {CONFIG}; name a directory that export wrote")
    faults = (OSError, ValueError, TypeError, RuntimeError, SafetensorError, StrictDataclassError)
    try:
        with _quietly():
            model, found = _read(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path / CONFIG}: {error}; {AGAIN}") from error
    except faults as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: cannot be loaded ({why}); {AGAIN}") from error
    if wrong := sorted(map(str, (*found["missing_keys"], *found["mismatched_keys"]))):
        raise CheckpointError(f"{path}: has no {wrong[0]} as its config.json asks; {AGAIN}")
    if more := [name for name in found["unexpected_keys"] if not name.endswith(FOLLOWS)]:
        raise CheckpointError(f"{path}: has {min(more)}, which its config.json does not; {AGAIN}")
    # Ours is what the flags say: a directory's own would add beams, penalties and words to avoid.
    model.generation_config = GenerationConfig()
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} pieces and the model"
            f" {model.config.vocab_size}; put the tokenizer there that it was trained with"
        )
    return model.eval(), tokenizer, path


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers says of its tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    from minimind.model.decoder import MiniMindForCausalLM

    told, _ = read_object(path / CONFIG)
    is_ours = told.get("model_type") == "minimind"
    kind: Any = MiniMindForCausalLM if is_ours else AutoModelForCausalLM
    return kind.from_pretrained(
        path,
        use_safetensors=True,
        output_loading_info=True,
        local_files_only=True,
        dtype=torch.float32,
        **({} if is_ours else {"trust_remote_code": False}),
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' bars and tables: what is wrong is told in one line."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()
