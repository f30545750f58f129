"""The comparison with an original network, by originals that are known: the reference itself, and wrong ones."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from combined import thinned
from random_models import write_model
from rich.console import Console
from runtimes import unasked
from small_models import alone, encoder_decoder

from export.validate import compare, validate_command
from export.validate.cases import Case, grid, reference_taps
from export.validate.engines.protocol import Unavailable
from export.validate.engines.reference_engine import ReferenceEngine
from export.validate.origin import Origin, check, hugging_face
from export.validate.origin.check import CHECKPOINT, compare_with_origin
from export.validate.points import tap_names
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.decoding.options import Options
from mlx_transformer.system.errors import UserError


class Known(Origin):
    """An original that is the reference of these weights; an encoder shows its last hidden states."""

    name = "transformers"

    def __init__(self, config: TransformerConfig, weights: Any, forgets: int | None = None) -> None:
        self.config, self.forgets = config, forgets
        self.engine = ReferenceEngine(config, weights, "float64")

    def described(self) -> str:
        return "transformers 0.0"

    def fitted(self, case: Case) -> Case | None:
        return None if case.name == "padding left" else case

    def outputs(self, case: Case) -> dict[str, Any]:
        taps = reference_taps(self.engine.model, case)
        if self.config.has_decoder:
            return {"logits": taps["logits"]}
        last = tap_names(self.config)[-2]
        return {last: taps[last]}

    def searches(self, limit: int, settings: Any) -> dict[str, Options]:
        return {"greedy": Options(max_new_tokens=limit), "beam 2": Options(beam=2, max_new_tokens=limit)}

    def search(self, sources: Sequence[list[int]], name: str, options: Options) -> list[list[int]]:
        if self.forgets is not None:
            options = replace(options, suppressed=(self.forgets,))
        return [ids for ids, _ in self.engine.search(sources, options)]


def opened(folder: Path, config: TransformerConfig) -> tuple[Path, Path, Any, Any]:
    checkpoint, package = write_model(config, folder, 1)
    return checkpoint, package, open_checkpoint(checkpoint), dict(open_checkpoint(checkpoint).tensors())


@pytest.mark.fast("encoder")
@pytest.mark.parametrize("architecture", thinned(["encoder", "encoder-decoder", "decoder"], 2))
def test_an_original_of_any_architecture_judges_every_runtime(
    architecture: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = encoder_decoder("paper") if architecture == "encoder-decoder" else alone("paper", architecture)
    checkpoint, package, _, weights = opened(tmp_path, config)
    monkeypatch.setattr(check, "open_origin", lambda *_: Known(config, weights))
    report = compare(checkpoint, package, seed=2, threads=1, longest=12, against="transformers", original=tmp_path)
    assert report.equal, report.failures()
    assert report.against[0] == "against transformers 0.0"
    assert report.against[1].startswith("6 of 7" if architecture == "encoder" else f"{len(report.inputs) - 1} of ")
    judged = {(p.runtime, p.tap) for p in report.points if p.path == "against transformers"}
    tap = "logits" if config.has_decoder else tap_names(config)[-2]
    assert judged == {(name, tap) for name in (CHECKPOINT, *unasked())}
    out = io.StringIO()
    report.print(Console(file=out, width=200))
    assert "against transformers 0.0" in out.getvalue()


def test_an_original_with_another_weight_is_found(tmp_path: Path) -> None:
    config = encoder_decoder("paper")
    *_, checkpoint, weights = opened(tmp_path, config)
    name = "decoder.layers.0.feed_forward.up_proj.bias"
    other = {**weights, name: weights[name] + np.float32(0.01)}
    cases = grid(config, 3, longest=12)
    same = compare_with_origin(Known(config, weights), checkpoint, [], cases)
    assert all(point.passed for point in same.points)
    assert all(tokens.passed for tokens in same.tokens)
    found = compare_with_origin(Known(config, other), checkpoint, [], cases)
    assert [point.passed for point in found.points] == [False]


def test_an_original_that_searches_otherwise_is_found(tmp_path: Path) -> None:
    """The network is the same, so that logits tell nothing."""
    config = encoder_decoder("paper")
    *_, checkpoint, weights = opened(tmp_path, config)
    cases = grid(config, 3, longest=12)
    plain = Known(config, weights)
    written = plain.search([case.rows()[0] for case in cases], "", Options(max_new_tokens=5, beam=2))
    often = max(range(config.vocab_size), key=lambda token: sum(token in row for row in written))
    found = compare_with_origin(Known(config, weights, forgets=often), checkpoint, [], cases)
    assert all(point.passed for point in found.points)
    assert [t.search for t in found.tokens if not t.passed] == ["transformers: beam 2"]


def test_weights_of_another_precision_are_judged_by_its_budget(tmp_path: Path) -> None:
    config = encoder_decoder("paper")
    *_, checkpoint, weights = opened(tmp_path, config)
    half = ReferenceEngine(config, {n: w.astype(np.float16).astype(np.float32) for n, w in weights.items()})
    half.precision, half.name = "float16", "half"
    found = compare_with_origin(Known(config, weights), checkpoint, [half], grid(config, 3, longest=12))
    assert {p.runtime: p.passed for p in found.points} == {CHECKPOINT: True, "half": True}
    assert max(p.worst.rms_ratio for p in found.points if p.runtime == "half") > 0


def test_what_is_not_installed_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = encoder_decoder("paper")
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="not installed here: pip install torch transformers"):
        hugging_face.HuggingFace(tmp_path, config)
    checkpoint, package = write_model(config, tmp_path, 1)
    status = validate_command(checkpoint, package, against="transformers", original=tmp_path)
    assert status == 3
    assert "pip install torch transformers" in capsys.readouterr().err
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: True)

    def wrong_version(name: str) -> None:
        raise ImportError("huggingface-hub>=0.34 is required\nTry: more")

    monkeypatch.setattr(hugging_face, "import_module", wrong_version)
    with pytest.raises(Unavailable, match=r"--against transformers: huggingface-hub>=0\.34 is required Try: more"):
        hugging_face.HuggingFace(tmp_path, config)


def test_mlx_lm_runs_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is played by our own network, with its interface: load_model, caches, float64 on the CPU."""
    config = alone("paper", "decoder")
    checkpoint, package, _, _ = opened(tmp_path, config)
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="pip install mlx-lm"):
        hugging_face.MlxLm(checkpoint, config)
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: True)

    class Theirs:
        def __init__(self, folder: Path) -> None:
            self.engine = ReferenceEngine(config, dict(open_checkpoint(folder).tensors()), "float64")

        def set_dtype(self, dtype: Any) -> None:
            assert dtype == mx.float64

        def __call__(self, ids: Any, cache: list[int] | None = None) -> Any:
            before = [] if cache is None else cache
            before += np.array(ids)[0].tolist() if cache is not None else []
            every = np.array(ids) if cache is None else np.array([before])
            return mx.array(self.engine.model(every), dtype=mx.float64)

    modules = {
        "mlx.core": mx,
        "mlx_lm.utils": SimpleNamespace(
            load_model=lambda folder: (Theirs(folder), {"model_type": "mistral", **WINDOW})
        ),
        "mlx_lm.models.cache": SimpleNamespace(make_prompt_cache=lambda model: []),
    }
    monkeypatch.setattr(hugging_face, "import_module", modules.__getitem__)
    monkeypatch.setattr(hugging_face, "version", lambda name: "0.0")
    settings: Any = dict(seed=2, threads=1, longest=8, against="mlx-lm", original=checkpoint, runtimes=["onnxruntime"])
    report = compare(checkpoint, package, **settings)
    assert report.equal, report.failures()
    assert report.against[0].endswith("; other than in transformers, it knows no sliding_window")
    assert {p.runtime for p in report.points if p.path == "against mlx-lm"} == {CHECKPOINT, "onnxruntime"}
    assert any(check.search == "mlx-lm: greedy" for check in report.tokens)
    run = Theirs.__call__
    monkeypatch.setattr(Theirs, "__call__", lambda self, ids, cache=None: 1.001 * run(self, ids, cache))
    assert not compare(checkpoint, package, **settings).equal
    monkeypatch.setattr(Theirs, "__call__", lambda self, ids, cache=None: [][0])
    with pytest.raises(UserError, match=r"mlx-lm can't run it \(list index out of range"):
        hugging_face.MlxLm(checkpoint, config)


