"""Training that goes wrong: loss spikes, and hardware that computes or stores wrongly.

A change of what counts as a spike begins in `spikes.py`, of what counts as corruption in
`corruption.py`. The loop calls both after a step; the update of the next one
obeys the limit of `SpikeGuard`. `token_balance.py` says where the tokens of a text go.
"""
