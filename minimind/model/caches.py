"""Checks of transformers' key/value caches."""

from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer

# Sliding layers drop keys, quantized ones round them, encoder layers hold keys of other text.
EXACT = (DynamicLayer, StaticLayer)


def cache_sizes(cache: Cache, length: int) -> tuple[int, int]:
    """Return the cached positions, and the keys of attention after `length` more are added.

    In a StaticCache the latter is its size. Raise ValueError if the cache is full or does not
    return every key unchanged.
    """
    kinds = [type(layer) for layer in getattr(cache, "layers", ())]
    if future := getattr(cache, "layer_class_to_replicate", None):
        kinds.append(future)
    wrong = next((kind for kind in kinds if kind not in EXACT), None if kinds else type(cache))
    if wrong:
        raise ValueError(
            f"past_key_values has a {wrong.__name__}, which MiniMind does not support: give a"
            " DynamicCache or a StaticCache."
        )
    past = int(cache.get_seq_length())  # a tensor in StaticCache, modified by its update
    keys = cache.get_mask_sizes(length, 0)[0]
    if past + length > keys:
        raise ValueError(
            f"past_key_values has room for {keys} positions and holds {past}, so that {length}"
            " more do not fit: make it longer."
        )
    return past, keys
