"""Write a model and its vocabulary as one GGUF file, for llama.cpp and others.

"llama" and "smollm3" pair adjacent channels, as ours does; "qwen2" and "qwen3" pair j with j + D/2.
Norms and biases stay float32 in every precision: llama.cpp knows nothing else. The vocabulary is
that of a SentencePiece model, or byte-level BPE whose splits of a text llama.cpp has a name for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import tokenizers
import torch
from sentencepiece.sentencepiece_model_pb2 import ModelProto, TrainerSpec  # pyright: ignore[reportAttributeAccessIssue] (made at import)

from minimind.checkpoint.tensor_files import Part
from minimind.data.tokenizer.hf_export import escaping, merges
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.load import Tokenizer
from minimind.data.tokenizer.vocabulary import (
    BYTE_NAMES,
    DEFAULT,
    FILLER_PREFIX,
    JSON_NAME,
    MODEL_NAME,
    SPACE_SIGN,
)
from minimind.errors import UsageError
from minimind.interop.job import Job
from minimind.interop.tensor_sources import TensorSource
from minimind.interop.write_folder import PRODUCER
from minimind.model.rotary import effective_theta, rotary_frequencies
from minimind.runtime.checked_json import shown
from minimind.runtime.durable_files import sync_file

ROTARY_FACTORS = "rope_freqs.weight"  # by which the llama architecture divides frequencies
NUMPY = {"F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype("u2")}  # it has no bf16
FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}


def gguf_parts(job: Job, source: TensorSource) -> list[Part]:
    """The tensors under GGUF's names: matrices as the dtype of the job, vectors as float32."""
    config, scaling = job.config, job.config.rope_scaling
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[job.kind.upper()], config.num_hidden_layers)
    names = {str(known.get_name(name, (".weight", ".bias"))): name for name in source.shapes}
    parts = []
    for size, dtype in ((2, job.dtype), (1, "float32")):
        of_size = {name: ours for name, ours in names.items() if len(source.shapes[ours]) == size}
        parts += source.renamed(of_size).parts(dtype)
    if scaling and scaling["rope_type"] == "llama3":
        shape = config.head_dim, config.rope_theta
        factors = rotary_frequencies(*shape, None)[0] / rotary_frequencies(*shape, scaling)[0]
        table = factors.float()
        parts.append(Part(ROTARY_FACTORS, "F32", [*table.shape], table.nbytes, lambda: table))
    return sorted(parts, key=lambda part: part.name)


