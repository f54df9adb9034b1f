"""fp8moe for CuPy: expert parallelism over its NCCL bindings, without another framework.

Needs ``pip install 'fp8moe[cuda13]'`` and NCCL. The operations of `fp8moe` take CuPy arrays as they are.
"""

from fp8moe.adapters.cupy_nccl import Communicator

__all__ = [
    "Communicator",
]
