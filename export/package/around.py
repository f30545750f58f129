"""The files of a package around its graphs, made from the plan only: `write.py` writes them, and `validate` makes them
again from the checkpoint and compares. For that it reads the plan back from the package's mlx_transformer.json: choices
of the export come from this record, everything else from the checkpoint. The record counts as true if the graphs agree.

By some JSON files Optimum (ORTModelForSeq2SeqLM and its siblings), transformers.js and onnxruntime-genai recognise a
model. They name its published family. A model of no family gets the closest architecture whose cache has the same
layout, e.g. Marian, Llama or BERT. Consumers take only names and sizes from these files; all computation is in the
graphs. This project's own description of the model is mlx_transformer.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from export.interface import (
    CROSS_ATTENTION,
    DIMENSIONS,
    GRAPHS,
    INPUTS_EMBEDS,
    LISTED_CPU,
    MODEL,
    PROMPT_CPU,
    ROWS_CPU,
    STEP_CPU,
    Request,
)
from export.precision.int8 import BY_ROW
from export.precision.table import IN_BLOCKS, PRECISIONS, Precision, blocks_operators, prompts_in, takes_rows
from export.settings import ExportSettings
from mlx_transformer.core.checkpoint import WEIGHTS, Checkpoint, digests
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.folders import ONNX_CONFIG
from mlx_transformer.core.int8_scales import INT8_SCALES, Int8Scales, layers_of, read_int8_scales
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.text_embedding import TextEmbedding
from mlx_transformer.core.tokenizer_files import JOINT, tokenizer_files
from mlx_transformer.families.engine import differences, written_config
from mlx_transformer.families.folder import generation_config, tokenizer_config
from mlx_transformer.families.keys import their_activation
from mlx_transformer.families.sentence_folder import dense_weights, sentence_files
from mlx_transformer.families.table import family_of
from mlx_transformer.generation.settings import CHAT_TEMPLATES, DEFAULT, NO_SHORTLIST, settings_text
from mlx_transformer.system.files import read_bytes
from mlx_transformer.system.machine import versions
from mlx_transformer.system.tensors import tensor_bytes

from .layers import Moved
from .plan import SHORTLIST_FILE, Plan
from .quality import LIMITS, Quality


def consumer_configs(
    config: TransformerConfig,
    external: list[str],
    default: Precision,
    graphs: Collection[str],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Return {file name: contents}; empty for a decoder of SSRUs, since no published architecture has such a cache.

    external: graph files with a data file of their own name. default: the precision of readers that know one. graphs:
    the names of the folder's graphs. settings: the model's generation settings.
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
        "transformers.js_config": {"dtype": default.dtype, "use_external_data_format": dict.fromkeys(external, 1)},
    }
    files = {"config.json": {**shared, **kinds[config.architecture](config)}}
    if config.has_decoder:
        files["generation_config.json"] = generation_config(config, settings)
    graph = next((name for name in (MODEL, STEP_CPU) if name in graphs), None)
    if config.architecture == "decoder" and graph is not None:
        request = Request(config=config)
        (_, heads, _, width), *others = (port.axes for port in GRAPHS[graph](request).outputs if len(port.axes) == 4)
        if all((shape[1], shape[3]) == (heads, width) for shape in others):  # genai has one shape for all of a cache
            file = f"onnx/{graph}{default.suffix}.onnx"
            files["genai_config.json"] = _genai(request, graph, file, files["generation_config.json"])
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


def _genai(request: Request, graph: str, file: str, generation: Mapping[str, Any]) -> dict[str, Any]:
    """onnxruntime-genai's config of a decoder. genai has no banned tokens, and pads a batch of prompts on the right."""
    c, ports = request.config, GRAPHS[graph](request)
    inputs, outputs = ports.input_names, ports.output_names
    _, heads, _, width = next(port.axes for port in ports.inputs if port.value == "cache.0.key")
    required = [port for port in ports.inputs if port.default is None and not port.value.startswith("cache.")]

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
                "filename": file,
                "hidden_size": c.heads * c.d_k,
                "head_size": width,
                "num_attention_heads": c.heads,
                "num_key_value_heads": heads,
                "num_hidden_layers": c.decoder_layers,
                "inputs": {
                    **{port.name: port.name for port in required},  # genai's keys
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
            # A graph in standard operators returns longer keys and values each step; target cpu's writes in place.
            "past_present_share_buffer": graph == STEP_CPU,
        },
    }


