"""Requests and answers of OpenAI's interface: what is accepted, what is refused, and how.

Unknown fields are refused, as by OpenAI, and so are known ones that would change the answer and are
not supported: an answer that silently leaves one out looks like the right one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError

from minimind.config.template_variables import FIXED_VARIABLES
from minimind.data.chat.conversations import (
    ASSISTANT,
    CALLS,
    OPENAI,
    SYSTEM,
    THOUGHTS,
    Conversation,
    Message,
    is_absent,
    message_of_turn,
    texts_in,
    tools_of,
)
from minimind.data.chat.template import ChatTemplate, reads
from minimind.data.chat.turns import CALL_FORMS, called_by
from minimind.data.text.documents import DocumentError, usable_size
from minimind.errors import UsageError
from minimind.runtime.checked_json import ClosedJson, describe_fault, is_deeper

MAX_DEPTH = 32  # of JSON; schemas of tools nest
MOST_CHOICES, MOST_STOPS, MOST_TOP = 8, 32, 20
GIVEN = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
LONGEST_STOP = 200  # characters
RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class Settings:
    """How a request is answered; the names of `Sampling` are None where it gives none.

    `top`: most likely tokens to report with each; None without log-probabilities.
    """

    most_new: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    repetition_penalty: float | None
    seed: int | None
    stop: list[str]
    choices: int
    stream: bool
    has_usage: bool
    top: int | None
    echo: bool = False


class Refusal(Exception):
    """A request that is refused, as OpenAI's error."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = kinds.get(self.status, kind)
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def busy() -> Refusal:
    """The refusal of a request for which there is no place."""
    reason = "the server is busy; ask again in a moment"
    return Refusal(429, reason, "queue_full", headers=RETRY)


def no_such_model(name: str, own: str) -> Refusal:
    """The refusal of a request for another model than our own."""
    reason = f"the model {name[:100]!a} is not served here; ask for {own}"
    return Refusal(404, reason, "model_not_found", "model")


def _refuse(param: str, reason: str) -> NoReturn:
    raise Refusal(400, f"{param} {reason}", "invalid_value", param)


class StreamOptions(ClosedJson):
    """What else a stream has."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


Penalty = Annotated[float, Field(ge=-2, le=2)]


class Request(ClosedJson):
    """Fields of both interfaces; top_k and repetition_penalty are vLLM's."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    store: Literal[False] | None = None
    # Who asks, and what a service keeps and charges: no answer depends on them.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def most_new(self) -> int | None:
        """Most tokens of the answer, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
            _refuse("stop", "is neither a text nor a list of texts; each has a character or more")
        if len(stops) > MOST_STOPS or any(len(one) > LONGEST_STOP for one in stops):
            reason = f"has more than {MOST_STOPS} texts, or one of more than {LONGEST_STOP}"
            _refuse("stop", f"{reason} characters; give fewer, or shorter ones")
        return stops

    def settings(self) -> dict[str, Any]:
        """The values of `Settings`."""
        options = self.stream_options
        given = {name: getattr(self, name) for name in GIVEN}
        return {
            **given,
            "most_new": self.most_new,
            "stop": self.stops,
            "choices": self.n or 1,
            "stream": bool(self.stream),
            "has_usage": bool(options and options.include_usage),
            "top": self.top,
        }

    @property
    def top(self) -> int | None:
        """Most likely tokens to report with each; None without log-probabilities."""
        return None

    def require_supported(self) -> None:
        """Refuse what would change the answer."""
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                _refuse(name, "is not supported; remove it, or give repetition_penalty")
        if (self.response_format or {}).get("type", "text") != "text":
            _refuse("response_format", "only supports text; remove it")
        if self.stream_options and not self.stream:
            _refuse("stream_options", "has no effect without stream; set stream, or remove it")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            _refuse(
                "max_tokens", "and max_completion_tokens mean the same and differ; give one of them"
            )


class ChatRequest(Request):
    """A request of /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # of OpenAI's other interface, Responses

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def require_supported(self) -> None:
        super().require_supported()
        for name in ("functions", "function_call"):
            if getattr(self, name):
                _refuse(name, "is OpenAI's old name; give tools and tool_choice")
        if self.modalities and self.modalities != ["text"]:
            _refuse("modalities", "has more than text, which is all that is supported; remove it")
        if self.tool_choice not in (None, "none", "auto"):
            _refuse("tool_choice", "is neither none nor auto; others are not supported")
        if self.parallel_tool_calls is False and self.tools and self.tool_choice != "none":
            _refuse("parallel_tool_calls", "is false, which is not supported; remove it")
        if self.top_logprobs and not self.logprobs:
            _refuse("top_logprobs", "needs logprobs; set it to true")
        if self.most_new == 0:
            _refuse("max_tokens", "is 0, but an answer has at least one token; give 1 or more")


