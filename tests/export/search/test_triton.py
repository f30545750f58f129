"""Folders for Triton: config.pbtxt as protobuf's own parser reads it, held against the graph beside it."""

from __future__ import annotations

import onnxruntime as ort
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from small_models import write_text_model

from export.search import SearchModel
from export.search.triton import export_triton
from mlx_transformer import cli
from mlx_transformer.system.errors import UserError

Field = descriptor_pb2.FieldDescriptorProto
TYPES = {"tensor(int64)": "TYPE_INT64", "tensor(float)": "TYPE_FP32", "tensor(string)": "TYPE_STRING"}
MESSAGES = {
    "Reshape": [("shape", Field.TYPE_INT64, True)],
    "Tensor": [
        ("name", Field.TYPE_STRING, False),
        ("data_type", "DataType", False),
        ("dims", Field.TYPE_INT64, True),
        ("reshape", "Reshape", False),
    ],
    "DynamicBatching": [],
    "Operations": [("op_library_filename", Field.TYPE_STRING, True)],
    "ModelConfig": [
        ("backend", Field.TYPE_STRING, False),
        ("default_model_filename", Field.TYPE_STRING, False),
        ("max_batch_size", Field.TYPE_INT32, False),
        ("input", "Tensor", True),
        ("output", "Tensor", True),
        ("dynamic_batching", "DynamicBatching", False),
        ("model_operations", "Operations", False),
    ],
}
"""What is used of Triton's model_config.proto: names and types; the text form knows no numbers."""


@pytest.fixture(scope="module")
def parse():
    """The text of a config.pbtxt -> its message; an error for a field or a value that Triton doesn't have."""
    file = descriptor_pb2.FileDescriptorProto(name="config.proto", package="triton", syntax="proto3")
    types = file.enum_type.add(name="DataType")
    for number, name in enumerate(["TYPE_INVALID", *TYPES.values()]):
        types.value.add(name=name, number=number)
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, repeated) in enumerate(fields, 1):
            label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                added.type_name = f".triton.{kind}"
                added.type = Field.TYPE_ENUM if kind == "DataType" else Field.TYPE_MESSAGE
            else:
                added.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    config = message_factory.GetMessageClass(pool.FindMessageTypeByName("triton.ModelConfig"))
    return lambda path: text_format.Parse(path.read_text(encoding="utf-8"), config())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("triton")) / "model"


def declared(tensors):
    """{name: (type, dimensions behind the batch's)}; those that Triton gives a dimension of 1 have none."""
    names = dict(enumerate(["TYPE_INVALID", *TYPES.values()]))
    found = {}
    for each in tensors:
        dims = list(each.dims)
        if each.HasField("reshape"):
            assert (dims, list(each.reshape.shape)) == ([1], [])
            dims = []
        found[each.name] = names[each.data_type], dims
    return found


def graph_of(tensors):
    return {each.name: (TYPES[each.type], [-1] * (len(each.shape) - 1)) for each in tensors}


def test_the_config_says_what_the_graph_takes_and_returns(checkpoint, tmp_path, parse, capsys):
    out = tmp_path / "en-de"
    assert cli.main(["export", str(checkpoint), str(out), "--triton"]) is None
    assert capsys.readouterr().out.startswith(f"{out}: 3 files, ")
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        *("1/model.onnx", "README.md", "config.pbtxt")
    ]
    config = parse(out / "config.pbtxt")
    session = ort.InferenceSession(str(out / "1" / "model.onnx"))
    assert declared(config.input) == graph_of(session.get_inputs())
    assert declared(config.output) == graph_of(session.get_outputs())
    assert (config.backend, config.default_model_filename, config.max_batch_size) == ("onnxruntime", "model.onnx", 64)
    assert config.HasField("dynamic_batching")
    assert not config.HasField("model_operations")
    assert SearchModel(out / "1" / "model.onnx").translate("one") is not None
    assert "curl localhost:8000/v2/models/en-de" in (out / "README.md").read_text()


def test_text_in_and_out_has_a_dimension_for_each_request(checkpoint, tmp_path, parse):
    out = export_triton(checkpoint, tmp_path / "text", text=True)
    config = parse(out / "config.pbtxt")
    assert declared(config.input) == {"text": ("TYPE_STRING", [])}
    assert declared(config.output) == {"translations": ("TYPE_STRING", [-1]), "scores": ("TYPE_FP32", [-1])}
    assert list(config.model_operations.op_library_filename) == ["libortextensions.so"]


def test_a_folder_of_its_own_kind_alone_is_replaced(checkpoint, tmp_path):
    out = export_triton(checkpoint, tmp_path / "model")
    with pytest.raises(UserError, match="holds another Triton model; choose another folder, or --force"):
        export_triton(checkpoint, out)
    (out / "README.md").write_text("# Mine\n")
    export_triton(checkpoint, out, force=True)
    assert (out / "README.md").read_text() == "# Mine\n"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="holds files that are no Triton model"):
        export_triton(checkpoint, tmp_path / "other", force=True)
    with pytest.raises(UserError, match="of one precision"):
        export_triton(checkpoint, tmp_path / "two", precision=["float32", "float16"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]
