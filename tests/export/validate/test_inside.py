"""Points inside the sub-layers: what `validate` knows of them follows from the reference and the parameter table."""

import re
from itertools import pairwise

import numpy as np
import pytest
from small_models import configs, random_weights

from export.validate.points import HEADS, OPERATIONS, inner_names, makers, modules_between, operation, tap_names
from export.validate.reference import Reference
from mlx_transformer.core.config import TransformerConfig
from mlx_transformer.core.parameters import parameter_shapes

CONFIGS = configs()
E0 = "encoder.layers.0"


def names_of_a_run(config: TransformerConfig, inside: bool) -> list[str]:
    """By a run on real rows."""
    names: list[str] = []
    ids = np.array([[5, 6, 7], [8, 9, 2]])
    model = Reference(config, random_weights(config), inner_points=inside)
    model(ids, ids[:, :2] if config.architecture == "encoder-decoder" else None, tap=lambda n, _: names.append(n))
    return names


@pytest.mark.parametrize("name", CONFIGS)
def test_names_are_those_of_a_run(name: str) -> None:
    assert tap_names(CONFIGS[name]) == names_of_a_run(CONFIGS[name], False)
    assert inner_names(CONFIGS[name]) == names_of_a_run(CONFIGS[name], True)
    assert len(set(inner_names(CONFIGS[name]))) == len(inner_names(CONFIGS[name]))


def test_names_of_a_large_model_take_no_time_and_room() -> None:
    """Of 68 billion parameters, half a terabyte in float64."""
    config = TransformerConfig(vocab_size=2**20, d_model=2**14, heads=128, d_ff=2**16, max_positions=2**20)
    assert len(tap_names(config)) == 2 + 6 * 3 + 6 * 4 + 1
    assert tap_names(config) is not tap_names(config)  # the caller's own


@pytest.mark.parametrize("name", CONFIGS)
def test_every_point_has_words(name: str) -> None:
    """A point that is new needs one in `OPERATIONS`, unless it is a norm."""
    for point in inner_names(CONFIGS[name]):
        last = point.rpartition(".")[2]
        assert operation(point, CONFIGS[name])
        assert last in OPERATIONS or last.isdigit() or last == "embedding" or last.endswith("norm"), point


@pytest.mark.parametrize("name", CONFIGS)
def test_every_module_makes_a_point_but_tables_and_the_classifier(name: str) -> None:
    config = CONFIGS[name]
    table = parameter_shapes(config)
    modules = {parameter.rpartition(".")[0] for parameter in table}
    makers_in_order = [module for module, _, _ in modules_between(inner_names(config), table)]
    assert len(makers_in_order) == len(set(makers_in_order))
    table = re.compile(r".*(embedding|positions|positions\.layers\.\d+)")
    rest = {module for module in modules - set(makers_in_order) if not table.fullmatch(module)}
    assert rest <= {"output_proj"}


def test_modules_and_what_they_read_by_hand() -> None:
    post, pre = (CONFIGS[name] for name in ("paper, encoder", "modern, encoder"))
    attention, network = f"{E0}.self_attention", f"{E0}.feed_forward"
    expected = [
        (f"{attention}.key_proj", "", f"{attention}.key_proj"),
        (f"{attention}.value_proj", "", f"{attention}.value_proj"),
        (f"{attention}.query_proj", "", f"{attention}.query_proj"),
        (f"{attention}.output_proj", f"{attention}.context", attention),
        (f"{attention}_norm", f"{attention}.residual", f"{attention}_norm"),
        (f"{network}.up_proj", "", f"{network}.up_proj"),
        (f"{network}.down_proj", f"{network}.inner", network),
        (f"{network}_norm", f"{network}.residual", f"{network}_norm"),
    ]
    assert list(modules_between(inner_names(post), parameter_shapes(post)))[:8] == expected
    read = {module: before for module, before, _ in modules_between(inner_names(pre), parameter_shapes(pre))}
    assert read[f"{attention}_norm"] == ""  # the layer's own input, or the layer's before it
    assert read[f"{network}_norm"] == f"{attention}.residual"
    assert read["encoder.layers.1.self_attention_norm"] == read["encoder.norm"] == ""


def test_an_operation_to_come_is_found_by_its_point_and_parameters() -> None:
    """A norm over each head of queries and keys, before they are turned: a module of its own, made of one before it."""
    config = CONFIGS["modern"]
    points, table = [], {}
    for point in inner_names(config):
        points += [point, point.replace("_proj", "_norm")] if point.endswith(("query_proj", "key_proj")) else [point]
    for name, shape in parameter_shapes(config).items():
        table[name] = shape
        if name.endswith(("query_proj.weight", "key_proj.weight")):
            table[name.replace("_proj", "_norm")] = (config.d_k,)
    before = list(modules_between(inner_names(config), parameter_shapes(config)))
    after = list(modules_between(points, table))
    added = [entry for entry in after if entry not in before]
    assert [entry for entry in after if entry in before] == before
    assert len(added) == 2 * (2 + 4)
    assert (f"{E0}.self_attention.query_norm", "", f"{E0}.self_attention.query_norm") in added
    assert makers(points, table)[f"{E0}.self_attention"] == f"{E0}.self_attention.output_proj"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_norm_reads_the_point_before_it(name: str) -> None:
    """By which what is wrong with one is tried out: a sum, the layer before, a projection of its own."""
    points = inner_names(CONFIGS[name])
    assert any(point.endswith("norm") for point in points)
    for earlier, point in pairwise(points):
        if point.endswith(("query_norm", "key_norm")):
            assert earlier == point.replace("_norm", "_proj")
        elif point.endswith("_post_norm"):
            assert earlier == point.removesuffix("_post_norm")
        elif point.endswith("norm"):
            last = earlier.rpartition(".")[2]
            assert last in ("residual", "embedding") or last.isdigit(), (earlier, point)


@pytest.mark.parametrize("name", CONFIGS)
def test_heads_come_first_wherever_there_are_any(name: str) -> None:
    config = CONFIGS[name]
    values: dict[str, np.ndarray] = {}
    ids = np.array([[5, 6, 7], [8, 9, 2]])
    model = Reference(config, random_weights(config), inner_points=True)
    model(ids, ids if config.architecture == "encoder-decoder" else None, tap=values.__setitem__)
    for point, value in values.items():
        if value.ndim == 4:
            stack = config.of("encoder" if point.startswith("encoder.") else "decoder")
            assert value.shape[0] == 2
            assert value.shape[1] in (stack.heads, stack.key_value_heads)
        else:
            assert value.ndim == 2 + (not point.endswith(".state"))  # that of the last position
            assert point.rpartition(".")[2] not in HEADS
