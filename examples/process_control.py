"""Which process does what: one for all hosts, one for each host, or a chosen one.

    accelerate launch --multi_gpu --num_processes 2 examples/process_control.py
    torchrun --standalone --nproc_per_node 2 examples/process_control.py
    python examples/process_control.py

    | main_process_first: process 0
    | main_process_first: process 1
    | is_main_process: process 0
    | is_local_main_process: process 0
    | on_main_process: process 0
    | on_local_main_process: process 0
    | on_local_process 0: process 0
    | split_between_processes: process 0 has a b
    | on_process the last: process 1
    | split_between_processes: process 1 has c
    | print: once for all 2

Two hosts on one machine show where "main" and "local main" part; each of these in a terminal:

    torchrun --nnodes 2 --node_rank 0 --master_addr 127.0.0.1 examples/process_control.py
    torchrun --nnodes 2 --node_rank 1 --master_addr 127.0.0.1 examples/process_control.py

The second prints its own "local main" lines and none of the "main" ones. The keyword is
`local_process_index`, and both `is_...` are attributes: `is_local_main_process()` is a TypeError.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm


def main() -> None:
    """Print one line for everything that runs, with the rank it runs on."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank = accelerator.process_index

    def say(what: str, more: str = "") -> None:
        # The end of the line in the same write: torchrun starts `python -u`, where print makes two.
        sys.stdout.write(f"{what}: process {rank}{more}\n")
        sys.stdout.flush()

    @accelerator.on_main_process
    def once() -> None:
        say("on_main_process")

    @accelerator.on_local_main_process
    def once_per_host() -> None:
        say("on_local_main_process")

    last = accelerator.num_processes - 1

    @accelerator.on_process(process_index=last)
    def on_the_last() -> None:
        say("on_process the last")

    @accelerator.on_local_process(local_process_index=0)
    def on_the_first_of_each_host() -> None:
        say("on_local_process 0")

    with accelerator.main_process_first():  # the main one prepares, then the others come in
        say("main_process_first")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:  # such as what is sent to a hub, or written once
        say("is_main_process")
    if accelerator.is_local_main_process:  # such as what is put on a host's own disk
        say("is_local_main_process")
    once()
    once_per_host()
    on_the_last()
    on_the_first_of_each_host()
    for _ in tqdm(range(3), disable=not accelerator.is_local_main_process):
        pass
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=False) as mine:
        say("split_between_processes", f" has {' '.join(map(str, mine))}")
    accelerator.wait_for_everyone()  # nobody goes on before all are here
    accelerator.print(f"print: once for all {accelerator.num_processes}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
