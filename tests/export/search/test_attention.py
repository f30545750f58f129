"""`export --search --attention`: what each token of the hypotheses was chosen by, as the step-by-step way has it."""

import numpy as np
import pytest
from combined import SLOW, thinned
from command_line import caller, refused
from copying_model import write_copying_model
from ending_models import POST_NORM, PRE_NORM, made, rows

from export import OnnxTransformer, export_onnx, export_search
from export.interface import CROSS_ATTENTION
from export.search import SearchModel
from export.validate import compare
from export.validate.reference import Reference
from export.validate.rule import ErrorScale, Truth
from mlx_transformer.system.errors import UserError

CONFIGS = {"post-norm": POST_NORM, "pre-norm": PRE_NORM}
REQUESTS = [
    {},
    {"max_new_tokens": 1},
    {"beam": 2, "n_best": 2, "min_new_tokens": 5},
    {"beam": 4, "n_best": 4, "max_new_tokens": 7},
    {"sample": True, "seed": 3},
]
call = pytest.fixture(caller)


MODELS = [pytest.param(("post-norm", "portable"), marks=SLOW), ("pre-norm", "cpu")]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def models(request, tmp_path_factory):
    """The reference in float64 and in float32; what runs the file, and the folder step by step; the file without."""
    name, target = request.param
    folder = tmp_path_factory.mktemp("search")
    model, checkpoint = made(folder, **CONFIGS[name])
    references = [Reference(model.config, model.weights(), dtype, inner_points=True) for dtype in ("f8", "f4")]
    options = {"target": target, "attention": True, "attention_layer": 0}
    file = SearchModel(export_search(checkpoint, folder / "search.onnx", **options), threads=1)
    onnx = OnnxTransformer(export_onnx(checkpoint, folder / "onnx", **options), threads=1)
    plain = SearchModel(export_search(checkpoint, folder / "plain.onnx", target=target), threads=1)
    return references, file, onnx, plain


def weights_of(reference, source, ids):
    points = {}
    read = [[reference.config.bos_id, *ids[:-1]]]
    reference(np.array([source]), np.array(read), tap=points.__setitem__)
    return points["decoder.layers.0.cross_attention.weights"].mean(axis=1)[0]


@pytest.mark.fast("('pre-norm', 'cpu')-{}", "('pre-norm', 'cpu')-{'beam': 4, 'n_best': 4, 'max_new_tokens': 7}")
@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_it_is_that_of_the_hypotheses_step_by_step(models, options):
    references, *runners, _ = models
    found = [
        [
            (source, h)
            for source, best in zip(rows(), model.search(rows(), attention=True, **options), strict=True)
            for h in best
            if h.ids
        ]
        for model in runners
    ]
    assert found[0]
    assert [(source, h.ids) for source, h in found[0]] == [(source, h.ids) for source, h in found[1]]
    truths = [[weights_of(reference, source, h.ids) for reference in references] for source, h in found[0]]
    natural = ErrorScale.pooled([Truth.of(*pair, np.ones(len(pair[0]), bool)).scale for pair in truths])
    for (source, ours), (_, theirs), (t64, _) in zip(*found, truths, strict=True):
        assert ours.attention.shape == theirs.attention.shape == (len(ours.ids), len(source))
        for h in (ours, theirs):
            assert np.abs(h.attention - t64).max() <= 8 * max(natural.max, 2**-24 * natural.size)


def test_nothing_is_shown_behind_an_end_and_of_padding(models):
    _, graph, *_ = models
    ids, mask = np.array([[7, 9, 8, 2], [5, 2, 0, 0]]), np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    feeds = {"input_ids": ids, "attention_mask": mask, "beam": np.array(3), "n_best": np.array(3)}
    lengths, read = graph.session.run(["lengths", CROSS_ATTENTION], feeds)
    assert read.shape == (2, 3, lengths.max(), 4)
    is_token = np.arange(lengths.max()) < lengths[..., None]
    assert not read[~is_token].any()
    assert not read[1, ..., 2:].any()
    assert np.abs(read.sum(axis=-1)[is_token] - 1).max() <= 16 * 2**-24


def test_tokens_and_scores_are_what_they_are_without(models):
    _, file, _, plain = models
    options = {"beam": 4, "n_best": 2}
    assert file.search(rows(), **options) == plain.search(rows(), **options)
    assert all(h.attention is None for best in file.search(rows(), **options) for h in best)
    with pytest.raises(UserError, match=r"returns no attention: export it with --search --attention$"):
        plain.search(rows(), attention=True)


@pytest.fixture(scope="module")
def copying(tmp_path_factory):
    return write_copying_model(tmp_path_factory.mktemp("copying"), onnx=False)


@pytest.mark.parametrize("precision", thinned(["float32", "int8"], 2))
def test_translate_aligns_with_it(call, copying, tmp_path, precision):
    one = tmp_path / "one.onnx"
    options = ["--search", "--attention", "--precision", precision, "--accept-loss"]
    assert call("export", copying / "model", one, *options)[0] == 0
    lines = ["one two three.", "", "four"]
    status, out, _ = call("translate", one, "--alignment", "--beam", 2, stdin="".join(f"{x}\n" for x in lines))
    assert (status, out) == (0, "one two three.\t0-0 1-1 2-2\n\t\nfour\t0-0\n")
    assert compare(copying / "model", one, ["onnxruntime"], longest=6, threads=1).equal


def test_refusals(call, copying, tmp_path):
    model, one = copying / "model", tmp_path / "one.onnx"
    refused(call("export", model, one, "--embed-tokenizer", "--attention"), "leave out --attention")
    refused(call("export", model, one, "--search", "--attention-layer", 5), "layers 0 to 1")
    assert call("export", model, one, "--search")[0] == 0
    refused(call("translate", one, "--alignment", "one"), "export it with --search --attention")
