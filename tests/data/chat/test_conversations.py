"""Records in every format, and records with one mistake against what is said of it."""

import json
import random
from dataclasses import replace
from decimal import Decimal

import pytest

from minimind.data.chat.conversations import (
    Conversation,
    Message,
    canonical_text,
    conversation_of,
    conversation_of_line,
    document_of,
    weight_of,
)
from minimind.data.text.documents import DocumentError, ReadOptions, parse_line
from tests.data.chat.made import conversation

SEED = 29
LIMIT = ReadOptions(max_document_bytes=2000)
ROUND = Conversation([Message("user", "one"), Message("assistant", "two")])


def turns(*pairs, role="role", content="content"):
    return [{role: name, content: text} for name, text in pairs]


USER, ANSWER = turns(("user", "one"), ("assistant", "two"))


def read(record):
    line = record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n"
    found = conversation_of_line(line)
    document_of(found, LIMIT)
    return found


FORMATS = [
    {"conversations": [USER, ANSWER]},
    {"messages": [USER, ANSWER]},
    {"conversations": turns(("human", "one"), ("gpt", "two"), role="from", content="value")},
    {"conversations": turns(("user", "one"), ("chatgpt", "two"), role="from", content="value")},
    {"prompt": "one", "completion": "two"},
    [USER, ANSWER],  # as of nanochat
    turns(("human", "one"), ("gpt", "two"), role="from", content="value"),
    [{**USER, "id": 3}, {**ANSWER, "tool_calls": None}],
    {"id": 7, "score": 0.5, "messages": [USER, ANSWER], "source": {"a": [1]}},
    {"messages": [USER, ANSWER], "prompt": "one"},
    {"messages": [USER, ANSWER], "system": "", "tools": None},
    {"messages": [{**USER, "idx": 0, "id": 1}, {**ANSWER, "tool_calls": None, "x": None}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "one"}]}, ANSWER]},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "o"}, {"text": "ne", "type": "text"}],
            },
            ANSWER,
        ]
    },
]


@pytest.mark.parametrize("record", FORMATS)
def test_formats(record):
    assert read(record) == ROUND
    value = parse_line(json.dumps(record), "")
    assert conversation_of(value, set()) == ROUND


@pytest.mark.parametrize(
    ("record", "roles"),
    [
        ({"messages": turns(("system", "s"), ("user", "u"), ("assistant", "a"))}, "sua"),
        (
            {
                "messages": turns(
                    *[(r, "x") for r in ("user", "assistant", "tool", "tool")], ("assistant", "a")
                )
            },
            "uatta",
        ),
        (
            {
                "conversations": turns(
                    ("system", "s"),
                    ("human", "u"),
                    ("gpt", "a"),
                    ("observation", "t"),
                    ("gpt", "a"),
                    role="from",
                    content="value",
                )
            },
            "suata",
        ),
        ({"messages": [USER, ANSWER, USER]}, "uau"),
    ],
)
def test_roles(record, roles):
    assert "".join(message.role[0] for message in read(record)) == roles


def sharegpt(*pairs):
    return {"conversations": turns(*pairs, role="from", content="value")}


def second(turn):
    return {"messages": [USER, turn]}


