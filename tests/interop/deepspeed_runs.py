"""Runs of DeepSpeed itself, saved and continued: python -m ... SOURCE OUT CASES, once per rank.

CASES is JSON: a list of [name, stage, dtype]. The processes meet by the variables of torchrun.
Each writes OUT/NAME/global_stepN, beside it the model's config.json, and `after.pt` with what
DeepSpeed itself says: the whole weights and moments at the save, and the losses of the next steps.
If SOURCE/DTYPE is a universal checkpoint, the run begins with it instead, and is not saved; it is
of torch's SGD if there is a file SOURCE/SGD. Numbers of the optimizer that differ here are in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed  # noqa: TID251 (what it saves is read)
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

STEPS, MORE, ROWS, LENGTH = 3, 5, 4, 16
RATE, BETAS, DECAY, CLIP = 1e-2, (0.9, 0.95), 0.1, 1.0
KINDS = ("exp_avg", "exp_avg_sq")


def rows(step: int, vocab_size: int) -> torch.Tensor:
    """The rows of all ranks at a step, (ROWS, LENGTH)."""
    random = torch.Generator().manual_seed(step)
    return torch.randint(5, vocab_size, (ROWS, LENGTH), generator=random)


def configuration(stage: int, dtype: str, processes: int) -> dict[str, Any]:
    blocks: dict[str, Any] = {
        "bfloat16": {"bf16": {"enabled": True}},
        "float16": {"fp16": {"enabled": True}},
        "bf16-mixed": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    }
    return {
        "train_micro_batch_size_per_gpu": ROWS // processes,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **blocks.get(dtype, {}),
    }


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not, as with the Trainer of transformers."""
    weights = [*model.parameters()]
    return [
        {"params": [p for p in weights if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]


def run(source: Path, out: Path, stage: int, dtype: str, processes: int, rank: int) -> None:
    torch.manual_seed(1)
    is_universal = (source / dtype / "latest_universal").is_file()
    config = configuration(stage, dtype, processes)
    if is_universal:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source / dtype))
        tag = (source / dtype / "latest_universal").read_text()
        state = torch.load(source / dtype / tag / "mp_rank_00_model_states.pt")
        own = ("train_micro_batch_size_per_gpu", "zero_optimization")
        config = {name: config[name] for name in own} | state["ds_config"]  # what it asks for
    else:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    of_weights = groups(model)
    if (source / "SGD").is_file():
        optimizer = torch.optim.SGD(of_weights, lr=0.5, momentum=0.1)
    else:
        optimizer = torch.optim.AdamW(of_weights, lr=0.5 if is_universal else RATE, betas=BETAS)
    initialize: Any = deepspeed.initialize
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    share = ROWS // processes
    losses = []

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            ids = rows(step, model.config.vocab_size)[rank * share : (rank + 1) * share]
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            mean = loss.detach().float().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / processes)

    if is_universal:
        engine.load_checkpoint(str(source / dtype))
        assert engine.global_steps == STEPS
        for state in optimizer.state.values():  # stage 3 gives all of them one tensor
            if "step" in state:
                state["step"] = state["step"].clone()
    else:
        train(0, STEPS)
        engine.save_checkpoint(str(out))
    saved: dict[str, Any] = {"fp32": {}, **{kind: {} for kind in KINDS}}
    if stage:
        if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
            engine.optimizer._hp_optimizer_states_linked = False  # its links are of the first step
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, p in engine.module.named_parameters():
            whole: Any = deepspeed.utils.safe_get_full_fp32_param(p)
            saved["fp32"][name] = whole.clone()
            for kind in KINDS if isinstance(optimizer, torch.optim.AdamW) else ():
                moment: Any = deepspeed.utils.safe_get_full_optimizer_state(p, kind)
                saved[kind][name] = moment.clone()
    train(STEPS, STEPS + MORE)
    if rank == 0:
        out.mkdir(exist_ok=True)
        torch.save({"losses": losses, **saved}, out / "after.pt")
        model.config.save_pretrained(out)
    dist.barrier()


def main() -> None:
    source, out, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    dist.init_process_group("gloo")
    operators = {**deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm": False}  # takes minutes
    deepspeed.ops.__dict__["__compatible_ops__"] = operators
    # Asked before the first step only; the kernels of torch take float16 on any CPU.
    accelerator: Any = deepspeed.accelerator.get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    for name, stage, dtype in cases:
        run(source, out / name, stage, dtype, dist.get_world_size(), dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
