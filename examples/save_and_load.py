"""What a run leaves and how it is taken up again: weights alone, a model's folder, the whole state.

    accelerate launch --multi_gpu --num_processes 2 examples/save_and_load.py --out out/saved
    torchrun --standalone --nproc_per_node 2 examples/save_and_load.py --out out/saved
    python examples/save_and_load.py --out out/saved

    | step 10: parameters sum to 157.55198908231128
    | save_model: 3 shards, the same: True
    | save_pretrained: the same: True

Stopped in the middle (`--stop_after 5`) and taken up again by the same command without it, the
parameters are the same. `save_model` writes safetensors: there is no pytorch_model.bin to load.
Every process calls `save_state` and `save_model`: they wait for one another in there.
`--push_to NAME` sends the model to the hub once, from the main process; that needs a login there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

STEPS, SAVED_AT, ROWS = 10, 5, 4


class Position:
    """How far the run has come: anything with these two methods can be registered."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Numbers, strings and tensors only: nothing else is unpickled."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take up what state_dict gave."""
        self.step = state["step"]


def total(model: torch.nn.Module) -> str:
    """The sum of all parameters, to every digit."""
    return repr(sum(p.detach().double().sum().item() for p in model.parameters()))


def weights_saved(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Write the weights in two ways, read both back and print what came of it."""
    accelerator.wait_for_everyone()  # nobody still trains
    accelerator.save_model(
        model, folder / "weights", max_shard_size="60KB", safe_serialization=True
    )
    # Without the layer that DDP or a compiler puts around it.
    bare: Any = accelerator.unwrap_model(model)
    bare.save_pretrained(
        folder / "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    accelerator.wait_for_everyone()  # the files are there
    shards = sorted(folder.glob("weights/*.safetensors"))
    again = AutoModelForCausalLM.from_config(bare.config)
    device = accelerator.device  # safetensors takes "cpu", and neither this nor "cpu:0"
    place = "cpu" if device.type == "cpu" else str(device)
    load_checkpoint_in_model(again, folder / "weights", device_map={"": place})
    accelerator.print(f"save_model: {len(shards)} shards, the same: {total(again) == total(bare)}")
    whole = AutoModelForCausalLM.from_pretrained(folder / "pretrained")
    accelerator.print(f"save_pretrained: the same: {total(whole) == total(bare)}")


def main() -> None:
    """Train ten steps with the state saved after the fifth, then write the weights."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stop_after", type=int, default=STEPS, help="as if it were interrupted")
    parser.add_argument(
        "--push_to", metavar="NAME", help="a repository of the hub, such as me/tiny"
    )
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(42)
    texts = torch.randint(0, 64, (STEPS * ROWS * accelerator.num_processes, 16))
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    # A generator of its own: to open a loader draws a number, and dropout shall not notice.
    loader = DataLoader(texts, ROWS, generator=torch.Generator())  # type: ignore[arg-type] (a list will do)
    loader, model, optimizer, schedule = accelerator.prepare(loader, model, optimizer, schedule)
    position = Position()
    accelerator.register_for_checkpointing(position)
    if (args.out / "state").exists():  # with the generators: dropout goes on, too
        accelerator.load_state(args.out / "state")
        accelerator.print(f"goes on after step {position.step}")
    model.train()
    for batch in accelerator.skip_first_batches(loader, position.step):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        position.step += 1
        if position.step == SAVED_AT:
            accelerator.save_state(args.out / "state")
        if position.step == args.stop_after:
            break
    accelerator.print(f"step {position.step}: parameters sum to {total(model)}")
    if position.step == STEPS:
        weights_saved(accelerator, model, args.out)
    if args.push_to and accelerator.is_main_process:  # one process of all hosts
        bare: Any = accelerator.unwrap_model(model)
        print(f"push_to_hub: {bare.push_to_hub(args.push_to).commit_url}")
    accelerator.wait_for_everyone()  # nobody leaves while another still sends
    accelerator.end_training()


if __name__ == "__main__":
    main()
