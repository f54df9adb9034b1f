"""The cache of compiled kernels, and the compilation of every kernel for every architecture, without a
GPU."""

import contextlib
import ctypes
import gc
import hashlib
import importlib.util
import multiprocessing
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cases import SEED

import fp8moe
from fp8moe.kernels_cuda.runtime import compiler


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "cache"))


def cached(code, key="key", name="kernel", architecture="sm_90a"):
    calls = []

    def compile():
        calls.append(1)
        return code

    return compiler.cached(name, architecture, key, compile), len(calls)


def entry(tmp_path):
    (entry,) = (tmp_path / "cache").iterdir()
    return entry


def test_cache_entries_depend_on_key_and_architecture():
    assert cached(b"one") == (b"one", 1)
    assert cached(b"two") == (b"one", 0)
    assert cached(b"two", key="another key") == (b"two", 1)
    assert cached(b"three", architecture="sm_80") == (b"three", 1)


@pytest.mark.parametrize("keep", [0, 1, 31, 32, 40, -1])
def test_truncated_cache_entry_is_recompiled(tmp_path, keep):
    cached(b"code" * 100)
    content = entry(tmp_path).read_bytes()
    entry(tmp_path).write_bytes(content[:keep])
    assert cached(b"again") == (b"again", 1)
    assert cached(b"never") == (b"again", 0)


@pytest.mark.parametrize("at", [0, 31, 32, 200, -1])
def test_corrupt_cache_entry_is_recompiled(tmp_path, at):
    cached(b"code" * 100)
    content = bytearray(entry(tmp_path).read_bytes())
    content[at] ^= 1
    entry(tmp_path).write_bytes(content)
    assert cached(b"again") == (b"again", 1)


def test_unwritable_cache_is_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP8MOE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(compiler, "_warned", False)
    with pytest.warns(RuntimeWarning, match=r"FP8MOE_CACHE_DIR: .*file") as caught:
        assert [cached(b"code") for _ in range(2)] == [(b"code", 1)] * 2
    assert len(caught) == 1


