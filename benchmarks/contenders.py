"""One training loop as a process that takes steps on request.

    python -m benchmarks.contenders NAME SHAPE ROWS READ_FD WRITE_FD FOLDER [FLAG ...]

Started by benchmarks.throughput, .compiling, .stages and .gpu. A NAME that is not in `CONTENDERS`
or `VARIANTS` is train_pretrain.py with the FLAGs. The other loops read --dtype, --max_seq_len and
--device cuda of them (default device: the CPU).

Between turns it waits. A step is timed from just before its first micro-batch is fetched to the
same point of the next step, without the waiting, so it covers the whole loop. A turn is the number
of steps in the request; on a GPU it ends when all queued work is done.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import preset
from minimind.config.parse import parse_flags
from minimind.model.causal_lm import MiniMindForCausalLM
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.environment import peak_bytes

LEARNING_RATE, BETAS, DECAY, CLIP = 5e-4, (0.9, 0.95), 0.1, 1.0


class Gate:
    """Reads a number of steps, lets them pass, and writes their mean time and peak memory."""

    def __init__(self, read: int, write: int) -> None:
        self.requests, self.answers = open(read), open(write, "w")
        self.since: tuple[float, float] | None = None
        self.turn = self.left = 0  # steps

    def wait_for_turn(self) -> None:
        """Call before every step; after the last of a turn, answer and wait for the next."""
        self.left -= 1
        if self.left > 0:
            return
        if self.since is not None:
            wall, cpu = (
                (now - then) / self.turn for now, then in zip(_clocks(), self.since, strict=True)
            )
            result = {"seconds": wall, "cpu": cpu, "peak_mib": _peak_mib()}
            self.answers.write(json.dumps(result) + "\n")
            self.answers.flush()
        line = self.requests.readline()
        if not line:
            os._exit(0)
        self.turn = self.left = int(line)
        self.since = _clocks()


def _clocks() -> tuple[float, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def _peak_mib() -> float:
    """Peak of allocated GPU memory if CUDA is in use, else of resident memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_bytes() / 2**20


def this_project(
    gate: Gate, shape: str, rows: int, folder: Path, *more: str, flags: str = ""
) -> None:
    """train_pretrain.py on the text in `folder`, with `flags` and then `more`."""
    from minimind.data.rows.batches import Batches
    from minimind.launch.train_pretrain import main

    read = Batches.at

    def at(self: Batches, step: int) -> Any:
        gate.wait_for_turn()
        return read(self, step)

    Batches.at = at
    out_dir = folder / f"out-{os.getpid()}"
    defaults = f"--model {shape} --batch_size {rows} --max_steps 100000 --device cpu --resume none"
    defaults += f" --learning_rate {LEARNING_RATE} --weight_decay {DECAY} --eval_rows 0"
    defaults += " --save_interval 100000 --save_minutes 0"
    defaults += f" --data_path {folder / 'text.jsonl'} --cache_dir {folder / 'cache'}"
    os._exit(main([*defaults.split(), "--out_dir", str(out_dir), *flags.split(), *more]))


def compiled_whole(gate: Gate, *place: Any) -> None:
    """train_pretrain.py with model.forward compiled as one graph."""
    del MiniMindForCausalLM.compiled_methods
    this_project(gate, *place, flags=f"--compile on {PLAIN}")


def random_rows(
    shape: str, rows: int, *flags: str
) -> tuple[Any, Callable[[], Iterator[torch.Tensor]]]:
    """The shape's flags, and rows of random tokens: a loader that takes almost no time."""
    run = parse_flags(["--model", shape, *flags])
    size = (4096, run.max_seq_len + 1)
    text = torch.randint(run.vocab_size, size, device=device_of(run))

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield text[torch.randint(len(text), (rows,), device=text.device)]

    return run, batches


def device_of(run: Any) -> str:
    """The device of a plain loop: the CPU, unless --device cuda is given."""
    return "cuda" if run.device == "cuda" else "cpu"


