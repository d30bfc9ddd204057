"""Mamba-2 chunk replay: correct against a sequential fp64 recurrence, and one set of bits however a request is cut."""
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from mamba2_cases import (
    NAN, SMALL, Scene, assert_same_bits, assert_state_is_right, ints, phases, poison_from, recurrent_update,
)
from vllm.zero_mismatch import mamba2_decay, mamba2_pieces, mamba2_replay, mamba2_scan

Q = SMALL[-1]
CPU = torch.device("cpu")
SHORT = Q + mamba2_scan.TILE + 1


def scene(*lengths, seed=0):
    return Scene(SMALL, lengths, CPU, seed)


@pytest.fixture(scope="module")
def whole():
    """One prefill of two chunks and a half."""
    made = scene(2 * Q + 19)
    made.prefill(0)
    return made


@pytest.fixture(scope="module")
def short():
    """One prefill of a chunk and a row more than a tile: enough for what goes token by token."""
    made = scene(SHORT)
    made.prefill(0)
    return made


def test_decay_is_within_tolerance_of_fp64(whole):
    step = whole.steps[0]
    total = 2 * Q + 19
    scratch = torch.full((4, 2, SMALL[0], Q), NAN)
    pieces = mamba2_pieces.prefill([0], [total], Q, mamba2_scan.TILE, lambda rows: ints(rows, CPU))
    mamba2_decay.decay(step, whole.cache, pieces.table, ints([1], CPU), scratch)
    for of_group, phase in phases(SMALL):
        for piece, row in enumerate(range(0, total + phase, Q)):
            begin, end = max(row - phase, 0), min(row + Q - phase, total)
            expected = mamba2_decay.reference(step.dt[begin:end], step.dt_bias, step.a)
            first = begin + phase - row
            for got, want in zip(scratch[piece, :, of_group, first:first + end - begin], expected, strict=True):
                error = ((got.T.double() - want[:, of_group]) / want[:, of_group]).abs().max()
                assert error <= mamba2_decay.TOLERANCE, f"piece {piece}: relative error {error:.2e}"


@pytest.mark.parametrize("raw", [-30.0, -12.0, -1.0, 0.0, 3.0, 19.9, 20.1, 80.0])
def test_softplus_keeps_small_steps(raw):
    step = mamba2_replay.random_step(1, SMALL, CPU)
    step = mamba2_replay.replace(step, dt=torch.full_like(step.dt, raw), dt_bias=torch.zeros_like(step.dt_bias))
    scratch = torch.full((1, 2, SMALL[0], Q), NAN)
    pieces = mamba2_pieces.prefill([0], [1], Q, mamba2_scan.TILE, lambda rows: ints(rows, CPU))
    cache = mamba2_replay.new_cache(2, SMALL, torch.bfloat16, CPU, NAN)
    mamba2_decay.decay(step, cache, pieces.table, ints([1], CPU), scratch)
    want = torch.nn.functional.softplus(step.dt.double(), threshold=700)
    for of_group, phase in phases(SMALL):
        got = scratch[0, 0, of_group, phase].double()
        assert ((got - want[0, of_group]) / want[0, of_group]).abs().max() <= mamba2_decay.TOLERANCE


def test_outputs_and_state_are_within_tolerance_of_the_fp64_recurrence(whole):
    step, total = whole.steps[0], 2 * Q + 19
    zero = torch.zeros(SMALL[0], SMALL[1], SMALL[3])
    want, _ = mamba2_replay.recurrence(step, 0, total, zero)
    size, _ = mamba2_replay.recurrence(mamba2_replay.absolute(step), 0, total, zero)
    error = (whole.out[0].double().view_as(want) - want).abs() / size
    assert error.max() <= mamba2_replay.TOLERANCE, f"{error.max():.2e}"
    assert_state_is_right(step, total, whole.cache.ssm[1])


def test_a_decay_that_is_gone_within_a_row_leaves_no_nan():
    """exp2 of what lies above the diagonal is infinite there, and 0 * inf is no zero."""
    made = Scene((8, 16, 8, 16, Q), (Q + 1,), CPU)
    step = made.steps[0]
    made.steps = [mamba2_replay.replace(step, dt=torch.full_like(step.dt, 30.0), a=torch.full_like(step.a, -20.0))]
    made.prefill(0)
    zero = torch.zeros(8, 16, 16)
    want, size = (mamba2_replay.recurrence(s, 0, Q + 1, zero)[0]
                  for s in (made.steps[0], mamba2_replay.absolute(made.steps[0])))
    error = (made.out[0].double().view_as(want) - want).abs() / size
    assert error.max() <= 2**-6, "two roundings to BF16, which the interpreter cuts off"