def test_common_kernels_are_prefetched_with_the_first(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    compiled = []

    def compile_source(path, architecture, defines):
        compiled.append((path.stem, defines))
        return b"code of " + path.stem.encode(), ""

    monkeypatch.setattr(compiler, "compile_source", compile_source)
    monkeypatch.setattr(
        compiler, "OPTIONS", (*compiler.OPTIONS, f"-I{tmp_path}")
    )  # another key than in other tests
    monkeypatch.setattr(compiler, "nvrtc_threads", compiler.Threads(2))
    path = compiler.files()["permute.cu"]
    assert compiler.requested(path, "sm_90a").result() == b"code of permute"
    deadline = time.monotonic() + 60
    while len(compiled) < len(compiler.sources("sm_90a")) and time.monotonic() < deadline:
        time.sleep(0.01)
    usual = {
        "expert_parallel": ("KIND=BF16", "FMT=0", "MX=0", "PEERS=8"),
        "adamw": ("KIND=BF16", "STATE=BF16", "WHOLE=1"),
        "bias": (),
        "forms": (),
        "layout": (),
        "permute": (),
        "router": ("PER_LANE=4", "LOSSES=0"),
        "unpermute": (),
        "row_map": (),
        "sort_chunks": (),
        "quantize": ("KIND=BF16", "FMT=0", "MX=0"),
        "swiglu": ("KIND=BF16", "FMT=0", "MX=0", "BARE=1"),
        "swiglu_transpose": ("KIND=BF16", "FMT=0", "MX=0", "BARE=1"),
        "transpose": ("FMT=0", "MX=0", "TILE_TARGET=0"),
        "grouped_gemm": (),
        "grouped_gemm_mma": ("KIND=BF16", "TRANSPOSED=0"),
        "grouped_gemm_wgrad_mma": ("KIND=BF16",),
        "grouped_gemm_wgmma": ("A_FMT=0", "B_FMT=0"),
        "grouped_gemm_wgrad_wgmma": ("A_FMT=0", "B_FMT=0", "BLOCKS=0"),
        "grouped_gemm_wgmma16": ("KIND=BF16", "TRANSPOSED=0", "STAGES=4"),
        "grouped_gemm_wgrad_wgmma16": ("KIND=BF16", "STAGES=3"),
    }
    assert sorted(compiled) == sorted(usual.items())
    for name, defines in usual.items():
        assert defines in compiler.variants(compiler.files()[f"{name}.cu"])
        compiler.requested(compiler.files()[f"{name}.cu"], "sm_90a", defines).result()
    assert len(compiled) == len(usual) == len(list((tmp_path / "cache").iterdir()))


def _one_process(folder, seed):
    os.environ["FP8MOE_CACHE_DIR"] = folder
    for turn in range(40):
        code = hashlib.sha256(bytes([turn])).digest() * 2000
        assert compiler.cached("kernel", "sm_90a", str(turn), lambda code=code: code) == code
        if turn % 3 == seed % 3:  # another process clears the cache
            for entry in list(os.scandir(folder)):
                if entry.name.startswith("kernel"):
                    try:
                        os.unlink(entry.path)
                    except FileNotFoundError:
                        continue


def test_concurrent_processes_share_the_cache(tmp_path):
    folder = str(tmp_path / "cache")
    with multiprocessing.get_context("spawn").Pool(6) as pool:
        pool.starmap(_one_process, [(folder, seed) for seed in range(6)])
    assert all(name.name.startswith("kernel") for name in os.scandir(folder))  # no incomplete files


# Architectures whose preprocessed sources are another one's, except for the mma.sync products. Registers may
# differ: quantize_weights spilled 8 bytes on sm_86 only.
RELATED = ("sm_86", "sm_89", "sm_103a")


def one_of_every_format(variants):
    """One variant of every set that differs in FP8 formats only; the run's seed selects it."""
    sets, choose = {}, random.Random(SEED)
    for defines in variants:
        sets.setdefault(tuple(d for d in defines if "FMT=" not in d), []).append(defines)
    return [choose.choice(alike) for alike in sets.values()]


def compiled_sources(architecture):
    """All of them; for a related architecture `some_sources`."""
    return some_sources(architecture) if architecture in RELATED else compiler.sources(architecture)


def some_sources(architecture):
    """The mma.sync products and two others, which the run's seed selects."""
    sources = compiler.sources(architecture)
    products = [path for path in sources if path.stem.endswith("_mma")]
    others = [path for path in sources if path not in products]
    return products + random.Random(f"{SEED} {architecture}").sample(others, 2)


@pytest.mark.parametrize(
    ("path", "architecture"),
    [(path, a) for a in compiler.ARCHITECTURES for path in compiled_sources(a)],
    ids=lambda value: getattr(value, "stem", value),
)
def test_every_kernel_compiles_without_spills(path, architecture):
    """For sm_90a, for which the kernels are tuned, half of the variants, and of those that differ in FP8
    formats only one: the formats are the names of conversions. For other architectures one variant. The
    run's seed selects them; ``python -m fp8moe compile`` compiles all."""
    pytest.importorskip("cupy")
    from fp8moe.kernels_cuda.quantize import DECLARED

    variants, count = compiler.variants(path), 1
    if architecture == "sm_90a":
        variants = one_of_every_format(variants)
        count = (len(variants) + 1) // 2
    variants = random.Random(f"{SEED} {path.stem} {architecture}").sample(variants, count)
    with ThreadPoolExecutor() as threads:
        logs = threads.map(lambda v: compiler.compile_source(path, architecture, v)[1], variants)
        for defines, log in zip(variants, logs, strict=True):
            kernels = compiler.usage(log)
            assert kernels
            assert [(k, defines) for k in kernels if k[2]] == []
            for kernel, *_, declared in kernels:
                if path.stem.endswith("_mma"):  # test_configurations.py leaves them 1 KB beside their stages
                    assert declared <= 1 << 10, (kernel, defines)
                elif kernel in ("quantize_tiles", "swiglu_quantize_tiles"):
                    assert declared <= DECLARED, (kernel, defines)


@pytest.mark.parametrize(("spills", "status"), [(0, 0), (8, 1)])
def test_the_command_lists_registers_and_spills(monkeypatch, capsys, spills, status):
    pytest.importorskip("cupy")
    compile_all = pytest.importorskip("fp8moe.kernels_cuda.compile_all")
    log = (
        "ptxas info : Compiling entry function 'permute_rows' for 'sm_80'\n"
        f"0 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
        "ptxas info : Used 53 registers, used 1 barriers, 16 bytes smem"
    )
    monkeypatch.setattr(compiler, "sources", lambda architecture: [compiler.files()["unpermute.cu"]])
    code, written = bytes([spills, 1, 2]), {}
    monkeypatch.setattr(compiler, "compile_source", lambda path, architecture, defines: (code, log))
    monkeypatch.setattr(compiler, "_write", written.__setitem__)
    monkeypatch.setattr(compiler, "nvrtc_threads", compiler.Threads(1))
    monkeypatch.setattr(compile_all, "_plan_kernels", lambda architectures: contextlib.nullcontext([]))
    monkeypatch.setattr(compile_all.replay.LOOP, "compile", lambda: compiler.Threads(1).start(0, "", int))
    assert compile_all.main(["sm_80"]) == status
    path = compiler.files()["unpermute.cu"]
    key = compiler._key(path, "sm_80", compiler.variants(path)[0])  # which a launch reads
    assert written == {compiler._entry("unpermute", "sm_80", key): code}
    line, last = capsys.readouterr().out.splitlines()[-2:]
    assert line.split()[:-1] == ["unpermute.permute_rows", "sm_80", "53", str(spills), "16"]
    assert last.startswith(f"1 kernels, {status} with spills, 0 variants")


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_the_oldest_compiler_compiles_every_source(architecture, monkeypatch):
    """In a variant that the run's seed selects. NVRTC accepts more from version to version: 13.5 took a
    generic lambda that 13.0 and 12.9 refuse. For sm_100a, for which no preprocessed source but swiglu's is
    another than sm_90a's, the same sources as for a related architecture."""
    pytest.importorskip("cupy")
    nvrtc = OldNvrtc()
    assert nvrtc.getVersion() == compiler.OLDEST_NVRTC
    monkeypatch.setattr(compiler, "load_nvrtc", lambda: nvrtc)
    choose = random.Random(SEED)
    for path in compiler.sources(architecture) if architecture == "sm_90a" else some_sources(architecture):
        defines = choose.choice(compiler.variants(path))
        code, log = compiler.compile_source(path, architecture, defines)
        assert code.startswith(b"\x7fELF")
        kernels = compiler.usage(log)
        assert kernels
        if architecture == "sm_90a":
            # 12.9 keeps one register of the GEMM that gathers rows and adds a bias on the stack, 13.0 none
            spilled = 4 * ({"GATHER=1", "BIAS=1"} <= {*defines})
            assert [(k, defines) for k in kernels if k[2] > spilled] == []


class OldNvrtc:
    """The functions of CuPy's NVRTC module that the compiler calls, by nvidia-cuda-nvrtc-cu12's library."""

    class NVRTCError(Exception):
        pass

    def __init__(self):
        try:
            spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
        except ModuleNotFoundError:  # no package of this namespace
            spec = None
        if spec is None:
            pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        for builtins in folder.glob("libnvrtc-builtins.so.*"):  # NVRTC opens it by its name alone
            ctypes.CDLL(str(builtins))
        self.library = ctypes.CDLL(str(folder / "libnvrtc.so.12"))

    def _call(self, name, *arguments):
        if status := getattr(self.library, f"nvrtc{name}")(*arguments):
            raise self.NVRTCError(f"{name}: {status}")

    def _read(self, name, program):
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(f"Get{name}", program, content)
        return content.raw

    def getVersion(self):
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def createProgram(self, text, name, headers, names):
        program = ctypes.c_void_p()
        strings = ctypes.c_char_p * len(headers)
        source = text.encode(), name.encode(), len(headers), strings(*headers), strings(*names)
        self._call("CreateProgram", ctypes.byref(program), *source)
        return program

    def compileProgram(self, program, options):
        strings = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        self._call("CompileProgram", program, len(options), strings)

    def getCUBIN(self, program):
        return self._read("CUBIN", program)

    def getProgramLog(self, program):
        return self._read("ProgramLog", program).rstrip(b"\0").decode()

    def destroyProgram(self, program):
        self._call("DestroyProgram", ctypes.byref(program))


def test_an_error_names_a_compiler_that_is_too_old(monkeypatch):
    pytest.importorskip("cupy")
    nvrtc = OldNvrtc()
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (12, 0))
    monkeypatch.setattr(compiler, "load_nvrtc", lambda: nvrtc)
    with pytest.raises(compiler.CompileError, match=r"NVRTC 12\.0 was found.*need 12\.9 or newer.*cuda12"):
        compiler.compile_source(compiler.files()["permute.cu"], "sm_999")


