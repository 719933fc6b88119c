"""Every rule of combinations of flags has a row in tests/refusals/flags.yaml."""

import re
import shlex

import pytest

from minimind.config.checks import DECODER_RULES, HUGGING_FACE_RULES, RULES, Rule
from minimind.config.flags import FLAGS
from minimind.config.parse import parse_flags, words_of
from minimind.errors import UsageError
from tests.refusals.rows import FOLDER, rows_of

TABLES = (*RULES, *HUGGING_FACE_RULES, *DECODER_RULES)
SENTENCES = {rule.sentence for rule in TABLES if isinstance(rule, Rule)} - {"{refusal}"}


def pattern(sentence: str) -> str:
    """The sentence with any values and sources; one of a flag that others have too, of any."""
    flag = rf"\\\{{({'|'.join(FLAGS)})(:g)?\\\}}"
    text = re.sub(flag, r"\\w+ = \\S+ \(.+?\)", re.escape(sentence))
    return re.sub(r"\\\{.*?\\\}", ".+", text)


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    """What the rows with a right neighbour are refused with."""
    errors = []
    for row in rows_of(FOLDER / "flags.yaml"):
        if row.near:
            with pytest.raises(UsageError) as caught:
                parse_flags(shlex.split(row.argv))
            errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("rule", sorted({pattern(sentence) for sentence in SENTENCES}))
def test_every_rule_has_a_row(rule: str, refusals: list[str]):
    assert any(re.fullmatch(rule, error) for error in refusals)


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.needs])
def test_a_flag_without_what_it_needs_has_no_effect(name: str):
    flag = FLAGS[name]
    other = {"str": "x", "int": "20", "float": "0.25", "bool": "false", "tuple": "x"}[flag.type]
    value = "2.5" if name == "rope_factor" else (*flag.choices, other)[0]
    needed, _, wanted = flag.needs.partition("=")
    condition = (
        f"with {needed} = {FLAGS[needed].default} (default)" if wanted else f"without --{needed}"
    )
    with pytest.raises(UsageError) as caught:
        parse_flags(words_of({name: value}))
    assert f"{name} = " in str(caught.value)
    assert f"has no effect {condition}; add --{needed}" in str(caught.value)
    assert flag.help.startswith(f"with --{flag.needs.replace('=', ' ')}: ")
