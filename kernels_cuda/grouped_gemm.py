"""Backend selection of grouped products, and the launcher of the plain kernel (grouped_gemm.cu), with the
names and signatures of `fp8moe.reference.grouped_gemm`."""

from __future__ import annotations

import importlib
import logging
import warnings
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from fp8moe.kernels_cuda.gemm import grouped_gemm_mma, grouped_gemm_wgmma16, grouped_gemm_wgmma_fp8
from fp8moe.kernels_cuda.gemm.product import (
    Product,
    product_of_grouped_gemm,
    product_of_wgrad,
    products_of_layer,
)
from fp8moe.kernels_cuda.permute import gather, gather_probs, sources
from fp8moe.kernels_cuda.runtime import driver
from fp8moe.kernels_cuda.runtime.encodings import FORMATS, KINDS
from fp8moe.kernels_cuda.runtime.launch import current_architecture, launch, multiprocessors, scratch, threads
from fp8moe.records import PermutationPlan, Permuted, QuantTensor

_log = logging.getLogger(__name__)
#: floating-point operations above which a slower backend is not chosen silently
MANY = 10**9
#: (operation, operands) pairs that `python -m fp8moe info` lists
USUAL_OPERANDS = (("e4m3", "e4m3"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "float32"))


class Choice(NamedTuple):
    backend: str
    reasons: tuple[str, ...] = ()  # why each faster backend was not chosen


def launchers(product: Product) -> dict[str, ModuleType]:
    """Tensor core backends for these operands, fastest first."""
    if product.quantized:
        return {"wgmma": grouped_gemm_wgmma_fp8, "mma": grouped_gemm_mma}
    return {"wgmma": grouped_gemm_wgmma16, "mma": grouped_gemm_mma}


def backends(product: Product, architecture: str) -> list[str]:
    """Backends that support a product of float32, bfloat16, float16 or FP8 on this architecture, fastest
    first; without "cublas", which synchronises."""
    tensor_cores = launchers(product).items()
    return [
        *(name for name, module in tensor_cores if not module.unsupported_reasons(product, architecture)),
        "plain",
    ]


def choose(product: Product, architecture: str, backend: str | None) -> Choice:
    """The backend of a product: the requested one, or the fastest that supports it.

    Raises TypeError for dtypes that "cublas" does not support, ValueError if another requested backend does
    not support the product, or if only the plain kernel, hundreds of times slower, supports a large product
    and it was not requested.
    """
    if backend == "cublas":
        _check_cublas(product)
    if backend in ("plain", "cublas"):
        return Choice(backend)
    known = launchers(product)
    if backend is not None:
        if not product.flops:  # a rank without rows: no multiplication; weight gradients are zeros
            return Choice("plain")
        if backend in known:
            why = known[backend].unsupported_reasons(product, architecture)
        else:
            why = [f"the operands are {product.operands[0]}"]
        if why:
            raise ValueError(
                f"backend: got {backend!r} for a product it does not take: {'; '.join(why)}; wanted None, "
                "for the fastest backend that does, or 'cublas'"
            )
        return Choice(backend)
    reasons: list[str] = []
    for name, module in known.items():
        why = module.unsupported_reasons(product, architecture)
        if not why:
            return Choice(name, tuple(reasons))
        reasons += [f"{name}: {reason}" for reason in why]
    if product.flops > MANY:
        raise ValueError(
            f"backend: got None for a product of {product.flops / 1e9:.3g} GFLOP that no kernel for tensor "
            f"cores takes ({'; '.join(reasons)}); wanted bfloat16 operands; or backend='cublas', which takes "
            "float32, and synchronises; or 'plain', which says that one hundreds of times slower is meant"
        )
    return Choice("plain", tuple(reasons))


def _check_cublas(product: Product) -> None:
    """Raises TypeError for dtypes that `cublasGemmEx` does not support with float32 sums."""
    if "float64" in (*product.operands, product.out):
        raise TypeError("backend: got 'cublas' with float64; wanted bfloat16, float16 or float32, or 'plain'")
    operands = "bfloat16" if product.quantized else product.operands[0]
    if product.out not in (operands, "float32"):
        raise TypeError(
            f"backend: got 'cublas' for a product of {operands} into {product.out}; wanted "
            f"{' or '.join(dict.fromkeys((operands, 'float32')))} there, or another backend"
        )


def check_layer(backend: str | None, num_sms: int | None, device: int, **layer: Any) -> None:
    """Raises like `choose` if a backend does not support every one of `products_of_layer` on a device, and
    like `check_limit` if one of them does not support the SM limit."""
    most = 0 if num_sms is None else driver.multiprocessors(device)
    _check_layer(backend, num_sms, driver.architecture(device), most, **layer)


