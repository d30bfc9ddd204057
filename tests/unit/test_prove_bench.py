"""Throughput and unchanged-ness on a fake engine: ratios of pairs, the operator table, what counts as noise."""
import fcntl
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from prove import bench, machine, recipe, record, ui, unchanged
from prove.engine import EngineError

FAKE = str(pathlib.Path(__file__).with_name("prove_fake.py"))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A recipe on the fake engine, whose site is the locked tree (or the pristine one, for an engine told so)."""
    for folder, text in (("site", "new"), ("pristine", "old")):
        path = tmp_path / folder / "vllm" / "m.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    sha = {text: hashlib.sha256(text.encode()).hexdigest() for text in ("old", "new")}
    lock = tmp_path / "patchset.lock"
    lock.write_text(json.dumps({"targets": {"vllm@0/all": {
        "digest": "d", "paths": {"vllm/m.py": {"before": sha["old"], "after": sha["new"]}}}}}))
    bind = record.bind
    monkeypatch.setattr(record, "bind", lambda folder: bind(folder, lock_path=lock))

    def make(fault=None, floor=0.88, **settings):
        return recipe.Recipe("fake", tmp_path, None, {
            "model": {"path": "m", "vocab": 97}, "engine": {"fault": fault},
            "bench": {"floor": floor, "operators": {"dense": "fp8_gemm", "attention": "mla"}, **settings},
            "precompile": {"script": "jobs.py"}})
    return make


def run_bench(made, tmp_path, **changes):
    return bench.bench(made, ui.UI(json_only=True), **{
        "concurrent": 4, "prompt_tokens": 5, "out_tokens": 500, "seconds": 1.0, "runs": 3, "turn": None,
        "out": tmp_path, "logs": tmp_path / "logs", "budget": 100.0,
        "env": {"FAKE_SITE": str(tmp_path / "site")}, "backend": FAKE, **changes})


def run_unchanged(made, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "Pair", pair_with_own_sites(tmp_path))
    monkeypatch.setattr(unchanged, "Pair", bench.Pair)
    return unchanged.unchanged(made, ui.UI(json_only=True), pristine=tmp_path / "pristine", tokens=100, concurrent=4,
                               out_tokens=10, runs=2, turn=None, out=tmp_path, logs=tmp_path / "logs", budget=100.0,
                               env={}, backend=FAKE)


def pair_with_own_sites(tmp_path):
    class OwnSites(bench.Pair):
        """The fake engine is told its site by a variable; the real one's site follows from PYTHONPATH."""
        def __init__(self, sides, *arguments, **named):
            sides = {name: (start, env | {"FAKE_SITE": str(tmp_path / ("pristine" if "PYTHONPATH" in env else "site"))})
                     for name, (start, env) in sides.items()}
            super().__init__(sides, *arguments, **named)
    return OwnSites


def test_the_ratio_is_of_pairs_and_the_loss_is_shared_out(made, tmp_path):
    data = run_bench(made(), tmp_path)
    assert data["ratio"] == pytest.approx(0.9) and data["pairs"] == pytest.approx([0.9] * 3) and data["passed"]
    assert [(r["operator"], r["off_us"], r["on_us"], r["share"]) for r in data["operators"]] == [
        ("attention", 50.0, 80.0, 1.0), ("dense", 100.0, 100.0, 0.0), ("other", 0.0, 0.0, 0.0)]
    assert [(r["side"], r["run"]) for r in data["rows"]] == [
        ("off", 0), ("on", 0), ("on", 1), ("off", 1), ("off", 2), ("on", 2)]


