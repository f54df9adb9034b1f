"""fp8moe for torchtitan: a converter of a model's routed experts.

Needs ``pip install 'fp8moe[torchtitan]'``.
"""

from fp8moe.adapters.torchtitan import FP8MoEConverter, FP8RoutedExperts

__all__ = [
    "FP8MoEConverter",
    "FP8RoutedExperts",
]
