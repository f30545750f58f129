"""The table of families whose published models can be read and written."""

from __future__ import annotations

from mlx_transformer.core.config import TransformerConfig

from .bart import BART, M2M100, MBART
from .bert import BERT, ROBERTA, XLM_ROBERTA
from .distilbert import DISTILBERT
from .engine import Family, differences
from .gemma import GEMMA, GEMMA2, GEMMA3
from .gpt2 import GPT2
from .llama import LLAMA, MISTRAL
from .llama_like import GRANITE, HUNYUAN, OLMO2, PHI3, QWEN2, QWEN3, SMOLLM3
from .marian import MARIAN, PEGASUS
from .modernbert import MODERNBERT
from .t5 import MT5, T5, UMT5

MODELS = (MARIAN, PEGASUS, BART, MBART, M2M100, T5, MT5, UMT5, BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MODERNBERT)
MODELS += (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, HUNYUAN, SMOLLM3, PHI3)
MODELS += (GEMMA, GEMMA2, GEMMA3, OLMO2, GRANITE)
FAMILIES: dict[str, Family] = {family.model_type: family for family in MODELS}
"""{model_type of config.json: family}, e.g. "bart"."""


def family_of(config: TransformerConfig) -> Family:
    """The first family that can store such a model; if none can, the family of its kind with the fewest differences."""
    apart: dict[str, int] = {}
    for name, family in FAMILIES.items():
        if family.architecture_of_ours != config.architecture:
            continue
        apart[name] = len(differences(family, config))
        if not apart[name]:
            return family
    return FAMILIES[min(apart, key=apart.__getitem__)]
