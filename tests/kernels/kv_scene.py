"""Paged FP8 caches and decode steps for the KV gather's tests, on the CPU and on the GPU."""
import copy

import torch

from vllm.zero_mismatch.fp8_kv_gather import HEAD_DIM, Record, TopK, Window, gather, list_width

WINDOW = 128
# kind of layer -> (ratio, width of its top-k part)
LAYERS = {"sliding": (1, 0), "csa": (4, 128), "hca": (128, 128)}


def paged_cache(record: Record, pages: int, page_tokens: int, seed: int, device="cpu") -> torch.Tensor:
    """A cache of random finite records, its pages padded to a multiple of 576 bytes as upstream does."""
    generator = torch.Generator().manual_seed(seed)
    page_bytes = -(-page_tokens * record.bytes_per_token // 576) * 576
    flat = torch.randint(0, 256, (pages * page_bytes,), dtype=torch.uint8, generator=generator)
    rows = flat.as_strided((pages, page_tokens, record.data_bytes), (page_bytes, record.token_stride, 1))
    codes = rows[..., : record.fp8_dim]
    codes[codes & 0x7F == 0x7F] = 0x38  # no NaN codes: the writer never stores one
    rope = torch.randn(pages, page_tokens, HEAD_DIM - record.fp8_dim, generator=generator)
    rows[..., record.fp8_dim:] = rope.to(torch.bfloat16).view(torch.uint8)
    scales = flat.as_strided(
        (pages, page_tokens, record.scale_bytes), (page_bytes, record.scale_stride, 1), record.scale_base(page_tokens)
    )
    scales.copy_(torch.randint(117, 125, scales.shape, dtype=torch.uint8, generator=generator))
    shape = (pages, page_tokens, record.bytes_per_token)
    return flat.to(device).as_strided(shape, (page_bytes, record.bytes_per_token, 1))


class Scene:
    """One decode step: token t is at `positions[t]` of request `owner[t]` (each its own request by default)."""

    def __init__(
        self, record: Record, kind: str, positions: list[int], owner: list[int] | None = None,
        seed: int = 0, window_page: int = 64, device="cpu", top_k: int | None = None,
    ):
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.device, self.seed, self.record = device, seed, record
        self.ratio, width = LAYERS[kind]
        self.top_k = width if top_k is None else top_k
        owner = list(range(len(positions))) if owner is None else owner
        self.positions = torch.tensor(positions, device=device)
        self.request = torch.tensor(owner, dtype=torch.int32, device=device)
        self.width = list_width(self.top_k, WINDOW)
        self.window_table, cache = self._pages(max(positions) + 1, window_page, seed)
        self.window = Window(cache, *self._slots(positions, owner, window_page))
        self.topk = self._topk(positions) if self.top_k else None

    def _pages(self, tokens: int, page: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A shuffled block table [requests, pages] and the cache it points into."""
        requests, pages = int(self.request.max()) + 1, -(-tokens // page)
        table = torch.randperm(requests * pages, generator=self.generator).view(requests, -1).int()
        return table.to(self.device), paged_cache(self.record, requests * pages, page, seed, self.device)

    def _slots(self, positions, owner, page) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.window_table.cpu()
        slots = torch.full((len(positions), WINDOW), -1, dtype=torch.int32)
        for t, position in enumerate(positions):
            rows = torch.arange(max(0, position - WINDOW + 1), position + 1)
            slots[t, : len(rows)] = table[owner[t], rows // page] * page + rows % page
        return slots.to(self.device), (slots >= 0).sum(1).int().to(self.device)

    def _topk(self, positions) -> TopK:
        table, cache = self._pages(max(1, (max(positions) + 1) // self.ratio), max(1, 256 // self.ratio), self.seed + 2)
        local = torch.full((len(positions), self.top_k), -1, dtype=torch.int32)
        for t, position in enumerate(positions):
            rows = torch.randperm((position + 1) // self.ratio, generator=self.generator)[: self.top_k]
            local[t, : len(rows)] = rows.sort(descending=True).values
        # A ratio-128 layer lists every compressed row in ascending order.
        return TopK(cache, table, None if self.ratio == 128 else local.to(self.device), self.top_k, self.ratio)

    def step(self, tokens: slice = slice(None)):
        """The gather's arguments for some of the tokens: (positions, request, window, topk)."""
        window = Window(self.window.cache, self.window.slots[tokens], self.window.lengths[tokens])
        topk = self.topk
        if topk is not None and topk.local is not None:
            topk = TopK(topk.cache, topk.block_table, topk.local[tokens], topk.width, topk.ratio)
        return self.positions[tokens], self.request[tokens], window, topk

    def part(self, tokens: slice) -> "Scene":
        """Some of the tokens over the same caches."""
        part = copy.copy(self)
        part.positions, part.request, part.window, part.topk = self.step(tokens)
        return part

    def run(self, tokens: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, indices, lengths) of the gather; what it leaves alone keeps NaN and 12345."""
        count = len(self.positions[tokens])
        rows = torch.full((count, self.width, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=self.device)
        indices = torch.full((count, self.width), 12345, dtype=torch.int32, device=self.device)
        lengths = torch.full((count,), 12345, dtype=torch.int32, device=self.device)
        gather(rows, indices, lengths, *self.step(tokens))
        return rows, indices, lengths


def selected(rows: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    """The rows that each query attends to, in its order."""
    flat = rows.view(-1, HEAD_DIM)
    return [flat[indices[t, : int(lengths[t])].long()] for t in range(len(lengths))]


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    words = torch.int16 if got.element_size() == 2 else torch.int32
    differ = (got.view(words) != want.to(got.device).view(words)).nonzero()
    if len(differ):
        first = tuple(differ[0].tolist())
        raise AssertionError(f"{what}: {len(differ)} words differ, first {first}: {got[first]} != {want[first]}")
