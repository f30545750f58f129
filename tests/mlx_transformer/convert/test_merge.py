"""An adapter's folder and `merge`: the formulas of the papers, integers that stay, damage and strangers refused."""

import json
import shutil

import numpy as np
import pytest
from adapter_models import made
from quantized_models import wide
from small_models import configs, random_weights

from mlx_transformer import Transformer
from mlx_transformer.cli import main
from mlx_transformer.convert.merge import keep_adapter, merge_adapter
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.adapter import ADAPTER, ARRAYS, linear_maps, read_adapter
from mlx_transformer.core.card import begin_card, keys_of
from mlx_transformer.core.checkpoint import open_checkpoint, save_checkpoint, weights_digest
from mlx_transformer.core.parameters import quantizable_shapes
from mlx_transformer.core.quantization import Packed, Scheme, packed_words
from mlx_transformer.system.errors import UserError
from mlx_transformer.system.tensors import number_type
from mlx_transformer.training.weights import average_checkpoints

KINDS = ["lora", "dora"]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    save_checkpoint(folder / "base", wide(), random_weights(wide()))
    quantize_checkpoint(folder / "base", folder / "integers", Scheme(128, 4))
    return folder


@pytest.fixture
def base(both, tmp_path):
    """FOLDER/base, a checkpoint in float32, and FOLDER/integers, the same in 4 bits, wherever groups of 128 fit."""
    shutil.copytree(both, tmp_path, dirs_exist_ok=True)
    return tmp_path / "base"


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_the_papers(base, kind, tmp_path):
    """W + alpha/r B A; rows of it with the length m."""
    adapter = made(base, kind, targets=["encoder.layers.0.self_attention.query_proj"])
    adapter.write(tmp_path / "adapter")
    assert main(["merge", str(base), str(tmp_path / "adapter"), "--out", str(tmp_path / "out")]) is None
    before, after = dict(open_checkpoint(base).tensors()), dict(open_checkpoint(tmp_path / "out").tensors())
    changed = "encoder.layers.0.self_attention.query_proj"
    assert {name for name in before if before[name].tobytes() != after[name].tobytes()} == {f"{changed}.weight"}
    a, b = (adapter.arrays[f"{changed}.{part}"].astype(np.float64) for part in ("lora_a", "lora_b"))
    expected = before[f"{changed}.weight"] + 6.0 / 3 * sum(np.outer(b[:, r], a[r]) for r in range(3))
    if kind == "dora":
        magnitude = adapter.arrays[f"{changed}.magnitude"]
        expected = np.stack([m * row / np.sqrt((row**2).sum()) for m, row in zip(magnitude, expected, strict=True)])
    np.testing.assert_allclose(after[f"{changed}.weight"], expected, rtol=2**-23, atol=1e-12)


