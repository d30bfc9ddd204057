"""Pieces: what one step computes of each request, cut where its chunks of Q rows end.

The groups of heads are in C cohorts whose chunks end at different tokens: group g of the model is in cohort
j = g mod C, and position p is row r = (p + j Q / C) mod Q of its chunk. So no decode step ends the chunks of more than
one cohort: with as many groups as cohorts, each Q / C tokens the state of 1 / C of the heads moves, where chunks that
end together would move all of it in one step of Q. A cohort's first chunk is short, it begins at row j Q / C.

The group counts in the whole model, not on this rank: a rank of the trainer that computes a share of the groups gives
the bits of all of them together. Its `Step.first_group` says where the share begins; the tables have every cohort.

A piece is one request's part of one chunk of one cohort: rows [first, end) are new in this step, rows [begin, first)
came earlier and are in the request's ring, the chunk has no others. The Mamba-2 kernels see pieces only; a decode step
is a batch of pieces of one row. So the cut of a prompt into steps moves `first` and nothing else.

The tables are int32 and live on the device. Decode's is filled there from the sequence lengths, without a host sync,
at addresses that never change, so that a captured graph can read it.
"""
import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# A divisor of the chunk's rows. The models here have eight groups: each is a cohort of its own.
COHORTS = 8

# Columns of a piece.
REQUEST = tl.constexpr(0)   # row of the step's slot list
STATE = tl.constexpr(1)     # index of the state at the chunk's start in the step's scratch; -1: in the request's slot
FIRST = tl.constexpr(2)     # first new row
END = tl.constexpr(3)       # one past the last new row
TOKEN = tl.constexpr(4)     # the step's token that is row FIRST
IN_RING = tl.constexpr(5)   # rows [BEGIN, IN_RING) are read from the ring, the others from the step
KEEP = tl.constexpr(6)      # 1: write the new rows to the ring; 0: their dt and decay go to the step's scratch
BEGIN = tl.constexpr(7)     # the chunk's first row: 0 but in a cohort's first chunk
WIDTH = tl.constexpr(8)

# Columns of a request.
R_REQUEST = tl.constexpr(0)
R_PIECE = tl.constexpr(1)   # its first piece
R_COUNT = tl.constexpr(2)   # its number of pieces
R_FRESH = tl.constexpr(3)   # 1: starts at position 0, with a zero state
R_WIDTH = tl.constexpr(4)

NULL_SLOT = tl.constexpr(0)  # vLLM's NULL_BLOCK_ID: a row that pads a graph's batch
_FILL = 128


@dataclass(frozen=True)
class Pieces:
    """table: [pieces, C, 8] int32; of a prefill also requests: [requests, C, 4] int32, and tails: [pieces, C, 8], those
    whose rows the ring keeps. A cohort with fewer pieces than another has pieces without rows at the end."""

    table: torch.Tensor
    requests: torch.Tensor | None
    tails: torch.Tensor | None
    tiles: int  # most row tiles a piece can have: bounds the grid, programs beyond a piece's end leave at once


def phases(chunk: int) -> list[int]:
    """The row of position 0, by cohort."""
    return [j * chunk // COHORTS for j in range(COHORTS)]


def cut(computed: list[int], new: list[int], chunk: int,
        phase: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """A cohort's rows of (table, requests, tails) for requests of which `computed` tokens are done and `new` follow.

    phase: the row of position 0. A request's pieces lie one after another and all but the last end a chunk; one without
    new tokens has no row.
    """
    table, requests, tails = [], [], []
    token = 0
    for request, (done, count) in enumerate(zip(computed, new, strict=True)):
        begin, left = len(table), count
        if not count:
            continue
        while left:
            at = done + count - left + phase
            first = at % chunk
            rows = min(chunk - first, left)
            table.append([request, len(table), first, first + rows, token, first, 0, phase if at < chunk else 0])
            token, left = token + rows, left - rows
        requests.append([request, begin, len(table) - begin, int(done == 0)])
        if table[-1][3] < chunk:
            tails.append([*table[-1][:6], 1, table[-1][7]])
    return table, requests, tails


def _side_by_side(cohort_rows: list[list[list[int]]]) -> list[list[list[int]]]:
    """[C][pieces][8] -> [pieces][C][8], with pieces without rows where a cohort has fewer."""
    nothing = [0] * WIDTH.value
    return [list(row) for row in itertools.zip_longest(*cohort_rows, fillvalue=nothing)]


def prefill(computed: list[int], new: list[int], chunk: int, tile: int, to_device) -> Pieces:
    """`to_device(list)` makes an int32 tensor on the device."""
    table, requests, tails = zip(*(cut(computed, new, chunk, phase) for phase in phases(chunk)), strict=True)
    tiles = max((end - 1) // tile - first // tile + 1 for rows in table for _, _, first, end, *_ in rows)
    return Pieces(to_device(_side_by_side(table)), to_device(_side_by_side(requests)),
                  to_device(_side_by_side(tails)) if any(tails) else None, tiles)


@triton.jit(do_not_specialize=["count"])
def _fill_kernel(table_ptr, seq_lens_ptr, count, CHUNK: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = index < count * C
    phase = index % C * (CHUNK // C)
    # A padding row's length is 0; its slot is NULL_SLOT and no kernel looks further.
    at = tl.maximum(tl.load(seq_lens_ptr + index // C, mask=ok, other=1) - 1, 0) + phase
    first = at % CHUNK
    piece = table_ptr + index * WIDTH
    tl.store(piece + FIRST, first, mask=ok)
    tl.store(piece + END, first + 1, mask=ok)
    tl.store(piece + IN_RING, first + 1, mask=ok)
    tl.store(piece + BEGIN, tl.where(at < CHUNK, phase, 0), mask=ok)


class DecodeTable:
    """One row a request: row i of the step is token i, its ring is written before it is read."""

    def __init__(self, most: int, chunk: int, device) -> None:
        rows = torch.arange(most, dtype=torch.int32)[:, None]
        table = torch.zeros((most, COHORTS, WIDTH.value), dtype=torch.int32)
        table[..., REQUEST.value] = table[..., TOKEN.value] = rows
        table[..., STATE.value] = -1
        table[..., KEEP.value] = 1
        self.chunk, self.table = chunk, table.to(device)

    def fill(self, seq_lens: torch.Tensor) -> Pieces:
        """seq_lens: [requests] int32, contiguous, each counting the token that this step computes."""
        count = seq_lens.shape[0]
        if count > self.table.shape[0]:
            raise ValueError(f"Mamba-2 decode: found {count} requests, expected at most {self.table.shape[0]}. "
                             "Raise max_num_seqs.")
        if count:
            _fill_kernel[(triton.cdiv(count * COHORTS, _FILL),)](self.table, seq_lens, count, CHUNK=self.chunk,
                                                                 C=COHORTS, BLOCK=_FILL)
        return Pieces(self.table[:count], None, None, 1)
