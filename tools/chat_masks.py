"""Ids and masks of every kind of folder against those of transformers.

`python -m tools.chat_masks` prints how many are equal, refused (with each sentence) and
different.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from jinja2 import UndefinedError
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from minimind.data.chat.conversations import conversation_of_line
from minimind.data.chat.template import ChatTemplate
from minimind.data.prepare.chat_tokenizer import chat_tokenizer, chosen_template
from minimind.data.text.documents import DocumentError
from minimind.data.tokenizer.load import load_tokenizer
from minimind.errors import RunError
from tests.data.chat.folders import KINDS, write
from tests.data.chat.templates import END, GEN

ASKED = "{% if add_generation_prompt %}"
# As templates of models are; what the assistant writes is marked, to know the mask.
MARKED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        f"{{% if m.role == 'assistant' %}}{GEN}{{{{ m.content + '<|im_end|>' }}}}{END}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        f"{ASKED}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}"
        f"{{% if m.role == 'assistant' %}}{GEN}{{{{ m.content + eos_token }}}}{END}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
        f"{ASKED}{{{{ '<|assistant|>\\n' }}}}{{% endif %}}"
    ),
    "llama2": (
        "{% if messages[0].role == 'system' %}"
        "{% set first = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
        "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (first if loop.first else '') + m.content.strip() }}"
        f"{{{{ ' [/INST]' }}}}{{% else %}}{GEN}"
        f"{{{{ ' ' + m.content.strip() + ' ' + eos_token }}}}{END}"
        "{% endif %}{% endfor %}"
    ),
    "vicuna": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' }}"
        f"{GEN}{{{{ m.content + eos_token }}}}{END}{{{{ '\\n' }}}}"
        "{% elif m.role == 'user' %}{{ 'USER: ' + m.content + '\\n' }}"
        "{% else %}{{ m.content + '\\n\\n' }}{% endif %}{% endfor %}"
        f"{ASKED}{{{{ 'ASSISTANT: ' }}}}{{% endif %}}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
        f"{{% if m.role == 'assistant' %}}{GEN}{{{{ m.content | trim + '<|eot_id|>' }}}}{END}"
        "{% else %}{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        f"{ASKED}{{{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}}}{{% endif %}}"
    ),
}
PLAIN = {name: re.sub(r"\{% (end)?generation %\}", "", source) for name, source in MARKED.items()}
TEMPLATES = {**PLAIN, "marked": MARKED["zephyr"]}


def turns(*said: str, system: str = "") -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return first + [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]


CONVERSATIONS = {
    "one turn": turns("What is the sky?", "Blue, as a rule."),
    "several turns": turns("a b", "c d", "e\n\nf", "12 + 3.5", "x", "y z", system="Be brief."),
    "spaces": turns("  a  b \n", "\n newline 龘 first", " 春眠😀 ", "\tand tabs  ", system=" s "),
    "tags": turns("what is <b> and [INST] x", "a < b | c > d, <|nothing|>, <<SYS>>, [/INST]"),
    "specials": turns("I write </s> and <|im_end|>", "and <s> <|user|> too"),
    "empty answer": turns("say nothing", ""),
}


@dataclass(frozen=True)
class Cell:
    """The outcome for a conversation: equal, refused (with the sentence) or different."""

    outcome: str
    what: str = ""


def refused(error: Exception, place: Path) -> Cell:
    said = re.sub(rf"{re.escape(str(place))}/?(cache/tokenizer-\w+/)?", "", str(error))
    return Cell("refused", said)


def cells(kind: str, name: str, place: Path) -> dict[str, Cell]:
    """Outcomes by conversation, for a training line and for the prompt of a chat."""
    folder = write(place / "folder", kind, TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    try:
        given = load_tokenizer(folder)
        again = load_tokenizer(given.path)  # as a run does that starts from a model
        assert again.fingerprint == given.fingerprint, (kind, name)
        source, label, _ = chosen_template(None, given)
        trained = ChatTemplate(source, chat_tokenizer(given, source, label, place / "cache"), label)
        asked = ChatTemplate(source, given, label)
    except RunError as error:
        return dict.fromkeys(CONVERSATIONS, refused(error, place))
    return {
        case: _cell(trained, asked, theirs, name, messages, place)
        for case, messages in CONVERSATIONS.items()
    }


def _cell(
    trained: ChatTemplate,
    asked: ChatTemplate,
    theirs: Any,
    name: str,
    messages: list[dict[str, str]],
    place: Path,
) -> Cell:
    line = json.dumps({"messages": messages}).encode()
    try:
        conversation = conversation_of_line(line)
        ids, targets = trained.encode(conversation)
        prompt = asked.prompt(conversation.with_turns(conversation[:-1]))
    except (DocumentError, RunError) as error:
        return refused(error, place)
    ways = {"return_dict": True, "tokenize": True}
    try:
        expected = theirs.apply_chat_template(messages, **ways)
        mask = mask_of(theirs, name, messages)
        answer = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True, **ways)
    except UndefinedError as error:
        return Cell("not rendered", str(error))
    if ids.tolist() != expected["input_ids"]:
        return Cell("different", f"ids {ids.tolist()} not {expected['input_ids']}")
    if targets.tolist() != [0, *mask[1:]]:
        return Cell("different", f"mask {targets.astype(int).tolist()} not {mask}")
    if prompt != answer["input_ids"]:
        return Cell("different", f"prompt {prompt} not {answer['input_ids']}")
    return Cell("equal")


def mask_of(theirs: Any, name: str, messages: list[dict[str, str]]) -> list[int]:
    """The mask of transformers, or that of each token with a character of an answer.

    Without {% generation %} transformers knows no mask. With it, it leaves out the last bytes of a
    character with which a span ends, and masks nothing from a span on that begins with a blank for
    which there is no token.
    """
    ways = {"return_dict": True, "return_assistant_tokens_mask": True}
    if name == "marked":
        found = theirs.apply_chat_template(messages, tokenize=True, **ways)["assistant_masks"]
        if any(found):
            return found
    texts, spans = render_jinja_template(
        [messages],
        chat_template=MARKED.get(name, TEMPLATES["marked"]),
        return_assistant_tokens_mask=True,
        **theirs.special_tokens_map,
    )
    places = theirs(texts[0], add_special_tokens=False, return_offsets_mapping=True)
    return [
        int(any(begin < stop and end > start for start, stop in spans[0]))
        for begin, end in places["offset_mapping"]
    ]


TEXTS = (
    *(
        "Hello, world!",
        " a",
        "  a",
        "a  b",
        "",
        " ",
        "\n",
        "\nx\n\n y\t",
        "naïve ﬁne \uff21\uff22 e\u0301",
    ),
    *("春眠不覺曉，處處聞啼鳥。", "龘😀👩\u200d👧", "12 + 3.5", "▁a ▁ b", "USER: x\nASSISTANT: y"),
)


def texts_cell(kind: str, place: Path) -> Iterator[tuple[str, Cell]]:
    """Outcomes by plain text."""
    folder = write(place / "folder", kind, PLAIN["zephyr"])
    theirs = AutoTokenizer.from_pretrained(folder)
    try:
        given = load_tokenizer(folder)
    except RunError as error:
        yield "all", refused(error, place)
        return
    for text in TEXTS:
        if given.is_lossless and "\u2581" in text:  # which we keep apart from a space
            continue
        ids, expected = given.encode(text), theirs(text, add_special_tokens=False)["input_ids"]
        yield text, Cell("equal") if ids == expected else Cell("different", f"{ids} not {expected}")


def wall(kinds: Iterable[str], names: Iterable[str]) -> dict[tuple[str, str, str], Cell]:
    """All cells by kind of folder, template and conversation."""
    transformers.logging.set_verbosity_error()
    found = {}
    for kind, name in product(kinds, names):
        with TemporaryDirectory() as place:
            for case, cell in cells(kind, name, Path(place)).items():
                found[kind, name, case] = cell
    return found


def text_wall(kinds: Iterable[str]) -> dict[tuple[str, str], Cell]:
    """All cells by kind of folder and text."""
    transformers.logging.set_verbosity_error()
    found = {}
    for kind in kinds:
        with TemporaryDirectory() as place:
            found |= {(kind, text): cell for text, cell in texts_cell(kind, Path(place))}
    return found


# "not rendered" is a template that fails in transformers for a name that the folder does not have.
OUTCOMES = ("equal", "refused", "different", "not rendered")


def summary(found: Mapping[tuple[str, ...], Cell]) -> Iterator[str]:
    """Lines: how many of each outcome, each sentence with its number, each difference."""
    outcomes = Counter(cell.outcome for cell in found.values())
    yield ", ".join(f"{name} {outcomes[name]}" for name in OUTCOMES)
    sentences = Counter(cell.what for cell in found.values() if cell.outcome == "refused")
    yield from (f"{count:5} refused: {what}" for what, count in sentences.most_common())
    for where, cell in found.items():
        if cell.outcome == "different":
            yield f"different: {where}: {cell.what}"


def main() -> int:
    kinds = sys.argv[1:] or [*KINDS]
    chats, texts = wall(kinds, TEMPLATES), text_wall(kinds)
    sizes = f"{len(kinds)} folders x {len(TEMPLATES)} templates x {len(CONVERSATIONS)}"
    print(f"{sizes} conversations", *summary(chats), sep="\n")
    print(f"{len(kinds)} folders x {len(TEXTS)} texts", *summary(texts), sep="\n")
    outcomes = {cell.outcome for cell in (*chats.values(), *texts.values())}
    return int("different" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