def write_gguf(job: Job, parts: list[Part], path: Path) -> str | None:
    """Write the file, tensor by tensor; return a note on the tokenizer in it."""
    vocabulary = gguf_vocabulary(job.tokenizer, job.config.vocab_size)
    entries = {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    entries |= _template_entries(job.tokenizer.templates.by_name)
    if job.end is not None:  # llama.cpp ends generation at eos and at eot
        entries["tokenizer.ggml.eot_token_id"] = job.end
    with closing(gguf.GGUFWriter(path, job.kind)) as writer:
        writer.add_string("general.producer", PRODUCER)
        writer.add_name(job.name)
        _add_shape(writer, job.config)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[job.dtype]])
        for key, value in entries.items():
            _add_entry(writer, key, value)
        for part in parts:
            kind = gguf.GGMLQuantizationType[part.dtype]
            writer.add_tensor_info(part.name, part.shape, NUMPY[part.dtype], part.bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for part in parts:
            value = part.read().contiguous()
            plain = value.view(torch.uint16) if value.dtype == torch.bfloat16 else value
            writer.write_tensor_data(plain.numpy())
    sync_file(path)
    return note_on_spaces(job.tokenizer, vocabulary)


def _template_entries(by_name: Mapping[str, str]) -> dict[str, Any]:
    """The entries of chat templates; gguf's own writer lists their names in a random order."""
    others = [name for name in by_name if name != DEFAULT]
    entries = {"tokenizer.chat_template": by_name.get(DEFAULT)}
    entries |= {f"tokenizer.chat_template.{name}": by_name[name] for name in others}
    entries |= {"tokenizer.chat_templates": others or None}
    return {name: value for name, value in entries.items() if value is not None}


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    scaling = config.rope_scaling
    theta = effective_theta(config.head_dim, config.rope_theta, scaling)
    writer.add_rope_freq_base(theta)
    if scaling is not None and scaling["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_entry(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        if value:
            writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)


# Token types; the fourth is matched in a text before any other.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (kind.value for kind in gguf.TokenType)
MODEL, BYTE_LEVEL = "llama", "gpt2"  # GGUF's names for BPE of SentencePiece and of bytes

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizer pattern -> llama.cpp's name for it.
SPLITS = {
    "": "gpt-2",
    WORDS % r"\p{N}": "qwen2",
    WORDS % r"\p{N}{1,3}": "llama-bpe",
    "digits": "smollm",
}
# Fields of a model of BPE that GGUF does not have.
OTHER_BPE = (
    *("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout"),
    *("byte_fallback", "fuse_unk"),
)
TAKES_WHOLE = "llama-bpe"  # words that are tokens are not split, as `ignore_merges` says


def gguf_vocabulary(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Entries by name after `tokenizer.ggml.`; raise UsageError if GGUF cannot express the model.

    Each row of the embedding gets a token. llama.cpp merges by score and ignores the merges;
    transformers reads them, in this order.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        values = json.loads(tokenizer.files()[JSON_NAME])
        if values["model"].get("type") == "BPE" and values["model"].get("byte_fallback"):
            return _merged_vocabulary(tokenizer, rows)
        return _byte_level_vocabulary(tokenizer, values, rows)
    content = tokenizer.files()[MODEL_NAME]
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)  # pyright: ignore[reportCallIssue] (no stubs)
    model = ModelProto.FromString(content)

    def normalized(text: str) -> str:
        return processor.normalize(text).replace(SPACE_SIGN, " ")

    if reason := _not_merged(model, normalized):
        raise UsageError(f"{tokenizer.path}: {reason}; export --format llama")
    spare = range(len(model.pieces), rows)
    special = {
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
        "padding_token_id": processor.pad_id(),
    }
    types = [  # those of SentencePiece have the same numbers; fillers must not be matched in text
        UNUSED if piece.type == CONTROL and piece.piece.startswith(FILLER_PREFIX) else piece.type
        for piece in model.pieces
    ]
    return {
        "model": MODEL,
        "pre": "default",
        "tokens": [piece.piece for piece in model.pieces] + [f"[PAD{i}]" for i in spare],
        "scores": [piece.score for piece in model.pieces] + [-1000.0 for _ in spare],
        "token_type": types + [UNUSED for _ in spare],
        "merges": [f"{left} {right}" for left, right in merges(model)],
        **{name: i for name, i in special.items() if i >= 0},
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": normalized("a") != "a",
    }


def _not_merged(model: ModelProto, normalized: Callable[[str], str]) -> str:
    """What a SentencePiece model does that llama.cpp does not with a vocabulary of "llama".

    This merges pieces by score, spells the rest in bytes, and may put a space before a text.
    """
    if model.trainer_spec.model_type != TrainerSpec.BPE:
        kind = TrainerSpec.ModelType.Name(model.trainer_spec.model_type).lower()
        return f"is a model of {kind} pieces, and only those that are merged are written as gguf"
    if all(piece.type != BYTE for piece in model.pieces):
        return "has no byte pieces, in which readers of gguf spell what has no other"
    if model.normalizer_spec.precompiled_charsmap:
        name = model.normalizer_spec.name or "a table"
        return f"normalizes a text by {name}, which readers of gguf do not for merged pieces"
    probe = " a  b   \n"
    if normalized(probe) not in (probe, f" {probe}"):
        return "removes or moves spaces of a text, which readers of gguf do not for merged pieces"
    # llama.cpp matches these longest first, in the text as it is, and begins anew after each.
    own = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    has_space = normalized("a") != "a"
    odd = next((piece for piece in own if has_space or SPACE_SIGN in piece), _overlapping(own))
    return "" if odd is None else f"matches {odd!r} {IN_ANOTHER_ORDER}"


IN_ANOTHER_ORDER = "before it merges, which readers of gguf do in another order"


def _overlapping(tokens: Collection[str]) -> str | None:
    """A token within which another one may begin that ends after it; None if there is none."""
    starts = {token[:size] for token in tokens for size in range(1, len(token) + 1)}
    ends = ((token, token[at:]) for token in tokens for at in range(1, len(token)))
    return next((token for token, end in ends if end in starts), None)


def _merged_vocabulary(tokenizer: HuggingFaceTokenizer, rows: int) -> dict[str, Any]:
    """Entries of a tokenizer.json that merges as SentencePiece does; UsageError for another."""
    library = tokenizers.Tokenizer.from_buffer(tokenizer.files()[JSON_NAME])
    values = json.loads(library.to_str())  # in the library's current form, also of an old file
    model, added = values["model"], values["added_tokens"]
    names = [token["content"] for token in added]
    pieces = model["vocab"].keys() - {*names, *BYTE_NAMES}
    pairs = [(left, right) for left, right in model["merges"]]
    made = [*dict.fromkeys(left + right for left, right in pairs)]
    space = _space_before(values, pieces)
    odd = next((field for field in OTHER_MERGES if model.get(field)), None)
    changed = next((name for name in names if SPACE_SIGN in name), _overlapping(names))
    if library.normalizer is not None:
        as_written = library.normalizer.normalize_str
        matched = (token["content"] for token in added if token["normalized"])
        changed = next((name for name in matched if as_written(name) != name), changed)
    reason = ""
    if not {*BYTE_NAMES} <= model["vocab"].keys():
        reason = "has no byte pieces, in which readers of gguf spell what has no other"
    elif odd is not None:
        reason = f"has {odd} = {shown(model[odd])}, and gguf has no name for it"
    elif space is None:
        reason = "changes or splits a text before it merges, which readers of gguf do not"
    elif changed is not None:
        reason = f"matches {changed!r} {IN_ANOTHER_ORDER}"
    elif len(made) != len([*groupby(left + right for left, right in pairs)]) or not {*pairs} >= {
        (piece[:at], piece[at:])
        for piece in pieces
        for at in range(1, len(piece))
        if piece[:at] in pieces and piece[at:] in pieces
    }:
        reason = "merges pieces in another order than readers of gguf, which know only the pieces"
    if reason:
        raise UsageError(f"{tokenizer.path}: {reason}; export --format llama")
    tokens = {i: piece for piece, i in model["vocab"].items()}
    types = {i: BYTE if piece in BYTE_NAMES else NORMAL for i, piece in tokens.items()}
    for i, (name, kind) in _added_tokens(tokenizer, added).items():
        tokens[i], types[i] = name, kind
    unknown = tokenizer.piece_id(tokenizer.token_names.get("unk_token", ""))
    unknown = unknown if tokenizer.unk_id < 0 else tokenizer.unk_id
    if unknown is not None:
        types[unknown] = UNKNOWN
    scores = {piece: -float(rank) for rank, piece in enumerate(made)}
    return {
        "model": MODEL,
        "pre": "default",
        "tokens": [tokens.get(i, f"[PAD{i}]") for i in range(rows)],
        "scores": [scores.get(tokens.get(i, ""), -float(len(made))) for i in range(rows)],
        "token_type": [types.get(i, UNUSED) for i in range(rows)],
        "merges": [f"{left} {right}" for left, right in pairs],
        **_special_ids(tokenizer),
        **({} if unknown is None else {"unknown_token_id": unknown}),
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": space,
    }


# Fields of a model of merged pieces that GGUF does not have.
OTHER_MERGES = ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "ignore_merges")
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_SIGN}
PREPEND = {"type": "Prepend", "prepend": SPACE_SIGN}


