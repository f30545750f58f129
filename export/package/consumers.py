"""The JSON files by which Optimum (ORTModelForSeq2SeqLM and its siblings), transformers.js and onnxruntime-genai
recognise a model.

They name the model's published family. A model of no family gets the closest architecture whose cache has the same
layout, e.g. Marian, Llama or BERT. Consumers take only names and sizes from these files; all computation is in the
graphs. This project's own description of the model is mlx_transformer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from export.interface import GRAPHS, MODEL, Request
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.families.engine import differences, written_config
from mlx_transformer.families.folder import generation_config
from mlx_transformer.families.keys import their_activation
from mlx_transformer.families.table import family_of


def configs(
    config: TransformerConfig,
    external: list[str],
    dtype: str = "fp32",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Return {file name: contents}; empty for a decoder of SSRUs, since no published architecture has such a cache.

    external: graph files with a data file of their own name. dtype: transformers.js's name for the default precision,
    e.g. "fp32". settings: the model's generation settings.
    """
    if config.recurrent:
        return {}
    kinds = {"encoder-decoder": _translator, "decoder": _decoder, "encoder": _encoder}
    shared = {
        "pad_token_id": config.pad_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "max_position_embeddings": config.max_positions,
        "torch_dtype": "float32",
        # By default a browser would load 8-bit weights. A data file is named after its graph, plus "_data".
        "transformers.js_config": {"dtype": dtype, "use_external_data_format": dict.fromkeys(external, 1)},
    }
    files = {"config.json": {**shared, **kinds[config.architecture](config)}}
    if config.has_decoder:
        files["generation_config.json"] = generation_config(config, settings)
    if config.architecture == "decoder" and config.d_k == config.d_v:  # genai has one head size for keys and values
        files["genai_config.json"] = _genai(config, files["generation_config.json"])
    return files


def _translator(c: TransformerConfig) -> dict[str, Any]:
    family = family_of(c)
    if differences(family, c):
        return _marian(c)
    values = written_config(family, c)
    # Optimum shapes the decoder's first, empty cache by the encoder's head count.
    heads = {"encoder_attention_heads": c.of("decoder").heads} if "encoder_attention_heads" in values else {}
    return values | heads


def _marian(c: TransformerConfig) -> dict[str, Any]:
    # Consumers shape their first, empty cache by these numbers. With unequal d_k and d_v Optimum's merged decoder
    # can't; use_merged=False and transformers.js can.
    heads = c.of("decoder").key_value_heads
    width = heads * c.of("decoder").d_k
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "vocab_size": c.vocab_size,
        "decoder_vocab_size": c.vocab_size,
        "d_model": width,
        "hidden_size": width,
        "num_hidden_layers": c.encoder_layers,
        "encoder_layers": c.encoder_layers,
        "decoder_layers": c.decoder_layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": c.d_ff,
        "decoder_ffn_dim": c.d_ff,
        "activation_function": their_activation(c.activation),
        "scale_embedding": c.scale_embeddings,
        "share_encoder_decoder_embeddings": c.one_embedding,
        "tie_word_embeddings": not c.own_classifier,
        "decoder_start_token_id": c.bos_id,
        "forced_eos_token_id": None,
        "use_cache": True,
    }


HEAD_WIDTHS = ("gemma", "gemma3_text")
"""Types of decoders of which Optimum reads head_dim; all others' heads are as wide as hidden_size / heads there."""
GROUPED = (*HEAD_WIDTHS, "granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Those of which it reads num_key_value_heads; in its first, empty cache all others have as many as queries have."""


def _decoder(c: TransformerConfig) -> dict[str, Any]:
    family = family_of(c)
    grouped = c.key_value_heads != c.heads and family.model_type not in GROUPED
    if grouped or differences(family, c):
        return _llama(c)
    values = {key: value for key, value in written_config(family, c).items() if key not in ("dtype", "torch_dtype")}
    if "hidden_size" in values and family.model_type not in HEAD_WIDTHS:
        values["hidden_size"] = c.heads * c.d_k
    return {**values, "use_cache": True}


def _llama(c: TransformerConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        # Optimum computes a cached head's width as hidden_size / num_attention_heads.
        "hidden_size": c.heads * c.d_k,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.decoder_layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.key_value_heads,
        "head_dim": c.d_k,
        "hidden_act": their_activation(c.activation),
        "tie_word_embeddings": not c.own_classifier,
        "use_cache": True,
    }


def _encoder(c: TransformerConfig) -> dict[str, Any]:
    family = family_of(c)
    return _bert(c) if differences(family, c) else written_config(family, c)


def _bert(c: TransformerConfig) -> dict[str, Any]:
    return {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.encoder_layers,
        "num_attention_heads": c.heads,
        "hidden_act": their_activation(c.activation),
        "tie_word_embeddings": not c.own_classifier,
    }


def _genai(c: TransformerConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """onnxruntime-genai's config of a decoder. genai has no banned tokens, and pads a batch of prompts on the right."""
    ports = GRAPHS[MODEL](Request(config=c))
    inputs, outputs = ports.input_names, ports.output_names

    def each_layer(names: Mapping[str, str], part: str) -> str:
        return names[f"cache.0.{part}"].replace(".0.", ".%d.")

    return {
        "model": {
            "type": "decoder",
            "bos_token_id": c.bos_id,
            "eos_token_id": generation["eos_token_id"],
            "pad_token_id": c.pad_id,
            "vocab_size": c.vocab_size,
            "context_length": c.max_positions,
            "decoder": {
                "session_options": {},
                "filename": "onnx/model.onnx",
                "hidden_size": c.heads * c.d_k,
                "head_size": c.d_k,
                "num_attention_heads": c.heads,
                "num_key_value_heads": c.key_value_heads,
                "num_hidden_layers": c.decoder_layers,
                "inputs": {
                    **{name: name for value, name in inputs.items() if not value.startswith("cache.")},  # genai's keys
                    "past_key_names": each_layer(inputs, "key"),
                    "past_value_names": each_layer(inputs, "value"),
                },
                "outputs": {
                    "logits": outputs["logits"],
                    "present_key_names": each_layer(outputs, "key"),
                    "present_value_names": each_layer(outputs, "value"),
                },
            },
        },
        "search": {
            "do_sample": False,
            "num_beams": 1,
            **{key: generation[key] for key in ("repetition_penalty", "no_repeat_ngram_size") if key in generation},
            "max_length": c.max_positions,
            # The graph returns longer keys and values each step; it doesn't write into its input cache.
            "past_present_share_buffer": False,
        },
    }
