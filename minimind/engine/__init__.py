"""One optimizer step on DeepSpeed, DDP or a single process.

`build.py` is the only module of the library that imports accelerate and deepspeed. A backend starts
in `build.py`.
"""
