"""`minimind export` and `minimind import`: write a directory that other software loads.

One tensor at a time is in memory, whatever the size of the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minimind.checkpoint.validation import ModelConfig
from minimind.data.chat.template import ChatTemplate, own_template
from minimind.data.tokenizer.load import Tokenizer
from minimind.data.tokenizer.vocabulary import DEFAULT, TOKENIZER_FILES, with_length
from minimind.errors import StorageError, UsageError
from minimind.interop.gguf import NAME as GGUF_NAME
from minimind.interop.gguf import (
    architecture,
    gguf_parts,
    gguf_vocabulary,
    note_on_spaces,
    require_gguf,
    write_gguf,
)
from minimind.interop.hf_folder import (
    AUTO_MAP,
    config_and_tokenizer_files,
    has_remote_code,
    remote_code,
    transformers_files,
)
from minimind.interop.model_card import NAME as CARD
from minimind.interop.model_card import is_edited, model_card
from minimind.interop.model_card import is_ours as is_card
from minimind.interop.tensor_sources import INDEX, WHOLE, to_gguf, to_rotate_half
from minimind.interop.weights import TRANSFORMERS, Weights, check_vocabulary
from minimind.interop.write_folder import (
    SHARDS,
    WrittenModel,
    configuration_files,
    is_ours,
    new_folder,
    write_shards,
)
from minimind.model.configuration import MiniMindConfig
from minimind.model.rotary import LLAMA3, effective_theta
from minimind.runtime import disk
from minimind.runtime.durable_files import storing
from minimind.runtime.filesystem import NoAnswer
from minimind.runtime.hub import Repository, push
from minimind.runtime.output_folder import NewFolder

SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
REPLACEABLE = (*SMALL_FILES, INDEX, WHOLE, SHARDS, GGUF_NAME)
SHARD_BYTES = 2 * 10**9
LLAMA_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "tie_word_embeddings"),
)


def output(out: Path, force: bool) -> NewFolder:
    """The folder of an export, and with `force` of an earlier one.

    Raise UsageError for an earlier one whose model card was edited.
    """
    card = out / CARD
    with storing(str(out), "give another --out"):
        code = remote_code() if force and has_remote_code(out) else ()
        replaceable = (*REPLACEABLE, *code)
        has_card = force and disk.is_file(card) and not disk.is_symlink(card)
    if has_card:
        with storing(str(card), "give another --out"):
            content = card.read_bytes()
        if is_edited(content):
            raise UsageError(
                f"--out {out} has a {CARD} that was edited after the export, and --force would"
                " replace it; move it away, or give another folder"
            )
        replaceable = (*replaceable, CARD) if is_card(content) else replaceable
    return NewFolder(out, force, replaceable, "export", is_ours)


def export(
    weights: Weights,
    tokenizer: Tokenizer,
    out: Path,
    form: str,
    dtype: str = "float32",
    max_shard_bytes: int | None = None,
    force: bool = False,
) -> WrittenModel:
    """Write the model to a new folder `out` as `form` (minimind, llama, gguf, transformers).

    Raise UsageError, StorageError or CheckpointError, and leave `out` as it was.
    """
    out = disk.resolve(out)
    if out == disk.resolve(weights.path):
        raise UsageError(f"--out {out} is the source; give another folder")
    folder = output(out, force)
    folder.require_free()
    check_form(weights, form)
    check_vocabulary(tokenizer, weights.config.vocab_size)
    source, config = weights.tensors, weights.config
    if form in ("llama", "gguf"):
        check_names(source.shapes, form)
    if form == "gguf":
        kind, scaling = architecture(config), config.rope_scaling
        lacks = {
            "llama3 rotations": scaling and scaling["rope_type"] == "llama3" and kind != "llama",
            "head_dim": kind == "qwen2" and "head_dim" in vars(config),
            # llama.cpp has the number in its code.
            "no_rope_interval but 4": kind == "smollm3" and config.no_rope_layer_interval != 4,
        }
        for what in (what for what, is_lacking in lacks.items() if is_lacking):
            raise UsageError(f"--format gguf has no {what} of {kind}; export --format llama")
    torch_dtype, note = getattr(torch, dtype), None
    if form == "gguf":
        if max_shard_bytes is not None:
            raise UsageError("--max_shard_size is for safetensors, gguf is one file; drop it")
        require_gguf()
        parts = gguf_parts(config, source, torch_dtype)
        entries, note = _tokenizer_entries(tokenizer, config.vocab_size)
        name = run_name(weights.path)
        # The tokenizer files are needed: without them transformers prepends a space to a text.
        texts = with_length(tokenizer.exported, config.max_position_embeddings)
        texts[CARD] = model_card(weights, tokenizer, form, dtype, architecture(config), name)
        write_gguf(folder, config, name, entries, parts, torch_dtype, texts)
        files = [GGUF_NAME]
    else:
        if form == "llama":
            source = source.renamed(
                {name: name for name in source.shapes},
                lambda name, value: to_rotate_half(name, value, config.head_dim),
            )
        parts = source.parts(torch_dtype)
        texts, note_on_ids, note_on_template = _small_files(config, tokenizer, form, dtype)
        note = "; ".join(filter(None, (note_on_ids, note_on_template))) or None
        kind, name = json.loads(texts["config.json"])["model_type"], run_name(weights.path)
        texts[CARD] = model_card(weights, tokenizer, form, dtype, kind, name, note_on_ids)
        with new_folder(folder, parts, texts) as draft:
            files = write_shards(parts, draft, max_shard_bytes or SHARD_BYTES)
    return WrittenModel(files, weights.tensors.shapes, parts, note)


def push_export(out: Path, model: Repository, private: bool, form: str) -> str:
    """Upload an export; return the line that says where it is.

    What an earlier export left and this one lacks is deleted, but for a GGUF, which stands beside
    another format. A model card that was edited there stays.
    """
    stale = () if form == "gguf" else (*SMALL_FILES, INDEX, WHOLE, SHARDS, *remote_code())

    def stays(card: bytes) -> bool:
        return is_edited(card) or not is_card(card)

    try:
        url, is_kept = push(model, out, private, stale, stays)
    except NoAnswer as error:
        raise StorageError(
            f"{str(error).split('; ')[0]}; {out} has the export: give the same command with --force"
        ) from error
    own = f"; its {CARD} is not as an export wrote it, and stays" if is_kept else ""
    return f"{url}: has the files of {out}{own}"


def check_form(weights: Weights, form: str) -> None:
    """Raise UsageError if the format is not for this kind of model."""
    is_ours = isinstance(weights.config, MiniMindConfig)
    if is_ours and form == TRANSFORMERS:
        raise UsageError(
            f"--format {form} is for runs of --model hf:, and {weights.path} is a MiniMind"
            f" model; give --format llama, or minimind"
        )
    if not is_ours and form != TRANSFORMERS:
        raise UsageError(
            f"--format {form} is for the MiniMind decoder, and {weights.path} is"
            f" {weights.config.model_type} of transformers; give --format {TRANSFORMERS}"
        )


def run_name(path: Path) -> str:
    """Return the run's name for a step directory, else that of the directory or file."""
    path = disk.resolve(path)
    named = path.parent.parent if path.parent.name == "checkpoints" else path
    return os.fsencode(named.stem if disk.is_file(named) else named.name).decode(errors="replace")