def plain_loop(
    gate: Gate, run: Any, model: torch.nn.Module, loss_of: Any, batches: Iterator[Any]
) -> None:
    """A plain training loop: autocast to bf16 unless in fp32, clip, fused AdamW."""
    device = device_of(run)
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY, fused=True
    )
    while True:
        gate.wait_for_turn()
        with torch.autocast(device, torch.bfloat16, enabled=run.dtype == "bfloat16"):
            loss = loss_of(next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def bare(gate: Gate, shape: str, rows: int, folder: Path, *flags: str) -> None:
    """The same model, compiled, in the plain loop."""
    run, batches = random_rows(shape, rows, *flags)
    model = preset(shape, run.max_seq_len)

    @torch.compile(dynamic=False)
    def loss_of(text: torch.Tensor) -> Any:
        out = model(text[:, :-1], shift_labels=text[:, 1:], loss_chunk_size=0)
        return out.loss_sum / out.targets

    plain_loop(gate, run, model, loss_of, batches())


def llama_model(run: Any) -> Any:
    """transformers' model of the same shape, with SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig  # its type lacks attn_implementation
    return LlamaForCausalLM(
        config(
            vocab_size=run.vocab_size,
            hidden_size=run.dim,
            intermediate_size=MiniMindConfig(hidden_size=run.dim).intermediate_size,
            num_hidden_layers=run.n_layers,
            num_attention_heads=run.n_heads,
            num_key_value_heads=run.n_kv_heads,
            max_position_embeddings=run.max_seq_len,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def llama(gate: Gate, shape: str, rows: int, folder: Path, *flags: str) -> None:
    """transformers' LlamaForCausalLM, eager, in the plain loop."""
    run, batches = random_rows(shape, rows, *flags)
    model = llama_model(run)
    plain_loop(
        gate, run, model, lambda text: model(text[:, :-1], labels=text[:, :-1]).loss, batches()
    )


def litgpt(gate: Gate, shape: str, rows: int, folder: Path, *flags: str) -> None:
    """litgpt's GPT of the same shape, eager, in the plain loop, with litgpt's own loss."""
    # litgpt is installed for this comparison only.
    from litgpt.config import Config  # pyright: ignore[reportMissingImports] (as above)
    from litgpt.model import GPT  # pyright: ignore[reportMissingImports] (as above)
    from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports] (as above)

    run, batches = random_rows(shape, rows, *flags)
    model = GPT(
        Config(
            block_size=run.max_seq_len,
            vocab_size=run.vocab_size,
            padded_vocab_size=run.vocab_size,
            n_layer=run.n_layers,
            n_head=run.n_heads,
            n_query_groups=run.n_kv_heads,
            n_embd=run.dim,
            intermediate_size=MiniMindConfig(hidden_size=run.dim).intermediate_size,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )
    model.lm_head.weight = model.transformer.wte.weight  # tied, as in the others

    def loss_of(text: torch.Tensor) -> Any:
        return chunked_cross_entropy(model(text[:, :-1]), text[:, 1:])

    plain_loop(gate, run, model, loss_of, batches())


def trainer(gate: Gate, shape: str, rows: int, folder: Path, *flags: str) -> None:
    """transformers' Trainer on the same model, with our resolved DeepSpeed JSON."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
    )
    from transformers import Trainer, TrainingArguments, training_args

    from minimind.engine.build import leave_out_shm_comm

    leave_out_shm_comm()
    # It takes bf16 on a CPU only with use_cpu=True, with which Accelerate leaves DeepSpeed out.
    training_arguments: Any = training_args
    training_arguments.is_torch_bf16_gpu_available = lambda: True
    run, batches = random_rows(shape, rows, *flags)
    written = folder.glob("out-*/ds_config.resolved.json")
    resolved = next((path for path in written if "zero_optimization" in path.read_text()), None)
    if resolved is None:
        raise SystemExit(
            "the Trainer needs the resolved file of our ZeRO-2 run; run that contender first"
        )

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> int:
            return index

    endless = batches()

    def collate(_: list[int]) -> dict[str, torch.Tensor]:
        gate.wait_for_turn()
        text = next(endless)[:, :-1]
        return {"input_ids": text, "labels": text}

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=rows,
        max_steps=100_000,
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        bf16=run.dtype == "bfloat16",
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        deepspeed=str(resolved),
    )
    Trainer(llama_model(run), arguments, train_dataset=Rows(), data_collator=collate).train()


ZERO_2, PLAIN = "--deepspeed_config configs/ds_config.json", "--deepspeed_config none"
CONTENDERS: dict[str, Callable[..., None]] = {
    "ours, ZeRO-2, compiled": partial(this_project, flags=f"--compile on {ZERO_2}"),
    "ours, single, compiled": partial(this_project, flags=f"--compile on {PLAIN}"),
    "ours, ZeRO-2, eager": partial(this_project, flags=f"--compile off {ZERO_2}"),
    "bare compiled loop": bare,
    "Llama, eager loop": llama,
    "Llama, Trainer, ZeRO-2": trainer,
    "litgpt, eager loop": litgpt,
}
VARIANTS: dict[str, Callable[..., None]] = {"ours, single, compiled as a whole": compiled_whole}

if __name__ == "__main__":
    name, shape, rows, read, write, folder, *flags = sys.argv[1:]
    train = (CONTENDERS | VARIANTS).get(name, this_project)
    train(Gate(int(read), int(write)), shape, int(rows), Path(folder), *flags)
