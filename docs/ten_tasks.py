# pyright: strict
"""Ten things that people do with a model, each in at most three lines, with one import.

"run" is a run's folder or a checkpoint, "onnx" what was exported of it. Run and type-checked by
tests/repository/test_one_import.py.
"""

import mlx_transformer as mt


def load() -> None:
    model, tokenizer = mt.load("run")
    print(model.config.d_model, tokenizer)


def translate() -> None:
    model = mt.open_model("run")
    print(model.translate("one two", beam=4))


def stream() -> None:
    for piece in mt.open_model("onnx").stream("one two"):
        print(piece, end="")


def n_best() -> None:
    for translation in mt.open_model("run").n_best("one two", beam=4, n_best=2):
        print(translation.score, translation.text)


def train() -> None:
    result = mt.train(source="train.en", target="train.de", out="mine", preset="tiny", steps=2, vocab_size=280)
    print(result.model)


def save() -> None:
    model, _ = mt.load("run")
    print(model.save("copy"))


def export() -> None:
    print(mt.export("run", "exported"))
    print(mt.OnnxTransformer("exported").translate(["one two"]))


def prove() -> None:
    report = mt.validate("run", "onnx")
    report.print()


def compare() -> None:
    found = mt.compare("run", "onnx", ["one two", "three. four"])
    print(found.lines, len(found.sentences))


def serve() -> None:
    mt.serve("onnx", port=8000)


TASKS = (load, translate, stream, n_best, train, save, export, prove, compare, serve)
