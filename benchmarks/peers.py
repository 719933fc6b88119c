"""Models, optimizers and schedules of other projects, from a checkout that the reader gives.

Nothing of theirs is copied: their files are imported from the checkout and driven by a small loop,
on a CPU in fp32, with the token ids of a prepared folder. nanochat has the width, depth and heads
of the preset, with a key head per head as its base_train builds it; full attention windows, which
it advises without Flash Attention; rows by its rule (rows.best_fit_rows) of documents in a random
order. --lr multiplies the four rates that base_train derives for the tokens of a step. MiniMind has
the shape of the preset, with rows as it ships, a document each and padded, or packed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.record import preset
from benchmarks.rows import best_fit_rows, documents, packed_rows, shuffled
from minimind.config.parse import parse_flags
from minimind.data.prepare.prepared import open_prepared
from minimind.data.rows.batches import windows_of
from minimind.engine.build import evaluation_accelerator
from minimind.inference.score import Part, figures_of, score
from minimind.model.loss import IGNORED

if TYPE_CHECKING:
    from benchmarks.racers import Clock


def nanochat(args: argparse.Namespace, clock: Clock) -> torch.nn.Module:
    """nanochat's GPT and MuonAdamW by the rules of its base_train; return the model."""
    # Read when its modules are imported: no bf16, and no kernel from the Hub.
    os.environ.update(NANOCHAT_DTYPE="float32", CUDA_VISIBLE_DEVICES="")
    run, peer = parse_flags(["--model", args.model]), PEERS["nanochat"]
    gpt = peer.module(args.peer, "nanochat.gpt", "GPT", "GPTConfig")
    file, methods = peer.file(args.peer, "nanochat.gpt"), vars(gpt.GPT)
    peer.require(args.peer, file, methods, ("init_weights", "num_scaling_params", SETUP))
    peer.require(args.peer, file, signature(methods[SETUP]).parameters, RATES)
    rules = base_train(args.peer)
    options = rules["args"]

    def built(layers: int, dim: int, heads: int) -> Any:
        with torch.device("meta"):
            return gpt.GPT(
                gpt.GPTConfig(
                    sequence_len=run.max_seq_len,
                    vocab_size=run.vocab_size,
                    n_layer=layers,
                    n_head=heads,
                    n_kv_head=heads,
                    n_embd=dim,
                    window_pattern="L",
                )
            )

    def size(model: Any) -> int:
        counts = model.num_scaling_params()
        return counts["transformer_matrices"] + counts["lm_head"]

    torch.manual_seed(args.seed)
    model = built(run.n_layers, run.dim, run.n_heads).to_empty(device="cpu")
    model.init_weights()
    scale = math.sqrt(args.rows * run.max_seq_len / rules["B_REF"])
    reference = built(12, 12 * options.aspect_ratio, 12 * options.aspect_ratio // options.head_dim)
    rules["weight_decay_scaled"] = options.weight_decay * scale * size(reference) / size(model)
    rules["num_iterations"] = args.steps
    optimizer = model.setup_optimizer(
        **{name: getattr(options, name) * scale * args.lr for name in RATES},
        weight_decay=rules["weight_decay_scaled"],
    )
    rows = best_fit_rows(endless(documents(args.data)), run.max_seq_len + 1)
    compiled, judged = torch.compile(model, dynamic=False), WithLogits(model)
    clock.start()
    for step in range(args.steps):
        batch = torch.from_numpy(np.stack([next(rows) for _ in range(args.rows)]))
        compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()).backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rules["get_lr_multiplier"](step)
            if group["kind"] == "muon":
                group["momentum"] = rules["get_muon_momentum"](step)
                group["weight_decay"] = rules["get_weight_decay"](step)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        clock.after(step + 1, (step + 1) * args.rows * run.max_seq_len, saving(judged))
    return judged


class WithLogits(torch.nn.Module):
    """A model that returns logits, called like one of transformers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        return SimpleNamespace(logits=self.model(input_ids))


def endless(texts: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The texts without their last token, each epoch in a random order."""
    for number in shuffled(len(texts), 1):
        yield texts[int(number)][:-1]


def base_train(checkout: Path) -> dict[str, Any]:
    """Flags (`args`), functions and B_REF of nanochat's base_train, a script that trains if run."""
    file = PEERS["nanochat"].file(checkout, "scripts.base_train")
    tree, wanted = ast.parse(file.read_text(encoding="utf-8")), []
    flags: dict[str, Any] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(str(flag))]):
                for keyword in node.keywords:
                    if keyword.arg == "default":
                        flags[flag.lstrip("-").replace("-", "_")] = keyword.value
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                if name in RULES:
                    wanted.append(node)
    options = {n: eval(compile(ast.Expression(v), str(file), "eval")) for n, v in flags.items()}
    rules: dict[str, Any] = {"math": math, "args": SimpleNamespace(**options)}
    exec(compile(ast.Module(wanted, []), str(file), "exec"), rules)
    PEERS["nanochat"].require(checkout, file, rules, RULES)
    PEERS["nanochat"].require(checkout, file, options, OPTIONS)
    return rules


RULES = ("B_REF", "get_lr_multiplier", "get_muon_momentum", "get_weight_decay")
RATES, SETUP = ("unembedding_lr", "embedding_lr", "scalar_lr", "matrix_lr"), "setup_optimizer"
OPTIONS = (*RATES, "aspect_ratio", "head_dim", "weight_decay", "warmup_steps")
OPTIONS += ("warmdown_ratio", "final_lr_frac")


