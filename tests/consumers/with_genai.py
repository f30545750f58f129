"""Answer tasks with onnxruntime-genai alone: runs in an environment that has no package of ours.

    python with_genai.py TASKS.json ANSWERS.json

Tasks and answers as in with_optimum.py.
"""

import json
import sys
import traceback
from pathlib import Path

import onnxruntime_genai as genai


def generate(folder, rows, pad_id, max_new_tokens, together):
    """Greedy rows of new tokens, up to the end: prompts one by one, or all in one batch, padded on the right."""
    model = genai.Model(folder)
    longest = max(map(len, rows))
    batches = [[row + [pad_id] * (longest - len(row)) for row in rows]] if together else [[row] for row in rows]
    found = []
    for batch in batches:
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(batch[0]) + max_new_tokens, batch_size=len(batch))
        generator = genai.Generator(model, parameters)
        generator.append_tokens(batch)
        while not generator.is_done():
            generator.generate_next_token()
        found += [[int(id) for id in generator.get_sequence(i)][len(batch[0]) :] for i in range(len(batch))]
    return found


def chat(folder, messages):
    """Ids of the prompt that a folder's template makes of a conversation."""
    tokenizer = genai.Tokenizer(genai.Model(folder))
    text = tokenizer.apply_chat_template(messages=json.dumps(messages), add_generation_prompt=True)
    return [int(id) for id in tokenizer.encode(text)]


def tokenize(folder, texts):
    tokenizer = genai.Tokenizer(genai.Model(folder))
    return [[int(id) for id in tokenizer.encode(text)] for text in texts]


def main(tasks: str, answers: str) -> None:
    kinds = {f.__name__: f for f in (generate, chat, tokenize)}
    found = {}
    for task in json.loads(Path(tasks).read_text(encoding="utf-8")):
        name, kind = task.pop("name"), task.pop("kind")
        try:
            found[name] = {"value": kinds[kind](**task)}
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    Path(answers).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
