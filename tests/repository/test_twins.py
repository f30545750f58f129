"""`mlx_transformer/nn` and `export/nn` are twins: same files, classes, methods, arguments, and calls in the same order.

Read from the syntax trees, so that a change on one side alone fails here, with the line that is missing on the other.
Differences are listed below, each with its reason.
"""

import ast
from functools import cache
from pathlib import Path

import pytest
from mlx.utils import tree_flatten
from small_models import configs

from export.interface import Request
from export.targets.table import target_of
from mlx_transformer import Transformer
from mlx_transformer.core.parameters import parameter_shapes

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "attention",
    "cache",
    "classifier",
    "feedforward",
    "layers",
    "masks",
    "model",
    "norms",
    "positions",
    "ssru",
)

ONLY_MLX = {
    "cache.Cache._attended": "rows join and leave in the runtime",
    "cache.Cache._starts_in": "rows join and leave in the runtime",
    "cache.Cache.arrays": "MLX is lazy",
    "cache.Cache.take_back": "positions are taken back by the runtime",
    "cache.Cache.part": "rows join and leave in the runtime",
    "cache.Cache.join": "rows join and leave in the runtime",
    "cache.Cache.keep": "rows are moved by the runtime, between two runs of a graph",
    "cache.Cache.reorder": "rows are moved by the runtime",
    "cache.Cache.repeat": "rows are moved by the runtime",
    "cache.Cache.shrink": "rows join and leave in the runtime",
    "cache.check_cache": "only MLX keeps keys and values as integers",
    "cache.group_of": "see check_cache",
    "cache.Integers": "see check_cache",
    "cache.Integers.shape": "see check_cache",
    "cache.Integers.swapaxes": "see check_cache",
    "cache.product": "see check_cache",
    "cache.LayerCache._stored": "see check_cache",
    "cache.mask_heads": "a fused kernel wants one mask a head",
    "cache.LayerCache.arrays": "MLX is lazy",
    "cache.LayerCache.take_back": "positions are taken back by the runtime",
    "cache.LayerCache.join": "rows join and leave in the runtime",
    "cache.LayerCache.has": "rows join and leave in the runtime",
    "cache.LayerCache.part": "rows join and leave in the runtime",
    "cache.LayerCache._drop": "buffers in place; those of target cpu are in its texts",
    "cache.LayerCache.take": "rows are moved by the runtime",
    "cache._empty": "a graph's cache is its inputs",
    "cache._padded": "a graph's cache is its inputs",
    "cache.room_for": "a graph's cache is its inputs",
    "classifier.Classifier.among": "a graph's rows are taken by `output_rows`, maybe in another graph",
    "classifier.Classifier.product": "a graph's product is the network's, or that of rows of another graph",
    "classifier.Classifier.trained": "training",
    "classifier.Classifier.unpacked": "training",
    "classifier.Classifier.weights": "training",
    "feedforward.FeedForward.product": "training computes it again for the gradient",
    "feedforward.recomputed": "training",
    "feedforward._fused": "the runtime's optimiser fuses",
    "masks.as_array": "a graph's masks are arrays always",
    "masks.as_numbers": "a graph's masks are numbers always",
    "masks.document_mask": "graphs don't train",
    "model.Transformer._embedded": "ids and vectors are checked on the host in MLX",
    "model.Transformer._hidden_decode": "a graph decodes by `step` with an empty cache",
    "model.Transformer._hidden_decoder": "a graph decodes by `step` with an empty cache",
    "model.Transformer._hidden_encoder_decoder": "two graphs",
    "model.Transformer._hidden_encoder": "a target knows how rows' vectors are weighed, and names what a head gives",
    "model.Transformer._needs": "the architecture decides which graphs exist",
    "model.Transformer.decode": "a graph decodes by `step` with an empty cache",
    "model.Transformer._repr_html_": "for display",
    "model.Transformer.__call__": "graphs call `encode`, `step` and `logits`",
    "model.Transformer.hidden": "training",
    "model.Transformer.start": "a graph's cache is its inputs",
    "model.Transformer.weights": "training",
    "positions.positions_in_documents": "graphs don't train",
    "positions._buckets": "a graph's table has max_positions rows",
    "positions._chunks": "a graph's table has max_positions rows",
    "positions._rotary": "a graph's table has max_positions rows",
    "positions._sinusoids": "a graph's table has max_positions rows",
    "ssru.LayerState.arrays": "MLX is lazy",
    "ssru.LayerState.take": "rows are moved by the runtime",
}
ONLY_ONNX = {
    "cache.Cache.position_ids": "a runner's caches know their positions each in a way of their own",
    "cache.LayerCache.contents": "what becomes the graph's outputs",
    "layers.DecoderLayer.tap_weights": "a graph's weights are an output",
    "layers.DecoderLayer.cross_keys_values": "opens the scope of its nodes' names",
    "masks.additive": "masks are added to the scores",
    "masks.as_boolean": "masks come in as integers",
    "model.Transformer.embedded": "vectors come in as they are; MLX checks them in _embedded",
    "model.Transformer.output_rows": "see Classifier.among",
    "model.Transformer.output_weight": "a graph's rows come from another graph, which had this",
    "model.Transformer.product": "see Classifier.product",
    "model.OutputBias.forward": "MLX adds the bias in `Classifier.product`",
    "ssru.LayerState.contents": "what becomes the graph's outputs",
    "ssru.OneStep": "targets whose graphs take one token a run need no rounds; MLX sees the number",
    "ssru.OneStep.extend": "see OneStep",
    "ssru._rounds": "a graph's rounds are a Loop",
    "positions.Positions.tables_of": "a graph's tables have names",
    "positions.distances": "MLX has kernels of their own for causal masks",
}
ARGUMENTS = {
    "cache.Cache.__init__": "a graph's cache is its inputs",
    "cache.LayerCache.__init__": "a graph's cache is its inputs",
    "cache.empty_layers": "see check_cache",
    "cache.Cache.self_mask": "a fused kernel wants one mask a head",
    "classifier.Classifier.__init__": "see Classifier.product",
    "masks.causal_mask": "a graph's masks follow from distances, which each target knows in its own way",
    "masks.causal_padding_mask": "a graph's masks follow from distances",
    "masks.window_mask": "a graph's masks follow from distances, and are numbers",
    "positions.Positions.turned": "a graph is float32",
    "positions.Positions.windowed": "a graph's position ids know their distances",
    "model.Transformer.classifier": "see Classifier.product",
    "model.Transformer.step": "`last` belongs to the search",
    "positions.Positions.add_bias": "a graph's position ids know their distances",
    "positions.bucket_table": "a graph's table has max_positions rows",
    "positions.positions_after": "left padding of a prompt comes in through the position ids",
    "positions.rotation": "a graph is float32",
    "positions.rotary_table": "a graph's table has max_positions rows",
    "positions.sinusoid_table": "a graph's table has max_positions rows",
}
# Where two runtimes need different operations; everywhere else the same parts are called in the same order.
BODIES = {
    "attention.matmul_shared_heads": "see cache.check_cache",
    "model.Transformer._with_types": "kinds are checked on the host in MLX, where none means all of kind 0",
    "attention.Attention.kernel": "training draws dropout on the weights",
    "cache.Cache.__init__": "a graph's cache is its inputs",
    "cache.Cache.self_mask": "MLX has kernels of their own for causal masks",
    "cache.LayerCache.__init__": "a graph's cache is its inputs",
    "cache.LayerCache.extend": "buffers in place, against Concat",
    "classifier.Classifier.__init__": "see Classifier.product",
    "feedforward.FeedForward.__call__": "see FeedForward.product",
    "layers.Decoder.cross_keys_values": "see DecoderLayer.cross_keys_values",
    "layers.DecoderLayer.__init__": "a graph's weights are an output, of a layer that is asked for them",
    "layers.DecoderLayer.attend_cross": "a graph's weights are an output; MLX's are computed beside a pass",
    "masks.causal_mask": "masks are added to the scores",
    "masks.causal_padding_mask": "masks are added to the scores; no row is empty in MLX, -1e9 allows it",
    "masks.padding_mask": "masks are added to the scores; no row is empty in MLX, -1e9 allows it",
    "model.Transformer.classifier": "see Classifier.product",
    "norms.LayerNorm.__call__": "an operator of a graph has one input less without a bias, MLX's takes None",
    "positions.Positions.turned": "a graph's tables have names",
    "norms.RMSNorm.__call__": "fused in MLX",
    "model.Transformer.encode": "ids and masks are checked on the host in MLX",
    "model.Transformer.step": "ids are checked on the host in MLX; see ARGUMENTS",
    "positions.Positions.add_bias": "a graph's position ids know their distances",
    "positions.positions_after": "a graph's masks follow from distances",
    "positions.positions_of": "a graph's masks follow from distances",
    "ssru.recurrence": "a graph takes no Loop for one token",
}


