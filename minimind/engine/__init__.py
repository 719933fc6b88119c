"""One optimizer step on DeepSpeed, DDP or a single process, and the optimizer state in our format.

`build.py` is the only module of the library that imports accelerate and deepspeed. May import
`minimind.model`, `minimind.config` and below. A DeepSpeed wrapper starts in
`optimizer_state_adapters.py`, a backend in `build.py`.

build                     engine creation through Accelerate
collective_clock          time in collectives (comm_ms)
deepspeed_backend         steps under DeepSpeed
deepspeed_logs            corrections of DeepSpeed's comms_logger and flops_profiler
engine                    one optimizer step over all ranks
loss_of_batch             the loss of a micro-batch, its metrics, torch.compile
muon                      Muon for hidden matrices beside AdamW, on whole matrices or shards
op_build_lock             the lock of op compilation, with stale locks removed
optimizer                 parameter groups, AdamW and Muon where the JSON names no optimizer
optimizer_state           weights and moments as named flat slices
optimizer_state_adapters  where each DeepSpeed wrapper stores them
phase_clock               time of each phase of a step
plain_backend             steps under DDP or in one process
weight_average            exponential moving average of the weights
"""
