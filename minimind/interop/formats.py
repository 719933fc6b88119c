"""The formats of models elsewhere: names, layout and configuration, an object each.

A new format is a subclass and its row of `FORMATS`, and a row of docs/export.md. The parser, its
help, import, export, the model card and the tests read the table. It loads without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from minimind.errors import UsageError
from minimind.interop.job import CONFIG, EMBEDDING, HEAD, REPLACE, Job
from minimind.runtime import disk
from minimind.runtime.checked_json import read_foreign_object
from minimind.runtime.installed import require_extra

if TYPE_CHECKING:  # what is read and written loads torch and transformers
    from minimind.checkpoint.tensor_files import Part
    from minimind.interop.foreign_config import ShapeFlags
    from minimind.interop.tensor_sources import TensorSource

SHARD_BYTES = 2 * 10**9
Shape = dict[str, Any]  # arguments of MiniMindConfig
Shapes = Mapping[str, list[int]]  # of tensors, under our names


class Format:
    """How models are stored.

    One that is read has `origins`, `detect`, `to_ours` and `read_config`; one that is written has
    `help` and the rest. What is not overridden is a folder of safetensors under our names.
    """

    name: ClassVar[str]
    help: ClassVar[str] = ""  # of `minimind export --format`; empty: it is not written
    origins: ClassVar[tuple[str, ...]] = ()  # values of `minimind import --from`
    file: ClassVar[str] = ""  # the file of the tensors, where it is no safetensors
    options: ClassVar[str] = ""  # of from_pretrained; see `in_transformers`
    in_transformers: ClassVar[bool] = True  # whether its Auto classes load the folder

    def detect(self, path: Path, names: Iterable[str]) -> bool:
        """Whether tensors of these names, at `path`, are of this format."""
        return False

    def to_ours(self, name: str) -> str | None:
        """Our name of a tensor; empty: it is computed and not read, None: there is none."""
        return name

    def from_ours(self, name: str) -> str:
        """The name in the file of one of our tensors."""
        return name

    def rotates_half(self, kind: str) -> bool:
        """Whether channel j of queries and keys is paired with j + D/2, not with its neighbour."""
        return False

    def read_config(self, path: Path, shapes: Shapes, flags: ShapeFlags) -> tuple[Shape, str]:
        """The shape of the model whose tensors have these shapes, and a note on what is left open.

        Without `tie_word_embeddings` the tensors tell.
        """
        from minimind.interop.foreign_config import shape_from_tensors

        return shape_from_tensors(path, shapes, flags, self.from_ours), ""

    def model_type(self, config: Any) -> str:
        """The type of the model in the files; UsageError if the format has no such model."""
        return self.name

    def write_config(self, job: Job) -> dict[str, Any]:
        """The values of config.json."""
        raise NotImplementedError  # what writes a configuration of its own overrides this

    def files(self, job: Job) -> tuple[dict[str, bytes], str | None]:
        """The small files, and a note on how the tokenizer is loaded."""
        from minimind.interop.hf_folder import configuration_files, tokenizer_files

        return configuration_files(self.write_config(job), job) | tokenizer_files(job), None

    def parts(self, job: Job, source: TensorSource) -> list[Part]:
        """The tensors to write, in the pairs of the format."""
        names = {self.from_ours(name): name for name in source.shapes}
        return source.renamed(names).parts(job.dtype)

    def write(self, job: Job, parts: list[Part], folder: Path) -> tuple[list[str], str | None]:
        """Write the tensors; return the names of files, and a note for their users."""
        from minimind.interop.write_folder import write_shards

        return write_shards(parts, folder, job.max_shard_bytes or SHARD_BYTES), None


class MiniMind(Format):
    """Ours: what `checkpoint consolidate` writes too, without the code."""

    name = "minimind"
    help = "with our modeling code, for transformers"
    options = ", trust_remote_code=True"

    def detect(self, path: Path, names: Iterable[str]) -> bool:
        """By config.json: tensors and names do not tell that rotary pairs are adjacent."""
        from minimind.checkpoint.tensor_files import readable

        is_folder = disk.is_dir(path)
        config = path / CONFIG if is_folder else path.with_name(CONFIG)
        if not is_folder and not (path.suffix == ".safetensors" and disk.is_file(config)):
            return False
        with readable(config, REPLACE):
            values = read_foreign_object(config)
        is_ours = values.get("model_type") == self.name and "use_flash_attn" in values
        if is_ours and not is_folder:
            raise UsageError(
                f"{path}: is part of a model of ours; name its directory, {path.parent}"
            )
        return is_ours

    def read_config(self, path: Path, shapes: Shapes, flags: ShapeFlags) -> tuple[Shape, str]:
        from minimind.checkpoint.validation import read_config

        return read_config(path), ""

    def write_config(self, job: Job) -> dict[str, Any]:
        from minimind.checkpoint.validation import ModelConfig
        from minimind.interop.hf_folder import AUTO_MAP

        values = vars(job.config)
        return {
            **{name: values[name] for name in ModelConfig.model_fields if name in values},
            "model_type": self.name,
            "architectures": ["MiniMindForCausalLM"],
            **special_ids(job.config),
            **({"auto_map": AUTO_MAP} if job.has_code else {}),
        }

    def files(self, job: Job) -> tuple[dict[str, bytes], str | None]:
        from minimind.interop.hf_folder import remote_code

        files, note = super().files(job)
        return files | (remote_code() if job.has_code else {}), note


# model_type in transformers and GGUF -> the field that makes a decoder one of these, and values of
# its config.json.
FAMILY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qk_norm", {"use_sliding_window": False, "attention_bias": False}),
    "qwen2": ("qkv_bias", {"use_sliding_window": False}),
    "smollm3": (
        "no_rope_layer_interval",
        {"use_sliding_window": False, "attention_bias": False, "mlp_bias": False},
    ),
    "llama": ("", {"mlp_bias": False, "attention_bias": False}),
}
LLAMA_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings"),
)
BARE = re.compile(r"(embed_tokens|norm|layers\.\d+)\.")  # begins names of a model without a head


class Llama(Format):
    """Llama, Mistral, Qwen2, Qwen3, SmolLM3 and MiniMind since its third version.

    Under `doc_mask`, which none has, only rows of one document are equivalent.
    """

    name = "llama"
    help = "for software that loads Llama"
    origins = ("minimind3", "llama")

    def detect(self, path: Path, names: Iterable[str]) -> bool:
        return any(re.match(r"(model\.)?(layers\.\d|embed_tokens)", name) for name in names)

    def to_ours(self, name: str) -> str | None:
        return f"model.{name}" if BARE.match(name) else name

    def rotates_half(self, kind: str) -> bool:
        return True

    def read_config(self, path: Path, shapes: Shapes, flags: ShapeFlags) -> tuple[Shape, str]:
        from minimind.interop.foreign_config import read_llama_config

        if disk.is_dir(path):
            return read_llama_config(path / CONFIG, shapes, flags)
        return super().read_config(path, shapes, flags)

    def model_type(self, config: Any) -> str:
        kinds = {field: kind for kind, (field, _) in FAMILY.items()}
        has = [field for field in ("use_moe", *filter(None, kinds)) if getattr(config, field)]
        if len(has) > 1 or has == ["use_moe"]:
            raise UsageError(
                f"--format {self.name}: no architecture of other software has"
                f" {' and '.join(has)} as this model; export --format minimind"
            )
        return kinds[has[0] if has else ""]

    def write_config(self, job: Job) -> dict[str, Any]:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        from minimind.architecture.hf_models import IDS

        config, kind = job.config, job.kind
        interval = config.no_rope_layer_interval
        rotate = [int(n % max(interval, 1) != 0) for n in range(1, config.num_hidden_layers + 1)]
        more = {"no_rope_layer_interval": interval, "no_rope_layers": rotate}
        more |= dict.fromkeys(IDS)  # the defaults of SmolLM3 are ids of its own vocabulary
        return {
            "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
            "model_type": kind,
            **FAMILY[kind][1],
            **(more if interval else {}),
            **{name: getattr(config, name) for name in LLAMA_KEYS},
            **self._rotation(config),
            "hidden_act": "silu",
            **special_ids(config),
        }

    @staticmethod
    def _rotation(config: Any) -> dict[str, Any]:
        """Base and scaling of the rotary positions in the spelling of transformers 5 and 4.

        ntk is a larger base. transformers knows no original length of linear.
        """
        from minimind.model.rotary import LLAMA3, effective_theta

        scaling = dict(config.rope_scaling or {"rope_type": "default"})
        theta = effective_theta(config.head_dim, config.rope_theta, config.rope_scaling)
        if scaling["rope_type"] == "ntk":
            scaling = {"rope_type": "default"}
        if scaling["rope_type"] == "linear":
            scaling.pop("original_max_position_embeddings")
        if scaling["rope_type"] == "llama3":
            scaling |= LLAMA3
        values = {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, **scaling}}
        return values if scaling["rope_type"] == "default" else {**values, "rope_scaling": scaling}

    def files(self, job: Job) -> tuple[dict[str, bytes], str | None]:
        from minimind.interop.hf_folder import checked_files

        return checked_files(self.write_config(job), job)


class Transformers(Format):
    """A run of --model hf:, as save_pretrained writes its model."""

    name = "transformers"
    help = "a run of --model hf:, in its own architecture"

    def model_type(self, config: Any) -> str:
        return config.model_type

    def files(self, job: Job) -> tuple[dict[str, bytes], str | None]:
        from minimind.interop.hf_folder import transformers_files

        return transformers_files(job)


class Gguf(Llama):
    """One file for llama.cpp, with the tokenizer in it and beside it.

    The files beside it are needed: without them transformers prepends a space to a text.
    """

    name = "gguf"
    help = "for llama.cpp and software based on it"
    origins = ()
    file = "model.gguf"

    def detect(self, path: Path, names: Iterable[str]) -> bool:
        return False

    def rotates_half(self, kind: str) -> bool:
        return kind in ("qwen2", "qwen3")

    def model_type(self, config: Any) -> str:
        require_extra("gguf", "--format gguf", "gguf")
        kind, scaling = super().model_type(config), config.rope_scaling
        lacks = {
            "llama3 rotations": scaling and scaling["rope_type"] == "llama3" and kind != "llama",
            "head_dim": kind == "qwen2"
            and config.head_dim * config.num_attention_heads != config.hidden_size,
            # llama.cpp has the number in its code.
            "no_rope_interval but 4": kind == "smollm3" and config.no_rope_layer_interval != 4,
        }
        for what in (what for what, is_lacking in lacks.items() if is_lacking):
            raise UsageError(f"--format gguf has no {what} of {kind}; export --format llama")
        return kind

    def files(self, job: Job) -> tuple[dict[str, bytes], str | None]:
        from minimind.interop.hf_folder import tokenizer_files

        return tokenizer_files(job), None

    def parts(self, job: Job, source: TensorSource) -> list[Part]:
        from minimind.interop.gguf import gguf_parts

        return gguf_parts(job, source)

    def write(self, job: Job, parts: list[Part], folder: Path) -> tuple[list[str], str | None]:
        from minimind.interop.gguf import write_gguf

        return [self.file], write_gguf(job, parts, folder / self.file)


OUTER = {
    EMBEDDING: "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    HEAD: "output.weight",
}
INNER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUR_OUTER = {theirs: ours for ours, theirs in OUTER.items()}
OUR_INNER = {theirs: ours for ours, theirs in INNER.items()}


class MiniMind2(Format):
    """The dense models of MiniMind2: no norms of queries and keys, no biases."""

    name = "minimind2"
    origins = ("minimind2",)

    def detect(self, path: Path, names: Iterable[str]) -> bool:
        return any(self.to_ours(name) for name in names if name != "norm.weight")  # of others too

    def to_ours(self, name: str) -> str | None:
        if re.fullmatch(r"pos_cis|layers\.\d{1,6}\.attention\.mask", name):
            return ""  # tables in some of its files, which the configuration determines
        match = re.fullmatch(r"layers\.(\d{1,6})\.(.+)\.weight", name)
        if not match:
            return OUR_OUTER.get(name)
        inner = OUR_INNER.get(match[2])
        return f"model.layers.{match[1]}.{inner}.weight" if inner else None

    def from_ours(self, name: str) -> str:
        match = re.fullmatch(r"model\.layers\.(\d{1,6})\.(.+)\.weight", name)
        if match and match[2] in INNER:
            return f"layers.{match[1]}.{INNER[match[2]]}.weight"
        return OUTER.get(name, name)

    def read_config(self, path: Path, shapes: Shapes, flags: ShapeFlags) -> tuple[Shape, str]:
        from minimind.interop.foreign_config import read_minimind2_config

        if disk.is_dir(path) and disk.exists(path / CONFIG):
            return read_minimind2_config(path / CONFIG, shapes, flags, self.from_ours), ""
        return super().read_config(path, shapes, flags)


def special_ids(config: Any) -> dict[str, int]:
    """The special ids that a configuration has."""
    from minimind.architecture.hf_models import IDS

    return {name: getattr(config, name) for name in IDS if getattr(config, name) is not None}


# By name. `detect` is asked in this order.
FORMATS: dict[str, Format] = {
    form.name: form for form in (MiniMind2(), MiniMind(), Llama(), Gguf(), Transformers())
}
ORIGINS = {origin: form for form in FORMATS.values() for origin in form.origins}
# Values of `minimind import --from` of whole runs: their optimizer and step are read too.
RUNS = ("deepspeed", "minimind-resume")
WRITTEN = {name: form.help for name, form in FORMATS.items() if form.help}
# Values of `minimind export --format` of a whole checkpoint, with the state of its optimizer.
UNIVERSAL = "deepspeed-universal"
WRITTEN_RUNS = {UNIVERSAL: "a checkpoint of DeepSpeed, with moments and step"}
