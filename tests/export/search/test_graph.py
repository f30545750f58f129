"""One ONNX file that holds the search: the tokens and scores of MLX's `search`, drawn ones included."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import onnx
import pytest
from combined import SLOW, combined, in_pairs, thinned
from ending_models import POST_NORM, PRE_NORM, made, rows

from export import OnnxTransformer, export_onnx
from export.search import SearchModel, export_search
from export.search.write import EXTERNAL_THRESHOLD
from mlx_transformer import Transformer
from mlx_transformer.convert.quantize import quantize_checkpoint
from mlx_transformer.core.checkpoint import save_checkpoint
from mlx_transformer.core.quantization import Scheme
from mlx_transformer.system.errors import UserError

CONFIGS = {"post-norm": POST_NORM, "pre-norm": PRE_NORM}
WIDE = {"d_model": EXTERNAL_THRESHOLD // 4 + 16, "d_k": 16, "d_v": 16}
REQUESTS = [
    {},
    {"min_new_tokens": 6},
    {"max_new_tokens": 1},
    {"max_new_tokens": 7},
    {"beam": 2, "n_best": 2},
    {"beam": 4, "n_best": 4, "max_new_tokens": 12},
    {"beam": 8, "n_best": 3, "length_penalty": 0.0},
    {"beam": 4, "n_best": 4, "max_new_tokens": 1},
    {"beam": 3, "n_best": 2, "length_penalty": -0.5, "early_stopping": True},
    {"beam": 2, "n_best": 2, "length_penalty": 1.2, "min_new_tokens": 5},
    {"beam": 4, "n_best": 2, "penalty_form": "length", "length_penalty": 1.0},
]


@pytest.fixture(scope="module", params=in_pairs(CONFIGS, ["portable", "cpu"]))
def both(request, tmp_path_factory):
    """MLX's model and the graph."""
    name, target = request.param
    folder = tmp_path_factory.mktemp("search")
    model, checkpoint = made(folder, **CONFIGS[name])
    return model, SearchModel(export_search(checkpoint, folder / "search.onnx", target=target), threads=1)


def equal(results, expected):
    assert [[h.ids for h in row] for row in results] == [[h.ids for h in row] for row in expected]
    for row, other in zip(results, expected, strict=True):
        np.testing.assert_allclose([h.score for h in row], [h.score for h in other], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", thinned(REQUESTS, 3), ids=str)
def test_finds_what_mlx_finds(both, options):
    model, graph = both
    equal(graph.search(rows(), **options), model.search(rows(), **options))


@pytest.mark.slow
@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_one_file_holds_vectors_of_any_width(target, tmp_path):
    """Those within the loop too, which lie in a data file until all is written."""
    model, checkpoint = made(tmp_path, **POST_NORM, **WIDE)
    file = export_search(checkpoint, tmp_path / "out" / "search.onnx", target=target)
    assert [path.name for path in file.parent.iterdir()] == ["search.onnx"]
    equal(SearchModel(file, threads=1).search(rows(), beam=2), model.search(rows(), beam=2))


def test_a_batch_changes_nothing(both):
    _, graph = both
    together = graph.search(rows(), beam=4, n_best=2)
    equal(together, [graph.search([row], beam=4, n_best=2)[0] for row in rows()])
    equal(together, graph.search(rows(), beam=4, n_best=2, batch_tokens=100))


def test_each_sentence_has_its_own_limit(both):
    """As the graph's own default says: source length + 50, or one number for each sentence."""
    _, graph = both
    ids, mask = np.array([[7, 9, 2], [5, 2, 0]]), np.array([[1, 1, 1], [1, 1, 0]])
    feeds = {"input_ids": ids, "attention_mask": mask, "min_new_tokens": np.array(60)}
    assert graph.session.run(["lengths"], feeds)[0].tolist() == [[60], [60]]
    feeds["min_new_tokens"] = np.array(53)
    assert graph.session.run(["lengths"], feeds)[0].tolist() == [[53], [53]]
    feeds["max_new_tokens"] = np.array([9, 4])
    sequences, lengths = graph.session.run(["sequences", "lengths"], feeds)
    assert lengths.tolist() == [[9], [4]]
    assert sequences.shape == (2, 1, 9)
    assert (sequences[1, 0, 4:] == 0).all()


@pytest.mark.parametrize("beam", [1, 4])
def test_ties_go_to_the_lowest_id(tmp_path, beam):
    """All tokens alike: what differs is the order of ids alone."""
    model, checkpoint = made(tmp_path, **POST_NORM)
    weights = {
        name: np.zeros_like(values) if "output_proj" in name else values for name, values in model.weights().items()
    }
    save_checkpoint(checkpoint, model.config, weights, force=True)
    model = Transformer.load(checkpoint)
    graph = SearchModel(export_search(checkpoint, tmp_path / "ties.onnx"), threads=1)
    options = {"beam": beam, "n_best": beam, "max_new_tokens": 4}
    equal(graph.search(rows(3), **options), model.search(rows(3), **options))


def test_a_beam_wider_than_half_the_vocabulary(tmp_path):
    model, checkpoint = made(tmp_path, **POST_NORM, vocab_size=9)
    graph = SearchModel(export_search(checkpoint, tmp_path / "few.onnx"), threads=1)
    for options in ({"beam": 8, "n_best": 8}, {"beam": 6, "n_best": 6, "max_new_tokens": 2, "min_new_tokens": 2}):
        equal(graph.search(rows(5, 9), **options), model.search(rows(5, 9), **options))
    with pytest.raises(UserError, match="beam=10 is more than the vocabulary's 9 tokens"):
        graph.search([[4, 2]], beam=10)


def frequencies(graph, draws, **options):
    source = [[5, 9, 2]] * draws
    results = graph.search(source, sample=True, max_new_tokens=1, batch_tokens=1 << 30, **options)
    tokens = [h.ids[0] if h.ids else 2 for (h,) in results]
    return np.bincount(tokens, minlength=graph.config.vocab_size)


def first_probabilities(model):
    hidden = model.encode(mx.array([[5, 9, 2]]))
    logits = np.array(model.decode(mx.array([[1]]), hidden))[0, 0].astype(np.float64)
    logits[[0, 1]] = -np.inf
    return logits


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def close(counts, p):
    """Pearson's chi-square at about one in a million, over the tokens that are expected five times or more."""
    expected = p * counts.sum()
    frequent = expected >= 5
    assert counts[p == 0].sum() == 0
    statistic = ((counts[frequent] - expected[frequent]) ** 2 / expected[frequent]).sum()
    freedom = frequent.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 12, (statistic, freedom)


SAMPLING = [
    {"seed": 1},
    {"seed": (7 << 32) + 5, "temperature": 0.7},
    {"seed": 2**63 + 11, "top_k": 5},
    {"seed": 2**64 - 1, "top_p": 0.8, "min_new_tokens": 4},
    {"seed": 2, "temperature": 1.7, "top_k": 12, "top_p": 0.9},
    {"seed": 3, "top_k": 1000, "temperature": 3.0, "max_new_tokens": 20},
]


@pytest.mark.parametrize("options", thinned(SAMPLING, 3), ids=str)
def test_draws_what_mlx_draws(both, options):
    """Both sides part only where two scores are as near as rounding, which these aren't."""
    model, graph = both
    equal(graph.search(rows(30), sample=True, **options), model.search(rows(30), sample=True, **options))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SAMPLING[1::2], pytest.param(SAMPLING[::2], marks=SLOW)], ids=["some", "others"])