def _space_before(values: Mapping[str, Any], pieces: Collection[str]) -> bool | None:
    """Whether a tokenizer.json puts a space before a text; None if it does more to a text."""
    normalizer, splits = values["normalizer"], values["pre_tokenizer"]
    steps = [normalizer] if normalizer else []
    if normalizer and normalizer["type"] == "Sequence":
        steps = normalizer["normalizers"]
    if splits and splits["type"] == "Metaspace":
        # Words are split off before a space, within which a piece may have another.
        is_whole = not splits["split"] or all(SPACE_SIGN not in piece[1:] for piece in pieces)
        is_known = not steps and splits["replacement"] == SPACE_SIGN and is_whole
        return splits["prepend_scheme"] != "never" if is_known else None
    at_spaces = splits and splits["type"] == "Split" and splits["pattern"] == SPACE["pattern"]
    if splits and not (at_spaces and SPACE in steps):  # none is left when it splits
        return None
    if steps in ([PREPEND, SPACE], [SPACE, PREPEND]):
        return True
    return False if steps == [SPACE] or normalizer == escaping() else None


def note_on_spaces(tokenizer: Tokenizer, entries: Mapping[str, Any]) -> str | None:
    """Where readers of a GGUF with these entries put more spaces than the tokenizer.

    They put one before each text between special tokens, as the first libraries for Llama 2 did.
    """
    if not entries.get("add_space_prefix") or not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    places, plain = [], tokenizer.encode("a")
    for i, token in [*tokenizer.matched.items()][:1]:
        if tokenizer.encode_written(f"{token.content}a")[0].tolist() != [i, *plain]:
            places.append("after a special token")
    if tokenizer.encode(" a") == plain:
        places.append("before a text that begins with a space")
    where = ", and ".join(places)
    return f"readers of gguf put one more space than the tokenizer: {where}" if where else None