@pytest.mark.parametrize(("kernel", "operator"), [  # the names that the profiler gave on an H200
    ("fused_moe_kernel", "experts GEMM"),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, (deep_gemm::GemmType)1>", "experts GEMM"),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, (deep_gemm::GemmType)0>", "dense FP8 GEMM"),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162, &(c10::BFloat16", "experts activation"),
    ("_rank_kernel", "experts permute and combine"),
    ("_copy_kernel", "experts permute and combine"),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(", "other"),
    ("void smxx::decode::get_mla_metadata_kernel<true, true, true>(GetDecodeSchedMetaParams)", "decode attention"),
    ("_compute_swa_indices_and_lens_kernel", "decode attention"),
    ("_gather_kernel", "KV gather"),
    ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int)", "other"),
    ("_dsv4_topk_kernel", "router"),
    ("void vllm::moe::dsv4HashTopkSoftplusSqrt<int, int>(float const*, float*, int*, int, int)", "router"),
    ("topk_exact_1", "Top-K"),
    ("void vllm::filtered_topk::FilteredTopKUnifiedKernel<float, int, 4, 512u, false, false>(float const*)", "Top-K"),
    ("nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT", "other BF16 GEMM"),
    ("nvjet_sm90_tst_32x64_64x16_2x4_h_bz_splitK_TNN", "fp32 GEMM (router, compressor)"),
    ("nvjet_sm90_tss_64x64_64x13_2x1_v_bz_TNT", "fp32 GEMM (router, compressor)"),
    ("kernel_cutlass_device_kernel_tensorptrf32gmemalign16o1024i64div16i64div161", "compressor and cache writes"),
    ("void vllm::deepseek_v4_fused_ops::fusedDeepseekV4QNormRopeKVRopeQuantInsertKernel<c10::BFloat16, 64>",
     "compressor and cache writes"),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, 4>>",
     "sampling and logprobs"),
])  # fmt: skip
def test_a_kernel_of_deepseek_v4_counts_for_the_operator_that_launched_it(kernel, operator):
    operators = recipe.load("deepseek-v4", "tiny").data["bench"]["operators"]
    times = bench.by_operator([{"name": kernel, "us": 40.0}], 20, operators)
    assert {name: us for name, us in times.items() if us} == {operator: 2.0}


def test_what_kernels_do_not_fill_of_a_step_can_be_read_off(made, tmp_path):
    data = run_bench(made(), tmp_path)
    assert data["step_us"] == pytest.approx({"off": 4000.0, "on": 4444.444})  # 4 rows at 1,000 and 900 tokens a second
    assert data["kernels_us"] == {"off": 150.0, "on": 180.0}
    assert bench.step_us({"off": 0.0, "on": 8.0}, 4) == {"off": 0.0, "on": 500_000.0}


def test_a_run_samples_what_fits_on_the_slower_side(made, tmp_path):
    data = run_bench(made(), tmp_path)
    assert data["arguments"]["out_tokens"] == 225  # 900 tokens a second over 4 requests
    assert {row["tokens"] for row in data["rows"]} == {900}
    run = {"tokens": 4 * bench.WARM_TOKENS, "seconds": 1.24, "decode_tokens_per_second": 1000.0}  # 1 s of it prefill
    assert bench.fitted({"off": run}, 3.0, 5000) == 500
    assert bench.fitted({"off": run}, 3.0, 90) == 90 and bench.fitted({"off": run}, 0.1, 5000) == bench.WARM_TOKENS


def test_a_bench_cut_short_has_a_ratio_first_and_then_its_reasons(made, tmp_path, monkeypatch):
    def cut(*arguments):
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, "shares", cut)
    with pytest.raises(KeyboardInterrupt):
        run_bench(made(), tmp_path)
    data = json.loads((tmp_path / "bench-fake.json").read_text())
    assert data["pairs"] == pytest.approx([0.9] * 3) and not data["complete"] and not data["passed"]


def test_three_pairs_bear_a_verdict_though_more_were_wanted_and_two_do_not():
    assert bench.enough({"pairs": [0.9] * 3, "spread": 0.1}, 5) and bench.enough({"pairs": [0.9], "spread": 0.0}, 1)
    assert not bench.enough({"pairs": [0.9] * 2, "spread": 0.1}, 5)


def test_a_baseline_that_does_not_agree_with_itself_bears_no_verdict():
    assert not bench.enough({"pairs": [1.0] * 5, "spread": 0.59}, 5)


