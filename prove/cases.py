"""The comparisons of `prove rollout`, one function each, in one table.

A case asks the engine (`ctx.run`) and compares (`ctx.compare`) with what the base run answered, word by word. It also
says what must have happened for the comparison to mean anything (`ctx.require`): a graph case in which no graph
replayed, or a prefix case without a hit, is vacuous and fails.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

from prove.workload import Request, prompt

BATCH_SIZES = (4, 5, 15, 16, 17, 31, 32, 33, 64, 65, 128, 129)
EDGE_CHUNKS = (127, 129, 131, 255, 257, 511, 513)  # ends at 4k+-1 and 128k+-1, and across cache blocks
HEAD = 64           # tokens decoded by each request of such a batch
SUBSET = 34         # one of each prompt length
ALONE_HEAD = 96     # tokens decoded by each of them alone: a step a token, so all requests would take minutes
PIECES = 256        # tokens a step: the largest captured size, so that steps with prefill rows replay piecewise graphs
SHORT = (1, 2, 3, 5, 17, 63, 64, 65)  # prompts that grow across the small blocks of a sliding window
SHORTAGE = (0.8, 0.65, 0.5)           # of the blocks that requests took with room for all

ENGINES = {         # laid over the recipe's flags; each is a process, and they start and run side by side
    "graph": {},
    "second": {},
    "eager": {"enforce_eager": True},
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    what: str
    run: Callable
    engine: str = "graph"
    cost: float = 8.0       # seconds it takes at 20,000 tokens, to see whether it still fits a budget
    timeout: float = 240.0


def base(ctx) -> None:
    """Everything below is compared with this: all requests at once, graphs on, nothing cached."""
    ctx.base = ctx.run([r.message() for r in ctx.work.requests])
    for request in ctx.work.requests:
        ctx.figures.count(request.id, ctx.base.decoded(request.id), request.max_tokens)
    ctx.require(ctx.last["modes"].get("FULL", 0) > 0, "full graphs were replayed")


def twice(ctx) -> None:
    ctx.compare_decoded(ctx.run([r.message() for r in ctx.work.requests]))


def alone(ctx) -> None:
    """Graphs of one row, the base run's of many (Megatron PR #6521: those of one and two tokens were reduced apart)."""
    chosen = ctx.work.spread(SUBSET)
    messages = [r.message(max_tokens=min(ALONE_HEAD, r.max_tokens)) for r in chosen]
    ctx.compare_decoded(ctx.run(messages, one_by_one=True), chosen, head=ALONE_HEAD)
    ctx.require(ctx.last["decode_rows"] == [1], "every decode step had one row")


def reversed_order(ctx) -> None:
    ctx.compare_decoded(ctx.run([r.message() for r in reversed(ctx.work.requests)]))


def batch_sizes(ctx) -> None:
    seen = set()
    by_length = sorted(ctx.work.requests, key=lambda r: len(r.prompt))
    for size in BATCH_SIZES:
        if size > len(ctx.work.requests):
            break
        chosen = by_length[:size - 2] + by_length[-2:]  # mostly short, to decode soon; two see long contexts
        # Long enough that the first are still decoding when the last has been prefilled.
        answers = ctx.run([r.message(max_tokens=min(HEAD, r.max_tokens)) for r in chosen])
        ctx.compare_decoded(answers, chosen, head=HEAD)
        seen |= {size} & set(ctx.last["decode_rows"])
    ctx.require(seen == {s for s in BATCH_SIZES if s <= len(ctx.work.requests)}, "each batch size was decoded at once")


def _scored(ctx, requests, **how):
    return ctx.run([r.forced(ctx.base.decoded(r.id).tokens) for r in requests], **how)


def prefill_batched(ctx) -> None:
    ctx.scored = _scored(ctx, ctx.work.requests)
    ctx.compare_scored(ctx.scored)


def prefill_alone(ctx) -> None:
    answers = _scored(ctx, ctx.work.requests, one_by_one=True)
    ctx.compare_scored(answers)
    for request in ctx.work.requests if ctx.scored else ():
        ctx.compare_words(request.id, ctx.scored.prompt_words(request.id), answers.prompt_words(request.id))


def chunked(size: int):
    def run(ctx) -> None:
        ctx.compare_scored(_scored(ctx, ctx.work.requests, chunk=size))
        ctx.require(ctx.last["longest_chunk"] <= size, f"no chunk was longer than {size}")
    return run


def chunk_edges(ctx) -> None:
    for index, size in enumerate(EDGE_CHUNKS):  # each size takes every other length
        chosen = [r for r in ctx.work.spread(SUBSET)[index % 2::2] if len(r.prompt) + r.max_tokens > size]
        ctx.compare_scored(_scored(ctx, chosen, chunk=size, one_by_one=True), chosen)