def _added_tokens(
    tokenizer: HuggingFaceTokenizer, added: Iterable[Mapping[str, Any]]
) -> dict[int, tuple[str, int]]:
    """Names and types of the added tokens of a tokenizer.json by id."""
    found = {}
    for token in added:
        if odd := next(filter(token.get, ("lstrip", "rstrip", "single_word")), None):
            raise UsageError(
                f"{tokenizer.path}: gguf has no {odd} of the token {token['content']!r}; export"
                " --format llama"
            )
        kind = CONTROL if token.get("special") else USER_DEFINED
        found[token["id"]] = token["content"], kind
    return found


def _special_ids(tokenizer: HuggingFaceTokenizer) -> dict[str, int]:
    return {
        "bos_token_id": tokenizer.bos_id if tokenizer.bos_id >= 0 else tokenizer.eos_id,
        "eos_token_id": tokenizer.eos_id,
        "padding_token_id": tokenizer.pad_id,
    }


def _byte_level_vocabulary(
    tokenizer: HuggingFaceTokenizer, values: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Entries of a tokenizer.json; UsageError unless it is byte-level BPE of a known split."""
    model, name = values["model"], _split_of(values)
    normalizer = (values.get("normalizer") or {}).get("type")
    other = next(filter(model.get, OTHER_BPE), None)
    takes_whole = bool(model.get("ignore_merges"))
    reason = ""
    if model["type"] != "BPE":
        reason = (
            f"is a {model['type']} model, and a {JSON_NAME} is only written if it has byte pairs"
        )
    elif other is not None:
        reason = f"has {other} = {shown(model[other])}, and gguf has no name for it"
    elif name is None:
        reason = "gguf has no name for how it splits a text"
    elif normalizer is not None and (normalizer, name) != ("NFC", "qwen2"):
        reason = f"has the normalizer {shown(normalizer)}, and gguf has no name for it"
    elif takes_whole != (name == TAKES_WHOLE):
        reason = f"has ignore_merges = {takes_whole}, unlike {name} of gguf, which splits so"
    if reason or name is None:
        raise UsageError(f"{tokenizer.path}: {reason}; export --format llama")
    tokens = {i: token for token, i in model["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    for i, (token, kind) in _added_tokens(tokenizer, values.get("added_tokens") or ()).items():
        tokens[i], types[i] = token, kind
    pairs = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    return {
        "model": BYTE_LEVEL,
        "pre": name,
        "tokens": [tokens.get(i, f"[PAD{i}]") for i in range(rows)],
        "token_type": [types.get(i, UNUSED) for i in range(rows)],
        "merges": [*pairs],
        **_special_ids(tokenizer),
        "add_bos_token": False,
        "add_eos_token": False,
    }


def _split_of(values: Mapping[str, Any]) -> str | None:
    """llama.cpp's name of the splits of a tokenizer.json; None if it has none."""
    first = values.get("pre_tokenizer") or {}
    steps = first["pretokenizers"] if first.get("type") == "Sequence" else [first]
    *before, last = steps
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(before) > 1:
        return None
    splits = ""
    if before and before[0]["type"] == "Digits" and before[0]["individual_digits"]:
        splits = "digits"
    elif before and before[0]["type"] == "Split" and not before[0].get("invert"):
        is_alone = before[0]["behavior"] == "Isolated"
        splits = before[0]["pattern"].get("Regex") if is_alone else None
    elif before:
        return None
    if last.get("use_regex", True) != (splits in ("", "digits")):
        return None
    return SPLITS.get(splits) if splits is not None else None
