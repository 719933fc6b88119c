"""One way to train the same shape, as a process that takes a step whenever it is told to.

    python -m benchmarks.contenders NAME SHAPE ROWS READ_FD WRITE_FD FOLDER [FLAGS OF OURS ...]

Started by benchmarks.throughput, .stages and .gpu; a NAME that is not here is train_pretrain.py
with the FLAGS, of which the loops that are here take --dtype, --max_seq_len and --device cuda (else
they run on the CPU). Between its turns a contender waits, and
costs nothing. Each stands at a gate where its step begins: before the first micro-batch is asked
for. What lies between two passages of the gate, less the waiting, is its step: all of the loop, not
only the mathematics. A turn is as many steps as the line says that asks for it. On a GPU it ends
when all that was queued has run.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import preset
from minimind.config.parse import parse_flags
from minimind.model.configuration import MiniMindConfig
from minimind.model.decoder import MiniMindForCausalLM

LEARNING_RATE, BETAS, DECAY, CLIP = 5e-4, (0.9, 0.95), 0.1, 1.0


class Gate:
    """Lets so many steps through as each line it reads says, and answers with what one took."""

    def __init__(self, read: int, write: int) -> None:
        self.requests, self.answers = open(read), open(write, "w")
        self.since: tuple[float, float] | None = None
        self.turn = self.left = 0  # steps

    def passage(self) -> None:
        """After the last step of a turn: answer for it, and wait until the next may begin."""
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
    """Of the GPU's memory where there is one in use, else of resident memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def product(gate: Gate, shape: str, rows: int, folder: Path, *more: str, flags: str = "") -> None:
    """train_pretrain.py with `flags`, and `more` that override ours, on the text in `folder`."""
    from minimind.data.loader.batches import Batches
    from minimind.launch.train_pretrain import main

    read = Batches.at

    def at(self: Batches, step: int) -> Any:
        gate.passage()
        return read(self, step)

    Batches.at = at
    out_dir = folder / f"out-{os.getpid()}"
    given = f"--model {shape} --batch_size {rows} --max_steps 100000 --device cpu --resume none"
    given += f" --learning_rate {LEARNING_RATE} --eval_rows 0 --save_interval 100000"
    given += " --save_minutes 0"
    given += f" --data_path {folder / 'text.jsonl'} --cache_dir {folder / 'cache'}"
    os._exit(main([*given.split(), "--out_dir", str(out_dir), *flags.split(), *more]))


def as_a_whole(gate: Gate, *place: Any) -> None:
    """train_pretrain.py with model.forward compiled as one graph."""
    del MiniMindForCausalLM.compiled_methods
    product(gate, *place, flags=f"--compile on {PLAIN}")


def random_rows(
    shape: str, rows: int, *flags: str
) -> tuple[Any, Callable[[], Iterator[torch.Tensor]]]:
    """The shape's flags, and rows of random tokens: a loader that costs next to nothing."""
    run = parse_flags(["--model", shape, *flags])
    size = (4096, run.max_seq_len + 1)
    text = torch.randint(run.vocab_size, size, device=device_of(run))

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield text[torch.randint(len(text), (rows,), device=text.device)]

    return run, batches


def device_of(run: Any) -> str:
    """Where a loop written by hand trains: the CPU, unless --device cuda is given."""
    return "cuda" if run.device == "cuda" else "cpu"


def by_hand(
    gate: Gate, run: Any, model: torch.nn.Module, loss_of: Any, batches: Iterator[Any]
) -> None:
    """The loop that everybody writes: autocast to bf16 unless in fp32, clip, fused AdamW."""
    device = device_of(run)
    model.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY, fused=True
    )
    while True:
        gate.passage()
        with torch.autocast(device, torch.bfloat16, enabled=run.dtype == "bfloat16"):
            loss = loss_of(next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def bare(gate: Gate, shape: str, rows: int, folder: Path, *flags: str) -> None:
    """The same model in a compiled loop of a few lines, without anything around it."""
    run, batches = random_rows(shape, rows, *flags)
    model = preset(shape)

    @torch.compile(dynamic=False)
    def loss_of(text: torch.Tensor) -> Any:
        out = model(text[:, :-1], shift_labels=text[:, 1:], loss_chunk_size=0)
        return out.loss_sum / out.targets

    by_hand(gate, run, model, loss_of, batches())


def llama_model(run: Any) -> Any:
    """transformers' model of the same shape, with SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
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
    """transformers' LlamaForCausalLM, eager, in the same few lines."""
    run, batches = random_rows(shape, rows, *flags)
    model = llama_model(run)
    by_hand(gate, run, model, lambda text: model(text[:, :-1], labels=text[:, :-1]).loss, batches())


def litgpt(gate: Gate, shape: str, rows: int, folder: Path, *flags: str) -> None:
    """litgpt's GPT of the same shape, eager, in the same few lines, with the loss it trains by."""
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

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

    by_hand(gate, run, model, loss_of, batches())


def trainer(gate: Gate, shape: str, rows: int, folder: Path, *flags: str) -> None:
    """transformers' Trainer on the same model, with the DeepSpeed JSON that product resolved."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1
    )
    from transformers import Trainer, TrainingArguments, training_args

    # It takes bf16 on a CPU only with use_cpu=True, with which Accelerate leaves DeepSpeed out.
    training_args.is_torch_bf16_gpu_available = lambda: True
    run, batches = random_rows(shape, rows, *flags)
    written = folder.glob("out-*/ds_config.resolved.json")
    resolved = next((path for path in written if "zero_optimization" in path.read_text()), None)
    if resolved is None:
        raise SystemExit("the Trainer takes the file of a ZeRO-2 run of ours: race that before it")

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> int:
            return index

    endless = batches()

    def collate(_: list[int]) -> dict[str, torch.Tensor]:
        gate.passage()
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
    "ours, ZeRO-2, compiled": partial(product, flags=f"--compile on {ZERO_2}"),
    "ours, single, compiled": partial(product, flags=f"--compile on {PLAIN}"),
    "ours, ZeRO-2, eager": partial(product, flags=f"--compile off {ZERO_2}"),
    "bare compiled loop": bare,
    "Llama, eager loop": llama,
    "Llama, Trainer, ZeRO-2": trainer,
    "litgpt, eager loop": litgpt,
}
VARIANTS: dict[str, Callable[..., None]] = {"ours, single, compiled as a whole": as_a_whole}

if __name__ == "__main__":
    name, shape, rows, read, write, folder, *flags = sys.argv[1:]
    train = (CONTENDERS | VARIANTS).get(name, product)
    train(Gate(int(read), int(write)), shape, int(rows), Path(folder), *flags)
