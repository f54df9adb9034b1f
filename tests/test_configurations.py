"""Launch configurations, from shapes and numbers of a device, without one."""

import re

import pytest
from cases import generator

pytest.importorskip("cupy")
from fp8moe.kernels_cuda import (
    compiler,
    grouped_gemm,
    grouped_gemm_wgmma,
    permute,
    quantize,
    swiglu,
    transpose,
)
from fp8moe.kernels_cuda.product import Product

H200 = {"multiprocessors": 132, "shared": 228 << 10, "block": 227 << 10}
BLOCK_RESERVES = 1 << 10  # bytes of shared memory that the system takes of every block
ROWS = (16, 32, 128, 512, 2048, 4096, 4112, 7168, 14_336, 16_384, 16_400, 57_344)  # bytes


def constants(header):
    """The numbers that a source or header defines, of those that stand there as numbers."""
    text = (compiler.SOURCES / header).read_text()
    return {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+) *(?://.*)?\n", text)}


def test_launchers_have_the_numbers_of_their_kernels():
    wgmma, tile = constants("wgmma_tiles.cuh"), constants("tile_order.cuh")
    assert wgmma["COLUMNS"] == grouped_gemm.TILE_COLUMNS
    assert constants("wgmma_pipeline.cuh")["STAGES"] == grouped_gemm.STAGES
    assert wgmma["CLUSTER"] == grouped_gemm.CLUSTER
    assert wgmma["MULTIPLIERS"] + 128 == grouped_gemm.THREADS  # a third warpgroup serves the two
    assert (wgmma["ROWS"] // 2, wgmma["COLUMNS"] // 2) == grouped_gemm.BOXES
    sides = grouped_gemm_wgmma.TILE_ROWS, grouped_gemm_wgmma.TILE_COLUMNS
    assert (wgmma["ROWS"], wgmma["COLUMNS"]) == sides
    assert sum(sides) * wgmma["STEP_BYTES"] == grouped_gemm_wgmma.STAGE_BYTES
    assert wgmma["CLUSTER"] == grouped_gemm_wgmma.CLUSTER
    assert wgmma["MULTIPLIERS"] + 128 == grouped_gemm_wgmma.THREADS
    of_16_bits = constants("wgmma16_pipeline.cuh")
    assert of_16_bits["PART_BYTES"] == grouped_gemm_wgmma.PART_BYTES == 64 * wgmma["PITCH"]
    assert of_16_bits["PART_BYTES"] == 32 * wgmma["WIDE_PITCH"]
    assert of_16_bits["STAGES"] == grouped_gemm_wgmma.stages("grouped_gemm", 8)
    assert (tile["TILE"], 32 * tile["CHUNKS"]) == (quantize.TILE, quantize.TILE_THREADS)
    assert constants("quantize.cu")["WEIGHT_THREADS"] == quantize.WEIGHT_THREADS
    assert constants("sort_chunks.cu")["CHUNK_THREADS"] == permute.CHUNK_THREADS


@pytest.mark.parametrize("experts", [1, 32, 256, 1407])
@pytest.mark.parametrize("multiprocessors", [2, 113, 132])
def test_grouped_gemm_fills_multiprocessors_with_whole_clusters(experts, multiprocessors):
    wgmma = constants("wgmma_tiles.cuh") | constants("wgmma_pipeline.cuh")
    here = grouped_gemm.tiles_configuration(experts, multiprocessors)
    print(here)
    assert here.blocks % wgmma["CLUSTER"] == 0
    assert multiprocessors - wgmma["CLUSTER"] < here.blocks <= multiprocessors
    sides = wgmma["ROWS"] + wgmma["COLUMNS"]
    stage = sides * wgmma["STEP"] + 4 * sides + 2 * 8  # codes, a scale of each row, two barriers
    needed = wgmma["STAGES"] * stage + wgmma["TILE_BYTES"] + 2 * 8 + 2 * 4 * (experts + 1)
    assert needed <= here.shared <= H200["block"]


def test_grouped_gemm_asks_for_no_more_experts_than_fit():
    most = grouped_gemm.TABLE_BYTES // 8 - 1
    assert grouped_gemm.tiles_configuration(most, 132).shared <= H200["block"]


@pytest.mark.parametrize(
    ("verb", "experts", "stages"),
    [
        *(("grouped_gemm", experts, 4) for experts in (1, 128, 243)),
        *(("grouped_gemm", experts, 3) for experts in (244, 2000)),
        *(("grouped_gemm_wgrad", experts, 3) for experts in (1, 128, 2000)),
    ],
)
def test_products_of_16_bits_have_as_many_stages_as_fit(verb, experts, stages):
    header = constants("wgmma_tiles.cuh") | constants("wgmma16_pipeline.cuh")
    here = grouped_gemm_wgmma.tiles_configuration(verb, experts, 132)
    print(here)
    assert grouped_gemm_wgmma.stages(verb, experts) == stages
    stage = (header["ROWS"] + header["COLUMNS"]) * header["STEP_BYTES"] + 2 * 8  # and two barriers
    rest = header["PARTS"] * 2 * 8 + 2 * 4 * (experts + 1)
    needed = stages * stage + {4: 1, 3: 2}[stages] * header["PART_BYTES"] + rest
    assert needed <= here.shared <= H200["block"]
    four_fit = 4 * stage + header["PART_BYTES"] + rest <= H200["block"]
    assert stages == 4 or verb == "grouped_gemm_wgrad" or not four_fit


PRODUCT = Product("grouped_gemm", ("bfloat16", "bfloat16"), "bfloat16", 8, 4096, 512, 256)


@pytest.mark.parametrize(
    "architecture", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
)
def test_wgmma_is_hoppers(architecture):
    reasons = grouped_gemm_wgmma.takes(PRODUCT, architecture)
    assert reasons == ([] if architecture == "sm_90a" else [f"the device is {architecture}, not sm_90a"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"operands": ("float16", "float16"), "out": "float16"}, None),
        ({"transpose_w": True}, None),
        ({"verb": "grouped_gemm_wgrad", "out": "float32"}, None),
        ({"verb": "grouped_gemm_wgrad", "operands": ("float16", "float16")}, None),
        ({"experts": 2000}, None),
        ({"rows": 3}, None),
        ({"operands": ("bfloat16", "float16")}, "the operands are bfloat16 and float16"),
        ({"operands": ("float32", "float32"), "out": "float32"}, "the operands are float32 and float32"),
        ({"operands": ("e4m3", "e4m3"), "out": "e4m3"}, "the operands are e4m3 and e4m3"),
        ({"out": "float32"}, "out is float32, not bfloat16"),
        ({"verb": "grouped_gemm_wgrad", "out": "float16"}, "out is float16, not float32 or bfloat16"),
        ({"width": 260}, "N is 260, no multiple of 8"),
        ({"depth": 12}, "K is 12, no multiple of 8"),
        ({"depth": 0}, "an operand is empty"),
        ({"rows": 0}, "an operand is empty"),
        ({"alignment": 8}, "arrays do not begin at a multiple of 16 bytes"),
        ({"experts": 3000}, "3000 experts are too many"),
        ({"rows": 2**31, "width": 8192}, "2147483648 rows of 8 experts are too many"),
    ],
)
def test_what_wgmma_takes_of_16_bits(change, reason):
    reasons = grouped_gemm_wgmma.takes(PRODUCT._replace(**change), "sm_90a")
    assert len(reasons) == (reason is not None)
    assert reason is None or reasons[0].startswith(reason)


