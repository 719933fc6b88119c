"""Checks of combinations of flags: attributes of flags, and rows, in the order of the report."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from minimind.config.flags import FLAGS, SHAPE, TRACKERS, VAL_LOSS, as_words, format_default
from minimind.config.names import is_utf8, utf8_fault
from minimind.config.optimizers import OPTIMIZERS
from minimind.config.origin import Origin, Rank
from minimind.config.run_config import RECIPES, RunConfig, files_by_name
from minimind.config.template_variables import template_variables
from minimind.errors import UsageError, fault_error
from minimind.runtime import disk
from minimind.runtime.urls import ON_THE_HUB, begins_as_url, masked

OF_THIS_HOST = ("out_dir", "cache_dir", "resume", "init_from", "teacher", "tokenizer")
OF_THIS_HOST += ("chat_template", "skip_rows", "stages")
MIRROR = re.compile(r"(s3|gs)://[^/\s]|file://.*[^/\s]")


def as_typed(value: Any) -> Any:
    """A value as it is typed in a YAML file or on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return format_default(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Given:
    """A flag in a sentence: `name = value (source)`; a format, as in `{name:g}`, is the value's."""

    name: str
    value: Any
    source: Origin
    config: str | None  # of the run

    def __format__(self, spec: str) -> str:
        return f"{self.name} = {as_typed(self.value):{spec}} ({self._place})"

    @property
    def _place(self) -> str:
        """The source, with a switch that is off as it was typed."""
        is_switched_off = self.value is False and self.source == f"--{self.name}"
        return f"--no-{self.name}" if is_switched_off else self.source

    @property
    def remove(self) -> str:
        """How to take the value back; a recipe of this package is not changed but copied."""
        if self.source.rank is not Rank.FILE:
            file, _, key = self.source.rpartition(": ")
            typed = self._place if self._place.startswith("--") else self.name
            is_written = file and self.source.rank >= Rank.LAUNCHER
            return f"remove {key} from {file}" if is_written else f"remove {typed}"
        path = files_by_name(RECIPES).get(self.config or "")
        if path is None:
            return f"remove {self.name} from {self.config}"
        if FLAGS[self.name].may_be_auto:
            return f"add --{self.name} auto"
        if self.value is True:
            return f"add --no-{self.name}"
        if self.name in ("embedding_init", "task"):
            return f"add --{self.name} {FLAGS[self.name].default}"
        return f"give --config a copy of {path} without {self.name}"


def given(run: RunConfig, name: str) -> Given:
    """A flag with its value and source."""
    return Given(name, getattr(run, name), run.sources[name], run.config)


@dataclass(frozen=True)
class Rule:
    """Flags that cannot be used together.

    In the sentence `{name}` is a flag as `name = value (source)`, `{name.value}` and
    `{name.source}` give its parts, and `{name.remove}` is how to take it back. Other names are
    values that `when` returns in place of true.
    """

    when: Callable[[RunConfig], object]
    sentence: str

    def __call__(self, run: RunConfig) -> Iterator[str]:
        """Yield the sentence if the run breaks the rule."""
        if values := self.when(run):
            flags = {name: given(run, name) for name in FLAGS}
            yield self.sentence.format_map(flags | (values if isinstance(values, dict) else {}))


def check(run: RunConfig) -> RunConfig:
    """Return a run with its final shape; raise a UsageError that lists all conflicts in it."""
    if faults := [*conflicts(run), *_shape(run)]:
        raise fault_error(faults)
    return run


def conflicts(run: RunConfig) -> Iterator[str]:
    """Yield one sentence per conflict between fields."""
    for rule in (*RULES, *INTERVALS):
        yield from rule(run)


def with_epoch(run: RunConfig, steps: int) -> RunConfig:
    """Replace intervals of "epoch" by the steps of one pass.

    Raise UsageError if they rarely meet other intervals.
    """
    if not run.per_epoch:
        return run
    sources = run.sources
    for name in run.per_epoch:
        run = run.with_values(Origin(f"epoch, {sources[name]}", Rank.FLAG), **{name: steps})
    if faults := [fault for rule in INTERVALS for fault in rule(run)]:
        raise fault_error(faults)
    return run


def _by_attributes(run: RunConfig) -> Iterator[str]:
    """What the attributes of the flags refuse."""
    for name, flag in FLAGS.items():
        if not run.meets(name):
            continue
        this = given(run, name)
        if run.hugging_face is not None and (flag.built_in or name in SHAPE):
            if flag.built_in:
                yield (
                    f"{this} is only for the built-in decoder, but --model {run.model} is a model"
                    f" of transformers; {this.remove}"
                )
            continue
        # A preset may have numbers of experts and the user --no-use_moe.
        is_given = flag.default is None or run.is_explicit(name)
        if flag.needs and is_given and not run.meets(flag.needs):
            needed = given(run, flag.needs.partition("=")[0])
            of_it = f"with {needed}" if "=" in flag.needs or run.is_explicit(needed.name) else ""
            condition = of_it or f"without {as_words(flag.needs)}"
            value = {"bool": "", "int": " N", "str": " NAME"}[FLAGS[needed.name].type]
            words = f"{as_words(flag.needs)}{'' if '=' in flag.needs else value}"
            yield f"{this} has no effect {condition}; add {words}, or {this.remove}"
        for condition, reason in flag.excludes.items():
            if run.meets(condition):
                other = given(run, condition.partition("=")[0])
                yield (
                    f"{this} and {other} cannot be used together: {reason}; {this.remove}, or"
                    f" {other.remove}"
                )


def _refusal(
    call: Callable[..., object], *arguments: str, error: type[Exception] = UsageError
) -> dict[str, str]:
    """The message of the error that `call` raises; empty without one."""
    try:
        call(*arguments)
    except error as refused:
        return {"refusal": str(refused)}
    return {}


def _rarely(run: RunConfig, name: str) -> dict[str, int]:
    """Steps between saves that an interval meets, unless it is a multiple or a divisor.

    Nothing while one of them is "epoch", whose steps are not counted yet.
    """
    if {name, "save_interval"} & {*run.per_epoch}:
        return {}
    interval, saved = getattr(run, name), run.save_interval
    return {"steps": math.lcm(interval, saved)} if interval % saved and saved % interval else {}


def _encoding(run: RunConfig) -> Iterator[str]:
    """Text values must be UTF-8, because records and trackers store only that."""
    for name in FLAGS:
        value = getattr(run, name)
        texts = value if isinstance(value, tuple) else (value,)
        for text in (text for text in texts if isinstance(text, str)):
            # Records hold the absolute path, which includes the current directory.
            full = os.path.abspath(text) if name in ("out_dir", "data_path") else text
            if not is_utf8(full):
                yield f"{name} = {full!a} ({run.sources[name]}) {utf8_fault(full)}"


def _places(run: RunConfig) -> Iterator[str]:
    """Refuse URLs where a path of this host is needed; else a folder "s3:" would be created."""
    for name in OF_THIS_HOST:
        text = getattr(run, name)
        if text and begins_as_url(text) and not disk.seems_there(text):
            remedy = ", and the URL as --mirror" if name == "out_dir" else ""
            yield (
                f"{name} = {masked(text)} ({run.sources[name]}) is a URL, but only a local path"
                f" works here; give one{remedy}"
            )


def _trackers(run: RunConfig) -> Iterator[str]:
    for name in run.trackers():
        report_to = given(run, "report_to")
        if name == "none":
            yield f"{report_to}: none cannot be combined with other trackers; remove it, or them"
        elif name not in TRACKERS:
            known = ", ".join(TRACKERS)
            yield f"{report_to}: {name!r} is not one of {known}; name some of those, or none"


def _model(run: RunConfig) -> Iterator[str]:
    for rule in DECODER_RULES if run.hugging_face is None else HUGGING_FACE_RULES:
        yield from rule(run)


# config.json decides the shape of a model of transformers.
HUGGING_FACE_RULES: tuple[Rule, ...] = (
    Rule(
        lambda run: (
            not run.hugging_face
            or (
                disk.is_absent(Path(run.hugging_face).expanduser())
                and not ON_THE_HUB.fullmatch(run.model or "")
            )
        ),
        "--model {model.value}: there is no such directory or file; name the directory of a model,"
        " its config.json, or hf:USER/NAME of the Hub",
    ),
    *(
        Rule(
            lambda run, name=name: run.is_explicit(name),
            f"{{{name}}} has no effect with --model {{model.value}}, whose config.json decides the"
            f" shape; {{{name}.remove}}, or write it in config.json",
        )
        for name in SHAPE
        if name not in ("max_seq_len", "vocab_size")
    ),
    Rule(
        lambda run: run.loss == "chunked",
        "{loss} is only for the built-in decoder, but --model {model.value} is a model of"
        " transformers; {loss.remove}",
    ),
    Rule(
        lambda run: run.own_loss and run.compile == "on",
        "{loss} is not compiled, and {compile} compiles all of a model of transformers;"
        " {loss.remove}, or {compile.remove}",
    ),
    Rule(
        lambda run: run.teacher and run.compile == "on",
        "{teacher} has a loss that is not compiled, and {compile} compiles all of a model of"
        " transformers; {teacher.remove}, or {compile.remove}",
    ),
)
DECODER_RULES: tuple[Rule, ...] = (
    Rule(
        lambda run: run.embedding_init == "bigrams" and run.tie_word_embeddings,
        "{embedding_init} needs an untied head, and {tie_word_embeddings} ties it to the"
        " embedding; add --no-tie_word_embeddings, or --embedding_init random",
    ),
    Rule(
        lambda run: run.embedding_init == "bigrams" and not 3 <= run.dim <= run.vocab_size,
        "{embedding_init} needs dim ({dim.value}) between 3 and the vocabulary"
        " ({vocab_size.value}); add --embedding_init random",
    ),
    Rule(
        lambda run: run.head_dim is None and run.dim % run.n_heads,
        "{dim} is not divisible by {n_heads}; change one of them",
    ),
    Rule(
        lambda run: (
            run.head_dim is None
            and run.dim % (2 * run.n_heads) == run.n_heads
            and {"size": run.head_width}
        ),
        "dim / n_heads = {size} is odd, and rotary positions need pairs of channels; change"
        " dim ({dim.value}) or n_heads ({n_heads.value})",
    ),
    Rule(
        lambda run: run.head_dim is not None and run.head_dim % 2,
        "{head_dim} is odd, and rotary positions need pairs of channels; make it even",
    ),
    Rule(
        lambda run: run.num_experts_per_tok > run.n_routed_experts,
        "{num_experts_per_tok} is more than {n_routed_experts}; lower it",
    ),
    Rule(
        lambda run: run.rope_scaling and not run.init_from and run.rope_original_length is None,
        "{rope_scaling} extends the context of a trained model; give --init_from, or both"
        " --rope_factor and --rope_original_length",
    ),
    Rule(lambda run: run.init_from is None and _refusal(run.with_complete_scaling), "{refusal}"),
    Rule(
        lambda run: run.rope_scaling == "ntk" and run.head_width == 2,
        "{rope_scaling} needs heads of more than 2 channels; use linear, fewer heads"
        " ({n_heads.value}), or a larger --head_dim",
    ),
    Rule(
        lambda run: run.rope_scaling == "yarn" and run.rope_theta <= 1,
        "{rope_scaling} needs a base above 1, and {rope_theta:g}; use linear, or raise it",
    ),
    Rule(
        lambda run: run.n_heads % run.n_kv_heads,
        "{n_heads} is not divisible by {n_kv_heads}; change one",
    ),
)
# Intervals that rarely meet.
INTERVALS = (
    Rule(
        lambda run: run.keep_every and _rarely(run, "keep_every"),
        "{keep_every} and {save_interval} meet only every {steps:,} steps; make keep_every a"
        " multiple of save_interval",
    ),
    Rule(
        lambda run: (
            run.keep_best
            and run.keep_best_by != VAL_LOSS
            and run.eval_tasks_interval
            and _rarely(run, "eval_tasks_interval")
        ),
        "{keep_best} compares checkpoints that have scores, and {save_interval} and"
        " {eval_tasks_interval} meet only every {steps:,} steps; make one a multiple of the other",
    ),
    Rule(
        lambda run: (
            run.keep_best
            and run.keep_best_by == VAL_LOSS
            and run.eval_rows != 0
            and (run.val_fraction or run.val_path)
            and _rarely(run, "eval_interval")
        ),
        "{keep_best} compares checkpoints that are validated, and {save_interval} and"
        " {eval_interval} meet only every {steps:,} steps; make one a multiple of the other",
    ),
)
RULES: tuple[Callable[[RunConfig], Iterable[str]], ...] = (
    Rule(lambda run: _refusal(run.allowed_changes), "{refusal}"),
    _encoding,
    _places,
    _trackers,
    _by_attributes,
    _model,
    Rule(
        lambda run: run.max_steps and (run.warmup_steps or 0) > run.max_steps,
        "{warmup_steps} is more than {max_steps}; lower it, or train longer",
    ),
    Rule(
        lambda run: (
            run.stages
            and run.epochs is run.max_flops is None
            and not (run.max_tokens or run.tokens_per_param or run.max_steps)
        ),
        "{stages} needs the length of the run in tokens or steps; give --max_tokens,"
        " --tokens_per_param or --max_steps",
    ),
    Rule(
        lambda run: run.guard.get("max_rollbacks") and run.stages,
        "{spike_guard} goes back and skips rows, which {stages} does not support; give"
        " --max_rollbacks 0, or remove one of them",
    ),
    Rule(
        lambda run: (
            run.eval_at_start and (run.eval_rows == 0 or not (run.val_fraction or run.val_path))
        ),
        "{eval_at_start} has no validation to begin with; give --eval_rows and --val_fraction, or"
        " {eval_at_start.remove}",
    ),
    Rule(
        lambda run: run.stages and run.per_epoch and {"name": run.per_epoch[0]},
        "--{name} epoch has no steps with {stages}, whose sources have no passes; give a number of"
        " steps",
    ),
    Rule(
        lambda run: run.val_path and run.val_fraction and run.is_explicit("val_fraction"),
        "{val_path} and {val_fraction} both choose the validation text; remove one of them",
    ),
    Rule(
        lambda run: run.keep_best_by != VAL_LOSS and run.keep_best and run.eval_tasks is None,
        "{keep_best_by} is the score of a task, and no task is evaluated; give --eval_tasks",
    ),
    Rule(
        lambda run: (
            run.keep_best
            and run.keep_best_by == VAL_LOSS
            and (run.eval_rows == 0 or not (run.val_fraction or run.val_path))
        ),
        "{keep_best} has no validation to compare; give --eval_rows and --val_fraction",
    ),
    Rule(
        lambda run: (
            run.mirror is not None and not MIRROR.match(run.mirror) and {"url": masked(run.mirror)}
        ),
        "mirror = {url} ({mirror.source}) is not a URL that can be written to; give one of"
        " s3://BUCKET/..., gs://BUCKET/... or file:///FOLDER",
    ),
    Rule(
        lambda run: run.source and run.is_explicit("data_path"),
        "{source} and {data_path} both name the text; remove one of them",
    ),
    Rule(
        lambda run: run.task == "sft" and not run.doc_mask and run.is_explicit("doc_mask"),
        "{doc_mask} lets conversations in a row see each other, which --task sft does not allow;"
        " {doc_mask.remove}",
    ),
    Rule(
        lambda run: (
            run.task == "sft"
            and run.template_date
            and _refusal(date.fromisoformat, run.template_date, error=ValueError)
        ),
        "{template_date} is not a date such as 2024-07-26; correct it",
    ),
    Rule(
        lambda run: (
            run.task == "sft"
            and run.chat_template_kwargs
            and _refusal(template_variables, run.chat_template_kwargs, error=ValueError)
        ),
        "{chat_template_kwargs} {refusal}; correct it",
    ),
    Rule(
        lambda run: run.own_loss and run.loss_weight,
        "{loss} sums over all rows, which --loss_weight cannot weigh; {loss.remove}, or"
        " {loss_weight.remove}",
    ),
    Rule(
        lambda run: run.own_loss and run.teacher,
        "{loss} and {teacher} each replace the cross-entropy; {loss.remove}, or {teacher.remove}",
    ),
    Rule(
        lambda run: run.own_loss and run.sequence_parallel > 1,
        "{loss} needs whole rows, and {sequence_parallel} divides them; {loss.remove}, or"
        " {sequence_parallel.remove}",
    ),
    Rule(
        lambda run: run.mup_base_dim is not None and not OPTIMIZERS[run.optimizer].normalizes,
        "{mup_base_dim} scales the rates of optimizers that normalize the gradient, but {optimizer}"
        " does not; use --optimizer adamw, adamw_8bit, muon or lion",
    ),
)


def _shape(run: RunConfig) -> Iterator[str]:
    """Sizes that --sequence_parallel does not divide, once --init_from and scaling decide them."""
    size, divides = run.sequence_parallel, f"{given(run, 'sequence_parallel')} does not divide"
    if run.n_heads % size or (run.n_kv_heads % size and size % run.n_kv_heads):
        fits = [n for n in range(1, run.n_heads + 1) if run.n_heads % n == 0]
        fits = [n for n in fits if run.n_kv_heads % n == 0 or n % run.n_kv_heads == 0]
        yield (
            f"{divides} n_heads = {run.n_heads} and n_kv_heads = {run.n_kv_heads};"
            f" give one of {', '.join(map(str, fits))}"
        )
    if run.max_seq_len % size:
        yield f"{divides} {given(run, 'max_seq_len')}; change one of them"
