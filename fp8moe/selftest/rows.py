"""Checks of plans, permutation, sums of rows, chunks and padding, by loops."""

from __future__ import annotations

from typing import Any

import numpy as np

import fp8moe
from fp8moe.selftest.inputs import (
    ALIGN,
    BF16,
    EXPERTS,
    HIDDEN,
    PERMUTED_ROWS,
    TOKENS,
    TOPK,
    Inputs,
    equal,
    near,
)


def rows_of(ids: np.ndarray, align: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Destination rows of a plan, their tokens and slots, and the number of rows."""
    places, row = [], 0
    for expert in range(EXPERTS):
        for token, slot in np.argwhere(ids == expert):
            places.append((row, token, slot))
            row += 1
        row = -(-row // align) * align
    return *np.array(places).T, row  # type: ignore[return-value]


def plans(x: Any, ids: Any, probs: Any, mask: Any, mask_probs: Any, index: Any) -> tuple[Any, ...]:
    plan = fp8moe.plan_topk(ids, EXPERTS, align_size=ALIGN)
    by_mask = fp8moe.plan_routing_map(mask, align_size=ALIGN, num_out_tokens=PERMUTED_ROWS)
    again = fp8moe.plan_row_map(by_mask.row_id_map, by_mask.pad_offsets, num_out_tokens=PERMUTED_ROWS)
    by_index = fp8moe.plan_index_map(index, 2, num_out_tokens=2 * TOKENS)
    moved = [fp8moe.permute(x, p, w) for p, w in ((plan, probs), (by_mask, mask_probs), (again, mask_probs))]
    return *moved, fp8moe.permute(x, by_index).data


def compare_plans(i: Inputs, topk: Any, mask: Any, again: Any, index: Any) -> None:
    experts = np.where(i.mask, np.arange(EXPERTS), -1)
    for label, moved, ids, weights in (
        ("ids", topk, i.ids, i.probs),
        ("mask", mask, experts, i.mask_probs),
        ("row map", again, experts, i.mask_probs),
    ):
        rows, tokens, slots, last = rows_of(ids, ALIGN)
        wanted, wanted_probs = np.zeros_like(i.rows), np.zeros_like(i.rows_probs)
        wanted[rows], wanted_probs[rows] = i.x[tokens], weights[tokens, slots]
        equal(moved.data[:last].view(np.uint16), wanted[:last].view(np.uint16), f"rows by {label}")
        equal(moved.probs[:last], wanted_probs[:last], f"probabilities by {label}")
        counts = np.array([(ids == e).sum() for e in range(EXPERTS)])
        padded, plan = -(-counts // ALIGN) * ALIGN, moved.plan
        before = np.cumsum(padded - counts) - (padded - counts)
        equal(plan.tokens_per_expert, counts, f"tokens per expert by {label}")
        ends = np.cumsum(padded)
        if label == "row map":  # which does not say where padding ends
            padded, ends[-1] = counts, ends[-1] - padded[-1] + counts[-1]
        equal(plan.padded_tokens_per_expert, padded, f"padded tokens per expert by {label}")
        equal(plan.expert_offsets, [0, *ends], f"expert offsets by {label}")
        equal(plan.pad_offsets, before, f"pad offsets by {label}")
        equal(plan.overflow, [0], f"overflow by {label}")
        width = ids.shape[1]
        row_map = np.full((TOKENS, 2 * width + 1), -1)
        row_map[:, -1] = 0
        rows, tokens, slots, _ = rows_of(ids, 1)
        for row, token, slot in sorted(zip(rows, tokens, slots, strict=True), reverse=True):
            n = row_map[token, -1]
            row_map[token, [n, width + n, -1]] = row, ids[token, slot], n + 1
        equal(plan.row_id_map, row_map, f"row map by {label}")
    entries = np.argwhere(i.index >= 0)[:, 0]
    wanted = np.zeros_like(index)
    wanted[i.index[entries]] = i.x[entries % TOKENS]
    equal(index, wanted, "rows by index")


def sums(x: Any, dy: Any, rows: Any, rows_probs: Any, ids: Any, probs: Any) -> tuple[Any, ...]:
    plan = fp8moe.plan_topk(ids, EXPERTS, align_size=ALIGN)
    codes = fp8moe.quantize(rows)
    grads = fp8moe.unpermute_backward(dy, plan, x=rows, merging_probs=probs)
    return (
        fp8moe.unpermute(rows, plan, probs),
        fp8moe.unpermute(rows, plan),
        fp8moe.unpermute(codes, plan, probs),
        *fp8moe.permute_backward(rows, plan, rows_probs),
        grads[1],
        fp8moe.permute(x, plan).data,
        fp8moe.unpermute_backward(dy, plan)[0],
        grads[0],
    )


def compare_sums(i: Inputs, *got: Any) -> None:
    rows, tokens, slots, last = rows_of(i.ids, ALIGN)
    wide, dy = i.rows.astype(np.float64), i.dy.astype(np.float64)
    codes = fp8moe.dequantize(fp8moe.quantize(i.rows)).astype(np.float64)
    weights = i.probs[tokens, slots].astype(np.float64)[:, None]

    def summed(values: np.ndarray) -> np.ndarray:
        total = np.zeros((TOKENS, HIDDEN))
        np.add.at(total, tokens, values)
        return total

    wanted_grad = np.zeros_like(wide)
    wanted_grad[rows] = dy[tokens] * weights
    moved = np.zeros_like(wide)
    moved[rows] = dy[tokens]
    grad_probs, dots = np.zeros((TOKENS, TOPK)), np.zeros((TOKENS, TOPK))
    grad_probs[tokens, slots] = i.rows_probs[rows]
    dots[tokens, slots] = (dy[tokens] * wide[rows]).sum(axis=1)
    near(got[0], summed(wide[rows] * weights), BF16, "weighted sums")
    near(got[1], summed(wide[rows]), BF16, "sums")
    near(got[2], summed(codes[rows] * weights), BF16, "sums of codes")
    near(got[3], summed(wide[rows]), BF16, "gradient of permute")
    equal(got[4], grad_probs.astype(np.float32), "gradient of probabilities")
    near(got[5], dots, 1e-5, "gradient of merging probabilities")
    equal(got[7][:last], moved[:last], "gradient of unpermute")
    near(got[8][:last], wanted_grad[:last], BF16, "gradient of weighted unpermute")


def chunks(x: Any, row_probs: Any, sizes: Any, order: Any) -> tuple[Any, ...]:
    codes = fp8moe.quantize(x)
    moved = fp8moe.sort_chunks(codes, sizes, order, row_probs, align_size=ALIGN)
    plain = fp8moe.sort_chunks(x, sizes, order, row_probs)
    back = fp8moe.sort_chunks_backward(plain.data, sizes, order, plain.probs)
    padded = fp8moe.pad(x, sizes, ALIGN)
    return moved, plain, back, padded, fp8moe.unpad(padded, sizes, ALIGN, num_out_tokens=TOKENS)


def compare_chunks(i: Inputs, moved: Any, plain: Any, back: Any, padded: Any, unpadded: Any) -> None:
    starts = np.cumsum(i.sizes) - i.sizes
    parts = [np.arange(start, start + size) for start, size in zip(starts, i.sizes, strict=True)]
    order = np.concatenate([parts[j] for j in i.order])
    equal(plain.data, i.x[order], "chunks")
    equal(plain.probs, i.row_probs[order], "probabilities of chunks")
    equal(plain.group_offsets, [0, *np.cumsum(i.sizes[i.order])], "offsets of chunks")
    padded_sizes = -(-i.sizes[i.order] // ALIGN) * ALIGN
    equal(moved.group_offsets, [0, *np.cumsum(padded_sizes)], "offsets of padded chunks")
    equal(back[0], i.x, "gradient of chunks")
    equal(back[1], i.row_probs, "gradient of probabilities")
    codes = fp8moe.quantize(i.x)
    for label, found, source, sequence in (
        ("codes", moved.data.data, codes.data, i.order),
        ("scales", moved.data.scales, codes.scales, i.order),
        ("probabilities", moved.probs, i.row_probs, i.order),
        ("rows", padded, i.x, range(EXPERTS)),
    ):
        wanted = np.zeros_like(found)
        row = 0
        for j in sequence:
            wanted[row : row + len(parts[j])] = source[parts[j]]
            row += -(-len(parts[j]) // ALIGN) * ALIGN
        equal(found, wanted, f"padded {label}")
    equal(unpadded, i.x, "unpadded rows")
