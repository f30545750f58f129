"""The exported folder: weights bit for bit under their names, external data, what consumers read, durable writing."""

import json
import os
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from combined import thinned
from small_models import SIZES, configs, encoder_decoder, random_weights

from export import export_search
from export.graph.builder import GraphBuilder
from export.interface import Request
from export.package import export_onnx
from export.package import write as package
from export.targets.table import target_of
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes
from mlx_transformer.core.positions import rotary_tables, sinusoids
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.manifest import verify_files
from mlx_transformer.text.tokenizer import Tokenizer

PAPER = encoder_decoder("paper")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("paper") / "model", PAPER, random_weights(PAPER))


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    return export_onnx(checkpoint, tmp_path_factory.mktemp("paper") / "onnx")


def graph_files(folder):
    return sorted((folder / "onnx").glob("*.onnx"))


def initializers(path):
    model = onnx.load(path)  # with its data
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("name", thinned(configs(), 8))
def test_every_parameter_once_by_its_name_bit_for_bit(name, tmp_path):
    config = configs()[name]
    weights = random_weights(config)
    folder = export_onnx(save_checkpoint(tmp_path / "model", config, weights), tmp_path / "onnx")
    used = set()
    for path in graph_files(folder):
        tensors = initializers(path)
        parameters = tensors.keys() & weights.keys()
        for parameter in parameters:
            assert tensors[parameter].tobytes() == weights[parameter].tobytes(), parameter
        rest = {n for n in tensors.keys() - parameters if not n.startswith(("const_", "positions."))}
        assert not rest, f"{path.name}: {rest} are no parameters"
        read = {name for node in onnx.load(path).graph.node for name in node.input}
        assert parameters <= read | captured(path), f"{path.name} holds parameters that it doesn't use"
        used |= parameters
    assert used == parameter_shapes(config).keys()


def captured(path):
    """Names that the branches of an If read from outside."""
    branches = [a.g for node in onnx.load(path).graph.node for a in node.attribute if a.HasField("g")]
    return {name for branch in branches for node in branch.node for name in node.input}


@pytest.mark.parametrize("name", ["paper", "two vocabularies", "modern"])
def test_position_tables_are_the_shared_ones(name, tmp_path):
    config = configs()[name]
    folder = export_onnx(save_checkpoint(tmp_path / "model", config, random_weights(config)), tmp_path / "onnx")
    for path in graph_files(folder):
        tensors = initializers(path)
        if config.positions == "rotary":
            cos, sin = rotary_tables(config.max_positions, config)
            assert tensors["positions.cos"].tobytes() == cos.tobytes()
            assert tensors["positions.sin"].tobytes() == sin.tobytes()
        else:
            table = sinusoids(config.max_positions, config.d_model, config.positions)
            assert tensors["positions.sinusoids"].tobytes() == table.tobytes()


def test_all_graphs_share_one_file_and_tied_weights_are_stored_once(exported):
    total = sum(array.nbytes for array in random_weights(PAPER).values())
    tables = PAPER.max_positions * PAPER.d_model * 4
    data = {path.name: path.stat().st_size for path in (exported / "onnx").glob("*_data*")}
    assert data.keys() == {"model.onnx_data"}
    assert sum(data.values()) <= total + tables + 64 * 200
    for owner, names in target_of("portable").data_files(PAPER).items():
        for name in names:
            for tensor in onnx.load(exported / "onnx" / f"{name}.onnx", load_external_data=False).graph.initializer:
                place = {entry.key: entry.value for entry in tensor.external_data}
                assert place.get("location", f"{owner}.onnx_data") == f"{owner}.onnx_data"


@pytest.mark.parametrize(("threshold", "files"), [(0, 1), (1 << 40, 0)])
def test_external_data_from_any_size_on(checkpoint, exported, tmp_path, threshold, files):
    folder = export_onnx(checkpoint, tmp_path / "onnx", external_threshold=threshold)
    data = list((folder / "onnx").glob("*_data"))
    assert len(data) == files
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["transformers.js_config"][
        "use_external_data_format"
    ]
    assert settings == {}  # transformers.js looks for data by the graph's name, and no graph is called model
    for path in graph_files(folder):
        expected = initializers(exported / "onnx" / path.name)
        tensors = initializers(path)
        assert tensors.keys() == expected.keys()
        for name, array in tensors.items():
            assert array.tobytes() == expected[name].tobytes(), name
        inline = [t for t in onnx.load(path, load_external_data=False).graph.initializer if not t.external_data]
        if threshold == 0:
            assert all(t.name.startswith("const_") for t in inline)


