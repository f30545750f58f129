"""Core ML on trial when a model is opened: here a stand-in, the CPU's sessions under its name, which computes wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest
from combined import thinned
from coreml_models import SHAPE, config_of
from onnx.reference import ReferenceEvaluator
from random_models import write_model

from export import OnnxTransformer, export_onnx
from export.runtime import sessions as opening
from export.targets.coreml import trial
from export.targets.coreml.trial import (
    MAX,
    NATURAL_MAX,
    NATURAL_RMS,
    OPTIONS,
    PROVIDER,
    RMS,
    difference,
    inputs,
    with_options,
)
from export.validate.engines import open_engine
from export.validate.rule import BUDGETS, UNIT
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.system.errors import UserError

CPU = "CPUExecutionProvider"


class CoreML:
    """A session of the CPU's whose outputs are changed on the way."""

    def __init__(self, session, spoil):
        self.session, self.spoil, self.runs = session, spoil, 0

    def __getattr__(self, name):
        return getattr(self.session, name)

    def run(self, names, feeds):
        self.runs += 1
        outputs = zip(names, self.session.run(names, feeds), strict=True)
        return [self.spoil(name, value.copy(), feeds) for name, value in outputs]

    def get_providers(self):
        return [PROVIDER, CPU]


@pytest.fixture
def coreml(monkeypatch):
    """Make this machine look as if it had Core ML, whose outputs are what `spoil` makes of them: coreml(spoil) -> the
    (file, options) that it was asked for, one for each session."""
    plain, bare = opening.Session, opening.ort.InferenceSession

    def install(spoil=lambda name, value, feeds: value):
        opened = []

        def session(file, options=None, *, providers, **named):
            kind = bare if isinstance(file, bytes) else plain
            if providers == [CPU]:
                return kind(file, options, providers=providers, **named)
            (entry,) = providers
            opened.append((file, entry))
            return CoreML(kind(file, options, providers=[CPU], **named), spoil)

        monkeypatch.setattr(opening.ort, "get_available_providers", lambda: [PROVIDER, CPU])
        monkeypatch.setattr(opening, "Session", session)
        monkeypatch.setattr(opening.ort, "InferenceSession", session)  # what `validate` opens graphs with points by
        return opened

    return install


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(checkpoint, package)"""
    folder = tmp_path_factory.mktemp("trial")
    config = config_of("odd widths", "encoder-decoder")
    return write_model(config, folder, 1, target="coreml", fixed_shape=SHAPE["encoder-decoder"])


def on_coreml(model: OnnxTransformer) -> bool:
    kinds = {isinstance(session, CoreML) for session in model.sessions.values()}
    assert len(kinds) == 1
    return kinds.pop()


def test_what_computes_right_is_used_in_the_form_that_does(written, coreml, capsys):
    opened = coreml()
    model = OnnxTransformer(written[1], providers=[PROVIDER])
    assert on_coreml(model)
    assert capsys.readouterr().err == ""
    assert [entry for _, entry in opened] == [(PROVIDER, OPTIONS)] * 2
    assert OPTIONS == {"ModelFormat": "MLProgram", "RequireStaticInputShapes": "0"}
    before = {name: session.runs for name, session in model.sessions.items()}
    assert set(before.values()) == {trial.RUNS}
    assert model.generate([[5, 6, 7]], max_new_tokens=3) == OnnxTransformer(written[1]).generate(
        [[5, 6, 7]], max_new_tokens=3
    )
    assert all(session.runs > before[name] for name, session in model.sessions.items())


def test_options_that_are_given_stay():
    options = [(PROVIDER, {"MLComputeUnits": "CPUOnly", "RequireStaticInputShapes": "1"}), CPU, ("Other", {"a": 1})]
    (name, of_coreml), *others = with_options(options)
    assert (name, others) == (PROVIDER, options[1:])
    assert of_coreml == {"ModelFormat": "MLProgram", "MLComputeUnits": "CPUOnly", "RequireStaticInputShapes": "1"}
    assert with_options([CPU, PROVIDER]) == [CPU, (PROVIDER, OPTIONS)]


def half(name, value, feeds):
    return value.astype(np.float16).astype(np.float32)


def wrong(name, value, feeds):
    if name == "logits":
        value[-1, 0, -1] += 0.01
    return value


def missing(name, value, feeds):
    if name == "present.1.encoder.key":
        value[0, 0, 2, 1] = np.nan
    return value


def first_row(name, value, feeds):
    """What gather_nd made of ids that aren't constants."""
    return value[:1].repeat(len(value), 0) if name == "last_hidden_state" else value


