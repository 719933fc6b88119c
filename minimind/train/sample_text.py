"""Text from the model in training, every so many steps: `--sample_interval`."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.config.run_config import RunConfig
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.engine.build import Engine
from minimind.engine.loss_of_batch import uncompiled
from minimind.errors import UsageError
from minimind.inference.generate import write_on
from minimind.inference.prompts import read_prompts
from minimind.inference.sampling import Sampling

NEW_TOKENS = 64  # of a sample, at most


@dataclass(frozen=True)
class Samples:
    """What the samples begin with, and how they go on."""

    prompts: tuple[str, ...]
    tokenizer: AnyTokenizer
    how: Sampling


def prompts_of(run: RunConfig) -> tuple[str, ...]:
    """What the samples of a run begin with; none without --sample_interval."""
    if not run.sample_interval:
        return ()
    if run.sample_prompts is None:
        return ("",)
    return tuple(read_prompts(run.sample_prompts, "--sample_prompts"))


def samples_of(run: RunConfig, tokenizer: AnyTokenizer) -> Samples | None:
    """The same, once the tokenizer is known; a UsageError for a prompt that leaves no room."""
    prompts = prompts_of(run)
    for number, prompt in enumerate(prompts, 1):
        if (length := len(tokenizer.encode(prompt))) >= run.max_seq_len:
            raise UsageError(
                f"--sample_prompts {run.sample_prompts}: prompt {number} has {length} tokens, and"
                f" max_seq_len is {run.max_seq_len}; shorten it"
            )
    how = Sampling(NEW_TOKENS, seed=run.seed)
    return Samples(prompts, tokenizer, how) if prompts else None


def draw(engine: Engine, samples: Samples) -> tuple[str, ...]:
    """A continuation of each prompt; the model and all random state are left as they were.

    All ranks draw the same: under ZeRO-3 a forward pass is collective.
    """
    synced = engine.resolved.zero_stage == 3 and engine.world_size > 1
    engine.backend.forward.eval()
    with uncompiled(engine.model):
        written = write_on(
            engine.model, samples.tokenizer, samples.prompts, samples.how, synced=synced
        )
    return written.texts
