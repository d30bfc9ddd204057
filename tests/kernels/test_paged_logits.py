"""The lengths DeepGEMM's paged MQA logits get, seen through a model of its query pipeline.

The kernel needs an SM90. What matters here is who gets which query, and that is integer bookkeeping: `_queries_used`
restates it from DeepGEMM's sm90_paged_mqa_logits.cuh (the tasks of a CTA) and sm90_fp8_paged_mqa_logits.cuh (what the
loading thread fetches, what the math threads take for it). tests/gpu/test_deep_gemm.py runs the real kernel.
"""
import random

import pytest
import torch

from vllm.zero_mismatch.paged_logits import rows_with_work

SPLIT = 256  # entries of one task


def _tasks(lengths, ctas):
    """Per CTA its (row, split) tasks, in order: all tasks, dealt out evenly, the last CTAs taking one more."""
    tasks = [(row, split) for row, length in enumerate(lengths) for split in range(-(-length // SPLIT))]
    share, more = divmod(len(tasks), ctas)
    starts = [i * share + max(0, i - (ctas - more)) for i in range(ctas + 1)]
    return [tasks[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def _queries_used(lengths, ctas):
    """(row, row whose query it was multiplied with) of every task."""
    used = []
    for tasks in _tasks(lengths, ctas):
        if not tasks:
            continue
        last_row = tasks[-1][0]
        loaded = [tasks[0][0]]
        rows = list(dict.fromkeys(row for row, _ in tasks))
        loaded += [row + 1 for row in rows if row + 1 <= last_row]  # the prefetch: row + 1, whatever its length
        takes = dict(zip(rows, loaded, strict=False))               # the math threads take them in turn
        used += [(row, takes[row]) for row, _ in tasks]
    return used


def _lengths(seed):
    source = random.Random(seed)
    return [source.choice((0, 0, 1, 3, 64, 255, 256, 257, 700, 1250)) for _ in range(source.randrange(1, 300))]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ctas", [1, 7, 132])
def test_every_task_gets_the_query_of_its_own_row(seed, ctas):
    lengths = rows_with_work(torch.tensor(_lengths(seed), dtype=torch.int32)).tolist()
    assert all(row == query for row, query in _queries_used(lengths, ctas))


def test_without_it_the_row_after_an_empty_one_gets_the_wrong_query():
    assert _queries_used([64, 0, 575, 64], ctas=1) == [(0, 0), (2, 1), (2, 1), (2, 1), (3, 3)]


def test_only_empty_rows_change_their_length():
    lengths = torch.tensor([[0], [1], [575]], dtype=torch.int32)
    assert rows_with_work(lengths).tolist() == [[1], [1], [575]]
    assert lengths.tolist() == [[0], [1], [575]], "Top-K still needs the true lengths"
