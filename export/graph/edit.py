"""`Nodes`: how passes add nodes and initializers to a finished graph, name them and put them in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike
from onnx_ir.convenience import replace_nodes_and_values


class Nodes:
    """New nodes that replace a node or compute a value, the owner; their names begin with the owner's.

    They are collected until `before`, `replace` or `at_start` puts them into a graph. Initializers go into the
    outermost graph, where all branches and bodies can read them.

        add = Nodes(model, node)
        add.replace(add("Mul", node.inputs[0], add.constant(np.float32(2))))
    """

    def __init__(
        self, model: ir.Model, owner: ir.Node | str, constants: str = "", *, output: str = ".0", numbered: bool = False
    ) -> None:
        """`owner`: the node, or the name of the value.

        `constants`: prefix of the names of constants. `output`: added to a node's name for its output's name, e.g.
        ".0". `numbered`: a running number ends every node's name, otherwise only from an operator's second node on.
        """
        self.model, self.owner, self.constants = model, owner, constants
        self.name = owner if isinstance(owner, str) else owner.name
        self.output, self.numbered = output, numbered
        self.nodes: list[ir.Node] = []
        self._made = Counter[str]()

    def __call__(self, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Add a node with one output; returns the output."""
        return self.several(1, operator, *inputs, domain=domain, **attributes)[0]

    def several(
        self, outputs: int, operator: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Add a node with this number of outputs; returns them."""
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
        """An initializer with this value; equal values of the same type share one."""
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
        """Make `value` an initializer, unless its name is taken; returns the initializer of this name."""
        return self.model.graph.initializers.setdefault(str(value.name), value)

    def outside(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Add a node; if the owner is in a branch, put it at the start of the outermost graph at once."""
        value = self(operator, *inputs, **attributes)
        if self._node.graph is not self.model.graph:
            self.model.graph.insert_before(self.model.graph[0], self.nodes.pop())
        return value

    def before(self) -> None:
        """Put the nodes before the owner, and keep the owner."""
        graph = self._node.graph
        assert graph is not None
        graph.insert_before(self._node, self.nodes)
        self.nodes = []

    def replace(self, result: ir.Value) -> None:
        """Replace the owner by the nodes; the readers of its output read `result`."""
        graph = self._node.graph
        assert graph is not None
        replace_nodes_and_values(graph, self._node, [self._node], self.nodes, [self._node.outputs[0]], [result])

    def at_start(self) -> None:
        """Put the nodes at the start of the outermost graph, where every branch and body can read their values."""
        self.model.graph.insert_before(self.model.graph[0], self.nodes)
        self.nodes = []

    @property
    def _node(self) -> ir.Node:
        assert isinstance(self.owner, ir.Node)
        return self.owner
