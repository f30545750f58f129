"""Fine-tuning by an adapter: the loss falls, the base stays, runs go on bit for bit, what is merged is what was
trained."""

import json

import mlx.core as mx
import numpy as np
import pytest
from adapter_runs import BASES, adapting, write_bases
from choices import both_choices
from combined import combined, slow, thinned
from mlx.utils import tree_flatten
from tiny_run import metrics

import mlx_transformer
from export import export_onnx
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import Deviation, ErrorScale, Measurement, Truth, budget_for
from mlx_transformer.cli import main
from mlx_transformer.core.adapter import ARRAYS, linear_maps, read_adapter
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint, weights_digest
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import number_type, read_tensors
from mlx_transformer.training.trainer import Trainer

pytestmark = both_choices
KINDS = ["lora", "dora"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return write_bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_base_of_sixteen_bits_keeps_them(bases, precision, tmp_path):
    """In memory too, of linear maps always, of all else if a step computes in them; the merged matrices are rounded."""
    opened = open_checkpoint(bases["float32"])
    half = {name: array.astype(number_type("bfloat16")) for name, array in opened.tensors()}
    base = bases["float32"].parents[1] / "half"
    save_checkpoint(base, opened.config, half, opened.tokenizer_json(), force=True)
    trainer = adapting(base, tmp_path / "run", steps=4, precision=precision, adapter_targets="*.query_proj")
    result = trainer.run()
    held = trainer.model.weights()
    maps = {f"{path}.weight" for path in linear_maps(opened.config)}
    types = {name: "bfloat16" if name in maps else precision for name in half}
    assert {name: held[name].dtype.name for name in half} == types
    assert all(held[name].tobytes() == array.astype(held[name].dtype).tobytes() for name, array in half.items())
    adapter = read_adapter(tmp_path / "run")
    assert {array.dtype for array in adapter.arrays.values()} == {np.dtype(np.float32)}
    merged = weights(result.model)
    assert same(merged, {name: adapter.merged(name, array) for name, array in half.items()})
    changed = {name for name, array in half.items() if array.tobytes() != merged[name].tobytes()}
    assert changed == {f"{target}.weight" for target in adapter.config.targets}


def weights(folder):
    return dict(open_checkpoint(folder).tensors())


def same(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def assert_as_float32_rounds(got, config, table, ids):
    """Logits of a model with these weights, by the rule of `validate`."""
    t64, t32 = (Reference(config, table, dtype=kind)(*ids) for kind in (np.float64, np.float32))
    truth = Truth.of(t64, t32.astype(np.float64), np.ones(t64.shape[:2], bool))
    pool = ErrorScale.pooled([truth.scale])
    found = Measurement.of(Deviation.of(np.array(got), truth), truth.scale, pool, budget_for("float32", "cpu"))
    assert found.passed, found


@pytest.mark.fast("own-lora-float32")
@pytest.mark.parametrize(("kind", "base"), combined(KINDS, BASES))
def test_the_loss_falls_and_the_base_stays(bases, base, kind, tmp_path):
    """The second half of the pairs is learned; what OUT/model computes is what was trained."""
    trainer = adapting(bases[base], tmp_path / "run", adapter=kind, steps=30, valid_every=15, valid_sentences=4)
    stored = dict(open_checkpoint(bases[base]).stored())
    result = trainer.run()
    losses = [entry["loss"] for entry in metrics(tmp_path / "run", "train")]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    valid = metrics(tmp_path / "run", "valid")
    assert valid[-1]["loss"] < valid[0]["loss"]

    after = {name: np.array(value) for name, value in tree_flatten(trainer.model.parameters())}
    assert same({name: after[name] for name in stored}, stored)
    adapter = read_adapter(tmp_path / "run")
    assert adapter.arrays.keys() == after.keys() - stored.keys()
    assert adapter.config.targets == tuple(linear_maps(trainer.config))
    assert adapter.config.base == weights_digest(bases[base])
    merged = weights(result.model)
    assert same(merged, {name: adapter.merged(name, weight) for name, weight in weights(bases[base]).items()})
    moved = {name.removesuffix(".weight") for name in merged if (merged[name] != weights(bases[base])[name]).any()}
    assert moved == set(adapter.config.targets)
    moments = read_tensors(tmp_path / "run" / "checkpoints" / "step-00000030" / "optimizer.safetensors")
    assert {name.rpartition(".")[0] for name in moments if name.endswith((".m", ".v"))} == adapter.arrays.keys()

    ids = mx.array([[5, 60, 61, 62, 2], [7, 61, 60, 63, 2]])
    assert_as_float32_rounds(trainer.model.eval()(ids, ids), trainer.config, merged, (np.array(ids), np.array(ids)))


@pytest.mark.fast("own-lora-float32")
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("kind", "base"), combined(KINDS, BASES))
def test_a_resumed_run_is_the_whole_run(bases, base, kind, tmp_path):
    options = {"adapter": kind, "adapter_dropout": 0.2, "optimizer": "adamw"}
    whole = adapting(bases[base], tmp_path / "whole", **options).run()
    adapting(bases[base], tmp_path / "parts", **{**options, "steps": 3}).run()
    parts = adapting(bases[base], tmp_path / "parts", resume=True, **options).run()
    assert same(weights(parts.model), weights(whole.model))
    for name in ("adapter.json", ARRAYS):
        assert (tmp_path / "parts" / "adapter" / name).read_bytes() == (
            tmp_path / "whole" / "adapter" / name
        ).read_bytes()


def test_another_base_or_adapter_is_not_resumed(bases, tmp_path):
    adapting(bases["float32"], tmp_path / "run", steps=2).run()
    with pytest.raises(UserError, match=r"recipe\.training\.adapter_rank was 4, now 3"):
        adapting(bases["float32"], tmp_path / "run", resume=True, adapter_rank=3)
    with pytest.raises(UserError, match=r"start\.weights was"):
        adapting(bases["4 bits"], tmp_path / "run", resume=True)


OPTIONS = [
    {"gradient_checkpointing": True},
    {"accumulate": 2},
    {"precision": "bfloat16"},
    {"precision": "float16"},
    {"optimizer": "muon", "adapter_targets": "decoder.*"},
]


@pytest.mark.fast("own-float32-{'gradient_checkpointing': True}")
@pytest.mark.parametrize(("base", "options"), combined(BASES, OPTIONS, step=2), ids=str)
def test_it_trains_as_models_do(bases, base, options, tmp_path):
    trainer = adapting(bases[base], tmp_path / "run", adapter="dora", steps=16, **options)
    trainer.run()
    losses = [entry["loss"] for entry in metrics(tmp_path / "run", "train")]
    assert np.mean(losses[-5:]) < 0.9 * losses[0]
    arrays = read_adapter(tmp_path / "run").arrays
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float32)}


