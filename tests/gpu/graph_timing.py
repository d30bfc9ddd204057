"""The clock of the benchmarks: a CUDA graph of many calls, its replays timed by events."""
import statistics

import torch


def capture(calls, count):
    """A graph that makes `count` calls, going round the list of callables. Warm them up before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            calls[number % len(calls)]()
    return graph


def replay_us(graph, count) -> float:
    """One replay, in microseconds a call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def median_us(calls, count: int, replays: int) -> float:
    """Warm every callable up once, then the median of `replays` replays of `count` calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = capture(calls, count)
    return statistics.median(replay_us(graph, count) for _ in range(replays))