# A record, and all that must be said of it.
MISTAKES = [
    (b"\n", "the line is blank"),
    (b" \t \n", "the line is blank"),
    (b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\n', "byte order mark"),
    (b'{"prompt": "a\x00", "completion": "b"}\n', "NUL byte"),
    (b'{"prompt": "a", "compl', "is cut off"),
    (b'{"prompt": "a", "completion": b}', "is not JSON"),
    (b'{"prompt": "\xff", "completion": "b"}', "is not UTF-8"),
    (b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}", "is nested too deep"),
    (b'{"messages": ' + b"[" * 60_000, "is nested too deep"),
    (b'{"prompt": "a", "completion": NaN}', '"completion" is NaN, not a string'),
    (b'{"prompt": "a", "completion": "b", "tools": [{"name": "f", "n": NaN}]}', "NaN is not JSON"),
    (["a"], "is a list, not an object"),
    ([], "is a list, not an object"),
    ([{"messages": [USER, ANSWER]}], "is a list, not an object"),
    ([[USER, ANSWER]], "is a list, not an object"),
    ([USER], "has no assistant turn among 1"),
    ([USER, "two"], "turn 2: is a string, not an object"),
    ([{"content": "one"}, ANSWER], 'turn 1: has no "role"'),
    ([USER, {"role": "bot", "content": "two"}], 'turn 2: "role" is "bot"'),
    ([USER, {**ANSWER, "from": "gpt"}], 'turn 2: has "from", which is not supported'),
    (
        [USER, {**ANSWER, "content": [{"type": "text", "text": "a"}, {"type": "python"}]}],
        "turn 2: part 2 of its content is not text, and",
    ),
    (USER, 'has no "conversations" or "messages" but "role", "content"; write {"conversations"'),
    ({"from": "human", "value": "one"}, 'has no "conversations" or "messages" but "from", "value"'),
    (None, "is null, not an object"),
    ({}, 'has no "conversations" or "messages"; write {"conversations": [{"role"'),
    (
        {"a": 1, "b": 2, "c": 3, "d": 4},
        'has no "conversations" or "messages" but "a", "b", "c"; write',
    ),
    ({"instruction": "a", "result": "b"}, 'but "instruction", "result"; write'),
    ({"instruction": "a", "input": 7, "output": "b"}, '"input" is a number, not a string'),
    ({"instruction": "a", "output": "b", "history": ["x"]}, '"history" is not a list of questions'),
    ({"question": "a", "answer": ""}, 'turn 2: "answer" is empty'),
    (
        {"prompt": "a", "chosen": [{"role": "user", "content": "b"}, ANSWER]},
        '"chosen" begins with a turn of user that is not "prompt"',
    ),
    ({"text": "plain"}, 'or "messages" but "text"; write {"conv'),
    ({"chosen": [USER], "rejected": [USER]}, "has no assistant turn among 1"),
    ({"prompt": "a"}, 'has no "conversations" or "messages" but "prompt"'),
    ({"completion": "a"}, 'has no "conversations" or "messages" but "compl'),
    ({"prompt": "a", "completion": None}, 'turn 2: "completion" is null, not a string'),
    ({"prompt": [USER], "completion": [{"role": "user"}]}, 'turn 2: has no "content"'),
    ({"prompt": "", "completion": "b"}, 'turn 1: "prompt" is empty'),
    ({"prompt": "a", "completion": "\n"}, 'turn 2: "completion" is blank'),
    (
        {"messages": [USER, ANSWER], "conversations": [USER, ANSWER]},
        '"conversations" and "messages"',
    ),
    ({"messages": [USER, ANSWER], "prompt": "a", "completion": "b"}, 'has "messages" and "prompt"'),
    (b'{"messages": [], "messages": []}', 'has "messages" 2 times'),
    (b'{"prompt": "a", "prompt": "a", "completion": "b"}', 'has "prompt" 2 times'),
    ({"messages": None}, '"messages" is null, not a list'),
    ({"messages": "hello"}, '"messages" is a string, not a list'),
    ({"messages": {"role": "user"}}, '"messages" is an object, not a list'),
    ({"conversations": []}, '"conversations" is an empty list'),
    (
        {"messages": [*turns(("system", "s")), USER, ANSWER], "system": "be good"},
        'has "system" and another system turn; keep one of them',
    ),
    ({"messages": [USER, ANSWER], "tools": {"name": "f"}}, '"tools" is not a list of objects'),
    ({"messages": [USER, ANSWER], "tools": ["f"]}, '"tools" is not a list of objects'),
    ({"messages": [USER, ANSWER], "tools": "[{"}, '"tools" is cut off'),
    (b'{"messages": [], "tools": [{"name": "f", "name": "g"}]}', '"messages" is an empty list'),
    (
        {"messages": [{**USER, "tools": [{"name": "f"}]}, ANSWER]},
        'turn 1: has "tools", which only system turns have',
    ),
    (
        {
            "messages": [{**turns(("system", ""))[0], "tools": '[{"name": "f"}]'}, USER, ANSWER],
            "tools": [{"name": "g"}],
        },
        'has "tools" beside the turns, and different ones in a turn; keep one of them',
    ),
    (
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"messages": ["x"]}},
        'chat_template_kwargs has "messages", which is not a valid name of a variable',
    ),
    (
        {"messages": [USER, ANSWER], "chat_template_kwargs": {"a b": 1}},
        'chat_template_kwargs has "a b", which is not a valid name of a variable',
    ),
    (second("two"), "turn 2: is a string, not an object"),
    (second(None), "turn 2: is null, not an object"),
    (second({"content": "two"}), 'turn 2: has no "role"'),
    (second({"role": "assistant"}), 'turn 2: has no "content"'),
    (second({}), 'turn 2: has no "role"'),
    (
        b'{"messages": [{"role": "user", "role": "user", "content": "a"}]}',
        'turn 1: has "role" 2 times',
    ),
    (
        b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        'turn 1: has "content" 2 times',
    ),
    (
        second({"role": "bot", "content": "two"}),
        'turn 2: "role" is "bot"; write one of system, user,',
    ),
    (second({"role": "human", "content": "two"}), 'turn 2: "role" is "human"'),
    (second({"role": "Assistant", "content": "two"}), 'turn 2: "role" is "Assistant"'),
    (second({"role": 1, "content": "two"}), 'turn 2: "role" is a number; write one of'),
    (second({"role": None, "content": "two"}), 'turn 2: "role" is null; write one of'),
    (second({"role": "assistant", "content": None}), 'turn 2: "content" is null, not a string'),
    (second({"role": "assistant", "content": 2}), 'turn 2: "content" is a number, not a string'),
    (second({"role": "assistant", "content": ""}), 'turn 2: "content" is empty'),
    (second({"role": "assistant", "content": " \n"}), 'turn 2: "content" is blank'),
    (second({"role": "assistant", "content": []}), 'turn 2: "content" is empty'),
    (second({"role": "assistant", "content": ["a"]}), "turn 2: part 1 of its content is not text"),
    (
        second(
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}
        ),
        "turn 2: part 2 of its content is not text, and",
    ),
    (
        second({"role": "assistant", "content": [{"text": "a"}]}),
        "part 1 of its content is not text, and",
    ),
    (
        second({"role": "assistant", "content": [{"type": "text"}]}),
        "part 1 of its content is not text, and",
    ),
    (
        second({**ANSWER, "tool_calls": [{"id": "x"}]}),
        'turn 2: "tool_calls" has a call without a "name"; write [{"name": "...", "arguments"',
    ),
    (second({**ANSWER, "tool_calls": "f()"}), 'turn 2: "tool_calls" is not JSON'),
    (second({**ANSWER, "tool_calls": 7}), 'turn 2: "tool_calls" has a call without a "name"'),
    (
        {"messages": [{**USER, "tool_calls": [{"name": "f"}]}, ANSWER]},
        'turn 1: has "tool_calls", which only assistant turns have',
    ),
    (
        {"messages": [{**USER, "reasoning_content": "hm"}, ANSWER]},
        'turn 1: has "reasoning_content", which only assistant turns have',
    ),
    (second({**ANSWER, "reasoning_content": 7}), 'turn 2: "reasoning_content" is a number'),
    (
        second({**ANSWER, "reasoning_content": "hm", "reasoning": "so"}),
        "turn 2: has different text in reasoning_content and in reasoning; keep one of them",
    ),
    (second({**ANSWER, "thoughts": ["hm"]}), '"thoughts", which is not supported; remove it, or'),
    (second({**ANSWER, "cot": "hm"}), 'turn 2: has "cot", which is not supported; remove'),
    (
        second({**ANSWER, "reasoning_text": "hm"}),
        "which is not supported; remove it, or write one of role, content, name, reasoning_content",
    ),
    (
        {"messages": [{**USER, "thought": "hm"}, ANSWER]},
        'turn 1: has "thought", which is not supported; remove it, or write one of role',
    ),
    (
        second({**ANSWER, "tool_call_id": "x"}),
        'turn 2: has "tool_call_id", which only tool turns have',
    ),
    (second({"role": "assistant", "content": None, "tool_calls": []}), 'turn 2: "content" is null'),
    (second({**ANSWER, "function_call": {"name": "f"}}), 'turn 2: has "function_call"'),
    (second({**ANSWER, "weight": 0}), "has no answer with a weight of 1; remove the conversation"),
    (second({**ANSWER, "weight": 0.5}), 'turn 2: has "weight", which is neither 0 nor 1; remove'),
    (
        second({**ANSWER, "from": "gpt"}),
        'turn 2: has "from", which is not supported; remove it, or write one of role, content',
    ),
    (sharegpt(("human", "a"), ("alpaca", "b")), 'turn 2: "from" is "alpaca"; write one of human'),
    (sharegpt(("human", "a"), ("function_call", "b")), 'turn 2: "value" is not JSON'),
    (
        sharegpt(("human", "a"), ("function_call", '{"arguments": {}}')),
        'turn 2: "value" has a call without a "name"',
    ),
    (sharegpt(("human", "a"), ("gpt", None)), 'turn 2: "value" is null, not a string'),
    (
        sharegpt(("human", "a"), ("gpt", [{"type": "text", "text": "b"}])),
        'turn 2: "value" is a list',
    ),
    ({"conversations": [{"from": "human", "value": "a"}, ANSWER]}, 'turn 2: has no "from"; write'),
    ({"messages": [{"from": "human", "value": "a"}]}, 'turn 1: has no "role"; write'),
    ({"messages": [USER]}, "has no assistant turn among 1"),
    ({"messages": turns(("system", "s"))}, "has no assistant turn among 1"),
    (
        {"messages": [ANSWER, USER]},
        "turn 1 (assistant) begins the conversation; put a turn of system or",
    ),
    (
        {"messages": turns(("tool", "t"), ("assistant", "a"))},
        "turn 1 (tool) begins the conversation",
    ),
    (
        {"messages": turns(("system", "s"), ("assistant", "a"))},
        "turn 2 (assistant) follows a turn of system",
    ),
    (
        {"messages": [USER, *turns(("system", "s")), ANSWER]},
        "turn 2 (system) follows a turn of user",
    ),
    (
        {"messages": turns(("system", "s"), ("system", "s"))},
        "turn 2 (system) follows a turn of system",
    ),
    (
        {"messages": [USER, USER, ANSWER]},
        "turn 2 (user) follows a turn of user; put a turn of assistant before it",
    ),
    (
        {"messages": [USER, *turns(("tool", "t")), ANSWER]},
        "turn 2 (tool) follows a turn of user; put a turn of assistant",
    ),
    (
        {"messages": [USER, ANSWER, *turns(("tool", "t"), ("user", "u"))]},
        "turn 4 (user) follows a turn of tool",
    ),
    (second({"role": "assistant", "content": "a\0"}), "turn 2: the text holds a NUL character"),
    (
        second({"role": "assistant", "content": "a\ud83d"}),
        "turn 2: contains a lone surrogate (\\ud83d)",
    ),
    ({"prompt": "\udc00", "completion": "b"}, "turn 1: contains a lone surrogate"),
    ({"prompt": "a", "completion": "b" * 2000}, "bytes, more than max_document_bytes = 2000"),
    ({"prompt": "a", "completion": "春" * 700}, "bytes, more than max_document_bytes = 2000"),
]


