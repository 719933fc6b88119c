"""Ids and masks against apply_chat_template of transformers, on random conversations."""

import random
from dataclasses import asdict

import pytest

from minimind.data.chat.template import DEFAULT_TEMPLATE, ChatTemplate
from tests.data.chat.made import (
    CHATML,
    CHATML_MARKED,
    HEADERS,
    HEADERS_MARKED,
    conversation,
    encode_all,
)

SEED = 29
MARKED = {"default": DEFAULT_TEMPLATE, "chatml": CHATML_MARKED, "headers": HEADERS_MARKED}


@pytest.fixture(scope="module")
def conversations(request):
    draw, number = random.Random(SEED), 1000 if request.config.getoption("--long") else 100
    return [conversation(draw) for _ in range(number)]


@pytest.mark.parametrize("name", MARKED)
def test_ids_and_masks_of_random_conversations(pair, conversations, name):
    ours, theirs = pair
    template = ChatTemplate(MARKED[name], ours)
    theirs.chat_template = MARKED[name]
    encoded = encode_all(template, conversations)
    for messages, found in zip(conversations, encoded, strict=True):
        expected = theirs.apply_chat_template(
            [asdict(message) for message in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert found[0].tolist() == expected["input_ids"], f"{messages} of seed {SEED}"
        assert found[1].tolist() == expected["assistant_masks"], f"{messages} of seed {SEED}"


@pytest.mark.parametrize("source", [DEFAULT_TEMPLATE, CHATML, HEADERS])
def test_prompts(pair, conversations, source):
    ours, theirs = pair
    template = ChatTemplate(source, ours)
    for messages in conversations[:200]:
        expected = theirs.apply_chat_template(
            [asdict(message) for message in messages[:-1]],
            chat_template=source,
            add_generation_prompt=True,
            return_dict=True,
        )
        if messages[:-1]:
            assert template.prompt(messages[:-1]) == expected["input_ids"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("source", "marked"), [(CHATML, CHATML_MARKED), (HEADERS, HEADERS_MARKED)])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_template_without_generation_gives_what_one_with_it_gives(
    pair, conversations, source, marked, train_on
):
    ours, _ = pair
    made = conversations[:300]
    found = encode_all(ChatTemplate(source, ours), made, train_on)
    expected = encode_all(ChatTemplate(marked, ours), made, train_on)
    for (ids, targets), (their_ids, their_targets) in zip(found, expected, strict=True):
        assert ids.tolist() == their_ids.tolist()
        assert targets.tolist() == their_targets.tolist()


def test_one_by_one_is_the_same_as_a_batch(pair, conversations):
    template = ChatTemplate(DEFAULT_TEMPLATE, pair[0])
    made = conversations[:100]
    batch = encode_all(template, made)
    for messages, (ids, targets) in zip(made, batch, strict=True):
        own_ids, own_targets = template.encode(messages)
        assert own_ids.tolist() == ids.tolist()
        assert own_targets.tolist() == targets.tolist()
