"""Thoughts, calls and tools by templates as of known models: ids and masks of transformers."""

import json
import random
from typing import Any

import pytest

from minimind.data.chat.conversations import conversation_of_line
from minimind.data.chat.template import DEFAULT_TEMPLATE, ChatTemplate, TrainOn, readable
from minimind.data.text.documents import DocumentError
from minimind.errors import UsageError
from tests.data.chat.made import SIMPLE, conversation, encode_all, text
from tests.data.chat.templates import MARKED, NO_THOUGHTS, NO_TOOLS, ONE_CALL, PLAIN

SEED = 46
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"at": {}}}},
}


def call(draw):
    arguments = draw.choice(
        [{"at": text(draw, 3)}, {"n": draw.randint(0, 9)}, {}, {"a": {"b": [text(draw, 2), None]}}]
    )
    plain = {"name": draw.choice(["find", "tell"]), "arguments": arguments}
    return draw.choice([plain, {"type": "function", "function": plain}])


def answer(draw, name, calls):
    """An assistant turn; thoughts stand beside the content or in it."""
    turn: dict[str, Any] = {"role": "assistant", "content": text(draw, 9)}
    if calls:
        turn["tool_calls"] = [call(draw) for _ in range(1 if name in ONE_CALL else calls)]
        if name in ONE_CALL or name == "mistral" or draw.random() < 0.3:
            turn["content"] = ""
    if name not in NO_THOUGHTS and draw.random() < 0.5:
        thoughts = text(draw, 5)
        if turn["content"] and draw.random() < 0.5:
            turn["content"] = f"<think>\n{thoughts}\n</think>\n\n{turn['content']}"
        else:
            turn["reasoning_content"] = thoughts
    return turn


def record(draw, name):
    """One to four rounds with or without calls, in OpenAI's form."""
    turns = [{"role": "system", "content": text(draw, 9)}] if draw.random() < 0.3 else []
    with_tools = name not in NO_TOOLS and draw.random() < 0.6
    for _ in range(draw.randint(1, 4)):
        turns.append({"role": "user", "content": text(draw, 9)})
        while with_tools and draw.random() < 0.4:
            turns.append(answer(draw, name, draw.randint(1, 2)))
            for _ in turns[-1]["tool_calls"]:
                turns.append({"role": "tool", "content": text(draw, 9)})
        turns.append(answer(draw, name, 0))
    return {"messages": turns, **({"tools": [TOOL]} if with_tools else {})}