@cache
def _check_layer(
    backend: str | None, num_sms: int | None, architecture: str, multiprocessors: int, **layer: Any
) -> None:
    for product in products_of_layer(**layer):
        chosen = choose(product, architecture, backend)
        check_limit(num_sms, chosen, multiprocessors)


def check_limit(num_sms: int | None, chosen: Choice, multiprocessors: int) -> None:
    """Raises ValueError if a product's backend cannot limit its SMs to ``num_sms``."""
    if num_sms is None:
        return
    if chosen.backend != "wgmma":
        raise ValueError(
            f"num_sms: got {num_sms} for a product by {chosen.backend!r}, which cannot limit itself"
            f"{''.join(f'; {reason}' for reason in chosen.reasons)}; wanted None, or a product that "
            "backend='wgmma' takes"
        )
    if num_sms > multiprocessors:
        raise ValueError(
            f"num_sms: got {num_sms}; wanted an even number from 2 to {multiprocessors}, the device's "
            "multiprocessors, or None for all"
        )


def describe(architecture: str) -> list[str]:
    """One line per usual product: its backend on this architecture, and why no faster one is used."""
    lines = []
    for operands in USUAL_OPERANDS:
        for verb in ("grouped_gemm", "grouped_gemm_wgrad"):
            product = Product(verb, operands, "float32", experts=8, rows=256, width=256, depth=256)
            if verb == "grouped_gemm":
                product = product._replace(out="bfloat16" if product.quantized else operands[0])
            backend, reasons = choose(product, architecture, None)
            why = f"  ({'; '.join(reasons)})" if reasons else ""
            lines.append(f"{verb:18} {'FP8' if product.quantized else operands[0]:8} {backend:6}{why}")
    return lines


@cache
def _log_choice(verb: str, operands: tuple[str, str], architecture: str, chosen: Choice) -> None:
    """Once for each choice, of the calls that are recorded."""
    why = f" ({'; '.join(chosen.reasons)})" if chosen.reasons else ""
    _log.info("%s of %s and %s on %s: backend %s%s", verb, *operands, architecture, chosen.backend, why)


def _chosen(product: Product, backend: str | None, num_sms: int | None) -> str:
    architecture = current_architecture()
    chosen = choose(product, architecture, backend)
    _log_choice(product.verb, product.operands, architecture, chosen)
    if chosen.reasons and product.flops > MANY and architecture == "sm_90a":
        warnings.warn(
            f"{product.verb}: {chosen.backend} multiplies, not a faster one ({'; '.join(chosen.reasons)}); "
            f"backend={chosen.backend!r} says that this is meant",
            RuntimeWarning,
            stacklevel=2,
        )
    if num_sms is not None and product.flops:  # a rank without rows multiplies nothing
        check_limit(num_sms, chosen, multiprocessors())
    return chosen.backend


def grouped_gemm(
    x: Any,
    w: Any,
    expert_offsets: Any,
    tokens_per_expert: Any,
    *,
    bias: Any = None,
    transpose_w: bool,
    backend: str | None,
    num_sms: int | None,
    out: Any,
) -> None:
    product = product_of_grouped_gemm(x, w, expert_offsets, bias, transpose_w, out)
    chosen = _chosen(product, backend, num_sms)
    if chosen == "plain":
        _plain(x, w, expert_offsets, bias=bias, transpose_w=transpose_w, out=out)
    else:
        module = _cublas() if chosen == "cublas" else launchers(product)[chosen]
        options = _options(chosen, product, num_sms, tokens_per_expert)
        module.grouped_gemm(x, w, expert_offsets, bias=bias, transpose_w=transpose_w, out=out, **options)


def add_grouped_gemm(
    x: Any, w: Any, expert_offsets: Any, *, transpose_w: bool, num_sms: int | None, out: Any
) -> None:
    product = product_of_grouped_gemm(x, w, expert_offsets, None, transpose_w, out)
    why = grouped_gemm_wgmma16.unsupported_reasons(product, current_architecture())
    if product.operands[0] != "bfloat16":
        why.append("the operands are not bfloat16")
    if why and product.flops:
        raise ValueError(
            f"out: got a sum that no kernel takes ({'; '.join(why)}); wanted one as described in "
            "add_grouped_gemm; use grouped_gemm and an addition"
        )
    if product.flops:
        options = {"transpose_w": transpose_w, "num_sms": num_sms, "out": out}
        grouped_gemm_wgmma16.add_grouped_gemm(x, w, expert_offsets, **options)


