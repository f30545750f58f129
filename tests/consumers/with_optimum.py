"""Answer tasks with Optimum alone: runs in an environment that has no package of ours.

    python with_optimum.py TASKS.json ANSWERS.json

Tasks: a list of {"name", "kind", ...}; answers: {name: {"value": ...} or {"error": text}}. Ids are rows of
equal length, a mask has 1 on tokens. `node/with_transformers.mjs` answers the same kinds.
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


def no_network(*_):
    raise OSError("these tests use no network")


socket.socket.connect = no_network

import torch  # noqa: E402
from optimum.onnxruntime import (  # noqa: E402
    ORTModelForCausalLM,
    ORTModelForFeatureExtraction,
    ORTModelForMaskedLM,
    ORTModelForSeq2SeqLM,
    pipeline,
)
from transformers import AutoTokenizer  # noqa: E402

KINDS = {"encoder-decoder": ORTModelForSeq2SeqLM, "decoder": ORTModelForCausalLM, "encoder": ORTModelForMaskedLM}


def tokenize(folder, texts, rows):
    """Ids of texts, and the texts of rows of ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return {"ids": [tokenizer(text).input_ids for text in texts], "texts": decode(tokenizer, rows)}


def chat(folder, messages):
    """Ids of the prompt that a folder's template makes of a conversation."""
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)


def translate(folder, texts, batch, max_new_tokens, layout="merged", suffix=""):
    """Greedy tokens and text, in padded batches of this size. layout: merged is what is loaded if nothing is asked."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"use_merged": False} if layout == "split" else {}
    if suffix:
        options["encoder_file_name"] = f"encoder_model{suffix}.onnx"
        options["decoder_file_name"] = f"decoder_model_merged{suffix}.onnx"
    model = ORTModelForSeq2SeqLM.from_pretrained(folder, **options)
    assert model.use_merged == (layout == "merged"), f"loaded another layout than {layout}"
    ids, found = [], []
    for start in range(0, len(texts), batch):
        encoded = tokenizer(texts[start : start + batch], padding=True, return_tensors="pt")
        output = model.generate(**encoded, max_new_tokens=max_new_tokens)
        ids += output.tolist()
        found += tokenizer.batch_decode(output, skip_special_tokens=True)
    return {"ids": ids, "texts": found}


def translation_pipeline(folder, texts):
    """What `pipeline("translation")` returns, one text at a time; greedy, where the pipeline's default is 4 beams."""
    model, tokenizer = ORTModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    translator = pipeline("translation", model=model, tokenizer=tokenizer)
    return [translator(text, num_beams=1)[0]["translation_text"] for text in texts]


def generate(folder, architecture, ids, mask, max_new_tokens):
    """Greedy rows, as generate returns them: after the prompt (decoder) or the start token."""
    model = KINDS[architecture].from_pretrained(folder)
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    return model.generate(**inputs, max_new_tokens=max_new_tokens).tolist()


def logits(folder, ids, mask):
    """Of an encoder alone."""
    model = ORTModelForMaskedLM.from_pretrained(folder)
    return model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.tolist()


def vectors(folder, texts):
    """Unit vectors of the mean of a text's tokens, all texts in one batch."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), ORTModelForFeatureExtraction.from_pretrained(folder)
    encoded = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    mask = encoded["attention_mask"][:, :, None]
    found = (model(**encoded).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(found).tolist()


def sentence_vectors(folder, texts, backend="onnx", dimensions=None):
    """The same by sentence-transformers, which the folder tells how. dimensions: the first numbers alone, which it
    leaves at whatever length they have unless told otherwise."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, backend=backend, device="cpu", truncate_dim=dimensions)
    return model.encode(texts, normalize_embeddings=dimensions is not None).tolist()


def decode(tokenizer, rows):
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def main(tasks: str, answers: str) -> None:
    kinds = {
        f.__name__: f
        for f in (tokenize, chat, translate, translation_pipeline, generate, logits, vectors, sentence_vectors)
    }
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