@pytest.mark.parametrize("name", thinned(configs(), 7))
def test_graphs_are_standard(name):
    """No operator from outside ai.onnx, nothing unused, the builder's notes gone."""
    config = configs()[name]
    for graph in target_of("portable").graph_names(config):
        model = target_of("portable").build(graph, Request(config=config))
        onnx.checker.check_model(ir.to_proto(filled(model)), full_check=True)
        assert {node.domain for node in model.graph.all_nodes()} == {""}
        assert not [node for node in model.graph.all_nodes() if node.metadata_props]
        used = {x for node in model.graph.all_nodes() for x in node.inputs} | set(model.graph.outputs)
        assert {x for node in model.graph.all_nodes() for x in node.outputs if x.graph is model.graph} <= used
        assert set(model.graph.initializers.values()) <= used


def filled(model):
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = ir.tensor(np.zeros([int(n) for n in value.shape], np.float32), name=name)
    return model


def test_node_counts_of_the_paper():
    """The transposes of weights, which runtimes fold, are not counted."""
    config = TransformerConfig.preset("base", 1000)
    counts = {}
    for name in target_of("portable").graph_names(config):
        model = target_of("portable").build(name, Request(config=config))
        counts[name] = sum(not (n.op_type == "Transpose" and n.inputs[0].is_initializer()) for n in model.graph)
    assert counts == {
        "encoder_model": 173,
        "decoder_model": 312,
        "decoder_with_past_model": 292,
        "decoder_model_merged": 293,
    }


def test_cross_attention_is_projected_once():
    """With a past, keys and values of the source are inputs: nothing projects the encoder's output again."""
    model = target_of("portable").build("decoder_with_past_model", Request(config=PAPER))
    assert not [n for n in model.graph.initializers if "cross_attention.key" in n or "cross_attention.value" in n]
    assert Counter(n.op_type for n in model.graph)["MatMul"] == PAPER.decoder_layers * (4 + 2 + 2 + 2 + 2) + 1


def test_a_node_name_used_twice_raises():
    g = GraphBuilder("twice")
    x = g.input("x", "batch_size")
    g.output("y", g.op.Relu(g.op.Relu(x, _name="same"), _name="same"), "batch_size")
    with pytest.raises(ValueError, match=r"same \(2\)"):
        g.model()


def test_what_consumers_read(tmp_path):
    tokenizer = Tokenizer.train(["der Hund", "the dog"], vocab_size=270, min_frequency=1)
    config = TransformerConfig(**{**SIZES, "vocab_size": tokenizer.vocab_size})
    checkpoint = save_checkpoint(tmp_path / "model", config, random_weights(config), tokenizer.to_json())
    folder = export_onnx(checkpoint, tmp_path / "onnx")
    read = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    assert read["config.json"]["model_type"] == "marian"
    assert read["config.json"]["decoder_start_token_id"] == config.bos_id
    assert read["config.json"]["d_model"] // read["config.json"]["decoder_attention_heads"] == config.d_k
    assert read["generation_config.json"]["bad_words_ids"] == [[config.pad_id], [config.bos_id]]
    assert read["generation_config.json"]["max_length"] == config.max_positions
    assert {k: v for k, v in read["tokenizer_config.json"].items() if k.endswith("_token")} == {
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    assert (folder / "tokenizer.json").read_text(encoding="utf-8") == (checkpoint / "tokenizer.json").read_text(
        encoding="utf-8"
    )
    assert TransformerConfig.from_dict(read["mlx_transformer.json"]["config"]) == config
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    assert (
        read["mlx_transformer.json"]["source"]["model.safetensors"]["sha256"]
        == (manifest["files"]["model.safetensors"]["sha256"])
    )
    assert read["mlx_transformer.json"]["versions"]["onnx"] == onnx.__version__


@pytest.mark.parametrize(("name", "model_type"), [("modern, decoder", "granite"), ("paper, encoder", "bert")])
def test_what_consumers_read_of_other_shapes(name, model_type, tmp_path):
    config = configs()[name]
    folder = export_onnx(save_checkpoint(tmp_path / "model", config, random_weights(config)), tmp_path / "onnx")
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert values["model_type"] == model_type
    assert values["hidden_size"] // values["num_attention_heads"] == config.d_k
    assert (folder / "generation_config.json").exists() == config.has_decoder


def test_digests_of_the_graphs(checkpoint, tmp_path):
    folder = export_onnx(checkpoint, tmp_path / "onnx")
    verify_files(folder / "onnx")
    data = folder / "onnx" / "model.onnx_data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.onnx_data: damaged"):
        verify_files(folder / "onnx")