def prefix_warm(ctx) -> None:
    """The same requests again, reading what the first pass left in the cache, greedy ones among them (vllm #40896: at
    temperature 0 the first answer was not that of the repeats)."""
    ctx.compare_decoded(ctx.run([r.message() for r in ctx.work.requests]))
    answers = ctx.run([r.message(read_cache=True) for r in ctx.work.requests], fresh=False)
    ctx.compare_decoded(answers)
    ctx.require_hits(answers, [r for r in ctx.work.requests if len(r.prompt) > ctx.block])


def prefix_turns(ctx) -> None:
    """Each answer becomes part of the next prompt: blocks written while decoding are read by a prefill. Then the same
    prompts in the other order (vllm #42019: with the cache on, their logprobs followed it)."""
    ctx.run([r.message() for r in ctx.work.requests])
    tail = [r.forced(ctx.base.decoded(r.id).tokens) | {"read_cache": True} for r in ctx.work.requests]
    for turn in (tail, tail[::-1]):
        answers = ctx.run(turn, fresh=False)
        for request in ctx.work.requests:
            ctx.compare_words(request.id, ctx.base.decoded(request.id).words, answers.prompt_words(request.id),
                              tail=True)
        hits = [len(answers.prompt_words(r.id)) > 0 for r in ctx.work.requests if answers.cached(r.id)]
        ctx.require(2 * sum(hits) >= len(hits), f"half of {len(hits)} hits scored what follows them ({sum(hits)} did)")
        ctx.require_hits(answers, [r for r in ctx.work.requests if len(r.prompt) > ctx.block])


def prefix_edges(ctx) -> None:
    """Prompts that leave a shared prefix around block edges, with suffixes around the window and the ratios (sglang
    #22819: answers changed where the cached prefix was exactly one block)."""
    trunk = prompt(4 * ctx.block + 200, ctx.work.vocab, seed=31)
    cuts = (ctx.block, ctx.block + 1, 2 * ctx.block - 1, 2 * ctx.block, 2 * ctx.block + 3, 3 * ctx.block + 129,
            4 * ctx.block)
    requests = [Request(f"e{cut}+{tail}", trunk[:cut] + prompt(tail, ctx.work.vocab, seed=cut * 1000 + tail),
                        max_tokens=16, seed=cut + tail)
                for cut in cuts for tail in (1, 2, 3, 5, 63, 65, 127, 128, 130)]
    cold = ctx.run([r.message() for r in requests])
    # One request a cut leaves its blocks first: by default a window's blocks are kept only near a prompt's end.
    ctx.run([Request(f"p{cut}", trunk[:cut], 1, seed=cut).message() for cut in cuts], one_by_one=True)
    warm = ctx.run([r.message(read_cache=True) for r in requests], fresh=False, one_by_one=True)
    for request in requests:
        ctx.compare(request.id, cold.decoded(request.id), warm.decoded(request.id))
    ctx.require_hits(warm, requests)


def eager_steps(ctx) -> None:
    """The engine that captured graphs, told to replay none."""
    ctx.compare_decoded(ctx.run([r.message() for r in ctx.work.requests], graphs="off"))
    ctx.require(set(ctx.last["modes"]) == {"NONE"}, "no step replayed a graph")


def mixed_steps(ctx) -> None:
    """Every other step eager: a request's cache is written by both."""
    ctx.compare_decoded(ctx.run([r.message() for r in ctx.work.requests], graphs="mixed"))
    ctx.require({"NONE", "FULL"} <= set(ctx.last["modes"]), "both graph and eager steps ran")


def eager_engine(ctx) -> None:
    """Another process, started with enforce_eager."""
    ctx.compare_decoded(ctx.run([r.message() for r in ctx.work.requests]))
    ctx.require(set(ctx.last["modes"]) <= {"NONE"}, "no step replayed a graph")


def eager_prefill(ctx) -> None:
    ctx.compare_scored(_scored(ctx, ctx.work.requests))
    ctx.require(set(ctx.last["modes"]) <= {"NONE"}, "no step replayed a graph")


def _joining(requests) -> list[dict]:
    """Short requests are decoding when longer prefills arrive, one after another (vllm #51902: FlashAttention 3 tiles a
    decode row by the longest prefill beside it)."""
    by_length = sorted(requests, key=lambda r: len(r.prompt))
    half = len(by_length) // 2
    return ([r.message(join=0) for r in by_length[:half]]
            + [r.message(join=5 + 3 * i) for i, r in enumerate(by_length[half:])])


def joined(ctx) -> None:
    ctx.compare_decoded(ctx.run(_joining(ctx.work.requests)))
    ctx.require(ctx.last["mixed_steps"] > 0, "some steps held both prefill and decode rows")