@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """Every class, method and function of a file by its dotted name."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[f"{path.stem}.{node.name}"] = node
        if isinstance(node, ast.ClassDef):
            functions = [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]
            found |= {f"{path.stem}.{node.name}.{entry.name}": entry for entry in functions}
    return found


def both(file: str) -> tuple[dict[str, ast.AST], dict[str, ast.AST]]:
    """Definitions in MLX and in ONNX; `forward` is what a module's call runs."""
    onnx = definitions(ROOT / "export" / "nn" / f"{file}.py")
    renamed = {n.replace(".forward", ".__call__") if n not in ONLY_ONNX else n: node for n, node in onnx.items()}
    return definitions(ROOT / "mlx_transformer" / "nn" / f"{file}.py"), renamed


def pairs() -> list[tuple[str, ast.FunctionDef, ast.FunctionDef]]:
    found = []
    for file in FILES:
        mlx, onnx = both(file)
        found += [(n, mlx[n], onnx[n]) for n in mlx.keys() & onnx.keys() if isinstance(mlx[n], ast.FunctionDef)]
    return sorted(found, key=lambda entry: entry[0])


def arguments(node: ast.FunctionDef) -> list[str]:
    names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    return [name for name in names if name != "op"]


def parts(node: ast.FunctionDef) -> list[str]:
    """What the body touches, in order: self's attributes and the functions of these files; dropout is training's."""
    ours = {name.split(".")[-1] for file in FILES for name in definitions(ROOT / "export" / "nn" / f"{file}.py")}
    found = []

    class Visitor(ast.NodeVisitor):
        def visit_Attribute(self, entry: ast.Attribute) -> None:
            self.generic_visit(entry)
            if (
                isinstance(entry.value, ast.Name)
                and entry.value.id == "self"
                and entry.attr not in ("dropout", "drops")
            ):
                found.append(f"self.{entry.attr}")

        def visit_Call(self, entry: ast.Call) -> None:
            self.generic_visit(entry)
            name = entry.func.id if isinstance(entry.func, ast.Name) else getattr(entry.func, "attr", "")
            library = isinstance(entry.func, ast.Attribute) and getattr(entry.func.value, "id", "") == "mx"
            if name in ours - {"forward"} and not library:
                found.append(f"{name}()")

    visitor = Visitor()
    for statement in node.body:
        visitor.visit(statement)
    return found


