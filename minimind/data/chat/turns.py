"""Find the turns of the assistant in the text of a conversation.

A template may leave out earlier thoughts, close the whole, or ask for an answer within a thought.
So the beginning of a conversation need not be that of its text. The conversation is rendered once
more with marks in place of what is said: between the marks both texts are equal, and whatever is
not marked is written by the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

from minimind.data.chat.conversations import (
    ASSISTANT,
    CALL_ID,
    CALLS,
    ROLES,
    THOUGHTS,
    TOOL,
    USER,
    Conversation,
    Message,
    canonical_text,
)
from minimind.data.chat.sandbox import Asked, Rendered, Span
from minimind.data.text.documents import DocumentError
from minimind.errors import UsageError

Beginnings = Callable[[Conversation, Sequence[Asked]], Iterator[Rendered]]
# A template may look for one of these tags in what is said, and cut the text there.
TAG = re.compile(
    r"(</?(?:think(?:ing)?|thoughts?|reasoning|answer|tool_calls?|tool_response|function_call)>)"
)
SKIPPED = re.compile(rf"\s+|{TAG.pattern}")  # before the end of a turn
WORDS = re.compile(r"(\s|<[^\s<>]+>|\[[^\s\[\]]+\])")  # a text is split into words and tags
THOUGHT = re.compile(r"<[^<>|\s/]*think[^<>|\s]*>|\[THINK\]")  # a prompt may end in one
NOT_SAID = {"id", "type", "name"}  # keys of a call that a template may decide by
PRIVATE = range(0xF0000, 0xFFFFE)  # code points without a meaning
ROUNDS = Conversation(
    [Message(USER, "a b"), Message(ASSISTANT, "c d"), Message(USER, "e f"), Message(ASSISTANT, "g")]
)
# Templates read a call itself or its "function", and arguments as an object or as JSON.
CALL_FORMS = tuple(
    (is_wrapped, arguments)
    for is_wrapped in (True, False)
    for arguments in ({"x": "c d"}, '{"x": "c d"}')
)


def called_by(form: tuple[bool, Any]) -> Conversation:
    """A conversation with one call in a form."""
    is_wrapped, arguments = form
    call = {"name": "f", "arguments": arguments}
    wrapped = {"id": "call00001", "type": "function", "function": call} if is_wrapped else call
    asking = Message(ASSISTANT, "", more={CALLS: [wrapped]})
    answers = Message(TOOL, "e f", "f", {CALL_ID: "call00001"})
    return Conversation([Message(USER, "a b"), asking, answers, Message(ASSISTANT, "g")])


def forms_of(said: str) -> tuple[str, ...]:
    """A text as it is, and within JSON."""
    return said, *(json.dumps(said, ensure_ascii=ascii)[1:-1] for ascii in (False, True))


def common_start(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """What two texts, or lists of texts, have in common at their start."""
    pairs = zip(one, other, strict=False)
    return [here for here, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


class Unbounded(UsageError):
    """A template takes too much time or memory for a conversation."""


class Unmarked(Exception):
    """The mark of a turn is missing from the text; `args[0]` is the turn."""


class Marks:
    """A conversation with marks in place of what is said by some roles."""

    def __init__(self, conversation: Conversation, roles: Sequence[str]) -> None:
        text = canonical_text(conversation)
        self._mark = next(mark for mark in map(chr, PRIVATE) if mark not in text)
        self.said: list[tuple[int, str]] = []  # turn and text of each mark
        self.conversation = conversation.with_turns(
            message if message.role not in roles else self._marked(at, message)
            for at, message in enumerate(conversation)
        )

    def _marked(self, at: int, message: Message) -> Message:
        def put(text: str) -> str:
            pieces = TAG.split(text)
            for number in range(0, len(pieces), 2):
                if core := pieces[number].strip():
                    before, _, after = pieces[number].partition(core)
                    pieces[number] = f"{before}{self._mark}{len(self.said)}{self._mark}{after}"
                    self.said.append((at, core))
            return "".join(pieces)

        def within(value: Any, kept: set[str]) -> Any:
            if isinstance(value, dict):
                return {
                    key: one if key in kept else within(one, kept) for key, one in value.items()
                }
            if isinstance(value, list):
                return [within(one, kept) for one in value]
            return put(value) if isinstance(value, str) else value

        more = {key: put(text) if key in THOUGHTS else text for key, text in message.more.items()}
        count = len(self.said)
        content = put(message.content)
        if CALLS in more:
            calls, more[CALLS] = more[CALLS], within(more[CALLS], NOT_SAID)
            if len(self.said) == count:  # calls without texts are found by their names
                more[CALLS] = within(calls, NOT_SAID - {"name"})
        return replace(message, content=content, more=more)

    def places(self, text: str, marked: str) -> list[tuple[int, int, int]]:
        """(turn, begin, end) of each mark in `text`, whose marked form is given.

        The first occurrence of a mark counts. Raise Unmarked.
        """
        first, *pieces = re.split(f"{self._mark}(\\d{{1,9}}){self._mark}", marked)
        if not text.startswith(first):
            raise Unmarked(self.said[int(pieces[0])][0] if pieces else 0)
        at, found = len(first), {}
        for number, literal in zip(map(int, pieces[::2]), pieces[1::2], strict=True):
            if number >= len(self.said):  # the template puts digits between marks
                raise Unmarked(0)
            turn, said = self.said[number]
            written = next(
                (one for one in forms_of(said) if text.startswith(one + literal, at)), None
            )
            if written is None:
                raise Unmarked(turn)
            found.setdefault(number, (turn, at, at + len(written)))
            at += len(written) + len(literal)
        if at != len(text):
            raise Unmarked(self.said[-1][0])
        return sorted(found.values(), key=lambda place: place[1])


@dataclass(frozen=True, eq=False)
class Turns:
    """Finds the turns of the assistant in what a template writes.

    `_special` matches special tokens, in a group; `_name` is what messages call the template. An
    answer without one at its end may end in a text if `_may_end_in_text`.
    """

    _beginnings: Beginnings
    _special: re.Pattern[str]
    _name: str
    _may_end_in_text: bool

    def text_and_spans(
        self, conversation: Conversation, sought: Sequence[int]
    ) -> tuple[str, list[Span]]:
        """The text, and where the turns are that are sought, without those that it leaves out."""
        asked = [(len(conversation), False), *((turn, True) for turn in sought)]
        rendered = (text for text, _ in self._beginnings(conversation, asked))
        text = next(rendered)
        spans = self._spans(conversation, text, sought, rendered)
        return text, [span for span in spans if span is not None]

    def _spans(
        self, conversation: Conversation, text: str, sought: Sequence[int], prompts: Iterator[str]
    ) -> Iterator[Span | None]:
        """Yield where each of the turns is: what the assistant writes, with the end of the turn.

        None for one that the template leaves out. Raise DocumentError for one whose text it
        changes.
        """
        places = None
        for turn, prompt in zip(sought, prompts, strict=True):
            if span := self._of_plain_answer(conversation[turn], text, prompt):
                yield span
                continue
            places = self._places(conversation, text) if places is None else places
            own = [(begin, end) for at, begin, end in places if at == turn]
            if not own:
                if (said := conversation[turn].content.strip()) and said in text:
                    raise self._refusal(turn, "has nothing but tags")
                yield None
                continue
            begin, end = own[0][0], own[-1][1]
            others = [place[1:] for place in places if place[0] != turn]
            if any(begin < other < end for other, _ in others):
                raise self._refusal(turn, "mixes it with another turn")
            floor = max((past for _, past in others if past <= begin), default=0)
            ceiling = min((other for other, _ in others if other >= end), default=len(text))
            first = self._begin(conversation, turn, prompt, text, floor, begin)
            if CALLS not in conversation[turn].more:
                yield first, self._end_of_answer(text, end)
                continue
            # The brackets of calls come before their end.
            ways = ((text.find(way, end, ceiling), len(way)) for way in self._ends_of_turns)
            if ends := [at + length for at, length in ways if at >= 0]:
                yield first, min(ends)
            elif turn + 1 == len(conversation):  # the next turn would have ended it
                yield first, len(text[:ceiling].rstrip())
            else:
                raise self._refusal(turn, "ends its calls in no known way")

    def _render(self, conversation: Conversation) -> str:
        ((text, _),) = self._beginnings(conversation, [(len(conversation), False)])
        return text

    def _of_plain_answer(self, message: Message, text: str, prompt: str) -> Span | None:
        """Where an answer is whose content alone follows its prompt, with the end of the turn."""
        if message.more or not text.startswith(prompt):
            return None
        begin = len(prompt)
        said = message.content
        if not text.startswith(said, begin):  # templates strip it, or put a space before it
            said = said.strip()
            while text[begin : begin + 1].isspace():
                begin += 1
        if not text.startswith(said, begin):
            return None
        end = self._end_of_answer(text, begin + len(said))
        return (len(prompt), end) if end > begin + len(said) else None

    def _places(self, conversation: Conversation, text: str) -> list[tuple[int, int, int]]:
        # A template may decide by what the user says ("/no_think"); then that is left as it is.
        for roles in (ROLES, (ASSISTANT, TOOL)):
            marks = Marks(conversation, roles)
            try:
                return marks.places(text, self._render(marks.conversation))
            except Unmarked as error:
                turn = error.args[0]
            except DocumentError:  # the template refuses the marks
                turn = next(at for at, one in enumerate(conversation) if one.role == ASSISTANT)
        raise self._refusal(turn, "changes what it says")

    def _begin(
        self, conversation: Conversation, turn: int, prompt: str, text: str, floor: int, said: int
    ) -> int:
        """Where the prompt for a turn ends whose text is at `said`, after that of others."""
        before = conversation.with_turns(conversation[:turn])
        if floor <= len(prompt) <= said and text.startswith(prompt):
            return len(prompt)
        bare = self._render(before) if before else ""
        asked = prompt[len(common_start(prompt, bare)) :]
        if not asked.strip() and before:  # as of [INST]: what follows the last turn asks
            ends = [prompt.rpartition(one)[2] for one in forms_of(before[-1].content.strip())]
            asked = min(ends, key=len)
        thought = THOUGHT.search(asked)
        for header in (asked, asked[: thought.start()] if thought else ""):
            at = text.rfind(header, floor, said) if header.strip() else -1
            if at >= 0:
                return at + len(header)
        raise self._refusal(turn, "writes other text before it than where it asks for an answer")

    def _end_of_answer(self, text: str, said: int) -> int:
        """Where an answer ends whose text ends at `said`, but for tags; `said` without an end."""
        at = said
        while not (end := next((end for end in self._ends if text.startswith(end, at)), "")):
            skipped = SKIPPED.match(text, at)
            if skipped is None:
                return said
            at = skipped.end()
        return at + len(end)

    @property
    def ends(self) -> list[str]:
        """Special tokens that end turns of the assistant."""
        found = map(self._special.search, self._ends_of_turns)
        return [special[0] for special in found if special]

    @property
    def text_end(self) -> str:
        """Text without a special token that ends every answer, with the blanks before it.

        Empty if there is none.
        """
        closing = "".join(self._ends)
        if not closing or self._special.search(closing):
            return ""
        text = self._render(ROUNDS)
        end = max(end for _, _, end in self._places(ROUNDS, text))
        return text[end : text.index(closing, end)] + closing

    @cached_property
    def _ends_of_turns(self) -> list[str]:
        """Texts that end answers, and the special token that ends a turn with calls."""
        for called in map(called_by, CALL_FORMS):
            try:
                text = self._render(called)
                places = self._places(called, text)
                break
            except Unbounded:
                raise
            except (DocumentError, UsageError):  # the template reads another form
                continue
        else:
            return self._ends
        begin = max((end for turn, _, end in places if turn == 1), default=len(text))
        after = text[begin : min((at for turn, at, _ in places if turn == 2), default=len(text))]
        if any(end in after for end in self._ends):
            return self._ends
        specials = (match[0] for match in self._special.finditer(after))
        return [*self._ends, *[name for name in specials if not TAG.fullmatch(name)][:1]]

    @cached_property
    def _ends(self) -> list[str]:
        """The text that ends every answer, or else special tokens, each of which ends some.

        An answer may be ended in another way if it is the last, or by what follows it alone.
        """
        text = self._render(ROUNDS)
        places = self._places(ROUNDS, text)
        ends = {turn: end for turn, _, end in places}
        if len(ends) < len(ROUNDS):  # it leaves out a turn
            found = {self._first_special(text, max(ends.values(), default=len(text)))}
            return sorted(found - {""})
        here, there = (self._special.split(text[ends[turn] :]) for turn in (1, 3))
        common = common_start(here, there)
        if len(common) > 1:  # the second is a special token
            return ["".join(common).strip()]
        text_end = "".join(common_start(*(WORDS.split(text[0]) for text in (here, there)))).strip()
        if text_end and self._may_end_in_text:
            return [text_end]
        user, middle, last = (self._first_special(text, ends[turn]) for turn in (0, 1, 3))
        if not last:  # the header of the next turn ends an answer, unless every turn has it
            return sorted({middle} - {user, ""})
        return sorted({last, middle if middle == user else last})

    def _first_special(self, text: str, at: int) -> str:
        found = self._special.search(text, at)
        return found[0] if found else ""

    def _refusal(self, turn: int, what: str) -> DocumentError:
        return DocumentError(
            f"turn {turn + 1}: {self._name} {what}, so that the text to train on is not known",
            "put {% generation %} and {% endgeneration %} around what the assistant writes, or"
            " remove the conversation",
        )