@pytest.mark.parametrize("cuts", [(1,), (15, 16, 17), (Q - 1,), (Q,), (Q + 1,), (7, Q + 5), (2 * Q - 1, 2 * Q + 1),
                                  (3, 6, 9), (Q, 2 * Q)])
def test_chunked_prefill_equals_prefill(whole, cuts):
    """vllm PR #54993: 800 of 900 rows differed when a prompt came in chunks of 100."""
    made = scene(2 * Q + 19)
    made.prefill(0, *cuts)
    assert_same_bits(made.out[0], whole.out[0], f"outputs, cuts at {cuts}")
    assert_same_bits(made.cache.ssm[1], whole.cache.ssm[1], f"state, cuts at {cuts}")


@pytest.mark.parametrize("prompt", [1, 2, 16, Q - 1, Q, Q + 1])
def test_decode_equals_prefill(short, prompt):
    """vllm #55524 and PR #54993: 299 of 299 decoded rows differed; every row r, the chunk's end, a one-token prompt."""
    made = scene(SHORT)
    made.run([0], [prompt])
    made.decode(0, SHORT)
    assert_same_bits(made.out[0], short.out[0], f"outputs after a prompt of {prompt}")
    assert_same_bits(made.cache.ssm[1], short.cache.ssm[1], f"state after a prompt of {prompt}")


def test_decode_reads_no_row_after_its_own(short):
    """Every row of the ring beyond t is NaN before token t is decoded."""
    made = scene(SHORT)
    made.run([0], [3])
    while made.done[0] < SHORT:
        poison_from(made.cache, 1, made.done[0], SMALL)
        made.run([0], [1], decode=True)
    assert_same_bits(made.out[0], short.out[0], "outputs with later rows poisoned")


@pytest.mark.parametrize("phase,kept", [(0, [0, 3]), (8, [0, 2, 3]), (24, [0, 2, 3])])
def test_pieces_of_a_request_end_chunks_but_for_the_last(phase, kept):
    """What the state's walk relies on: it reads the first piece and the last one's end, and knows the rest."""
    table, requests, tails = mamba2_pieces.cut([0, 5, Q - 1, 7], [2 * Q + 3, 0, Q + 1, 4], Q, phase)
    assert [request for request, *_ in requests] == [0, 2, 3] and [row[0] for row in tails] == kept
    assert [piece[7] for piece in table if piece[0] == 0] == [phase] + [0] * (requests[0][2] - 1)
    for request, begin, count, _ in requests:
        pieces = table[begin:begin + count]
        assert [piece[1] for piece in pieces] == list(range(begin, begin + count))
        assert all(piece[0] == request and piece[5] == piece[2] for piece in pieces)
        assert all(piece[3] == Q for piece in pieces[:-1]) and all(piece[2] == 0 for piece in pieces[1:])
        assert [piece[4] for piece in pieces[1:]] == [piece[4] + piece[3] - piece[2] for piece in pieces[:-1]]


def test_prefix_is_stable_when_the_rest_of_the_prompt_is_missing(whole):
    for end in (1, 5, 16, 17, Q - 1, Q, Q + 3):
        made = scene(2 * Q + 19)
        made.run([0], [end])
        assert_same_bits(made.out[0][:end], whole.out[0][:end], f"the first {end} rows")


def test_state_changes_at_the_end_of_a_chunk_only():
    """And no step ends the chunks of two groups."""
    made = scene(2 * Q)
    made.run([0], [3])
    assert not made.cache.ssm[1].any(), "a new request's state is zero until its first chunk is full"
    while made.done[0] < 2 * Q:
        before = made.cache.ssm[1].clone()
        made.decode(0, made.done[0] + 1)
        for of_group, phase in phases(SMALL):
            ended = (made.done[0] + phase) % Q == 0
            assert (made.cache.ssm[1, of_group] != before[of_group]).any() == ended
        assert (made.cache.ssm[1] != before).any((1, 2)).sum() <= SMALL[0] // SMALL[2]


def test_preempted_request_recomputes_the_same_bits(short):
    made = scene(SHORT)
    made.run([0], [5])
    made.decode(0, Q + 3)
    made.restart(0)
    made.run([0], [Q + 3])   # its prompt and what it had generated, as a prefill over a dirty slot
    made.decode(0, SHORT)
    assert_same_bits(made.out[0], short.out[0], "outputs after a preemption")


