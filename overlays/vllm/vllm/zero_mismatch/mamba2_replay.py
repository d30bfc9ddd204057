"""Mamba-2 by chunk replay: prefill, chunked prefill and decode as one arithmetic, that of the chunked scan.

Contract: Q is CHUNK, and a token is row r of a chunk of Q rows (`mamba2_pieces` says which, by its position and the
head's group alone). The output of row r is a function of the state S at the chunk's start and of the chunk's rows up
to r (`mamba2_scan`), the decay of row r of the decay of row r - 1 (`mamba2_decay`), and S changes when a chunk is full
(`mamba2_state`). Upstream decodes by a recurrence over S instead, which rounds otherwise from the first token on
(vllm #55524).

A request keeps, a layer: S at its chunk's start (fp32, in vLLM's own state slot) and a ring of the chunk's rows so far,
x and B after the convolution, dt and decay. Both together are the state after a token: a prefix-cache hit copies both.

Two launches a step when decoding (decay, and the scan, which ends full chunks), three in a prefill. CUDA-graph-safe:
a decode step reads lengths and slots on the device, and allocates nothing.
"""
from dataclasses import dataclass, replace

import torch
from vllm.zero_mismatch import mamba2_decay, mamba2_pieces, mamba2_scan, mamba2_state

# Rows of a chunk, for rollout and trainer alike. The scan is exact for any, so the model's chunk_size (128) need not be
# it. A decode step reads S and up to CHUNK rows, and of each head writes S once in CHUNK steps. For 64 heads x 64 x
# 128 that is, in MiB, 2.2 where no chunk ends and 2.4 where one group's of eight do, where upstream's recurrence moves
# 4 in every step; with 128 rows 2.7, 3.0, and a ring of 1.3 instead of 0.33. With 16 a prefill would write S twice as
# often.
CHUNK = 32


@dataclass(frozen=True)
class Step:
    """One step's inputs of a layer, after the convolution. x, b, c share a row stride.

    x: [tokens, H * P], b and c: [tokens, G * N], dt: [tokens, H] raw, all bf16 with unit last stride; a: [H] fp32
    (negative); d, dt_bias: [H]; sizes: (H, P, G, N, Q). first_group: which of the model's groups the first one here is,
    where these are a rank's share: their chunks end where those of that group do in the whole model.
    """

    x: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    dt: torch.Tensor
    a: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    sizes: tuple[int, int, int, int, int]
    first_group: int = 0


@dataclass(frozen=True)
class Cache:
    """A layer's pages, one a slot. Each may be a view of wider pages: only the slot stride is free.

    ssm: [slots, H, P, N] fp32; x: [slots, Q, H * P] bf16; b: [slots, Q, G * N] bf16; steps: [slots, 2, H, Q] fp32
    (dt, decay).
    """

    ssm: torch.Tensor
    x: torch.Tensor
    b: torch.Tensor
    steps: torch.Tensor


def ring_shapes(sizes: tuple[int, int, int, int, int]) -> tuple[tuple[int, ...], ...]:
    """What a slot holds beside the conv window and S: x, B, (dt, decay)."""
    heads, head_dim, groups, state, chunk = sizes
    return (chunk, heads * head_dim), (chunk, groups * state), (2, heads, chunk)


def ring_dtypes(activations: torch.dtype) -> tuple[torch.dtype, ...]:
    return activations, activations, torch.float32


def check_sizes(sizes: tuple[int, int, int, int, int]) -> None:
    heads, head_dim, groups, state, chunk = sizes
    powers = all(v >= 16 and v & (v - 1) == 0 for v in (head_dim, state))
    grouped = heads >= groups > 0 and heads % groups == 0
    if not powers or not grouped or state > 256 or chunk != CHUNK:
        raise ValueError(
            f"batch-invariant Mamba-2: found heads={heads}, head_dim={head_dim}, groups={groups}, state={state}, "
            f"chunk={chunk}; expected head_dim and state to be powers of two from 16 (state up to 256), heads a "
            f"multiple of groups, and chunks of {CHUNK} rows whatever the model's chunk_size. "
            "Unset VLLM_BATCH_INVARIANT for this model."
        )


def prefill_scratch(pieces: int, sizes: tuple[int, int, int, int, int], device) -> tuple[torch.Tensor, torch.Tensor]:
    """(dt and decay of each piece's rows, the state at each piece's start): 2 MiB a piece of 64 heads x 64 x 128."""
    heads, head_dim, _, state, chunk = sizes
    return (torch.empty((pieces, 2, heads, chunk), dtype=torch.float32, device=device),
            torch.empty((pieces, heads, head_dim, state), dtype=torch.float32, device=device))


def prefill(step: Step, cache: Cache, pieces: mamba2_pieces.Pieces, slots: torch.Tensor, out: torch.Tensor) -> None:
    """Rows of every piece; slots: [requests] int32; out: [tokens, H * P]. Leaves S and the ring for decode."""
    check_sizes(step.sizes)  # a caller with another chunk would get other bits
    scratch, states = prefill_scratch(pieces.table.shape[0], step.sizes, out.device)
    mamba2_decay.decay(step, cache, pieces.table, slots, scratch)
    mamba2_state.advance(step, cache, pieces, slots, scratch, states)
    mamba2_scan.scan(step, cache, pieces, slots, scratch, states, out)
    if pieces.tails is not None:  # last: the scan of a chunk begun earlier still read the ring
        mamba2_decay.decay(step, cache, pieces.tails, slots, scratch)