def test_the_same_bytes_every_time(checkpoint, exported, tmp_path):
    again = export_onnx(checkpoint, tmp_path / "onnx")
    for path in sorted(p.relative_to(exported) for p in exported.rglob("*") if p.is_file()):
        assert (again / path).read_bytes() == (exported / path).read_bytes(), path


def test_an_earlier_export_is_replaced_other_folders_are_not(checkpoint, exported, tmp_path):
    folder = export_onnx(checkpoint, tmp_path / "onnx")
    (folder / "onnx" / "stale.onnx").write_text("")
    with pytest.raises(UserError, match="--force"):
        export_onnx(checkpoint, folder)
    export_onnx(checkpoint, folder, force=True)
    assert not (folder / "onnx" / "stale.onnx").exists()
    assert os.listdir(tmp_path) == ["onnx"]

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for out, message in (("other", "holds files that are no ONNX folder"), ("file", "is a file")):
        with pytest.raises(UserError, match=message):
            export_onnx(checkpoint, tmp_path / out)
    with pytest.raises(UserError, match="is the folder that is read"):
        export_onnx(checkpoint, checkpoint)
    with pytest.raises(UserError, match="is an ONNX model"):
        export_onnx(exported, tmp_path / "new")
    assert export_onnx(checkpoint, tmp_path / "empty").is_dir()


def test_a_full_disk_leaves_the_earlier_export(checkpoint, tmp_path, monkeypatch):
    folder = export_onnx(checkpoint, tmp_path / "onnx")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(package, "fill", full)
    with pytest.raises(UserError, match="No space left on device"):
        export_onnx(checkpoint, folder, force=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert os.listdir(tmp_path) == ["onnx"]


def test_weights_of_another_precision_are_refused(tmp_path):
    weights = {name: array.astype(np.float64) for name, array in random_weights(PAPER).items()}
    with pytest.raises(UserError, match="is float64; export writes float32"):
        export_onnx(save_checkpoint(tmp_path / "model", PAPER, weights), tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_a_checkpoint_in_float16_is_exported_as_the_same_numbers_in_float32(tmp_path):
    """The graphs are those of that model in float32, byte for byte; a line says so."""
    halves = {name: array.astype(np.float16) for name, array in random_weights(PAPER).items()}
    singles = {name: array.astype(np.float32) for name, array in halves.items()}
    said: dict[str, list[str]] = {"half": [], "single": []}
    for name, weights in (("half", halves), ("single", singles)):
        model, log = save_checkpoint(tmp_path / name, PAPER, weights), said[name].append
        export_onnx(model, tmp_path / f"{name}-onnx", precision=["float32", "int8"], log=log)
        export_search(model, tmp_path / f"{name}.onnx", log=log)
    files = sorted((tmp_path / "single-onnx" / "onnx").iterdir())
    assert len(files) > 5
    for file in files:
        assert (tmp_path / "half-onnx" / "onnx" / file.name).read_bytes() == file.read_bytes(), file.name
    assert sum("float16" in line and "float32" in line and "half" in line for line in said["half"]) == 2
    assert not any("stored in float16" in line for line in said["single"])
    assert open_checkpoint(tmp_path / "half").tensor("embedding.weight").dtype == np.float16, "the file stays as it is"
