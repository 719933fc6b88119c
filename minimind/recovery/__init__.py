"""Recovery from training that goes wrong: loss spikes.

May import `minimind.provenance` and below. A change of what counts as a spike begins in
`spike_detector.py`; the loop calls `SpikeGuard` once before and once after every step.

spike_detector    decides which steps are spikes, from loss and gradient norm
spike_guard       observes the steps of a run, names the documents of spikes
"""
