"""The case table and the workload: what is planned, in which order, over which lengths."""
import pytest

from prove import cases, workload


def test_each_engine_is_started_once_and_the_base_run_leads():
    planned = cases.plan(None)
    assert list(planned) == ["graph", "second", "eager"]
    assert planned["graph"][0].name == "base"
    assert sum(map(len, planned.values())) == len(cases.CASES)


def test_chosen_cases_bring_the_base_run_and_only_their_engines():
    planned = cases.plan(["twice"])
    assert {e: [c.name for c in cs] for e, cs in planned.items()} == {"graph": ["base", "twice"]}
    planned = cases.plan(["eager-engine"])
    assert {e: [c.name for c in cs] for e, cs in planned.items()} == {"graph": ["base"], "eager": ["eager-engine"]}


def test_a_small_contrast_starts_one_engine():
    assert list(cases.plan(["twice", "prefill-batched", "reversed"])) == ["graph"]


def test_an_unknown_case_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no such case: twic; there are: base, twice"):
        cases.plan(["twic"])


def test_every_case_names_a_known_engine_and_is_named_once():
    assert {c.engine for c in cases.CASES} == set(cases.ENGINES)
    assert len(cases.BY_NAME) == len(cases.CASES)


def test_the_default_workload_holds_what_must_be_shown():
    work = workload.build(20000, 8192)
    assert work.tokens >= 20000
    assert len(work.requests) >= max(cases.BATCH_SIZES)
    lengths = {len(r.prompt) for r in work.requests}
    assert lengths == set(workload.LENGTHS) and {127, 128, 129, 2047, 2048, 2049} <= lengths and max(lengths) > 4096
    assert all(0 <= t < 8192 for r in work.requests for t in r.prompt)
    assert all(len(r.prompt) + r.max_tokens + 8 <= 8192 for r in work.requests)
    assert any(r.temperature == 0 for r in work.requests) and len({r.seed for r in work.requests}) == len(work.requests)


def test_the_workload_is_a_pure_function_of_its_arguments():
    assert workload.build(3000, 97) == workload.build(3000, 97)


def test_a_small_workload_still_covers_window_block_and_top_k():
    work = workload.build(100, 8192)
    lengths = {len(r.prompt) for r in work.requests}
    assert len(work.requests) == workload.FEWEST_REQUESTS and {1, 129, 257, 2300, 4097} <= lengths
    assert all(r.max_tokens >= 8 for r in work.requests)