def test_draws_what_mlx_and_the_exported_package_draw(sampling, tmp_path):
    """With more than one block of tokens, the last of them not whole."""
    model, checkpoint = made(tmp_path, **PRE_NORM, vocab_size=700)
    graph = SearchModel(export_search(checkpoint, tmp_path / "search.onnx"), threads=1)
    portable = OnnxTransformer(export_onnx(checkpoint, tmp_path / "portable"), threads=1)
    source = rows(9, 700)
    for options in sampling:
        drawn = model.generate(source, sample=True, **options)
        assert graph.generate(source, sample=True, **options) == drawn
        assert portable.generate(source, sample=True, **options) == drawn
        assert max(max(row, default=0) for row in drawn) > 128


def test_a_row_has_its_number_in_the_batch_unless_told(both):
    model, graph = both
    source = [5, 9, 2]
    drawn = model.generate([source] * 5, sample=True, seed=4)
    ids = np.array([source] * 2)
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "sample": np.array(True), "seed": np.array(4)}

    def first_tokens(**more):
        sequences, lengths = graph.session.run(["sequences", "lengths"], {**feeds, **more})
        return [row[0, : length[0]].tolist() for row, length in zip(sequences, lengths, strict=True)]

    assert first_tokens() == drawn[:2]
    assert first_tokens(rows=np.array([4, 1])) == [drawn[4], drawn[1]]


@pytest.mark.fast("post-norm portable")
def test_draws_have_the_model_s_distribution(both):
    model, graph = both
    logits = first_probabilities(model)
    close(frequencies(graph, 4000, seed=1), softmax(logits))
    falling = np.argsort(-logits)
    p = softmax(logits)[falling]
    nucleus = falling[: (np.cumsum(p) - p < 0.7).sum()]
    nucleus_logits = np.full_like(logits, -np.inf)
    nucleus_logits[nucleus] = logits[nucleus]
    close(frequencies(graph, 4000, seed=4, top_p=0.7), softmax(nucleus_logits))


def test_draws_depend_on_seed_and_row_alone(both):
    _, graph = both
    drawn = graph.generate(rows(), sample=True, seed=7)
    assert graph.generate(rows(), sample=True, seed=7, batch_tokens=40) == drawn
    assert graph.generate(rows(), sample=True, seed=8) != drawn
    assert graph.generate(rows(), sample=True, seed=7 + (1 << 32)) != drawn
    assert len({tuple(row) for row in graph.generate([[5, 9, 2]] * 8, sample=True, seed=7)}) > 4
    assert graph.generate(rows(), sample=True, seed=7, top_k=1) == graph.generate(rows())


