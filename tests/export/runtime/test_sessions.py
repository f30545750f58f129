"""How an exported folder's sessions are opened: what the optimiser is spared, and for which folders."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from ending_models import POST_NORM, made, rows
from random_models import write_model
from small_models import alone, encoder_decoder

from export import OnnxTransformer, export_onnx
from export.runtime import sessions as opening
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import open_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.errors import UserError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return made(tmp_path_factory.mktemp("opening"), **POST_NORM)[1]


def unfolded(monkeypatch, folder, **options) -> set[str]:
    """Names of the graphs that are opened without constant folding."""
    disabled = {}
    plain = opening.open_session

    def open_session(file, providers=None, options=None, without=(), model=None):
        disabled[Path(file).stem] = list(without)
        return plain(file, providers, options, without, model)

    monkeypatch.setattr(opening, "open_session", open_session)
    model = OnnxTransformer(folder, threads=2, **options)
    assert set(disabled) == {file.stem for file in model.folder.graphs.values()}
    return {name for name, without in disabled.items() if without == opening.FOLDING}


def test_matrices_in_float32_are_not_folded(checkpoint, tmp_path, monkeypatch):
    folder = export_onnx(checkpoint, tmp_path / "onnx", precision=["float32", "float16", "int8"], force=True)
    assert unfolded(monkeypatch, folder) == {"encoder_model", "decoder_model", "decoder_with_past_model"}
    assert not unfolded(monkeypatch, folder, precision="float16")
    assert not unfolded(monkeypatch, folder, precision="int8")


@pytest.mark.fast("portable")
@pytest.mark.parametrize("target", ["portable", "cpu"])
def test_matrices_of_integers_are_computed_before_a_session_opens(target, checkpoint, tmp_path, monkeypatch):
    """ONNX Runtime would keep what each operation gives until the last is done."""
    quantize_checkpoint(checkpoint, tmp_path / "q5", Scheme(32, 5))
    folder = export_onnx(tmp_path / "q5", tmp_path / "onnx", target=target)
    unpacked, plain = [], opening.unpack
    monkeypatch.setattr(opening, "unpack", lambda *given: unpacked.append((given, plain(*given))) or unpacked[-1][1])
    answers = [OnnxTransformer(folder, threads=1).generate(rows())]
    weights = open_checkpoint(tmp_path / "q5")
    assert len(unpacked) == (3 if target == "portable" else 2)
    computed: list[str] = []
    for (file, shapes, files), model in unpacked:
        graph = onnx.load_from_string(model).graph
        assert not {"BitShift", "BitwiseAnd"} & {node.op_type for node in graph.node}, file
        for tensor in (tensor for tensor in graph.initializer if tensor.name in shapes):
            told = {each.key: each.value for each in tensor.external_data}
            if told.get("location") == "unpacked":
                computed.append(tensor.name)
                memory = np.frombuffer(files["unpacked"], np.float32, np.prod(tensor.dims), int(told["offset"]))
                assert memory.tobytes() == weights.tensor(tensor.name).tobytes(), tensor.name
    assert {*computed} == {*weights.quantization}
    monkeypatch.setattr(opening, "unpack", lambda *given: None)
    answers.append(OnnxTransformer(folder, threads=1).generate(rows()))
    assert answers[0] == answers[1]


def test_other_targets_are_folded(checkpoint, tmp_path, monkeypatch):
    assert not unfolded(monkeypatch, export_onnx(checkpoint, tmp_path / "onnx", target="cpu"))


def test_no_transpose_of_a_matrix_is_left(checkpoint, tmp_path):
    folder = export_onnx(checkpoint, tmp_path / "onnx")
    for name, file in OnnxTransformer(folder).folder.graphs.items():
        options = opening.session_options(1)
        options.optimized_model_filepath = str(tmp_path / f"{name}.onnx")
        opening.open_session(file, None, options, opening.FOLDING)
        graph = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False).graph
        stored = {tensor.name for tensor in graph.initializer}
        assert "FusedMatMul" in {node.op_type for node in graph.node}
        assert not [node.name for node in graph.node if node.op_type == "Transpose" and node.input[0] in stored]


MAPS = Path("/proc/self/maps")


@pytest.mark.skipif(not MAPS.exists() or not opening.SHARES_FILES, reason="needs Linux and ONNX Runtime 1.31")
def test_two_sets_of_sessions_map_the_weights_once(checkpoint, tmp_path):
    folder = export_onnx(checkpoint, tmp_path / "onnx", target="cpu")
    model = OnnxTransformer(folder, threads=2)
    model.generate(rows())  # in parts, on the second set
    assert model.graphs.single_threaded.cache_info().currsize == 1
    assert MAPS.read_text(encoding="utf-8").count(str(folder / "onnx" / "model.onnx_data")) == 1


def test_a_session_may_outlive_its_model(checkpoint, tmp_path):
    model = OnnxTransformer(export_onnx(checkpoint, tmp_path / "onnx"), threads=1)
    session, feeds = model.sessions["encoder_model"], {"input_ids": [[5, 9, 2]], "attention_mask": [[1, 1, 1]]}
    before = session.run(None, feeds)[0]
    del model
    gc.collect()
    assert (session.run(None, feeds)[0] == before).all()
    assert (session.weights is not None) == opening.SHARES_FILES


@pytest.mark.parametrize("architecture", ["encoder-decoder", "encoder"])
def test_idle_threads_wait_for_the_next_text_where_there_is_one_session(architecture, tmp_path, monkeypatch):
    """Those of several would keep the cores from each other; and while a model is opened, from whoever opens it: two to
    three times the processor's time. ONNX Runtime from 1.26 on knows both settings."""
    config = encoder_decoder("paper") if architecture == "encoder-decoder" else alone("paper", architecture)
    _, folder = write_model(config, tmp_path, 1)
    kept = ("session.intra_op.spin_duration_us", "session.force_spinning_stop")
    settings = []

    class Recorded(onnxruntime.SessionOptions):
        def add_session_config_entry(self, key: str, value: str) -> None:
            super().add_session_config_entry(key, value)
            settings.extend([value] if key in kept else [])

    monkeypatch.setattr(onnxruntime, "SessionOptions", Recorded)
    OnnxTransformer(folder, threads=2, verify=False)
    within, after = str(opening.WITHIN_MICROSECONDS), str(opening.SPIN_MICROSECONDS)
    assert sorted(settings) == ([after] if architecture == "encoder" else ["1"] * 3 + [within] * 3)


@pytest.mark.parametrize(("free", "threads", "spins"), [(2, 2, True), (1, 2, False), (1, 1, True), (0, 1, True)])
def test_a_decoders_threads_spin_where_cores_are_free(free, threads, spins, tmp_path, monkeypatch):
    _, folder = write_model(alone("paper", "decoder"), tmp_path, 1, target="cpu")
    settings = []

    class Recorded(onnxruntime.SessionOptions):
        def add_session_config_entry(self, key: str, value: str) -> None:
            super().add_session_config_entry(key, value)
            settings.extend([value] if key == "session.intra_op.allow_spinning" else [])

    monkeypatch.setattr(onnxruntime, "SessionOptions", Recorded)
    monkeypatch.setattr(opening, "free_cores", lambda: free)
    OnnxTransformer(folder, threads=threads, verify=False)
    assert settings == ["0"] + ["0"] * (not spins)  # the first is the fixture's


@pytest.mark.parametrize("threads", [0, -1, 2**14, 2**32, 2.0, True])
def test_threads_have_bounds(threads):
    with pytest.raises(UserError, match=rf"threads={threads} must be a whole number of at least 1 and at most \d+"):
        opening.session_options(threads)