@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize("experts", [None, 0, 8, 256])
@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize("strips", [1, 96, 376, 4096])
def test_tiles_are_shared_out_among_resident_blocks(strips, value_bytes, experts, mx):
    columns, multiprocessors = 7168, H200["multiprocessors"]
    here, when_free = quantize.tiles_configuration(
        strips, columns, value_bytes, experts, mx=mx, multiprocessors=multiprocessors
    )
    print(here, when_free)
    down = -(-(strips + (0 if experts is None else 2)) // (4 if mx else 1))
    tiles = down * columns // quantize.TILE
    assert here.blocks == min(tiles, quantize.RESIDENT * multiprocessors)
    assert when_free == (tiles > quantize.MANY_TURNS * here.blocks)
    table = 0 if experts is None else 12 * (experts + 2)
    assert here.shared == quantize.TILE**2 * (1 + value_bytes) + table
    resident = quantize.RESIDENT if value_bytes == 2 else 1
    assert resident * (here.shared + quantize.DECLARED + BLOCK_RESERVES) <= H200["shared"]


@pytest.mark.parametrize("row_bytes", ROWS)
@pytest.mark.parametrize("scale_bytes", [0, 16, 224])
@pytest.mark.parametrize("fill", [False, True])
def test_pieces_cover_a_row(row_bytes, scale_bytes, fill):
    tokens = int(generator().integers(1, 5000))
    moved = permute.permute_pieces(tokens, row_bytes, scale_bytes, fill=fill)
    sorted_ = permute.sort_chunks_pieces(tokens, row_bytes, scale_bytes)
    print(moved, sorted_, sep="\n")
    for pieces, most in ((moved, permute.PIECE), (sorted_, permute.UNIT)):
        assert pieces.nbytes % 16 == 0
        assert pieces.nbytes <= most
        assert (pieces.per_row - 1) * pieces.nbytes < row_bytes <= pieces.per_row * pieces.nbytes
        units = -(-tokens // pieces.together)
        assert pieces.configuration.grid == (units * pieces.per_row, 32)
        room = pieces.zeros + pieces.together * (pieces.nbytes + scale_bytes) + 16
        assert room <= pieces.configuration.shared <= 48 << 10  # also on devices that have little
    assert fill or moved.zeros == 0
    assert sorted_.together == 1 or sorted_.together * (row_bytes + scale_bytes) <= permute.UNIT


def test_a_thread_has_its_part_of_the_rows():
    rows, width = 4097, 7168
    vectors = width // 8
    here = permute.unpermute_configuration(rows, vectors)
    assert here.blocks[0] == rows
    assert (here.blocks[1] - 1) * permute.SHARE < vectors <= here.blocks[1] * permute.SHARE
    assert permute.unpermute_backward_configuration(rows, width).blocks - permute.FILLERS == rows
    for here, values_of_thread, values in (
        (swiglu.rows_configuration(rows, vectors), 16, rows * width),
        (quantize.by_warps(rows * width), 32, rows * width),
        (permute.sort_chunks_configuration(rows, 9), 1, rows),
    ):
        reached = here.blocks * here.threads * values_of_thread
        assert values <= reached < values + here.threads * values_of_thread
    assert swiglu.backward_configuration(rows).blocks * 4 >= rows
    assert permute.sort_chunks_configuration(0, 9).blocks == 1


def test_a_block_has_a_tile():
    rows, columns = 4096, 7168
    tiles = rows * columns // 128**2
    assert swiglu.transposed_configuration(rows, columns).blocks == tiles
    matrices = quantize.weights_configuration(3, rows, columns)
    assert (matrices.blocks[0] * matrices.blocks[1], matrices.blocks[1]) == (3 * tiles, 3)
    for mx, height in ((False, 128), (True, 32)):
        down, across = transpose.transpose_configuration(rows // height, columns, mx=mx).blocks
        assert down * across == tiles
