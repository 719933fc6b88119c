"""What llama.cpp's server says of a GGUF file; run where the wheel xllamacpp is installed.

python ask_llama_cpp.py model.gguf < questions.json > answers.json
"""

import json
import sys
import urllib.request

import xllamacpp  # pyright: ignore[reportMissingImports] (of another environment)

questions = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], questions["positions"], 1
# By default keys and values are kept in float16, and its flash attention rounds queries to it.
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.warmup, params.cpuparams.n_threads = False, 2
server = xllamacpp.Server(params)


def post(path, request):
    body = json.dumps(request).encode()
    headers = {"Content-Type": "application/json"}
    place = f"{server.listening_address}{path}"
    with urllib.request.urlopen(urllib.request.Request(place, body, headers)) as answer:
        return json.load(answer)


def ids(text, special):
    request = {"content": text, "add_special": False, "parse_special": special}
    return post("/tokenize", request)["tokens"]


def completion(prompt):
    """The greedy ids, and the most probable ten at each place with their log-probabilities."""
    request = {"prompt": prompt, "n_predict": questions["new"], "temperature": 0, "n_probs": 10}
    answer = post("/completion", request | {"return_tokens": True})
    told = [
        [[one["id"], one["logprob"]] for one in place["top_logprobs"]]
        for place in answer["completion_probabilities"]
    ]
    return {"ids": answer["tokens"], "probable": told}


def prompt_of(messages):
    text = post("/apply-template", {"messages": messages})["prompt"]
    return {"text": text, "ids": ids(text, True)}


answers = {
    "ids": [ids(text, False) for text in questions["texts"]],
    "completions": [completion(prompt) for prompt in questions["prompts"]],
    "templates": [prompt_of(messages) for messages in questions["conversations"]],
}
print(json.dumps(answers))
