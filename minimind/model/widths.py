"""The default feed-forward width; imports nothing, so that plans need no torch."""


def feed_forward_width(dim: int) -> int:
    """Default width of the feed-forward: 8/3 dim, rounded up to a multiple of 64."""
    return 64 * -(-8 * dim // (3 * 64))
