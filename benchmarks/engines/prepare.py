"""What the peers load, made in their interpreter: `python -m engines.prepare STEP ...`.

random SIZE OUT             a Marian model with seeded random weights, or one of another family in a published size
ct2 FOLDER OUT PRECISION    CTranslate2's conversion, of a Pegasus model (norms before each sub-layer) as well
genai FOLDER OUT PRECISION  what onnxruntime-genai's builder makes of a decoder for a CPU
mlx-lm FOLDER OUT PRECISION mlx-lm's own 8 or 4 bits of a decoder, in groups of 64
optimum FOLDER OUT          Optimum's export, four graphs
quantise OPTIMUM OUT        its dynamic quantisation for AVX2
bert PUBLISHED OUT          a BERT-base of random weights that reads 128 tokens, in a folder of sentence-transformers
                            with the tokenizer and the pooling of another one
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES = {"small": (3, 256, 1024, 4), "base": (6, 512, 2048, 8)}  # layers of each stack, width, feed-forward, heads
VOCABULARY = 8000
POSITIONS = 512
PUBLISHED = {
    "bart-base": ("Bart", {"d_model": 768, "vocab_size": 50265, "max_position_embeddings": 1024}, (6, 12, 3072)),
    "t5-base": ("T5", {"d_model": 768, "d_kv": 64, "vocab_size": 32128, "dropout_rate": 0.0}, (12, 12, 3072)),
    "nllb-600m": ("M2M100", {"d_model": 1024, "vocab_size": 256206, "max_position_embeddings": 1024}, (12, 16, 4096)),
}
"""Family, fields of its config, and layers of each stack, heads, feed-forward. No end is forced at the length limit."""
DECODERS = {
    "qwen3-0.6b": (
        "Qwen3",
        {"vocab_size": 151936, "hidden_size": 1024, "head_dim": 128, "rope_theta": 1e6, "rms_norm_eps": 1e-6},
        (28, 16, 8, 3072),
    ),
    "llama-1b": (
        "Llama",
        {"vocab_size": 128256, "hidden_size": 2048, "head_dim": 64, "rope_theta": 5e5, "rms_norm_eps": 1e-5},
        (16, 32, 8, 8192),
    ),
}
"""Family, fields of its config, and layers, heads, heads of keys and values, feed-forward. Embeddings are shared."""


def random(size: str, out: str) -> None:
    """As Opus models have it: eos 0, the last id is padding and starts the decoder, with a zero embedding.

    Scales are such that outputs depend on the source and don't repeat one token, as those of most random Transformers
    do: a feed-forward layer that outweighs the residual and whose mean is zero (ReLU's is not, and would add the same
    vector everywhere). Logits have a standard deviation of 1; no bias and no norm is neutral.
    """
    import torch  # type: ignore[import-not-found]
    from transformers import MarianConfig, MarianMTModel  # type: ignore[import-not-found]

    if size in PUBLISHED:
        of_family(size, out)
        return
    if size in DECODERS:
        decoder(size, out)
        return
    layers, d_model, d_ff, heads = SIZES[size]
    pad = VOCABULARY - 1
    torch.manual_seed(0)
    model = MarianMTModel(
        MarianConfig(
            vocab_size=VOCABULARY,
            d_model=d_model,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=heads,
            decoder_attention_heads=heads,
            encoder_ffn_dim=d_ff,
            decoder_ffn_dim=d_ff,
            activation_function="relu",
            scale_embedding=True,
            max_position_embeddings=POSITIONS,
            pad_token_id=pad,
            decoder_start_token_id=pad,
            bos_token_id=0,
            eos_token_id=0,
            forced_eos_token_id=None,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_positions" in name:
                continue
            noise = torch.randn_like(weight)
            if "norm.weight" in name:
                weight.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif "shared" in name:
                weight.copy_(noise * d_model**-0.5)
            else:
                if "fc2" in name:
                    noise -= noise.mean(1, keepdim=True)
                gain = {"q_proj": 1, "k_proj": 1, "fc2": 8}.get(name.split(".")[-2], 0.5)
                weight.copy_(noise * gain * weight.shape[1] ** -0.5)
        model.model.shared.weight[pad] = 0
    model.save_pretrained(out)


def of_family(size: str, out: str) -> None:
    """With the weights that transformers begins training with."""
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    family, fields, (layers, heads, d_ff) = PUBLISHED[size]
    if family == "T5":
        fields |= {"num_layers": layers, "num_heads": heads, "d_ff": d_ff}
    else:
        for side in ("encoder", "decoder"):
            fields |= {f"{side}_layers": layers, f"{side}_attention_heads": heads, f"{side}_ffn_dim": d_ff}
        fields |= {"forced_eos_token_id": None}
        if family == "Bart":  # CTranslate2's converter asks for these
            fields |= {"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(
        getattr(transformers, f"{family}Config")(**fields)
    )
    if family == "T5":
        with torch.no_grad():
            model.shared.weight[0] = 0  # padding starts the decoder, and would follow itself
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(out)


def decoder(size: str, out: str) -> None:
    """With the weights that transformers begins training with, but norms that aren't neutral."""
    import torch  # type: ignore[import-not-found]
    import transformers  # type: ignore[import-not-found]

    family, fields, (layers, heads, shared, d_ff) = DECODERS[size]
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        intermediate_size=d_ff,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        **fields,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.1 * torch.randn_like(weight))
    model.save_pretrained(out)


def genai(folder: str, out: str, precision: str) -> None:
    name, cache = {"float32": "fp32"}.get(precision, precision), f"{out}.cache"
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", folder, "-o", out]
    subprocess.run([*builder, "-p", name, "-e", "cpu", "-c", cache], check=True)
    shutil.rmtree(cache, ignore_errors=True)


