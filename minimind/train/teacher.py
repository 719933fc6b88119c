"""The teacher of a run, --teacher: read as --init_from is, and held beside the engine.

Every rank has all of it. It is in no checkpoint: a resume reads it again from its place.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch

from minimind.architecture.hf_models import (
    POSITIONS,
    foreign_config,
    is_bidirectional,
    model_of,
    require_model,
    require_separate_documents,
)
from minimind.architecture.select import OURS
from minimind.checkpoint.retention import with_best
from minimind.checkpoint.tensor_files import readable
from minimind.config.checks import given
from minimind.config.run_config import RunConfig
from minimind.data.prepare.prepared import Prepared
from minimind.data.tokenizer.load import Tokenizer
from minimind.errors import CheckpointError, UsageError
from minimind.interop.job import CONFIG, REPLACE
from minimind.interop.weights import (
    Weights,
    find_tokenizer,
    is_checkpoint,
    load_transformers_weights,
    load_weights_from,
)
from minimind.model.configuration import MiniMindConfig
from minimind.model.distillation import Distillation, loss_name
from minimind.runtime import disk
from minimind.runtime.checked_json import read_foreign_object
from minimind.runtime.hub import local_model


@dataclass(frozen=True)
class Teacher:
    """A validated model, whose weights are read when they are first needed."""

    place: str
    weights: Weights

    @classmethod
    def of(cls, run: RunConfig) -> Teacher:
        """Find the teacher of a run; raise CheckpointError or UsageError as --init_from does.

        A directory that our decoder refuses is run by transformers, if transformers has its model.
        """
        place = run.teacher or ""
        try:
            return cls(place, load_weights_from(place))
        except CheckpointError as error:
            refusal = error
        path, config = with_best(local_model(place)), None
        if not is_checkpoint(path) and disk.is_file(path / CONFIG):
            with readable(path / CONFIG, REPLACE):
                values = read_foreign_object(path / CONFIG)
                if values.get("model_type", OURS) != OURS:
                    config = foreign_config(deepcopy(values))  # which transformers may write into
                    require_model(values)
        if config is None:
            raise refusal
        weights = load_transformers_weights(place, config)
        return cls(place, replace(weights, tokenizer=find_tokenizer(path)))

    def sized(self, run: RunConfig) -> RunConfig:
        """Return the run with the number of the teacher's weights."""
        with torch.device("meta"):
            model = model_of(self.weights.config)
        return replace(run, teacher_weights=sum(p.numel() for p in model.parameters()))

    @property
    def tokenizer_path(self) -> Path | None:
        """Its tokenizer; None if it has none."""
        return self.weights.tokenizer and self.weights.load_tokenizer().path

    def require_fit(
        self, run: RunConfig, tokenizer: Tokenizer, prepared: Prepared | None = None
    ) -> None:
        """Raise UsageError for rows that are too long for it, or a tokenizer that it lacks."""
        length, by = getattr(self.weights.config, POSITIONS), given(run, "teacher")
        if length < run.max_seq_len:
            raise UsageError(
                f"{by} has {length} positions, fewer than the rows of"
                f" {given(run, 'max_seq_len')}; lower max_seq_len, or name another teacher"
            )
        rows, own = self.weights.config.vocab_size, self.weights.tokenizer
        is_same = tokenizer.vocab_size == rows  # of a file of weights, which is all that it shows
        if own is not None:
            is_same = tokenizer.fingerprint == self.weights.load_tokenizer().fingerprint
        if not is_same:
            raise UsageError(
                f"{by} has {'no' if own is None else 'another'} tokenizer and {rows} rows in its"
                f" embedding, and the run has {tokenizer.path} of {tokenizer.vocab_size} ids; give"
                " a teacher with the same tokenizer, or its tokenizer as --tokenizer"
            )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of its weights in fp32, whatever their place and format."""
        digest, tensors = sha256(), self.weights.tensors
        for name in sorted(tensors.shapes):
            digest.update(name.encode())
            digest.update(tensors.read_as(name, torch.float32).contiguous().numpy().data)
        return digest.hexdigest()

    def distillation(self, run: RunConfig, eos_id: int) -> Distillation:
        """The loss of the run, with the model on the CPU, read in the dtype that it computes in."""
        values = run.distill_weight, run.distill_temperature
        name = loss_name(self.digest[:8], *values)
        config, dtype = self.weights.config, getattr(torch, run.weight_dtype)
        is_ours = isinstance(config, MiniMindConfig)
        if is_ours:  # its tables survive `to_empty`
            with torch.device("meta"):
                model = model_of(config).to(dtype)
            model.to_empty(device="cpu").tie_weights()
            model.config.doc_mask = False  # the arguments of the model say where they start
        else:
            model = model_of(config)  # in fp32, in which it is looked at below
        self.weights.fill(model)
        self.weights.release()
        model.eval().requires_grad_(False)
        if not is_ours and is_bidirectional(model):
            raise UsageError(
                f"{given(run, 'teacher')}: {type(model).__name__} attends to later tokens; name a"
                " causal language model"
            )
        if not is_ours and run.doc_mask:
            require_separate_documents(model)
        by_eos = run.doc_mask and run.task == "pretrain"
        return Distillation(model.to(dtype), name, *values, eos_id if by_eos else None)