def check_names(names: Iterable[str], form: str) -> None:
    """Raise UsageError for a tensor that a dense Llama, Qwen2 or Qwen3 does not have."""
    for name in names:
        if to_gguf(name) is None:  # GGUF names exactly the tensors of these
            raise UsageError(f"--format {form} has no name for {name}; export --format minimind")


def _tokenizer_entries(tokenizer: Tokenizer, rows: int) -> tuple[dict[str, Any], str | None]:
    """Return the entries of a GGUF file that describe the tokenizer, by whole name, and a note."""
    vocabulary = gguf_vocabulary(tokenizer, rows)
    entries = {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    entries |= _template_entries(tokenizer.templates.by_name)
    end, note = _end_of_turn(tokenizer)
    if end is not None:  # llama.cpp ends generation at eos and at eot
        entries["tokenizer.ggml.eot_token_id"] = end
    return entries, "; ".join(filter(None, (note, note_on_spaces(tokenizer, vocabulary)))) or None


def _template_entries(by_name: Mapping[str, str]) -> dict[str, Any]:
    """Return the entries of a GGUF file that hold chat templates."""
    entries: dict[str, Any] = {"tokenizer.chat_template": by_name.get(DEFAULT)}
    others = {name: source for name, source in by_name.items() if name != DEFAULT}
    entries |= {f"tokenizer.chat_template.{name}": source for name, source in others.items()}
    entries |= {"tokenizer.chat_templates": [*others] or None}
    return {name: value for name, value in entries.items() if value is not None}


def _end_of_turn(tokenizer: Tokenizer) -> tuple[int | None, str | None]:
    """Return the id that ends a turn of the chat template, if there is one, and a note if a text
    ends it or the template does not fit; the files are kept as they are.
    """
    if tokenizer.chat_template is None or (template := own_template(tokenizer)) is None:
        return None, None
    try:
        chat = ChatTemplate(template[0], tokenizer, template[1])
        end, texts = chat.end_of_turn, chat.text_ends
    except UsageError as error:
        return None, f"the chat template is kept, and minimind chat does not take it: {error}"
    note = f"answers end with the text {texts[0]!r}, no token; name it as a stop" if texts else None
    return end, note


def _small_files(
    config: PretrainedConfig, tokenizer: Tokenizer, form: str, dtype: str
) -> tuple[dict[str, bytes], str | None, str | None]:
    """Return the files besides the weights by name, and notes on AutoTokenizer and the template."""
    files, note_on_ids = _configuration(config, tokenizer, form, dtype)
    end, note_on_template = _end_of_turn(tokenizer)
    if end is not None:  # generation ends at the end of a turn, too
        generation = json.loads(files["generation_config.json"])
        generation["eos_token_id"] = [*dict.fromkeys((tokenizer.eos_id, end))]
        text = json.dumps(generation, indent=2, sort_keys=True)
        files["generation_config.json"] = text.encode() + b"\n"
    return files, note_on_ids, note_on_template


def _configuration(
    config: PretrainedConfig, tokenizer: Tokenizer, form: str, dtype: str
) -> tuple[dict[str, bytes], str | None]:
    if not isinstance(config, MiniMindConfig):
        return transformers_files(config, tokenizer, dtype)
    ids = {
        name: getattr(config, name)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if getattr(config, name) is not None
    }
    if form == "llama":
        values = _llama_config(config) | ids
        return config_and_tokenizer_files(values, tokenizer, dtype, config.max_position_embeddings)
    values = {
        **{name: vars(config)[name] for name in ModelConfig.model_fields if name in vars(config)},
        "model_type": "minimind",
        "architectures": ["MiniMindForCausalLM"],
        **ids,
        "auto_map": AUTO_MAP,
    }
    texts = with_length(tokenizer.exported, config.max_position_embeddings)
    return {**configuration_files(values, dtype), **texts, **remote_code()}, None


def _llama_config(config: MiniMindConfig) -> dict[str, Any]:
    """Return the config of an equivalent model of transformers. Under doc_mask, which none has,
    only rows of one document are equivalent.
    """
    kind, interval = architecture(config), config.no_rope_layer_interval
    extra = {
        "llama": {"mlp_bias": False, "attention_bias": False},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
        "smollm3": {
            **{"use_sliding_window": False, "attention_bias": False, "mlp_bias": False},
            "no_rope_layer_interval": interval,
            "no_rope_layers": [
                int(n % max(interval, 1) != 0) for n in range(1, config.num_hidden_layers + 1)
            ],
            # Its defaults are ids of its own vocabulary.
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        },
    }
    return {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]],
        "model_type": kind,
        **extra[kind],
        **{name: getattr(config, name) for name in LLAMA_KEYS},
        **_rotation(config),
        "hidden_act": "silu",
    }


def _rotation(config: MiniMindConfig) -> dict[str, Any]:
    """Return base and scaling of the rotary positions in the spelling of transformers 5 and 4.

    ntk is a larger base. transformers knows no original length of linear.
    """
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
