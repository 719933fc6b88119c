"""One optimizer step on DeepSpeed, DDP or a single process.

`build.py` is the only module of the library that imports accelerate and deepspeed. May import
`minimind.engine.optimizer`, `minimind.model` and below. A backend starts in `build.py`.

build              engine creation through Accelerate
collective_clock   time in collectives (comm_ms)
deepspeed_backend  steps under DeepSpeed
deepspeed_logs     corrections of DeepSpeed's comms_logger and flops_profiler
engine             one optimizer step over all ranks
loss_of_batch      the loss of a micro-batch, its metrics, torch.compile
norm_limit         lets DeepSpeed skip an update whose gradient norm is above a limit
op_build_lock      the lock of op compilation, with stale locks removed
phase_clock        time of each phase of a step
plain_backend      steps under DDP or in one process
replay             passes that are repeated, and checksums of state
"""
