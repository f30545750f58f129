"""Folders of models that read images too, e.g. Gemma 3 from 4 B up and TranslateGemma: the language model in them.

config.json holds the text's keys in `text_config`. Tensors are under `language_model.model.`, or where transformers 5
saved them under `model.language_model.`; those that read images are left behind.
"""

from __future__ import annotations

import dataclasses
import re

from mlx_transformer.core.quantization import KEY, SAME_KEY

from .engine import Published

TEXT = {"gemma3": "gemma3_text"}
"""{model_type: that of its language model}"""
PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head": "lm_head"}
IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
OF_IMAGES = re.compile(r"(text|vision)_config|mm_\w+|architectures|model_type")


def text_part(published: Published) -> tuple[Published, list[str]]:
    """The language model as a folder has it alone, and a note of what else there is; other models as they are."""
    theirs, own = published.config, published.config.get("text_config")
    if theirs.get("model_type") not in list(TEXT) or not isinstance(own, dict):
        return published, []
    config = {key: value for key, value in theirs.items() if not OF_IMAGES.fullmatch(key)}
    config |= {**own, "model_type": TEXT[theirs["model_type"]]}
    for key in (KEY, SAME_KEY):
        if isinstance(table := config.get(key), dict):
            config[key] = {_named(name): value for name, value in table.items()}
    left = [match[2] for name in published.tensors if (match := IMAGES.match(name))]
    tensors = {_named(name): array for name, array in published.tensors.items() if not IMAGES.match(name)}
    note = f"it reads images too: left behind are {len(left)} tensors of {' and '.join(dict.fromkeys(left))}"
    return dataclasses.replace(published, config=config, tensors=tensors), [note] if left else []


def _named(name: str) -> str:
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    return PREFIXES.get(prefix, "") + name.removeprefix(prefix)
