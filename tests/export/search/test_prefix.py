"""Forced first tokens in the one-file search: each sentence's own, as `decoding.steps.Rules` has them on the host."""

import numpy as np
import onnx
import pytest
from combined import combined, in_pairs
from ending_models import POST_NORM, PRE_NORM, made, rows

from export.search import SearchModel, export_search
from mlx_transformer.system.errors import UserError

CONFIGS = {"post-norm": POST_NORM, "pre-norm": PRE_NORM}
REQUESTS = [
    {},
    {"beam": 2, "n_best": 2},
    {"beam": 4, "n_best": 4, "max_new_tokens": 12, "min_new_tokens": 5},
    {"beam": 8, "n_best": 3, "length_penalty": 0.0},
    {"sample": True, "seed": 7, "temperature": 1.5},
    {"sample": True, "seed": 2**63 + 5, "top_k": 6},
]


@pytest.fixture(scope="module", params=in_pairs(CONFIGS, ["portable", "cpu"]))
def both(request, tmp_path_factory):
    """MLX's model and the graph."""
    name, target = request.param
    folder = tmp_path_factory.mktemp("prefix")
    model, checkpoint = made(folder, **CONFIGS[name])
    return model, SearchModel(export_search(checkpoint, folder / "search.onnx", target=target), threads=1)


def forced(model, longest):
    """Of each sentence up to `longest` tokens that it would not choose by itself; of some none."""
    rng = np.random.default_rng(longest)
    return [rng.integers(3, model.config.vocab_size, rng.integers(0, longest + 1)).tolist() for _ in rows()]


@pytest.mark.fast("pre-norm cpu-{}-1", "pre-norm cpu-{'sample': True, 'seed': 7, 'temperature': 1.5}-1")
@pytest.mark.parametrize(("options", "longest"), combined(REQUESTS, [1, 4], step=2), ids=str)
def test_finds_what_mlx_finds(both, options, longest):
    model, graph = both
    prefix = forced(model, longest)
    results, expected = graph.search(rows(), prefix, **options), model.search(rows(), prefix=prefix, **options)
    assert [[h.ids for h in row] for row in results] == [[h.ids for h in row] for row in expected]
    for row, other, start in zip(results, expected, prefix, strict=True):
        np.testing.assert_allclose([h.score for h in row], [h.score for h in other], rtol=2e-5, atol=2e-5)
        assert all(h.ids[: len(start)] == start for h in row)


def test_a_language_for_each_row(both):
    """One id that all outputs of a row begin with: the same source in several languages, in one batch."""
    _, graph = both
    languages = [[5], [6], [7], []]
    outputs = graph.generate([rows()[0]] * 4, languages, beam=4)
    assert [ids[:1] for ids in outputs[:3]] == languages[:3]
    assert outputs[3] == graph.generate([rows()[0]], beam=4)[0]
    alone = [graph.generate([rows()[0]], [language], beam=4)[0] for language in languages]
    assert outputs == alone


def test_one_prefix_for_all_as_the_file_takes_it(both):
    _, graph = both
    ids, mask = np.array([[7, 9, 2], [5, 2, 0]]), np.array([[1, 1, 1], [1, 1, 0]])
    feeds = {"input_ids": ids, "attention_mask": mask, "prefix": np.array([[6, 8]])}
    (sequences,) = graph.session.run(["sequences"], feeds)
    assert sequences[:, 0, :2].tolist() == [[6, 8]] * 2


def test_what_can_t_be_forced_is_refused(both):
    _, graph = both
    with pytest.raises(UserError, match="prefix row 0, position 1: eos_id 2 can't be forced"):
        graph.search([[5, 2]], [[5, 2]])
    with pytest.raises(UserError, match="prefix has 2 rows for 1 inputs"):
        graph.search([[5, 2]], [[5], [6]])


@pytest.mark.fast("input-prefix")
@pytest.mark.parametrize(("side", "name"), [("input", "prefix"), ("input", "end_ids"), ("output", "scores")])
def test_a_file_without_one_of_its_inputs_or_outputs_is_refused(side, name, tmp_path):
    _, checkpoint = made(tmp_path, **POST_NORM)
    file = export_search(checkpoint, tmp_path / "search.onnx")
    model = onnx.load(file)
    values = getattr(model.graph, side)
    (port,) = [value for value in values if value.name == name]
    values.remove(port)
    onnx.save(model, file)
    with pytest.raises(UserError, match=f"search.onnx: has no {side} {name}; export it again"):
        SearchModel(file, threads=1, verify=False)
