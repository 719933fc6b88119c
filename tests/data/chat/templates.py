"""Templates that behave as those of well-known models, in their own words.

`{% generation %}` stands around what the assistant writes, from the end of the prompt to the token
that ends the turn; `PLAIN` are the same templates without it, as they are published.
"""

from __future__ import annotations

import re

from minimind.data.chat.template import DEFAULT_TEMPLATE

GPT_TOKENS = ("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
GEN, END = "{% generation %}", "{% endgeneration %}"

TOOLS = "{% for tool in tools or [] %}{{ '\\n' + tool | tojson }}{% endfor %}"
TOOLS_FIRST = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}"
    f"# Tools{TOOLS}{{{{ '<|im_end|>\\n' }}}}"
    "{% elif messages[0].role == 'system' %}"
    "{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}"
)
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# `thoughts` and `content` of a message, from its key or from its content.
SPLIT = (
    "{% set content = m.content if m.content is string else '' %}{% set thoughts = '' %}"
    "{% if m.reasoning_content is string %}{% set thoughts = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thoughts = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% set thoughts = thoughts.strip('\\n') %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}"
    "{% if (loop.first and content) or not loop.first %}{{ '\\n' }}{% endif %}"
    "{% set call = call.function or call %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{ call.arguments if call.arguments is string else call.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}"
)
RESPONSES = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
)
THINK = "{{ '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}"
CONTENT_AND_CALLS = f"{{{{ content }}}}{CALLS}{{{{ '<|im_end|>' }}}}{END}{{{{ '\\n' }}}}"


def chatml(answer: str, prompt: str) -> str:
    """A template of Qwen's kind."""
    return (
        f"{TOOLS_FIRST}{LAST_QUESTION}{{% for m in messages %}}{SPLIT}"
        "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
        "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
        f"{{% elif m.role == 'assistant' %}}{{{{ '<|im_start|>assistant\\n' }}}}{answer}"
        f"{CONTENT_AND_CALLS}{{% elif m.role == 'tool' %}}{RESPONSES}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}" + prompt + "{% endif %}"
    )


