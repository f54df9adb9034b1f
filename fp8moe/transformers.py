"""fp8moe for Hugging Face transformers: ``experts_implementation="fp8moe"``.

Needs ``pip install 'fp8moe[transformers]'``.
"""

from fp8moe.adapters.transformers import FP8WeightsCallback, activation_of, enable
from fp8moe.adapters.transformers_export import export
from fp8moe.adapters.transformers_mxfp4 import load_mxfp4

__all__ = [
    "FP8WeightsCallback",
    "activation_of",
    "enable",
    "export",
    "load_mxfp4",
]