def permute_gemm(
    x: QuantTensor,
    w: QuantTensor,
    plan: PermutationPlan,
    probs: Any,
    *,
    bias: Any = None,
    backend: str | None,
    num_sms: int | None,
    out: Permuted,
) -> None:
    source, column = sources(plan, columns=probs is not None)
    if probs is not None:
        gather_probs(probs, source, column, True, out.probs)
    product = product_of_grouped_gemm(x, w, plan.expert_offsets, bias, False, out.data)
    options: dict[str, Any] = {"bias": bias, "transpose_w": False, "out": out.data}
    # without tokens there is nothing to gather, and no tensor map of x
    if _chosen(product, backend, num_sms) == "wgmma" and x.shape[0]:
        options |= {"tokens_per_expert": plan.tokens_per_expert, "num_sms": num_sms, "sources": source}
        grouped_gemm_wgmma_fp8.grouped_gemm(x, w, plan.expert_offsets, **options)
        return
    rows = plan.num_out_tokens
    codes, scales = (scratch((rows, a.shape[1]), a.dtype) for a in (x.data, x.scales))
    gather(x, source, True, permuted := replace(x, data=codes, scales=scales))
    options |= {"backend": backend, "num_sms": num_sms}
    grouped_gemm(permuted, w, plan.expert_offsets, plan.tokens_per_expert, **options)


def grouped_gemm_wgrad(
    dy: Any,
    x: Any,
    expert_offsets: Any,
    tokens_per_expert: Any,
    *,
    accumulate: bool,
    first: int = 0,
    backend: str | None,
    num_sms: int | None,
    out: Any,
) -> None:
    experts, pitch, depth = out.shape
    if pitch != dy.shape[1]:  # rows of out from `first` on, of each expert
        out = out.part(first * depth, (experts * pitch * depth - first * depth,))
    product = product_of_wgrad(dy, x, expert_offsets, out)
    chosen = _chosen(product, backend, num_sms)
    options = {"accumulate": accumulate, "pitch": pitch, "out": out}
    if chosen == "plain":
        _plain_wgrad(dy, x, expert_offsets, **options)
        return
    module = _cublas() if chosen == "cublas" else launchers(product)[chosen]
    options |= _options(chosen, product, num_sms, tokens_per_expert)
    module.grouped_gemm_wgrad(dy, x, expert_offsets, **options)


def _options(chosen: str, product: Product, num_sms: int | None, tokens_per_expert: Any) -> dict[str, Any]:
    """The arguments that only some backends take."""
    options: dict[str, Any] = {"num_sms": num_sms} if chosen == "wgmma" else {}
    if chosen == "wgmma" and product.quantized:
        options["tokens_per_expert"] = tokens_per_expert
    return options


def _cublas() -> ModuleType:
    return importlib.import_module("fp8moe.kernels_cuda.gemm.cublas")


def _plain(x: Any, w: Any, expert_offsets: Any, *, bias: Any, transpose_w: bool, out: Any) -> None:
    rows, width = out.shape
    quantized = isinstance(x, QuantTensor)
    strides = (0, 0)
    if quantized:
        ready = x.layout == "gemm_ready"
        strides = (1, x.scales.shape[1]) if ready else (x.scales.shape[1], 1)
    launch(
        "grouped_gemm",
        "grouped_gemm",
        (rows, threads(width, 128)),
        128,
        *((x.data, x.scales, *strides, FORMATS[x.fmt]) if quantized else (x, None, *strides, 0)),
        *((w.data, w.scales, FORMATS[w.fmt]) if quantized else (w, None, 0)),
        expert_offsets,
        expert_offsets.shape[0] - 1,
        rows,
        width,
        x.shape[1],
        quantized,
        0 if quantized else KINDS[x.dtype],
        transpose_w,
        KINDS[out.dtype],
        bias,
        out,
    )


def _plain_wgrad(dy: Any, x: Any, expert_offsets: Any, *, accumulate: bool, pitch: int, out: Any) -> None:
    experts, width, depth = expert_offsets.shape[0] - 1, dy.shape[1], x.shape[1]
    quantized = isinstance(dy, QuantTensor)
    rows, blocks = dy.shape[0], quantized and dy.transposed
    # number of column-wise scale blocks
    known = min(dy.scales.shape[0], x.scales.shape[0]) if quantized else 0
    launch(
        "grouped_gemm",
        "grouped_gemm_wgrad",
        (experts * width, threads(depth, 128)),
        128,
        *((dy.data, dy.scales, FORMATS[dy.fmt]) if quantized else (dy, None, 0)),
        *((x.data, x.scales, FORMATS[x.fmt]) if quantized else (x, None, 0)),
        known,
        expert_offsets,
        rows,
        width,
        depth,
        quantized,
        blocks,
        0 if quantized else KINDS[dy.dtype],
        pitch,
        accumulate,
        KINDS[out.dtype],
        out,
    )
