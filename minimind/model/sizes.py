"""Sizes that plans need too; imports nothing, so that plans need no torch."""

LOSS_CHUNK = 1024  # positions whose logits --loss chunked computes at a time
MAX_FACTOR = 1024  # of rope_scaling
MIN_FLEX_HEAD_DIM = 16  # channels; the minimum of Triton's matrix products
# positions; for fewer torch 2.11 takes a kernel for decoding, which fails to compile for some of
# them (65 positions, 8 query heads and 2 key heads on an H100: NoValidChoicesError)
MIN_FLEX_LENGTH = 128


def feed_forward_width(dim: int) -> int:
    """Default width of the feed-forward: 8/3 dim, rounded up to a multiple of 64."""
    return 64 * -(-8 * dim // (3 * 64))
