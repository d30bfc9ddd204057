"""Scenes for the Mamba-2 tests: a request's tokens, cut into steps; shared by the interpreter's and the GPU's tests."""
import torch
from vllm.zero_mismatch import mamba2_pieces, mamba2_replay, mamba2_scan

# H, P, G, N, Q: groups of four phases, two tiles a chunk, two tiles of channels a head, two heads a group.
SMALL = (8, 64, 4, 16, mamba2_replay.CHUNK)
NAN = float("nan")


def phases(sizes):
    """[(heads of a group, the row of position 0 in its first chunk)]."""
    heads, _, groups, _, chunk = sizes
    rows, of_group = mamba2_pieces.phases(chunk), heads // groups
    return [(slice(g * of_group, (g + 1) * of_group), rows[g % len(rows)]) for g in range(groups)]


def assert_state_is_right(step, tokens, state):
    """Each head's S against the fp64 recurrence over the tokens of its full chunks. state: [H, P, N]."""
    heads, head_dim, _, size, chunk = step.sizes
    zero = torch.zeros(heads, head_dim, size, device=state.device)
    for heads_here, phase in phases(step.sizes):
        end = max((tokens + phase) // chunk * chunk - phase, 0)
        want, magnitude = (mamba2_replay.recurrence(s, 0, end, zero)[1][heads_here] if end else zero[heads_here]
                           for s in (step, mamba2_replay.absolute(step)))
        error = (state[heads_here].double() - want).abs() / magnitude.clamp_min(1e-30)
        assert error.max() <= mamba2_replay.TOLERANCE, f"heads {heads_here}, {end} tokens: {error.max():.2e}"


def poison_from(cache, slot, tokens, sizes):
    """NaN in every row of the slot's ring at or after that of position `tokens`."""
    _, head_dim, groups, state, chunk = sizes
    for heads_here, phase in phases(sizes):
        row, of_group = (tokens + phase) % chunk, sizes[0] // groups
        cache.x[slot, row:, heads_here.start * head_dim:heads_here.stop * head_dim] = NAN
        cache.b[slot, row:, heads_here.start // of_group * state:heads_here.stop // of_group * state] = NAN
        cache.steps[slot, :, heads_here, row:] = NAN


def ints(rows, device):
    return torch.tensor(rows, dtype=torch.int32, device=device)


class Scene:
    """Requests with their own slots, run by steps; every page and output starts as NaN."""

    def __init__(self, sizes, lengths, device, seed=0):
        self.sizes, self.device, self.chunk = sizes, device, sizes[-1]
        self.steps = [mamba2_replay.random_step(n, sizes, device, seed + 7 * i) for i, n in enumerate(lengths)]
        shared = self.steps[0]  # one layer: the same A, D and bias for all
        self.steps = [mamba2_replay.replace(s, a=shared.a, d=shared.d, dt_bias=shared.dt_bias) for s in self.steps]
        self.cache = mamba2_replay.new_cache(len(lengths) + 1, sizes, torch.bfloat16, device, NAN)
        self.out = [s.x.new_full(s.x.shape, NAN) for s in self.steps]
        self.done = [0] * len(lengths)
        self.table = mamba2_pieces.DecodeTable(max(len(lengths), 1), self.chunk, device)

    def _gather(self, requests, counts):
        parts = [mamba2_replay.head(self.steps[r], self.done[r], self.done[r] + n)
                 for r, n in zip(requests, counts, strict=True)]
        # As in the engine, x, B and C are columns of one tensor and share its row stride.
        widths = [parts[0].x.shape[1], parts[0].b.shape[1], parts[0].c.shape[1]]
        xbc = torch.cat([torch.cat([p.x, p.b, p.c], 1) for p in parts])
        x, b, c = xbc.split(widths, 1)
        return mamba2_replay.replace(parts[0], x=x, b=b, c=c, dt=torch.cat([p.dt for p in parts]))

    def run(self, requests, counts, decode=False):
        step = self._gather(requests, counts)
        slots = ints([r + 1 for r in requests], self.device)
        out = step.x.new_full((sum(counts), step.x.shape[1]), NAN)
        if decode:
            lengths = ints([self.done[r] + 1 for r in requests], self.device)
            mamba2_replay.decode(step, self.cache, self.table.fill(lengths), slots, out)
        else:
            pieces = mamba2_pieces.prefill([self.done[r] for r in requests], counts, self.chunk,
                                           mamba2_scan.TILE, lambda rows: ints(rows, self.device))
            mamba2_replay.prefill(step, self.cache, pieces, slots, out)
        at = 0
        for request, count in zip(requests, counts, strict=True):
            self.out[request][self.done[request]:self.done[request] + count] = out[at:at + count]
            self.done[request] += count
            at += count

    def prefill(self, request, *cuts):
        for end in (*cuts, self.steps[request].x.shape[0]):
            if end > self.done[request]:
                self.run([request], [end - self.done[request]])

    def decode(self, request, until):
        while self.done[request] < until:
            self.run([request], [1], decode=True)

    def restart(self, request):
        """The request's tokens are computed again, as after a preemption; its slot keeps whatever was there."""
        self.done[request] = 0
        self.out[request].fill_(NAN)


def assert_same_bits(one, two, what):
    """Equal words, and no NaN on either side: a row that nobody wrote is no agreement."""
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    assert one.shape == two.shape, f"{what}: {tuple(one.shape)} against {tuple(two.shape)}"
    differ = one.contiguous().view(integer) != two.contiguous().view(integer)
    if differ.any():
        at = tuple(int(v) for v in differ.nonzero()[0])
        raise AssertionError(f"{what}: {int(differ.sum())} of {differ.numel()} words differ, first at {at}: "
                             f"{one[at].item()!r} against {two[at].item()!r}")
    assert not one.isnan().any(), f"{what}: {int(one.isnan().sum())} NaN"


def recurrent_update(step, tokens):
    """Upstream's decode arithmetic (selective_state_update, mamba_ssm.py): an fp32 recurrence over S, for contrast."""
    heads, head_dim, groups, size, _ = step.sizes
    x = step.x[:tokens].float().view(-1, heads, head_dim)
    b, c = (t[:tokens].float().view(-1, groups, size).repeat_interleave(heads // groups, 1) for t in (step.b, step.c))
    dt = torch.nn.functional.softplus(step.dt[:tokens].float() + step.dt_bias.float())
    state, ys = torch.zeros(heads, head_dim, size, device=x.device), []
    for t in range(tokens):
        state = state * torch.exp(dt[t] * step.a)[:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None]
        ys.append((state * c[t][:, None]).sum(-1) + step.d.float()[:, None] * x[t])
    return torch.stack(ys).flatten(1).to(torch.bfloat16)