@pytest.mark.parametrize("hit", [Q, Q - 5])
def test_prefix_hit_equals_miss(whole, hit):
    """S and the ring are copied to another slot, which held NaN, at a block's boundary or anywhere."""
    made = scene(2 * Q + 19, 2 * Q + 19)
    made.run([0], [hit])
    made.steps[1] = made.steps[0]
    for page in (made.cache.ssm, made.cache.x, made.cache.b, made.cache.steps):
        page[2] = page[1]
    made.done[1] = hit
    made.run([1], [7])
    made.decode(1, 2 * Q + 19)
    assert_same_bits(made.out[1][hit:], whole.out[0][hit:], "outputs after a prefix hit")


def test_rows_keep_their_bits_in_any_batch(whole):
    """Neighbours of other lengths, in both orders, prefilled together and decoded together."""
    lengths = (2 * Q + 19, 5, Q, Q + 17)
    together = Scene(SMALL, lengths, CPU)
    together.run([1, 0, 3, 2], [3, Q + 2, 9, Q - 1])
    together.run([0, 3], [5, 20])
    together.run([2, 1], [1, 1], decode=True)
    for _ in range(2):
        together.run([3, 0], [1, 1], decode=True)
    for request in (0, 1, 2, 3):
        alone = Scene(SMALL, lengths, CPU)
        alone.run([request], [together.done[request]])
        done = together.done[request]
        assert_same_bits(together.out[request][:done], alone.out[request][:done], f"request {request}")


def test_padding_rows_of_a_graph_touch_nothing():
    made = scene(4)
    made.run([0], [2])
    before = [t.clone() for t in (made.cache.ssm, made.cache.x, made.cache.b, made.cache.steps)]
    step = made._gather([0], [2])
    out = step.x.new_full(step.x.shape, NAN)
    table = mamba2_pieces.DecodeTable(2, Q, CPU)
    mamba2_replay.decode(step, made.cache, table.fill(ints([0, 0], CPU)), ints([0, 0], CPU), out)
    after = (made.cache.ssm, made.cache.x, made.cache.b, made.cache.steps)
    for old, new in zip(before, after, strict=True):
        integer = {2: torch.int16, 4: torch.int32}[old.element_size()]
        assert torch.equal(old.view(integer), new.view(integer))
    assert out.isnan().all()


PACKED = (1, 20, Q + 9, Q - 4)  # one token, inside most chunks, over every end, to the end of the second group's first


def prefilled(step):
    """(outputs, states) of the packed sequences, which start at position 0."""
    cache = mamba2_replay.new_cache(len(PACKED) + 1, step.sizes, torch.bfloat16, CPU, NAN)
    pieces = mamba2_pieces.prefill([0] * len(PACKED), list(PACKED), Q, mamba2_scan.TILE, lambda rows: ints(rows, CPU))
    out = torch.full_like(step.x, NAN)
    mamba2_replay.prefill(step, cache, pieces, ints(range(1, len(PACKED) + 1), CPU), out)
    return out, cache.ssm[1:]


