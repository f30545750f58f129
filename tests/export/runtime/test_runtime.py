"""The runner of exported folders: the tokens of MLX, from every layout, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ending_models
import mlx.core as mx
import numpy as np
import pytest
from combined import combined

from export import OnnxTransformer, export_onnx
from export.__main__ import main
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["one two three. four five six! " * 3], vocab_size=280)
LINES = ["one two", "", "four five six! three.", "x", "six " * 12]
DECODER = {**ending_models.POST_NORM, "architecture": "decoder", "encoder_layers": 0}
CONFIGS = {
    "post-norm": ending_models.POST_NORM,
    "pre-norm": {**ending_models.PRE_NORM, "key_value_heads": 1},
    "decoder": DECODER,
    "decoder learned": {**DECODER, "positions": "learned", "norm_placement": "pre"},
}
REQUESTS = [
    {},
    {"beam": 4, "n_best": 3},
    {"beam": 2, "n_best": 2, "length_penalty": -0.4, "early_stopping": True, "min_new_tokens": 3},
    {"sample": True, "seed": 5, "temperature": 0.8, "top_k": 40, "top_p": 0.95},
]


def made(folder: Path, changes, tokenizer=None):
    """The model in MLX, and its exported folder."""
    model, checkpoint = ending_models.made(folder, tokenizer, vocab_size=280, **changes)
    return model, export_onnx(checkpoint, folder / "onnx")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: made(tmp_path_factory.mktemp("made"), changes) for name, changes in CONFIGS.items()}


@pytest.fixture(scope="module")
def translating(tmp_path_factory):
    return made(tmp_path_factory.mktemp("text"), CONFIGS["post-norm"], TOKENIZER.to_json())


def rows():
    return ending_models.rows(vocab_size=280, seed=1)


def same(results, expected):
    assert [[h.ids for h in hs] for hs in results] == [[h.ids for h in hs] for hs in expected]
    scores = [[h.score for hs in side for h in hs] for side in (results, expected)]
    np.testing.assert_allclose(*scores, rtol=1e-4)


@pytest.mark.fast("post-norm-{}", "decoder learned-{'beam': 4, 'n_best': 3}")
@pytest.mark.parametrize(("name", "options"), combined(CONFIGS, REQUESTS), ids=str)
def test_the_tokens_of_mlx(models, name, options):
    model, folder = models[name]
    prefix = [[7, 9][: i % 3] for i in range(14)]
    onnx = OnnxTransformer(folder, threads=1)
    expected = model.search(rows(), prefix=prefix, max_new_tokens=25, **options)
    same(onnx.search(rows(), prefix, max_new_tokens=25, **options), expected)
    if options.get("sample"):  # searches of random weights tend to end early or never
        assert len({len(hs[0].ids) for hs in expected}) > 3


@pytest.mark.fast("decoder_model")
@pytest.mark.parametrize("removed", ["decoder_model", "decoder_model_merged"])
def test_either_layout_of_the_decoder_is_enough(models, tmp_path, removed):
    model, folder = models["pre-norm"]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "onnx" / f"{removed}.onnx").unlink()
    onnx = OnnxTransformer(copy, threads=1, verify=False)  # the manifest lists both
    assert len(onnx.sessions) == (2 if removed == "decoder_model" else 3)
    for options in REQUESTS[:2]:
        same(onnx.search(rows(), max_new_tokens=15, **options), model.search(rows(), max_new_tokens=15, **options))


def test_a_marian_config_is_enough(models, tmp_path):
    model, folder = models["post-norm"]
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    for name in ("mlx_transformer.json", "manifest.json"):
        (copy / name).unlink()
    onnx = OnnxTransformer(copy, threads=1)
    assert onnx.generate(rows(), beam=2) == model.generate(rows(), beam=2)
    assert onnx.config.max_positions == 70


def test_passes_agree(models):
    model, folder = models["post-norm"]
    onnx = OnnxTransformer(folder / "onnx", threads=1)  # the inner folder is understood too
    ids = np.random.default_rng(0).integers(3, 280, (3, 9))
    mask = np.arange(9) < np.array([[9], [4], [7]])
    target = np.random.default_rng(1).integers(3, 280, (3, 6))
    hidden = onnx.encode(ids, mask)
    full = onnx.decode(target, hidden, mask)
    expected = np.array(model(mx.array(ids), mx.array(target), mx.array(mask)))
    np.testing.assert_allclose(full, expected, atol=1e-4)
    cache = onnx.start(hidden, mask)
    parts = [onnx.step(target[:, :3], cache), onnx.step(target[:, 3:4], cache), onnx.step(target[:, 4:], cache)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), full, atol=1e-4)


def test_a_decoder_alone(models):
    model, folder = models["decoder"]
    onnx = OnnxTransformer(folder, threads=1)
    ids = np.random.default_rng(0).integers(3, 280, (2, 8))
    mask = np.arange(8) >= np.array([[0], [3]])
    full = onnx.logits(ids, mask)
    np.testing.assert_allclose(full[mask], np.array(model(mx.array(ids), mx.array(mask)))[mask], atol=1e-4)
    cache = onnx.start(mask=mask[:, :5])
    parts = [onnx.step(ids[:, :5], cache), onnx.step(ids[:, 5:], cache)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1)[mask], full[mask], atol=1e-4)
    with pytest.raises(UserError, match="architecture='decoder' has no such pass"):
        onnx.encode(ids)


def test_an_encoder_alone(tmp_path):
    model, folder = made(tmp_path, {"architecture": "encoder", "decoder_layers": 0, "tie_embeddings": "all"})
    onnx = OnnxTransformer(folder, threads=1)
    ids = np.random.default_rng(0).integers(3, 280, (2, 8))
    mask = np.arange(8) < np.array([[8], [3]])
    np.testing.assert_allclose(onnx.logits(ids, mask)[mask], np.array(model(ids, mask))[mask], atol=1e-4)
    np.testing.assert_allclose(onnx.encode(ids, mask)[mask], np.array(model.encode(ids, mask))[mask], atol=1e-4)
    with pytest.raises(UserError, match="an encoder-only model can't generate"):
        onnx.generate(ids)


def test_text(translating):
    model, folder = translating
    onnx = OnnxTransformer(folder, threads=1)
    model.tokenizer = TOKENIZER
    for options in ({"min_new_tokens": 6}, {"beam": 3, "min_new_tokens": 6}, {"beam": 3, "batch_tokens": 24}):
        translations = onnx.translate(LINES, **options)
        assert translations == model.translate(LINES, **options)
        assert translations[1] == ""
        assert any(translations) or "min_new_tokens" not in options
    assert [t.text for t in onnx.n_best(LINES[:1], beam=3, n_best=3, min_new_tokens=4)[0]] == [
        t.text for t in model.n_best(LINES[:1], beam=3, n_best=3, min_new_tokens=4)[0]
    ]
    long = ["one", "two three. " * 60]
    with pytest.raises(UserError, match=r"line 2: .* the model takes at most 70"):
        onnx.translate(long)
    for overlong in ("truncate", "split"):
        assert onnx.translate(long, overlong=overlong) == model.translate(long, overlong=overlong)


@pytest.mark.slow  # with an empty environment: repository/test_base_install.py
def test_the_command_without_mlx(translating, tmp_path):
    """`python -m export` builds and translates in a process where MLX can't be imported."""
    _, folder = translating
    (tmp_path / "in").write_text("\n".join(LINES) + "\n")
    script = (
        "import sys; sys.modules['mlx'] = None; sys.modules['mlx.core'] = None\n"
        "from export.__main__ import main\n"
        "checkpoint, out, source, target = sys.argv[1:]\n"
        "assert main(['build', checkpoint, out]) == 0\n"
        "assert main(['translate', out, '--input', source, '--output', target, '--beam', '2', '--threads', '1']) == 0\n"
        "assert main(['translate', checkpoint, '--input', source]) == 2\n"
    )
    arguments = [folder.parent / "model", tmp_path / "out", tmp_path / "in", tmp_path / "translated"]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"python -m export: {arguments[0]}: a checkpoint needs MLX, which is not installed; ")
    assert done.stderr.count("\n") == 1
    expected = OnnxTransformer(folder, threads=1).translate(LINES, beam=2)
    assert (tmp_path / "translated").read_text(encoding="utf-8") == "".join(line + "\n" for line in expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["translate", "{none}"], "no such folder"),
        (
            ["translate", "{checkpoint}", "--backend", "onnx"],
            "here an ONNX folder is needed; write one",
        ),
        (["translate", "{onnx}", "--input", "{none}"], "cannot be read"),
        (["translate", "{onnx}", "--beam", "2", "--n-best", "3"], "--n-best 3 is more than --beam 2"),
        (["translate", "{onnx}", "--threads", "0"], "--threads 0 must be"),
        (["build", "{none}", "{out}"], "no such folder"),
    ],
)
def test_the_command_names_what_is_wrong(translating, tmp_path, capsys, arguments, message):
    _, folder = translating
    paths = {"none": tmp_path / "none", "checkpoint": folder.parent / "model", "onnx": folder, "out": tmp_path / "out"}
    assert main([argument.format(**paths) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def edit(spec, **changes):
    values = json.loads(spec.read_text(encoding="utf-8"))
    spec.write_text(json.dumps({**values, "config": {**values["config"], **changes}}))


def test_folders_that_are_not_whole(models, translating, tmp_path):
    _, folder = models["post-norm"]

    def damaged(change):
        copy = Path(shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True))
        change(copy)
        try:
            OnnxTransformer(copy, verify=False)
        finally:
            shutil.rmtree(copy)

    def without_decoders(copy):
        (copy / "onnx" / "decoder_with_past_model.onnx").unlink()
        (copy / "onnx" / "decoder_model_merged.onnx").unlink()

    with pytest.raises(UserError, match=r"decoder_with_past_model\.onnx missing"):
        damaged(without_decoders)
    with pytest.raises(UserError, match=r"encoder_model\.onnx missing"):
        damaged(lambda copy: (copy / "onnx" / "encoder_model.onnx").unlink())
    with pytest.raises(UserError, match=r"encoder_model\.onnx: ONNX Runtime can't load it"):
        damaged(lambda copy: (copy / "onnx" / "encoder_model.onnx").write_bytes(b"no model"))
    with pytest.raises(UserError, match=r"mlx_transformer\.json"):
        damaged(lambda copy: (copy / "mlx_transformer.json").write_text("{"))
    with pytest.raises(UserError, match=r"mlx_transformer\.json: damaged, or not JSON \(maximum recursion"):
        damaged(lambda copy: (copy / "mlx_transformer.json").write_text("[" * 100_000))
    with pytest.raises(UserError, match=r"mlx_transformer\.json: damaged .*max_positions=9223372036854775808 must be"):
        damaged(lambda copy: edit(copy / "mlx_transformer.json", max_positions=2**63))

    def of_another_family(copy):
        (copy / "mlx_transformer.json").unlink()
        (copy / "config.json").write_text(json.dumps({"model_type": "whisper"}))

    with pytest.raises(UserError, match="model_type 'whisper'"):
        damaged(of_another_family)
    with pytest.raises(UserError, match="provider NoSuchProvider is not in this onnxruntime"):
        OnnxTransformer(folder, providers=["NoSuchProvider"])
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        OnnxTransformer(folder).translate(["one"])


def test_bad_ids(models):
    onnx = OnnxTransformer(models["post-norm"][1], threads=1)
    with pytest.raises(UserError, match="source row 1, position 0: id 280 is outside the vocabulary"):
        onnx.generate([[3, 2], [280, 2]])
    with pytest.raises(UserError, match="source row 0: 71 tokens, the model takes at most 70"):
        onnx.generate([[3] * 71])
    with pytest.raises(UserError, match="max_new_tokens=71"):
        onnx.generate([[3, 2]], max_new_tokens=71)
    with pytest.raises(UserError, match="ids row 0, position 1: id -1"):
        onnx.encode([[3, -1]])
    with pytest.raises(UserError, match="rows have different lengths"):
        onnx.encode([[3, 4], [5]])
    with pytest.raises(UserError, match="mask: its shape"):
        onnx.encode([[3, 4]], [[1]])
    assert len(onnx.generate([[3] * 70], max_new_tokens=70, min_new_tokens=70)[0]) == 70
