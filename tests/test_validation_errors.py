"""Every public function rejects invalid arguments with an error that names the argument, the value and what
was wanted."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from calls import (
    CALLS,
    COLUMN,
    H2,
    IDS,
    OFFSETS,
    PLAN,
    PP,
    PROBS,
    QP,
    ROWS,
    TILES,
    W2D,
    W3D,
    E,
    H,
    P,
    Q,
    T,
    W,
    X,
)
from cases import BF16

import fp8moe
from fp8moe.runtime.record_trees import is_metadata


class OnCuda:
    """An array that reports CUDA memory, which it does not have."""

    def __init__(self, like):
        self.like = like

    @property
    def __cuda_array_interface__(self):
        typestr = np.dtype(np.float32).str if self.like.dtype == BF16 else self.like.dtype.str
        shape = self.like.shape
        return {"shape": shape, "typestr": typestr, "data": (8, False), "version": 3, "strides": None}


def spread_out(x):
    wide = np.ones((*x.shape, 2), x.dtype)
    return wide[..., 0]


VALID = {("a list", "tokens_per_expert"), ("a Quantized", "w13"), ("a Quantized", "w2")}
QUANTIZED = fp8moe.quantize(X, columnwise=True)
BOTH = fp8moe.quantize_weights(np.ones((E, 8, H), np.float32))
BREAKS = {
    "a list": lambda x: x.tolist(),
    "complex": lambda x: np.ones(x.shape, np.complex64),
    "strided": spread_out,
    "one dimension more": lambda x: x[None].copy(),
    "on no device": lambda x: torch.ones(tuple(x.shape), device="meta"),
    "on another device": OnCuda,
    "a tuple": lambda x: (x, x),
    "a Quantized": lambda x: QUANTIZED,
    "a plan": lambda x: PLAN,
}


def broken_calls():
    """Every array of every argument, including fields of records, made invalid in every way."""
    for function, call in CALLS.items():
        for name, value in call.items():
            if name == "saved" or is_metadata(value):
                continue
            fields = [None] if isinstance(value, np.ndarray) else list(value.__dataclass_fields__)
            for field in fields:
                array = value if field is None else getattr(value, field)
                if not isinstance(array, np.ndarray):
                    continue
                for kind in BREAKS:
                    if kind == "strided" and array.size == 1:
                        continue  # one element has no gaps
                    if (kind, name) in VALID or (kind, function) == ("a tuple", "quantize_weights"):
                        continue
                    yield pytest.param(function, name, field, kind, id=f"{function}-{name}-{field}-{kind}")


def test_the_table_has_every_public_function():
    verbs = {n for n in fp8moe.__all__ if n.islower() and n not in ("__version__", "fsdp", "trace", "memory")}
    assert verbs == set(CALLS)


@pytest.mark.parametrize("function", CALLS)
def test_valid_calls_work(function):
    getattr(fp8moe, function)(**CALLS[function])


@pytest.mark.parametrize(("function", "name", "field", "kind"), list(broken_calls()))
def test_invalid_arrays_are_named(function, name, field, kind):
    call = dict(CALLS[function])
    value = call[name]
    broken = BREAKS[kind](value if field is None else getattr(value, field))
    wanted_name = name if field is None else rf"{name}(\.{field})?"
    if kind == "on another device" and field is None:
        wanted_name = "CUDA|" + wanted_name
    call[name] = broken if field is None else replace(value, **{field: broken})
    refusals = (TypeError, ValueError, fp8moe.BackendUnavailable)
    with pytest.raises(refusals, match=rf"({wanted_name})") as caught:
        getattr(fp8moe, function)(**call)
    assert any(word in str(caught.value) for word in ("wanted", "install", "view it as"))


MISFITS = [
    ("plan_topk", {"align_size": 0}, ValueError, "align_size: got 0; wanted an integer from 1"),
    ("plan_topk", {"align_size": -16}, ValueError, "align_size: got -16"),
    ("plan_topk", {"align_size": 1.5}, TypeError, "align_size: got float; wanted an integer"),
    ("plan_topk", {"num_experts": -1}, ValueError, "num_experts: got -1"),
    ("plan_topk", {"num_out_tokens": -5}, ValueError, "num_out_tokens: got -5"),
    ("plan_topk", {"num_out_tokens": "all"}, ValueError, "num_out_tokens: got .all.; wanted .*exact"),
    ("pad", {"num_out_tokens": "all"}, ValueError, "num_out_tokens: got .all.; wanted .*exact"),
    ("plan_topk", {"num_out_tokens": IDS}, TypeError, "num_out_tokens: got ndarray"),
    ("plan_topk", {"topk_ids": np.ma.masked_array(IDS)}, TypeError, "topk_ids: got a MaskedArray.*filled"),
    ("plan_topk", {"topk_ids": IDS.view(np.matrix)}, TypeError, "topk_ids: got a matrix.*numpy.asarray"),
    (
        "plan_topk",
        {"topk_ids": IDS.astype(np.float32)},
        TypeError,
        "topk_ids: got dtype float32; wanted int32",
    ),
    ("plan_routing_map", {"routing_map": X}, TypeError, "routing_map: got dtype float32; wanted bool"),
    ("plan_routing_map", {"topk": -1}, ValueError, "topk: got -1"),
    ("plan_row_map", {"row_id_map": IDS}, ValueError, r"row_id_map: got shape \[6, 2\]; wanted \[T, 2E\+1\]"),
    ("plan_row_map", {"row_id_map": X}, TypeError, "row_id_map: got dtype float32; wanted int32"),
    ("plan_row_map", {"pad_offsets": IDS[0]}, ValueError, r"pad_offsets: got shape \[2\]; wanted \[3\]"),
    ("plan_row_map", {"num_out_tokens": -1}, ValueError, "num_out_tokens: got -1"),
    ("plan_row_map", {"num_out_tokens": None}, TypeError, "num_out_tokens: got NoneType; wanted an integer"),
    (
        "plan_index_map",
        {"topk": 5},
        ValueError,
        r"row_id_map: got shape \[12\].* multiple of topk=5",
    ),
    ("plan_index_map", {"topk": 0}, ValueError, "topk: got 0; wanted an integer from 1"),
    ("plan_index_map", {"row_id_map": IDS}, ValueError, r"row_id_map: got shape \[6, 2\]; wanted \[k \* T\]"),
    ("permute", {"zero_unweighted": 1}, TypeError, "zero_unweighted: got int; wanted True or False"),
    (
        "permute",
        {"zero_unweighted": True, "probs": None},
        ValueError,
        "zero_unweighted: got True without probs; wanted probs, or False",
    ),
    ("permute", {"x": X[:5].copy()}, ValueError, r"x: got shape \[5, 128\]; wanted \[6, H\]"),
    ("permute", {"probs": PROBS[:, :1].copy()}, ValueError, r"probs: got shape \[6, 1\]; wanted \[6, 2\]"),
    ("permute", {"probs": IDS}, TypeError, "probs: got dtype int32; wanted bfloat16"),
    ("permute", {"plan": 3}, TypeError, "plan: got"),
    ("permute", {"plan": replace(PLAN, data=None)}, TypeError, r"plan.data: got None"),
    ("permute", {"x": np.ma.masked_array(X)}, TypeError, "x: got a MaskedArray"),
    ("permute", {"fill_padding": "no"}, TypeError, "fill_padding: got str; wanted True or False"),
    ("permute", {"x": fp8moe.to_layout(Q, "gemm_ready")}, TypeError, "x.layout: got 'gemm_ready'.*to_layout"),
    ("permute", {"x": COLUMN}, TypeError, r"x.block: got \(128, 1\)"),
    ("unpermute", {"x": ROWS[:9].copy()}, ValueError, r"x: got shape \[9, 128\]; wanted \[64, H\]"),
    ("unpermute", {"x": ROWS.astype(np.int32)}, TypeError, "x: got dtype int32"),
    ("unpermute", {"merging_probs": np.ones((T, E), np.float32)}, ValueError, "merging_probs: got shape"),
    ("permute_backward", {"grad_probs": PP[:3].copy()}, ValueError, "grad_probs: got shape"),
    ("unpermute_backward", {"x": None}, ValueError, "x: got None with merging_probs; wanted both"),
    ("unpermute_backward", {"merging_probs": None}, ValueError, "merging_probs: got None with x"),
    ("unpermute_backward", {"grad": Q}, TypeError, "grad: got a QuantTensor with merging_probs.*dequantize"),
    (
        "sort_chunks",
        {"sorted_indices": np.array([0, 0], np.int32)},
        ValueError,
        r"sorted_indices: got \[0 0\]; wanted a permutation of 0 to 1",
    ),
    (
        "sort_chunks",
        {"split_sizes": np.array([2, 9], np.int32)},
        ValueError,
        "split_sizes: got sizes that sum",
    ),
    ("sort_chunks", {"split_sizes": np.array([-2, 4], np.int32)}, ValueError, "the smallest -2"),
    ("sort_chunks", {"chunks_per_group": 3}, ValueError, "chunks_per_group: got 3 for 2 chunks"),
    ("sort_chunks", {"align_size": -1}, ValueError, "align_size: got -1"),
    ("pad", {"align_size": 0}, ValueError, "align_size: got 0"),
    ("pad", {"tokens_per_expert": [3, -1]}, ValueError, "tokens_per_expert: got -1"),
    ("quantize", {"x": X.astype(np.float64)}, TypeError, "x: got dtype float64; wanted bfloat16"),
    ("quantize", {"fmt": "e3m4"}, ValueError, "fmt: got 'e3m4'; wanted one of 'e4m3', 'e5m2'"),
    ("quantize", {"block": (1, 64)}, ValueError, r"block: got \(1, 64\); wanted one of"),
    ("quantize", {"layout": "packed"}, ValueError, "layout: got 'packed'"),
    ("quantize", {"layout": "gemm_ready", "block": (1, 32)}, ValueError, "layout: got 'gemm_ready'"),
    ("quantize", {"columnwise": True, "block": (128, 1)}, ValueError, "columnwise: got True"),
    ("quantize", {"eps": -1.0}, ValueError, "eps: got -1.0"),
    ("quantize", {"eps": float("nan")}, ValueError, "eps: got nan"),
    ("quantize", {"eps": 10**400}, ValueError, "eps: got 10000"),
    ("quantize", {"eps": 1e39}, ValueError, r"eps: got 1e\+39"),
    ("quantize", {"block": (1.0, 128.0)}, TypeError, r"block: got \(1.0, 128.0\); wanted one of \(1, 128"),
    ("quantize", {"block": np.array([1, 128])}, ValueError, "block: got array"),
    ("quantize", {"block": (True, 128)}, TypeError, r"block: got \(True, 128\); wanted one of \(1, 128"),
    ("quantize", {"x": X.astype(np.float64)}, TypeError, "x: got dtype float64; .*; pass x as float32$"),
    ("dequantize", {"q": replace(Q, fmt=np.zeros(2))}, TypeError, "q.fmt: got array.*; wanted e4m3"),
    ("quantize", {"fmt": np.array("e4m3")}, ValueError, "fmt: got array.*; wanted one of 'e4m3'"),
    ("quantize", {"layout": np.array(["compact"] * 2)}, ValueError, "layout: got array.*; wanted one of"),
    ("dequantize", {"q": replace(Q, fmt=np.array("e4m3"))}, TypeError, "q.fmt: got array.*; wanted e4m3"),
    (
        "permute",
        {"x": replace(Q, block=np.array([1, 128]))},
        TypeError,
        r"x.block: got array.*; wanted \(1, 12",
    ),
    ("permute", {"x": replace(Q, block=[1, 128])}, TypeError, r"x.block: got \[1, 128\]; wanted \(1, 128"),
    ("permute", {"x": replace(Q, block=(True, 128))}, TypeError, r"x.block: got \(True, 128\); wanted"),
    ("permute", {"x": replace(Q, layout=np.zeros(2))}, TypeError, "x.layout: got array.*; wanted compact"),
    (
        "moe_forward",
        {"topk_ids": IDS[:, 0].copy()},
        ValueError,
        r"\[6\]; wanted \[6, k\]; .*reshape\(-1, 1\)$",
    ),
    ("quantize", {"pow2": 2}, TypeError, "pow2: got int; wanted True or False"),
    ("dequantize", {"q": X}, TypeError, "q: got an array of float32; wanted a QuantTensor"),
    ("dequantize", {"q": replace(Q, fmt="e2m1")}, TypeError, "q.fmt: got 'e2m1'"),
    ("dequantize", {"q": replace(Q, scales=Q.scales[:3].copy())}, ValueError, "q.scales: got shape"),
    ("dequantize", {"dtype": "int8"}, ValueError, "dtype: got 'int8'"),
    ("scaling_aware_transpose", {"target": "row"}, ValueError, "target: got 'row'"),
    ("scaling_aware_transpose", {"target": "block"}, ValueError, "align_size: got 16 .*multiple of 128"),
    ("permute_transpose", {"target": "block"}, ValueError, "align_size: got"),
    ("scaling_aware_transpose", {"q": W}, TypeError, r"q.block: got \(128, 128\)"),
    (
        "scaling_aware_transpose",
        {"q": replace(QP, scales=np.full((P, 1), 0.3, np.float32))},
        ValueError,
        r"q.scales: got 0\.3\d* at row 0.*wanted powers of two",
    ),
    (
        "permute_transpose",
        {"q": replace(Q, scales=np.full((T, 1), 0.3, np.float32))},
        ValueError,
        "wanted powers of two",
    ),
    ("permute_transpose", {"q": QP}, ValueError, r"q.data: got shape \[64, 128\]; wanted \[6, K\]"),
    ("swiglu", {"h": H2[:, :3].copy()}, ValueError, "h: got 3 columns"),
    (
        "swiglu",
        {"activation": {"clamp": 1.0}},
        TypeError,
        "activation: got dict; wanted an fp8moe.Activation",
    ),
    ("swiglu", {"probs": PP[:2].copy()}, ValueError, "probs: got shape"),
    ("swiglu_backward", {"grad": X}, ValueError, "grad: got shape"),
    ("swiglu_backward", {"grad": ROWS.astype(BF16)}, TypeError, "grad: got dtype bfloat16; wanted float32"),
    (
        "swiglu_quantize_backward",
        {"grad": ROWS.astype(np.float16)},
        TypeError,
        "grad: got dtype float16; wanted float32; pass grad in the dtype of h",
    ),
    ("swiglu_quantize", {"block": (128, 128)}, ValueError, "block: got"),
    ("grouped_gemm", {"w": np.ones((E, 8, H), np.float32)}, TypeError, "w: got an array of float32"),
    ("grouped_gemm", {"x": QUANTIZED}, TypeError, "x: got a Quantized; .*; pass x.rowwise$"),
    ("grouped_gemm", {"w": BOTH}, TypeError, "w: got a Quantized; .*; pass w.rowwise or w.columnwise$"),
    (
        "grouped_gemm",
        {"x": ROWS, "w": BOTH},
        TypeError,
        r"w: got a Quantized; .*; pass x=fp8moe.quantize\(x\)",
    ),
    ("grouped_gemm_wgrad", {"dy": QUANTIZED}, TypeError, "dy: got a Quantized; .*; pass dy.columnwise$"),
    ("grouped_gemm_wgrad", {"x": QUANTIZED}, TypeError, "x: got a Quantized; .*; pass x.columnwise$"),
    ("unpermute", {"x": fp8moe.permute(X, PLAN)}, TypeError, r"x: got .*Permuted; .*; pass x\.data$"),
    ("quantize", {"x": X[None]}, ValueError, r"x: got shape \[1, 6, 128\]; .*; pass x.reshape\(-1, 128\)$"),
    ("moe_forward", {"topk_ids": IDS[None]}, ValueError, r"topk_ids: .*; pass topk_ids.reshape\(-1, 2\)$"),
    ("moe_forward", {"topk_ids": IDS[None, :3]}, ValueError, r"topk_ids: got shape .*; wanted \[6, k\]$"),
    ("moe_forward", {"x": X}, TypeError, "x: got dtype float32; wanted bfloat16; pass x in bfloat16"),
    (
        "moe_forward",
        {"w13": replace(BOTH, rowwise=None)},
        TypeError,
        "w13.rowwise: got None; .*transpose_codes",
    ),
    ("moe_forward", {"w2": replace(BOTH, columnwise=BOTH)}, TypeError, "w2.columnwise: got a Quantized"),
    (
        "moe_forward",
        {"w13": replace(BOTH, columnwise=replace(BOTH.columnwise, data=None))},
        TypeError,
        "w13.columnwise.data: got .*NoneType",
    ),
    (
        "grouped_gemm",
        {"x": ROWS, "w": np.ones((E, H, 8), np.float32)},
        ValueError,
        r"w: got shape \[3, 128, 8\]; wanted .*; pass transpose_w=True",
    ),
    ("grouped_gemm", {"w": Q}, TypeError, r"w.block: got \(1, 128\); .*; pass fp8moe.quantize_weights"),
    ("permute", {"x": QUANTIZED}, TypeError, "x: got a Quantized; .*; pass its rowwise or columnwise$"),
    ("grouped_gemm", {"expert_offsets": OFFSETS[:2].copy()}, ValueError, "expert_offsets: got shape"),
    ("grouped_gemm", {"transpose_w": True}, ValueError, "transpose_w: got True"),
    ("grouped_gemm", {"backend": "wgmma"}, ValueError, "backend: got 'wgmma' for arrays on the CPU"),
    ("grouped_gemm_wgrad", {"backend": "cublas"}, ValueError, "backend: got 'cublas' for arrays on the CPU"),
    (
        "grouped_gemm_wgrad",
        {"dy": QP},
        TypeError,
        r"dy.block: got \(1, 128\); .*; pass fp8moe.scaling_aware_transpose\(dy",
    ),
    ("grouped_gemm_wgrad", {"x": TILES}, TypeError, r"x.block: got \(128, 128\)"),
    ("grouped_gemm_wgrad", {"dy": W2D, "x": W2D}, ValueError, "dy.transposed: got False"),
    ("grouped_gemm_wgrad", {"dy": TILES, "x": W2D}, ValueError, "x.transposed: got False"),
    ("grouped_gemm_wgrad", {"dy": W3D, "x": W3D}, ValueError, r"dy: got shape .*; wanted \[P, N\]"),
    (
        "dequantize",
        {"q": replace(Q, transposed=True)},
        TypeError,
        r"q.transposed: got True with block \(1, 128\)",
    ),
    ("dequantize", {"q": replace(W, transposed=1)}, TypeError, "q.transposed: got 1"),
    ("grouped_gemm_wgrad", {"out": np.ones((E, 3, 3), np.float32)}, ValueError, "out: got shape"),
    ("grouped_gemm_wgrad", {"dtype": "int8"}, ValueError, "dtype: got 'int8'"),
]


@pytest.mark.parametrize(("function", "change", "error", "words"), MISFITS)
def test_mismatched_arguments_raise(function, change, error, words):
    with pytest.raises(error, match=words):
        getattr(fp8moe, function)(**{**CALLS[function], **change})


def test_plan_of_another_routing_raises():
    other = fp8moe.plan_topk(IDS[:4].copy(), E)
    for function in ("permute", "unpermute", "permute_backward", "unpermute_backward", "permute_transpose"):
        with pytest.raises(ValueError, match="got shape"):
            getattr(fp8moe, function)(**{**CALLS[function], "plan": other})
    torn = replace(PLAN, data=PLAN.data[:-1].copy())
    with pytest.raises(ValueError, match=rf"plan\.data: got shape \[{PLAN.size - 1}\]; wanted"):
        fp8moe.permute(X, torn)


def test_missing_cuda_names_the_extra():
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed")
    with pytest.raises(fp8moe.BackendUnavailable, match=r"pip install 'fp8moe\[cuda13\]'"):
        fp8moe.plan_topk(OnCuda(IDS), E)
