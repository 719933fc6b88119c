"""Token embedding and head of a bigram model of the training text: --embedding_init bigrams."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from minimind.data.shards.token_shards import TokenShards

TOKENS = 2**25  # read at most, evenly over the text: its counts, not its size, cost time
AT_ONCE = 2**20
PRIOR = 200.0  # pseudo-counts of the unigram distribution per token; 80 to 600 differ by 0.5 %


@torch.no_grad()
def start_as_bigrams(model: Any, text: TokenShards) -> None:
    """Set embedding and head of `model`, whose blocks add nothing yet, to predict as bigrams.

    log P(y | x) is log u(y) + log(1 + count(x, y) / (PRIOR u(y))), up to a constant per x, with u
    the smoothed shares of the tokens: the second term is sparse. Its best approximation of rank
    dim - 2, each token weighted by the root of its count, fills all channels but two. One has
    log u(y); the other makes all rows of the embedding as long as the final norm makes them.
    """
    vocabulary, dim = model.model.embed_tokens.weight.shape
    pairs, counts = count_pairs(text, vocabulary)
    x, y = pairs // vocabulary, pairs % vocabulary
    times = np.bincount(y, counts, vocabulary) + 0.5
    shares = times / times.sum()
    roots = torch.from_numpy(times).sqrt()
    values = torch.from_numpy(np.log1p(counts / (PRIOR * shares[y])))
    place = torch.from_numpy(np.stack([x, y]))
    weighted = (values * roots[place[0]] * roots[place[1]]).float()
    with warnings.catch_warnings():  # torch warns that sparse tensors are new and unchecked
        warnings.simplefilter("ignore", UserWarning)
        sparse = torch.sparse_coo_tensor(place, weighted, (vocabulary, vocabulary)).to_sparse_csr()
        left, sizes, right = torch.svd_lowrank(sparse, q=dim - 2)
    weights = (sizes.sqrt() / roots[:, None]).float()
    rows, columns = left * weights, right * weights
    # The final norm makes all rows equally long: most are filled up, the longest are shortened.
    lengths = rows.norm(dim=1)
    length = lengths[place[0].unique()].quantile(0.99)
    rows *= (length / lengths.clamp(min=length))[:, None]
    filling = (length**2 - rows.square().sum(1, keepdim=True)).clamp(min=0).sqrt()
    constant = (length / dim**0.5).expand(vocabulary, 1)
    log_shares = torch.from_numpy(np.log(shares) - np.log(shares).mean()).float()[:, None]
    embedding = torch.cat([rows, filling, constant], 1)
    head = torch.cat([columns, torch.zeros_like(filling), log_shares / constant], 1)
    # A random rotation of both: no channel of the residual stream has a part of its own.
    rotation = torch.linalg.qr(torch.randn(dim, dim))[0]
    scale = dim**0.5 / (length.square() * (1 + 1 / dim)).sqrt()
    model.model.embed_tokens.weight.copy_(embedding @ rotation * scale)
    model.lm_head.weight.copy_(head @ rotation / scale)


def count_pairs(text: TokenShards, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Neighbouring tokens x, y as sorted x * vocabulary + y, and how often each pair occurs."""
    starts = range(0, len(text), AT_ONCE)
    every = -(-len(text) // TOKENS)
    pairs, counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for start in starts[::every]:
        ids = text.stretch(start, min(AT_ONCE, len(text) - start))
        found, times = np.unique(ids[:-1] * vocabulary + ids[1:], return_counts=True)
        pairs, place = np.unique(np.concatenate([pairs, found]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, times])).astype(np.int64)
    return pairs, counts