def share_of(step, rank, ranks):
    """The step of one rank's groups, as the trainer's ranks deal them out."""
    heads, head_dim, groups, state, chunk = step.sizes
    parts = {name: getattr(step, name).chunk(ranks, -1)[rank] for name in ("x", "b", "c", "dt", "a", "d", "dt_bias")}
    xbc = torch.cat([parts[name] for name in "xbc"], 1)  # one tensor, for its row stride
    x, b, c = xbc.split([parts[name].shape[1] for name in "xbc"], 1)
    return mamba2_replay.replace(step, **parts | {"x": x, "b": b, "c": c}, first_group=rank * groups // ranks,
                                 sizes=(heads // ranks, head_dim, groups // ranks, state, chunk))


@pytest.fixture(scope="module")
def every_group():
    step = mamba2_replay.random_step(sum(PACKED), (16, 16, 8, 16, Q), CPU, seed=5)
    return step, *prefilled(step)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_share_of_the_groups_has_the_bits_of_the_whole(every_group, ranks):
    """Context parallelism: a rank that cut its chunks by its own count of groups would have others."""
    step, outputs, states = every_group
    for rank in range(ranks):
        out, state = prefilled(share_of(step, rank, ranks))
        assert_same_bits(out, outputs.chunk(ranks, 1)[rank], f"outputs of rank {rank} of {ranks}")
        assert_same_bits(state, states.chunk(ranks, 1)[rank], f"states of rank {rank} of {ranks}")


def test_a_share_taken_for_the_first_groups_would_have_other_bits(every_group):
    step, outputs, _ = every_group
    out, _ = prefilled(mamba2_replay.replace(share_of(step, 1, 2), first_group=0))
    differ = (out.view(torch.int16) != outputs.chunk(2, 1)[1].view(torch.int16)).any(0)
    assert differ.view(8, 16).any(1).all(), "every head of the share"


@pytest.mark.parametrize("groups", [1, 3, 10])
def test_decode_equals_prefill_for_any_number_of_groups(groups):
    """Fewer than the cohorts, no divisor of them, and more, which come round to the first again. Three heads each."""
    sizes = (3 * groups, 16, groups, 16, Q)
    long, made = Scene(sizes, (Q + 6,), CPU), Scene(sizes, (Q + 6,), CPU)
    long.prefill(0)
    made.run([0], [Q - 9])
    made.decode(0, Q + 6)
    assert_same_bits(made.out[0], long.out[0], "outputs")
    assert_same_bits(made.cache.ssm[1], long.cache.ssm[1], "state")


def test_self_test_passes_and_finds_another_arithmetic(monkeypatch):
    mamba2_replay.self_test(SMALL, CPU)
    right = mamba2_replay.decode

    def off(step, cache, pieces, slots, out):
        right(step, cache, pieces, slots, out)
        out.mul_(1.01)
    monkeypatch.setattr(mamba2_replay, "decode", off)
    with pytest.raises(RuntimeError, match="differ between a prefill and the decode"):
        mamba2_replay.self_test(SMALL, CPU)


def test_upstream_recurrence_differs_from_the_scan(whole):
    """Counter-test: decoding by the recurrence, in fp32 as upstream does, leaves the prefill's bits at once."""
    recurrent = recurrent_update(whole.steps[0], 2 * Q + 19)
    differ = recurrent.view(torch.int16) != whole.out[0].view(torch.int16)
    assert differ.any(1).float().mean() > 0.9, "nearly every token should have a differing element"
    assert 0.02 < differ.float().mean() < 0.9


@pytest.mark.parametrize("sizes", [(4, 16, 3, 16, 32), (4, 24, 2, 16, 32), (4, 16, 2, 16, 128), (0, 16, 0, 16, 32)])
def test_unsupported_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="expected head_dim and state to be powers of two"):
        mamba2_replay.check_sizes(sizes)


def test_a_caller_with_another_chunk_is_refused():
    """A trainer that cut at the model's own chunk_size would compute other bits."""
    step = mamba2_replay.random_step(3, (*SMALL[:-1], 2 * Q), CPU)
    with pytest.raises(ValueError, match=f"chunks of {Q} rows whatever the model's chunk_size"):
        mamba2_replay.prefill(step, None, None, None, None)


@pytest.mark.parametrize("sizes", [[64, 64, 8, 128], [16, 64, 8, 128]])
def test_compiled_for_sm90_decode_moves_the_state_by_the_products_of_the_prefill(sizes):
    """What the interpreter cannot show: both kernels multiply the same tiles by the same instruction, from S and not
    from zero, and neither takes the asynchronous one (whose sums upstream found racy)."""
    program = pathlib.Path(__file__).with_name("compile_mamba2.py")
    run = subprocess.run([sys.executable, program, json.dumps(sizes)], capture_output=True, text=True,
                         env=os.environ | {"TRITON_INTERPRET": "0"})
    assert run.returncode == 0, run.stderr
    compiled = json.loads(run.stdout)
    assert compiled["scan"] == compiled["state"]
    assert len(compiled["scan"]["dots"]) == 1 and compiled["scan"]["from_zero"] == []
    assert compiled["scan"]["instructions"] == ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]


def test_a_step_that_ends_some_chunks_moves_those_states_alone():
    """Decode rows of one batch at the last row of a chunk, one before it, and a graph's padding; first group."""
    made = scene(Q, Q, 1)
    made.run([0, 1], [Q - 1, Q - 2])
    made.cache.ssm[0] = 1.0  # the null slot's
    before = made.cache.ssm.clone()
    step = made._gather([0, 1, 2], [1, 1, 1])
    table = mamba2_pieces.DecodeTable(3, Q, CPU)
    mamba2_replay.decode(step, made.cache, table.fill(ints([Q, Q - 1, 0], CPU)), ints([1, 2, 0], CPU),
                         torch.empty_like(step.x))
    assert (made.cache.ssm[1] != before[1]).any()
    assert torch.equal(made.cache.ssm[2], before[2]) and torch.equal(made.cache.ssm[0], before[0])
    alone = scene(Q)
    alone.prefill(0)
    assert_same_bits(made.cache.ssm[1], alone.cache.ssm[1], "the state of the chunk that ended")


def test_the_ring_adds_what_the_readme_says():
    shapes = mamba2_replay.ring_shapes((64, 64, 8, 128, mamba2_replay.CHUNK))
    dtypes = mamba2_replay.ring_dtypes(torch.bfloat16)
    ring = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    readme = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert f"{ring // 1024} KiB a request and layer beside\n{64 * 64 * 128 * 4 // 2**20} MiB of state" in readme
