"""Text from a training checkpoint, one token after another, with a key/value cache."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minimind.data.tokenizer import Tokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.model.decoder import MiniMindConfig, MiniMindForCausalLM
from minimind.train.checkpoint import candidates, newest_valid, verify
from minimind.train.resume import load_weights


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest."""

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.9
    seed: int = 42


def load_checkpoint(place: str) -> tuple[MiniMindForCausalLM, Tokenizer, Path]:
    """The fp32 model, its tokenizer and the step directory of a run directory or step directory.

    A run directory gives its newest valid checkpoint. Hashes are verified before anything is read;
    neither DeepSpeed nor the number of processes that trained it is needed.
    """
    root = Path(place) / "checkpoints"
    found = candidates(root) if root.is_dir() else [Path(place)]
    if not Path(place).is_dir() or not found:
        raise CheckpointError(
            f"--checkpoint {place}: holds no checkpoint; name a run's out_dir or a step_ directory"
        )
    path, rejected = newest_valid(found, verify)
    assert path is not None
    for bad in rejected:
        print(f"{bad.path} is passed over: {bad.file} {bad.reason}", file=sys.stderr)
    model = MiniMindForCausalLM(MiniMindConfig.from_json_file(path / "config.json"))
    missing, unexpected = model.load_state_dict(load_weights(path), strict=False)
    tied = set(missing) <= {"lm_head.weight"} and model.config.tie_word_embeddings
    if unexpected or (missing and not tied):
        names = ", ".join([*missing, *unexpected][:3])
        raise CheckpointError(f"{path}: its parameters do not fit its config.json ({names})")
    return model.eval(), Tokenizer(path), path


def generate(model: Any, tokenizer: Tokenizer, prompt: str, how: Sampling) -> tuple[str, float]:
    """The prompt with its continuation, and the tokens generated per second.

    Stops at the end-of-document token, or when the positions the model was trained on are used up.
    """
    ids = [*tokenizer.encode(prompt)] or [tokenizer.eos_id]  # after a document's end, a new one
    room = model.config.max_position_embeddings - len(ids)
    if room < 1:
        raise UsageError(
            f"--prompt has {len(ids)} tokens and the model {model.config.max_position_embeddings}"
            " positions; shorten it"
        )
    torch.manual_seed(how.seed)
    drawn = {"temperature": how.temperature, "top_p": how.top_p} if how.temperature else {}
    started = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=min(how.max_new_tokens, room),
            do_sample=bool(drawn),
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
            use_cache=True,
            **drawn,
        )
    new = [int(i) for i in out[0, len(ids) :] if int(i) != tokenizer.eos_id]
    speed = (out.shape[1] - len(ids)) / (time.perf_counter() - started)
    text = tokenizer.decode(new)
    if len(new) == how.max_new_tokens:  # perhaps cut within the bytes of one character
        text = text.rstrip("\ufffd")
    return prompt + text, speed
