"""Which gradients a running backward goes on with, and what one half of a backward leaves to the other.

`torch.autograd.grad` of some inputs, as zero-bubble pipeline schedules ask for twice, runs a node's whole
backward each time; ``ctx.needs_input_grad`` says the same in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8moe.record_trees import arrays_in


def asked_for(ctx: Any) -> list[bool]:
    """Of a node's tensors, in the order in which its function took them: whether their gradients are used."""
    return [node is not None and _runs(node) for node, _ in ctx.next_functions]


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf that torch.autograd.grad was given it does not tell
        return True


def is_asked_for(parameter: Tensor) -> bool:
    """Whether the backward that runs now goes on to a leaf."""
    return _runs(torch.autograd.graph.get_gradient_edge(parameter).node)


def keeps_graph() -> bool:
    """Whether autograd's engine runs a backward, and may run it again; outside of one it says it keeps."""
    return torch._C._current_graph_task_id() != -1 and torch._C._autograd._get_current_graph_task_keep_graph()


class Half:
    """What the inputs' gradients left for those of the weights, of the same dy."""

    def __init__(self, dy: Tensor, operands: Any):
        """operands: a record or tuple of tensors."""
        self.dy, self.operands = dy, operands
        self._versions = self._seen()

    def _seen(self) -> list[int]:
        return [t._version for t in (self.dy, *arrays_in(self.operands))]

    def is_of(self, dy: Tensor) -> bool:
        """Whether dy is that one, and nothing has been changed in place since."""
        return dy.is_set_to(self.dy) and self._versions == self._seen()
