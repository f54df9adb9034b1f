"""fp8moe for Hugging Face transformers: ``experts_implementation="fp8moe"``.

Needs ``pip install 'fp8moe[transformers]'``.
"""

from fp8moe.adapters.transformers import activation_of, enable

__all__ = [
    "activation_of",
    "enable",
]
