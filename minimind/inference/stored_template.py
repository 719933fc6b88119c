"""Whether a model has a chat template beside its tokenizer, told before torch is imported."""

from __future__ import annotations

from pathlib import Path

from minimind.checkpoint.directory import MANIFEST, published_checkpoints
from minimind.data.tokenizer.vocabulary import JSON_NAME, MODEL_NAME, read_configuration
from minimind.errors import DataError, UsageError
from minimind.runtime import disk
from minimind.runtime.hub import local_model


def no_template(place: Path) -> UsageError:
    """The error of a model without a chat template."""
    return UsageError(
        f"{place}: has no chat template beside its tokenizer; fine-tune it with --task sft,"
        " give --chat_template, or use it on plain text (minimind generate, minimind eval)"
    )


def place_without_template(
    checkpoint: str | None, model: str | None, tokenizer: str | None
) -> Path | None:
    """The folder of a tokenizer that has no chat template; None where it has, or is not found.

    What cannot be found or read is reported when the model is loaded.
    """
    if checkpoint:
        folder = Path(checkpoint)
        if not disk.exists(folder / MANIFEST):
            root = folder if folder.name == "checkpoints" else folder / "checkpoints"
            folder = next(iter(published_checkpoints(root)), folder)
    else:
        folder = local_model(tokenizer or model or "", weights=False)
        folder = folder.parent if disk.is_file(folder) else folder
    files = [folder / name for name in (MODEL_NAME, JSON_NAME) if disk.is_file(folder / name)]
    try:
        has_none = files and not read_configuration(files[0]).templates.by_name
    except DataError:
        return None
    return folder if has_none else None