def test_the_file(tmp_path):
    """Standard operators alone, checked, whole in one file or with its weights beside it, with the same results."""
    _, checkpoint = made(tmp_path, **POST_NORM)
    one_file = export_search(checkpoint, tmp_path / "a.onnx")
    beside = export_search(checkpoint, tmp_path / "b.onnx", external=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx", "b.onnx_data", "model"]
    assert beside.stat().st_size < one_file.stat().st_size - (tmp_path / "b.onnx_data").stat().st_size / 2
    proto = onnx.load(one_file)
    assert {entry.domain for entry in proto.opset_import} == {""}
    assert [node.op_type for node in proto.graph.node].count("Loop") == 1
    assert SearchModel(one_file).generate(rows(), beam=3) == SearchModel(beside).generate(rows(), beam=3)
    assert export_search(checkpoint, one_file, force=True).read_bytes() == one_file.read_bytes()


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint, and of a target its search in float32, exported when it is first asked for."""
    folder = tmp_path_factory.mktemp("wide")
    _, checkpoint = made(folder, **POST_NORM, vocab_size=600, d_model=64)
    file = cache(
        lambda target: SearchModel(export_search(checkpoint, folder / f"{target}.onnx", target=target), threads=1)
    )
    return lambda target: (checkpoint, file(target))


@pytest.mark.slow
@pytest.mark.fast("int4-portable")
@pytest.mark.parametrize(
    ("precision", "target"),
    combined(["int8", "int8-weights", "int4", "float16", "bfloat16"], ["portable", "cpu"], step=2),
)
def test_lower_precisions(wide, tmp_path, target, precision):
    """Smaller files that still search: scores near those of float32."""
    checkpoint, exact = wide(target)
    path = export_search(checkpoint, tmp_path / "lower.onnx", target=target, precision=precision)
    assert path.stat().st_size < 0.75 * exact.path.stat().st_size
    options = {"beam": 4, "max_new_tokens": 8, "min_new_tokens": 8}
    results, expected = SearchModel(path, threads=1).search(rows(6), **options), exact.search(rows(6), **options)
    allowed = 0.5 if precision == "int4" else 0.1
    for (row,), (other,) in zip(results, expected, strict=True):
        assert len(row.ids) == len(other.ids) == 8
        assert abs(row.score - other.score) < allowed * abs(other.score)


@pytest.mark.slow
@pytest.mark.parametrize("target", thinned(["cpu", "portable"], 2))
def test_a_checkpoint_quantised_by_mlx(tmp_path, target):
    """Its integers stay what they are, in the loop's graph too."""
    _, checkpoint = made(tmp_path, **POST_NORM, d_model=64, heads=2, d_ff=64)
    quantize_checkpoint(checkpoint, tmp_path / "quantised", Scheme(32, 4))
    plain = export_search(checkpoint, tmp_path / "plain.onnx", target=target)
    path = export_search(tmp_path / "quantised", tmp_path / "quantised.onnx", target=target)
    assert path.stat().st_size < 0.6 * plain.stat().st_size
    model, graph = Transformer.load(tmp_path / "quantised"), SearchModel(path, threads=1)
    equal(graph.search(rows(6), beam=4, n_best=2), model.search(rows(6), beam=4, n_best=2))


def test_errors_say_what_to_do(tmp_path):
    _, checkpoint = made(tmp_path, **POST_NORM)
    with pytest.raises(UserError, match=r"give a name that ends with \.onnx"):
        export_search(checkpoint, tmp_path / "folder")
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        export_search(checkpoint, tmp_path / "a.onnx", text=True)
    with pytest.raises(UserError, match="target 'web' has none"):
        export_search(checkpoint, tmp_path / "a.onnx", target="web")
    save_checkpoint(tmp_path / "alone", *_encoder_only())
    with pytest.raises(UserError, match="needs a decoder, not architecture='encoder'"):
        export_search(tmp_path / "alone", tmp_path / "a.onnx")
    assert not list(tmp_path.glob("*.onnx"))
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    with pytest.raises(UserError, match="ONNX Runtime can't open it"):
        SearchModel(tmp_path / "bad.onnx")
    graph = SearchModel(export_search(checkpoint, tmp_path / "a.onnx"))
    with pytest.raises(UserError, match="row 0, position 1: id 99 is outside the vocabulary"):
        graph.generate([[4, 99, 2]])
    with pytest.raises(UserError, match="takes ids, and holds no tokenizer: call generate"):
        graph.translate(["a line"])
    with pytest.raises(UserError, match="max_new_tokens=90: source row 0 leaves room for 70 tokens"):
        graph.generate([[4, 2]], max_new_tokens=90)


def _encoder_only():
    from small_models import alone, random_weights

    config = alone("paper", "encoder")
    return config, random_weights(config)