def test_layers_computed_again_give_the_same_gradients(bases, tmp_path):
    found = []
    for again in (False, True):
        trainer = adapting(bases["float32"], tmp_path / str(again), gradient_checkpointing=again, learning_rate=1e-9)
        trainer.model.train()
        mx.random.seed(5)
        loss, norm, _ = trainer.step(next(trainer.batches.from_step(0)), 1e-3)
        trainer.step.evaluate(loss, norm)
        moments = {name: np.array(m) for name, m in tree_flatten(trainer.step.state) if name.endswith(".m")}
        found.append({"loss": np.array(loss), "norm": np.array(norm), **moments})
        trainer.files.close()
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.fast("own-average")
@pytest.mark.parametrize("final", thinned(["moving-average", "best", "average", "last"], 2))
def test_which_adapter_is_kept(bases, final, tmp_path):
    """With a learning rate that spoils everything the first validation is the best."""
    options = {"learning_rate": 3.0, "valid_every": 1, "best": "loss", "checkpoint_steps": 1, "keep": 9, "average": 2}
    result = adapting(bases["4 bits"], tmp_path / "run", final=final, moving_average=0.3, **options).run()
    steps = [read_adapter(folder).arrays for folder in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    kept = read_adapter(tmp_path / "run")
    best = int(np.argmin([entry["loss"] for entry in metrics(tmp_path / "run", "valid")]))
    moving = {name: np.zeros_like(array) for name, array in steps[0].items()}
    for name, value in tree_flatten(adapting(bases["4 bits"], tmp_path / "fresh").model.trainable_parameters()):
        moving[name] = np.array(value)
        for number, arrays in enumerate(steps, start=1):
            decay = min(0.3, (1 + number) / (10 + number))
            moving[name] = decay * moving[name] + (1 - decay) * arrays[name]
    expected = {
        "last": steps[-1],
        "best": steps[best],
        "average": {name: np.mean([arrays[name] for arrays in steps[-2:]], axis=0) for name in moving},
        "moving-average": moving,
    }[final]
    for name, array in kept.arrays.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
    merged = {name: kept.merged(name, weight) for name, weight in weights(bases["4 bits"]).items()}
    assert same(weights(result.model), merged)
    assert json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))["model"]["final"] == final


