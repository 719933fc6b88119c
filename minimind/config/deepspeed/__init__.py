"""Resolver of a DeepSpeed JSON against a `RunConfig`: fills "auto" values and reports all faults.

Imports no deepspeed; only `backend_choice.py` and `compiled_ops.py`, which read the device, import
torch. A new DeepSpeed key starts in `keys.py`, a combination that cannot be trained in
`incompatible.py`.
"""
