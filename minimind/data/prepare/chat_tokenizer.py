"""The chat template of a fine-tuning run, and its tokenizer with the tokens that one writes."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from minimind.config.run_config import TEMPLATES, files_by_name
from minimind.data.chat.template import (
    DEFAULT_TEMPLATE,
    named_tokens,
    own_template,
    require_bounded,
    special_names,
)
from minimind.data.prepare.prepare import REMEDY, build_once
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.load import AnyTokenizer, load_tokenizer
from minimind.data.tokenizer.vocabulary import TEMPLATE_NAME, ChatTemplates, write_tokenizer
from minimind.errors import UsageError
from minimind.runtime.durable_files import fingerprint, read_small_text
from minimind.runtime.file_kinds import kind_of_file


def read_template(path: str) -> tuple[str, str]:
    """Source and name in messages of --chat_template `path`, a file or the name of a shipped one.

    Raise UsageError if it cannot be read, or takes too much time or memory.
    """
    name, shipped = f"--chat_template {path}", files_by_name(TEMPLATES)
    file = Path(shipped.get(path, path)).expanduser()
    try:
        source = read_small_text(file)
    except (OSError, UnicodeDecodeError) as error:
        kind = kind_of_file(file)
        reason = f"it is {kind}" if kind else "it is not UTF-8"
        reason = error.strerror if isinstance(error, OSError) else reason
        raise UsageError(
            f"{name}: cannot be read ({reason}); name a file with a Jinja template, or"
            f" {', '.join(shipped)}"
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
    if tokenizer is not None and (template := own_template(tokenizer)):
        others = len(templates.by_name) - 1
        more = f", the default one of {others + 1}" if others else ""
        return *template, f"template  its own ({templates.origin}{more})"
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