@pytest.mark.parametrize(("record", "words"), MISTAKES)
def test_what_is_said_of_a_mistake(record, words):
    with pytest.raises(DocumentError) as caught:
        read(record)
    said = f"{caught.value.reason}; {caught.value.remedy}"
    assert words in said
    assert caught.value.remedy
    assert "\n" not in said


def test_the_byte_of_text_that_is_not_utf8():
    with pytest.raises(DocumentError) as caught:
        read(b'{"prompt": "\xff", "completion": "b"}')
    assert caught.value.at == 12


def test_canonical_text():
    found = conversation_of_line(
        b'{"prompt": "\\u6625 \\"q\\"\\n", "completion": "\\u0001\\u2028"}\n'
    )
    assert document_of(found, LIMIT) == (
        '[{"role":"user","content":"春 \\"q\\"\\n"},{"role":"assistant","content":"\\u0001\u2028"}]'
    )
    assert [*found] == [Message("user", '春 "q"\n'), Message("assistant", "\x01\u2028")]


def test_the_limit_is_that_of_the_canonical_text():
    line = b'{"prompt":"a","completion":"b"}'
    found = conversation_of_line(line)
    size = len(document_of(found, LIMIT).encode())
    assert document_of(found, ReadOptions(max_document_bytes=size))
    with pytest.raises(DocumentError, match=f"has {size} bytes"):
        document_of(found, ReadOptions(max_document_bytes=size - 1))


