"""Throughput and unchanged-ness on a fake engine: the ratio, the operator table, what passes."""
import dataclasses
import fcntl
import hashlib
import json
import math
import pathlib
import time

import pytest

from prove import bench, blocks, machine, recipe, record, together, ui, unchanged, workload
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
    monkeypatch.setattr(machine, "allowed", lambda: math.inf)  # tests run beside each other
    monkeypatch.setattr(machine, "GLANCE", 0.001)

    def make(fault=None, floor=0.88, **settings):
        return recipe.Recipe("fake", tmp_path, None, {
            "model": {"path": "m", "vocab": 97}, "engine": {"fault": fault},
            "bench": {"floor": floor, "operators": {"dense": "fp8_gemm", "attention": "mla"}, **settings},
            "precompile": {"script": "jobs.py"}})
    return make


def run_bench(made, tmp_path, **changes):
    return bench.bench(made, ui.UI(json_only=True), **{
        "concurrent": 4, "prompt_tokens": 5, "out_tokens": 1200, "seconds": 1.0, "turn": None,
        "out": tmp_path, "logs": tmp_path / "logs", "budget": 100.0,
        "env": {"FAKE_SITE": str(tmp_path / "site")}, "backend": FAKE, **changes})


def run_unchanged(made, tmp_path, monkeypatch):
    def own_sites(parts, *arguments, **named):
        """The fake engine is told its site by a variable; the real one's site follows from PYTHONPATH."""
        return together.started({name: dataclasses.replace(part, environment=part.environment | {
            "FAKE_SITE": str(tmp_path / ("pristine" if "PYTHONPATH" in part.environment else "site"))})
            for name, part in parts.items()}, *arguments, **named)
    monkeypatch.setattr(unchanged, "started", own_sites)
    return unchanged.unchanged(made, ui.UI(json_only=True), pristine=tmp_path / "pristine", tokens=100, concurrent=4,
                               out_tokens=1200, turn=None, out=tmp_path, logs=tmp_path / "logs", budget=100.0,
                               env={}, backend=FAKE)


def test_the_ratio_is_of_blocks_and_the_loss_is_shared_out(made, tmp_path):
    data = run_bench(made(), tmp_path)
    assert data["ratio"] == pytest.approx(0.9) and data["pairs"] == pytest.approx([0.9] * 5) and data["passed"]
    assert data["off"] == pytest.approx(1000) and data["on"] == pytest.approx(900) and data["noise"] == 0
    assert [(r["operator"], r["off_us"], r["on_us"], r["share"]) for r in data["operators"]] == [
        ("attention", 50.0, 80.0, 1.0), ("dense", 100.0, 100.0, 0.0), ("other", 0.0, 0.0, 0.0)]
    assert [r["side"] for r in data["rows"][:2]] == ["off", "on"]
    assert [r["first"] for r in data["rows"][2:]] == ["off", "on"] * 7 + ["off"]


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
    assert_counts_for("deepseek-v4", kernel, operator)