def mlx_lm(folder: str, out: str, precision: str) -> None:
    from mlx_lm import convert  # type: ignore[import-not-found]

    convert(folder, out, quantize=True, q_bits={"int8": 8, "int4": 4}[precision], dtype="float32")


def ct2_decoder(folder: str, out: str, precision: str) -> None:
    """Its vocabulary are the ids' decimal numbers."""
    from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]
    from transformers import AutoConfig  # type: ignore[import-not-found]

    config = AutoConfig.from_pretrained(folder)

    class Tokenizer:
        bos_token, eos_token, pad_token = (str(getattr(config, f"{role}_token_id")) for role in ("bos", "eos", "pad"))
        unk_token = "0"

        def get_vocab(self) -> dict[str, int]:
            return {str(i): i for i in range(config.vocab_size)}

    class Converter(TransformersConverter):
        def load_tokenizer(self, tokenizer_class: Any, folder: str, **options: Any) -> Tokenizer:
            return Tokenizer()

    Converter(folder).convert(out, quantization=precision, force=True)


def ct2(folder: str, out: str, precision: str) -> None:
    if json.loads((Path(folder) / "config.json").read_text())["model_type"] in ("llama", "qwen3"):
        ct2_decoder(folder, out, precision)
        return
    import torch  # type: ignore[import-not-found]
    from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]
    from ctranslate2.converters import transformers as loaders
    from transformers import AutoConfig, AutoModelForSeq2SeqLM  # type: ignore[import-not-found]

    config = AutoConfig.from_pretrained(folder)
    with torch.no_grad():
        start = (
            AutoModelForSeq2SeqLM.from_pretrained(folder).get_input_embeddings().weight[config.decoder_start_token_id]
        )
        is_last = config.pad_token_id == config.decoder_start_token_id == config.vocab_size - 1
        as_opus = config.model_type == "marian" and is_last and not start.any()

    class Tokenizer:
        """A vocabulary of the ids' decimal numbers. The loader of Opus models drops the last token, "<pad>"."""

        eos_token, unk_token = str(config.eos_token_id), str(config.eos_token_id + 1)
        bos_token, pad_token = str(config.decoder_start_token_id), str(config.pad_token_id)
        special_tokens_map: Mapping[str, Any] = {}

        def convert_ids_to_tokens(self, id: int) -> str:
            return str(id)

        def get_vocab(self) -> dict[str, int]:
            padding = config.pad_token_id if as_opus else None
            return {"<pad>" if i == padding else str(i): i for i in range(config.vocab_size)}

    class Loader(loaders.MarianMTLoader):
        """For models whose start token has an embedding, and whose last id is a word."""

        set_decoder = loaders.BartLoader.set_decoder
        get_vocabulary = loaders.BartLoader.get_vocabulary

        def set_config(self, settings: Any, model: Any, tokenizer: Any) -> None:
            super().set_config(settings, model, tokenizer)
            settings.decoder_start_token = str(config.decoder_start_token_id)

        def _remove_pad_weights(self, spec: Any) -> None:
            pass

    class PegasusLoader(loaders.PegasusLoader):
        def set_config(self, settings: Any, model: Any, tokenizer: Any) -> None:
            settings.eos_token, settings.unk_token = tokenizer.eos_token, tokenizer.unk_token
            settings.bos_token = settings.decoder_start_token = str(config.decoder_start_token_id)

    class Converter(TransformersConverter):
        def load_tokenizer(self, tokenizer_class: Any, folder: str, **options: Any) -> Tokenizer:
            return Tokenizer()

    if not as_opus:
        loaders._MODEL_LOADERS |= {"MarianConfig": Loader(), "PegasusConfig": PegasusLoader()}
    Converter(folder).convert(out, quantization=precision, force=True)


def optimum(folder: str, out: str) -> None:
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found]

    main_export(folder, out, task="text2text-generation-with-past", do_validation=False)


def bert(published: str, out: str) -> None:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoConfig, BertConfig, BertModel  # type: ignore[import-not-found]

    torch.manual_seed(0)
    shutil.copytree(published, out, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "onnx"))
    limits, pooling = Path(out) / "sentence_bert_config.json", Path(out) / "1_Pooling" / "config.json"
    limits.write_text(json.dumps({"max_seq_length": 128, "do_lower_case": False}))
    config = BertConfig(vocab_size=AutoConfig.from_pretrained(published).vocab_size)
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "word_embedding_dimension": config.hidden_size}))
    BertModel(config).save_pretrained(out)


def quantise(exported: str, out: str) -> None:
    from optimum.onnxruntime import ORTQuantizer  # type: ignore[import-not-found]
    from optimum.onnxruntime.configuration import AutoQuantizationConfig  # type: ignore[import-not-found]

    chosen = AutoQuantizationConfig.avx2(is_static=False, per_channel=True)
    for graph in sorted(Path(exported).glob("*.onnx")):
        quantizer = ORTQuantizer.from_pretrained(exported, file_name=graph.name)
        quantizer.quantize(save_dir=out, quantization_config=chosen, file_suffix="")
    for settings in ("config.json", "generation_config.json"):
        shutil.copy(Path(exported) / settings, out)


if __name__ == "__main__":
    steps = {"random": random, "ct2": ct2, "optimum": optimum, "quantise": quantise, "bert": bert}
    (steps | {"genai": genai, "mlx-lm": mlx_lm})[sys.argv[1]](*sys.argv[2:])