def cut(name, value, feeds):
    return value[..., :-1] if name == "logits" else value


def raising(name, value, feeds):
    raise RuntimeError("Unable to compute the prediction\n  using a neural network model (error code: -1).")


FAILURES = {
    "float16": (half, r"encoder_coreml: last_hidden_state differs by up to \S+ \(rms \S+\) in values of \S+$"),
    "one logit of one row": (wrong, r"decoder_coreml: logits differs by up to "),
    "NaN": (missing, r"encoder_coreml: present.1.encoder.key has 1 values of \d+ that are no numbers"),
    "the first row everywhere": (first_row, r"encoder_coreml: last_hidden_state differs by up to "),
    "another shape": (cut, r"decoder_coreml: logits has the shape \(3, 1, 49\), not \(3, 1, 50\)"),
    "an error": (raising, r"encoder_coreml: Unable to compute the prediction using a neural network model"),
}


@pytest.mark.parametrize("failure", thinned(FAILURES, 2))
def test_the_cpu_takes_over_with_one_line(failure, written, coreml, capsys):
    spoil, message = FAILURES[failure]
    coreml(spoil)
    model = OnnxTransformer(written[1], providers=[PROVIDER])
    assert not on_coreml(model)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{written[1]}: the CPU computes, not Core ML: ")
    assert re.search(message, line), line
    assert model.generate([[5, 6, 7]], max_new_tokens=3) == OnnxTransformer(written[1]).generate(
        [[5, 6, 7]], max_new_tokens=3
    )


def test_a_graph_that_does_not_load(written, coreml, capsys, monkeypatch):
    coreml()
    plain = opening.Session

    def session(file, options=None, *, providers, **named):
        if providers != [CPU]:
            raise RuntimeError("Error in declaring network.")
        return plain(file, options, providers=providers, **named)

    monkeypatch.setattr(opening, "Session", session)
    assert OnnxTransformer(written[1], providers=[PROVIDER]).generate([[5, 6]], max_new_tokens=3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "not Core ML: encoder_coreml: " in line
    assert "Error in declaring network." in line


def test_a_runtime_that_ends_the_process_is_not_asked(written, coreml, capsys, monkeypatch):
    """Weights in data files were more than it could take."""
    opened = coreml()
    monkeypatch.setattr(opening, "COREML_READS_FILES", False)
    assert not on_coreml(OnnxTransformer(written[1], providers=[PROVIDER]))
    assert not opened
    assert "can't give Core ML a data file: install 1.26 or newer" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"install 1\.26 or newer"):
        open_engine("onnxruntime:coreml", open_checkpoint(written[0]), written[1], 1)


def test_validate_is_not_told_that_all_is_well(written, coreml, capsys):
    """It compares Core ML itself, in the same form, and no CPU takes over."""
    opened = coreml(wrong)
    engine = open_engine("onnxruntime:coreml", open_checkpoint(written[0]), written[1], 1)
    assert [entry for _, entry in opened] == [(PROVIDER, OPTIONS)] * len(opened)
    assert len(opened) >= 2
    assert all(isinstance(session.session, CoreML) for session in engine.sessions.values())
    assert capsys.readouterr().err == ""