def test_pairs_stop_where_the_profile_would_not_fit(made, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PROFILE_SECONDS", 1000)
    data = run_bench(made(), tmp_path)
    assert len(data["pairs"]) == 1 and data["operators"] and not data["complete"]


def test_runs_are_timed_on_the_same_cores_and_say_how_busy_the_machine_was(made, tmp_path):
    data = run_bench(made(), tmp_path)
    assert data["host"]["cores"] == machine.cores() != []
    assert all(row["busy_cores"] >= 0 for row in data["rows"])
    code = "import os, sys\nsys.stdin.read()\nprint(sorted(os.sched_getaffinity(0)))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        machine.pin(child.pid, machine.cores()[:1])
        assert json.loads(child.communicate()[0]) == machine.cores()[:1]


def test_a_busy_core_is_counted():
    busy, until = machine.Busy(), time.process_time() + 0.5
    while time.process_time() < until:
        pass
    assert 0.3 < busy.mean() <= os.cpu_count() + 0.5


def test_nothing_is_timed_before_its_turn(made, tmp_path):
    lock, said = tmp_path / "turn", []
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(EngineError, match="no turn on the machine"):
            run_bench(made(), tmp_path, turn=lock, budget=3.0)
    assert json.loads((tmp_path / "bench-fake.json").read_text())["rows"] == []
    assert run_bench(made(), tmp_path, turn=lock)["passed"]
    with machine.turn(lock, said.append, time.monotonic() + 1):
        assert said == ["got its turn after 0 s"]


def test_both_arms_get_the_flags_of_the_bench_and_the_wanted_kernels_are_compiled(made, tmp_path):
    (tmp_path / "jobs.py").write_text("import pathlib\nHERE = pathlib.Path(__file__).parent\n"
                                      "JOBS = {n: (HERE / f'made-{n}').touch for n in ('mhc-1', 'mhc-2', 'gemm')}\n")
    data = run_bench(made(engine={"sizes": [256]}, precompile=["mhc-(1|2)"]), tmp_path)
    assert [e["flags"]["sizes"] for e in data["engines"].values()] == [[256], [256]]
    assert sorted(p.name for p in tmp_path.glob("made-*")) == ["made-mhc-1", "made-mhc-2"]


def test_an_engine_that_does_not_start_ends_the_other(made, tmp_path):
    with pytest.raises(EngineError, match="TP > 1"):
        run_bench(made("no start"), tmp_path)


def test_below_the_floor_does_not_pass(made, tmp_path):
    data = run_bench(made(floor=0.95), tmp_path)
    assert data["complete"] and not data["passed"]


def test_the_spread_of_the_baseline_is_reported():
    runs = {"off": [{"decode_tokens_per_second": v} for v in (100.0, 110.0, 90.0)],
            "on": [{"decode_tokens_per_second": v} for v in (99.0, 99.0, 99.0)]}
    found = bench.summary(runs)
    assert found["spread"] == pytest.approx(0.2) and found["ratio"] == pytest.approx(0.99) and found["off"] == 100.0


def test_an_unmatched_kernel_is_other_and_the_first_pattern_decides():
    kernels = [{"name": "a_gemm_b", "us": 6.0}, {"name": "gather", "us": 2.0}, {"name": "x", "us": 4.0}]
    assert bench.by_operator(kernels, 2, {"gemm": "gemm", "all": "ga|gemm"}) == {"gemm": 3.0, "all": 1.0, "other": 2.0}


def test_the_untouched_and_the_patched_engine_agree(made, tmp_path, monkeypatch):
    data = run_unchanged(made(), tmp_path, monkeypatch)
    assert data["complete"] and data["passed"] and data["rows"][0]["differing_words"] == 0
    assert {n: e["lock"]["state"] for n, e in data["engines"].items()} == {"off": "pristine", "on": "locked"}


def test_a_patch_that_changes_a_value_while_off_is_found(made, tmp_path, monkeypatch):
    data = run_unchanged(made("patched differs"), tmp_path, monkeypatch)
    assert not data["passed"] and data["rows"][0]["differing_words"] > 0


def test_the_values_are_compared_over_few_prompt_lengths():
    asked = unchanged.workload_of(2000, 97)
    assert {len(r.prompt) for r in asked} == set(unchanged.LENGTHS) and len({r.id for r in asked}) == len(asked) == 14
    assert sum(r.max_tokens for r in asked) == 1960


def test_what_the_wheel_answers_differently_each_time_is_not_held_against_the_patches(made, tmp_path, monkeypatch):
    data = run_unchanged(made("unstable"), tmp_path, monkeypatch)
    row = data["rows"][0]
    assert 0 < row["stable_requests"] < row["requests"] and row["equal"] and data["passed"]


def test_a_wheel_that_answers_most_requests_differently_each_time_shows_nothing(made, tmp_path, monkeypatch):
    monkeypatch.setattr(unchanged, "LENGTHS", (150, 600, 600))  # the fake is stable up to 200
    data = run_unchanged(made("unstable"), tmp_path, monkeypatch)
    row = data["rows"][0]
    assert (row["stable_requests"], row["requests"]) == (1, 3) and row["equal"]
    assert data["complete"] and not data["passed"]
