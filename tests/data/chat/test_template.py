"""Which tokens are trained on, and templates that do not fit."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from minimind.data.chat.conversations import Message
from minimind.data.chat.template import (
    DEFAULT_TEMPLATE,
    SPECIAL_TOKENS,
    ChatTemplate,
    spans_by_piece,
)
from minimind.data.text.documents import DocumentError
from minimind.data.tokenizer.hf_tokenizer import HuggingFaceTokenizer
from minimind.data.tokenizer.lossless import TextLoss
from minimind.data.tokenizer.sentencepiece import SentencePieceTokenizer, train_tokenizer
from minimind.errors import UsageError
from tests.data.chat.made import CHATML, CHATML_MARKED, HEADERS, HEADERS_MARKED, SIMPLE, encode_all

ONE = [Message("user", "the question"), Message("assistant", "an answer")]
TWO = [
    Message("system", "be brief"),
    *ONE,
    Message("user", "and then?"),
    Message("assistant", "回答"),
]
TOOLS = [*ONE, Message("tool", "42"), Message("assistant", "it is 42"), Message("user", "thanks")]

# As of models that also see images.
PARTS = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% for p in m['content'] %}"
    "{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}",
)
assert PARTS != CHATML


def trained_text(template, tokenizer, messages, train_on):
    """The trained tokens as text, special tokens by name, and "|" between runs of them."""
    ids, targets = template.encode(messages, train_on)
    assert (ids.dtype, targets.dtype) == (np.int32, np.bool_)
    names = {i: name for name, i in tokenizer.special_tokens().items()}
    shown, run = [], []
    for i, is_target in zip([*ids.tolist(), 0], [*targets.tolist(), False], strict=True):
        if is_target:
            run.append(i)
        elif run:
            shown.append("".join(names.get(i) or tokenizer.decode([i]) for i in run))
            run = []
    return "|".join(shown)


@pytest.mark.parametrize(
    ("source", "end"),
    [
        (DEFAULT_TEMPLATE, "<|end|>"),
        (CHATML, "<|im_end|>"),
        (CHATML_MARKED, "<|im_end|>"),
        (HEADERS, "<|eot_id|>"),
        (HEADERS_MARKED, "<|eot_id|>"),
    ],
)
def test_what_is_trained_on(tokenizer, source, end):
    template = ChatTemplate(source, tokenizer)
    cases = [
        (ONE, "assistant", f"an answer{end}"),
        (ONE, "last", f"an answer{end}"),
        (TOOLS, "assistant", f"an answer{end}|it is 42{end}"),
        (TOOLS, "last", f"it is 42{end}"),
    ]
    for messages, train_on, expected in cases:
        assert trained_text(template, tokenizer, messages, train_on) == expected
    ids, targets = template.encode(TWO, "all")
    assert targets[1:].all()
    assert not targets[0]  # nothing predicts it
    for train_on in ("assistant", "last"):
        assert template.encode(TWO, train_on)[0].tolist() == ids.tolist()
    _, targets = template.encode(TWO, "last")
    _, of_all = template.encode(TWO, "assistant")
    assert 0 < targets.sum() < of_all.sum()


def test_the_default_template(tokenizer):
    template = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
    assert template.render(TOOLS, add_generation_prompt=True) == (
        "<|user|>the question<|end|><|assistant|>an answer<|end|><|tool|>42<|end|>"
        "<|assistant|>it is 42<|end|><|user|>thanks<|end|><|assistant|>"
    )
    assert template.render(TWO).startswith("<|system|>be brief<|end|><|user|>")
    special = tokenizer.special_tokens()
    ids, targets = template.encode(ONE)
    question, answer = tokenizer.encode("the question"), tokenizer.encode("an answer")
    header = [special["<|user|>"], *question, special["<|end|>"], special["<|assistant|>"]]
    assert ids.tolist() == [*header, *answer, special["<|end|>"]]
    assert targets.tolist() == [False] * len(header) + [True] * (len(answer) + 1)
    assert template.prompt(ONE[:1]) == header
    with pytest.raises(DocumentError, match="refuses the conversation \\(there is no role bot\\)"):
        template.render([Message("bot", "a")])


def test_a_prompt_is_the_beginning_of_what_is_trained_on(tokenizer):
    for source in (DEFAULT_TEMPLATE, CHATML, CHATML_MARKED, HEADERS, HEADERS_MARKED):
        template = ChatTemplate(source, tokenizer)
        ids, targets = template.encode(TWO, "last")
        assert template.prompt(TWO[:-1]) == ids[: targets.argmax()].tolist()


def test_the_beginning_is_only_that_of_the_template(tokenizer):
    assert ChatTemplate(HEADERS, tokenizer).encode(ONE)[0][0] == tokenizer.bos_id
    for source in (DEFAULT_TEMPLATE, CHATML):
        assert tokenizer.bos_id not in ChatTemplate(source, tokenizer).encode(ONE)[0]
    ended = DEFAULT_TEMPLATE + "{{ eos_token }}"
    assert ChatTemplate(ended, tokenizer).encode(ONE)[0][-1] == tokenizer.eos_id


@pytest.mark.parametrize("kind", ["tokenizer", "byte_level"])
def test_a_token_across_the_edge_of_a_span_is_trained_on(kind, request):
    tokenizer = request.getfixturevalue(kind)
    contents = [piece.content.decode(errors="replace") for piece in tokenizer.pieces()]
    first, second = next(text for text in contents if len(text) == 2 and text.isalpha())
    source = (
        f"<|user|>1{first}{{% generation %}}{second} 2{{% endgeneration %}} 3<|end|>"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    ids, targets = ChatTemplate(source, tokenizer).encode(ONE)
    across = tokenizer.encode(first + second)
    assert len(across) == 1
    at = ids.tolist().index(across[0])
    assert not targets[:at].any()
    assert tokenizer.decode(ids[targets]) == f"{first}{second} 2"


def test_text_that_is_normalized_to_another_size(byte_level):
    template = ChatTemplate(CHATML, byte_level)
    messages = [Message("user", "e\u0301" * 5), Message("assistant", "e\u0301" * 7)]
    ids, targets = template.encode(messages)
    assert byte_level.decode(ids[targets]) == "é" * 7
    without_headers = CHATML_MARKED.replace("<|im_start|>", "")
    ids, targets = ChatTemplate(without_headers, byte_level).encode(messages)
    assert byte_level.decode(ids[targets]) == "é" * 7


def test_a_special_token_that_begins_with_another(tmp_path):
    train_tokenizer(["some text"] * 9, 512, tmp_path / "tokenizer.model", special=["<t>", "<t>+"])
    tokenizer = SentencePieceTokenizer(tmp_path)
    said = "{% for m in messages %}{{ m.content }}{% endfor %}"
    source = f"<t>+{{% generation %}}a<t>{{% endgeneration %}}{said}"
    template = ChatTemplate(source, tokenizer)
    special = tokenizer.special_tokens()
    ids, targets = template.encode(ONE)
    begun = [special["<t>+"], *tokenizer.encode("a"), special["<t>"]]
    assert ids[: len(begun)].tolist() == begun
    assert targets.nonzero()[0].tolist() == [*range(1, len(begun))]


@pytest.mark.parametrize("name", [*SPECIAL_TOKENS, "</s>", "<s>"])
def test_content_that_could_forge_a_turn(tokenizer, name):
    template = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
    forged = [ONE[0], Message("assistant", f"a{name}b")]
    with pytest.raises(DocumentError) as caught:
        template.encode(forged)
    assert caught.value.reason.startswith(f'turn 2: contains "{name}"')
    with pytest.raises(DocumentError, match="turn 1"):
        template.prompt(forged[1:])


def test_no_piece_of_text_has_a_header_and_content(tokenizer):
    template = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
    for message in TOOLS:
        assert f"|>{message.content}<|" in template.render(TOOLS)
    almost = [Message("user", "<|end"), Message("assistant", "|>")]
    ids, _ = template.encode(almost)
    assert (ids == tokenizer.special_tokens()["<|end|>"]).sum() == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for m in messages %}{{ m", "chat.jinja is not a Jinja template"),
        ("{% for m in messages %}a", "line 1"),
        ("{{ nothing.at_all }}", "chat.jinja cannot be rendered (UndefinedError"),
        ("{{ messages[0]['content'] + 1 }}", "cannot be rendered (TypeError"),
        ("{{ 1 / 0 }}", "cannot be rendered (ZeroDivisionError"),
        ("{{ messages.__class__.__base__ }}", "cannot be rendered (SecurityError"),
        ("", "chat.jinja leaves out the content of messages"),
        (PARTS, "chat.jinja leaves out the content of messages"),
        (
            PARTS.replace("p['type'] == 'text'", "p.type != 'image'"),
            "leaves out the content of messages",
        ),
        (
            CHATML.replace("m['content']", "m['content'][0]['text']"),
            "'str object' has no attribute",
        ),
        (CHATML.replace("m['content']", "m.content[0].text"), "cannot be rendered (UndefinedError"),
        (
            CHATML.replace("m['content']", "(m.content|selectattr('text')|list)[0].text|trim"),
            "cannot be rendered (UndefinedError",
        ),
        (CHATML.replace("m['content']", "m['text']"), "cannot be rendered (UndefinedError"),
        ("{{ raise_exception('no') }}", "refuses the conversation (no), a question and"),
        (
            DEFAULT_TEMPLATE.replace("add_generation_prompt", "false"),
            "writes '<|assistant|>' before an answer, but not with add_generation_prompt",
        ),
        (CHATML.replace("add_generation_prompt", "false"), r"'<|im_start|>assistant' before"),
        ("{{ messages[0]['content'] }}{% generation %}{% endgeneration %}", "marks no text of the"),
        (
            DEFAULT_TEMPLATE.replace("<|end|>", "<|fin|>"),
            "writes <|fin|>, which is not a special token",
        ),
        (
            CHATML.replace("<|im_start|>", "<\uff5cstart\uff5c>"),
            "writes <\uff5cstart\uff5c>, which",
        ),
        (CHATML.replace("assistant", "model"), "chat.jinja writes other text before it than"),
        (CHATML.replace("m['content']", "m['content']|upper"), "chat.jinja changes what it says"),
    ],
)
def test_templates_that_do_not_fit(tokenizer, source, words):
    with pytest.raises(UsageError) as caught:
        ChatTemplate(source, tokenizer, "chat.jinja").encode(TWO[1:])
    assert words in str(caught.value)
    assert "; " in str(caught.value)


def test_a_turn_that_is_left_out_is_refused(tokenizer):
    content = "(m['content'] if loop.last or m['role'] == 'user' else 'cut')"
    template = ChatTemplate(CHATML.replace("m['content']", content), tokenizer)
    words = "turn 2: has content, which the chat template leaves out"
    with pytest.raises(DocumentError, match=words):
        template.encode([*TWO[1:-1], Message("assistant", "the last")])


def test_a_header_that_is_trained_on_does_not_end_a_turn(tokenizer):
    source = SIMPLE.replace(
        "{{ '<|assistant|>' }}{% generation %}{{", "{% generation %}{{ '<|assistant|>' +"
    )
    assert source != SIMPLE
    assert ChatTemplate(source, tokenizer).end_of_turn == tokenizer.special_tokens()["<|end|>"]


def test_a_tokenizer_without_the_special_tokens(tmp_path):
    train_tokenizer(["some text to learn"] * 9, 512, tmp_path / "tokenizer.model")
    with pytest.raises(UsageError, match=r"writes <\|user\|>, .*special_tokens"):
        ChatTemplate(DEFAULT_TEMPLATE, SentencePieceTokenizer(tmp_path))


def test_a_template_may_refuse_system_messages(tokenizer):
    source = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no\n system') }}{% endif %}"
        + CHATML
    )
    template = ChatTemplate(source, tokenizer)
    assert template.encode(ONE)[1].any()
    with pytest.raises(DocumentError, match=r"refuses the conversation \(no system\)"):
        template.encode(TWO)


def test_a_tokenizer_that_drops_spaces_beside_a_special_token(byte_level, tmp_path):
    for name, content in byte_level.files().items():
        (tmp_path / name).write_bytes(content)
    changed = json.loads((tmp_path / "tokenizer.json").read_bytes())
    for token in changed["added_tokens"]:
        token["rstrip"] = token["content"] == "<|user|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    loss, talk = TextLoss(), [Message("user", " a "), Message("assistant", " b ")]
    tokenizer = HuggingFaceTokenizer(tmp_path)
    ((ids, _),) = encode_all(ChatTemplate(DEFAULT_TEMPLATE, tokenizer), [talk], loss=loss)
    text = "<|user|>a <|end|><|assistant|> b <|end|>"
    assert ids.tolist() == ChatTemplate(DEFAULT_TEMPLATE, byte_level).ids(text)
    assert loss.lost == 0  # the space belongs to the token


def test_last_with_several_spans_in_a_turn(tokenizer):
    split = SIMPLE.replace(
        "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}",
        "{% generation %}{{ message['content'] }}{% endgeneration %}"
        "{% generation %}{{ '<|end|>' }}{% endgeneration %}",
    )
    for messages in (ONE, TWO, TOOLS):
        for train_on in ("assistant", "last"):
            expected = ChatTemplate(DEFAULT_TEMPLATE, tokenizer).encode(messages, train_on)[1]
            found = ChatTemplate(split, tokenizer).encode(messages, train_on)[1]
            assert found.tolist() == expected.tolist()


def test_messages_without_an_assistant_turn(tokenizer):
    for source in (DEFAULT_TEMPLATE, CHATML):
        for train_on in ("assistant", "last"):
            with pytest.raises(DocumentError, match="no assistant turn"):
                ChatTemplate(source, tokenizer).encode(ONE[:1], train_on)


def test_spans_by_piece():
    pieces = ["ab", "", "cde", "f"]
    assert [*spans_by_piece(pieces, [(1, 3), (4, 6)])] == [
        ("ab", [(1, 2)]),
        ("", []),
        ("cde", [(0, 1), (2, 3)]),
        ("f", [(0, 1)]),
    ]
    assert [parts for _, parts in spans_by_piece(pieces, [(2, 2)])] == [[], [], [], []]


def test_an_unknown_choice_is_a_bug(tokenizer):
    with pytest.raises(ValueError, match="train_on is 'first'"):
        ChatTemplate(DEFAULT_TEMPLATE, tokenizer).encode(ONE, "first")  # pyright: ignore[reportArgumentType]


def test_threads_may_share_a_source(tokenizer):
    templates = [ChatTemplate(DEFAULT_TEMPLATE, tokenizer) for _ in range(2)]
    expected = templates[0].encode(TWO)[1].tolist()
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda number: templates[number % 2].encode(TWO)[1].tolist(), range(400))
        assert all(targets == expected for targets in found)


def test_a_name_that_the_template_leaves_out_is_refused(tokenizer):
    named = [Message("user", "a", "ann"), Message("assistant", "b")]
    with pytest.raises(
        DocumentError, match='turn 1: has "name", which the chat template'
    ) as caught:
        ChatTemplate(DEFAULT_TEMPLATE, tokenizer).encode(named)
    assert str(caught.value.remedy).endswith("that includes it (--chat_template FILE)")
    written = SIMPLE.replace(
        "message['content'] + '<|end|>' }}{% else",
        "(message.name or '') + message['content'] + '<|end|>' }}{% else",
    )
    chat = ChatTemplate(written, tokenizer)
    assert chat.render(named).startswith("<|user|>anna<|end|>")
    chat.encode(named)
    with pytest.raises(DocumentError, match='turn 2: has "name"'):
        chat.encode([named[0], Message("assistant", "b", "bob")])
    with pytest.raises(DocumentError, match='contains "<|end|>"'.replace("|", r"\|")):
        chat.encode([Message("user", "a", "x<|end|>"), named[1]])
