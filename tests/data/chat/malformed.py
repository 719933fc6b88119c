"""Files of conversations with one fault each, from a seed: where the fault lies, and what is good.

A fault in a turn, in the order of turns, in a record, in a line or in the whole file.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import zstandard

from tests.data.chat.made import EVERY_TOKEN, conversation

DRAWS = 7  # files of each kind
FORMS = [
    ("messages", "role", "content", {}),
    ("conversations", "role", "content", {}),
    ("conversations", "from", "value", {"user": "human", "assistant": "gpt"}),
]
NO_DICT = [None, 5, "x", [], ["user", "x"], True, 1.5, [{"role": "user", "content": "x"}]]
NO_TEXT = [None, 7, -1.5, True, {}, {"text": "x"}, 10**300, "", " ", "\n\t"]
NO_PARTS = [[], ["x"], [None], [["x"]], [{"type": "image_url", "image_url": "u"}]]
NO_PARTS += [[{"type": "text"}], [{"type": "text", "text": 5}], [{"text": "x"}]]
NO_ROLE = [None, 5, "boss", "USER", " user", "", [], {}, ["user"], True]
NO_LIST = [None, 5, "x", "", {}, True, [], 0.5, {"role": "user", "content": "x"}]
TOOLS = [("tool_calls", [{"id": "x"}]), ("function_call", {"name": "f"}), ("tool_call_id", 7)]


@dataclass(frozen=True)
class Faulty:
    """A file, the lines of its rejections, and its good lines in order.

    `turn` is that of the fault, None where it is not in a turn.
    """

    kind: str
    suffix: str
    content: bytes
    lines: tuple[int, ...]
    turn: int | None
    good: tuple[bytes, ...]


Turns = list[Any]
Names = tuple[str, str, str, dict[str, str]]  # key of the list, keys of a turn, names of roles


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def record(draw: random.Random, names: Names) -> tuple[dict[str, Any], Turns]:
    """A good record, and the list of its turns, which is part of it."""
    key, role, content, roles = names
    turns: Turns = [
        {role: roles.get(one.role, one.role), content: one.content}
        for one in conversation(draw, words=4)
    ]
    return {"id": draw.randrange(10**6), key: turns}, turns


def good_line(draw: random.Random) -> bytes:
    """A good conversation in any form."""
    if draw.random() < 0.2:
        return _line({"prompt": f"ask {draw.random()}", "completion": f"say {draw.random()}"})
    return _line(record(draw, draw.choice(FORMS))[0])


# A fault in a turn: gives the turn with the fault.
Spoil = Callable[[random.Random, dict[str, Any], Names], Any]


def _without(draw: random.Random, turn: dict[str, Any], names: Names) -> Any:
    gone = draw.choice(names[1:3])
    return {key: value for key, value in turn.items() if key != gone}


def _both_spellings(draw: random.Random, turn: dict[str, Any], names: Names) -> Any:
    other = ("from", "value") if names[1] == "role" else ("role", "content")
    return {**turn, draw.choice(other): draw.choice(["user", "x"])}


def _other_spelling(draw: random.Random, turn: dict[str, Any], names: Names) -> Any:
    other = ("from", "value") if names[1] == "role" else ("role", "content")
    return dict(zip(other, turn.values(), strict=True))


def _with_token(draw: random.Random, turn: dict[str, Any], names: Names) -> Any:
    text, at = turn[names[2]], draw.randint(0, len(turn[names[2]]))
    return {**turn, names[2]: f"{text[:at]}{draw.choice(EVERY_TOKEN)}{text[at:]}"}


def _no_text(draw: random.Random, turn: dict[str, Any], names: Names) -> Any:
    """A tool may answer nothing."""
    may_be_blank = turn[names[1]] == "tool"
    texts = [one for one in NO_TEXT if not (may_be_blank and (one is None or isinstance(one, str)))]
    return {**turn, names[2]: draw.choice(texts)}


IN_A_TURN: dict[str, Spoil] = {
    "a turn that is no object": lambda draw, turn, names: draw.choice(NO_DICT),
    "content that is no text": _no_text,
    "parts without text": lambda draw, turn, names: {**turn, names[2]: draw.choice(NO_PARTS)},
    "nested lists": lambda draw, turn, names: {**turn, names[2]: [[[draw.random()]]]},
    "no such role": lambda draw, turn, names: {**turn, names[1]: draw.choice(NO_ROLE)},
    "a key that is missing": _without,
    "keys of two forms in a turn": _both_spellings,
    "tool calls": lambda draw, turn, names: {**turn, **dict([draw.choice(TOOLS)])},
    "an unknown key": lambda draw, turn, names: {**turn, draw.choice(["weight", "loss"]): 0.5},
    "the name of a special token": _with_token,
    "a NUL": lambda draw, turn, names: {**turn, names[2]: f"a\0{draw.random()}"},
}


def _in_a_turn(draw: random.Random, spoil: Spoil) -> tuple[bytes, int | None]:
    names = draw.choice(FORMS)
    whole, turns = record(draw, names)
    at = draw.randrange(len(turns))
    turns[at] = spoil(draw, turns[at], names)
    return _line(whole), at + 1


def _forms_in_turn(draw: random.Random) -> tuple[bytes, int | None]:
    """The first turn decides the form, so the fault is in a later one."""
    names = draw.choice(FORMS[1:])
    whole, turns = record(draw, names)
    at = draw.randrange(1, len(turns))
    turns[at] = _other_spelling(draw, turns[at], names)
    return _line(whole), at + 1


def _spelled(draw: random.Random, text: str) -> tuple[bytes, int | None]:
    """A turn whose content is spelled as `text` in JSON."""
    names = draw.choice(FORMS)
    whole, turns = record(draw, names)
    at = draw.randrange(len(turns))
    turns[at] = {**turns[at], names[2]: "@@"}
    return _line(whole).replace(b'"@@"', text.encode()), at + 1


def _twice(draw: random.Random) -> tuple[bytes, int | None]:
    names = draw.choice(FORMS)
    whole, turns = record(draw, names)
    at, key = draw.randrange(len(turns)), draw.choice(names[1:3])
    turns[at] = {"@@": turns[at][key], **turns[at]}
    return _line(whole).replace(b'"@@"', json.dumps(key).encode()), at + 1


IN_A_TURN_AS_TEXT: dict[str, Callable[[random.Random], tuple[bytes, int | None]]] = {
    "turns of two forms": _forms_in_turn,
    "a lone surrogate": lambda draw: _spelled(draw, f'"a\\u{draw.randrange(0xD800, 0xE000):x}b"'),
    "a key twice in a turn": _twice,
}


def _ordered(draw: random.Random, roles: str, turn: int | None) -> tuple[bytes, int | None]:
    """Turns with roles by their first letters."""
    key, role, content, named = draw.choice(FORMS)
    full = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    names = [named.get(full[letter], full[letter]) for letter in roles]
    turns = [{role: name, content: f"x {draw.random()}"} for name in names]
    return _line({key: turns}), turn


ORDERS: dict[str, list[tuple[str, int | None]]] = {
    "system is not first": [("us", 2), ("uas", 3), ("ss", 2), ("sus", 3), ("uaus", 4)],
    "two users in a row": [("uua", 2), ("suua", 3), ("uauua", 4), ("uauu", 4), ("uu", 2)],
    "assistant first": [("a", 1), ("au", 1), ("aua", 1), ("sa", 2), ("saua", 2)],
    "tool out of place": [("t", 1), ("ut", 2), ("uatu", 4), ("st", 2), ("uautua", 4)],
    "no assistant": [("u", None), ("s", None), ("su", None)],
}


def _pair(draw: random.Random) -> dict[str, Any]:
    return {"prompt": f"ask {draw.random()}", "completion": f"say {draw.random()}"}


def _messages(draw: random.Random) -> dict[str, Any]:
    return record(draw, FORMS[0])[0]


def _two_keys(draw: random.Random) -> Any:
    one, other = _messages(draw), record(draw, FORMS[draw.choice([1, 2])])[0]
    return {**one, **draw.choice([other, _pair(draw)])}


def _no_list(draw: random.Random) -> Any:
    return {draw.choice(["messages", "conversations"]): draw.choice(NO_LIST), "n": draw.random()}


def _other_record(draw: random.Random) -> Any:
    number, text = draw.random(), f"x {draw.random()}"
    others: list[Any] = [{"text": text}, {"chosen": [], "n": number}, {"n": number}]
    others += [{"instruction": text, "result": text}, {"Messages": [], "n": number}]
    return draw.choice(others)


IN_A_RECORD: dict[str, Callable[[random.Random], Any]] = {
    "no list of turns": _no_list,
    "another record": _other_record,
    "no object": lambda draw: draw.choice([[_pair(draw)], draw.random(), f"x{draw.random()}"]),
    "two conversations": _two_keys,
    "a prompt alone": lambda draw: {"prompt": f"ask {draw.random()}", "n": 1},
    "a completion alone": lambda draw: {"completion": f"say {draw.random()}", "n": 1},
    "a persona beside the turns": lambda draw: {
        **_messages(draw),
        "persona": f"be {draw.random()}",
    },
    "tools beside the turns": lambda draw: {**_messages(draw), "tools": [{"name": "f"}]},
}


def _half_a_pair(draw: random.Random) -> tuple[bytes, int | None]:
    at = draw.randrange(2)
    wrong = draw.choice([*NO_TEXT, [{"role": "user"}], ["x"]])
    return _line({**_pair(draw), ("prompt", "completion")[at]: wrong}), at + 1


def _broken(line: bytes, draw: random.Random) -> bytes:
    """A line with an invalid byte within a text."""
    at = line.index(b'"', line.index(b": ")) + 1 if b": " in line else 1
    return line[:at] + draw.choice([b"\xff", b"\x80", b"\xed\xa0\x80", b"\xc3("]) + line[at:]


def _end(line: bytes, more: str) -> bytes:
    """A line with another field in front of its last brace."""
    return line[:-1] + more.encode() + b"}"


IN_A_LINE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut off": lambda draw, line: line[: draw.randrange(1, len(line))],
    "no JSON at all": lambda draw, line: b"user: hello %d" % draw.randrange(10**6),
    "quotes of Python": lambda draw, line: repr(json.loads(line)).encode(),
    "a comma too many": lambda draw, line: line[:-1] + b",}",
    "two records in a line": lambda draw, line: line + b" " + line,
    "a brace too many": lambda draw, line: line + b"}",
    "no number": lambda draw, line: _end(line, f', "tools": [{draw.choice(["NaN", "-Infinity"])}]'),
    "a huge integer": lambda draw, line: _end(line, f', "n": {"9" * draw.randrange(4301, 6000)}'),
    "deep nesting": lambda draw, line: _end(line, f', "n": {"[" * 200}{"]" * 200}'),
    "bad UTF-8": lambda draw, line: _broken(line, draw),
    "a NUL byte": lambda draw, line: line[:3] + b"\0" + line[3:],
    "a control character": lambda draw, line: _end(line, ', "n": "\x0b"'),
    "a blank line": lambda draw, line: draw.choice([b"", b" ", b"\t", b"\r", b" \t \r"]),
    "a BOM in the middle": lambda draw, line: b"\xef\xbb\xbf" + line,
    "a key twice": lambda draw, line: _end(
        line, ', "messages": [], "messages": []' if b"prompt" not in line else ', "prompt": "x"'
    ),
}


def _faulty_lines(draw: random.Random) -> Iterator[tuple[str, bytes, int | None]]:
    """A line of every kind, with the turn of its fault."""
    for kind, spoil in IN_A_TURN.items():
        yield kind, *_in_a_turn(draw, spoil)
    for kind, make in IN_A_TURN_AS_TEXT.items():
        yield kind, *make(draw)
    for kind, orders in ORDERS.items():
        yield kind, *_ordered(draw, *draw.choice(orders))
    for kind, make in IN_A_RECORD.items():
        yield kind, _line(make(draw)), None
    yield "half a pair", *_half_a_pair(draw)
    for kind, spoil in IN_A_LINE.items():
        yield kind, spoil(draw, good_line(draw)), None


def _in_a_file(draw: random.Random, good: list[bytes]) -> Iterator[Faulty]:
    """A file of every kind whose fault is that of the whole."""
    content = b"".join(line + b"\n" for line in good)
    blank = draw.randint(1, 9)

    def faulty(kind: str, suffix: str, given: bytes, lines: int = 1, kept: int = 0) -> Faulty:
        first = kept + 1
        return Faulty(kind, suffix, given, (*range(first, first + lines),), None, (*good[:kept],))

    yield Faulty("a BOM", ".jsonl", b"\xef\xbb\xbf" + content, (1,), None, (*good[1:],))
    yield faulty("an empty file", draw.choice([".jsonl", ".jsonl.gz"]), b"")
    yield faulty("an empty gzip", ".jsonl.gz", gzip.compress(b"", mtime=draw.randrange(9**9)))
    yield faulty("blank lines only", ".jsonl", b"\n" * blank, lines=blank)
    yield faulty("an array of all", ".jsonl", b"[" + b", ".join(good) + b"]\n")
    yield faulty("no gzip", ".jsonl.gz", content)
    yield faulty("no zstd", ".jsonl.zst", draw.randbytes(200))
    packed = gzip.compress(content, mtime=0)
    for kind, at in (("a cut gzip", draw.randrange(30, len(packed))), ("no checksum", -4)):
        part = zlib.decompressobj(31).decompress(packed[:at])
        yield faulty(kind, ".jsonl.gz", packed[:at], kept=part.count(b"\n"))
    wrong = packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:]
    yield faulty("a gzip with another checksum", ".jsonl.gz", wrong)
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    cut = packed[: draw.randrange(5, len(packed) - 8)]
    yield faulty("a cut zstd", ".jsonl.zst", cut)
    at = draw.randrange(len(packed) // 2, len(packed))
    yield faulty("a damaged zstd", ".jsonl.zst", packed[:at] + b"\xff" + packed[at:])


def faulty_files(seed: int, draws: int = DRAWS) -> list[Faulty]:
    """`draws` files of every kind; a faulty line lies anywhere among good ones."""
    draw, found = random.Random(seed), []
    for _ in range(draws):
        for kind, line, turn in _faulty_lines(draw):
            lines = [good_line(draw) for _ in range(draw.randint(1, 6))]
            at, end = draw.randint(0, len(lines)), draw.choice([b"\n", b"\n", b"\r\n"])
            content = b"".join(one + end for one in [*lines[:at], line, *lines[at:]])
            found.append(Faulty(kind, ".jsonl", content, (at + 1,), turn, (*lines,)))
        found += _in_a_file(draw, [good_line(draw) for _ in range(draw.randint(2, 6))])
    return found
