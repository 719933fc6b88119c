"""The shape of a model made elsewhere, from its configuration and its tensors.

A number that neither contains must be given by its flag and is never guessed: with another rotary
base a model loads, and writes nonsense.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.architecture.hf_models import require_unquantized
from minimind.checkpoint.tensor_files import readable
from minimind.checkpoint.validation import Positions, RopeScaling
from minimind.errors import CheckpointError, UsageError
from minimind.interop.job import EMBEDDING
from minimind.model.configuration import MiniMindConfig
from minimind.model.rotary import FASTEST, LLAMA3, SLOWEST
from minimind.runtime import disk
from minimind.runtime.checked_json import (
    CheckedJson,
    Count,
    Positive,
    Size,
    read_foreign_object,
    shown,
    validate,
)

LAYER_0 = "model.layers.0"
Called = Callable[[str], str]  # a name of ours -> that in the file
# model_type in Hugging Face's config.json -> whether q and k are normalized (None: if there are
# norms); the rotary base that transformers takes where the file has none, and whether it ties the
# head there. Qwen2 has biases.
ARCHITECTURES = {
    "llama": (False, 1e4, False),
    "mistral": (False, 1e4, False),
    "qwen2": (False, 1e4, False),
    "qwen3": (True, 1e4, False),
    "smollm3": (False, 2e6, True),
    "minimind": (None, None, True),  # its own later versions
}
MISTRAL_WINDOW = 4096  # transformers omits a default
NO_ROPE_INTERVAL = 4  # of SmolLM3
FULL = "full_attention"
# The only supported values; transformers omits defaults.
FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
    "use_moe": False,
    "inference_rope_scaling": False,
}
ORIGINAL = "original_max_position_embeddings"
# Supported rope_type -> its settings with the only supported value.
SCALINGS = {
    "default": {},
    "linear": {},
    "dynamic": {},
    "yarn": {"beta_fast": FASTEST, "beta_slow": SLOWEST, "truncate": True},
    "llama3": LLAMA3,
}
REPLACE = "name another model, or correct it"
FLAG_NAMES = {
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}


class MiniMind2Config(CheckedJson):
    """MiniMind2's config.json."""

    dim: Size
    n_layers: Size
    n_heads: Size
    n_kv_heads: Size | None
    max_seq_len: Positions
    norm_eps: Positive
    rope_theta: Positive
    multiple_of: Size = 1


class LlamaShape(CheckedJson):
    """What config.json of a Llama, Mistral or Qwen must contain."""

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    max_position_embeddings: Positions
    rms_norm_eps: Positive


class LlamaDefaults(CheckedJson):
    """Values of the same file that have defaults or several spellings."""

    num_key_value_heads: Size
    head_dim: Size
    tie_word_embeddings: bool
    bos_token_id: Count | None
    eos_token_id: Count | None
    pad_token_id: Count | None
    rope_theta: Positive


@dataclass(frozen=True)
class ShapeFlags:
    """What flags specify of a shape; None if not given."""

    n_heads: int | None = None
    n_kv_heads: int | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    max_seq_len: int | None = None
    is_scaled: bool = False  # whether max_seq_len is --rope_original_length of a run

    def flag_of(self, name: str) -> str:
        """Return the flag that gives `name`."""
        is_original = self.is_scaled and name == "max_seq_len"
        return "--rope_original_length" if is_original else f"--{name}"


def check_flags(path: Path, config: MiniMindConfig, flags: ShapeFlags) -> None:
    """Raise UsageError if the model differs from a flag."""
    for flag, name in FLAG_NAMES.items():
        expected, actual = getattr(flags, flag), getattr(config, name)
        if expected not in (None, actual):
            raise UsageError(
                f"--{flag} {expected} differs from {name} = {actual} of {path}; remove --{flag}"
            )