@pytest.mark.parametrize("escaped", [True, False])
def test_random_conversations_come_back(escaped):
    draw = random.Random(SEED)
    for _ in range(500):
        messages = conversation(draw)
        text = canonical_text(messages)
        record = {"id": 1, "messages": json.loads(text)}
        line = bytearray(json.dumps(record, ensure_ascii=escaped).encode() + b"\r\n")
        found = conversation_of_line(line)
        assert ([*found], document_of(found, ReadOptions())) == (messages, text)


ABSENT = ["", " ", None, [], {}, "[]", "{}", " [ ]\n", "null", "None", [None], [""], {"a": None}]
TURN_KEYS = ["tool_calls", "annotations", "thinking", "tools", "audio", "name", "weight"]
BESIDE = ["system", "tools", "functions", "system_prompt", "history", "images", "label", "weight"]


@pytest.mark.parametrize("value", ABSENT, ids=repr)
def test_a_key_without_a_value_is_absent_in_turns_and_beside_them(value):
    for key in TURN_KEYS:
        assert read({"messages": [{**USER, key: value}, {**ANSWER, key: value}]}) == ROUND
        turn = {"from": "gpt", "value": "two", key: value}
        assert read({"conversations": [{"from": "human", "value": "one"}, turn]}) == ROUND
    for key in [*BESIDE, *TURN_KEYS, "chosen", "conversations", "prompt", "id"]:
        assert read({key: value, "messages": [USER, ANSWER]}) == ROUND
    part = {"type": "text", "text": "one", "annotations": value}
    assert read({"messages": [{"role": "user", "content": [part]}, ANSWER]}) == ROUND
    for place in (0, 1):
        turns_with = [USER, ANSWER]
        turns_with.insert(place, {"role": "system", "content": value if value == "" else None})
        assert read({"messages": turns_with}) == ROUND


