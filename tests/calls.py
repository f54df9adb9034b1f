"""A valid call of every public function, for tests that change one of its arguments."""

import numpy as np
from cases import BF16

import fp8moe

T, H, E, K, P = 6, 128, 3, 2, 64
IDS = np.random.default_rng(0).integers(0, E, (T, K)).astype(np.int32)
PLAN = fp8moe.plan_topk(IDS, E, align_size=16, num_out_tokens=P)
X = np.ones((T, H), np.float32)
ROWS = np.ones((P, H), np.float32)
PROBS = np.ones((T, K), np.float32)
PADDING = np.arange(T) == 1
Q = fp8moe.quantize(X)
OFFSETS = PLAN.expert_offsets
W = fp8moe.quantize(np.ones((E, 8, H), np.float32), block=(128, 128))
QP = fp8moe.quantize(ROWS)
COLUMN = fp8moe.scaling_aware_transpose(QP, OFFSETS)
W2D = fp8moe.quantize(ROWS, block=(128, 128))
W3D = fp8moe.quantize(np.ones((E, 8, H), np.float32), block=(128, 128), columnwise=True).columnwise
TILES = fp8moe.scaling_aware_transpose(QP, target="block")
SIZES, ORDER = np.array([2, 4], np.int32), np.array([1, 0], np.int32)
H2 = np.ones((P, 2 * H), np.float32)
PP = np.ones(P, np.float32)
LAYER = {
    "x": X.astype(BF16),
    "w13": np.ones((E, 256, H), BF16),
    "w2": np.ones((E, H, 128), BF16),
    "topk_ids": IDS,
    "topk_probs": PROBS,
    "recipe": "fp8_flow",
}
PERMUTED_LAYER = {
    "x": ROWS.astype(BF16),
    "w13": LAYER["w13"],
    "w2": LAYER["w2"],
    "tokens_per_expert": np.array([5, 0, 40], np.int32),
    "probs": PP,
    "recipe": "fp8_flow",
}
SAVED = fp8moe.moe_forward(**LAYER)[1]

#: a valid call of every public function
CALLS = {
    "plan_topk": {"topk_ids": IDS, "num_experts": E, "align_size": 16},
    "plan_routing_map": {"routing_map": np.ones((T, E), bool), "align_size": 16},
    "plan_row_map": {
        "row_id_map": fp8moe.plan_routing_map(np.ones((T, E), bool)).row_id_map,
        "pad_offsets": np.zeros(E, np.int32),
        "num_out_tokens": P,
    },
    "plan_index_map": {"row_id_map": np.arange(T * K, dtype=np.int32), "topk": K, "num_out_tokens": P},
    "permute": {"x": X, "plan": PLAN, "probs": PROBS},
    "permute_and_pad": {"x": X, "routing_map": np.ones((T, E), bool), "align_size": 16},
    "unpermute": {"x": ROWS, "plan": PLAN, "merging_probs": PROBS},
    "permute_backward": {"grad": ROWS, "plan": PLAN, "grad_probs": PP},
    "unpermute_backward": {"grad": X, "plan": PLAN, "x": ROWS, "merging_probs": PROBS},
    "sort_chunks": {"x": X, "split_sizes": SIZES, "sorted_indices": ORDER, "align_size": 4},
    "sort_chunks_backward": {"grad": X, "split_sizes": SIZES, "sorted_indices": ORDER},
    "pad": {"x": X, "tokens_per_expert": SIZES, "align_size": 16},
    "unpad": {"x": ROWS, "tokens_per_expert": SIZES, "align_size": 16},
    "quantize": {"x": X},
    "dequantize": {"q": Q},
    "to_layout": {"q": Q, "layout": "gemm_ready"},
    "scaling_aware_transpose": {"q": QP, "expert_offsets": OFFSETS, "align_size": 16},
    "transpose_codes": {"q": W},
    "permute_gemm": {"x": Q, "w": W, "plan": PLAN, "probs": PROBS},
    "permute_transpose": {"q": Q, "plan": PLAN},
    "route": {
        "logits": np.ascontiguousarray(X[:, :8]),
        "config": fp8moe.RouterConfig(K),
        "expert_bias": X[0, :8],
        "padding_mask": PADDING,
    },
    "route_backward": {
        "grad_probs": PROBS,
        "logits": np.ascontiguousarray(X[:, :8]),
        "topk_ids": IDS,
        "config": fp8moe.RouterConfig(K),
        "tokens_per_expert": np.full((1, 8), T * K // 8, np.int32),
        "grad_aux_loss": PP[:1],
        "grad_z_loss": PP[:1],
        "padding_mask": PADDING,
    },
    "swiglu": {"h": H2, "probs": PP},
    "swiglu_backward": {"grad": ROWS, "h": H2, "probs": PP},
    "swiglu_quantize": {"h": H2, "probs": PP, "expert_offsets": OFFSETS, "align_size": 16},
    "swiglu_quantize_backward": {"grad": ROWS, "h": H2, "probs": PP, "align_size": 16},
    "grouped_gemm": {"x": QP, "w": W, "expert_offsets": OFFSETS},
    "grouped_gemm_wgrad": {"dy": COLUMN, "x": COLUMN, "expert_offsets": OFFSETS},
    "quantize_weights": {"x": np.ones((E, 8, H), np.float32)},
    "from_block_fp8": {"codes": W.data, "scale_inv": W.scales},
    "from_mxfp4": {"blocks": np.zeros((E, 8, 1, 16), np.uint8), "scales": np.full((E, 8, 1), 127, np.uint8)},
    "to_block_fp8": {"q": W},
    "moe_forward": LAYER,
    "moe_forward_permuted": PERMUTED_LAYER,
    "moe_backward": {"saved": SAVED, "dy": X.astype(BF16)},
    "moe_backward_input": {"saved": SAVED, "dy": X.astype(BF16)},
    "moe_backward_weight": {"operands": fp8moe.moe_backward_input(SAVED, X.astype(BF16))[1]},
}