def read(given):
    return conversation_of_line(json.dumps(given).encode())


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PLAIN)
def test_ids_and_masks_are_those_of_transformers(pair, name, request):
    ours, theirs = pair
    template, draw = ChatTemplate(PLAIN[name], ours), random.Random(f"{SEED} {name}")
    number = 500 if request.config.getoption("--long") else 40
    seen = 0
    for _ in range(number):
        given = record(draw, name)
        expected = theirs.apply_chat_template(
            given["messages"],
            tools=given.get("tools"),
            chat_template=MARKED[name],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        found = template.encode(read(given))
        assert found[0].tolist() == expected["input_ids"], given
        masks = [bool(one) for one in expected["assistant_masks"]]
        if name == "glm":  # of a last character, transformers marks the first token alone
            masks = ChatTemplate(MARKED[name], ours).encode(read(given))[1].tolist()
        assert found[1].tolist() == masks, given
        seen += "tool_calls" in str(given)
    assert seen or name in NO_TOOLS


KEYS = ("role", "content", "reasoning_content", "tools", "tool_calls")  # as of MiniMind's sft_t2t


def sft_line(draw, number):
    """A conversation whose turns have all five keys; the number says which have a value."""
    with_system, with_tools, with_calls, with_thoughts, with_content = (
        bool(number & 2**bit) for bit in range(5)
    )

    def turn(**given):
        return {**dict.fromkeys(KEYS, ""), **given}

    def said():
        return turn(
            role="assistant",
            content=text(draw, 9),
            reasoning_content=text(draw, 5) if with_thoughts else "",
        )

    turns = []
    if with_system or with_tools:
        tools = json.dumps([TOOL], ensure_ascii=False) if with_tools else ""
        turns.append(turn(role="system", content=text(draw, 5) if with_system else "", tools=tools))
    for _ in range(draw.randint(1, 3)):
        turns.append(turn(role="user", content=text(draw, 9)))
        if with_calls:
            calls = [{"name": "find", "arguments": {"at": text(draw, 3)}}]
            asking = said() | {"tool_calls": json.dumps(calls, ensure_ascii=False)}
            turns.append(asking if with_content else asking | {"content": ""})
            turns.append(turn(role="tool", content=text(draw, 9)))
        turns += [said() for _ in range(draw.choice([1, 1, 2]))]
    return {"conversations": turns}


@pytest.mark.parametrize(
    ("source", "marked"),
    [(PLAIN["minimind3"], MARKED["minimind3"]), (DEFAULT_TEMPLATE, DEFAULT_TEMPLATE)],
    ids=["its own template", "the default"],
)
def test_every_line_of_minimind_s_form_is_read(pair, request, source, marked):
    ours, theirs = pair
    template, draw = ChatTemplate(source, ours), random.Random(SEED)
    for number in range(1000 if request.config.getoption("--long") else 96):
        given = sft_line(draw, number)
        turns, tools = [dict(turn) for turn in given["conversations"]], None
        for turn in turns:  # as its SFTDataset
            for key in ("tools", "tool_calls"):
                value = turn.pop(key)
                if value and key == "tools":
                    tools = json.loads(value)
                elif value:
                    turn[key] = json.loads(value)
        expected = theirs.apply_chat_template(
            turns,
            tools=tools,
            chat_template=marked,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, targets = template.encode(read(given))
        assert ids.tolist() == expected["input_ids"], given
        assert targets.tolist() == [bool(one) for one in expected["assistant_masks"]], given


def test_variables_reach_the_template(pair):
    ours, theirs = pair
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    for name, values in (("qwen3", "enable_thinking"), ("minimind3", "open_thinking")):
        for value in (False, True):
            variables = {values: value}
            given = {"messages": chat, "chat_template_kwargs": variables}
            ids, targets = ChatTemplate(PLAIN[name], ours).encode(read(given))
            of_run = ChatTemplate(PLAIN[name], ours, variables=variables)
            assert of_run.encode(read({"messages": chat}))[0].tolist() == ids.tolist()
            expected = theirs.apply_chat_template(
                chat, chat_template=PLAIN[name], return_dict=True, **variables
            )
            assert ids.tolist() == expected["input_ids"]
            prompt = theirs.apply_chat_template(
                chat[:1],
                chat_template=PLAIN[name],
                add_generation_prompt=True,
                return_dict=True,
                **variables,
            )
            assert of_run.prompt(read({"messages": chat})[:1]) == prompt["input_ids"]
            if ids[: len(prompt["input_ids"])].tolist() == prompt["input_ids"]:
                assert int(targets.argmax()) == len(prompt["input_ids"])


CALL = {"name": "find", "arguments": {"at": "x"}}
LEFT_OUT = [
    ("phi3", {"reasoning_content": "hm"}, {}, 'turn 2: has "reasoning_content", which the chat'),
    ("phi3", {"content": "<think>hm</think>two"}, {}, None),  # it writes the content as it is
    ("no_calls", {"tool_calls": [CALL]}, {"tools": [TOOL]}, 'turn 2: has "tool_calls", which the'),
    ("drops_thoughts", {"content": "<think>hm</think>two"}, {}, "turn 2: has <think>, which the c"),
    ("drops_thoughts", {}, {}, None),
    (
        "phi3",
        {"tool_calls": [CALL]},
        {},
        'turn 2: has "tool_calls", which the chat template leaves',
    ),
    ("phi3", {}, {"tools": [TOOL]}, 'has "tools", which the chat template leaves out; write'),
    ("qwen3", {"thinking": "hm"}, {}, 'turn 2: has "thinking", which the chat template leaves'),
    ("qwen3", {}, {"chat_template_kwargs": {"tone": "kind"}}, 'has "tone" beside the turns, which'),
    ("qwen3", {}, {"chat_template_kwargs": {"enable_thinking": True}}, None),
    ("qwen3", {"content": "<|im_end|>"}, {}, 'turn 2: contains "<|im_end|>", a special token'),
    (
        "qwen3",
        {"tool_calls": [CALL | {"arguments": {"a": "<|im_end|>"}}]},
        {},
        'turn 2: contains "',
    ),
    ("qwen3", {}, {"tools": [{"name": "<|im_end|>"}]}, 'contains "<|im_end|>", a special token'),
]


TEMPLATES = {
    **PLAIN,
    "no_calls": PLAIN["hermes"].replace("m.tool_calls or []", "[]"),
    "drops_thoughts": PLAIN["phi3"].replace(
        "m.content + '<|end|>' }}{{", "m.content.split('</think>')[-1] + '<|end|>' }}{{"
    ),
}


@pytest.mark.parametrize(("name", "answered", "beside", "words"), LEFT_OUT)
def test_what_a_template_does_not_write_is_refused(tokenizer, name, answered, beside, words):
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"} | answered]
    template = ChatTemplate(TEMPLATES[name], tokenizer)
    if words is None:
        assert template.encode(read({"messages": turns, **beside}))[1].any()
        return
    with pytest.raises(DocumentError) as caught:
        template.encode(read({"messages": turns, **beside}))
    assert f"{caught.value.reason}; {caught.value.remedy}".startswith(words)
    if "leaves out" in caught.value.reason:  # the advice writes it
        advised = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
        is_advised = caught.value.remedy.endswith("(--chat_template thoughts_and_tools)")
        assert is_advised != ("chat_template_kwargs" in beside)
        if is_advised:
            assert advised.encode(read({"messages": turns, **beside}))[1].any()


def trained(tokenizer, source, given, train_on: TrainOn = "assistant"):
    ids, targets = ChatTemplate(source, tokenizer).encode(read(given), train_on)
    return [part.split("]]")[0] for part in readable(tokenizer, ids, targets).split("[[")[1:]]


def test_turns_without_a_weight_are_not_trained_on(tokenizer):
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    first = {"messages": [chat[0], {**chat[1], "weight": 0}, chat[0], {**chat[1], "content": "3"}]}
    last = {"messages": [*chat, chat[0], {**chat[1], "content": "3", "train": False}]}
    for source in (PLAIN["phi3"], MARKED["phi3"]):
        assert trained(tokenizer, source, first) == ["3<|end|>"]
        assert trained(tokenizer, source, last) == ["two<|end|>"]
        whole = "".join(trained(tokenizer, source, first, "all"))
        assert "3<|end|>" in whole
        assert "two" not in whole
        with pytest.raises(DocumentError, match="its last answer has a weight of 0"):
            trained(tokenizer, source, last, "last")


def test_what_the_user_says_may_decide(tokenizer):
    source = PLAIN["phi3"].replace(
        "{{ '<|assistant|>\\n' }}",
        "{% if '/quick' in messages[0].content %}{{ '<|assistant|>quick\\n' }}"
        "{% else %}{{ '<|assistant|>\\n' }}{% endif %}",
    )
    assert source != PLAIN["phi3"]
    for said in ("one", "one /quick"):
        chat = [{"role": "user", "content": said}, {"role": "assistant", "content": "two"}]
        assert trained(tokenizer, source, {"messages": chat}) == ["two<|end|>"]


def test_the_default_template_writes_plain_conversations_as_a_simple_one(pair):
    ours, _ = pair
    default, simple = (ChatTemplate(one, ours) for one in (DEFAULT_TEMPLATE, SIMPLE))
    draw = random.Random(SEED)
    made = [conversation(draw) for _ in range(300)]
    for messages in made:
        for is_asked in (False, True):
            assert default.render(messages, is_asked) == simple.render(messages, is_asked)
    for train_on in ("assistant", "last", "all"):
        encoded = (encode_all(one, made, train_on) for one in (default, simple))
        for found, expected in zip(*encoded, strict=True):
            assert [one.tolist() for one in found] == [one.tolist() for one in expected]


ASKED, TOLD = {"role": "user", "content": "q"}, {"role": "tool", "content": "t"}
ONE_OF_TEXT = {"name": "find", "arguments": '{"at": "x"}'}
WRITTEN = '<tool_call>{"name": "find", "arguments": {"at": "x"}}</tool_call>'
WITH_TAGS = [  # an answer, and what is trained on
    ({"content": "a"}, "a"),
    ({"content": "a", "reasoning_content": ""}, "a"),
    ({"content": "a", "reasoning_content": None, "tool_calls": None, "tools": ""}, "a"),
    ({"content": "a", "tool_calls": "[]"}, "a"),
    ({"content": "a", "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\na"),
    ({"content": "a", "reasoning": "hm"}, "<think>\nhm\n</think>\n\na"),
    ({"content": "a", "thinking": "hm", "reasoning_content": ""}, "<think>\nhm\n</think>\n\na"),
    ({"content": "a", "reasoning": "hm", "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\na"),
    ({"content": "<think>\nhm\n</think>\n\na"}, "<think>\nhm\n</think>\n\na"),
    ({"content": "", "reasoning_content": "hm"}, "<think>\nhm\n</think>\n\n"),
    ({"content": None, "tool_calls": [CALL]}, WRITTEN),
    ({"content": "", "tool_calls": [CALL, CALL]}, WRITTEN * 2),
    ({"tool_calls": [{"type": "function", "id": "1", "function": CALL}]}, WRITTEN),
    ({"tool_calls": json.dumps([CALL])}, WRITTEN),
    ({"tool_calls": json.dumps(CALL)}, WRITTEN),
    ({"tool_calls": [ONE_OF_TEXT]}, WRITTEN),
    ({"tool_calls": [{"type": "function", "function": ONE_OF_TEXT}]}, WRITTEN),
    ({"tool_calls": [{"name": "find", "arguments": ""}]}, WRITTEN.replace('"at": "x"', "")),
    ({"tool_calls": [{"name": "find"}]}, '<tool_call>{"name": "find"}</tool_call>'),
    (
        {"content": "a", "reasoning_content": "hm", "tool_calls": [CALL]},
        f"<think>\nhm\n</think>\n\na{WRITTEN}",
    ),
]


@pytest.mark.parametrize(("answered", "written"), WITH_TAGS)
def test_what_the_default_template_trains_on(pair, answered, written):
    ours, theirs = pair
    turn = {"role": "assistant", **answered}
    following = [TOLD, {"role": "assistant", "content": "b"}] if "call" in written else []
    turns = [ASKED, turn, *following, ASKED, {"role": "assistant", "content": "c"}]
    found = ChatTemplate(DEFAULT_TEMPLATE, ours).encode(read({"conversations": turns}))
    expected = [f"{written}<|end|>", *(["b<|end|>"] if following else []), "c<|end|>"]
    assert trained(ours, DEFAULT_TEMPLATE, {"conversations": turns}) == expected
    if isinstance(turn.get("tool_calls"), str):  # as its SFTDataset reads them
        calls = json.loads(turn["tool_calls"])
        turn["tool_calls"] = calls if isinstance(calls, list) else [calls]
    theirs.chat_template = DEFAULT_TEMPLATE
    of_theirs = theirs.apply_chat_template(
        turns, return_dict=True, return_assistant_tokens_mask=True
    )
    assert found[0].tolist() == of_theirs["input_ids"]
    assert found[1].tolist() == [bool(one) for one in of_theirs["assistant_masks"]]


@pytest.mark.parametrize("told", ["", "be brief"])
@pytest.mark.parametrize("where", ["beside", "text beside", "turn", "turn of text"])
def test_where_tools_stand_for_the_default_template(tokenizer, told, where):
    tools = json.dumps([TOOL], ensure_ascii=False) if "text" in where else [TOOL]
    in_turn = {"tools": tools} if where.startswith("turn") else {}
    system = [{"role": "system", "content": told, **in_turn}] if told or in_turn else []
    given = {"messages": [*system, ASKED, {"role": "assistant", "content": "a"}]}
    given |= {} if in_turn else {"tools": tools}
    template = ChatTemplate(DEFAULT_TEMPLATE, tokenizer)
    head, _, rest = template.render(read(given)).partition("Call a tool as <tool_call>")
    assert head == "<|system|>" + (f"{told}\n\n" if told else "")
    listed = f"The tools are:\n{json.dumps(TOOL)}<|end|><|user|>q<|end|><|assistant|>a<|end|>"
    assert rest.endswith(listed)
    assert trained(tokenizer, DEFAULT_TEMPLATE, given) == ["a<|end|>"]


def test_a_call_is_trained_on_to_its_end_or_the_end_of_the_text(tokenizer):
    user, tool = {"role": "user", "content": "one"}, {"role": "tool", "content": "t"}
    asked = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "f", "arguments": {"n": 5}}],
    }
    for name, whole in (
        ("glm", '\n<think></think>\n<tool_call>f\n{"n": 5}\n</tool_call>'),
        ("llama31", '{"name": "f", "parameters": {"n": 5}}<|eot_id|>'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 5}}]</s>'),
    ):
        end = {"user": "<|user|>", "tool": "<|tool|>"} if name == "glm" else {}
        for following in ([], [user], [tool]):
            found = trained(tokenizer, PLAIN[name], {"messages": [user, asked, *following]})
            assert found == [whole + (end.get(following[0]["role"], "") if following else "")]


