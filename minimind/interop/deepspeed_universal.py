"""A checkpoint of ours as a universal checkpoint of DeepSpeed, which resumes at the same step.

    OUT/latest_universal                            the name of the folder
    OUT/config.json, tokenizer                      of the model
    OUT/trainer_state.json, scheduler.pt            the step, for the Trainer of transformers
    OUT/global_stepN_universal/
        mp_rank_00_model_states.pt                  counters, read at stages 1 and 2
        zero_pp_rank_0_mp_rank_00_model_states.pt   the same, read at stage 3
        zero/optimizer_state.pt                     settings of the groups of the optimizer
        zero/NAME/fp32.pt exp_avg.pt exp_avg_sq.pt step.pt

`load_checkpoint` of DeepSpeed reads these (its runtime/engine.py, runtime/base_optimizer.py and
runtime/zero/stage3.py). There is no `latest`: a load that is not universal would then pass, at
stage 3 without the weights.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from minimind.architecture.select import OURS
from minimind.checkpoint.reader import Contents
from minimind.config.flags import MIXED
from minimind.config.optimizers import ADAM, MOMENTUM
from minimind.config.schedule import Schedule
from minimind.engine.adapters import TESTED
from minimind.engine.state import AVERAGE
from minimind.errors import UsageError
from minimind.interop.export import run_name
from minimind.interop.formats import FORMATS, Format
from minimind.interop.job import CONFIG, Job
from minimind.interop.tensor_sources import TensorSource
from minimind.interop.weights import CHECKPOINT, TRANSFORMERS, Weights
from minimind.interop.write_folder import new_folder
from minimind.model.rotary import interleaved_to_half
from minimind.runtime.durable_files import mebibytes, write_durably
from minimind.runtime.output_folder import NewFolder
from minimind.runtime.terminal import aligned

BLOCKS = {"bfloat16": "bf16", "float16": "fp16", MIXED: "torch_autocast"}  # by dtype
SETTINGS = ("eps", "momentum", "bias_correction")  # of a group, in the identity of a run


def export_universal(weights: Weights, out: NewFolder) -> tuple[str, str | None]:
    """Write the checkpoint of these weights; return what to print, and a note on the tokenizer."""
    path, config = weights.path, weights.config
    if weights.kind != CHECKPOINT:
        raise UsageError(
            f"{path}: has no state of an optimizer, which a checkpoint of DeepSpeed holds; name a"
            " run, or one of its checkpoints"
        )
    contents = Contents(path)
    step, updates = contents.manifest["step"], contents.state["optimizer_step"]
    kinds = [kind for kind in contents.kinds if kind != AVERAGE]
    if any({*contents.shapes} != contents.shards.kinds[kind] for kind in kinds):
        raise UsageError(
            f"{path}: was trained with Muon or --freeze, and such a checkpoint holds the same kinds"
            " of state for all weights; export its weights alone (--format llama)"
        )
    form = _form_of(config)
    kind = form.model_type(config)
    job = Job(run_name(path), kind, config, weights.load_tokenizer(), "float32")
    texts, note = form.files(job)
    places, parts = [], []
    for what in kinds:
        shapes = {name: contents.shapes[name] for name in contents.shards.kinds[what]}
        dtypes = dict.fromkeys(shapes, torch.float32)
        source = TensorSource(path, shapes, dtypes, partial(contents.read, what))
        if form.rotates_half(kind):
            source = source.paired(interleaved_to_half, config.head_dim)
        found = form.parts(job, source)
        places += [f"zero/{part.name}/{what}.pt" for part in found]
        parts += found
    trained = {part.name: part.shape for part in parts}
    tag, run = f"global_step{step}_universal", _Settings(contents, kinds)
    # The Trainer warns if its own rows of a micro-batch differ; its saves require the callbacks.
    rows = contents.manifest.get("micro_batch_rows") or run.rows or 1
    trainer = {"global_step": step, "train_batch_size": rows}
    trainer |= {"stateful_callbacks": {"TrainerControl": {}}}
    count = {} if updates is None else {"step": torch.tensor(float(updates))}
    files = {
        "mp_rank_00_model_states.pt": (state := run.model_state(trained)),
        "zero_pp_rank_0_mp_rank_00_model_states.pt": state,
        "zero/optimizer_state.pt": run.optimizer_state(count),
        **{f"zero/{name}/step.pt": value for name in trained for value in count.values()},
    }
    texts |= {f"{tag}/{name}": bytes(_saved(value)) for name, value in files.items()}
    texts |= {
        "latest_universal": tag.encode(),
        "scheduler.pt": bytes(_saved(state["lr_scheduler"])),
        "trainer_state.json": json.dumps(trainer).encode(),
    }
    with new_folder(out, parts, texts) as draft:
        for place, part in zip(places, parts, strict=True):
            file = draft / tag / place
            file.parent.mkdir(parents=True, exist_ok=True)
            write_durably(file, _saved({"param": part.read().contiguous()}))
    size = mebibytes(sum(part.bytes for part in parts))
    model = json.loads(texts[CONFIG])["architectures"][0]
    moments = " and ".join(kinds[1:]) or "no moments"
    stages = "1, 2 and 3" if kinds[1:] == [*ADAM] else "1 and 2"
    code = "; trust_remote_code=True builds it" if form is FORMATS[OURS] else ""
    lines = [
        f"{out.path}: step {step} of {path}: {sum(map(math.prod, trained.values())):,} weights with"
        f" {moments} in float32, {size}",
        f"names of {model}{code}; DeepSpeed {TESTED} loads it at ZeRO stages {stages}, on any"
        " number of processes",
        "",
        aligned([("not carried over", "under DeepSpeed"), *run.lost()], indent="  "),
        "",
        "the DeepSpeed JSON needs",
        f"  {json.dumps(run.json())[1:-1]}",
    ]
    return "\n".join(lines), note


def _form_of(config: Any) -> Format:
    """The format whose names the weights get: of transformers, if it has this model, else ours."""
    if config.model_type != OURS:
        return FORMATS[TRANSFORMERS]
    try:
        FORMATS["llama"].model_type(config)
    except UsageError:  # experts, or two features that no architecture has together
        return FORMATS[OURS]
    return FORMATS["llama"]


def _saved(value: Any) -> memoryview:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getbuffer()


class _Settings:
    """What a checkpoint of ours says beside its tensors, as DeepSpeed has it."""

    def __init__(self, contents: Contents, kinds: list[str]) -> None:
        self.contents, self.manifest, self.kinds = contents, contents.manifest, kinds
        self.counters = contents.state["counters"]
        identity = self.manifest["identity"]
        self.lr, schedule = identity.get("lr", {}), identity.get("schedule", {})
        self.dtype = identity.get("dtype", {}).get("dtype")
        self.rows = identity.get("batch", {}).get("rows_per_step")
        self.rate, peak = None, self.lr.get("learning_rate")  # of the next update, if it is known
        is_ours = isinstance(schedule.get("shape"), str) and "total_steps" in schedule
        decays = (self.manifest.get("patience") or {}).get("ran_out") is not None
        if is_ours and peak is not None and not decays:
            values = schedule | {"min_ratio": schedule["min_lr_ratio"], "peak": peak}
            known = {one.name: values[one.name] for one in fields(Schedule) if one.name in values}
            self.rate = Schedule(**known).lr_at(self.manifest["step"])

    def optimizer_state(self, count: Mapping[str, Any]) -> dict[str, Any]:
        """zero/optimizer_state.pt.

        Stages 1 and 2 read `param_groups`, one after the other into the groups of the new
        optimizer. Stage 3 reads the first of `optimizer_state_dict` into all groups, so that it
        has no decay.
        """
        params, betas = self.lr.get("optimizer_params") or {}, self.lr.get("betas")
        values = {"lr": self.rate, "initial_lr": self.lr.get("learning_rate")}
        values |= {name: params.get(name) for name in SETTINGS}
        values["betas"] = tuple(betas) if betas and ADAM[0] in self.kinds else None
        group = {name: value for name, value in values.items() if value is not None}
        decay, clip = self.lr.get("weight_decay"), self.lr.get("grad_clip")
        decays = [{} if decay is None else {"weight_decay": one} for one in (decay, 0.0)]
        return {
            "ds_version": TESTED,
            **({} if clip is None else {"clip_grad": clip}),
            "param_groups": [{**group, **one, "params": [n]} for n, one in enumerate(decays)],
            "optimizer_state_dict": {
                "state": {0: count},
                "param_groups": [{**group, "params": [0, 1]}],
            },
        }

    def model_state(self, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
        """The file of the model: counters, and as at stage 3 no weights but their names."""
        step = self.manifest["step"]
        skipped, buffers = self.counters["skipped_steps"], self.contents.buffers
        empty = torch.empty(0, dtype=getattr(torch, str(self.dtype), torch.float32))
        return {
            "module": {
                **dict.fromkeys(shapes, empty),
                **{name: buffers.get_tensor(name) for name in buffers.keys()},
            },
            "buffer_names": [*buffers.keys()],
            "param_shapes": [
                {name: shape for name, shape in shapes.items() if (len(shape) > 1) == is_matrix}
                for is_matrix in (True, False)
            ],
            "optimizer": None,
            # Keys of DeepSpeed's schedulers, and of those of torch.
            "lr_scheduler": {
                "last_batch_iteration": step - skipped - 1,
                "last_epoch": step - skipped,
                "_step_count": step - skipped + 1,
                "lr_lambdas": [],
            },
            **{"global_steps": step, "global_samples": step * (self.rows or 0)},
            **{"skipped_steps": skipped, "dp_world_size": 1, "mp_world_size": 1},
            "ds_config": self.json(),
            "ds_version": TESTED,
        }

    def json(self) -> dict[str, Any]:
        """What the DeepSpeed JSON must say, as far as the checkpoint knows."""
        found: dict[str, Any] = {"checkpoint": {"load_universal": True}}
        if self.lr.get("grad_clip") is not None:
            found["gradient_clipping"] = self.lr["grad_clip"]
        if MOMENTUM in self.kinds:  # of torch's SGD
            found["zero_allow_untested_optimizer"] = True
        if block := BLOCKS.get(self.dtype or ""):
            found[block] = {"enabled": True}
            if scale := self.counters["loss_scaler"].get("cur_scale"):
                found[block]["initial_scale_power"] = round(math.log2(scale))
            if self.dtype == MIXED:  # without a list of modules gradients would be in bf16, too
                found[block] |= {"dtype": "bfloat16", "lower_precision_safe_modules": []}
        return found

    def lost(self) -> Iterator[tuple[str, str]]:
        """What a checkpoint of ours has, or says, and a run under DeepSpeed has from elsewhere."""
        step, decay = self.manifest["step"], self.lr.get("weight_decay")
        yield "order of the data", "the data loader of the new run"
        yield "random state", "the seed of the new run"
        if self.rows:
            yield "rows per step", f"train_batch_size; {self.rows} until now"
        now = "" if self.rate is None else f"{self.rate:g} in the next step, then "
        yield "schedule", f"{now}a scheduler of the new run, set to step {step}"
        state = " and ".join(self.kinds[1:]) or "no state"
        yield "optimizer", f"one with {state}: {self.lr.get('optimizer')}"
        yield "groups", f"matrices (weight decay {decay}), then norms and biases (no decay)"
        if self.kinds[1:] == [*ADAM]:
            yield "updates of each group at stage 3", "one count for all: copy it after the load"
        if self.lr.get("mup_base_dim"):
            yield "rates by width (muP)", "one rate for all weights of a group"
        if AVERAGE in self.contents.kinds:
            yield "average of the weights (--ema)", "none; --weights ema exports it alone"
        if self.counters["loss_scaler"]:
            yield "counters of the loss scale", "begin anew, at the same scale"
        if names := [*self.contents.buffers.keys()]:
            yield f"{len(names)} buffers", "those of the new model"