class CompletionRequest(Request):
    """A request of /v1/completions."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "echo": bool(self.echo)}

    def prompts(self, most: int) -> list[str | list[int]]:
        """The texts, or lists of ids, of `prompt`."""
        given: Any = self.prompt
        prompts = [given] if isinstance(given, str) or _are_ids(given) else given
        is_valid = isinstance(prompts, list) and prompts
        if not is_valid or not all(isinstance(one, str) or _are_ids(one) for one in prompts):
            _refuse("prompt", "is not a text, a list of token ids, or a list of these; give one")
        if len(prompts) * (self.n or 1) > most:
            _refuse("prompt", f"asks for more than {most} texts at once; give fewer")
        return prompts

    def require_supported(self) -> None:
        super().require_supported()
        if self.suffix:
            _refuse("suffix", "is not supported; remove it")
        if (self.best_of or 1) > (self.n or 1):
            _refuse("best_of", "is not supported; remove it")
        if self.most_new == 0 and not self.echo:
            _refuse("max_tokens", "is 0 without echo, which asks for nothing; give 1 or more")


def _are_ids(value: Any) -> bool:
    is_list = isinstance(value, list) and value
    return bool(is_list) and all(type(one) is int for one in value)


Kind = TypeVar("Kind", bound=Request)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """The request in a body; raise Refusal for another, or for what is not supported."""
    try:
        fields = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_no_number)
        if not isinstance(fields, dict):
            raise Refusal(400, "the body is not a JSON object; send one", "invalid_json")
        if is_deeper(fields, MAX_DEPTH):
            raise RecursionError
        for text in texts_in(fields):
            usable_size(text)
    except RecursionError:
        reason = f"the body is nested deeper than {MAX_DEPTH}; send a flatter one"
        raise Refusal(400, reason, "invalid_json") from None
    except DocumentError as error:
        raise Refusal(400, f"{error.reason}; {error.remedy}", "invalid_value") from None
    except ValueError:  # of UTF-8, JSON, or an integer of thousands of digits
        raise Refusal(400, "the body is not JSON; send an object", "invalid_json") from None
    try:  # null is as nothing
        request = kind.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        param = str(fault["loc"][0]) if fault["loc"] else None
        message = f"the request {describe_fault(fault)}"
        if fault["type"] == "extra_forbidden":
            close = get_close_matches(str(fault["loc"][-1]), kind.model_fields, 1, 0.8)
            message += f", which is not supported; {f'is it {close[0]}?' if close else 'remove it'}"
        raise Refusal(400, message, "invalid_value", param) from None
    request.require_supported()
    return request


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise DocumentError("an object has a key twice", "keep the one that is meant")
    return fields


def _no_number(name: str) -> NoReturn:
    raise DocumentError(f"{name} is not JSON", "write a number or null")


def call_form(template: ChatTemplate) -> tuple[bool, bool]:
    """How the template reads calls: within "function", and with arguments as JSON text."""
    for form in CALL_FORMS:
        with suppress(DocumentError, UsageError):
            if "c d" in template.render(called_by(form)):
                return form[0], isinstance(form[1], str)
    return CALL_FORMS[0][0], isinstance(CALL_FORMS[0][1], str)


def conversation_of_request(
    request: ChatRequest, template: ChatTemplate, form: tuple[bool, bool]
) -> Conversation:
    """The conversation of a request, with calls as the template reads them; raise Refusal."""
    messages = []
    for number, turn in enumerate(request.messages):
        try:
            messages.append(_message(turn, form))
        except DocumentError as error:
            where = f"messages[{number}]"
            reason = f"{where}: {error.reason}; {error.remedy}"
            raise Refusal(400, reason, "invalid_value", where) from None
    if messages[-1].role == ASSISTANT:
        _refuse("messages", "ends with an answer; end it with the message to answer")
    variables = request.chat_template_kwargs or {}
    if wrong := [one for one in variables if one in FIXED_VARIABLES or not one.isidentifier()]:
        _refuse(
            "chat_template_kwargs",
            f"has {wrong[0]!a}, which is not a valid name of a variable; remove it",
        )
    if unread := [one for one in variables if not reads(template.source, one)]:
        reason = f"has {unread[0]!a}, which the chat template does not read; remove it"
        _refuse("chat_template_kwargs", reason)
    tools = None
    if request.tools and request.tool_choice != "none":
        tools = tools_of(request.tools)
        if not template.writes_tools(tools):
            _refuse("tools", "are not written by the chat template of this model; remove them")
    return Conversation(messages, tools, variables)


def _message(turn: dict[str, Any], form: tuple[bool, bool]) -> Message:
    turn = {**turn, "role": SYSTEM} if turn.get("role") == "developer" else turn
    is_silent = is_absent(turn.get("content")) and turn.get("role") == ASSISTANT
    if is_silent and all(is_absent(_pairs(turn.get(key))) for key in (CALLS, *THOUGHTS)):
        return Message(ASSISTANT, "")  # a model may answer nothing
    message = message_of_turn(_pairs(turn), OPENAI, set())
    if CALLS not in message.more:
        return message
    calls = [_call(call, number, form) for number, call in enumerate(message.more[CALLS])]
    return Message(message.role, message.content, message.name, {**message.more, CALLS: calls})


def _call(call: dict[str, Any], number: int, form: tuple[bool, bool]) -> dict[str, Any]:
    """A call as the template reads it."""
    is_wrapped, is_text = form
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and not is_text:
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_no_number)
        except (ValueError, RecursionError):
            reason = f'the "arguments" of call {number + 1} are not JSON'
            raise DocumentError(reason, "send what the model wrote") from None
        for text in texts_in(arguments):
            usable_size(text)
    elif is_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    flat = {"name": function["name"], "arguments": arguments}
    if not is_wrapped:
        return flat
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": flat}


def _pairs(value: Any) -> Any:
    """JSON with objects as `message_of_turn` reads them."""
    if isinstance(value, dict):
        return tuple((key, _pairs(inner)) for key, inner in value.items())
    return [*map(_pairs, value)] if isinstance(value, list) else value


def written_calls(calls: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The calls of an answer in OpenAI's form, with ids that begin with `name`."""
    written = []
    for number, call in enumerate(calls):
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        flat = {"name": function["name"], "arguments": arguments}
        written.append({"id": f"{name}_{number}", "type": "function", "function": flat})
    return written
