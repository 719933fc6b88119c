"""Generate text from the model during training: `--sample_interval`."""

from __future__ import annotations

from dataclasses import dataclass

from minimind.config.run_config import RunConfig
from minimind.data.tokenizer.load import AnyTokenizer
from minimind.engine.build import Engine
from minimind.engine.loss_of_batch import uncompiled
from minimind.errors import UsageError
from minimind.inference.generate import Sampling, generate_texts
from minimind.inference.prompts import read_prompts

MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Samples:
    """Prompts of the samples and how they are continued."""

    prompts: tuple[str, ...]
    tokenizer: AnyTokenizer
    sampling: Sampling


def read_sample_prompts(run: RunConfig) -> tuple[str, ...]:
    """The prompts of `--sample_prompts`, by default one empty prompt; none without an interval."""
    if not run.sample_interval:
        return ()
    if run.sample_prompts is None:
        return ("",)
    return tuple(read_prompts(run.sample_prompts, "--sample_prompts", pipes=False))


def build_samples(run: RunConfig, tokenizer: AnyTokenizer) -> Samples | None:
    """The samples of a run, if it has any; raise UsageError if a prompt is too long."""
    prompts = read_sample_prompts(run)
    for number, prompt in enumerate(prompts, 1):
        if (length := len(tokenizer.encode(prompt))) >= run.max_seq_len:
            raise UsageError(
                f"--sample_prompts {run.sample_prompts}: prompt {number} has {length} tokens, and"
                f" max_seq_len is {run.max_seq_len}; shorten it"
            )
    return Samples(prompts, tokenizer, Sampling(MAX_NEW_TOKENS, seed=run.seed)) if prompts else None


def draw(engine: Engine, samples: Samples) -> tuple[str, ...]:
    """Continue each prompt, with no effect on the model or the global random state.

    Call on all ranks, which generate the same texts: under ZeRO-3 a forward pass is collective.
    """
    synced_gpus = engine.resolved.zero_stage == 3 and engine.world_size > 1
    engine.backend.forward.eval()
    with uncompiled(engine.model):
        result = generate_texts(
            engine.model,
            samples.tokenizer,
            samples.prompts,
            samples.sampling,
            synced_gpus=synced_gpus,
        )
    return result.texts