# What would be lost.
LOSSES = [
    *[(key, "be kind") for key in ("systemPrompt", "system_prompts")],
    *[(key, "be kind") for key in ("System Message", "sys_msg", "persona")],
    *[(key, "be kind") for key in ("developer", "default_system_prompt")],
    *[(key, [{"name": "f"}]) for key in ("functions", "function_call")],
    *[(key, '[{"name": "f"}]') for key in ("available_tools", "tool_schemas")],
    *[(key, [["a", "b"]]) for key in ("chat_history", "documents")],
    *[(key, "a passage") for key in ("context", "contexts", "retrieved_documents")],
    *[(key, "a passage") for key in ("input", "response", "reasoning_content")],
    *[(key, ["x.jpg"]) for key in ("images", "image", "videos", "audios")],
    *[(key, "x.jpg") for key in ("image_path", "imageUrls", "audio_file", "media")],
    *[(key, {"from": "gpt", "value": "a"}) for key in ("chosen", "rejected")],
    *[(key, "worse") for key in ("rejected_response", "rejectedAnswer")],
    *[("label", value) for value in (False, True, 0, 1, "bad", [1])],
    ("kto_tag", True),
    *[("weight", value) for value in (0, 0.0, 0.5, 2, "2", [0, 1], False)],
    *[(key, "be kind") for key in ("bot_persona", "character", "scenario")],
    *[(key, ["be kind"]) for key in ("guidelines", "rules", "meta_prompt")],
    *[(key, ["f"]) for key in ("api_list", "available_apis", "mcp_servers")],
    *[(key, ["a"]) for key in ("previous_turns", "past_dialogue", "facts")],
    *[(key, "a b") for key in ("evidence", "article")],
    *[(key, ["x"]) for key in ("screenshot", "figure", "frames", "video_frames")],
    ("desirable", True),
    *[(key, 0.5) for key in ("loss_scale", "sampling_weight", "task_weight")],
    ("loss_masks", [0, 1]),
    *[(key, 0) for key in ("loss_weight", "sampleWeight", "train", "loss")],
    # Labels and preferences as flags.
    *[("is_desirable", value) for value in (False, True, "false", 0)],
    *[(key, True) for key in ("labels", "isUndesirable")],
    *[(key, True) for key in ("is_rejected", "isRejected", "rejected")],
    *[("is_chosen", value) for value in (False, "no")],
    *[(key, value) for key in ("is_train", "use_loss") for value in (False, 0.5)],
    # Switch words that are the text itself.
    *[(key, "No") for key in ("response", "output", "query", "input")],
    *[(key, "true") for key in ("context", "facts")],
    *[(key, word) for key, word in (("chosen", "yes"), ("rejected", "no"))],
    ("instruction", "no"),
    *[("weight", split) for split in ("val", "test", "validation", "dev")],
    *[("train", word) for word in ("test", "no", "false", "off", "0")],
    # Metadata, which may be removed.
    *[(key, "of a tale") for key in ("scenario", "character", "rules")],
]


