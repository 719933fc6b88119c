"""Show the tokens of conversations as text: special tokens by name, targets in [[ ]]."""

from __future__ import annotations

import numpy as np

from minimind.data.tokenizer.load import AnyTokenizer

OPEN, CLOSE = "[[", "]]"


def readable(tokenizer: AnyTokenizer, ids: np.ndarray, targets: np.ndarray) -> str:
    """Return the text of some token ids; `targets` are the ones that are trained on."""
    names = {i: name for name, i in tokenizer.special_tokens().items()}
    special = np.isin(ids, [*names])
    changes = np.flatnonzero((targets[1:] != targets[:-1]) | special[1:] | special[:-1]) + 1
    text, was_target = "", False
    for part, marks in zip(np.split(ids, changes), np.split(targets, changes), strict=True):
        is_target = bool(marks.any())
        if is_target != was_target:
            text += OPEN if is_target else CLOSE
        text += names.get(int(part[0])) or tokenizer.decode(part.tolist()) if len(part) else ""
        was_target = is_target
    return text + (CLOSE if was_target else "")