@pytest.mark.fast("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_stay_sixteen(dtype, base, tmp_path, capsys):
    """Merged, averaged and quantised: what isn't changed keeps its bits, what is is rounded once."""
    kind = number_type(dtype)
    weights = {name: array.astype(kind) for name, array in random_weights(wide()).items()}
    half = save_checkpoint(tmp_path / "half", wide(), weights)
    adapter = made(half, targets=["encoder.layers.0.self_attention.query_proj"])
    adapter.write(tmp_path / "adapter")
    main(["merge", str(half), str(tmp_path / "adapter"), "-o", str(tmp_path / "merged")])
    assert (
        f"merged; rounded to {dtype}, which moves logits: --float32 keeps what was trained" in capsys.readouterr().out
    )
    main(["merge", str(half), str(tmp_path / "adapter"), "-o", str(tmp_path / "wide"), "--float32"])
    assert capsys.readouterr().out == f"{tmp_path / 'wide'}: merged\n"
    exact = dict(open_checkpoint(tmp_path / "wide").tensors())
    average_checkpoints([half, base], tmp_path / "mean")
    quantize_checkpoint(half, tmp_path / "quantised", Scheme(128, 4))
    merged, mean = (dict(open_checkpoint(tmp_path / name).tensors()) for name in ("merged", "mean"))
    single, quantised = (dict(open_checkpoint(folder).stored()) for folder in (base, tmp_path / "quantised"))
    for name, array in weights.items():
        assert merged[name].dtype == mean[name].dtype == kind
        change = adapter.delta(name)
        expected = array if change is None else change.of(array.astype(np.float64)).astype(kind)
        assert merged[name].tobytes() == expected.tobytes()
        wanted = (array if change is None else change.of(array.astype(np.float64))).astype(np.float32)
        assert exact[name].tobytes() == wanted.tobytes()
        assert mean[name].tobytes() == ((array.astype(np.float64) + single[name]) / 2).astype(kind).tobytes()
        if quantised[name].dtype != np.uint32:
            assert (quantised[name].dtype, quantised[name].tobytes()) == (kind, array.tobytes())


def test_an_adapters_card_names_its_base_and_stays_as_a_person_has_it(base, tmp_path):
    known = begin_card(language=["en", "de"], license="mit", base_model="org/of-the-base")
    made(base, "dora").write(tmp_path / "adapter", known)
    card = tmp_path / "adapter" / "README.md"
    text = card.read_text(encoding="utf-8")
    assert set(keys_of(text)) == {"library_name", "tags", "base_model_relation", "language", "license"}
    assert "# An adapter: DoRA of rank 3\n" in text
    assert f"`{weights_digest(base)}`" in text
    assert merge_adapter(base, tmp_path / "adapter", tmp_path / "out") is None
    made(base, "lora").write(tmp_path / "adapter")
    text = card.read_text(encoding="utf-8")
    assert "# An adapter: LoRA of rank 3\n" in text
    card.write_text(mine := text.replace("---\n#", "---\nbase_model: org/base\n#", 1), encoding="utf-8")
    made(base, "dora").write(tmp_path / "adapter")
    assert card.read_text(encoding="utf-8") == mine


@pytest.mark.parametrize("name", ["untied", "odd widths, decoder", "modern, encoder"])
def test_any_architecture_is_merged(name, tmp_path):
    save_checkpoint(tmp_path / "base", configs()[name], random_weights(configs()[name]))
    made(tmp_path / "base", "dora").write(tmp_path / "adapter")
    assert merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out") is None
    before, after = (dict(open_checkpoint(tmp_path / folder).tensors()) for folder in ("base", "out"))
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert changed == {f"{path}.weight" for path in linear_maps(configs()[name])}


@pytest.mark.fast("lora")
@pytest.mark.parametrize("kind", KINDS)
def test_integers_become_float32_or_integers_again(base, kind, tmp_path, capsys):
    integers = tmp_path / "integers"
    maps = [path for path in linear_maps(wide()) if "decoder" in path]
    adapter = made(integers, kind, targets=maps)
    adapter.write(tmp_path / "adapter")
    merge_adapter(integers, tmp_path / "adapter", tmp_path / "float32")
    assert not open_checkpoint(tmp_path / "float32").quantization
    exact = dict(open_checkpoint(tmp_path / "float32").tensors())
    for name, weight in open_checkpoint(integers).tensors():
        assert exact[name].tobytes() == adapter.merged(name, weight).tobytes()

    command = ["merge", str(integers), str(tmp_path / "adapter"), "--requantize", "--out", str(tmp_path / "again")]
    main(command)
    said = capsys.readouterr().out
    opened, first = open_checkpoint(tmp_path / "again"), open_checkpoint(integers)
    assert opened.quantization == first.quantization
    before, after = dict(first.stored()), dict(opened.stored())
    rounded = [path for path in maps if f"{path}.weight" in opened.quantization]
    assert 0 < len(rounded) < len(maps)  # down_proj is too narrow for the groups
    moved = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    assert moved == {part for p in rounded for part in Scheme().tensors(f"{p}.weight")} | {
        f"{path}.weight" for path in maps if path not in rounded
    }
    values = dict(opened.tensors())
    names = [f"{path}.weight" for path in rounded]
    flat = [np.concatenate([w[name].ravel() for name in names]) for w in (values, exact, dict(first.tensors()))]
    error, change = (np.linalg.norm(other - flat[1]) / np.linalg.norm(flat[1]) for other in (flat[0], flat[2]))
    assert 0 < error < 0.2
    assert f"{len(rounded)} matrices rounded again: relative rms error {error:.2%}" in said
    assert f"changed them by {change:.2%}" in said
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, size, (4, 16)) for size in (40, 40)]
    found = [np.array(Transformer.load(tmp_path / folder)(*ids)) for folder in ("float32", "again")]
    assert f"differ by at most {np.abs(found[0] - found[1]).max():.3g} " in said