@pytest.mark.parametrize(("key", "value"), LOSSES, ids=repr)
def test_what_stands_beside_the_turns_is_not_lost_in_silence(key, value):
    forms = [{"messages": [USER, ANSWER]}, {"prompt": "one", "completion": "two"}]
    forms.append(sharegpt(("human", "one"), ("gpt", "two")))
    for form in forms:
        for record in ({key: value, **form}, {**form, key: value}):
            with pytest.raises(DocumentError) as caught:
                read(record)
            assert caught.value.reason == f'has "{key}" outside of the turns, which would be lost'
            assert caught.value.remedy == "write it into a turn, or remove it or the conversation"


IGNORED = [
    {
        "id": 1,
        "source": "web",
        "meta": {"a": "b"},
        "score": 0.5,
        "language": "en",
        "split": "train",
    },
    {
        "operating_system": "linux",
        "num_images": 0,
        "has_tools": True,
        "document_id": "x",
        "tag": "y",
    },
    {"context": 7, "system": False, "images": 0},  # numbers are no text
    {"prompt": "another", "category": "qa", "prompt_id": "a1"},
    {"context": " one\n", "input": "two"},  # a turn says it
    {"reasoning": "off", "thinking": "On", "tools": "none", "cot": "no", "system": "yes"},
    {"images": "no", "rules": "none"},
    {"has_context": "yes", "num_frames": 4, "n_documents": "3", "use_functions": "no"},
    {"has_label": True, "num_labels": 2, "is_system_prompt": False, "use_tools": True},
    {"use_functions": "f", "has_context": "The Eiffel tower", "my_images": ["x.jpg"]},
    {"train": "train", "weight": "1", "loss": "1.0", "sample_weight": 1.0},
    *[{"train": word, "is_train": word} for word in (True, "true", "yes", "On", "1", "train", 1)],
    {"instruction": " one\n", "response": "two"},
]


@pytest.mark.parametrize("beside", IGNORED)
def test_what_is_ignored_beside_the_turns_is_named(beside):
    ignored = set()
    line = json.dumps({**beside, "messages": [USER, {**ANSWER, "timestamp": "2026"}]}).encode()
    assert conversation_of_line(line, ignored) == ROUND
    assert ignored == {*beside, "timestamp of turns"} - {"tools"}


@pytest.mark.parametrize(
    "key", ["weight", "loss_weight", "train", "loss", "trainable", "loss_mask"]
)
def test_a_weight_that_means_what_is_done_anyway(key):
    for full, none in ((1, 0), (1.0, 0.0), (True, False)):
        assert read({"messages": [{**USER, key: none}, {**ANSWER, key: full}], key: full}) == ROUND
        two = read({"messages": [USER, {**ANSWER, key: none}, USER, {**ANSWER, key: full}]})
        assert [message.is_trained for message in two] == [True, False, True, True]
        assert [replace(message, is_trained=True) for message in two] == [*ROUND, *ROUND]
    for value in (0.5, -1, 2, "2", [1]):
        with pytest.raises(DocumentError, match=f'turn 1: has "{key}"'):
            read({"messages": [{**USER, key: value}, ANSWER]})


@pytest.mark.parametrize("key", ["mask", "masked", "refusal", "thought", "images", "speaker"])
def test_an_unknown_key_of_a_turn_is_refused(key):
    for value in (True, 1, "x", ["x"]):
        with pytest.raises(DocumentError, match=f'turn 2: has "{key}", which is not supported'):
            read(second({**ANSWER, key: value}))
        part = {"type": "text", "text": "two", key: value}
        with pytest.raises(DocumentError, match="part 1 of its content is not text, and"):
            read(second({"role": "assistant", "content": [part]}))


def test_the_name_of_a_turn_is_kept():
    found = read({"messages": [{**USER, "name": "ann"}, ANSWER]})
    assert [*found] == [Message("user", "one", "ann"), ROUND[1]]
    with pytest.raises(DocumentError, match='turn 1: "name" is a number'):
        read({"messages": [{**USER, "name": 7}, ANSWER]})