@pytest.mark.parametrize(("kernel", "operator"), [
    ("_selective_scan_update_kernel", "Mamba-2 scan"),
    ("_scan_kernel", "Mamba-2 scan"),
    ("_decay_kernel", "Mamba-2 decay"),
    ("_causal_conv1d_update_kernel", "Mamba-2 convolution"),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm",
     "attention"),
    ("void flash::prepare_varlen_num_blocks_kernel<16, false>(int, int, int, int const*)", "attention"),
    ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>",
     "attention"),
    ("kernel_unified_attention", "attention"),
    ("nvjet_sm90_tst_64x24_64x16_2x4_h_bz_TNT", "other BF16 GEMM"),
    ("matmul_kernel_persistent", "other BF16 GEMM"),
    ("nvjet_sm90_tss_8x64_64x16_2x4_h_bz_TNN", "fp32 GEMM (router)"),
    ("_mm_fp32_kernel", "fp32 GEMM (router)"),
    ("void vllm::moe::single_group_topk::detail::single_group_topk_warp_kernel<float, float, int>", "router"),
    ("fused_moe_kernel", "experts GEMM"),
    ("void vllm::activation_kernel<c10::BFloat16, &(c10::BFloat16 vllm::relu_squared_kernel<c10::BFloat16>",
     "experts permute and combine"),
    ("triton_poi_fused_pow_relu_0", "experts permute and combine"),
    ("triton_red_fused__to_copy_mean_mul_pow_silu_view_0", "gated norm"),
    ("triton_poi_fused__to_copy_add_mean_mul_pow_rsqrt_silu_view_1", "gated norm"),
    ("_layer_norm_fwd_1pass_kernel", "gated norm"),
    ("triton_per_fused_fused_add_rms_norm_2", "norms and quantisation"),
    ("_gumbel_sample_kernel", "sampling and logprobs"),
    ("precopy_mamba_align_fused_kernel", "other"),
])  # fmt: skip
def test_a_kernel_of_nemotron_h_counts_for_the_operator_that_launched_it(kernel, operator):
    assert_counts_for("nemotron-3.5-lightning", kernel, operator)


def assert_counts_for(name, kernel, operator):
    operators = recipe.load(name, "tiny").data["bench"]["operators"]
    times = bench.by_operator([{"name": kernel, "us": 40.0}], 20, operators)
    assert {name: us for name, us in times.items() if us} == {operator: 2.0}


def test_what_kernels_do_not_fill_of_a_step_can_be_read_off(made, tmp_path):
    data = run_bench(made(), tmp_path)
    assert data["step_us"] == pytest.approx({"off": 4000.0, "on": 4444.444})  # 4 rows at 1,000 and 900 tokens a second
    assert data["kernels_us"] == {"off": 150.0, "on": 180.0}
    assert bench.step_us({"off": 0.0, "on": 8.0}, 4) == {"off": 0.0, "on": 500_000.0}


def test_requests_sample_what_the_command_has_time_for_and_no_fewer_than_a_verdict_needs(made, tmp_path):
    data = run_bench(made(), tmp_path, out_tokens=3000, seconds=1.0)
    assert data["arguments"]["out_tokens"] == blocks.tokens_of(15) == 1150 and data["quads"] == 15
    assert 0 < data["took"] < 60 and data["arguments"]["most_out_tokens"] == 3000
    tried = {"off": {"decode_tokens_per_second": 16_000.0}, "on": {"decode_tokens_per_second": 16_000.0}}
    assert bench.fitted(tried, 256, 100.0, 3000) == 40 == blocks.quads_in(3000)  # 16 ms a step: 96 s
    assert bench.fitted(tried, 256, 48.0, 3000) == 20 and bench.fitted(tried, 256, -5.0, 3000) == 15
    assert bench.fitted(tried, 256, 1000.0, 3000) == 40


@pytest.mark.parametrize("command", ["bench", "unchanged"])
def test_fewer_tokens_than_a_verdict_needs_are_refused_before_anything_starts(command, made, tmp_path):
    more = {"prompt_tokens": 5, "seconds": 1.0} if command == "bench" else {"pristine": tmp_path, "tokens": 100}
    with pytest.raises(ValueError, match="--out-tokens 1149: a verdict needs 15 quads of blocks, 1150 tokens"):
        getattr({"bench": bench, "unchanged": unchanged}[command], command)(
            made(), ui.UI(json_only=True), concurrent=4, out_tokens=1149, turn=None, out=tmp_path / "out",
            logs=tmp_path, budget=9.0, env={}, backend=FAKE, **more)
    assert not (tmp_path / "out").exists()


def test_a_bench_of_another_tree_than_the_lock_names_is_incomplete(made, tmp_path):
    (tmp_path / "site" / "vllm" / "m.py").write_text("edited")
    data = run_bench(made(), tmp_path)
    assert data["ratio"] == pytest.approx(0.9) and not data["complete"] and not data["passed"]