def minimind(
    args: argparse.Namespace, clock: Clock, rows_of: Callable[[Path, int], torch.Tensor]
) -> torch.nn.Module:
    """MiniMind's model with the loss, rates and AdamW of its train_pretrain; return the model."""
    shape, peer = preset(args.model).config, PEERS["minimind"]
    theirs = peer.module(args.peer, "model.model_minimind", "MiniMindConfig", "MiniMindForCausalLM")
    get_lr = peer.module(args.peer, "trainer.trainer_utils", "get_lr").get_lr
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("intermediate_size", "vocab_size", "max_position_embeddings", "rope_theta")
    labels = rows_of(args.data, shape.max_position_embeddings)
    torch.manual_seed(args.seed)
    model = theirs.MiniMindForCausalLM(
        theirs.MiniMindConfig(**{name: getattr(shape, name) for name in names})
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    order, tokens = shuffled(len(labels), args.rows), 0
    clock.start()
    for step in range(1, args.steps + 1):
        optimizer.param_groups[0]["lr"] = get_lr(step, args.steps, args.lr)
        batch = labels[next(order)]
        found = model(batch.clamp(min=0), labels=batch)
        (found.loss + found.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += int((batch[:, 1:] != IGNORED).sum())
        clock.after(step, tokens, saving(model))
    return model


def shipped_rows(data: Path, length: int) -> torch.Tensor:
    """Labels (N, length) as MiniMind's PretrainDataset: a document each, with both its ends."""
    texts = documents(data)
    labels = torch.full((len(texts), length), IGNORED)
    for row, text in zip(labels, texts, strict=True):
        kept = np.append(text[:-1][: length - 1], text[-1])
        row[: len(kept)] = torch.from_numpy(kept)
    return labels


def stream_rows(data: Path, length: int) -> torch.Tensor:
    """Labels (N, length): all documents in one stream, cut into rows."""
    inputs, targets = packed_rows(data, length - 1)  # the model shifts the targets itself
    return torch.cat([inputs[:, :1], targets], 1)


def saving(model: torch.nn.Module) -> Callable[[Path], None]:
    """What saves the weights to a folder."""

    def save(folder: Path) -> None:
        folder.mkdir()
        torch.save(model.state_dict(), folder / WEIGHTS)

    return save


WEIGHTS = "weights.pt"


def judge(model: torch.nn.Module, weights: Path, data: Path, length: int) -> float:
    """Bits per byte of the held-out documents by the model with saved weights."""
    model.load_state_dict(torch.load(weights / WEIGHTS))
    return bits_per_byte(model, data, length)


def bits_per_byte(model: torch.nn.Module, data: Path, length: int) -> float:
    """As `minimind eval`: each document by itself, in windows of `length` tokens."""
    prepared = open_prepared(data)
    sources = prepared.manifest["sources"]
    part = Part(
        windows_of(prepared.val, length, prepared.tokenizer.eos_id),
        tuple(source["name"] for source in sources),
        tuple(source["split_bytes"]["val"] for source in sources),
        tuple(prepared.mean_bytes(number, "val") for number in range(len(sources))),
    )
    with evaluation_accelerator("cpu", dist_timeout=600) as accelerator:
        sums = score(accelerator, model.eval(), [part], prepared.tokenizer.piece_bytes(), 16)
    bits: float = figures_of([*sums.values()], [part])["bits_per_byte"]
    return bits


@dataclass(frozen=True)
class Peer:
    """A project: its contenders, and the modules that they use."""

    tried: str  # the version that the contenders were written for
    modules: tuple[str, ...]
    contenders: dict[str, Callable[[argparse.Namespace, Clock], torch.nn.Module]]
    rates: tuple[float, ...] = ()  # for --lr, where those of the others do not serve

    def file(self, checkout: Path, module: str) -> Path:
        """The file of a module. SystemExit if the checkout lacks it."""
        file = checkout / f"{module.replace('.', '/')}.py"
        if not file.is_file():
            raise SystemExit(
                f"--peer {checkout}: has no {file.relative_to(checkout)}; check out {self.tried}"
            )
        return file

    def require(self, checkout: Path, file: Path, found: Any, names: Sequence[str]) -> None:
        """SystemExit if one of `names` is not in `found`."""
        if missing := [name for name in names if name not in found]:
            raise SystemExit(
                f"--peer {checkout}: {file.relative_to(checkout)} has no {missing[0]}; check out"
                f" {self.tried}"
            )

    def module(self, checkout: Path, name: str, *names: str) -> Any:
        """Import a module that has `names`. SystemExit if it has not."""
        file = self.file(checkout, name)
        sys.path.insert(0, str(checkout))
        try:
            found = importlib.import_module(name)
        except ImportError as error:
            raise SystemExit(
                f"--peer {checkout}: {file.relative_to(checkout)} cannot be imported: {error};"
                f" install it, or check out {self.tried}"
            ) from None
        self.require(checkout, file, vars(found), names)
        return found

    def digest(self, checkout: Path) -> str:
        """Digest of the modules' files. SystemExit if one is missing."""
        texts = [self.file(checkout, module).read_bytes() for module in self.modules]
        return hashlib.sha256(b"\0".join(texts)).hexdigest()


PEERS = {
    "nanochat": Peer(
        "nanochat 92d63d4",
        ("nanochat.gpt", "nanochat.optim", "nanochat.common", "scripts.base_train"),
        {"nanochat": nanochat},
        (1, 8, 16, 32, 64),
    ),
    "minimind": Peer(
        "MiniMind d65ef2c",
        ("model.model_minimind", "trainer.trainer_utils"),
        {
            "MiniMind, padded": partial(minimind, rows_of=shipped_rows),
            "MiniMind, packed": partial(minimind, rows_of=stream_rows),
        },
    ),
}
PEER_OF = {name: peer for peer in PEERS.values() for name in peer.contenders}