def test_variables_of_a_template():
    values = {"enable_thinking": False, "nested": {"a": [1]}, "none": None}
    for key in ("chat_template_kwargs", "template_args"):
        for given in (values, json.dumps(values)):
            found = read({"messages": [USER, ANSWER], key: given})
            assert found == ROUND
            assert found.variables == {"enable_thinking": False, "nested": {"a": [1]}}
    for value, words in (
        (["x"], "is not an object"),
        ("x", "is not JSON"),
        ('["x"]', "is not an object"),
    ):
        with pytest.raises(DocumentError, match=f'"chat_template_kwargs" {words}'):
            read({"messages": [USER, ANSWER], "chat_template_kwargs": value})


CALL = {"name": "f", "arguments": {"at": "x", "n": 1}}


def test_thoughts_may_stand_under_two_keys():
    given = {**ANSWER, "reasoning_content": "hm", "reasoning": "hm\n", "thinking": ""}
    assert read([USER, given])[1].more == {"reasoning_content": "hm", "reasoning": "hm\n"}


def test_thoughts_calls_and_tools_are_kept_as_they_are_written():
    answer = {**ANSWER, "reasoning_content": "hm", "tool_calls": [CALL]}
    tool = {"role": "tool", "content": "", "tool_call_id": "1"}
    system = {"role": "system", "content": "s", "tools": json.dumps([CALL])}
    for turn in (answer, {**answer, "tool_calls": json.dumps([CALL])}):
        found = read({"messages": [system, USER, turn, tool, ANSWER, ANSWER]})
        assert found.tools == [CALL]
        assert found[2] == Message(
            "assistant", "two", "", {"reasoning_content": "hm", "tool_calls": [CALL]}
        )
        assert found[3] == Message("tool", "", "", {"tool_call_id": "1"})
        assert found[4:] == (ROUND[1], ROUND[1])
    for content in ("", None):
        found = read(second({**answer, "content": content}))
        assert found[1].content == ""
        assert found[1].more["tool_calls"] == [CALL]
    found = read(second({"role": "assistant", "tool_calls": CALL}))
    assert found[1].more == {"tool_calls": [CALL]}
    for value in ("", [], [""], {}):
        (_, answered) = read(second({**ANSWER, "reasoning_content": value}))
        assert answered.more == {"reasoning_content": ""}
    found = read({"tools": json.dumps([CALL]), **sharegpt(("human", "one"), ("gpt", "two"))})
    assert (found, found.tools) == (ROUND, [CALL])
    calls = sharegpt(("human", "one"), ("function_call", json.dumps(CALL)), ("observation", "t"))
    found = read({"conversations": [*calls["conversations"], {"from": "gpt", "value": "two"}]})
    call = {"type": "function", "function": CALL}
    assert found[1] == Message("assistant", "", "", {"tool_calls": [call]})
    asked = {"from": "function_call", "value": [call], "reasoning_content": "hm"}
    found = read({"conversations": [*calls["conversations"][:1], asked]})
    assert found[1].more == {"reasoning_content": "hm", "tool_calls": [call]}


@pytest.mark.parametrize("number", [10**15, 10**16, 1234567890123456789, -(10**30), 10**639 - 1])
def test_a_number_in_a_call_is_as_it_is_written(number):
    call = {"name": "f", "arguments": {"id": number}}
    for calls in ([call], json.dumps([call])):
        found = read(second({"role": "assistant", "tool_calls": calls}))
        assert found[1].more == {"tool_calls": [call]}


@pytest.mark.parametrize(
    ("written", "words"),
    [("1e400", "Infinity is not JSON"), ("NaN", "NaN is not JSON"), ("9" * 641, "640 digits")],
)
def test_a_number_that_no_json_has_or_some_pythons_cannot_read(written, words):
    line = json.dumps(second({"role": "assistant", "tool_calls": [CALL]}))
    with pytest.raises(DocumentError, match=words):
        conversation_of_line(line.replace('"n": 1', f'"n": {written}').encode(), set())


def test_a_history_beside_a_whole_conversation_is_not_lost_in_silence():
    record = {"prompt": "one", "completion": [USER, ANSWER], "history": [["h1", "h2"]]}
    with pytest.raises(DocumentError, match='"history"'):
        read(record)


def test_tools_in_the_system_turn_of_a_prompt_are_offered():
    system = {"role": "system", "content": "s", "tools": json.dumps([CALL])}
    found = read({"prompt": [system, USER], "completion": [ANSWER]})
    assert (found[1:], found.tools) == (ROUND, [CALL])


