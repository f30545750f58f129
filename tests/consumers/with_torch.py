"""Export a checkpoint with torch's own modules and torch's own exporter: runs in an environment without ours.

    python with_torch.py CHECKPOINT OUT [FAULT]

OUT/one/model.onnx holds the whole network, with names that nobody else uses; OUT/two has encoder_model.onnx and
decoder_model.onnx with Optimum's. The exporter is the older one, from traces: the newer one needs onnxscript as well.
FAULT makes the export wrong: "norm_epsilon" (1e-6 for 1e-5) or "no_scale" (embeddings not multiplied by
sqrt(d_model)).

B batch, S source, T target, D model, V vocabulary.
"""

import json
import math
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

OPSET = 17
EMBEDDINGS = {"all": ("", ""), "target-output": ("source_", "target_"), "none": ("source_", "target_")}
NORMS = {"self_attention": "norm1", "cross_attention": "norm2"}  # the feed-forward's is the last one
ATTENTIONS = {"self_attention": "self_attn", "cross_attention": "multihead_attn"}


class Attention(nn.MultiheadAttention):
    """torch's module and parameters; its own forward is traced with the example's batch and lengths as constants."""

    def forward(self, query, key, value, attn_mask=None, key_padding_mask=None, need_weights=False, is_causal=False):
        """query (B,T,D), key and value (B,S,D); masks are True, or -inf, where a query may not look."""
        mask = attn_mask if key_padding_mask is None else key_padding_mask[:, None, None, :]
        if mask.dtype == torch.bool:
            mask = ~mask
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        heads = [
            functional.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
        x = functional.scaled_dot_product_attention(*heads, attn_mask=mask)  # (B,H,T,d)
        return self.out_proj(x.transpose(1, 2).flatten(2)), None


class Network(nn.Module):
    """torch.nn's Transformer layers, with fused projections of queries, keys and values, around the same embeddings."""

    def __init__(self, config, weights, fault=""):
        super().__init__()
        self.config = config
        self.weights = weights
        self.scale = 1.0 if fault == "no_scale" or not config["scale_embeddings"] else math.sqrt(config["d_model"])
        settings = dict(
            dropout=0.0,
            activation=config["activation"],
            layer_norm_eps=1e-6 if fault == "norm_epsilon" else config["norm_epsilon"],
            batch_first=True,
            norm_first=config["norm_placement"] == "pre",
        )
        sizes = config["d_model"], config["heads"], config["d_ff"]
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(*sizes, **settings) for _ in range(config["encoder_layers"])
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(*sizes, **settings) for _ in range(config["decoder_layers"])
        )
        for stack in ("encoder", "decoder"):
            for i, layer in enumerate(getattr(self, stack)):
                for name in ATTENTIONS.values() if stack == "decoder" else ("self_attn",):
                    setattr(layer, name, Attention(*sizes[:2], batch_first=True))
                layer.load_state_dict(self.of_torch(f"{stack}.layers.{i}", stack == "decoder"))
        final = nn.LayerNorm if settings["norm_first"] else nn.Identity
        shape = (config["d_model"],)
        self.norms = nn.ModuleDict({s: final(shape, settings["layer_norm_eps"]) for s in ("encoder", "decoder")})
        if settings["norm_first"]:
            for stack, norm in self.norms.items():
                norm.load_state_dict({part: weights[f"{stack}.norm.{part}"] for part in ("weight", "bias")})
        source, target = EMBEDDINGS[config["tie_embeddings"]]
        self.source = nn.Embedding.from_pretrained(weights[f"{source}embedding.weight"])
        self.target = nn.Embedding.from_pretrained(weights[f"{target}embedding.weight"])
        self.register_buffer("table", sinusoids(config["max_positions"], config["d_model"]))
        self.register_buffer(
            "classifier",
            weights["output_proj.weight"] if config["tie_embeddings"] == "none" else self.target.weight.data,
        )

    def of_torch(self, prefix, decoder):
        """One layer's parameters by torch's names: three projections in one, zeros where it has no biases."""
        w, d = self.weights, self.config["d_model"]
        last = "norm3" if decoder else "norm2"
        found = {}
        for ours in ("self_attention", "cross_attention") if decoder else ("self_attention",):
            name, theirs = f"{prefix}.{ours}", ATTENTIONS[ours]
            parts = [f"{name}.{part}_proj" for part in ("query", "key", "value")]
            biases = [w.get(f"{part}.bias", torch.zeros(d)) for part in parts]
            found[f"{theirs}.in_proj_weight"] = torch.cat([w[f"{part}.weight"] for part in parts])
            found[f"{theirs}.in_proj_bias"] = torch.cat(biases)
            found[f"{theirs}.out_proj.weight"] = w[f"{name}.output_proj.weight"]
            found[f"{theirs}.out_proj.bias"] = w.get(f"{name}.output_proj.bias", torch.zeros(d))
        norms = {ours: theirs for ours, theirs in NORMS.items() if decoder or ours == "self_attention"}
        for ours, theirs in {**norms, "feed_forward": last}.items():
            for part in ("weight", "bias"):
                found[f"{theirs}.{part}"] = w[f"{prefix}.{ours}_norm.{part}"]
        for ours, theirs in (("up_proj", "linear1"), ("down_proj", "linear2")):
            for part in ("weight", "bias"):
                found[f"{theirs}.{part}"] = w[f"{prefix}.feed_forward.{ours}.{part}"]
        return found

    def encode(self, ids, mask):
        """Memory (B,S,D) of source ids (B,S); mask (B,S): 1 on tokens, which alone count as positions."""
        real = mask.bool()
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        x = self.source(ids) * self.scale + self.table[positions]
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=~real)
        return self.norms["encoder"](x)

    def decode(self, ids, memory, mask):
        """Logits (B,T,V) of target ids (B,T)."""
        positions = torch.ones_like(ids).cumsum(1) - 1
        x = self.target(ids) * self.scale + self.table[positions]
        later = positions[0][None, :] > positions[0][:, None]  # (T,T): True where a query may not look
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=later, memory_key_padding_mask=~mask.bool())
        logits = self.norms["decoder"](x) @ self.classifier.T
        bias = self.weights.get("output_proj.bias")
        return logits if bias is None else logits + bias

    def forward(self, source, target, mask):
        return self.decode(target, self.encode(source, mask), mask)


