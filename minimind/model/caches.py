"""What the decoder asks of Hugging Face's key/value caches."""

from transformers import Cache
from transformers.cache_utils import DynamicLayer, StaticLayer

# A sliding layer forgets keys, a quantized one rounds them, an encoder's holds those of other text.
EXACT = (DynamicLayer, StaticLayer)


def cached(cache: Cache, length: int) -> tuple[int, int]:
    """(positions held, keys that attention will meet once `length` more have joined them).

    The latter are more than the sum in a cache of fixed size, such as StaticCache. A ValueError
    for a cache that is full, or that does not give back every key as it got it.
    """
    kinds = [type(layer) for layer in getattr(cache, "layers", ())]
    if to_come := getattr(cache, "layer_class_to_replicate", None):
        kinds.append(to_come)
    wrong = next((kind for kind in kinds if kind not in EXACT), None if kinds else type(cache))
    if wrong:
        raise ValueError(
            f"past_key_values keeps {wrong.__name__}, which MiniMind does not attend over: give a"
            " DynamicCache or a StaticCache."
        )
    past = int(cache.get_seq_length())  # StaticCache's is a tensor, which its update changes
    keys = cache.get_mask_sizes(length, 0)[0]
    if past + length > keys:
        raise ValueError(
            f"past_key_values has room for {keys} positions and holds {past}, so that {length}"
            " more do not fit: make it longer."
        )
    return past, keys