def shape_from_tensors(
    path: Path, shapes: Mapping[str, list[int]], flags: ShapeFlags, called: Called = str
) -> dict[str, Any]:
    """Arguments of MiniMindConfig, from tensors under our names and from flags.

    Raise UsageError that names all missing flags.
    """
    vocab_size, width = _matrix_shape(path, shapes, EMBEDDING, called)
    queries = _matrix_shape(path, shapes, f"{LAYER_0}.self_attn.q_proj.weight", called)[0]
    keys = _matrix_shape(path, shapes, f"{LAYER_0}.self_attn.k_proj.weight", called)[0]
    inner = _matrix_shape(path, shapes, f"{LAYER_0}.mlp.gate_proj.weight", called)[0]
    required = ("n_heads", "rope_theta", "norm_eps", "max_seq_len")
    if missing := [flags.flag_of(name) for name in required if getattr(flags, name) is None]:
        to = "the run" if flags.is_scaled else "`minimind import`, or to a run with --init_from"
        has_config = disk.is_file(path.with_name("config.json"))
        instead = f"name {path.parent}, where config.json may, or " if has_config else ""
        raise UsageError(
            f"{path}: its tensors do not determine {', '.join(missing)}; {instead}give them to {to}"
        )
    heads = flags.n_heads or 1
    head_dim = queries // heads
    if queries % heads or not head_dim or keys % head_dim:
        raise UsageError(
            f"--n_heads {heads} does not fit {path}, whose queries have {queries} channels and"
            f" whose keys have {keys}; give its number of heads"
        )
    if flags.n_kv_heads is not None and flags.n_kv_heads != keys // head_dim:
        raise UsageError(
            f"--n_kv_heads {flags.n_kv_heads} is not what {path} has with --n_heads {heads}, which"
            f" is {keys // head_dim}; remove it"
        )
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": len(
            {name.split(".")[2] for name in shapes if re.match(r"model\.layers\.\d", name)}
        ),
        "num_attention_heads": heads,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "max_position_embeddings": flags.max_seq_len,
        "rms_norm_eps": flags.norm_eps,
        "rope_theta": flags.rope_theta,
        "qk_norm": f"{LAYER_0}.self_attn.q_norm.weight" in shapes,  # Qwen3
        "qkv_bias": f"{LAYER_0}.self_attn.q_proj.bias" in shapes,  # Qwen2
    }


def _matrix_shape(
    path: Path, shapes: Mapping[str, list[int]], name: str, called: Called
) -> list[int]:
    if len(shapes.get(name, ())) != 2:
        problem = f"of shape {shapes[name]}" if name in shapes else "missing"
        raise CheckpointError(
            f"{path}: {called(name)} is {problem}, so the shape of its model is unknown; {REPLACE}"
        )
    return shapes[name]


