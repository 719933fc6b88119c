"""The decoder: RMSNorm, grouped-query attention, SwiGLU, rotary position, a loss as sum and count.

A model variant starts in `decoder.py`, its fields for transformers in `configuration.py`. Exports
include these modules as remote code.
"""
