"""One optimizer step on DeepSpeed, DDP or a single process.

`build.py` is the only module that imports accelerate and deepspeed, besides the launcher. A backend
starts there, a time of a step in `clocks.py`.
"""