def test_a_provider_that_is_not_there_is_an_error(written):
    with pytest.raises(UserError, match=f"provider {PROVIDER} is not in this onnxruntime"):
        OnnxTransformer(written[1], providers=[PROVIDER])


def test_other_targets_are_opened_without_a_trial(written, coreml, capsys, tmp_path):
    opened = coreml(wrong)
    model = OnnxTransformer(export_onnx(written[0], tmp_path / "portable"), providers=[PROVIDER])
    assert on_coreml(model)
    assert all(session.runs == 0 for session in model.sessions.values())
    assert {entry[0] for _, entry in opened} == {PROVIDER}
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("architecture", SHAPE)
def test_inputs_reach_everything(architecture, tmp_path):
    """Both ends of the vocabulary, of positions and lengths; every row has others."""
    config = config_of("two vocabularies", architecture)
    _, package = write_model(config, tmp_path, target="coreml", fixed_shape=SHAPE[architecture])
    model = OnnxTransformer(package)
    for graph, session in model.sessions.items():
        runs = list(inputs(model.folder.request, graph))
        shapes = {entry.name: entry.shape for entry in session.get_inputs()}
        assert all({name: list(x.shape) for name, x in feeds.items()} == shapes for feeds in runs)
        session.run(None, runs[0])
        size = config.vocab_size if graph == "decoder_coreml" else config.source_vocab_size
        first, ids = runs[0]["input_ids"], np.concatenate([feeds["input_ids"].ravel() for feeds in runs])
        assert first.flat[0] == size - 1 == ids.max()
        assert ids.min() == 0
        for name in ("position_ids", "attention_mask", "encoder_attention_mask"):
            for feeds in runs:
                if name in feeds:
                    assert len(np.unique(feeds[name], axis=0)) == len(first)
        if "position_ids" in runs[0]:
            places = np.concatenate([feeds["position_ids"].ravel() for feeds in runs])
            assert (places.min(), places.max()) == (0, 15)
        for name in ("attention_mask", "encoder_attention_mask"):
            if name in runs[0]:
                lengths = np.concatenate([feeds[name].sum(axis=1) for feeds in runs])
                assert (lengths.min(), lengths.max()) == (1, 12)


@pytest.mark.parametrize(("name", "architecture"), [("paper", "encoder-decoder"), ("modern", "decoder")])
def test_another_honest_runtime_passes(name, architecture, tmp_path):
    """onnx's own, in NumPy: its sums are others."""
    config = config_of(name, architecture)
    _, package = write_model(config, tmp_path, target="coreml", fixed_shape=SHAPE[architecture])
    model = OnnxTransformer(package)
    for graph, session in model.sessions.items():
        plain = ReferenceEvaluator(str(model.folder.graphs[graph]))
        for feeds in inputs(model.folder.request, graph):
            pairs = list(zip(plain.run(None, feeds), session.run(None, feeds), strict=True))
            assert [difference(got, expected) for got, expected in pairs] == [""] * len(pairs)
            assert any((got != expected).any() for got, expected in pairs)


def test_the_rule_is_that_of_validate():
    budget = BUDGETS["float32", "cpu"]
    assert (budget.rms, budget.max, UNIT) == (RMS, MAX, trial.UNIT)
    expected = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32) * 3
    rms = np.sqrt(np.mean(np.square(expected, dtype=np.float64)))
    single = expected.astype(np.float64)
    single[3, 5] += 0.99 * MAX * NATURAL_MAX * UNIT * rms
    assert difference(single, expected) == ""
    single[3, 5] += 0.02 * MAX * NATURAL_MAX * UNIT * rms
    assert "differs by up to" in difference(single, expected)
    assert difference(expected + 0.99 * RMS * NATURAL_RMS * UNIT * rms, expected) == ""
    assert "differs" in difference(expected + 1.01 * RMS * NATURAL_RMS * UNIT * rms, expected)
    assert difference(np.zeros((2, 2)), np.zeros((2, 2))) == ""