@slow
@pytest.mark.fast("own-4 bits")
@pytest.mark.parametrize("base", BASES)
def test_what_was_trained_is_exported_and_proved(bases, base, tmp_path):
    """OUT/model is a checkpoint as any other: the same translations in MLX, adapted and merged, and in ONNX Runtime."""
    from export import OnnxTransformer

    trainer = adapting(bases[base], tmp_path / "run", adapter="dora", steps=12, learning_rate=3e-3)
    result = trainer.run()
    export_onnx(result.model, tmp_path / "onnx")
    report = compare(result.model, tmp_path / "onnx", seed=1, longest=24, threads=1, searches=False)
    assert report.equal, report.failures()
    lines = ["56789", "98", "777", "6565", "01234"]
    merged, tokenizer = mlx_transformer.load(result.model)
    rows = tokenizer.encode_batch(lines)
    translated = tokenizer.decode_batch(merged.generate(rows))
    assert translated == tokenizer.decode_batch(trainer.model.eval().generate(rows))
    assert translated == OnnxTransformer(tmp_path / "onnx", threads=1).translate(lines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start_from": None}, "an adapter changes a trained model: say which by start_from"),
        ({"freeze": "encoder.*"}, "an adapter leaves all parameters but its own as they are: leave out freeze"),
        ({"adapter": None}, "adapter_rank says nothing without an adapter: set adapter"),
        ({"adapter_targets": "*query"}, r"adapter_targets: '\*query' fits no linear map of a layer; they are called"),
        (
            {"adapter_rank": 33},
            r"adapter_rank=33: encoder\.layers\.0\.self_attention\.query_proj is 32 x 32: no change",
        ),
        ({"adapter_rank": 0}, r"training\.adapter_rank = 0 must be a whole number"),
        ({"adapter": "qlora"}, r"training\.adapter = 'qlora' is not one of lora, dora"),
    ],
)
def test_what_makes_no_sense_is_refused(bases, options, said, tmp_path):
    with pytest.raises(UserError, match=said):
        adapting(bases["float32"], tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_force_begins_without_the_adapter_of_before(bases, tmp_path):
    adapting(bases["float32"], tmp_path / "run", steps=1).run()
    recipe = adapting(bases["float32"], tmp_path / "other", steps=1).recipe
    plain = {**recipe.to_dict()["training"], "adapter": None, "adapter_rank": 8, "adapter_targets": None}
    text = {"source": recipe.data.source, "target": recipe.data.target}
    training = {key: value for key, value in plain.items() if value is not None}
    made = type(recipe).from_dict({"data": text, "training": training})
    Trainer(made, tmp_path / "run", force=True).run()
    assert not (tmp_path / "run" / "adapter").exists()
    assert (tmp_path / "run" / "model").exists()


def test_flags_say_all_of_it(bases, tmp_path, capsys):
    data = adapting(bases["float32"], tmp_path / "other").recipe.data
    flags = ["--source", data.source, "--target", data.target, "--steps", 2, "--adapter", "dora", "--adapter-rank", 2]
    flags += [
        "--adapter-alpha",
        3,
        "--adapter-targets",
        "decoder.*_proj",
        "--adapter-dropout",
        0.1,
        "--out",
        tmp_path / "run",
    ]
    with pytest.raises(SystemExit, match="2"):
        main(["train", *map(str, flags)])
    assert "an adapter changes a trained model: say which by --from" in capsys.readouterr().err
    main(["train", *map(str, flags), "--from", str(bases["4 bits"])])
    assert "dora of rank 2 on 10 of 16 linear maps: 1,760 parameters are trained" in capsys.readouterr().err
    found = read_adapter(tmp_path / "run").config
    assert (found.kind, found.rank, found.alpha, found.dropout) == ("dora", 2, 3.0, 0.1)
    assert found.targets == tuple(
        path for path in linear_maps(open_checkpoint(bases["4 bits"]).config) if path.startswith("decoder.")
    )
    main(["info", str(tmp_path / "run")])
    assert "dora of rank 2, alpha 3: 1,760 parameters" in capsys.readouterr().out
    size = sum(path.stat().st_size for path in (tmp_path / "run" / "adapter").iterdir())
    assert size < 0.2 * (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    main(["merge", str(bases["4 bits"]), str(tmp_path / "run"), "--out", str(tmp_path / "merged")])
    assert same(weights(tmp_path / "merged"), weights(tmp_path / "run"))