NOT_EARLIER = "loop.index0 > ns.last and (loop.last or thoughts)"
OFF = "enable_thinking is defined and enable_thinking is false"
EMPTY = "{{ '<think>\\n\\n</think>\\n\\n' }}"
QWEN3 = chatml(
    f"{{% set think = {NOT_EARLIER} %}}{{% set asked = {OFF} and think and not thoughts %}}"
    f"{{% if asked %}}{EMPTY}{{% endif %}}{GEN}{{% if think and not asked %}}{THINK}{{% endif %}}",
    f"{{% if {OFF} %}}{EMPTY}{{% endif %}}",
)
QWEN3_THINKING = chatml(
    f"{{% set think = {NOT_EARLIER} %}}{{% if think %}}{{{{ '<think>\\n' }}}}{{% endif %}}{GEN}"
    "{% if think %}{{ thoughts + '\\n</think>\\n\\n' }}{% endif %}",
    "{{ '<think>\\n' }}",
)
MINIMIND3 = chatml(
    f"{{% if not thoughts %}}{EMPTY}{{% endif %}}{GEN}{{% if thoughts %}}{THINK}{{% endif %}}",
    "{% if open_thinking is defined and open_thinking is true %}{{ '<think>\\n' }}"
    f"{{% else %}}{EMPTY}{{% endif %}}",
)
NEMOTRON = chatml(
    "{% set think = loop.index0 > ns.last and thoughts %}"
    "{% if think %}{{ '<think>\\n' }}{% endif %}" + GEN + "{% if think %}"
    "{{ thoughts + '\\n</think>\\n' }}{% else %}{{ '<think></think>' }}{% endif %}",
    "{{ '<think>\\n' }}",
)
HERMES = (
    f"{TOOLS_FIRST}{{% for m in messages %}}{{% set content = m.content %}}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    f"{{% elif m.role == 'assistant' %}}{{{{ '<|im_start|>assistant\\n' }}}}{GEN}"
    f"{CONTENT_AND_CALLS}{{% elif m.role == 'tool' %}}"
    "{{ '<|im_start|>tool\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\\n' }}"
    f"{GEN}{{{{ m.content + '<|end|>' }}}}{END}{{{{ '\\n' }}}}"
    "{% else %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)
LLAMA31 = (
    "{{ bos_token }}{% set messages = messages %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nDate: 26 Jul 2024\\n\\n' }}"
    "{{ system + '<|eot_id|>' }}"
    "{% if tools %}{{ '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the functions:' }}"
    f"{TOOLS}"
    "{{ '\\n' + messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    f"{GEN}{{% if m.tool_calls %}}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set call = m.tool_calls[0].function or m.tool_calls[0] %}"
    "{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' }}"
    f"{{% else %}}{{{{ m.content | trim }}}}{{% endif %}}{{{{ '<|eot_id|>' }}}}{END}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
# It writes the tools and the system message with the last question.
MISTRAL = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    f"{LAST_QUESTION}{{% for m in messages %}}{{% set content = m.content %}}"
    "{% if m.role == 'user' %}"
    "{% if loop.index0 == ns.last and tools %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (system if loop.index0 == ns.last else '') + content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + content | tojson + '}[/TOOL_RESULTS]' }}"
    f"{{% else %}}{GEN}{{% if m.tool_calls %}}{{{{ '[TOOL_CALLS] [' }}}}"
    "{% for call in m.tool_calls %}{{ (call.function or call) | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
    f"{{% else %}}{{{{ ' ' + content }}}}{{% endif %}}{{{{ eos_token }}}}{END}"
    "{% endif %}{% endfor %}"
)
GPT_OSS = (
    "{{ '<|start|>system<|message|>You are a model.<|end|>' }}"
    "{% if tools or messages[0].role == 'system' %}{{ '<|start|>developer<|message|>' }}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    f"{TOOLS}{{{{ '<|end|>' }}}}{{% endif %}}"
    f"{LAST_QUESTION}{{% set call = namespace(name='') %}}{{% for m in messages %}}{SPLIT}"
    "{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.' + call.name }}"
    "{{ ' to=assistant<|channel|>commentary<|message|>' + content | tojson + '<|end|>' }}"
    f"{{% elif m.role == 'assistant' %}}{{{{ '<|start|>assistant' }}}}{GEN}"
    "{% if thoughts and loop.index0 > ns.last %}"
    "{{ '<|channel|>analysis<|message|>' + thoughts + '<|end|><|start|>assistant' }}{% endif %}"
    "{% if m.tool_calls %}{% set one = m.tool_calls[0].function or m.tool_calls[0] %}"
    "{% set call.name = one.name %}{{ ' to=functions.' + one.name }}"
    "{{ '<|channel|>commentary json<|message|>' + one.arguments | tojson + '<|call|>' }}"
    "{% else %}{{ '<|channel|>final<|message|>' + content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    f"{END}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# An answer is ended by the next turn, whose first token is trained on.
GLM = (
    "{% if tools %}{{ '<|system|>\\n# Tools' }}" + TOOLS + "{% endif %}"
    f"{LAST_QUESTION}{{% for m in messages %}}{SPLIT}"
    "{% set answered = not loop.first and messages[loop.index0 - 1].role == 'assistant' %}"
    "{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    f"{GEN}{{{{ '\\n<think>' + (thoughts.strip() if loop.index0 > ns.last else '') }}}}"
    "{{ '</think>' }}"
    "{% if content.strip() %}{{ '\\n' + content.strip() }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set call = call.function or call %}"
    "{{ '\\n<tool_call>' + call.name + '\\n' + call.arguments | tojson + '\\n</tool_call>' }}"
    f"{{% endfor %}}{END}"
    "{% else %}"
    f"{{% if answered %}}{GEN}{{{{ '<|' + m.role + '|>' }}}}{END}"
    "{% else %}{{ '<|' + m.role + '|>' }}{% endif %}{{ '\\n' + content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VICUNA = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ 'ASSISTANT: ' }}"
    f"{GEN}{{{{ m.content + eos_token }}}}{END}"
    "{{ '\\n' }}{% else %}{{ m.role | upper + ': ' + m.content + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)

MARKED = {
    "minimind3": MINIMIND3,
    "qwen3": QWEN3,
    "qwen3_thinking": QWEN3_THINKING,
    "nemotron": NEMOTRON,
    "hermes": HERMES,
    "phi3": PHI3,
    "llama31": LLAMA31,
    "mistral": MISTRAL,
    "gpt_oss": GPT_OSS,
    "glm": GLM,
    "vicuna": VICUNA,
    "default": DEFAULT_TEMPLATE,
}
PLAIN = {
    name: re.sub(r"\{%-? (end)?generation -?%\}", "", source) for name, source in MARKED.items()
}
ONE_CALL = {"llama31", "gpt_oss"}  # of a turn, and without content
NO_TOOLS = {"phi3", "vicuna"}
NO_THOUGHTS = {"hermes", "phi3", "llama31", "mistral", "vicuna"}
