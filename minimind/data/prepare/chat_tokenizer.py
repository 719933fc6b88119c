"""The tokenizer of a fine-tuning run, with the special tokens of its chat template."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from minimind.config.flags import BY_TASK
from minimind.config.run_config import RunConfig
from minimind.data.chat.rendering import require_bounded
from minimind.data.chat.template import DEFAULT_TEMPLATE, named_tokens, own_template, special_names
from minimind.data.prepare.cache import build_once
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.files import TEMPLATE_NAME, ChatTemplates, write_tokenizer
from minimind.data.tokenizer.load import AnyTokenizer, load_tokenizer
from minimind.errors import UsageError
from minimind.runtime.durable_files import fingerprint, read_small_text
from minimind.runtime.file_kinds import kind_of_file

REMEDY = "free space or give another --cache_dir"


def read_template(path: str) -> tuple[str, str]:
    """Source and name in messages of --chat_template `path`.

    Raise UsageError if it cannot be read, or takes too much time or memory.
    """
    name = f"--chat_template {path}"
    try:
        source = read_small_text(Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        kind = kind_of_file(Path(path).expanduser())
        reason = f"it is {kind}" if kind else "it is not UTF-8"
        reason = error.strerror if isinstance(error, OSError) else reason
        raise UsageError(
            f"{name}: cannot be read ({reason}); name a file with a Jinja template"
        ) from error
    require_bounded(source, name)
    return source, name


def chosen_template(path: str | None, tokenizer: AnyTokenizer | None) -> tuple[str, str, str]:
    """The source of a run's template, its name in messages, and its line of the start summary.

    It is that of --chat_template `path`, else that of the tokenizer, else ours.
    """
    templates = ChatTemplates() if tokenizer is None else tokenizer.templates
    if path is not None:
        source, name = read_template(path)
        instead = f", instead of that in {templates.origin}" if templates.by_name else ""
        return source, name, f"template  {name}{instead}"
    if tokenizer is not None and (own := own_template(tokenizer)):
        others = len(templates.by_name) - 1
        more = f", the default one of {others + 1}" if others else ""
        return *own, f"template  its own ({templates.origin}{more})"
    return DEFAULT_TEMPLATE, "--chat_template by default", "template  the default: it has none"


def chat_tokenizer(
    tokenizer: AnyTokenizer, template: str, name: str, cache_dir: Path
) -> AnyTokenizer:
    """The tokenizer with the special tokens that a template writes, and the template beside it.

    Tokens that it lacks are appended after its last id. `name` is what messages call the template.
    """
    names = special_names(template, named_tokens(tokenizer), name)
    templates = tokenizer.templates
    is_one_of_several = template == templates.default and len(templates.by_name) > 1
    beside = {} if is_one_of_several else {TEMPLATE_NAME: template.encode()}
    files = {name: sha256(content).hexdigest() for name, content in tokenizer.files().items()}
    directory = cache_dir / f"tokenizer-{fingerprint([files, names, template])}"

    def build(draft: Path) -> None:
        extended = with_special_tokens(tokenizer, names, draft / "extended")
        write_tokenizer(draft, {**extended.files(), **beside})

    build_once(directory, build, REMEDY)
    return load_tokenizer(directory)


def with_vocabulary_of(run: RunConfig, checkpoint: Path, rows: int) -> RunConfig:
    """Return the run with the rows of a checkpoint, which include added special tokens.

    Raise UsageError if --vocab_size is neither with nor without them.
    """
    if run.is_explicit("vocab_size"):
        special, before = {*load_tokenizer(checkpoint).special_tokens().values()}, rows
        while before - 1 in special:
            before -= 1
        if not before <= run.vocab_size <= rows:
            raise UsageError(
                f"vocab_size = {run.vocab_size} ({run.sources['vocab_size']}), but {checkpoint} has"
                f" {rows}; drop it"
            )
    return run.with_values(BY_TASK, vocab_size=rows)