class Part(nn.Module):
    """One method of a network as a module: the exporter takes modules."""

    def __init__(self, network, method):
        super().__init__()
        self.network, self.method = network, method

    def forward(self, *inputs):
        return getattr(self.network, self.method)(*inputs)


def sinusoids(rows, width):
    """Vaswani et al. 2017, section 3.5, (rows, width)."""
    angle = torch.arange(rows).double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).float()


def export(module, inputs, file, output, axes):
    """`inputs`: {name: example}; axes: {name: {axis: name of its size}}. Batch and lengths are free."""
    file.parent.mkdir(parents=True, exist_ok=True)
    names = dict(input_names=list(inputs), output_names=[output], dynamic_axes=axes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this exporter is the old one, and that traced shapes are constants
        torch.onnx.export(module.eval(), tuple(inputs.values()), file, opset_version=OPSET, dynamo=False, **names)


def main(checkpoint, out, fault=""):
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # its fused layer has no ONNX operator
    folder, out = Path(checkpoint), Path(out)
    network = Network(
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
        load_file(folder / "model.safetensors"),
        fault,
    ).eval()
    source, target = torch.tensor([[5, 6, 7, 0], [8, 9, 3, 4]]), torch.tensor([[1, 5, 6], [1, 7, 8]])
    mask = (source != 0).int()
    S, T = {0: "batch", 1: "source"}, {0: "batch", 1: "target"}
    export(
        network,
        dict(src=source.int(), tgt=target.int(), src_is_token=mask.bool()),
        out / "one" / "model.onnx",
        "scores",
        dict(src=S, tgt=T, src_is_token=S, scores=T),
    )
    export(
        Part(network, "encode"),
        dict(input_ids=source, attention_mask=mask.long()),
        out / "two" / "encoder_model.onnx",
        "last_hidden_state",
        dict(input_ids=S, attention_mask=S, last_hidden_state=S),
    )
    with torch.no_grad():
        memory = network.encode(source, mask)
    export(
        Part(network, "decode"),
        dict(input_ids=target, encoder_hidden_states=memory, encoder_attention_mask=mask.long()),
        out / "two" / "decoder_model.onnx",
        "logits",
        dict(input_ids=T, encoder_hidden_states=S, encoder_attention_mask=S, logits=T),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
