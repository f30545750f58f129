"""New nodes in a graph that is built already: what every pass adds, names and puts in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike
from onnx_ir.convenience import replace_nodes_and_values


class Nodes:
    """New nodes that take the place of one node, or that compute one value; they are named after it.

    They are collected until `before`, `replace` or `at_start` puts them into a graph. Initializers go into the
    outermost graph, where all branches and bodies can read them.
    """

    def __init__(
        self, model: ir.Model, owner: ir.Node | str, constants: str = "", *, output: str = ".0", numbered: bool = False
    ) -> None:
        """`owner`: the node, or the name of the value.

        `constants`: what the names of constants begin with. `output`: what the name of an output adds to its node's.
        `numbered`: the name of every node ends with its number; otherwise only second and later ones of an operator do.
        """
        self.model, self.owner, self.constants = model, owner, constants
        self.name = owner if isinstance(owner, str) else owner.name
        self.output, self.numbered = output, numbered
        self.nodes: list[ir.Node] = []
        self._made = Counter[str]()

    def __call__(self, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Add a node and return its output."""
        return self.several(1, operator, *inputs, domain=domain, **attributes)[0]

    def several(
        self, outputs: int, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node and return its outputs, of which there are so many."""
        count = self._made.total() if self.numbered else self._made[operator]
        name = f"{self.name}/{operator}" + (f"_{count}" if count or self.numbered else "")
        self._made[operator] += 1
        node = ir.node(operator, inputs, attributes, domain=domain, num_outputs=outputs, name=name)
        for i, value in enumerate(node.outputs):
            value.name = f"{name}{self.output}" + (f"_{i}" if i else "")
        self.nodes.append(node)
        if domain:
            self.model.graph.opset_imports.setdefault(domain, 1)
        return node.outputs

    def constant(self, array: ArrayLike) -> ir.Value:
        """Return an initializer of this value, the same one for all values that are equal."""
        array = np.asarray(array)
        initializers = self.model.graph.initializers
        kind = "x".join(map(str, array.shape)) or "scalar"
        name = f"{self.constants}.{array.dtype.name}.{kind}.{'_'.join(map(str, array.ravel()))}"
        if name not in initializers:
            tensor = ir.tensor(array, name=name)
            initializers[name] = ir.Value(
                name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
        return initializers[name]

    def initializer(self, value: ir.Value) -> ir.Value:
        """Return the initializer of this name, which is `value` if there was none."""
        return self.model.graph.initializers.setdefault(str(value.name), value)

    def outside(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add a node to the outermost graph, if the owner is in a branch of it."""
        value = self(operator, *inputs, **attributes)
        if self._node.graph is not self.model.graph:
            self.model.graph.insert_before(self.model.graph[0], self.nodes.pop())
        return value

    def before(self) -> None:
        """Put the nodes before the owner, which stays."""
        graph = self._node.graph
        assert graph is not None
        graph.insert_before(self._node, self.nodes)
        self.nodes = []

    def replace(self, result: ir.Value) -> None:
        """Put the nodes in the place of the owner; whoever read its output reads `result`."""
        graph = self._node.graph
        assert graph is not None
        replace_nodes_and_values(graph, self._node, [self._node], self.nodes, [self._node.outputs[0]], [result])

    def at_start(self) -> None:
        """Put the nodes before all others of the outermost graph: every branch and body may read their values."""
        self.model.graph.insert_before(self.model.graph[0], self.nodes)
        self.nodes = []

    @property
    def _node(self) -> ir.Node:
        assert isinstance(self.owner, ir.Node)
        return self.owner