def joined_pieces(ctx) -> None:
    """The same in steps that fit a captured size: prefill and decode rows share a piecewise graph."""
    chosen = ctx.work.spread(SUBSET)
    ctx.compare_decoded(ctx.run(_joining(chosen), chunk=PIECES), chosen)
    ctx.require(ctx.last["mixed_modes"].get("PIECEWISE", 0) > 0, "piecewise graphs ran prefill and decode rows at once")


def preempted(ctx) -> None:
    """Everything running is thrown out three times and starts again from its tokens."""
    shortest = min(r.max_tokens for r in ctx.work.requests)
    ctx.compare_decoded(ctx.run([r.message() for r in ctx.work.requests],
                                preempt_at=[6 + shortest * part // 4 for part in (1, 2, 3)]))
    ctx.require(ctx.last["preemptions"] > 0, "requests were preempted")


def preempted_by_shortage(ctx) -> None:
    """The cache holds the prompts but not what they grow into, so the scheduler itself has to preempt.

    What grows depends on the model's blocks: short prompts run through many small ones, and prompts that end just below
    a whole block each take another of every kind soon after.
    """
    edges = [ctx.block - 1 - 2 * i for i in range(16)]
    preemptions = 0
    for name, lengths in (("short", SHORT * 4), ("edge", edges)):
        requests = [Request(f"{name}{i}", prompt(length, ctx.work.vocab, seed=500 + i), max_tokens=140, seed=i)
                    for i, length in enumerate(lengths)]
        roomy = ctx.run([r.message() for r in requests])
        enough = ctx.last["peak_blocks"]
        for part in SHORTAGE:
            tight = ctx.run([r.message() for r in requests], keep_blocks=int(part * enough))
            for request in requests:
                ctx.compare(request.id, roomy.decoded(request.id), tight.decoded(request.id))
            preemptions += ctx.last["preemptions"]
    ctx.require(preemptions > 0, f"requests were preempted with {SHORTAGE} of the blocks they need")


CASES = (
    Case("base", "all requests at once; nothing missing, no NaN", base),
    Case("twice", "the same run again", twice),
    Case("prefill-batched", "decode vs one batched prefill of prompt + answer", prefill_batched),
    Case("reversed", "order of arrival reversed", reversed_order),
    Case("prefill-alone", "decode vs single prefills, and those vs the batched", prefill_alone, cost=12),
    Case("eager-steps", "graph vs eager steps of one engine", eager_steps),
    Case("mixed-steps", "graph and eager steps alternating", mixed_steps),
    Case("joined", "short requests joined by long prefills mid-flight", joined),
    Case("joined-pieces", f"joined in steps of {PIECES} tokens, {SUBSET} requests", joined_pieces),
    Case("alone", f"batched vs alone: {ALONE_HEAD} tokens of each of {SUBSET} requests", alone, cost=20),
    Case("batch-sizes", "batches straddling 4, 16, 32, 64, 128", batch_sizes, cost=12),
    Case("chunked-100", "decode vs prefill in chunks of 100", chunked(100), cost=25),
    Case("other-process", "another process with the same flags", twice, engine="second"),
    Case("preempted", "everything preempted three times", preempted, engine="second", cost=15),
    Case("chunked-512", "decode vs prefill in chunks of 512", chunked(512), engine="second", cost=10),
    Case("chunked-2048", "decode vs prefill in chunks of 2048", chunked(2048), engine="second"),
    Case("prefix-warm", "prefix cache cold vs warm", prefix_warm, engine="second"),
    Case("prefix-turns", "prefill over blocks that decoding wrote, both orders", prefix_turns, engine="second"),
    Case("preempted-shortage", "preemption by a short cache", preempted_by_shortage, engine="second", cost=12),
    Case("prefix-edges", "hits at block edges, suffixes at odd positions", prefix_edges, engine="second", cost=12),
    Case("chunk-edges", "chunk ends at 4k+-1 and 128k+-1", chunk_edges, engine="second", cost=12),
    Case("eager-engine", "graph engine vs an engine started eager", eager_engine, engine="eager"),
    Case("eager-prefill", "prefill in the eager engine", eager_prefill, engine="eager"),
)
BY_NAME = {case.name: case for case in CASES}


def plan(names: list[str] | None) -> dict[str, list[Case]]:
    """Engine -> its cases. The base run leads on the first engine: all others compare with it."""
    if unknown := sorted(set(names or ()) - set(BY_NAME)):
        raise ValueError(f"no such case: {', '.join(unknown)}; there are: {', '.join(BY_NAME)}")
    chosen = [case for case in CASES if not names or case.name in names or case.name == "base"]
    engines: dict[str, list[Case]] = {}
    for case in chosen:
        engines.setdefault(case.engine, []).append(case)
    return engines