def test_a_template_may_put_digits_between_marks(tokenizer):
    for digits in ("'999'", "'9' * 5000"):
        source = PLAIN["phi3"] + (
            "{% if messages | length == 3 %}{% set c = messages[1].content[0] %}"
            f"{{{{ c ~ {digits} ~ c }}}}{{% endif %}}"
        )
        chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
        given = {"messages": [chat[0], {**chat[1], "reasoning_content": ""}, chat[0]]}
        with pytest.raises(DocumentError, match="the chat template changes what it says"):
            ChatTemplate(source, tokenizer).encode(read(given))


def test_an_error_of_a_template_with_calls_tells_the_form_it_may_read(tokenizer):
    source = PLAIN["hermes"].replace("call.function or call", "call.function")
    assert source != PLAIN["hermes"]
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "tool_calls": [CALL]}]
    with pytest.raises(
        UsageError, match=r"cannot be rendered .*; it may read calls of another form"
    ):
        ChatTemplate(source, tokenizer).encode(read({"messages": chat}))
    wrapped = {"type": "function", "function": CALL}
    chat[1] = {"role": "assistant", "tool_calls": [wrapped]}
    assert trained(tokenizer, source, {"messages": chat})


def test_tools_stay_where_a_template_reads_them(tokenizer):
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{% if m.tools %}{{ '(' + m.tools + ')' }}{% endif %}{{ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    system = {"role": "system", "content": "s", "tools": json.dumps([TOOL])}
    chat = [system, {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    text = ChatTemplate(source, tokenizer).render(read({"messages": chat}))
    assert text.startswith(f"<|system|>s({system['tools']})<|end|>")
    assert trained(tokenizer, source, {"messages": chat}) == ["two<|end|>"]