def test_a_bench_cut_short_has_a_ratio_first_and_then_its_reasons(made, tmp_path, monkeypatch):
    def cut(*arguments):
        raise KeyboardInterrupt
    monkeypatch.setattr(bench, "shares", cut)
    with pytest.raises(KeyboardInterrupt):
        run_bench(made(), tmp_path)
    data = json.loads((tmp_path / "bench-fake.json").read_text())
    assert data["pairs"] == pytest.approx([0.9] * 5) and not data["complete"] and not data["passed"]


def test_a_bench_whose_profile_saw_no_step_is_incomplete(made, tmp_path):
    data = run_bench(made("no profile"), tmp_path)
    assert data["ratio"] >= data["floor"] and not data["complete"] and not data["passed"]


def test_quads_stop_where_the_profile_would_not_fit(made, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PROFILE_SECONDS", 1000)
    data = run_bench(made(), tmp_path)
    assert data["quads"] == 0 and "out of time" in data["stopped"] and data["operators"] and not data["complete"]


def test_the_cores_are_in_the_record(made, tmp_path):
    assert run_bench(made(), tmp_path)["host"]["cores"] == machine.cores() != []


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


def test_below_the_floor_does_not_pass(made, tmp_path):
    data = run_bench(made(floor=0.95), tmp_path)
    assert data["complete"] and not data["passed"]


def test_an_unmatched_kernel_is_other_and_the_first_pattern_decides():
    kernels = [{"name": "a_gemm_b", "us": 6.0}, {"name": "gather", "us": 2.0}, {"name": "x", "us": 4.0}]
    assert bench.by_operator(kernels, 2, {"gemm": "gemm", "all": "ga|gemm"}) == {"gemm": 3.0, "all": 1.0, "other": 2.0}


def test_the_untouched_and_the_patched_engine_agree(made, tmp_path, monkeypatch):
    data = run_unchanged(made(), tmp_path, monkeypatch)
    assert data["complete"] and data["passed"] and data["rows"][0]["differing_words"] == 0
    assert {n: e["lock"]["state"] for n, e in data["engines"].items()} == {"off": "pristine", "on": "locked"}


def test_a_wheel_that_was_patched_too_is_no_wheel(made, tmp_path, monkeypatch):
    (tmp_path / "pristine" / "vllm" / "m.py").write_text("new")
    data = run_unchanged(made(), tmp_path, monkeypatch)
    assert data["rows"][0]["equal"] and not data["complete"] and not data["passed"]


def test_a_patch_that_changes_a_value_while_off_is_found(made, tmp_path, monkeypatch):
    data = run_unchanged(made("patched differs"), tmp_path, monkeypatch)
    assert not data["passed"] and data["rows"][0]["differing_words"] > 0


def test_the_values_are_compared_over_few_prompt_lengths():
    work = workload.build(2000, 97, unchanged.LENGTHS)
    assert {len(r.prompt) for r in work.requests} == set(unchanged.LENGTHS) and len(work.requests) == 14
    assert work.tokens >= 2000


def test_what_the_wheel_answers_differently_each_time_is_not_held_against_the_patches(made, tmp_path, monkeypatch):
    data = run_unchanged(made("unstable"), tmp_path, monkeypatch)
    row = data["rows"][0]
    assert 0 < row["stable_requests"] < row["requests"] and row["equal"] and data["passed"]


def test_a_wheel_that_answers_most_requests_differently_each_time_shows_nothing(made, tmp_path, monkeypatch):
    monkeypatch.setattr(unchanged, "LENGTHS", (150, 600, 600))  # the fake is stable up to 200
    data = run_unchanged(made("unstable"), tmp_path, monkeypatch)
    row = data["rows"][0]
    assert (row["stable_requests"], row["requests"]) == (4, 12) and row["equal"]
    assert data["complete"] and not data["passed"]