def decode(step: Step, cache: Cache, pieces: mamba2_pieces.Pieces, slots: torch.Tensor, out: torch.Tensor) -> None:
    """One row a request. Nothing is allocated: what a prefill has in scratch, decode has in the ring and the slot."""
    mamba2_decay.decay(step, cache, pieces.table, slots, cache.steps)
    mamba2_scan.scan(step, cache, pieces, slots, cache.steps, cache.ssm, out)


def recurrence(step: Step, begin: int, end: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [begin, end) of one request, one by one in fp64: (y [tokens, H, P], the state after them [H, P, N])."""
    heads, head_dim, groups, size, _ = step.sizes
    x = step.x[begin:end].double().view(-1, heads, head_dim)
    b, c = (t[begin:end].double().view(-1, groups, size) for t in (step.b, step.c))
    b, c = (t.repeat_interleave(heads // groups, 1) for t in (b, c))
    dt = torch.nn.functional.softplus(step.dt[begin:end].double() + step.dt_bias.double(), threshold=700)
    state, ys = state.double(), []
    for t in range(end - begin):
        state = state * torch.exp(dt[t] * step.a.double())[:, None, None]
        state = state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
        ys.append((state * c[t][:, None, :]).sum(-1) + step.d.double()[:, None] * x[t])
    return torch.stack(ys), state


def absolute(step: Step) -> Step:
    """The step of all magnitudes: its recurrence is the sum by which rounding is judged."""
    return replace(step, **{name: getattr(step, name).abs() for name in ("x", "b", "c", "d")})


# |kernel - recurrence| <= this * the recurrence of the magnitudes. BF16 rounds S, the weights of x, the scaled B and
# the result (2**-9 each); a row's path meets at most S once, one weight and one B: four roundings. The fp32 parts
# (decay, exp2, sums of 256 terms) stay under one more.
TOLERANCE = 5 * 2.0**-9


def new_cache(slots: int, sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device, fill: float) -> Cache:
    """A cache of its own, every page holding `fill`: NaN shows what is read before it is written."""
    heads, head_dim, _, state, _ = sizes
    shapes = ((heads, head_dim, state), *ring_shapes(sizes))
    dtypes = (torch.float32, *ring_dtypes(dtype))
    return Cache(*(torch.full((slots, *shape), fill, dtype=kind, device=device)
                   for shape, kind in zip(shapes, dtypes, strict=True)))


def random_step(tokens: int, sizes: tuple[int, int, int, int, int], device, seed: int = 0) -> Step:
    """Inputs of a layer's usual sizes: dt from 0.001 to 0.3, decays from slow to gone within a chunk."""
    heads, head_dim, groups, state, _ = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    parts = [heads * head_dim, groups * state, groups * state]
    x, b, c = normal(tokens, sum(parts)).to(device, torch.bfloat16).split(parts, dim=1)
    dt = normal(tokens, heads).to(device, torch.bfloat16)
    a = -torch.exp(normal(heads)).to(device)
    return Step(x, b, c, dt, a, normal(heads).to(device, torch.bfloat16),
                (normal(heads) - 4.0).to(device, torch.bfloat16), sizes)


def head(step: Step, begin: int, end: int) -> Step:
    return replace(step, **{name: getattr(step, name)[begin:end] for name in ("x", "b", "c", "dt")})


def self_test(sizes: tuple[int, int, int, int, int], device) -> None:
    """Raises unless, on this device, decode and a cut prefill give the bits of one prefill: two chunks of tokens.

    Cheap (about 110 launches); it also compiles all three kernels before memory is measured and graphs are captured.
    """
    chunk = sizes[-1]
    total = 2 * chunk  # decode then ends a chunk of every cohort
    step = random_step(total, sizes, device)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    ints = lambda rows: torch.tensor(rows, dtype=torch.int32, device=device)  # noqa: E731
    out = step.x.new_full((2, total, step.x.shape[1]), float("nan"))
    cache = new_cache(3, sizes, step.x.dtype, device, float("nan"))
    prefill(step, cache, mamba2_pieces.prefill([0], [total], chunk, mamba2_scan.TILE, ints), slots[:1], out[0])
    begin = chunk - 3  # a prefill that stops inside chunks, then one token a step, across their ends
    prefill(head(step, 0, begin), cache, mamba2_pieces.prefill([0], [begin], chunk, mamba2_scan.TILE, ints), slots[1:],
            out[1])
    table = mamba2_pieces.DecodeTable(1, chunk, device)
    for at in range(begin, total):
        decode(head(step, at, at + 1), cache, table.fill(ints([at + 1])), slots[1:], out[1, at:at + 1])
    for name, (one, two) in {"outputs": out, "states": cache.ssm[1:]}.items():
        differ = one.flatten().view(torch.uint8) != two.flatten().view(torch.uint8)
        if differ.any():
            raise RuntimeError(
                f"batch-invariant Mamba-2: {int(differ.sum())} of {differ.numel()} bytes of the {name} differ between "
                "a prefill and the decode of the same tokens on this device; expected none. Report the GPU and the "
                "Triton version, and unset VLLM_BATCH_INVARIANT."
            )
