"""Widths that follow from others; the standard library alone, for whoever plans without torch."""


def feed_forward_width(dim: int) -> int:
    """Width of the feed-forward where none is given: 8/3 dim, up to a multiple of 64."""
    return 64 * -(-8 * dim // (3 * 64))
