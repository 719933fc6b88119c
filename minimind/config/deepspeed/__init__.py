"""Resolver of a DeepSpeed JSON against a `RunConfig`: fills "auto" values and reports all faults.

May import `minimind.config` and below. Imports no deepspeed; only `backend_choice.py` and
`compiled_ops.py`, which read the device, import torch. A new DeepSpeed key starts in `keys.py`, a
combination that cannot be trained in `incompatible.py`.

auto_values      the value of each "auto", and its source
backend_choice   DeepSpeed, DDP or a single process, and on which device
compiled_ops     ops of DeepSpeed that are compiled at the start, or replaced
config_values    config values of the DeepSpeed and Accelerate files
effects          settings without effect in this training loop
engine_rules     faults of DeepSpeed's engine, reported before it is built
incompatible     settings that exclude each other
keys             names and types of everything that DeepSpeed reads
normalize        config values as DeepSpeed reads them
optimizer        the optimizer block as flags, and flags without effect
resolve          the resolver
schema           unknown, misspelt and mistyped keys
"""