FORMAT = 1
LARGEST_SHORTLIST = 1 << 31
"""Most bytes of a shortlist file."""


def files_around(plan: Plan, external: Sequence[str]) -> dict[str, bytes]:
    """Return {name: contents} of all files except the graphs, their data, the manifests and the model card.

    external: graph files with a data file of their own name.
    """
    settings, embedding, config = plan.generation, plan.embedding, plan.config
    default = "float32" if "float32" in plan.precisions else plan.precisions[0]
    graphs = plan.written.graph_names(config)
    values: dict[str, Any] = consumer_configs(config, list(external), PRECISIONS[default], graphs, settings)
    files = {name: read_bytes(file, LARGEST_SHORTLIST) for name, file in plan.named.items()}
    files |= {name: text.encode() for name, text in settings_text(settings).items()}
    if embedding is not None:
        files |= _embedding(embedding)
        values |= sentence_files(embedding, config.d_model, config.max_positions)
    for name, text in ({} if plan.tokenizer is None else tokenizer_files(plan.tokenizer)).items():
        files[name] = text.encode()
        if name == JOINT:
            values["tokenizer_config.json"] = tokenizer_config(config, text, embedding, settings) | _templates(settings)
    values[ONNX_CONFIG] = record(plan)
    if plan.int8_scales.products and "int8" in plan.precisions:
        files[INT8_SCALES] = plan.int8_scales.json().encode()
    return files | {name: json_bytes(each) for name, each in values.items()}


def record(plan: Plan) -> dict[str, Any]:
    """The contents of mlx_transformer.json: the model, the digests of its source, and every choice of the export."""
    target, config = plan.target, plan.config
    instead = {} if plan.written is target else {"target": plan.written.name, "why": target.supports(config)}
    return {
        "format": FORMAT,
        "config": config.to_dict(),
        "source": source_of(plan.checkpoint),
        **_adapter(plan.checkpoint),
        "target": target.name,
        **({"graphs": instead} if instead else {}),
        **plan.request.written(),
        **({} if plan.shortlist is None else {"shortlist": plan.shortlist}),
        "precisions": {
            name: {"suffix": PRECISIONS[name].suffix, **_arithmetic(plan, name)} for name in plan.precisions
        },
        "versions": versions(),
    }


def graphs_of(plan: Plan, precision: str) -> dict[str, list[str]]:
    """{data file: graphs that use it}, both names without the precision's suffix."""
    left_out = [] if takes_rows(precision) else [ROWS_CPU, LISTED_CPU]
    left_out += [] if prompts_in(precision, plan.activations) else [PROMPT_CPU]
    owners = plan.target.data_files(plan.config)
    return {owner: [name for name in names if name not in left_out] for owner, names in owners.items()}


def source_of(opened: Checkpoint) -> dict[str, dict[str, str]]:
    """Digests of the checkpoint's weights."""
    return {name: {"sha256": digest} for name, digest in digests(opened).items()}


def json_bytes(values: Any) -> bytes:
    """Format a JSON file of a package."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _templates(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The chat templates where transformers.js looks for them, which doesn't read chat_template.jinja."""
    templates = settings.get(CHAT_TEMPLATES, {})
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    return {"chat_template": templates[DEFAULT] if [*templates] == [DEFAULT] else listed} if templates else {}


def _embedding(embedding: TextEmbedding) -> dict[str, bytes]:
    """embedding.json and its tensors for this project, and dense weights for sentence-transformers."""
    files = {name: text.encode() for name, text in embedding.texts().items()}
    files |= {name: tensor_bytes(arrays) for name, arrays in embedding.tensors().items()}
    dense = dense_weights(embedding)
    return files | {f"{name}/{WEIGHTS}": tensor_bytes(arrays, {"format": "pt"}) for name, arrays in dense}


