"""Windows of the model's length over every token of every document, for evaluation.

Training rows, in contrast, start anywhere in a document and drop an incomplete last row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minimind.data.loader.token_shards import TokenShards


@dataclass(frozen=True)
class Windows:
    """Ranges of a split; the token before a range is its first input."""

    shards: TokenShards
    starts: np.ndarray  # int64, of what is predicted, counted through the split
    lengths: np.ndarray
    opens: np.ndarray  # whether a text begins here: then what comes before is an end of document
    sources: np.ndarray
    eos_id: int

    def __len__(self) -> int:
        return len(self.starts)

    def tokens(self, number: int) -> np.ndarray:
        """The token before the window and its targets, int64 (length + 1,)."""
        start, length = int(self.starts[number]), int(self.lengths[number])
        if not self.opens[number]:
            return self.shards.stretch(start - 1, length + 1)
        return np.concatenate(([self.eos_id], self.shards.stretch(start, length)))


def windows_of(
    shards: TokenShards, length: int, eos_id: int, apart: bool = True, most: int | None = None
) -> Windows:
    """Windows of at most `length` targets over all documents, grouped by source.

    `apart`: windows end at documents; otherwise a source is one sequence, like packed rows. `most`
    limits the windows of a source; the document that reaches it is completed.
    """
    source_ends = shards.source_ends()
    ends = np.unique(shards.document_ends() if apart else source_ends)
    ends = ends[ends > 0]
    begins = np.concatenate(([0], ends[:-1])).astype(np.int64)[: len(ends)]
    counts = -(-(ends - begins) // length)
    document = np.repeat(np.arange(len(ends)), counts)
    first = (np.cumsum(counts) - counts)[document]  # window of the document
    number = np.arange(len(document)) - first
    starts = begins[document] + number * length
    lengths = np.minimum(length, ends[document] - starts)
    sources = np.searchsorted(source_ends, starts, side="right")
    windows = Windows(shards, starts, lengths, number == 0, sources, eos_id)
    if most is None:
        return windows
    reached = first if apart else np.arange(len(starts))
    kept = reached - np.searchsorted(sources, sources) < most
    return Windows(shards, starts[kept], lengths[kept], (number == 0)[kept], sources[kept], eos_id)
