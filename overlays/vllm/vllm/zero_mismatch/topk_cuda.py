"""The indexer's Top-K as one CUDA kernel a call, for GPUs with thread-block clusters (SM90 and later).

Invariant: the contract of `topk`, which says it in full: keys (score, position) are unique, the K largest are written
by descending position, -1 after them, so the row's own scores and length decide every bit. `topk.cu` counts integers
only, in shared memory, and reads nothing of other rows; how many CTAs share a row follows from shapes.

Compiled by NVRTC and launched through cuda.bindings, both of which torch's CUDA wheels require (2.11 and 2.14 do): a
serving image often has no nvcc. Once a machine: the cubin is kept under vLLM's cache folder, named by source, settings,
architecture and compiler. `prepare` loads it, so that a launch compiles, loads and allocates nothing, waits for nobody
and may be captured in a graph.

`supports` looks at the GPU alone, so every process on it takes the same kernel. What a GPU with clusters then lacks to
compile it is an error at start-up, never another kernel. The two give the same bits (tests/gpu/test_topk.py).

Any number of launches may run at once, on any streams: a row's state lives in the shared memory of its cluster, and
nothing in global memory is written but its own K words of `out`.
"""
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import struct
import tempfile

import torch

logger = logging.getLogger(__name__)

SOURCE = pathlib.Path(__file__).with_name("topk.cu")
MAX_WIDTH = 1 << 24  # a position has two digits of 12 bits

# THREADS   of a CTA.
# KEYS      a thread holds in registers: THREADS * KEYS scores are read once, a longer part once a pass.
# RESIDENT  CTAs an SM must be able to hold; with THREADS it limits the registers.
# PART      the fewest scores for which a row gets another CTA of its cluster.
# LISTED    the most scores of one bin that are listed in shared memory; more are counted once more.
# ROOM      the most CTAs of one launch of a decode step: one a multiprocessor. With more, CTAs of a cluster wait for
#           each other while their neighbours take their share of the memory's bandwidth: 64 rows of 131,072 scores
#           take 34, 44 and 49 us with clusters of 2, 4 and 8.
# None of these can change a result; they are for speed on an H200.
SETTINGS = {"THREADS": 512, "KEYS": 16, "RESIDENT": 2, "PART": 8192, "LISTED": 512}
ROOM = 132
CLUSTERS = (1, 2, 4, 8)

# The kernel's one argument, `Arguments` in topk.cu: packing it here costs the host a tenth of what ctypes' types do.
ARGUMENTS = struct.Struct("PPPPqqiii4x")


def _call(function, *args):
    status, *values = function(*args)
    if int(status):
        raise RuntimeError(f"{function.__name__} failed: {status!r}")
    return values[0] if len(values) == 1 else values


def _cache_folder() -> pathlib.Path:
    root = os.environ.get("VLLM_CACHE_ROOT") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "vllm")
    return pathlib.Path(root).expanduser() / "zero_mismatch"


def _compile(source: str, options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    program = _call(nvrtc.nvrtcCreateProgram, source.encode(), b"topk.cu", 0, [], [])
    status, = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if int(status):
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        raise RuntimeError(f"topk.cu does not compile with {' '.join(options)}:\n{log.decode(errors='replace')}")
    cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
    _call(nvrtc.nvrtcGetCUBIN, program, cubin)
    _call(nvrtc.nvrtcDestroyProgram, program)
    return bytes(cubin)


def _cubin(architecture: str, bf16: bool) -> bytes:
    """Compiled, or as an earlier process left it."""
    from cuda.bindings import nvrtc

    source = SOURCE.read_text()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", f"-DBF16={str(bf16).lower()}",
               *(f"-D{name}={value}" for name, value in SETTINGS.items())]
    version = _call(nvrtc.nvrtcVersion)
    digest = hashlib.sha256("\0".join([source, *options, str(version)]).encode()).hexdigest()
    kept = _cache_folder() / f"topk-{digest[:32]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    cubin = _compile(source, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as part:
            part.write(cubin)
        os.replace(part.name, kept)  # another process sees all of it or nothing
    except OSError:
        pass  # a read-only machine compiles in every process
    return cubin


@functools.cache
def supports(device: torch.device) -> bool:
    """Whether `topk.top_k` runs here: on every NVIDIA GPU with clusters, and on no other."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _kernels(index: int, bf16: bool) -> dict:
    """CTAs a row -> kernel, loaded on this GPU."""
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(index)
    with torch.cuda.device(index):
        torch.empty(1, device="cuda")  # makes the GPU's context this thread's, which the driver's functions expect
        library = _call(driver.cuLibraryLoadData, _cubin(f"sm_{major}{minor}", bf16), [], [], 0, [], [], 0)
        kernels = {}
        for cluster in CLUSTERS:
            kernel = _call(driver.cuLibraryGetKernel, library, f"topk_exact_{cluster}".encode())
            kernels[cluster] = _call(driver.cuKernelGetFunction, kernel)
    logger.info("Indexer Top-K: topk.cu for sm_%d%d, %s scores", major, minor, "bf16" if bf16 else "fp32")
    return kernels


def prepare(device: torch.device) -> None:
    """Compile and load, which a stream under capture refuses. DeepGEMM's scores are fp32, on SM100 also bf16."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        _kernels(index, False)
        if torch.cuda.get_device_capability(index) >= (10, 0):
            _kernels(index, True)
    except ImportError as error:
        raise RuntimeError(f"indexer Top-K: found no cuda.bindings ({error}), expected the one that torch "
                           f"{torch.__version__} requires, to compile topk.cu with NVRTC: pip install cuda-bindings of "
                           f"CUDA {torch.version.cuda}") from error


def _cluster(rows: int, width: int, split: bool) -> int:
    """CTAs a row: as many as its longest form can use, fewer where a decode step's rows alone fill the GPU."""
    return next(c for c in reversed(CLUSTERS)
                if c == 1 or (c // 2 * SETTINGS["PART"] < width and (not split or c * rows <= ROOM)))


def top_k(logits: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, starts: torch.Tensor | None = None,
          next_n: int = 1, split: bool = False) -> torch.Tensor:
    """As `topk.top_k`, which has checked the arguments, without a workspace."""
    rows, width = logits.shape
    if width > MAX_WIDTH:
        raise ValueError(f"indexer Top-K: found rows of {width} scores, expected at most {MAX_WIDTH}")
    if not rows:
        return out
    from cuda.bindings import driver

    index = logits.get_device()
    cluster = _cluster(rows, width, split)
    kernel = _kernels(index, logits.dtype == torch.bfloat16)[cluster]
    arguments = ctypes.create_string_buffer(ARGUMENTS.pack(
        logits.data_ptr(), 0 if starts is None else starts.data_ptr(), lengths.data_ptr(), out.data_ptr(),
        logits.stride(0), out.stride(0), width, out.shape[1], next_n))
    pointer = ctypes.c_void_p(ctypes.addressof(arguments))
    status, = driver.cuLaunchKernel(kernel, rows * cluster, 1, 1, SETTINGS["THREADS"], 1, 1, 0,
                                    torch.cuda.current_stream(index).cuda_stream, ctypes.addressof(pointer), 0)
    if int(status):
        raise RuntimeError(f"indexer Top-K: the launch failed: {status!r}")
    return out