def test_an_error_shows_file_and_line(tmp_path, monkeypatch):
    pytest.importorskip("cupy")
    bad = tmp_path / "bad.cu"
    bad.write_text('extern "C" __global__ void f() {\n  int x = nonsense;\n}\n')
    with pytest.raises(compiler.CompileError, match=r"kernels_cuda/bad\.cu\(2\).*nonsense"):
        compiler.compile_source(bad, "sm_90a")


def test_a_kernel_of_the_plans_compiles(monkeypatch):
    """One of them, which the run's seed selects, for the lowest architecture. All of them run in Numba's
    simulator (test_plan.py), and for sm_90a in the GPU tests."""
    pytest.importorskip("cupy")
    architecture = "sm_80"
    numba_cuda = pytest.importorskip("fp8moe.kernels_cuda.runtime.numba_cuda")
    kernel, kinds = random.Random(SEED).choice(launched_by_plans(monkeypatch))
    code = numba_cuda.cubin(kernel, kinds, architecture)
    assert len(code) > 1000
    assert numba_cuda.cubin(kernel, kinds, architecture) == code


def launched_by_plans(monkeypatch):
    """The kernels that plans launch, for ids and for masks with and without whole words, and the types of
    their arguments."""
    from fp8moe.kernels_cuda import plan
    from fp8moe.kernels_cuda.runtime import numba_cuda

    launched = []
    monkeypatch.setattr(plan, "shared_limit", lambda: 1 << 16)
    monkeypatch.setattr(plan, "scratch", lambda *sizes: [np.empty(size, np.int32) for size in sizes])
    monkeypatch.setattr(plan, "as_words", lambda mask: mask.reshape(-1).view(np.uint64))
    monkeypatch.setattr(
        plan,
        "run",
        lambda kernel, blocks, shared, *arguments: launched.append(
            (kernel, tuple(map(numba_cuda.kind_of, arguments)))
        ),
    )
    ids = np.zeros((3, 2), np.int64)
    plan.plan_topk(ids, out=fp8moe.plan_topk(ids, 8))
    for experts in (8, 5):
        mask = np.ones((3, experts), bool)
        plan.plan_routing_map(mask, out=fp8moe.plan_routing_map(mask))
    assert len({kernel for kernel, _ in launched}) == 6
    return launched


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_numba_compilation_leaves_garbage_collection_to_the_user(monkeypatch, collects, fails):
    pytest.importorskip("cupy")
    numba_cuda = pytest.importorskip("fp8moe.kernels_cuda.runtime.numba_cuda")
    kernel, _ = launched_by_plans(monkeypatch)[0]
    meanwhile = []

    def compile(*_):
        meanwhile.append(gc.isenabled())
        gc.disable()  # by the user, as torchtitan does, while a thread compiles
        if fails:
            raise ValueError
        return b"code"

    monkeypatch.setattr(numba_cuda, "_compile", compile)
    monkeypatch.setattr(compiler, "prefetch", lambda architecture: None)
    monkeypatch.setattr(compiler, "numba_threads", compiler.Threads(1))
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        if fails:
            with pytest.raises(ValueError):
                numba_cuda.cubin(kernel, ("int32",), "sm_90a")
        else:
            assert numba_cuda.cubin(kernel, ("int32",), "sm_90a") == b"code"
        assert not gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert meanwhile == [collects]


def test_every_kernel_that_is_launched_exists():
    launched = set()
    for path in compiler.files()["common.cuh"].parent.rglob("*.py"):
        # the first argument of a launcher's own `_launch` is the operation's name
        for call in (r'\blaunch\(\s*"(\w+)",\s*"(\w+)"', r'\b_launch\(\s*"\w+",\s*"(\w+)",\s*"(\w+)"'):
            launched |= set(re.findall(call, path.read_text()))
    assert len(launched) > 15
    for source, kernel in launched:
        text = compiler.files()[f"{source}.cu"].read_text()
        assert re.search(rf'extern "C" __global__ void[^;{{]*?\b{kernel}\(', text), (source, kernel)
