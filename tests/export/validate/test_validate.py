"""`validate` on models that are equal: verdict, report, exit codes; and what it says to bad input."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from combined import combined
from random_models import random_weights, write_model
from rich.console import Console
from runtimes import providers, unasked

from export.package import export_onnx
from export.validate import Report, compare, compare_engines, validate_command
from export.validate.cases import Case, grid, tokenised
from export.validate.checks.free_running import MOST_NEW_TOKENS, WITHOUT_LIMIT, borders
from export.validate.engines import Unavailable, open_engine
from export.validate.engines.reference_engine import ReferenceEngine
from export.validate.points import tap_names
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.system.errors import UserError
from mlx_transformer.text.tokenizer import Tokenizer

SMALL = dict(vocab_size=60, d_model=32, heads=4, d_ff=48, encoder_layers=1, decoder_layers=1, max_positions=40)
CONFIGS = {
    "the paper's": TransformerConfig(**SMALL),
    "pre-norm, rotary, gated, grouped": TransformerConfig(
        **SMALL,
        norm_placement="pre",
        norm="rmsnorm",
        positions="rotary",
        activation="silu",
        gated=True,
        key_value_heads=2,
    ),
    "decoder": TransformerConfig(
        **{**SMALL, "encoder_layers": 0}, architecture="decoder", tie_embeddings="target-output", positions="learned"
    ),
    "encoder": TransformerConfig(
        **{**SMALL, "decoder_layers": 0}, architecture="encoder", attention_bias=True, output_bias=True
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: write_model(c, tmp_path_factory.mktemp("m"), 1) for name, c in CONFIGS.items()}


@pytest.mark.parametrize(("name", "seed"), combined(CONFIGS, [1, 2, 3], step=2))
def test_equal_models_are_equal(name: str, seed: int, exported: dict[str, tuple[Path, Path]]) -> None:
    report = compare(*exported[name], seed=seed, threads=1)
    assert report.verdict == "equal", report.failures()
    assert report.exit_code == 0
    assert report.failures() == []
    assert report.absent == ()
    taps = [p.tap for p in report.points if (p.runtime, p.path) == ("onnxruntime", "tapped")]
    assert taps == tap_names(CONFIGS[name])
    assert {p.worst.deviation.same_bits for p in report.points if p.tap.endswith(".embedding")} == {True}
    searches = {(t.runtime, t.search) for t in report.tokens}
    kinds = ["top-1, teacher-forced"]
    if CONFIGS[name].has_decoder:
        kinds += ["cached against full", "greedy", "sampling", "beam 4", "greedy, with rules", "beam 4, with rules"]
        kinds += [*borders(CONFIGS[name], MOST_NEW_TOKENS), WITHOUT_LIMIT]
    assert searches == {(r, s) for r in unasked() for s in kinds}
    decoder = [tap for tap in tap_names(CONFIGS[name]) if tap == "logits" or tap.startswith("decoder.")]
    for path, runtime in [("cached", "mlx"), ("cached", "onnxruntime"), ("cached, merged", "onnxruntime")]:
        cached = [p.tap for p in report.points if (p.runtime, p.path) == (runtime, f"{path}, tapped")]
        both = CONFIGS[name].architecture == "encoder-decoder"
        assert cached == (decoder if both or (path == "cached" and CONFIGS[name].has_decoder) else [])


@pytest.mark.slow  # both 16-bit types: test_runtimes.py
def test_a_checkpoint_in_float16_is_judged_as_the_same_numbers_in_float32(tmp_path: Path) -> None:
    config = CONFIGS["the paper's"]
    halves = {name: array.astype(np.float16) for name, array in random_weights(config, 1).items()}
    model = save_checkpoint(tmp_path / "model", config, halves)
    report = compare(model, export_onnx(model, tmp_path / "onnx"), seed=1, threads=1, searches=False)
    assert report.verdict == "equal", report.failures()
    assert {w.runtime for w in report.weights} >= {"mlx", "onnxruntime"}


def test_a_run_is_repeated_by_its_seed_and_fresh_without(exported: dict[str, tuple[Path, Path]]) -> None:
    def ratios(report: Report) -> list[float]:
        return [point.worst.rms_ratio for point in report.points]

    first = compare(*exported["encoder"], ["onnxruntime"], threads=1)
    again = compare(*exported["encoder"], ["onnxruntime"], first.seed, threads=1)
    other = compare(*exported["encoder"], ["onnxruntime"], threads=1)
    assert first.seed != other.seed
    assert ratios(first) == ratios(again) != ratios(other)


def test_the_report_as_json_and_on_the_terminal(exported: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    out = io.StringIO()
    status = validate_command(
        *exported["decoder"], json=tmp_path / "report" / "validate.json", seed=9, console=Console(file=out, width=100)
    )
    assert status == 0
    values = json.loads((tmp_path / "report" / "validate.json").read_text(encoding="utf-8"))
    assert (values["verdict"], values["seed"], values["failures"]) == ("equal", 9, [])
    assert values["first_over_budget"] == dict.fromkeys(unasked())
    assert {w["where"]: w["count"] for w in values["weights"]} == {"model in memory": 14, "model.onnx": 14}
    assert any(name in ("onnxruntime", "onnxruntime-gpu") for name in values["versions"])
    assert values["runtimes"][0]["budget"] | {"origin": ""} == {"rms": 4.0, "max": 8.0, "unit": 2**-24, "origin": ""}
    text = out.getvalue()
    assert text.startswith("validate: equal   seed 9\n")
    assert "bits equal" in text
    assert "dec 0 self-attention" in text
    assert "all points, cached, tapped" in text
    assert "onnxruntime ran " in text


def test_a_mismatch_is_told_first_and_its_json_has_no_infinity(
    exported: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    config = CONFIGS["encoder"]
    weights = random_weights(config, 1)
    weights["encoder.layers.0.feed_forward.up_proj.weight"][0, 0] = np.nan
    save_checkpoint(tmp_path / "model", config, random_weights(config, 1))
    report = compare_engines(
        open_checkpoint(tmp_path / "model"), [ReferenceEngine(config, weights)], grid(config, 1, longest=8)
    )
    out = io.StringIO()
    report.print(Console(file=out, width=150))
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("validate: mismatch")
    assert "up_proj.weight: 1 of 1536 values differ in their bits, first [0, 0]: nan" in lines[1]
    assert "first over budget: encoder.layers.0.feed_forward (tapped, " in lines[2]
    assert "not finite" in lines[2]
    assert json.loads(report.to_json())["points"][2]["worst"]["deviation"]["max"] == "inf"


def test_the_command_exits_1_on_a_mismatch(exported: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    config = CONFIGS["the paper's"]
    checkpoint, _ = write_model(config, tmp_path, seed=2)
    out = io.StringIO()
    for name in ("onnxruntime", "onnx"):  # as other commands call it
        status = validate_command(checkpoint, exported["the paper's"][1], runtimes=[name], console=Console(file=out))
        assert status == 1
    assert out.getvalue().count("validate: mismatch") == 2


@pytest.mark.parametrize(
    ("runtimes", "status", "message"),
    [
        (["onnxruntime:cuda"], 3, "CUDAExecutionProvider is not available (there are: ")
        if "cuda" not in providers()
        else (["onnxruntime:mlx"], 3, "MLXExecutionProvider is not available (there are: "),
        (["onnxruntime:NoSuchProvider"], 3, "NoSuchProvider is not available"),
        (["onnx:cpu:most"], 2, "optimisation 'most' is not one of all, extended, basic, none"),
        (["torch"], 2, "unknown runtime 'torch': choose from mlx, onnxruntime, "),
        (["onnxruntime:cpu:most"], 2, "optimisation 'most' is not one of all, extended, basic, none"),
        (["mlx:tpu"], 2, "mlx:tpu: choose mlx:cpu or mlx:gpu"),
        (["mlx:cpu:fast"], 2, "mlx:cpu:fast: choose float32, float16, bfloat16"),
        (["mlx:cpu:tf32"], 2, "mlx:cpu:tf32: choose float32, float16, bfloat16"),
        (["mlx:cpu:float32:fast"], 2, "runtime 'mlx:cpu:float32:fast': mlx takes only mlx:device:precision"),
        (["onnxruntime:cpu:all:tf32"], 2, "precision 'tf32' is not one of float32, float16, "),
        (["onnxruntime:AzureExecutionProvider"], 3, "no node ran on AzureExecutionProvider: all ")
        if "AzureExecutionProvider" in ort.get_available_providers()
        else (["onnxruntime:AzureExecutionProvider"], 3, "AzureExecutionProvider is not available"),
        (["reference:float16"], 2, "reference:float16: choose reference:float32 or reference:float64"),
    ],
)
def test_runtimes_that_are_absent_or_unknown(
    runtimes: list[str],
    status: int,
    message: str,
    exported: dict[str, tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert validate_command(*exported["encoder"], runtimes=runtimes) == status
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("validate: ")
    assert error.count("\n") == 1


def test_without_mlx_the_onnx_side_is_still_compared_and_the_report_says_so(
    exported: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("export.validate.engines.mlx_engine.find_spec", lambda name: None)
    report = compare(*exported["encoder"], seed=1, threads=1)
    assert report.equal
    assert report.absent == ("mlx",)
    out = io.StringIO()
    report.print(Console(file=out, width=100))
    assert "not compared, because it isn't installed here: mlx" in out.getvalue()
    with pytest.raises(Unavailable, match="runtime mlx is not installed"):
        compare(*exported["encoder"], ["mlx"])
    assert validate_command(*exported["encoder"], runtimes=["mlx"]) == 3


def test_bad_folders_are_exit_2(exported: dict[str, tuple[Path, Path]], tmp_path: Path, capsys) -> None:
    checkpoint, onnx = exported["the paper's"]
    for first, second, message in [
        (tmp_path / "nothing", onnx, "no such folder"),
        (checkpoint, tmp_path / "nothing", "no such folder"),
        (onnx, onnx, "is an ONNX model, and here a checkpoint"),
        (checkpoint, checkpoint, "is a checkpoint, and here an ONNX folder"),
        (checkpoint, exported["decoder"][1], "not exported from"),
    ]:
        assert validate_command(first, second, runtimes=["onnxruntime"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    (tmp_path / "file").write_text("")
    assert validate_command(*exported["encoder"], json=tmp_path / "file" / "x.json", runtimes=["onnxruntime"]) == 2


def test_a_damaged_graph_is_bad_input(exported: dict[str, tuple[Path, Path]], tmp_path: Path, capsys) -> None:
    checkpoint, onnx = exported["encoder"]
    shutil.copytree(onnx, tmp_path / "onnx")
    graph = tmp_path / "onnx" / "onnx" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:500])
    assert validate_command(checkpoint, tmp_path / "onnx", runtimes=["onnxruntime"]) == 2
    assert "model.onnx" in capsys.readouterr().err


def test_real_text_is_among_the_inputs_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["the animal crossed the street", "das Tier ging über die Straße"], vocab_size=270)
    config = TransformerConfig(**{**SMALL, "vocab_size": tokenizer.vocab_size, "max_positions": 90})
    save_checkpoint(tmp_path / "model", config, random_weights(config, 1), tokenizer.to_json())
    report = compare(
        tmp_path / "model", export_onnx(tmp_path / "model", tmp_path / "onnx"), seed=1, threads=1, searches=False
    )
    assert report.equal, report.failures()
    assert any(name.startswith("real text (7 x ") for name in report.inputs)
    rows = tokenised(tmp_path / "model" / "tokenizer.json", config)
    assert tokenizer.decode(rows[0]) == "Attention is all you need."
    assert rows[0][-1] == config.eos_id


@pytest.mark.slow
def test_the_reference_itself_passes_in_both_precisions(exported: dict[str, tuple[Path, Path]]) -> None:
    for precision in ("float32", "float64"):
        report = compare(exported["the paper's"][0], None, [f"reference:{precision}"], seed=3)
        assert report.equal, report.failures()
    with pytest.raises(UserError, match="needs the folder of an exported model"):
        compare(exported["the paper's"][0], None, ["onnxruntime"])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_grid_holds_what_breaks_implementations(name: str) -> None:
    config = CONFIGS[name]
    cases = {case.name: case for case in grid(config, seed=4)}
    assert cases["single token"].ids.shape == (1, 1)
    assert cases["longest"].ids.shape == (1, config.max_positions)
    for side, column in (("left", -1), ("right", 0)):
        case = cases[f"padding {side}"]
        assert case.mask is not None
        assert case.mask[:, column].all()
        lengths = case.mask.sum(axis=1)
        assert lengths.min() == 1 or config.architecture == "decoder"
        assert lengths.max() == case.ids.shape[1] > lengths.min() >= 1
        assert (case.ids[~case.mask] == config.pad_id).all()
    for case in cases.values():
        special = [config.pad_id, config.bos_id, config.eos_id]
        assert not np.isin(case.ids[case.source_real], special).any()
        assert case.ids.max() < config.source_vocab_size
        assert (case.target_ids is None) == (config.architecture != "encoder-decoder")
        assert 1 <= case.prefill <= (case.ids if case.target_ids is None else case.target_ids).shape[1]
    # Cached runs: one token first and then one by one, several at once after a past, and a last pass cut short.
    passes = [[part.stop - part.start for part in case.passes()] for case in cases.values()]
    assert any(len(widths) > 3 and set(widths) == {1} for widths in passes)
    assert any(widths[0] < widths[1] and len(widths) > 2 for widths in passes if len(widths) > 1)
    for case, widths in zip(cases.values(), passes, strict=True):
        assert sum(widths) == (case.ids if case.target_ids is None else case.target_ids).shape[1]


def test_only_valid_positions_count(exported: dict[str, tuple[Path, Path]]) -> None:
    """A runtime may write anything at padding, and nothing wrong beside it."""
    checkpoint = open_checkpoint(exported["encoder"][0])
    engine = open_engine("reference", checkpoint, None)
    cases = [case for case in grid(checkpoint.config, 4) if case.mask is not None]

    def run(spoil) -> Report:
        class Spoiled(ReferenceEngine):
            def logits(self, case: Case) -> np.ndarray:
                logits = super().logits(case)
                logits[spoil(case)] += 1e-3
                return logits

        return compare_engines(checkpoint, [Spoiled(checkpoint.config, engine.stored)], cases)  # type: ignore[attr-defined]

    assert run(lambda case: ~case.mask).equal
    report = run(lambda case: case.mask)
    assert [(p.path, p.tap) for p in report.points if not p.passed] == [("plain", "logits")]


def test_progress_rises(exported):
    seen: list[tuple[float, str]] = []
    compare(*exported["encoder"], ["onnxruntime"], seed=1, watch=lambda *now: seen.append(now))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert (shares[0], seen[-1][1]) == (0, "free decoding")
    assert len({status for _, status in seen}) == len(seen) > 2
