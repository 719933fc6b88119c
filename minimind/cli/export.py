"""`minimind export` and `minimind import`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from minimind.cli.command import PLACE, OfPlace, Output, argument, non_empty, size_in_bytes
from minimind.cli.model import OfWeights
from minimind.config.names import no_run, not_there
from minimind.errors import CheckpointError, UsageError
from minimind.interop.formats import ORIGINS, RUNS, UNIVERSAL, WRITTEN, WRITTEN_RUNS

if TYPE_CHECKING:
    from minimind.data.tokenizer.load import Tokenizer
    from minimind.interop.foreign_config import ShapeFlags
    from minimind.interop.weights import Weights
    from minimind.runtime.output_folder import NewFolder

DTYPES = ("float32", "bfloat16", "float16")
OF_UNIVERSAL = {f"format={UNIVERSAL}": "this format has one file per float32 tensor"}


@dataclass(kw_only=True)
class Export(OfWeights, OfPlace, Output):
    """Export a model for other software. Needs no GPU, and memory for one tensor."""

    example = "minimind export --checkpoint out --format llama --out out/llama"
    place: Any = argument(None, **PLACE)
    """a run's out_dir, a step_ directory, or a directory of `import` or `export`"""
    format: str = argument(choices=(*WRITTEN, *WRITTEN_RUNS), of_choices=WRITTEN | WRITTEN_RUNS)
    dtype: str = argument("float32", choices=DTYPES, excludes=OF_UNIVERSAL)
    """dtype of the tensors"""
    max_shard_size: int | None = argument(None, parse=size_in_bytes, excludes=OF_UNIVERSAL)
    """maximum size of a safetensors file; a bare number counts GiB (default: 2GB)"""
    push_to_hub: str | None = argument(
        None, parse=non_empty, metavar="USER/NAME", excludes=OF_UNIVERSAL
    )
    """upload --out to this model of the Hugging Face Hub, which is created if it does not exist"""
    hub_private_repo: bool = argument(False, needs="push_to_hub")
    """make the model private"""

    def execute(self) -> None:
        if fault := no_run(self.checkpoint, self.typed):
            raise CheckpointError(fault)
        from minimind.interop.export import export, output, push_export  # imports torch
        from minimind.interop.model_card import is_ours
        from minimind.interop.weights import read_weights
        from minimind.runtime.hub import owned_model

        if self.format == UNIVERSAL:
            return self._export_universal()

        def write(weights: Weights) -> str:
            options = (self.out, self.format, self.dtype, self.max_shard_size, self.force)
            written = export(weights, weights.load_tokenizer(), *options)
            if written.note:
                print(f"{self.out}: {written.note}", file=sys.stderr)
            return written.summary(f"as {self.format} in {self.dtype}", weights.path, self.out)

        output(self.out, self.force).require_free()  # before gigabytes are hashed
        model = self.push_to_hub and owned_model(self.push_to_hub, self.hub_private_repo, is_ours)
        print(read_weights(self.checkpoint, write, self.weights), flush=True)
        if model:
            print(push_export(self.out, model, self.hub_private_repo, self.format))

    def _export_universal(self) -> None:
        """Write a checkpoint of DeepSpeed and print a summary."""
        from minimind.interop.deepspeed_universal import export_universal
        from minimind.interop.weights import read_weights

        if self.weights != "trained":
            raise UsageError(
                f"--weights {self.weights} has no optimizer state, which --format {UNIVERSAL}"
                f" needs; remove --weights {self.weights}"
            )
        out = _new_run(self.out, self.force, "export")

        def write(weights: Weights) -> str:
            summary, note = export_universal(weights, out)
            if note:
                print(f"{self.out}: {note}", file=sys.stderr)
            return summary

        print(read_weights(self.checkpoint, write))


def _new_run(path: Path, force: bool, author: str) -> NewFolder:
    """The folder of a run, which replaces nothing."""
    from minimind.runtime.output_folder import NewFolder

    if force:
        raise UsageError("--force does not replace a run; remove --force, and give a new --out")
    out = NewFolder(path, False, (), author, lambda folder: False)
    out.require_free()
    return out


