"""The shape of a model made elsewhere: what its configuration and its tensors tell, and no more.

A number that neither tells is asked for by the name of its flag, never guessed: with another base
of its rotations a model loads, and writes nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimind.checkpoint.tensor_files import readable
from minimind.checkpoint.validation import POSITIONS
from minimind.errors import CheckpointError, UsageError
from minimind.interop.weight_names import EMBEDDING, to_minimind2
from minimind.model.configuration import MiniMindConfig
from minimind.runtime.checked_json import (
    ABOVE_0,
    COUNT,
    SIZE,
    YES_OR_NO,
    or_null,
    read_object,
    require,
    shown,
)

MINIMIND2, LLAMA = "minimind2", "llama"
LAYER_0 = "model.layers.0"
# Hugging Face's names of architectures that ours can hold, and whether q and k are normed.
ARCHITECTURES = {"llama": False, "qwen3": True, "minimind": False}
MINIMIND2_CONFIG = {
    **dict.fromkeys(("dim", "n_layers", "n_heads"), SIZE),
    "n_kv_heads": or_null(SIZE),
    "max_seq_len": POSITIONS,
    **dict.fromkeys(("norm_eps", "rope_theta"), ABOVE_0),
}
LLAMA_CONFIG = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), SIZE),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), SIZE),
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": ABOVE_0,
}
# What is ours where a configuration says nothing else, as transformers leaves it out.
PLAIN = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
ANEW = "name another model, or mend it"
# What a user says of a shape, and what the configuration of a model calls it.
SAID = {
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "rope_theta": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}


@dataclass(frozen=True)
class ShapeFlags:
    """What a user says of a shape; None where nothing was said."""

    n_heads: int | None = None
    n_kv_heads: int | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    max_seq_len: int | None = None


def require_said(path: Path, config: MiniMindConfig, given: ShapeFlags) -> None:
    """Nothing, or a UsageError where a model is not what a user said of it."""
    for flag, name in SAID.items():
        said, found = getattr(given, flag), getattr(config, name)
        if said not in (None, found):
            raise UsageError(f"--{flag} {said} is not the {name} = {found} of {path}; drop it")


def name_in(kind: str, name: str) -> str:
    """What a file of that kind calls a tensor of ours."""
    return (to_minimind2(name) or name) if kind == MINIMIND2 else name


def shape_of_tensors(
    path: Path, shapes: Mapping[str, list[int]], given: ShapeFlags, kind: str = LLAMA
) -> dict[str, Any]:
    """What MiniMindConfig is made from, of tensors by our names without a configuration.

    A UsageError names the flags of all that they do not tell.
    """
    vocab_size, width = _matrix(path, shapes, EMBEDDING, kind)
    keys = _matrix(path, shapes, f"{LAYER_0}.self_attn.k_proj.weight", kind)[0]
    inner = _matrix(path, shapes, f"{LAYER_0}.mlp.gate_proj.weight", kind)[0]
    missing = [
        f"--{name}"
        for name in ("n_heads", "rope_theta", "norm_eps", "max_seq_len")
        if getattr(given, name) is None
    ]
    if missing:
        told, beside = ", ".join(missing), path.with_name("config.json")
        instead = f"name {path.parent}, where config.json may, or " if beside.is_file() else ""
        raise UsageError(
            f"{path}: its tensors do not tell {told}; {instead}give them to `minimind import`, or"
            " to a run with --init_from"
        )
    heads = given.n_heads or 1
    head_dim = width // heads
    if width % heads or not head_dim or keys % head_dim:
        raise UsageError(
            f"--n_heads {heads} does not fit {path}, whose width is {width} and whose keys have"
            f" {keys} channels; give the number it has"
        )
    if given.n_kv_heads is not None and given.n_kv_heads != keys // head_dim:
        raise UsageError(
            f"--n_kv_heads {given.n_kv_heads} is not what {path} has with --n_heads {heads}, which"
            f" is {keys // head_dim}; drop it"
        )
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers_of(shapes),
        "num_attention_heads": heads,
        "num_key_value_heads": keys // head_dim,
        "max_position_embeddings": given.max_seq_len,
        "rms_norm_eps": given.norm_eps,
        "rope_theta": given.rope_theta,
        "qk_norm": f"{LAYER_0}.self_attn.q_norm.weight" in shapes,  # Qwen3's
    }


def layers_of(names: Mapping[str, Any]) -> int:
    """How many layers there are tensors of."""
    return len({name.split(".")[2] for name in names if re.match(r"model\.layers\.\d", name)})


def shape_of_minimind2(
    path: Path, shapes: Mapping[str, list[int]], given: ShapeFlags
) -> dict[str, Any]:
    """The same of a config.json of MiniMind2's, which must agree with the tensors beside it.

    What an older one leaves out, as rope_theta, has to be given.
    """
    with readable(path, ANEW):
        found, _ = read_object(path)
        if found.get("use_moe"):
            raise CheckpointError("has use_moe = True, and experts are not brought in")
        for name in ("norm_eps", "rope_theta", "max_seq_len"):
            said = getattr(given, name)
            if said is not None:
                found.setdefault(name, said)
        missing = [name for name in ("rope_theta", "norm_eps", "max_seq_len") if name not in found]
        if missing:
            raise UsageError(f"{path}: has no {missing[0]}; give --{missing[0]}")
        require(found, MINIMIND2_CONFIG)
        heads = found["n_heads"]
        told = ShapeFlags(heads, None, found["rope_theta"], found["norm_eps"], found["max_seq_len"])
        try:
            shape = shape_of_tensors(path.parent, shapes, told, MINIMIND2)
        except UsageError as error:  # of what is told, its heads alone can be wrong
            raise CheckpointError(f"has n_heads = {heads}, which do not fit its tensors") from error
        width = found.get("hidden_dim")
        if width is None and "multiple_of" in found:
            require(found, {"multiple_of": SIZE})
            width = minimind2_width(found["dim"], found["multiple_of"])
        claims = {
            "hidden_size": ("dim", found["dim"]),
            "num_hidden_layers": ("n_layers", found["n_layers"]),
            "num_key_value_heads": ("n_kv_heads", found["n_kv_heads"] or heads),
            "intermediate_size": ("hidden_dim", width or shape["intermediate_size"]),
            "vocab_size": ("vocab_size", found.get("vocab_size", shape["vocab_size"])),
        }
        for name, (theirs, claimed) in claims.items():
            if shape[name] != claimed:
                raise CheckpointError(
                    f"has {theirs} = {shown(claimed)}, and the tensors beside it {shape[name]}"
                )
    return shape


def minimind2_width(dim: int, multiple_of: int) -> int:
    """Width of its feed-forward where no other is given: 2/3 of 4 dim, up to a multiple."""
    return multiple_of * -(-int(2 * (4 * dim) / 3) // multiple_of)


def _matrix(path: Path, shapes: Mapping[str, list[int]], name: str, kind: str) -> list[int]:
    if len(shapes.get(name, ())) != 2:
        told = f"of shape {shapes[name]}" if name in shapes else "missing"
        raise CheckpointError(
            f"{path}: {name_in(kind, name)} is {told}, so its model cannot be told; {ANEW}"
        )
    return shapes[name]


def shape_of_llama(path: Path) -> dict[str, Any]:
    """The same of Hugging Face's config.json of a Llama or Qwen3 model that ours can hold."""
    with readable(path, ANEW):
        found, _ = read_object(path)
        kind = found.get("model_type")
        if kind not in ARCHITECTURES or (kind == "minimind" and "use_flash_attn" in found):
            raise CheckpointError(f"has model_type = {shown(kind)}, not llama or qwen3")
        require(found, LLAMA_CONFIG)
        for name, plain in PLAIN.items():
            if found.get(name, plain) not in (plain, None):
                raise CheckpointError(f"has {name} = {shown(found[name])}, which ours has not")
        theta = _rope_theta(found)
        heads = found["num_attention_heads"]
        keys = {"num_key_value_heads": found.get("num_key_value_heads") or heads}
        flags = {"tie_word_embeddings": found.get("tie_word_embeddings", False)}
        require(keys, {"num_key_value_heads": SIZE})
        require(flags, {"tie_word_embeddings": YES_OR_NO})
        head_dim = found.get("head_dim") or found["hidden_size"] // heads
        if head_dim * heads != found["hidden_size"]:
            raise CheckpointError(
                f"has heads of {shown(head_dim)} channels, and ours have hidden_size / heads"
            )
        ids = {}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = found.get(name)  # of several ends the first
            ids[name] = value[0] if type(value) is list and value else value
        require(ids, dict.fromkeys(ids, or_null(COUNT)))
    normed = {"qk_norm": True} if ARCHITECTURES[kind] else {}
    shape = {name: found[name] for name in LLAMA_CONFIG}
    return {**shape, **keys, **flags, **ids, **normed, "rope_theta": theta}


def _rope_theta(found: Mapping[str, Any]) -> float:
    """The base of plain rotations; a CheckpointError for scaled ones."""
    told = found.get("rope_parameters") or {}
    scaling = found.get("rope_scaling")
    kind = told.get("rope_type", "default") if type(told) is dict else shown(told)
    if kind != "default" or scaling:
        raise CheckpointError(
            f"has scaled rotations ({shown(scaling or kind)}), which ours has not"
        )
    theta: dict[str, Any] = {"rope_theta": told.get("rope_theta", found.get("rope_theta"))}
    require(theta, {"rope_theta": ABOVE_0})
    return theta["rope_theta"]
