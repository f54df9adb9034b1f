"""The command line: ``fp8moe {demo,info,selftest,diagnose,convert,compile,bench}``, or ``python -m
fp8moe COMMAND``.

Exit codes: 0 success; 1 a check failed; 2 invalid usage, or a missing requirement; 141 a pipe that is closed
before the end, as by ``| head``, of ``info``, which checks nothing, 0.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import fp8moe
from fp8moe.kernels_cuda.runtime.compiler import ARCHITECTURES

DEVICES = ("auto", "cpu", "cuda")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m fp8moe" if Path(sys.argv[0]).stem == "__main__" else "fp8moe",
        description="FP8 mixture-of-experts kernels, framework-neutral.",
        epilog="exit codes: 0 success; 1 a check failed; 2 invalid usage, or a missing requirement",
    )
    top.add_argument("--version", action="version", version=f"fp8moe {fp8moe.__version__}")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    demo = verbs.add_parser(
        "demo", help="train a small MoE transformer in bf16, fp8_blockwise and fp8_flow, side by side"
    )
    demo.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to train on (default: auto)"
    )
    demo.add_argument("--steps", type=_positive, default=None, help="training steps per recipe")
    demo.add_argument("--tokens", type=_positive, default=None, help="pieces of text predicted per step")
    demo.add_argument("--layers", type=_positive, default=None, help="transformer layers")
    demo.add_argument("--experts", type=_positive, default=None, help="experts per layer, 2 or more")
    demo.add_argument("--seed", type=_seed, default=0, help="seed of weights and batches (default: 0)")
    demo.add_argument("--seeds", type=_positive, default=None, help="initial weights in bf16 (default: 3)")
    demo.add_argument(
        "--text", type=Path, help="training text (default: plays of Shakespeare, which the package has)"
    )
    demo.add_argument("--out", type=Path, default=Path("demo-out"), help="output folder")
    demo.add_argument("--no-check", action="store_true", help="report only: exit code 0 for any losses")

    info = verbs.add_parser("info", help="versions, devices, operations and what runs them, what to install")
    info.add_argument(
        "--memory",
        nargs=5,
        type=_positive,
        metavar=("TOKENS", "HIDDEN", "FFN", "EXPERTS", "TOPK"),
        help="instead: the bytes that a layer of these sizes holds, by recipe and options",
    )

    selftest = verbs.add_parser("selftest", help="check every operation against independent arithmetic")
    selftest.add_argument("--device", choices=("all", "cpu", "cuda"), default="all")
    selftest.add_argument("--seed", type=_seed, default=None, help="seed of the inputs (default: random)")

    diagnose = verbs.add_parser(
        "diagnose",
        help="which cast of a model's experts costs what: FP8 beside bfloat16, by layer and tensor",
    )
    diagnose.add_argument(
        "target",
        metavar="TARGET",
        help="a model of transformers, by its name or folder; or FILE.py:FUNCTION or MODULE:FUNCTION, which "
        "returns (model, batch) or (model, batch, loss) for fp8moe.torch.diagnose",
    )
    diagnose.add_argument("--device", choices=DEVICES, default="auto", help="of a model of transformers")
    diagnose.add_argument("--recipe", choices=("fp8_flow", "fp8_blockwise"), help="default: the layers' own")
    diagnose.add_argument("--save", choices=("bf16", "fp8"), help="default: the layers' own")
    diagnose.add_argument(
        "--text", type=Path, help="of a model of transformers (default: plays of Shakespeare)"
    )
    diagnose.add_argument("--tokens", type=_positive, help="of the text (default: 2048)")

    convert = verbs.add_parser(
        "convert", help="write a checkpoint with its experts in another published form"
    )
    convert.add_argument("source", type=Path, metavar="IN", help="folder of safetensors and config.json")
    convert.add_argument("target", type=Path, metavar="OUT", help="another folder; finished files are kept")
    convert.add_argument(
        "--to", required=True, choices=("block-fp8", "bf16", "mxfp8"), help="form of experts"
    )

    compile_ = verbs.add_parser("compile", help="compile every kernel, with or without a GPU")
    compile_.add_argument(
        "--arch",
        action="append",
        metavar="SM",
        help=f"an architecture such as sm_90a; repeatable (default: {' '.join(ARCHITECTURES)})",
    )

    bench = verbs.add_parser("bench", help="time operations, relative to this machine's copy bandwidth")
    bench.add_argument(
        "topics",
        nargs="*",
        help="topics (default: all; see --list)",
    )
    bench.add_argument("--list", action="store_true", help="list the topics and exit")
    bench.add_argument("--device", choices=DEVICES, default="auto")
    bench.add_argument("--quick", action="store_true", help="small shapes, few repetitions")
    bench.add_argument("--out", type=Path, help="append JSON lines to this file")
    bench.add_argument(
        "--allocator",
        choices=("cupy", "torch"),
        help="on CUDA: the allocator of the arrays (default: cupy's memory pool)",
    )
    for verb in (info, selftest, diagnose, compile_, bench):
        verb.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    return top


def main(argv: list[str] | None = None) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe too, each line when it is printed
    arguments = parser().parse_args(argv)
    verb = {
        "demo": _demo,
        "info": _info,
        "selftest": _selftest,
        "diagnose": _diagnose,
        "convert": _convert,
        "compile": _compile,
        "bench": _bench,
    }[arguments.verb]
    try:
        if arguments.verb in ("demo", "diagnose", "bench") and arguments.device == "cuda":
            _require_cuda()
        code = verb(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads any more; what is still buffered goes nowhere at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if arguments.verb == "info" else 128 + 13  # that of SIGPIPE, as other commands
    except (fp8moe.BackendUnavailable, NotImplementedError, OSError, ValueError) as error:
        print(f"fp8moe {arguments.verb}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        fix = "; pip install 'fp8moe[bench]'" if error.name in ("matplotlib", "tqdm") else ""
        print(f"fp8moe {arguments.verb}: {error}{fix}", file=sys.stderr)
        return 2


def _demo(arguments: argparse.Namespace) -> int:
    from fp8moe.demo import train
    from fp8moe.demo.model import Config

    device = _device(arguments.device)
    chosen = {
        name: getattr(arguments, name)
        for name in ("steps", "tokens", "layers", "experts", "seed", "seeds")
        if getattr(arguments, name) is not None
    }
    config = Config(**chosen)
    if config.experts < config.topk:
        raise ValueError(f"--experts: got {config.experts}; wanted at least top-{config.topk}")
    if config.tokens % config.context:
        raise ValueError(
            f"--tokens: got {config.tokens}; wanted a multiple of the context's {config.context}"
        )
    return train.main(config, device, arguments.text, arguments.out, check=not arguments.no_check)


def _info(arguments: argparse.Namespace) -> int:
    from fp8moe import info

    if arguments.memory:
        sizes = tuple(arguments.memory)
        rows = {name: asdict(of) for name, of in info.memory_rows(sizes).items()} if arguments.json else {}
        print(json.dumps(rows) if arguments.json else info.memory_report(sizes))
    elif arguments.json:
        print(json.dumps(info.state()))
    else:
        for line in info.lines():
            print(line)
    return 0


def _selftest(arguments: argparse.Namespace) -> int:
    from fp8moe import selftest

    return selftest.main(arguments.device, arguments.seed, arguments.json)


def _diagnose(arguments: argparse.Namespace) -> int:
    of_text = {"--device": arguments.device != "auto", "--text": arguments.text, "--tokens": arguments.tokens}
    if ":" in arguments.target and (given := [name for name, value in of_text.items() if value]):
        raise ValueError(
            f"{given[0]}: got it with a function, which returns a model and a batch on their device; wanted "
            "it with a model of transformers"
        )
    device = _device(arguments.device)
    command = importlib.import_module("fp8moe.adapters.torch.diagnose_command")
    of_model = arguments.text, arguments.tokens or 2048, arguments.json
    code: int = command.main(arguments.target, device, arguments.recipe, arguments.save, *of_model)
    return code


def _device(name: str) -> str:
    from fp8moe.info import cuda_is_ready

    return name if name != "auto" else "cuda" if cuda_is_ready() else "cpu"


def _convert(arguments: argparse.Namespace) -> int:
    from fp8moe.checkpoints.convert import convert

    convert(arguments.source, arguments.target, arguments.to)
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    from fp8moe.runtime.interop import require_cupy

    require_cupy("compile")  # which finds NVRTC
    from fp8moe.kernels_cuda import compile_all

    return compile_all.main(arguments.arch, arguments.json)


def _bench(arguments: argparse.Namespace) -> int:
    from fp8moe.bench import harness

    return harness.main(
        arguments.topics,
        arguments.device,
        arguments.quick,
        arguments.out,
        allocator=arguments.allocator,
        only_list=arguments.list,
        as_json=arguments.json,
    )


def _require_cuda() -> None:
    from fp8moe import info

    if (missing := info.missing_for_cuda()) is not None:
        raise fp8moe.BackendUnavailable(
            f"--device cuda: {missing}; wanted a CUDA device with its driver and CuPy (pip install "
            "'fp8moe[cuda13]'); see python -m fp8moe info"
        )


def _positive(text: str) -> int:
    return _integer(text, 1)


def _seed(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"got {text}; wanted an integer of {least} or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
