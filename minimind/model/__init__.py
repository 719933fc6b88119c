"""The decoder: RMSNorm, grouped-query attention, SwiGLU, rotary position, a loss as sum and count.

A model variant starts in `configuration.py` and `layers.py`. Exports include these modules as
remote code.
"""
