"""The resolver: a DeepSpeed JSON against a `RunConfig`, every "auto" filled, every fault found.

May import `minimind.config` and below; pure, without deepspeed. A new DeepSpeed key begins in
`keys.py`, a combination that cannot be trained in `incompatible.py`.

auto_values      the value of each "auto", and its source
backend_choice   DeepSpeed, DDP or a single process, and on which device
effects          settings that this loop never acts on
engine_rules     what DeepSpeed's engine refuses, found before it is built
incompatible     settings that exclude each other
keys             names and types of everything that DeepSpeed reads
literals         values in the DeepSpeed and Accelerate files against the flags
normalize        every literal as DeepSpeed reads it
resolve          the resolver
schema           unknown, misspelt and mistyped keys
"""
