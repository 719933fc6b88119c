"""Checks of combinations of flags."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from minimind.config.arguments import is_utf8, utf8_fault
from minimind.config.flags import OF_EXPERTS, SHAPE, TRACKERS
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.run_config import FLAGS, RunConfig
from minimind.errors import UsageError, fault_error
from minimind.runtime.urls import begins_as_url, masked

OF_THIS_HOST = ("out_dir", "cache_dir", "resume", "init_from", "tokenizer")
OF_THIS_HOST += ("chat_template", "skip_rows")
MIRROR = re.compile(r"(s3|gs)://[^/\s]|file://.*[^/\s]")

# Not supported with --sequence_parallel: flag, value and reason.
NO_SEQUENCE = {
    "use_moe": (True, "computes its balance loss over whole rows, which no process has"),
    "compile": ("on", "is not supported"),
}


def check(run: RunConfig) -> RunConfig:
    """Return a run with its final shape; raise a UsageError that lists all conflicts in it."""
    if faults := [*conflicts(run), *_shape_conflicts(run)]:
        raise fault_error(faults)
    return run


def conflicts(run: RunConfig) -> Iterator[str]:
    """Yield one sentence per conflict between fields."""
    try:
        run.allowed_changes()
    except UsageError as error:
        yield str(error)
    yield from _encoding_conflicts(run)
    yield from _place_conflicts(run)
    yield from _report_conflicts(run)
    yield from _model_conflicts(run)
    yield from _schedule_conflicts(run)
    if run.max_steps and run.warmup_steps and run.warmup_steps > run.max_steps:
        yield (
            f"warmup_steps = {run.warmup_steps} ({run.sources['warmup_steps']}) is more than"
            f" max_steps = {run.max_steps} ({run.sources['max_steps']}); lower it, or train longer"
        )
    if not run.spike_guard:
        yield from _no_effect(run, "--spike_guard", "spike_factor", "spike_window", "max_rollbacks")
    if not run.verify_interval:
        yield from _no_effect(run, "--verify_interval", "on_corruption")
    yield from _retention_conflicts(run)
    if run.mirror is not None and not MIRROR.match(run.mirror):
        yield (
            f"mirror = {masked(run.mirror)} ({run.sources['mirror']}) is no URL that can be written"
            " to; give one of s3://BUCKET/..., gs://BUCKET/... or file:///FOLDER"
        )
    yield from _task_conflicts(run)
    if run.spike_guard and run.dtype == "float16":
        yield (
            f"spike_guard = True ({run.sources['spike_guard']}) and dtype = float16"
            f" ({run.sources['dtype']}) skip updates for different reasons; use bfloat16"
        )
    if run.mup_base_dim is not None and not OPTIMIZERS[run.optimizer].normalizes:
        yield (
            f"mup_base_dim = {run.mup_base_dim} ({run.sources['mup_base_dim']}) has rates for"
            f" optimizers that normalize the gradient, and optimizer ="
            f" {run.optimizer} ({run.sources['optimizer']}) does not; take another, or drop it"
        )


def _no_effect(run: RunConfig, needed: str, *names: str) -> Iterator[str]:
    """Flags that are given though only a run with `needed` reads them."""
    for name in names:
        if (value := getattr(run, name)) is not None:
            yield (
                f"{name} = {value} ({run.sources[name]}) has no effect without {needed}; add it, or"
                " drop this"
            )


def _retention_conflicts(run: RunConfig) -> Iterator[str]:
    """Rules of retention that hardly any checkpoint would meet."""
    every, best, interval = run.keep_every, run.keep_best, run.save_interval
    saved = f"save_interval = {interval} ({run.sources['save_interval']})"
    if every and every % interval and interval % every:
        yield (
            f"keep_every = {every} ({run.sources['keep_every']}) and {saved} meet only every"
            f" {math.lcm(every, interval):,} steps; make keep_every a multiple of save_interval"
        )
    given = f"keep_best = {best} ({run.sources['keep_best']})"
    if best and not (run.eval_rows and run.val_fraction):
        yield f"{given} has no validation to compare; give --eval_rows and --val_fraction"
    elif best and run.eval_interval % interval and interval % run.eval_interval:
        yield (
            f"{given} compares checkpoints that are validated, and {saved} and eval_interval ="
            f" {run.eval_interval} ({run.sources['eval_interval']}) meet only every"
            f" {math.lcm(interval, run.eval_interval):,} steps; make one a multiple of the other"
        )


def _task_conflicts(run: RunConfig) -> Iterator[str]:
    """Flags that only fine-tuning reads, and those that it sets or does not read."""
    if run.task != "sft":
        yield from _no_effect(run, "--task sft", "train_on", "chat_template", "template_date")
        return
    if not run.doc_mask and run.is_explicit("doc_mask"):
        yield (
            f"doc_mask = False ({run.sources['doc_mask']}) lets conversations of a row see each"
            " other, which --task sft does not; drop it"
        )
    if run.template_date is not None:
        try:
            date.fromisoformat(run.template_date)
        except ValueError:
            yield (
                f"template_date = {run.template_date} ({run.sources['template_date']}) is no date"
                " such as 2024-07-26; correct it"
            )
    if run.text_field != "text":
        yield (
            f"text_field = {run.text_field} ({run.sources['text_field']}) is not read with --task"
            " sft, which knows the fields of conversations; drop it"
        )


def _schedule_conflicts(run: RunConfig) -> Iterator[str]:
    """Flags that only wsd reads, and the two that say the same."""
    for name in ("decay_steps", "decay_fraction", "decay_shape"):
        if getattr(run, name) is not None and run.schedule != "wsd":
            yield (
                f"{name} = {getattr(run, name)} ({run.sources[name]}) has no effect with"
                f" schedule = {run.schedule} ({run.sources['schedule']}); drop it, or use"
                " --schedule wsd"
            )
    if run.decay_steps is not None and run.decay_fraction is not None:
        yield (
            f"decay_steps = {run.decay_steps} ({run.sources['decay_steps']}) and decay_fraction ="
            f" {run.decay_fraction:g} ({run.sources['decay_fraction']}) are the same number; drop"
            " one"
        )


def _encoding_conflicts(run: RunConfig) -> Iterator[str]:
    """Text values must be UTF-8, because records and trackers store only that."""
    for name in FLAGS:
        value = getattr(run, name)
        texts = value if isinstance(value, tuple) else (value,)
        for text in (text for text in texts if isinstance(text, str)):
            # Records hold the absolute path, which includes the current directory.
            full = os.path.abspath(text) if name in ("out_dir", "data_path") else text
            if not is_utf8(full):
                yield f"{name} = {full!a} ({run.sources[name]}) {utf8_fault(full)}"


def _place_conflicts(run: RunConfig) -> Iterator[str]:
    """URLs in place of paths, of which a folder like "s3:" would be made."""
    for name in OF_THIS_HOST:
        text = getattr(run, name)
        if text and begins_as_url(text) and not os.path.lexists(text):
            remedy = ", and the URL as --mirror" if name == "out_dir" else ""
            yield (
                f"{name} = {masked(text)} ({run.sources[name]}) is a URL, and a path of this host"
                f" is needed; give one{remedy}"
            )


def _report_conflicts(run: RunConfig) -> Iterator[str]:
    for name in run.trackers():
        field = f"report_to = {run.report_to} ({run.sources['report_to']})"
        if name == "none":
            yield (f"{field}: none cannot be combined with other trackers; drop one")
        if name not in TRACKERS:
            yield (
                f"{field}: {name!r} is none of {', '.join(TRACKERS)}; name some of those, or none"
            )
    if run.sample_prompts and not run.sample_interval:
        yield (
            f"sample_prompts = {run.sample_prompts} ({run.sources['sample_prompts']}) without"
            " --sample_interval, so that no sample is ever written; give --sample_interval N"
        )


def _hugging_face_conflicts(run: RunConfig, place: str) -> Iterator[str]:
    """Flags that config.json decides, or that models of transformers do not support."""
    if not place or not Path(place).expanduser().exists():
        yield (
            f"--model hf:{place}: there is no such directory or file, and models are not downloaded"
            "; fetch the model, and name its directory or its config.json"
        )
    for name in SHAPE:
        if name not in ("max_seq_len", "vocab_size") and run.is_explicit(name):
            yield (
                f"{name} = {getattr(run, name)} ({run.sources[name]}) beside --model hf:{place},"
                " whose config.json decides the shape; drop it, or write it there"
            )
    if run.mup_base_dim is not None:
        yield (
            f"mup_base_dim = {run.mup_base_dim} ({run.sources['mup_base_dim']}) is only for the"
            f" built-in decoder, and --model hf:{place} is a model of transformers; drop it"
        )
    if run.sequence_parallel > 1:
        yield (
            f"sequence_parallel = {run.sequence_parallel} ({run.sources['sequence_parallel']}) is"
            f" only for the built-in decoder, and --model hf:{place} is a model of transformers;"
            " drop it"
        )
    for name, value in (("doc_mask", True), ("loss", "chunked")):
        if getattr(run, name) == value:
            yield (
                f"{name} = {value} ({run.sources[name]}) is only for the built-in decoder, and"
                f" --model hf:{place} is a model of transformers; drop it"
            )


def _model_conflicts(run: RunConfig) -> Iterator[str]:
    if run.hugging_face is not None:
        yield from _hugging_face_conflicts(run, run.hugging_face)
        return
    if run.dim % run.n_heads:
        yield (
            f"dim = {run.dim} ({run.sources['dim']}) is not divisible by n_heads ="
            f" {run.n_heads} ({run.sources['n_heads']}); change one of them"
        )
    elif run.dim // run.n_heads % 2:
        yield (
            f"dim / n_heads = {run.dim // run.n_heads} is odd, and rotary positions need"
            f" pairs of channels; change dim ({run.dim}) or n_heads ({run.n_heads})"
        )
    if run.num_experts_per_tok > run.n_routed_experts:
        yield (
            f"num_experts_per_tok = {run.num_experts_per_tok}"
            f" ({run.sources['num_experts_per_tok']}) is more than n_routed_experts ="
            f" {run.n_routed_experts} ({run.sources['n_routed_experts']}); lower it"
        )
    for name in () if run.use_moe else OF_EXPERTS:
        if run.is_explicit(name) and getattr(run, name) != FLAGS[name].default:
            yield (
                f"{name} = {getattr(run, name)} ({run.sources[name]}) has no effect without"
                " experts; give --use_moe, or drop it"
            )
    yield from _rope_conflicts(run)
    yield from _sequence_conflicts(run)
    if run.n_heads % run.n_kv_heads:
        yield (
            f"n_heads = {run.n_heads} ({run.sources['n_heads']}) is not divisible by"
            f" n_kv_heads = {run.n_kv_heads} ({run.sources['n_kv_heads']}); change one"
        )


def _sequence_conflicts(run: RunConfig) -> Iterator[str]:
    """Flags that --sequence_parallel does not support."""
    size = run.sequence_parallel
    if size == 1:
        return
    given = f"sequence_parallel = {size} ({run.sources['sequence_parallel']})"
    for name, (value, why) in NO_SEQUENCE.items():
        if getattr(run, name) == value:
            yield f"{name} = {value} ({run.sources[name]}) {why} with {given}; drop one of them"
    if run.verify_interval:
        yield (
            f"verify_interval = {run.verify_interval} ({run.sources['verify_interval']}) is not"
            f" supported with {given}; drop one of them"
        )


def _shape_conflicts(run: RunConfig) -> Iterator[str]:
    """Sizes that --sequence_parallel does not divide, once --init_from and scaling decide them."""
    size = run.sequence_parallel
    given = f"sequence_parallel = {size} ({run.sources['sequence_parallel']})"
    if run.n_heads % size or (run.n_kv_heads % size and size % run.n_kv_heads):
        fits = [n for n in range(1, run.n_heads + 1) if run.n_heads % n == 0]
        fits = [n for n in fits if run.n_kv_heads % n == 0 or n % run.n_kv_heads == 0]
        yield (
            f"{given} does not divide n_heads = {run.n_heads} and n_kv_heads = {run.n_kv_heads};"
            f" give one of {', '.join(map(str, fits))}"
        )
    if run.max_seq_len % size:
        yield (
            f"{given} does not divide max_seq_len = {run.max_seq_len}"
            f" ({run.sources['max_seq_len']}); change one of them"
        )


def _rope_conflicts(run: RunConfig) -> Iterator[str]:
    """Scaling of rotary positions that is incomplete, or impossible for such heads."""
    if run.rope_scaling is None:
        yield from _no_effect(run, "--rope_scaling", "rope_factor", "rope_original_length")
        return
    given = f"rope_scaling = {run.rope_scaling} ({run.sources['rope_scaling']})"
    if run.init_from is None:
        if run.rope_original_length is None:
            yield (
                f"{given} extends the context of a trained model; give --init_from, or both"
                " --rope_factor and --rope_original_length"
            )
        try:
            run.with_complete_scaling()
        except UsageError as error:
            yield str(error)
    if run.rope_scaling == "ntk" and run.dim == 2 * run.n_heads:
        yield (
            f"{given} needs more than the 2 channels of dim / n_heads ="
            f" {run.dim} / {run.n_heads}; use linear, or fewer heads"
        )
    if run.rope_scaling == "yarn" and run.rope_theta <= 1:
        yield (
            f"{given} needs a base above 1, and rope_theta = {run.rope_theta:g}"
            f" ({run.sources['rope_theta']}); use linear, or raise it"
        )
