"""Which gradients a running backward has to compute, and the results that one half of a backward passes to
the other.

Zero-bubble pipeline schedules call `torch.autograd.grad` twice, for some of the inputs each time. Autograd
then runs a node's whole backward twice, and ``ctx.needs_input_grad`` is the same in both calls.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe.runtime.record_trees import arrays_in


def asked_for(ctx: Any) -> list[bool]:
    """Whether the gradients of a node's input tensors are used, in the order of its function's arguments."""
    return [node is not None and runs(node) for node, _ in ctx.next_functions]


def runs(node: Any) -> bool:
    """Whether the running backward runs a node of autograd's graph."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for leaf tensors that were passed to torch.autograd.grad
        return True


def is_asked_for(parameter: Tensor) -> bool:
    """Whether the running backward computes the gradient of a leaf tensor."""
    return runs(torch.autograd.graph.get_gradient_edge(parameter).node)


def leaves_not_asked_for() -> list[Tensor]:
    """Leaf tensors whose gradients the running node computes, although the running backward does not use
    them: a compiled backward computes all of its gradients."""
    node: Any = torch._C._current_autograd_node()
    following = () if node is None else [f for f, _ in node.next_functions if hasattr(f, "variable")]
    return [f.variable for f in following if not runs(f)]


def keeps_graph() -> bool:
    """Whether the running backward retains its graph, so that it may run again. False outside a backward,
    where torch's own query returns true."""
    return torch._C._current_graph_task_id() != -1 and torch._C._autograd._get_current_graph_task_keep_graph()


class Half:
    """Operands that the computation of the inputs' gradients saved for the weight gradients, for the same
    dy."""

    def __init__(self, dy: Tensor, operands: Any):
        """operands: a record or tuple of tensors."""
        self.dy, self.operands = dy, operands
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [t._version for t in (self.dy, *arrays_in(self.operands))]

    def is_of(self, dy: Tensor) -> bool:
        """Whether dy is the same tensor and neither it nor the operands have been modified in place."""
        return dy.is_set_to(self.dy) and self._versions == self._current_versions()
