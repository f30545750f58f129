"""One export in a process of its own that measures itself: `python -m engines.exporters STEP IN OUT ...`.

    ours CHECKPOINT OUT TARGET PRECISION    `export_onnx`
    optimum MARIAN OUT                      Optimum's `main_export`, four graphs
    torch MARIAN OUT GRAPH                  `torch.onnx.export`, dynamo: encoder, decoder (whole) or step (cached)
    ct2 MARIAN OUT PRECISION                CTranslate2's conversion

Prints {"seconds": s, "cpu": s, "peak": bytes}: interpreter and imports included.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from . import prepare
from .worker import memory


def ours(checkpoint: str, out: str, target: str, precision: str) -> None:
    from export import export_onnx

    export_onnx(checkpoint, out, target=target, precision=precision, force=True, accept_loss=True)


def torch(marian: str, out: str, graph: str) -> None:
    """One graph as somebody would write it who has the model and the exporter's manual: dynamic batch and lengths."""
    import torch as t  # type: ignore[import-not-found]
    from transformers import MarianMTModel  # type: ignore[import-not-found]
    from transformers.cache_utils import EncoderDecoderCache  # type: ignore[import-not-found]
    from transformers.modeling_outputs import BaseModelOutput  # type: ignore[import-not-found]

    model = MarianMTModel.from_pretrained(marian, attn_implementation="sdpa").eval()
    config = model.config
    batch, source, past = (t.export.Dim(name, min=1, max=512) for name in ("batch", "source", "past"))
    target = t.export.Dim("target", min=2, max=512)

    class Encoder(t.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.get_encoder()

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state

    class Decoder(t.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, hidden: Any, mask: Any) -> Any:
            encoded = BaseModelOutput(hidden)
            return self.model(
                encoder_outputs=encoded, attention_mask=mask, decoder_input_ids=ids, use_cache=False
            ).logits

    class Step(Decoder):
        def forward(self, ids: Any, hidden: Any, mask: Any, caches: list[Any]) -> Any:  # type: ignore[override]
            layers = tuple(tuple(caches[4 * i : 4 * i + 4]) for i in range(config.decoder_layers))
            found = self.model(
                encoder_outputs=BaseModelOutput(hidden),
                attention_mask=mask,
                decoder_input_ids=ids,
                past_key_values=EncoderDecoderCache.from_legacy_cache(layers),
                use_cache=True,
            )
            grown = found.past_key_values.to_legacy_cache()
            return found.logits, [cache for layer in grown for cache in layer[:2]]

    heads, width = config.decoder_attention_heads, config.d_model // config.decoder_attention_heads
    mask, hidden = t.ones(2, 7, dtype=t.int64), t.randn(2, 7, config.d_model)
    sizes = ({0: batch, 1: source}, {0: batch, 1: source})  # hidden, mask
    if graph == "encoder":
        module, given, dynamic = Encoder(), (t.ones_like(mask), mask), sizes
    elif graph == "decoder":
        module, given = Decoder(), (t.ones(2, 5, dtype=t.int64), hidden, mask)
        dynamic = ({0: batch, 1: target}, *sizes)
    else:
        caches = [t.randn(2, heads, n, width) for _ in range(config.decoder_layers) for n in (4, 4, 7, 7)]
        module, given = Step(), (t.ones(2, 1, dtype=t.int64), hidden, mask, caches)
        grown = [{0: batch, 2: n} for _ in range(config.decoder_layers) for n in (past, past, source, source)]
        dynamic = ({0: batch}, *sizes, grown)
    Path(out).mkdir()
    t.onnx.export(module, given, f"{out}/{graph}.onnx", dynamo=True, dynamic_shapes=dynamic, verbose=False)


STEPS = {"ours": ours, "optimum": prepare.optimum, "torch": torch, "ct2": prepare.ct2}

if __name__ == "__main__":
    start = time.perf_counter()
    STEPS[sys.argv[1]](*sys.argv[2:])
    found = {"seconds": time.perf_counter() - start, "cpu": time.process_time(), "peak": memory("VmHWM")}
    print("\n" + json.dumps(found))
