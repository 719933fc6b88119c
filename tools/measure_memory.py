"""Worker of test_memory.py: how many bytes of tensors each process holds in a step, and sends.

Usage: torchrun ... measure_memory.py OUT.json STAGE,DTYPE,ACCUMULATION,OPTIMIZER ...
(STAGE None: DDP; OPTIMIZER may be followed by further flags)
Engines are built one after another. In the last of three steps (moments exist from the second on)
every live tensor is looked at whenever a gradient is made, a collective called, an update begun.
Storages count once. Left out are integers (the batch), complex numbers (pos_cis) and what has a
grad_fn (activations, which tests/architecture/test_costs.py measures).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState  # noqa: TID251 (a fresh one for every engine)

from minimind.architecture.shape import is_frozen
from minimind.config.deepspeed.document import read_deepspeed_json
from minimind.config.deepspeed.resolve import ResolvedConfig, resolve
from minimind.config.flags import SHAPE
from minimind.config.parse import parse_flags
from minimind.config.run_config import DEFAULT_DEEPSPEED_CONFIG
from minimind.engine import flat_partitions, optimizers
from minimind.engine.build import build_engine
from minimind.engine.clocks import PhaseClock
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig

SETTLED = 0.05  # seconds, in which a thread that is ready has run on a loaded machine
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")


def inner_parts(engine: Any) -> tuple[Any, Any]:
    """(DeepSpeed's engine or a plain backend, the optimizer it steps): the only look inside."""
    deepspeed = getattr(engine.backend, "engine", None)
    if deepspeed is None:
        return engine.backend, engine.backend.torch_optimizer
    return deepspeed, getattr(deepspeed.optimizer, "optimizer", deepspeed.optimizer)


def held() -> int:
    """Bytes of the storages of numbers and of 8-bit codes that are no activations."""
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):  # isinstance would wake lazy proxies
            grad = found.grad if found.is_leaf else None
            for tensor in (found, grad, getattr(found, "ds_tensor", None)):
                if tensor is None or tensor.grad_fn:
                    continue
                if not tensor.is_floating_point() and tensor.dtype != torch.uint8:
                    continue
                if tensor.device.type != "meta":
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def settled(most: int) -> int:
    """Bytes held; what is above `most` is counted again after a moment.

    A thread of gloo lets go of a collective's tensors some time after `wait` has returned.
    """
    now = held()
    if now > most:
        time.sleep(SETTLED)
        now = min(now, held())
    return now


def require_in_force(deepspeed: Any, config: dict[str, Any]) -> None:
    """Nothing, or an AssertionError: DeepSpeed's own numbers are those of the printed table."""
    zero = deepspeed._config.zero_config
    live = {
        "train_batch_size": deepspeed.train_batch_size(),
        "train_micro_batch_size_per_gpu": deepspeed.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": deepspeed.gradient_accumulation_steps(),
        "gradient_clipping": deepspeed.gradient_clipping(),
    }
    assert live == {name: config[name] for name in live}, (live, config)
    requested = config["zero_optimization"]
    assert (int(zero.stage), zero.reduce_bucket_size, zero.overlap_comm) == (
        requested["stage"],
        requested["reduce_bucket_size"],
        requested["overlap_comm"],
    )
    params = config.get("optimizer", {}).get("params")
    for group in deepspeed.optimizer.param_groups if params else ():
        assert list(group["betas"]) == params["betas"], group["betas"]
        assert group["eps"] == params["eps"]
        assert group["lr"] == params["lr"]


class Watch:
    """The most that was held while it was on, and the bytes that went through collectives."""

    def __init__(self) -> None:
        self.is_on = False
        self.most = 0
        self.through: Counter[str] = Counter()
        for name in COLLECTIVES:
            setattr(dist, name, self._watched(getattr(dist, name), name))

    def start(self) -> None:
        self.is_on, self.most = True, 0
        self.through.clear()

    def look(self, *_: Any) -> None:
        if self.is_on:
            self.most = max(self.most, settled(self.most))

    def before(self, owner: Any, method: str) -> None:
        """Look whenever `owner.method` is about to run."""
        real = getattr(owner, method)

        def call(*args: Any, **options: Any) -> Any:
            self.look()
            return real(*args, **options)

        setattr(owner, method, call)

    def _watched(self, collective: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.look()
            if self.is_on:  # of input and output the larger: the whole of what is shared
                tensors = [a for a in (*args, *options.values()) if torch.is_tensor(a)]
                self.through[name] += max(t.nbytes for t in tensors)
            return collective(*args, **options)

        return call


def measure(
    watch: Watch, stage: int | None, dtype: str, accumulation: int, kind: str
) -> dict[str, Any]:
    """One engine and three steps, of which the third is watched."""
    # Or every engine gets the plugin of the first.
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    gc.freeze()  # what is there by now is neither looked at nor counted
    words = f"--model tiny --batch_size 1 --max_steps 3 --device cpu --dtype {dtype}"
    run = parse_flags(f"{words} --accumulation_steps {accumulation} --optimizer {kind}".split())
    written = read_deepspeed_json(str(DEFAULT_DEEPSPEED_CONFIG))
    written["zero_optimization"]["stage"] = stage or 0
    if run.optimizer != "adamw":
        del written["optimizer"]
    resolved = resolve(written, "measured.json", run, int(os.environ["WORLD_SIZE"]), "cpu")
    zero = resolved.config["zero_optimization"]
    resolved = ResolvedConfig(run, "ddp") if stage is None else resolved
    shape = {name: getattr(run, name) for name in SHAPE if name != "rope_theta"}
    model = MiniMindForCausalLM(MiniMindConfig(**shape))
    for name, parameter in model.named_parameters():
        if is_frozen(name, run.freeze):
            parameter.requires_grad_(False)
        else:
            parameter.register_post_accumulate_grad_hook(watch.look)
    engine = build_engine(resolved, model, "cpu")
    deepspeed, optimizer = inner_parts(engine)
    if stage is not None:
        require_in_force(deepspeed, resolved.config)
    watch.before(deepspeed, "update" if stage is None else "step")
    watch.before(optimizer, "step")
    for step in range(3):
        rows = torch.randint(run.vocab_size, (accumulation, 1, run.max_seq_len + 1))
        clock = PhaseClock(torch.device("cpu"))
        clock.begin()
        if step == 2:
            watch.start()
        engine.step(list(rows), 1e-3, clock)
        watch.look()
    watch.is_on = False
    return {
        "of": [stage, dtype, accumulation, kind],
        "held": engine.gather(watch.most),
        "through": dict(watch.through),
        "reduce_bucket": zero["reduce_bucket_size"],
        "overlap": zero["overlap_comm"],
        "persistence_threshold": zero["stage3_param_persistence_threshold"],
    }


def main() -> None:
    """Measure every case of the command line; rank 0 writes the list."""
    import_module("deepspeed")  # its many objects are frozen with the others
    watch = Watch()
    optimizers.iteration_dtype = lambda device: torch.float32  # as the plan counts for a CPU
    watch.before(torch, "addmm")  # of the iteration
    watch.before(torch.Tensor, "sign_")  # of Lion
    watch.before(flat_partitions, "_copy_each")  # into buckets and vectors
    watch.before(flat_partitions, "Gradients")  # beside their fp32 copies
    found = []
    for words in sys.argv[2:]:
        stage, dtype, accumulation, kind = words.split(",")
        number = None if stage == "None" else int(stage)
        found.append(measure(watch, number, dtype, int(accumulation), kind))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # several engines share one process group: none of them may take it down


if __name__ == "__main__":
    main()
