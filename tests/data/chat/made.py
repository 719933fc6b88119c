"""Random conversations and templates in the style of others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from minimind.data.chat.conversations import Message
from minimind.data.chat.template import SPECIAL_TOKENS, ChatTemplate, Encoded, TrainOn
from minimind.data.text.documents import DocumentError
from minimind.data.tokenizer.lossless import TextLoss
from tests.data.chat.templates import GPT_TOKENS

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
HEADER_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
EVERY_TOKEN = (*SPECIAL_TOKENS, *CHATML_TOKENS, *HEADER_TOKENS, *GPT_TOKENS)

# As most templates are written: without {% generation %}.
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# What the default template writes of plain conversations.
SIMPLE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% elif message['role'] in ['system', 'user', 'tool'] %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% else %}"
    "{{ raise_exception('there is no role ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# As of Llama 3: the beginning is written by the template, and content is stripped.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
HEADERS_MARKED = HEADERS.replace(
    "{{ m['content'] | trim + '<|eot_id|>' }}",
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}",
)

WORDS = (
    "the model answers a question about training data with care and then stops . , ? ! 12 3.5"
    " 春眠不覺曉 處處聞啼鳥 模型 回答 問題 ， 。 \n \n\n \t x=1 </div> <| |> <|en e\u0301 ﬁ"
    " 👩\u200d👧 ▁ \ufdd0 龘 é"
).split(" ")


def text(draw: random.Random, words: int) -> str:
    """Chinese and English, with whitespace at its ends now and then, but not blank."""
    glue = draw.choice(["", " ", " "])
    middle = glue.join(draw.choices(WORDS, k=draw.randint(1, words)))
    ends = ["", "", "", " ", "\n"]
    return draw.choice(ends) + draw.choice("a春1") + middle + draw.choice(ends)


def conversation(draw: random.Random, words: int = 25) -> list[Message]:
    """One to four rounds, sometimes with a system message, tools, or a last unanswered turn."""
    messages = [Message("system", text(draw, words))] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 4)):
        messages += [Message("user", text(draw, words)), Message("assistant", text(draw, words))]
        if draw.random() < 0.2:
            tools = [Message("tool", text(draw, words)) for _ in range(draw.randint(1, 2))]
            messages += [*tools, Message("assistant", text(draw, words))]
    return messages + ([Message("user", text(draw, words))] if draw.random() < 0.1 else [])


def encode_all(
    template: ChatTemplate,
    conversations: Iterable[Sequence[Message]],
    train_on: TrainOn = "assistant",
    loss: TextLoss | None = None,
) -> list[Encoded]:
    """The conversations encoded together, none of which is refused."""
    written = [template.write(messages, train_on) for messages in conversations]
    encoded = template.encode_written(written, loss=loss)
    good = [one for one in encoded if not isinstance(one, DocumentError)]
    assert len(good) == len(encoded)
    return good
