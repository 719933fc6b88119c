"""Training that goes wrong: loss spikes, and hardware that computes or stores wrongly.

A change of what counts as a spike begins in `spikes.py`, of what counts as corruption in
`corruption.py`. The loop calls `SpikeGuard` once before and once after every step,
`CorruptionCheck` before.
"""
