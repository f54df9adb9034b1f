"""Launch configurations, from shapes and device properties, without a device."""

import re
import subprocess

import cuda_on_cpu
import pytest
from cases import generator

import fp8moe

pytest.importorskip("cupy")
from fp8moe.kernels_cuda import bias, grouped_gemm, permute, quantize, swiglu, transpose
from fp8moe.kernels_cuda.gemm import grouped_gemm_mma, grouped_gemm_wgmma16, grouped_gemm_wgmma_fp8
from fp8moe.kernels_cuda.gemm.product import Product
from fp8moe.kernels_cuda.runtime import compiler, driver

H200 = {"multiprocessors": 132, "shared": 228 << 10, "block": 227 << 10}
BLOCK_RESERVES = 1 << 10  # bytes of shared memory per block that the system reserves
ROWS = (16, 32, 128, 512, 2048, 4096, 4112, 7168, 14_336, 16_384, 16_400, 57_344)  # bytes


def constants(header):
    """Constants of a source or header that are defined as literal numbers."""
    text = compiler.files()[header].read_text()
    return {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+) *(?://.*)?\n", text)}


def test_launcher_constants_match_kernel_constants():
    wgmma, tile = constants("wgmma_tiles.cuh"), constants("tile_order.cuh")
    assert wgmma["COLUMNS"] == grouped_gemm_wgmma_fp8.TILE_COLUMNS
    assert constants("wgmma_pipeline.cuh")["STAGES"] == grouped_gemm_wgmma_fp8.STAGES
    assert wgmma["CLUSTER"] == grouped_gemm_wgmma_fp8.CLUSTER
    # a third warpgroup loads for the two that multiply
    assert wgmma["CONSUMER_THREADS"] + 128 == grouped_gemm_wgmma_fp8.THREADS
    assert (wgmma["ROWS"] // 2, wgmma["COLUMNS"] // 2) == grouped_gemm_wgmma_fp8.BOXES
    sides = grouped_gemm_wgmma16.TILE_ROWS, grouped_gemm_wgmma16.TILE_COLUMNS
    assert (wgmma["ROWS"], wgmma["COLUMNS"]) == sides
    assert sum(sides) * wgmma["STEP_BYTES"] == grouped_gemm_wgmma16.STAGE_BYTES
    assert (wgmma["CLUSTER"], wgmma["TURNS"]) == (grouped_gemm_wgmma16.CLUSTER, grouped_gemm_wgmma16.TURNS)
    assert wgmma["CONSUMER_THREADS"] + 128 == grouped_gemm_wgmma16.THREADS
    of_16_bits = constants("wgmma16_pipeline.cuh")
    assert of_16_bits["PART_BYTES"] == grouped_gemm_wgmma16.PART_BYTES == 64 * wgmma["PITCH"]
    assert of_16_bits["PART_BYTES"] == 32 * wgmma["WIDE_PITCH"]
    assert of_16_bits["STAGES"] == grouped_gemm_wgmma16.stages("grouped_gemm", 8)
    assert (tile["TILE"], 32 * tile["CHUNKS"]) == (quantize.TILE, quantize.TILE_THREADS)
    assert constants("weight_block.cuh")["WEIGHT_THREADS"] == quantize.WEIGHT_THREADS
    of_bias = constants("bias.cu")
    assert (of_bias["VECTORS"], of_bias["MOST_THREADS"]) == (bias.VECTORS, bias.MOST_THREADS)
    assert (of_bias["CHUNK"], of_bias["SUM_THREADS"]) == (bias.CHUNK, bias.SUM_THREADS)
    assert constants("sort_chunks.cu")["CHUNK_THREADS"] == permute.CHUNK_THREADS


@pytest.mark.parametrize("vectors", [1, 32, 33, 65, 360, 512, 513, 896, 1025])
def test_add_biases_takes_as_few_turns_and_warps_as_possible(vectors):
    blocks, threads, shared = bias.add_biases_configuration(7, vectors)
    assert (blocks, shared) == (7, 0)
    assert threads in range(32, bias.MOST_THREADS + 1, 32)
    turns = -(-vectors // (bias.VECTORS * threads))
    assert turns == -(-vectors // (bias.VECTORS * bias.MOST_THREADS))
    assert threads == 32 or turns * bias.VECTORS * (threads - 32) < vectors


FP8_KERNELS = [
    ("grouped_gemm", "grouped_gemm_wgmma.cu"),
    ("grouped_gemm_wgrad", "grouped_gemm_wgrad_wgmma.cu"),
]


@pytest.mark.parametrize(("verb", "kernel"), FP8_KERNELS)
@pytest.mark.parametrize("experts", [1, 32, 256, 1250])
@pytest.mark.parametrize("multiprocessors", [2, 113, 132])
def test_grouped_gemm_fills_multiprocessors_with_whole_clusters(verb, kernel, experts, multiprocessors):
    wgmma = constants("wgmma_tiles.cuh") | constants("wgmma_pipeline.cuh") | constants(kernel)
    configuration = grouped_gemm_wgmma_fp8.tiles_configuration(verb, experts, multiprocessors)
    print(configuration)
    assert configuration.blocks % wgmma["CLUSTER"] == 0
    assert multiprocessors - wgmma["CLUSTER"] < configuration.blocks <= multiprocessors
    sides = wgmma["ROWS"] + wgmma["COLUMNS"]
    stage = sides * wgmma["STEP"] + 4 * sides + 2 * 8  # codes, one scale per row, two barriers
    turns = wgmma["TURNS"] * (2 * 8 + 16)  # two barriers and a WorkTile each
    table = (2 * 4 + wgmma["HALF_TILES"]) * (experts + 1)  # one more byte if last tiles may be halves
    assert configuration.shared == wgmma["STAGES"] * stage + wgmma["TILE_BYTES"] + 2 * 8 + turns + table
    assert configuration.shared <= H200["block"]
    gather = grouped_gemm_wgmma_fp8.tiles_configuration(verb, experts, multiprocessors, gather=True)
    barriers = wgmma["STAGES"] + wgmma["STAGES"] % 2  # the schedule after them begins at a multiple of 16
    assert gather == configuration._replace(
        threads=configuration.threads + 128, shared=configuration.shared + 8 * barriers
    )
    assert gather.shared <= H200["block"]


@pytest.mark.parametrize(("verb", "kernel"), FP8_KERNELS)
def test_grouped_gemm_expert_limit_fits_shared_memory(verb, kernel):
    wgmma = constants("wgmma_pipeline.cuh") | constants(kernel)
    largest = grouped_gemm_wgmma_fp8.TABLE_BYTES // (8 + wgmma["HALF_TILES"]) - 1
    product = Product(verb, ("e4m3", "e4m3"), "bfloat16", largest, 4096, 512, 256)
    assert grouped_gemm_wgmma_fp8.unsupported_reasons(product, "sm_90a") == []
    assert grouped_gemm_wgmma_fp8.tiles_configuration(verb, largest, 132).shared <= H200["block"]
    reasons = grouped_gemm_wgmma_fp8.unsupported_reasons(product._replace(experts=largest + 1), "sm_90a")
    assert reasons == [f"{largest + 1} experts are too many"]


# maximum shared memory per block in KiB, from CUDA's table of compute capabilities, without what the system
# reserves
SHARED_MEMORY = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_103a": 227}
SHARED_MEMORY |= {"sm_120a": 99}


def product(operands="bfloat16", verb="grouped_gemm", out=None, width=4096, depth=7168, rows=32_768, **rest):
    out = out or ("float32" if verb == "grouped_gemm_wgrad" else "bfloat16")
    return Product(verb, (operands, operands), out, 8, rows, width, depth, **rest)


@pytest.mark.skipif(not cuda_on_cpu.available, reason="needs g++")
@pytest.mark.parametrize("architecture", compiler.ARCHITECTURES)
@pytest.mark.parametrize("operands", ["bfloat16", "e4m3"])
@pytest.mark.parametrize(
    ("verb", "blocks"), [("grouped_gemm", False), ("grouped_gemm_wgrad", False), ("grouped_gemm_wgrad", True)]
)
def test_mma_tile_constants_match_kernel_constants(architecture, operands, verb, blocks):
    before_pipeline = (
        compiler.files()[f"{verb}_mma.cu"].read_text().partition('#include "mma_pipeline.cuh"')[0]
    )
    headers = [compiler.files()[f"{name}.cuh"].read_text() for name in ("mma", "mma_pipeline")]
    text = "\n".join([before_pipeline, *headers])
    directives = re.findall(r"^#(?!pragma|include)(?:.*\\\n)*.*", text, re.M)
    number = "".join(filter(str.isdigit, architecture))
    wanted = "COLUMNS, ROWS, THREADS, STAGES * STAGE_BYTES"
    formats = ["-DKIND=BF16"] if operands == "bfloat16" else ["-DA_FMT=0", "-DB_FMT=0"]
    if operands != "bfloat16" and verb == "grouped_gemm_wgrad":
        formats.append(f"-DBLOCKS={int(blocks)}")
    arguments = [f"-D__CUDA_ARCH__={number}0", *formats]
    completed = subprocess.run(
        ["g++", "-E", "-P", "-x", "c++", *arguments, "-"],
        input="\n".join([*directives, wanted]),
        capture_output=True,
        text=True,
        check=True,
    )
    columns, rows, threads, shared = eval(completed.stdout.replace("/", "//"))
    configuration = grouped_gemm_mma.configuration(product(operands, verb, blocks=blocks), architecture)
    assert (configuration.threads, configuration.shared) == (threads, shared)
    # besides the stages, a kernel declares 128 bytes statically; test_compiler.py limits them to 1 KB
    assert configuration.shared + (1 << 10) <= SHARED_MEMORY[architecture] << 10
    if verb == "grouped_gemm":
        assert configuration.blocks == (32_768 // rows + 8) * (4096 // columns)
    else:
        assert configuration.blocks == 8 * (4096 // rows) * (7168 // columns)


# the fastest backend that supports a product, by architecture: (FP8, 16-bit operands)
FASTEST = {
    **dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_100a", "sm_103a", "sm_120a"), ("mma", "mma")),
    "sm_90a": ("wgmma", "wgmma"),
    "sm_75": (None, None),
}


@pytest.mark.parametrize("verb", ["grouped_gemm", "grouped_gemm_wgrad"])
@pytest.mark.parametrize("architecture", FASTEST)
def test_fastest_supported_backend_is_selected(architecture, verb):
    for operands, wanted in zip(("e4m3", "bfloat16"), FASTEST[architecture], strict=True):
        requested = product(operands, verb)
        small = requested._replace(rows=16, width=16, depth=64)
        if wanted is None:
            with pytest.raises(
                ValueError, match=r"1\.92e\+03 GFLOP.*mma: the device is sm_75.*backend='cublas'"
            ):
                grouped_gemm.choose(requested, architecture, None)
            assert grouped_gemm.choose(small, architecture, None).backend == "plain"
        else:
            assert grouped_gemm.choose(requested, architecture, None).backend == wanted
            assert grouped_gemm.choose(small, architecture, None).backend == wanted
            assert grouped_gemm.choose(requested, architecture, wanted) == (wanted, ())
        for backend in ("plain", "cublas"):
            assert grouped_gemm.choose(requested, architecture, backend) == (backend, ())
        if architecture not in ("sm_90a", "sm_75"):
            with pytest.raises(ValueError, match="backend: got 'wgmma'"):
                grouped_gemm.choose(requested, architecture, "wgmma")
        if architecture == "sm_75":
            with pytest.raises(
                ValueError, match=r"backend: got 'mma' .*the device is sm_75, not sm_80 or later"
            ):
                grouped_gemm.choose(requested, architecture, "mma")


@pytest.mark.parametrize("architecture", FASTEST)
@pytest.mark.parametrize("operands", ["float32", "float64"])
def test_large_products_use_the_plain_kernel_only_on_request(architecture, operands):
    requested = product(operands, out=operands)
    with pytest.raises(
        ValueError, match=f"backend: got None .*the operands are {operands}.*'plain', which says"
    ):
        grouped_gemm.choose(requested, architecture, None)
    assert grouped_gemm.choose(requested, architecture, "plain") == ("plain", ())
    largest = requested._replace(rows=1000, width=1000, depth=500)
    assert grouped_gemm.choose(largest, architecture, None).backend == "plain"
    with pytest.raises(ValueError, match="GFLOP"):
        grouped_gemm.choose(largest._replace(depth=501), architecture, None)


LAYER = {"experts": 8, "hidden": 512, "columns": 512, "width": 256, "ffn": 256}
GRADIENTS = ("dx", "dprobs", "dw13", "dw2")


@pytest.mark.parametrize("operands", ["e4m3", "bfloat16"])
@pytest.mark.parametrize("architecture", FASTEST)
def test_unsupported_backend_of_a_layer_raises(monkeypatch, architecture, operands):
    monkeypatch.setattr(driver, "architecture", lambda device: architecture)
    layer = {"operands": operands, "gradients": GRADIENTS, **LAYER}
    has = {"wgmma": architecture == "sm_90a", "mma": architecture != "sm_75", "plain": True, "cublas": True}
    for backend, supported in has.items():
        if supported:
            grouped_gemm.check_layer(backend, None, 0, **layer)
        else:
            with pytest.raises(ValueError, match=f"backend: got '{backend}'.*the device is {architecture}"):
                grouped_gemm.check_layer(backend, None, 0, **layer)


@pytest.mark.parametrize("operands", ["e4m3", "bfloat16", "float32"])
@pytest.mark.parametrize("architecture", FASTEST)
def test_unsupported_sm_limit_of_a_layer_raises(monkeypatch, architecture, operands):
    monkeypatch.setattr(driver, "architecture", lambda device: architecture)
    monkeypatch.setattr(driver, "multiprocessors", lambda device: 132)
    layer = {"operands": operands, "gradients": GRADIENTS, **LAYER}
    for backend in (None, "wgmma") if architecture == "sm_90a" and operands != "float32" else ():
        for num_sms in (2, 132):
            grouped_gemm.check_layer(backend, num_sms, 0, **layer)
        with pytest.raises(ValueError, match="num_sms: got 134; wanted an even number from 2 to 132"):
            grouped_gemm.check_layer(backend, 134, 0, **layer)
        odd = {**layer, "hidden": 500}
        with pytest.raises(ValueError, match=r"num_sms: got 2|backend: got 'wgmma'.*K is 500"):
            grouped_gemm.check_layer(backend, 2, 0, **odd)
    others = {"mma": architecture != "sm_75" and operands != "float32", "plain": True, "cublas": True}
    others[None] = architecture != "sm_90a" or operands == "float32"
    for backend in (name for name, available in others.items() if available):
        with pytest.raises(ValueError, match="num_sms: got 2 for a product by"):
            grouped_gemm.check_layer(backend, 2, 0, **layer)


@pytest.mark.parametrize(
    ("operands", "backend", "change", "gradients", "reason"),
    [
        ("float32", "mma", {}, (), "the operands are float32"),
        ("bfloat16", "wgmma", {"hidden": 500}, (), "K is 500, no multiple of 8"),
        ("e4m3", "wgmma", {"hidden": 504}, (), "K is 504, no multiple of 16"),
        ("e4m3", "wgmma", {"width": 128, "columns": 256, "ffn": 100}, ("dw2",), "K is 100, no multiple of 8"),
        (
            "e4m3",
            "wgmma",
            {"width": 128, "columns": 256, "ffn": 102},
            ("dw13",),
            "N is 102, no multiple of 4",
        ),
    ],
)
def test_each_product_of_a_layer_is_checked(monkeypatch, operands, backend, change, gradients, reason):
    """Products of gradients are checked only if those gradients are requested."""
    monkeypatch.setattr(driver, "architecture", lambda device: "sm_90a")
    layer = {"operands": operands, **LAYER, **change}
    with pytest.raises(ValueError, match=f"backend: got '{backend}'.*{reason}"):
        grouped_gemm.check_layer(backend, None, 0, **layer, gradients=gradients)
    if gradients:
        grouped_gemm.check_layer(backend, None, 0, **layer, gradients=("dx", "dprobs"))


def test_cublas_has_no_float64():
    for of in ({"operands": "float64", "out": "float64"}, {"operands": "float32", "out": "float64"}):
        with pytest.raises(TypeError, match="backend: got 'cublas' with float64"):
            grouped_gemm.choose(product(**of), "sm_90a", "cublas")


@pytest.mark.parametrize("operands", ["e4m3", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
def test_cublas_stores_float32_or_the_operands_dtype(operands, out):
    """cublasGemmEx has no other types of C for float32 sums; a bfloat16 ``main_grad`` of float16 weights
    ended in CUBLAS_STATUS_NOT_SUPPORTED."""
    requested = product(operands, "grouped_gemm_wgrad", out=out)
    if out in ("float32", "bfloat16" if operands == "e4m3" else operands):
        assert grouped_gemm.choose(requested, "sm_90a", "cublas") == ("cublas", ())
        return
    with pytest.raises(TypeError, match=rf"backend: got 'cublas' for a product of \w+ into {out}; wanted"):
        grouped_gemm.choose(requested, "sm_90a", "cublas")


@pytest.mark.parametrize("backend", ["wgmma", "mma"])
def test_explicit_backend_accepts_zero_rows(backend):
    """On a rank without tokens, weight gradients are zeros instead of an error."""
    none = product("bfloat16", "grouped_gemm_wgrad", rows=0)
    assert grouped_gemm.choose(none, "sm_90a", backend).backend == "plain"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"width": 4100}, "N is 4100, no multiple of 8"),
        ({"depth": 7160}, "K is 7160, no multiple of 16"),
        ({"alignment": 8}, "do not begin at a multiple of 16 bytes"),
        ({"experts": 2000}, "2000 experts are too many"),
    ],
)
def test_products_unsupported_by_wgmma_use_mma_with_a_reason(change, reason):
    requested = product("e4m3")._replace(**change)
    backend, reasons = grouped_gemm.choose(requested, "sm_90a", None)
    assert backend == "mma"
    assert any(reason in one for one in reasons)
    with pytest.raises(ValueError, match=f"backend: got 'wgmma'.*{reason}"):
        grouped_gemm.choose(requested, "sm_90a", "wgmma")


@pytest.mark.parametrize("architecture", FASTEST)
def test_the_choice_is_described_for_every_architecture(architecture):
    fp8, sixteen = (name or "plain" for name in FASTEST[architecture])
    lines = grouped_gemm.describe(architecture)
    assert [line.split()[:3] for line in lines] == [
        [verb, operands, backend]
        for operands, backend in (
            ("FP8", fp8),
            ("bfloat16", sixteen),
            ("float16", sixteen),
            ("float32", "plain"),
        )
        for verb in ("grouped_gemm", "grouped_gemm_wgrad")
    ]
    for line in lines:
        assert ("the operands are float32" in line) == ("float32" in line)
        assert ("wgmma: the device is" in line) == (architecture != "sm_90a")


@pytest.mark.parametrize(
    ("verb", "experts", "stages"),
    [
        *(("grouped_gemm", experts, 4) for experts in (1, 128, 227)),
        *(("grouped_gemm", experts, 3) for experts in (228, 2000)),
        *(("grouped_gemm_wgrad", experts, 3) for experts in (1, 128, 2000)),
    ],
)
def test_products_of_16_bits_have_as_many_stages_as_fit(verb, experts, stages):
    header = constants("wgmma_tiles.cuh") | constants("wgmma16_pipeline.cuh")
    configuration = grouped_gemm_wgmma16.tiles_configuration(verb, experts, 132)
    print(configuration)
    assert grouped_gemm_wgmma16.stages(verb, experts) == stages
    stage = (header["ROWS"] + header["COLUMNS"]) * header["STEP_BYTES"] + 2 * 8  # and two barriers
    rest = header["PARTS"] * 2 * 8 + header["TURNS"] * (2 * 8 + 16) + 2 * 4 * (experts + 1)
    needed = stages * stage + {4: 1, 3: 2}[stages] * header["PART_BYTES"] + rest
    assert needed <= configuration.shared <= H200["block"]
    four_fit = 4 * stage + header["PART_BYTES"] + rest <= H200["block"]
    assert stages == 4 or verb == "grouped_gemm_wgrad" or not four_fit


PRODUCT = Product("grouped_gemm", ("bfloat16", "bfloat16"), "bfloat16", 8, 4096, 512, 256)


@pytest.mark.parametrize(
    "architecture", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"]
)
def test_wgmma_requires_hopper(architecture):
    reasons = grouped_gemm_wgmma16.unsupported_reasons(PRODUCT, architecture)
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
def test_16_bit_products_supported_by_wgmma(change, reason):
    reasons = grouped_gemm_wgmma16.unsupported_reasons(PRODUCT._replace(**change), "sm_90a")
    assert len(reasons) == (reason is not None)
    assert reason is None or reasons[0].startswith(reason)


@pytest.mark.parametrize("mx", [False, True])
@pytest.mark.parametrize("experts", [None, 0, 8, 256])
@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize("strips", [1, 96, 376, 4096])
def test_tiles_are_distributed_over_resident_blocks(strips, value_bytes, experts, mx):
    columns, multiprocessors = 7168, H200["multiprocessors"]
    configuration, when_free = quantize.tiles_configuration(
        strips, columns, value_bytes, experts, mx=mx, multiprocessors=multiprocessors
    )
    print(configuration, when_free)
    down = -(-(strips + (0 if experts is None else 2)) // (4 if mx else 1))
    tiles = down * columns // quantize.TILE
    assert configuration.blocks == min(tiles, quantize.RESIDENT * multiprocessors)
    assert when_free == (tiles > quantize.MANY_TURNS * configuration.blocks)
    table = 0 if experts is None else 12 * (experts + 2)
    assert configuration.shared == quantize.TILE**2 * (1 + value_bytes) + table
    resident = quantize.RESIDENT if value_bytes == 2 else 1
    assert resident * (configuration.shared + quantize.DECLARED + BLOCK_RESERVES) <= H200["shared"]


@pytest.mark.parametrize("row_bytes", ROWS)
@pytest.mark.parametrize("scale_bytes", [0, 16, 224])
@pytest.mark.parametrize("fill", [False, True])
def test_pieces_cover_a_row(row_bytes, scale_bytes, fill):
    tokens = int(generator().integers(1, 5000))
    moved = permute.permute_pieces(tokens, row_bytes, scale_bytes, fill=fill)
    sorted_ = permute.sort_chunks_pieces(tokens, row_bytes, scale_bytes)
    print(moved, sorted_, sep="\n")
    for pieces, largest in ((moved, permute.PIECE), (sorted_, permute.UNIT)):
        assert pieces.nbytes % 16 == 0
        assert pieces.nbytes <= largest
        assert (pieces.per_row - 1) * pieces.nbytes < row_bytes <= pieces.per_row * pieces.nbytes
        units = -(-tokens // pieces.together)
        assert pieces.blocks == units * pieces.per_row
        room = pieces.zeros + pieces.together * (pieces.nbytes + scale_bytes) + 16
        assert room <= pieces.shared <= 48 << 10  # also on devices with little shared memory
    assert fill or moved.zeros == 0
    assert sorted_.together == 1 or sorted_.together * (row_bytes + scale_bytes) <= permute.UNIT


def test_threads_cover_all_rows_and_no_block_is_idle():
    rows, width = 4097, 7168
    vectors = width // 8
    configuration = permute.unpermute_configuration(rows, vectors)
    shares, rest = divmod(configuration.blocks, rows)
    assert rest == 0
    assert (shares - 1) * permute.SHARE < vectors <= shares * permute.SHARE
    assert 2 * configuration.threads == permute.SHARE  # unpermute.cu: two vectors per thread
    assert permute.unpermute_backward_configuration(rows, width).blocks - permute.FILLERS == rows
    for configuration, values_of_thread, values in (
        (swiglu.rows_configuration(rows, vectors), 16, rows * width),
        (quantize.by_warps(rows * width), 32, rows * width),
        (permute.sort_chunks_configuration(rows, 9), 1, rows),
    ):
        reached = configuration.blocks * configuration.threads * values_of_thread
        assert values <= reached < values + configuration.threads * values_of_thread
    assert swiglu.backward_configuration(rows).blocks * 4 >= rows
    assert permute.sort_chunks_configuration(0, 9).blocks == 1


def test_grid_has_one_block_per_tile():
    rows, columns = 4096, 7168
    tiles = rows * columns // 128**2
    assert swiglu.transposed_configuration(rows, columns).blocks == tiles
    matrices = quantize.weights_configuration(3, rows, columns)
    assert (matrices.blocks[0] * matrices.blocks[1], matrices.blocks[1]) == (3 * tiles, 3)
    for mx, height in ((False, 128), (True, 32)):
        down, across = transpose.transpose_configuration(rows // height, columns, mx=mx).blocks
        assert down * across == tiles


@pytest.mark.parametrize("width", [0, 1, 2, 8, 300, 1024])
@pytest.mark.parametrize("experts", [0, 1, 8, 257, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 511, 4096, 1_000_000])
def test_plan_sizes_cover_all_tokens_and_fit_a_block(tokens, experts, width):
    plan = pytest.importorskip("fp8moe.kernels_cuda.plan")
    sizes = plan.plan_sizes(fp8moe.PermutationPlan(None, tokens, experts, width, True, 0, 1))
    assert 1 <= sizes.chunks <= plan.MAX_CHUNKS
    assert (sizes.chunks - 1) * sizes.per_chunk < max(tokens, 1) <= sizes.chunks * sizes.per_chunk
    assert sizes.piece == 1 or sizes.piece * width <= plan.BLOCK
    assert 32 * (sizes.bit_words - 1) < max(sizes.piece * width, 1)
    assert sizes.bit_words == 1 or sizes.bit_words * experts <= plan.BITS
    assert 32 * sizes.mask_words >= experts
    assert sizes.mask_words <= 1 << sizes.shift
    assert sizes.step == 1 or sizes.step << sizes.shift <= plan.BLOCK


@pytest.mark.parametrize(
    "path",
    [p for name, p in compiler.files().items() if re.fullmatch(r"grouped_gemm.*wgmma.*\.cu", name)],
    ids=lambda path: path.stem,
)
@pytest.mark.parametrize("setting", [0, 1])
def test_registers_of_consumers_and_producers_fit(path, setting):
    """setmaxnreg waits for ever if consumers ask for more registers than producers have released: a block
    starts with as many per thread as a multiple of 8 allows, here 168 of 384 threads, or 128 of 512."""

    def counts(name):
        return [
            eval(re.sub(r"(?:BLOCKS|GATHER) \? (\d+) : (\d+)", lambda m: m[2 - setting], expression))
            for expression in re.findall(name + r"_registers<(.*?)>\(\)", path.read_text())
        ]

    gathers = "GATHER" in path.read_text()
    producers = counts("fewer")[: 1 + (gathers and setting)]
    (consumers,), groups = counts("more"), 2 + len(producers)
    assert len(counts("fewer")) == 1 + gathers
    assert sum(producers) + 2 * consumers <= groups * (65536 // (128 * groups) // 8 * 8)
