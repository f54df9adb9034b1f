"""The operations that are checked, and how."""

from __future__ import annotations

from collections.abc import Callable

from fp8moe.selftest.experts import (
    activated_codes,
    activations,
    check_grouped_gemm,
    check_layer,
    compare_activated_codes,
    compare_activations,
    compare_routes,
    routes,
)
from fp8moe.selftest.fp8 import (
    check_formats,
    compare_forms,
    compare_layouts,
    compare_quantized,
    compare_transposed,
    forms,
    layouts,
    quantized,
    transposed,
)
from fp8moe.selftest.inputs import BF16, Check, Inputs
from fp8moe.selftest.ranks import compare_messages, messages
from fp8moe.selftest.rows import chunks, compare_chunks, compare_plans, compare_sums, plans, sums

#: operations that both devices run
OPERATIONS = {
    "plan, permute": Check("x ids probs mask mask_probs index", plans, compare_plans, 0.0),
    # results of bfloat16, of sums with and without fused multiply-add
    "unpermute, gradients": Check("x dy rows rows_probs ids probs", sums, compare_sums, BF16),
    "chunks, padding": Check("x row_probs sizes order", chunks, compare_chunks, 0.0),
    "quantize": Check("spread w13 spoilt", quantized, compare_quantized, 0.0),
    "transpose": Check("spread ids", transposed, compare_transposed, 0.0),
    "layouts of scales": Check("spread", layouts, compare_layouts, 0.0),
    "forms of checkpoints": Check("codes scale_inv blocks exponents", forms, compare_forms, 0.0),
    "activations": Check("h32 x32 dy32 row_probs", activations, compare_activations, 1e-5),
    # float32 rounding changes a code by at most one, 2^-3 of its value
    "activations to FP8": Check("h dy row_probs", activated_codes, compare_activated_codes, 2.0**-8, 2.0**-3),
    # the ids are equal, because they are selected by logits
    "router": Check("logits bias grad_aux grad_z", routes, compare_routes, 1e-5),
    "messages of ranks": Check("wide ids probs of_second", messages, compare_messages, 0.0),
}
CHECKS: dict[str, Callable[[Inputs], None]] = {
    "number formats": check_formats,
    **OPERATIONS,
    "grouped GEMM": check_grouped_gemm,
    "layer": check_layer,
}