def test_mlx_lm_dequantises_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX dequantises to the type of the scales, and float16 would round scale * integer + bias."""
    linear = mx.random.normal((4, 64), key=mx.random.key(1)).astype(mx.float16)
    stored = mx.quantize(linear, 32, 4)
    exact = mx.dequantize(stored[0], *(part.astype(mx.float32) for part in stored[1:]), group_size=32, bits=4)

    class Theirs:
        weights: Any = stored

        def set_dtype(self, dtype: Any) -> None:
            self.weights = tuple(x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x for x in self.weights)

        def __call__(self, ids: Any) -> Any:
            return mx.zeros((1, 1, 4))

    def dequantize_model(model: Theirs) -> Theirs:
        model.weights = [mx.dequantize(*model.weights, group_size=32, bits=4)]
        return model

    modules = {
        "mlx.core": mx,
        "mlx_lm.utils": SimpleNamespace(
            load_model=lambda folder: (Theirs(), {"quantization": {}}), dequantize_model=dequantize_model
        ),
        "mlx_lm.models.cache": SimpleNamespace(make_prompt_cache=lambda model: []),
    }
    monkeypatch.setattr(hugging_face, "find_spec", lambda name: True)
    monkeypatch.setattr(hugging_face, "import_module", modules.__getitem__)
    [weight] = hugging_face.MlxLm(tmp_path, alone("paper", "decoder")).model.weights
    with mx.stream(mx.cpu):
        assert np.array_equal(np.array(weight), np.array(exact.astype(mx.float64)))


WINDOW = {"sliding_window": 3, "hidden_act": "silu"}