def test_a_system_message_beside_the_turns_is_the_first():
    for key in ("system", "system_prompt", "system_message"):
        for first in ([], turns(("system", "")), turns(("system", " be kind"))):
            found = read({"messages": [*first, USER, ANSWER], key: "be kind"})
            assert [one.role for one in found] == ["system", "user", "assistant"]
            assert found[0].content.strip() == "be kind"


def test_an_empty_system_turn_with_tools_is_kept():
    system = {"role": "system", "content": "", "tools": [CALL]}
    found = read({"messages": [system, USER, ANSWER]})
    assert (found[0], found.tools) == (Message("system", "", "", {"tools": [CALL]}), [CALL])
    assert len(read({"messages": [{**system, "tools": ""}, USER, ANSWER]})) == 2


def test_a_text_that_a_turn_contains_is_said():
    system = {"role": "system", "content": " be kind\n"}
    parts = {"role": "system", "content": [{"type": "text", "text": "be kind"}]}
    for said in (system, parts):
        for key in ("system", "system_prompt", "instruction", "instructions", "persona"):
            assert len(read({key: "be kind", "messages": [said, USER, ANSWER]})) == 3
    with pytest.raises(DocumentError, match='has "persona" outside'):
        read({"persona": "be very kind", "messages": [system, USER, ANSWER]})
    row = {"instruction": "What is 2+2?", "response": "4"}  # as of Magpie
    said = sharegpt(("human", "What is 2+2?"), ("gpt", "4"))
    expected = [Message("user", "What is 2+2?"), Message("assistant", "4")]
    assert [*read({**row, **said})] == expected
    assert read({"prompt": "What is 2+2?", "completion": "4", **row})
    with pytest.raises(DocumentError, match='has "instruction" outside'):
        read({**row, **sharegpt(("human", "2+2?"), ("gpt", "4"))})


@pytest.mark.parametrize("word", ["true", "Yes", "on", "1", " 1.0 "])
def test_a_weight_of_a_turn_may_be_a_switch(word):
    none = {"true": "false", "Yes": "No", "on": "off"}.get(word, "0")
    assert read({"messages": [{**USER, "train": none}, {**ANSWER, "train": word}]}) == ROUND
    with pytest.raises(DocumentError, match="has no answer with a weight of 1"):
        read(second({**ANSWER, "train": none}))


def test_a_decimal_weight_of_one():
    assert weight_of(Decimal("1.0")) == 1
    assert weight_of(Decimal("0.5")) != 1


A_ROUND = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
FORMS = [
    {"instruction": "one", "output": "two"},
    {"instruction": "one", "input": "", "output": "two", "history": []},
    {"instruction": "one", "context": " ", "response": "two", "category": "qa"},
    {"question": "one", "answer": "two"},
    {"query": "one", "response": "two"},
    {"prompt": "one", "response": "two"},
    {"prompt": "one", "chosen": "two", "rejected": "no"},
    {"prompt": A_ROUND[:1], "completion": A_ROUND[1:]},
    {"prompt": A_ROUND[:1], "completion": A_ROUND[1]},
    {"prompt": A_ROUND[:1], "chosen": A_ROUND[1:], "rejected": [{"role": "assistant"}]},
    {"prompt": "one", "chosen": A_ROUND, "rejected": A_ROUND},
    {"chosen": A_ROUND, "rejected": A_ROUND, "score_chosen": 1.0},
    {
        "conversations": [{"from": "human", "value": "one"}],
        "chosen": {"from": "gpt", "value": "two"},
        "rejected": {"from": "gpt", "value": "no"},
    },
]


@pytest.mark.parametrize("record", FORMS, ids=lambda record: "-".join(record))
def test_forms_of_a_question_and_its_answer(record):
    ignored = set()
    line = json.dumps(record).encode()
    assert conversation_of_line(line, ignored) == ROUND
    assert ("rejected" in ignored) == ("rejected" in record)


def test_what_comes_before_an_answer():
    found = read({"instruction": "sum", "input": "1 2", "output": "3", "system": "be kind"})
    assert [one.content for one in found] == ["be kind", "sum\n1 2", "3"]
    found = read({"prompt": "c", "response": "d", "history": [["a", "b"]]})
    assert [(one.role[0], one.content) for one in found] == [*zip("uaua", "abcd", strict=True)]
    prompt = [*A_ROUND, {"role": "user", "content": "three"}]
    found = read({"prompt": prompt, "completion": [{"role": "assistant", "content": "four"}]})
    assert [one.is_trained for one in found if one.role == "assistant"] == [False, True]