@pytest.mark.parametrize("file", FILES)
def test_same_classes_and_functions(file):
    mlx, onnx = (set(side) for side in both(file))
    assert mlx - onnx == {n for n in ONLY_MLX if n.startswith(f"{file}.")} & mlx, "add these to export/, or say why not"
    assert onnx - mlx == {n for n in ONLY_ONNX if n.startswith(f"{file}.")}, "add these to nn/, or say why not"


def test_no_stale_reason():
    mlx = {name for file in FILES for name in both(file)[0]}
    onnx = {name for file in FILES for name in both(file)[1]}
    assert ONLY_MLX.keys() <= mlx - onnx
    assert ONLY_ONNX.keys() <= onnx - mlx
    shared = {name for name, _, _ in pairs()}
    assert ARGUMENTS.keys() | BODIES.keys() <= shared


@pytest.mark.parametrize(("name", "mlx", "onnx"), pairs(), ids=[name for name, _, _ in pairs()])
def test_same_arguments(name, mlx, onnx):
    assert (arguments(mlx) == arguments(onnx)) != (name in ARGUMENTS)


@pytest.mark.parametrize(("name", "mlx", "onnx"), pairs(), ids=[name for name, _, _ in pairs()])
def test_same_parts_in_the_same_order(name, mlx, onnx):
    assert (parts(mlx) == parts(onnx)) != (name in BODIES)


@pytest.mark.parametrize("name", configs())
def test_both_sides_use_every_parameter_of_the_table(name):
    config = configs()[name]
    expected = parameter_shapes(config)
    mlx = {parameter: tuple(x.shape) for parameter, x in tree_flatten(Transformer(config).parameters())}
    assert mlx == expected
    onnx = {}
    for graph in target_of("portable").graph_names(config):
        for parameter, value in target_of("portable").build(graph, Request(config=config)).graph.initializers.items():
            if value.const_value is None:
                assert value.uses()
                onnx[parameter] = tuple(value.shape)
    assert onnx == expected