def test_what_an_adapter_hardly_changes_is_hardly_rounded_again(tmp_path):
    """Integers of a GGUF file's grids, that MLX would choose otherwise: rounded anew they lose 7 % of each matrix."""
    config, rng = wide(), np.random.default_rng(5)
    scheme, stored = Scheme(32, 4), {}
    for name, (rows, width) in quantizable_shapes(config).items():
        q = rng.integers(3, 13, (rows, width)).astype(np.uint8)
        scales = rng.uniform(0.5, 1.5, (rows, width // 32)).astype(np.float32)
        stored |= Packed(packed_words(q, 4), scales, -8 * scales, scheme).tensors(name)
    stored |= {n: w for n, w in random_weights(config, 3).items() if n not in quantizable_shapes(config)}
    schemes = dict.fromkeys(quantizable_shapes(config), scheme)
    save_checkpoint(tmp_path / "base", config, stored, quantization=schemes)
    made(tmp_path / "base", size=0.02).write(tmp_path / "adapter")
    rounding = merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "again", requantize=True)
    assert rounding is not None
    assert rounding.error <= rounding.change < 0.01


@pytest.mark.fast("dora")
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_kept_beside_integers(base, kind, tmp_path, capsys):
    """The base's files to the byte; read as the merged model; only there is it a checkpoint that is merged as well."""
    integers, kept = tmp_path / "integers", tmp_path / "kept"
    adapter = made(integers, kind)
    adapter.write(tmp_path / "adapter")
    main(["merge", str(integers), str(tmp_path / "adapter"), "--keep-adapter", "--out", str(kept)])
    opened = open_checkpoint(kept)
    assert f"{kind} of rank 3 beside {len(opened.adapted_integers)} matrices of integers" in capsys.readouterr().out
    for name in ("config.json", "model.safetensors"):
        assert (kept / name).read_bytes() == (integers / name).read_bytes()
    merge_adapter(integers, tmp_path / "adapter", tmp_path / "float32")
    merged = dict(open_checkpoint(tmp_path / "float32").tensors())
    assert all(merged[name].tobytes() == weight.tobytes() for name, weight in opened.tensors())
    assert all(opened.tensor(name).tobytes() == merged[name].tobytes() for name in opened.adapted_integers)
    assert (
        set(opened.adapted_integers) == {f"{path}.weight" for path in linear_maps(wide())} & opened.quantization.keys()
    )
    assert (
        0 < len(opened.adapted_integers) < len(linear_maps(wide()))
    )  # down_proj is too narrow for the groups, and merged

    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 40, (4, 16)) for _ in range(2)]
    merge_adapter(integers, tmp_path / "adapter", tmp_path / "again", requantize=True)
    found = {name: np.array(Transformer.load(tmp_path / name)(*ids)) for name in ("float32", "kept", "again")}
    near, far = (np.abs(found[name] - found["float32"]).max() for name in ("kept", "again"))
    assert near < 1e-3 * far

    main(["info", str(kept)])
    assert "beside" in capsys.readouterr().out
    merge_adapter(kept, kept, tmp_path / "later")  # its own adapter, into its own base
    later = dict(open_checkpoint(tmp_path / "later").tensors())
    assert all(later[name].tobytes() == weight.tobytes() for name, weight in merged.items())
    with pytest.raises(UserError, match="is quantised already"):
        quantize_checkpoint(kept, tmp_path / "twice", Scheme(128, 4))
    (tmp_path / "lines").write_text("a\n")
    lines = str(tmp_path / "lines")
    flags = ["--source", lines, "--target", lines, "--steps", "1", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--from", str(kept), "--adapter", "lora", *flags])
    assert "has an adapter beside its weights already; train another one of the checkpoint" in capsys.readouterr().err
    flags = ["--keep-adapter", "--requantize", "--out", str(tmp_path / "both")]
    with pytest.raises(SystemExit, match="2"):
        main(["merge", str(integers), str(tmp_path / "adapter"), *flags])
    assert "give one of the two" in capsys.readouterr().err


def test_an_adapter_beside_other_weights_is_refused(base, tmp_path):
    """By digest, also where somebody has put the files there."""
    integers = tmp_path / "integers"
    made(integers).write(tmp_path / "adapter")
    keep_adapter(integers, tmp_path / "adapter", tmp_path / "kept")
    for name in ("manifest.json", "model.safetensors", "config.json"):
        (tmp_path / "kept" / name).unlink()
    for name in ("model.safetensors", "config.json"):
        shutil.copy(base / name, tmp_path / "kept")
    with pytest.raises(UserError, match=r"kept/adapter\.json: belongs to weights of SHA-256 .*, those beside it have"):
        open_checkpoint(tmp_path / "kept")
    for name in ("adapter.json", "adapter.safetensors"):
        shutil.copy(tmp_path / "adapter" / name, integers)
    assert open_checkpoint(integers).adapter is not None


@pytest.mark.parametrize("name", [ADAPTER, ARRAYS])
def test_damage_beside_the_weights_is_found(base, name, tmp_path):
    made(tmp_path / "integers").write(tmp_path / "adapter")
    keep_adapter(tmp_path / "integers", tmp_path / "adapter", tmp_path / "kept")
    data = bytearray((tmp_path / "kept" / name).read_bytes())
    data[-9] ^= 4
    (tmp_path / "kept" / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name}: damaged"):
        open_checkpoint(tmp_path / "kept")
    (tmp_path / "kept" / name).unlink()
    with pytest.raises(UserError, match=f"{name}: listed in manifest.json but missing"):
        open_checkpoint(tmp_path / "kept")


def test_what_cannot_be_merged(base, tmp_path):
    made(base).write(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"adapter: belongs to weights of SHA-256 .* those of .*integers have"):
        merge_adapter(tmp_path / "integers", tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(UserError, match="no matrix that the adapter changes is quantised; none can be rounded"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out", requantize=True)
    with pytest.raises(UserError, match="no matrix that the adapter changes is quantised; merging it rounds nothing"):
        keep_adapter(base, tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(UserError, match=r"adapter: belongs to weights of SHA-256 .* those of .*integers have"):
        keep_adapter(tmp_path / "integers", tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(UserError, match=r"base: holds no adapter \(adapter\.json, adapter\.safetensors\)"):
        merge_adapter(base, base, tmp_path / "out")
    with pytest.raises(UserError, match=r"adapter: is an adapter, .*; merge it into its base first"):
        merge_adapter(tmp_path / "adapter", tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(UserError, match="is the folder that is read"):
        merge_adapter(base, tmp_path / "adapter", base, force=True)
    with pytest.raises(UserError, match="adapter: is the folder that is read"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "adapter", force=True)
    shutil.copytree(base, tmp_path / "step")  # as in a run's folder
    shutil.copytree(tmp_path / "adapter", tmp_path / "step", dirs_exist_ok=True)
    with pytest.raises(UserError, match="is the folder that is read"):
        merge_adapter(base, tmp_path / "step", tmp_path / "step", force=True)
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_described_and_taken_for_no_model(base, tmp_path, capsys):
    made(base, "dora", targets=["encoder.layers.0.self_attention.query_proj"]).write(tmp_path / "adapter")
    main(["info", str(tmp_path / "adapter")])
    shown = capsys.readouterr().out
    for text in (
        "dora of rank 3, alpha 6",
        "1 linear maps: encoder.layers.*.self_attention.query_proj",
        weights_digest(base)[:40],
    ):
        assert text in shown
    for command in (["translate"], ["validate"], ["export", str(tmp_path / "onnx")]):
        with pytest.raises(SystemExit, match="2"):
            main(
                [command[0], str(tmp_path / "adapter"), *command[1:], *([str(base)] if command == ["validate"] else [])]
            )
        assert "; merge it into its base first" in capsys.readouterr().err


def test_another_checkpoint_is_replaced_by_force_alone(base, tmp_path):
    made(base).write(tmp_path / "adapter")
    before = (tmp_path / "integers" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="holds another checkpoint; choose another folder, or --force to replace it"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "integers")
    assert (tmp_path / "integers" / "model.safetensors").read_bytes() == before
    merge_adapter(base, tmp_path / "adapter", tmp_path / "integers", force=True)
    assert not open_checkpoint(tmp_path / "integers").quantization


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "format 2 is not known to this version"),
        ({"kind": "ia3"}, "kind='ia3' is not one of lora, dora"),
        ({"rank": 0}, "rank=0 must be a whole number"),
        ({"alpha": "much"}, "alpha='much' must be a number"),
        ({"alhpa": 1}, r"unknown key 'alhpa' \(did you mean 'alpha'\?\)"),
        ({"targets": []}, "targets must be names of linear maps"),
        ({"targets": 3}, "damaged"),
        ({"rank": 2}, r"lora_a is \(3, 128\), expected \(2, 128\)"),
        ({"rank": 2000}, "no change of it has a rank above"),
        ({"targets": ["encoder.layers.7.up_proj"]}, "encoder.layers.7.up_proj: the model has no such linear map"),
        ({"targets": ["encoder.layers.0.self_attention.query_proj"]}, r"expected none"),
        ({"kind": "dora"}, "magnitude is missing, expected"),
        ({"arrays": "0" * 64}, "its SHA-256 differs from"),
    ],
)
def test_a_damaged_adapter_is_refused(base, changes, said, tmp_path):
    made(base).write(tmp_path / "adapter")
    path = tmp_path / "adapter" / ADAPTER
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}))
    with pytest.raises(UserError, match=said):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("where", [0, 9, 100, -1])
def test_every_flipped_bit_is_found(base, where, tmp_path):
    made(base).write(tmp_path / "adapter")
    path = tmp_path / "adapter" / ARRAYS
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"adapter\.safetensors"):
        read_adapter(tmp_path / "adapter")
    shutil.rmtree(tmp_path / "adapter")
    with pytest.raises(UserError, match="holds no adapter"):
        read_adapter(tmp_path / "adapter")
