"""The chat template of a fine-tuning run, and its tokenizer with the tokens that one writes."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from minimind.config.names import no_such_name
from minimind.config.run_config import TEMPLATES, files_by_name
from minimind.data.chat.template import (
    DEFAULT_TEMPLATE,
    is_own,
    named_tokens,
    own_template,
    special_names,
    tags_of,
)
from minimind.data.prepare.prepare import REMEDY, build_once
from minimind.data.tokenizer.add_special import with_special_tokens
from minimind.data.tokenizer.load import Tokenizer, load_tokenizer
from minimind.data.tokenizer.vocabulary import TEMPLATE_NAME, ChatTemplates, write_tokenizer
from minimind.errors import UsageError
from minimind.runtime.durable_files import fingerprint, read_small_text
from minimind.runtime.file_kinds import kind_of_file


def read_template(path: str) -> tuple[str, str]:
    """Source and name in messages of --chat_template `path`, a file or the name of a shipped one.

    Raise UsageError if it cannot be read.
    """
    name, shipped = f"--chat_template {path}", files_by_name(TEMPLATES)
    file = Path(shipped.get(path, path)).expanduser()
    try:
        source = read_small_text(file)
    except FileNotFoundError as error:
        fault = no_such_name(path, [*shipped], "chat template")
        raise UsageError(f"--chat_template {fault}") from error
    except (OSError, UnicodeDecodeError) as error:
        kind = kind_of_file(file)
        reason = f"it is {kind}" if kind else "it is not UTF-8"
        reason = error.strerror if isinstance(error, OSError) else reason
        raise UsageError(
            f"{name}: cannot be read ({reason}); name a file with a Jinja template, or"
            f" {', '.join(shipped)}"
        ) from error
    return source, name


def chosen_template(path: str | None, tokenizer: Tokenizer | None) -> tuple[str, str, str]:
    """The source of a run's template, its name in messages, and its line of the start summary.

    --chat_template `path` comes first, then the template of the tokenizer, then ours.
    """
    templates = ChatTemplates() if tokenizer is None else tokenizer.templates
    if path is not None:
        source, name = given_template(path, tokenizer)
        line = f"template  {name}"
        if tokenizer is not None and is_own(source, tokenizer):
            return source, name, f"{line}, one of its own{_text_tags(source, tokenizer, name)}"
        instead = f", instead of that in {templates.origin}" if templates.by_name else ""
        return source, name, f"{line}{instead}"
    if tokenizer is not None and (template := own_template(tokenizer)):
        others = len(templates.by_name) - 1
        more = f", the default one of {others + 1}" if others else ""
        line = f"template  its own ({templates.origin}{more})"
        return *template, f"{line}{_text_tags(*template[:1], tokenizer, template[1])}"
    return DEFAULT_TEMPLATE, "--chat_template by default", "template  the default: it has none"


def given_template(path: str, tokenizer: Tokenizer | None) -> tuple[str, str]:
    """Source and name of --chat_template `path`; the tokenizer's own source if it is the same.

    A file may end in one newline more, which Jinja drops.
    """
    source, name = read_template(path)
    own = () if tokenizer is None else tokenizer.templates.by_name.values()
    return next((one for one in own if _drop_newline(one) == _drop_newline(source)), source), name


def _drop_newline(source: str) -> str:
    return source.replace("\r\n", "\n").removesuffix("\n")


def _text_tags(source: str, tokenizer: Tokenizer, name: str) -> str:
    """What the start says of tags that are no tokens."""
    tags = tags_of(source, named_tokens(tokenizer), name)
    as_text = [tag for tag in tags if tokenizer.piece_id(tag) is None]
    return f"; text, as they are not tokens: {', '.join(as_text)}" if as_text else ""


def chat_tokenizer(tokenizer: Tokenizer, template: str, name: str, cache_dir: Path) -> Tokenizer:
    """The tokenizer with the special tokens that a template writes, and the template beside it.

    Tokens that it lacks are appended after its last id; none for its own template, whose tags are
    then text. `name` is what messages call the template.
    """
    names = special_names(template, tokenizer, name)
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