def read_minimind2_config(
    path: Path, shapes: Mapping[str, list[int]], flags: ShapeFlags, called: Called = str
) -> dict[str, Any]:
    """Arguments of MiniMindConfig from MiniMind2's config.json, which must match its tensors.

    Flags supply what older versions omit, such as rope_theta.
    """
    with readable(path, REPLACE):
        values = read_foreign_object(path)
        require_unquantized(values)
        if values.get("use_moe"):
            raise CheckpointError("has use_moe = True, and experts cannot be imported")
        required = ("rope_theta", "norm_eps", "max_seq_len")
        for name in required:
            if getattr(flags, name) is not None:
                values.setdefault(name, getattr(flags, name))
        if missing := next((name for name in required if name not in values), None):
            raise UsageError(f"{path}: has no {missing}; give {flags.flag_of(missing)}")
        validate(MiniMind2Config, values)
        heads = values["n_heads"]
        known = ShapeFlags(heads, None, *(values[name] for name in required))
        try:
            shape = shape_from_tensors(path.parent, shapes, known, called)
        except UsageError as error:  # only the heads can be wrong
            raise CheckpointError(f"has n_heads = {heads}, which do not fit its tensors") from error
        width = values.get("hidden_dim")
        if width is None and "multiple_of" in values:
            multiple_of = values["multiple_of"]  # 2/3 of 4 dim, rounded up to a multiple
            width = multiple_of * -(-int(2 * (4 * values["dim"]) / 3) // multiple_of)
        expected = {
            "hidden_size": ("dim", values["dim"]),
            "num_hidden_layers": ("n_layers", values["n_layers"]),
            "num_key_value_heads": ("n_kv_heads", values["n_kv_heads"] or heads),
            "intermediate_size": ("hidden_dim", width or shape["intermediate_size"]),
            "vocab_size": ("vocab_size", values.get("vocab_size", shape["vocab_size"])),
        }
        for name, (theirs, value) in expected.items():
            if shape[name] != value:
                raise CheckpointError(
                    f"has {theirs} = {shown(value)}, and the tensors beside it {shape[name]}"
                )
    return shape


def read_llama_config(
    path: Path, shapes: Mapping[str, list[int]], flags: ShapeFlags
) -> tuple[dict[str, Any], str]:
    """Arguments of MiniMindConfig from Hugging Face's config.json of one of ARCHITECTURES, and a
    note on what it leaves open.
    """
    with readable(path, REPLACE):
        values = read_foreign_object(path)
        kind = values.get("model_type")
        if type(kind) is not str or kind not in ARCHITECTURES:
            raise CheckpointError(
                f"has model_type = {shown(kind)}, none of {', '.join(ARCHITECTURES)};"
                " training takes others as models of transformers (--model hf:)"
            )
        require_unquantized(values)
        validate(LlamaShape, values)
        for name, supported in FIXED.items():
            if values.get(name, supported) not in (supported, None):
                raise _unsupported(name, values[name])
        window = values.get("sliding_window", MISTRAL_WINDOW) if kind == "mistral" else None
        is_wide = type(window) is int and window >= values["max_position_embeddings"]
        if window is not None and not is_wide:
            raise _unsupported("sliding_window", window)
        layers = values.get("layer_types") or []
        if type(layers) is not list or any(layer != FULL for layer in layers):
            raise _unsupported("layer_types", layers)
        heads = values["num_attention_heads"]
        qk_norm, base, is_tied = ARCHITECTURES[kind]
        rotation, note = _rotation(values, flags.rope_theta, base)
        queries = shapes.get(f"{LAYER_0}.self_attn.q_proj.weight") or [values["hidden_size"]]
        head_dim = values.get("head_dim") or queries[0] // heads
        keys = shapes.get(f"{LAYER_0}.self_attn.k_proj.weight") or queries
        kv_heads = max(1, keys[0] // head_dim) if type(head_dim) is int and head_dim > 0 else heads
        others = {
            "num_key_value_heads": values.get("num_key_value_heads") or kv_heads,
            "head_dim": head_dim,
            "tie_word_embeddings": values.get("tie_word_embeddings", is_tied),
            "no_rope_layer_interval": _no_rope_interval(values) if kind == "smollm3" else 0,
            **rotation,
        }
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = values.get(name)  # the first of several; -1 is none in Llamas of 2023
            value = value[0] if type(value) is list and value else value
            others[name] = None if value == -1 else value
        validate(LlamaDefaults, others)
    shape = {**{name: values[name] for name in LlamaShape.model_fields}, **others}
    if qk_norm is None:
        qk_norm = any(f"{LAYER_0}.self_attn.{side}_norm.weight" in shapes for side in "qk")
    return {**shape, "qk_norm": qk_norm, "qkv_bias": kind == "qwen2"}, note


def _unsupported(name: str, value: object, of: str = "") -> CheckpointError:
    return CheckpointError(f"has {name} = {shown(value)}{of}, which MiniMind does not support")


def _no_rope_interval(values: Mapping[str, Any]) -> int:
    """Every how many layers of a SmolLM3 one does not rotate; 0 if all do.

    Raise CheckpointError for layers at no such interval.
    """
    layers, given = values["num_hidden_layers"], values.get("no_rope_layers")
    if given is None:
        interval = values.get("no_rope_layer_interval", NO_ROPE_INTERVAL)
        if type(interval) is not int or interval < 1:
            raise _unsupported("no_rope_layer_interval", interval)
    else:
        rotate = given[:layers] if type(given) is list else []
        interval = rotate.index(0) + 1 if 0 in rotate else layers + 1
        has_other = any(turns != int(n % interval != 0) for n, turns in enumerate(rotate, 1))
        if len(rotate) < layers or has_other:
            raise _unsupported("no_rope_layers", given)
    return interval if interval <= layers else 0


def _rotation(
    values: Mapping[str, Any], flag: float | None, default: float | None
) -> tuple[dict[str, Any], str]:
    """The rotary base, not validated, and `rope_scaling` of MiniMindConfig; and a note.

    Without a base in the file it is that of the flag, or the default. Raise CheckpointError for
    kinds of scaling, and settings of them, that MiniMind does not have.
    """
    both = {name: values.get(name) or {} for name in ("rope_scaling", "rope_parameters")}
    for name, given in both.items():
        if type(given) is not dict:
            raise _unsupported(name, given)
    given = both["rope_scaling"] or both["rope_parameters"]
    kind = given.get("rope_type", given.get("type", "default"))
    if type(kind) is not str or kind not in SCALINGS:
        raise _unsupported("rope_type", kind)
    bases = (place.get("rope_theta") for place in (given, values, both["rope_parameters"]))
    base = next((base for base in bases if base is not None), flag)
    if base is None and default is None:
        raise CheckpointError("has no rope_theta (give it as --rope_theta)")
    note = "" if base is not None else f"rope_theta {default:g}, the default of transformers"
    rotation: dict[str, Any] = {"rope_theta": default if base is None else base}
    supported = {"partial_rotary_factor": 1, **SCALINGS[kind]}
    required = {*SCALINGS[kind]} if kind == "llama3" else set[str]()
    for name in sorted(
        {*given, *required} - {"rope_type", "type", "rope_theta", "factor", ORIGINAL}
    ):
        value = given.get(name)
        if value != supported.get(name) and (value is not None or name in required):
            raise _unsupported(shown(name), value, f" of {kind} rotations")
    if kind == "default":
        return rotation, note
    positions = values["max_position_embeddings"]
    length = values.get(ORIGINAL) or given.get(ORIGINAL) or positions  # transformers' order
    scaling = {"rope_type": kind, "factor": given.get("factor"), ORIGINAL: length}
    if kind == "dynamic":  # changes nothing within max_position_embeddings, where positions end
        validate(RopeScaling, {**scaling, "rope_type": "linear"}, "rope_scaling.")
        dropped = f"without the dynamic scaling, which begins beyond {positions:,} positions"
        return rotation, "; ".join(filter(None, (note, dropped)))
    validate(RopeScaling, scaling, "rope_scaling.")
    if kind == "linear":  # has no original length in transformers
        scaling[ORIGINAL] = math.ceil(positions / scaling["factor"])
    return {**rotation, "rope_scaling": scaling}, note