@dataclass(kw_only=True)
class Import(Output):
    """Import the weights of other software, or a whole run, to train or to generate with."""

    example = "minimind import --from llama path/to/llama --out out/imported"
    origins: ClassVar = {"source": CheckpointError}
    source: Path = argument(metavar="FILE|DIR", is_positional=True)
    """a file of weights, or a directory"""
    kind: str = argument(choices=(*ORIGINS, *RUNS), options=("--from",))
    """format of the source; deepspeed, and minimind-resume (MiniMind's *_resume.pth): a training
    checkpoint, of which --out becomes a run"""
    tokenizer: Path | None = argument(None)
    """tokenizer file or directory (default: the one in DIR)"""
    model_config: Path | None = argument(None, metavar="FILE|DIR")
    """config.json of the model of a training checkpoint (default: the one there, or above it)"""
    n_heads: int | None = argument(None, ge=1)
    """for a file without config.json: query heads"""
    n_kv_heads: int | None = argument(None, ge=1)
    """for a file without config.json: key/value heads, compared with the weights"""
    rope_theta: float | None = argument(None, gt=0)
    """for a file without config.json: rotary base"""
    norm_eps: float | None = argument(None, gt=0)
    """for a file without config.json: epsilon of the norms"""
    max_seq_len: int | None = argument(None, ge=1)
    """for a file without config.json: maximum positions"""

    def execute(self) -> None:
        if fault := not_there(self.source):
            raise CheckpointError(fault)
        from minimind.interop.foreign_config import ShapeFlags, check_flags

        names = ("n_heads", "n_kv_heads", "rope_theta", "norm_eps", "max_seq_len")
        flags = ShapeFlags(*(getattr(self, name) for name in names))
        if self.kind in RUNS:
            return print(self._import_run(flags))
        from minimind.interop.export import export, output  # imports torch
        from minimind.interop.weights import load_weights_from

        output(self.out, self.force).require_free()
        weights = load_weights_from(self.source, flags, self.kind)
        check_flags(weights.path, weights.config, flags)
        if self.tokenizer:
            weights = weights.with_tokenizer(self.tokenizer)
        tokenizer = weights.load_tokenizer()
        weights.set_special_ids(tokenizer)
        self._note(weights, tokenizer)
        written = export(weights, tokenizer, self.out, "minimind", force=self.force)
        print(written.summary("as minimind in float32", weights.path, self.out))

    def _import_run(self, flags: ShapeFlags) -> str:
        """Write a run that resumes at a training checkpoint's step; return what to print."""
        from minimind.engine.state import MASTER
        from minimind.interop.deepspeed_checkpoint import read_deepspeed, step_folder
        from minimind.interop.foreign_run import import_run, model_of_run
        from minimind.interop.minimind_resume import read_minimind_resume

        out = _new_run(self.out, self.force, "import")
        is_deepspeed = self.kind == "deepspeed"
        source = step_folder(self.source) if is_deepspeed else self.source
        found = (read_deepspeed if is_deepspeed else read_minimind_resume)(source)
        models = model_of_run(found, self.model_config, flags)
        weights = models[MASTER]
        if self.tokenizer:
            weights = weights.with_tokenizer(self.tokenizer)
        tokenizer = weights.load_tokenizer()
        self._note(weights, tokenizer)
        return import_run(found, models, tokenizer, out)

    @staticmethod
    def _note(weights: Weights, tokenizer: Tokenizer) -> None:
        """Say what the source leaves open."""
        rows = weights.config.vocab_size
        spare = rows - tokenizer.vocab_size
        unused = f"{spare:,} of {rows:,} rows of the embedding have no id" if spare else ""
        if note := "; ".join(filter(None, (weights.note, unused))):
            print(f"{weights.path}: {note}", file=sys.stderr)
