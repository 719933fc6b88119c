"""Training that goes wrong: loss spikes, and hardware that computes or stores wrongly.

May import `minimind.provenance` and below. A change of what counts as a spike begins in
`spike_detector.py`, of what counts as corruption in `corruption.py`. The loop calls `SpikeGuard`
once before and once after every step, `CorruptionCheck` before.

corruption        decides which ranks are at fault, from what all of them found
corruption_check  compares state between ranks, and computes rows again
spike_detector    decides which steps are spikes, from loss and gradient norm
spike_guard       observes the steps of a run, names the documents of spikes
"""
