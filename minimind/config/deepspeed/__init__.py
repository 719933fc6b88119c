"""Resolver of a DeepSpeed JSON against a `RunConfig`: fills "auto" values and reports all faults.

Imports no deepspeed; only `backend_choice.py`, which reads the device, imports torch. A new
DeepSpeed key is a row of `keys.py`, a combination that cannot be trained in `rules.py`.
"""
