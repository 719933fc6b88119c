"""What a file is that cannot be read as what its name says, by its first bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from minimind.runtime import disk
from minimind.runtime.durable_files import read_small, without_waiting
from minimind.runtime.urls import HUB_PREFIX, ON_THE_HUB

LOOKED_AT = 4096  # bytes
GZIP, ZSTD, XZ, BZIP2 = "gzip", "zstd", "xz", "bzip2"
JSON_TEXT, JSON_LIST = "JSON", "one JSON list over many lines"
PARQUET, ARROW, SAFETENSORS, GGUF = "Parquet", "Arrow", "safetensors", "GGUF"
TORCH, SENTENCEPIECE = "a file of torch.save", "a SentencePiece model"
TIKTOKEN = "a vocabulary of tiktoken"
DOWNLOAD = "download the file itself"
UTF_16 = "convert it to UTF-8 (iconv -f {0} -t UTF-8)"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = ("adapter_config.json", ADAPTER_WEIGHTS, "adapter_model.bin")
LORA = "LORA"  # its peft_type
IMPORTS = "megatron_config"  # with it PEFT imports a module that the file names


@dataclass(frozen=True)
class Kind:
    """A kind of file, and what to do where another is read."""

    name: str
    remedy: str
    is_pointer: bool = False  # text that stands for a file that is elsewhere
    is_text: bool = False  # a file of text may begin like it

    def __str__(self) -> str:
        return f"{self.name} ({self.remedy})"


def _packed(command: str, suffix: str = "") -> str:
    named = f", or name it {suffix} if it is text" if suffix else ""
    return f"unpack it ({command}){named}"


def _begins(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda start: start.startswith(starts)


def _begins_binary(*prefixes: bytes) -> Callable[[bytes], bool]:
    """Whether letters that a text may begin with are followed by what no text holds."""
    return lambda start: start.startswith(prefixes) and re.search(rb"[\0-\x08]", start) is not None


def _has(pattern: bytes) -> Callable[[bytes], bool]:
    regex = re.compile(pattern, re.IGNORECASE | re.DOTALL)
    return lambda start: regex.match(start) is not None


def _is_marked_utf_16(start: bytes) -> bool:
    """Whether a byte order mark begins text with a blank or a letter of ASCII in it."""
    if not start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False
    try:
        text = start[: len(start) // 2 * 2].decode("utf-16")
    except UnicodeDecodeError as error:
        text = start[: error.start].decode("utf-16") if error.start > LOOKED_AT - 4 else ""
    return any(character < "\x7f" for character in text)


def _is_utf_16(order: int) -> Callable[[bytes], bool]:
    """Whether the high bytes of letters, or of most, are NUL and the others are not."""

    def check(start: bytes) -> bool:
        pairs = start[: len(start) // 2 * 2][:64]
        high, low = pairs[order::2], pairs[1 - order :: 2]
        return len(pairs) >= 8 and 4 * high.count(0) >= 3 * len(high) and not low.count(0)

    return check


def _is_json_over_lines(start: bytes) -> bool:
    """Whether a list begins whose objects are on lines of their own."""
    line, newline, _ = start.lstrip().partition(b"\n")
    line = line.rstrip()
    if not (newline and line.startswith(b"[")):
        return False
    try:
        return line in (b"[", b"[{") or type(json.loads(line[1:].removesuffix(b","))) is dict
    except (ValueError, RecursionError):
        return False


# What an API says in place of data, by the names of its fields, its status, and its words.
_OF_ERRORS = {
    *("error", "errors", "errordescription", "errormessage", "errormsg", "errmsg"),
    *("errorcode", "errcode"),
}
_BESIDE_ERRORS = {
    *("message", "msg", "detail", "details", "title", "type", "reason", "instance", "success"),
    *("code", "status", "statuscode", "documentationurl", "requestid", "traceid"),
    *("timestamp", "path"),
}
_FAILURE = re.compile(
    r"\b(not found|no such|denied|forbidden|not authori[sz]ed|unauthori[sz]ed|unauthenticated"
    r"|log ?in|invalid (user|token|credential|api|request|url)|bad (request|gateway|credentials)"
    r"|rate.?limit|too many requests|internal server error|unavailable|time-?out|timed out"
    r"|restricted|does not exist|expired|40[0-9]|50[0-4])\b",
    re.IGNORECASE,
)
_FAILURE_ALONE = re.compile(
    rb"([45]\d\d:? (Bad Request|Gone)"
    rb"|([45]\d\d:? )?((File |Page )?[Nn]ot [Ff]ound|Forbidden|Unauthorized|Access Denied)"
    rb"|([45]\d\d:? )?(Internal Server Error|Too Many Requests|Service Unavailable|Bad Gateway"
    rb"|Gateway Time-?out)|(Entry|Repository|Revision) not found|Invalid username or password"
    rb"|Invalid credentials in Authorization header"
    rb"|error code: \d+"
    rb"|Access to (dataset|model) \S+ is restricted\b.*|upstream connect error\b.*)\.?\s*",
    re.DOTALL,
)
_ERROR_IN_XML = re.compile(
    rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?<Error[\s>].*<Code>.*</Error>\s*", re.DOTALL
)


def is_error_of_server(fields: Sequence[tuple[str, object]]) -> bool:
    """Whether a JSON object is what an API answers in place of data."""
    names = {re.sub("[_-]", "", name.lower()) for name, _ in fields}
    if not names or not names <= _OF_ERRORS | _BESIDE_ERRORS:
        return False
    said = (str(value)[:1000] for _, value in fields if isinstance(value, str | int))
    return not names.isdisjoint(_OF_ERRORS) or any(map(_FAILURE.search, said))


def _is_error_of_server(start: bytes) -> bool:
    """Whether this is a whole file that is short; texts and records may begin like it."""
    if len(start) == LOOKED_AT:
        return False
    if len(start) < LOOKED_AT // 4 and _FAILURE_ALONE.fullmatch(start):
        return True
    if _ERROR_IN_XML.fullmatch(start):
        return True
    for parts in ([start], start.splitlines()):
        if parts and all(part.lstrip().startswith(b"{") for part in parts):
            try:
                objects = [json.loads(part, object_pairs_hook=list) for part in parts]
            except (ValueError, RecursionError):
                continue
            return all(map(is_error_of_server, objects))
    return False


# In this order: what is more certain first.
KINDS: tuple[tuple[Callable[[bytes], bool], Kind], ...] = (
    (
        _begins(b"version https://git-lfs.github.com/spec/"),
        Kind("a Git LFS pointer", "fetch the file itself with `git lfs pull`", is_pointer=True),
    ),
    (
        _has(rb"(\.\./)*(\.git/annex|/annex)/objects/"),
        Kind("a git-annex pointer", "fetch the file itself with `git annex get`", is_pointer=True),
    ),
    (
        _is_error_of_server,
        Kind("an error message", f"{DOWNLOAD}, not the answer of a server", is_pointer=True),
    ),
    (
        _has(
            rb"(\xef\xbb\xbf)?\s*(<!--.{,1000}?-->\s*)*"
            rb"<(!doctype html|html|head|body|meta|title|script|center|h1)\b"
        ),
        Kind("a page of HTML", f"{DOWNLOAD}, not the page about it or an error", is_text=True),
    ),
    (
        _has(rb"(\xef\xbb\xbf)?\s*<(\?xml|[a-z][\w:.-]*[\s/>])"),
        Kind("XML", f"{DOWNLOAD}, not the answer of a server", is_text=True),
    ),
    (_begins(b"\xff\xfe\0\0", b"\0\0\xfe\xff"), Kind("UTF-32", UTF_16.format("UTF-32"))),
    (_is_marked_utf_16, Kind("UTF-16", UTF_16.format("UTF-16"))),
    (_begins(b"\x1f\x8b"), Kind(GZIP, _packed("gzip -d", ".gz"))),
    (_begins(b"\x28\xb5\x2f\xfd"), Kind(ZSTD, _packed("zstd -d", ".zst"))),
    (_has(rb"[\x50-\x5f]\x2a\x4d\x18"), Kind(ZSTD, _packed("zstd -d", ".zst"))),
    (_has(rb"BZh[1-9](1AY&SY|\x17rE8P)"), Kind(BZIP2, _packed("bzip2 -d", ".bz2"))),
    (_begins(b"\xfd7zXZ\0"), Kind(XZ, _packed("xz -d", ".xz"))),
    (
        _has(rb"PK\x03\x04.{26}[^\0]{0,200}/?(data\.pkl|byteorder|\.format_version)"),
        Kind(TORCH, "name it .pth or .bin, or save it as safetensors"),
    ),
    (_begins(b"PK\x03\x04", b"PK\x05\x06"), Kind("a zip archive", _packed("unzip"))),
    (_has(rb".{257}ustar"), Kind("a tar archive", _packed("tar -xf"))),
    (_begins_binary(b"PAR1", b"PARE"), Kind(PARQUET, "name it .parquet")),
    (
        _has(rb"(ARROW1\0|FEA1.*\0|\xff{4}(?!\0{4})..[\0-\x0f]\0)"),  # a length below a MiB
        Kind(ARROW, "name the folder of save_to_disk, or write it as Parquet"),
    ),
    (_begins(b"%PDF-"), Kind("a PDF", "write its text as .txt")),
    (_begins_binary(GGUF.encode()), Kind(GGUF, "name the safetensors that it was made from")),
    (_has(rb".{5}\0{3}\{"), Kind(SAFETENSORS, "name it .safetensors")),
    (
        _has(rb"\x80[\x02-\x05][\x95}\](\x8a\x80c]"),
        Kind("a pickle of Python", "save it in a format that is read here; pickles may run code"),
    ),
    (_has(rb"\x0a[\x05-\x7f]\x0a.{1,40}<unk>"), Kind(SENTENCEPIECE, "name it tokenizer.model")),
    (
        _has(rb"([A-Za-z0-9+/]{2,}={0,2} \d+\n){2}"),
        Kind(TIKTOKEN, "write it as a tokenizer.json", is_text=True),
    ),
    (
        _is_json_over_lines,
        Kind(
            JSON_LIST,
            "write each of its objects on a line (jq -c '.[]'), or name it .json",
            is_text=True,
        ),
    ),
    (_is_utf_16(1), Kind("UTF-16 without a byte order mark", UTF_16.format("UTF-16LE"))),
    (_is_utf_16(0), Kind("UTF-16 without a byte order mark", UTF_16.format("UTF-16BE"))),
    (_has(rb'\s*\{\s*"'), Kind(JSON_TEXT, "give the file itself, or its right name", is_text=True)),
)


def kind_of_content(start: bytes, *expected: str) -> Kind | None:
    """The kind of a file that begins with `start`; None if it is not known, or one of `expected`.

    For what could not be read: some kinds begin as a text may.
    """
    start = start[:LOOKED_AT]
    kind = next((kind for is_kind, kind in KINDS if is_kind(start)), None)
    return None if kind is None or kind.name in expected else kind


def kind_of_file(path: Path, *expected: str) -> Kind | None:
    """`kind_of_content` of a file; None also for one that is empty or cannot be opened."""
    try:
        with open(path, "rb", opener=without_waiting) as file:
            start = file.read(LOOKED_AT)
    except OSError:
        return None
    return kind_of_content(start, *expected) if start else None


OF_DEEPSPEED = ("_optim_states.pt", "_model_states.pt")
# What training leaves beside a model: no weights, or not in a form that is read.
STATE = re.compile(
    r"(?:^|/)(?:(?:training_args|optimizer|scheduler|scaler|rng_state|random_states)[^/]*"
    rf"|[^/]*({'|'.join(map(re.escape, OF_DEEPSPEED))})|(?:common|model_optim_rng)\.pt)$"
)
IS_GGUF = (
    "is GGUF, which this program writes but does not read; name what it was exported from: a run,"
    " or a directory of safetensors"
)
BESIDE = "put its config.json and tokenizer there, and name OUT"
GO_ON = "continue from it with `minimind import --from deepspeed {above} --out RUN`"
# What is in a folder -> what this is and the way out, where {found} is the first of its files,
# {above} the folder of this, and {root} and {tag} are DeepSpeed's.
FORMS = (
    (
        ("latest_universal", "*_universal/zero", "zero/*/fp32.pt"),
        "is a universal checkpoint of DeepSpeed; continue from it with `minimind import --from"
        " deepspeed`",
    ),
    (
        ("*/*_optim_states.pt", "*_optim_states.pt"),
        f"is a checkpoint of DeepSpeed; {GO_ON}, or write its weights with `python -m"
        f" deepspeed.utils.zero_to_fp32 {{root}} OUT{{tag}}`, {BESIDE}",
    ),
    (
        ("*/mp_rank_*_model_states.pt", "mp_rank_*_model_states.pt"),
        f"is a checkpoint of DeepSpeed without ZeRO; {GO_ON}, or save what {{found}} has under"
        " 'module' with torch.save, and name that file",
    ),
    (("zero_to_fp32.py",), "is a checkpoint of DeepSpeed without its files; get it again"),
    (
        (
            *("latest_checkpointed_iteration.txt", "iter_*/mp_rank_*", "mp_rank_*/*.pt"),
            *("model_optim_rng.pt", "common.pt", "*.nemo"),
        ),
        "is a checkpoint of Megatron ({found}); convert it to Hugging Face's layout (Megatron"
        " Bridge does), and name the folder that this writes",
    ),
    (
        ("pytorch_model_fsdp_*/*.distcp", "*.distcp", "model*/*.distcp", "*/*.distcp"),
        "has its weights in shards of torch.distributed; write them with `accelerate merge-weights"
        f" {{above}} OUT`, {BESIDE}",
    ),
    (
        ("*.h5", "*.msgpack", "model.ckpt*.index"),
        "has weights of TensorFlow or Flax ({found}); write them with transformers 4"
        " (from_pretrained with from_tf or from_flax, then save_pretrained), and name that folder",
    ),
    (("*.gguf",), f"has {{found}}; it {IS_GGUF}"),
    (
        ("*.onnx", "onnx/*.onnx", "openvino_model.xml", "*.mlpackage", "*.tflite"),
        "has a model for inference only ({found}); name the safetensors that it was made from",
    ),
    (
        ("*.ckpt",),
        "has checkpoints of Lightning; save what {found} has under 'state_dict' with torch.save,"
        " and name that file",
    ),
    (
        ("consolidated.*.pth", "consolidated*.safetensors"),
        "has weights in the layout of Meta or Mistral ({found}); get the model in Hugging Face's",
    ),
    (
        ("checkpoint-*/config.json", "snapshots/*/config.json"),
        "has no weights itself; name a model in it, such as {above}",
    ),
)


def form_of_folder(folder: Path) -> str:
    """What a folder without weights that are read here is, with the way out; empty if unknown."""
    if adapter := adapter_in(folder):
        return adapter
    for names, what in FORMS:
        paths = (path for name in names for path in sorted(disk.matching(folder, name)))
        if (found := next(paths, None)) is None:
            continue
        above = found.parent if found.parent.name else disk.resolve(found.parent)
        has_newest = above != folder and disk.is_file(folder / "latest")
        tag = "" if has_newest else f" --tag {quote(above.name)}"
        root = above.parent
        return what.format(found=found, above=quote(str(above)), root=quote(str(root)), tag=tag)
    state = sorted(path.name for path in disk.matching(folder, "*") if STATE.search(path.name))
    return f"has only the state of training ({', '.join(state)}); name the model" if state else ""


def adapter_in(folder: Path) -> str:
    """What a folder with a LoRA adapter and no model is, with the way out; else empty."""
    names = [name for name in ADAPTER if disk.is_file(folder / name)]
    if not names:
        return ""
    base = _base_name(folder)
    return (
        f"holds only a LoRA adapter ({', '.join(names)}); merge it into its base"
        f" model{'' if base is None else f' {base}'} (merge_and_unload of PEFT), and name the"
        " folder that this saves"
    )


def base_of_adapter(folder: Path) -> str | None:
    """The model that a LoRA adapter of PEFT in `folder` changes, as --init_from names it.

    None if the folder holds a model too, and if its base is neither here nor a name of the Hub.
    """
    has_model = disk.exists(folder / "config.json")
    base = None if has_model or not disk.is_file(folder / ADAPTER_WEIGHTS) else _base_name(folder)
    if type(base) is not str:
        return None
    if disk.is_file(Path(base).expanduser() / "config.json"):
        return base
    return f"{HUB_PREFIX}{base}" if ON_THE_HUB.fullmatch(f"{HUB_PREFIX}{base}") else None


def _base_name(folder: Path) -> object:
    try:
        about = json.loads(read_small(folder / ADAPTER[0]))
        is_lora = about.get("peft_type", LORA) == LORA and not about.get(IMPORTS)
        return about["base_model_name_or_path"] if is_lora else None
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