def _arithmetic(plan: Plan, precision: str) -> dict[str, Any]:
    if precision == "int8":
        scales = plan.int8_scales
        fixed = {"scales": "fixed", "calibration": {**scales.origin}} if scales.is_fixed else {}
        return {**fixed, **({"float32": scales.float32} if scales.float32 else {})}
    if precision not in IN_BLOCKS:
        return {}
    blocks = blocks_operators(precision, plan.target.lowering, plan.activations)
    return {"activations": plan.activations, "blocks": blocks}


def _adapter(opened: Checkpoint) -> dict[str, Any]:
    if opened.adapter is None:
        return {}
    c = opened.adapter.config
    facts = {"kind": c.kind, "rank": c.rank, "alpha": c.alpha, "linear_maps": len(c.targets)}
    return {"adapter": {**facts, "beside_integers": len(opened.adapted_integers)}}


def recorded_plan(opened: Checkpoint, folder: Path, values: Mapping[str, Any]) -> Plan:
    """Return the plan by which `folder` was exported from this checkpoint.

    values: the contents of its mlx_transformer.json. Raises UserError for a choice this model doesn't have;
    LookupError, TypeError, ValueError or AttributeError for a malformed record.
    """
    precisions = dict(values["precisions"])
    activations = next((entry["activations"] for name, entry in precisions.items() if name in IN_BLOCKS), None)
    shortlist = values.get("shortlist")
    settings = ExportSettings(
        target=values["target"],
        precision=list(precisions),
        activations=activations,
        attention_layer=values[CROSS_ATTENTION]["layer"] if CROSS_ATTENTION in values else None,
        inputs_embeds=values.get(INPUTS_EMBEDS) is True,
        dimensions=values.get(DIMENSIONS),
        shortlist=folder / SHORTLIST_FILE if isinstance(shortlist, Mapping) else shortlist and NO_SHORTLIST,
    )
    plan = Plan.of(opened, settings)
    if "int8" not in precisions:
        return plan
    return replace(plan, int8_scales=_int8_scales(opened, folder, precisions["int8"].get("calibration")))


def with_findings(plan: Plan, values: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return `record` with the export's own findings: versions, and the quality of lower precisions.

    values: the package's own record; malformed entries are left out.
    """
    precisions = {name: {**entry} for name, entry in record["precisions"].items()}
    for name, entry in precisions.items():
        known = values["precisions"][name]
        if name in LIMITS and _is_quality(name, known.get("quality")):
            entry["quality"] = known["quality"]
        if name == "int8" and _are_layers(known.get("layers"), plan.config):
            entry["layers"] = known["layers"]
    versions = values.get("versions")
    known = isinstance(versions, dict) and all(isinstance(each, str) for each in versions.values())
    return {**record, "precisions": precisions, "versions": versions if known else record["versions"]}


def _int8_scales(opened: Checkpoint, folder: Path, calibration: object) -> Int8Scales:
    """The checkpoint's own scales if the package records these, otherwise the package's calibrated scales."""
    own, used = (read_int8_scales(place, opened.config) or BY_ROW for place in (opened.folder, folder))
    if own.is_fixed and calibration == dict(own.origin):
        return own.leaving(used.float32, opened.config)
    return used


def _is_quality(precision: str, entry: Any) -> bool:
    try:
        quality = Quality(precision, **entry)
        shares = all(0 <= share <= 1 for share in (quality.agreement, quality.same))
        return shares and quality.sentences > 0 and isinstance(quality.text, str) and quality.to_dict() == entry
    except TypeError:
        return False


def _are_layers(entry: Any, config: TransformerConfig) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"text", "sentences", "all", "each"}:
        return False
    each = entry["each"]
    if not isinstance(each, dict) or not each.keys() <= layers_of(quantizable_shapes(config)).keys():
        return False
    keys = {field.name for field in fields(Moved)}
    return all(isinstance(moved, dict) and moved.keys() == keys for moved in (entry["all"], *each.values()))
