"""Evidence that passed was made with the lock of today; anything else is a claim about another tree."""
import json
import pathlib
import re
import statistics
from collections import Counter

import pytest

from prove import record

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_no_record_in_the_repository_is_stale():
    stale = record.stale(ROOT / "evidence", ROOT / "patchset.lock")
    assert not stale, "run these again: " + "; ".join(f"{name}: {why}" for name, why in stale.items())


@pytest.fixture(scope="module")
def readme():
    """README and the page of its notes, which quote the records together."""
    return (ROOT / "README.md").read_text() + (ROOT / "docs/measured.md").read_text()


@pytest.fixture(scope="module")
def found():
    """Of the stack that the table names; its raw figures of kernels too."""
    return {path.stem: json.loads(path.read_text()) for folder in (".", "kernels")
            for path in (ROOT / "evidence" / folder).glob("*.json")}


@pytest.fixture(scope="module")
def newer():
    """The same of the stack that the wheel asks for."""
    return {path.stem: json.loads(path.read_text()) for path in (ROOT / "evidence" / "torch-2.14").rglob("*.json")}


@pytest.fixture(scope="module")
def prose(readme):
    """README as one line: a quoted figure may stand on either side of a line's end."""
    return " ".join(readme.split())


def extremes(values, form=".2f"):
    return f"{min(values):{form}} to {max(values):{form}}"


def cell(readme, record_name):
    """README's text of the table cell that links to the record."""
    (text,) = [part for line in readme.splitlines() for part in line.split(" | ")
               if line.startswith("|") and f"(evidence/{record_name}.json)" in part]
    return text


def differing(part):
    """Every count of differing words below a part of a record; two GPUs beside one after an update is no claim."""
    parts = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for key, inner in parts:
        if key == "differing_words":
            yield inner
        elif key != "beside_lone":
            yield from differing(inner)


def test_a_zero_in_the_table_is_every_comparison_of_its_record(readme, found):
    zeros = re.findall(r"\[(?:0|lag \d)\]\(evidence/([^)/]+)\.json\)", readme)
    assert {name.split("-")[0] for name in zeros} == {"rollout", "served", "train", "cp", "async"}
    for name in zeros:
        assert all(set(differing(row)) == {0} for row in found[name]["rows"] if row["case"] != "gradients"), name


def test_the_readme_quotes_the_curves(readme, found):
    for name in ("nemotron-3.5-lightning-tiny", "nemotron-3.5-lightning-tiny-quantised", "deepseek-v4-tiny-train"):
        curve = found[f"train-{name}"]["curve"]
        assert f"reward {curve[0]:.2f} to {curve[-1]:.2f}" in cell(readme, f"train-{name}")


def within_and_caught(data):
    """Of a record of gradients, as a cell says it: parameters within their bounds, planted faults caught."""
    rows = [row for row in data["rows"] if row["parameter"] != "logprobs" and "operands" not in row]
    caught = sum(max(data["caught"][fault], data["caught_at_operands"][fault]) > 0 for fault in data["caught"])
    return f"[{sum(row['within'] for row in rows)} of {len(rows)}; {caught} of {len(data['caught'])}]"


def kernels_ratio(bench):
    return bench["kernels_us"]["off"] / bench["kernels_us"]["on"]


def test_the_readme_quotes_the_gradients(readme, found):
    for name in ("nemotron-3.5-lightning-tiny", "nemotron-3.5-lightning-tiny-quantised", "deepseek-v4-tiny-train"):
        assert within_and_caught(found[f"grad-{name}"]) in cell(readme, f"grad-{name}")


def test_the_readme_quotes_the_speeds(readme, found):
    for name, floor in (("deepseek-v4", 0.88), ("nemotron-3.5-lightning", 0.85)):
        bench, unchanged = found[f"bench-{name}-tiny"], found[f"unchanged-{name}-tiny"]
        assert bench["floor"] == floor
        assert (f"[{bench['ratio']:.2f}](evidence/bench-{name}-tiny.json) (floor {floor}); "
                f"kernels {kernels_ratio(bench):.2f}" in cell(readme, f"bench-{name}-tiny"))
        values = unchanged["rows"][0]
        assert (f"[{values['differing_words']} of {values['tokens']:,} words, speed {unchanged['speed']['ratio']:.2f}]"
                in cell(readme, f"unchanged-{name}-tiny"))
        assert f"{unchanged['speed']['noise']:.0%}" in readme


def turns(data):
    """The throughput on over off in each turn, from the seconds of its blocks."""
    def step(blocks):
        return sum(block["seconds"] / block["steps"] for block in blocks)
    return [step(row["off"]) / step(row["on"]) for row in data["rows"] if "quad" in row]


def test_the_readme_quotes_how_far_the_speeds_spread(prose, found):
    v4, nemotron = (found[f"bench-{name}-tiny"] for name in ("deepseek-v4", "nemotron-3.5-lightning"))
    assert (f"Medians of {len(turns(v4))} turns of both engines on the same cores, {v4['arguments']['prompt_tokens']} "
            f"tokens in, {v4['arguments']['out_tokens']:,} out; over a fifth of the turns {extremes(v4['pairs'])} and "
            f"{extremes(nemotron['pairs'])}, of all time {v4['plain']:.2f} and {nemotron['plain']:.2f}, single turns "
            f"{extremes(turns(v4))} and {extremes(turns(nemotron))}.") in prose
    assert [statistics.median(turns(one)) for one in (v4, nemotron)] == [one["ratio"] for one in (v4, nemotron)]
    for one, said in ((v4, "{:.1f} ms, of which the kernels take {:.1f}"), (nemotron, "{:.1f} ms and {:.1f}.")):
        assert said.format(one["step_us"]["on"] / 1e3, one["kernels_us"]["on"] / 1e3) in prose
    v4, nemotron = (found[f"unchanged-{name}-tiny"] for name in ("deepseek-v4", "nemotron-3.5-lightning"))
    for one in (v4, nemotron):
        values = one["rows"][0]
        assert values["stable_requests"] == values["requests"]
        assert f"{values['requests']} requests, one at a time" in prose
        assert f"medians of {one['speed']['quads']} turns" in prose
    assert (f"over a fifth of them {extremes(v4['speed']['pairs'])} and {extremes(nemotron['speed']['pairs'])}, where "
            f"the wheel against itself lay {v4['noise']:.0%} and {nemotron['noise']:.0%} from 1 in the median, "
            f"{v4['speed']['noise']:.0%} and {nemotron['speed']['noise']:.0%} at most") in prose


def test_the_readme_quotes_the_asynchronous_loop(prose, found):
    two, eight = (found[f"async-nemotron-3.5-lightning-tiny-lag-{lag}"] for lag in (2, 8))
    assert f"alone on its GPU: {two['summary']['throughput']['ratio']:.2f} (" in prose
    rewards = [[row["reward"] for row in one["rows"] if row["part"] != "synchronous"] for one in (two, eight)]
    first, last = ([statistics.mean(curve[part]) for curve in rewards] for part in (slice(10), slice(-10, None)))
    assert f"first and last means of ten: {first[0]:.2f} to {last[0]:.2f} and {first[1]:.2f} to {last[1]:.2f}" in prose
    said = (two["summary"], eight["summary"])
    figures = [one[key] for key in ("d3_peak", "d3_peak_to_median", "largest_weight") for one in said]
    assert ("at its peak {:.2f} and {:.2f}, {:.0f} and {:.0f} times its median, with weights w of up to {:.0f} and "
            "{:.0f}".format(*figures) in prose)
    assert all(row["words"]["differing_words"] == 0 for one in (two, eight) for row in one["rows"])


def test_the_readme_says_that_two_gpus_learn_something_else(prose, found):
    ranks = [{row["case"]: row for row in found[f"cp-{name}"]["rows"]}
             for name in ("deepseek-v4-tiny-train", "nemotron-3.5-lightning-tiny")]
    off = [max(one["error"] for one in rows["gradients"]["parameters"]) for rows in ranks]
    after = [rows["after update 1"] for rows in ranks]
    assert f"(at most {off[0]:.1%} and {off[1]:.1%} off; without the sum every one would be over it)" in prose
    assert all(one["own_share_error"] > one["bound"] >= one["error"]
               for rows in ranks for one in rows["gradients"]["parameters"])
    assert {f"{row['distance']:.1%}" for row in after} == {"4.2%"} and "the two updates are 4.2% apart" in prose
    assert all(row["beside_lone"]["differing_words"] == row["beside_lone"]["tokens"] for row in after)
    assert "after them every word: k3 {:.2f} and {:.3f}".format(*(row["beside_lone"]["k3"] for row in after)) in prose


def test_the_readme_quotes_how_far_the_gradients_are_off(prose, found):
    def errors(name, operands):
        return [row["error"] for row in found[f"grad-{name}"]["rows"]
                if row["parameter"] != "logprobs" and ("operands" in row) == operands]

    quantised = ("deepseek-v4-tiny-train", "nemotron-3.5-lightning-tiny-quantised")
    assert f"the largest off by {max(errors('nemotron-3.5-lightning-tiny', False)):.1%}." in prose
    at_operands, unrounded = ([errors(name, operands) for name in quantised] for operands in (True, False))
    assert "the largest off by {:.1%} and {:.1%};".format(*map(max, at_operands)) in prose
    assert ("{:.0%} and {:.0%} in the median and {:.0%} and {:.0%} at most"
            .format(*map(statistics.median, unrounded), *map(max, unrounded)) in prose)
    wide = [[row["bound"] for row in found[f"grad-{name}"]["rows"] if row["bound"] > 0.65] for name in quantised]
    assert (f"{len(wide[0])} and {len(wide[1])} parameters of few numbers share so wide a bound, {max(wide[0]):.2f} "
            f"and {max(wide[1]):.2f}") in prose
    assert all(row["error"] <= 1.3 * row["usual_error"] for name in quantised
               for row in found[f"grad-{name}"]["rows"] if "operands" not in row)


def test_the_readme_says_what_ran_without_a_patch(readme, prose, found):
    records = [found[f"counter-{name}-tiny"] for name in ("deepseek-v4", "nemotron-3.5-lightning")]
    arms = [Counter(row["engine"] for row in one["rows"] if "engine" in row) for one in records]
    (said, same) = (one["counter_tests"]["said"] for one in records)
    assert said == same and set(said.values()) == {"passed"}
    run = [arm["shown"] + arm["unseen"] for arm in arms]
    assert f"[{len(said)} Counter-Tests; {arms[0]['shown']} of {run[0]} engines without one refuse]" in readme
    assert f"[the same {len(said)}; {arms[1]['shown']} of {run[1]} engines refuse]" in readme
    where = Counter(test.split("/")[1] for test in said)
    assert (f"{where['upstream']} of them on the real sources, {where['kernels']} in Triton's interpreter, "
            f"{where['gpu']} on the GPU.") in prose
    engines = {}
    for row in (row for one in records for row in one["rows"] if "engine" in row):
        engines.setdefault(row["patch"], set()).add(row["engine"])
    alone, never = (sum(seen <= those for seen in engines.values()) for those in ({"unseen", "not run"}, {"not run"}))
    assert f"for {alone} patches the Counter-Test alone speaks: no engine was run without {never} of them" in prose


def test_the_readme_quotes_the_contrast_and_the_repro(prose, found):
    rows = {row["case"]: row for row in found["contrast-deepseek-v4-tiny"]["rows"]}
    decoded = rows["prefill-batched"]
    assert (f"decode against prefill {decoded['differing_words']:,} of {decoded['tokens']:,} words differ, k3 "
            f"{decoded['k3']:.2f}; other order {rows['reversed']['differing_words']:,}; the same run twice "
            f"{rows['twice']['differing_words']:,}") in prose
    repro = found["bisect-contrast-nemotron-3.5-lightning-tiny"]["finding"]["repro"]
    assert f"in {repro['run']['seconds']:.1f} s with its imports" in prose
    assert repro["operators"] == ["torch:ops.aten.mm.dtype",
                                  "vllm.model_executor.kernels.linear.cute_dsl.ll_bf16:ll_bf16_gemm"]
    assert repro["rows"] == [20, 1] and "`torch.mm` for 20 rows and `ll_bf16_gemm` for one" in prose


def test_the_readme_quotes_what_was_compared(prose, found):
    rollouts = [one for name, one in found.items() if name.startswith("rollout-")]
    assert {len(one["rows"]) for one in rollouts} == {22 + 1} and "rollout, 22 comparisons" in prose
    assert {len(one["rows"]) for name, one in found.items() if name.startswith("served-")} == {7 + 1}
    assert {row["tokens"] for one in rollouts for row in one["rows"] if row["case"] == "base"} == {20586}
    sizes = {max(one["ran"]["prompt_lengths"]) for one in rollouts}
    assert sizes == {5000, 5762} and "prompts of 1 to 5,000 (quantised 5,762)" in prose
    assert {max(one["ran"]["decode_batches"]) for one in rollouts} == {142} and "decode batches of 1 to 142" in prose
    trained = found["train-deepseek-v4-tiny-train"]["rows"]
    updates = [row["update_seconds"] for row in trained if row["case"] != "restored"]
    assert len(updates) == 50
    assert (f"takes {statistics.median(updates):.1f} s in the median, the first, which compiles, {updates[0]:.0f} s"
            in prose)
    sleeping = [found[f"train-{name}-asleep-2"]["rows"]
                for name in ("deepseek-v4-tiny-train", "nemotron-3.5-lightning-tiny")]
    (v4,), (nemotron,) = ({(row["whole_vocab"]["positions"], row["whole_vocab"]["words"]) for row in rows}
                          for rows in sleeping)
    assert (f"At {v4[0]} positions a step for DeepSeek-V4, {v4[1]:,} words, at {nemotron[0]} for Nemotron-H, "
            f"{nemotron[1]:,}.") in prose
    for size, name in (("2.2 billion", "deepseek-v4-tiny-train"), ("23 million", "nemotron-3.5-lightning-tiny")):
        parameters = found[f"train-{name}"]["actor"]["parameters"]
        assert size in (f"{parameters / 1e9:.1f} billion", f"{parameters / 1e6:.0f} million") and size in prose


def test_the_readme_quotes_the_kernels(readme, found):
    for key in ("worst_ratio", "average_ratio", "mixed_ratio"):
        assert " / ".join(f"{batch[key]:.2f}" for batch in found["mamba2"]["decode"]) in readme
    assert f"a prefill of 8,192 tokens {found['mamba2']['prefill'][0]['us'] / 1e3:.2f} ms a layer" in readme
    assert sum(one["vllm_rows_with_another_set"] for one in found["topk"]["cells"]) == 1
    assert "(one row had another set;" in readme
    top_k = [one["ratio"] for one in found["topk"]["cells"]]
    assert f"takes {min(top_k):.2f} to {max(top_k):.2f} of the time" in readme
    gathered = [(one["gather_us"] + one["attention_us"]) / one["stock_decode_us"] for one in found["gather"]["results"]]
    assert f"take {extremes(gathered)} of stock decode attention's time" in " ".join(readme.split())
    roofline = [one["of_roofline"] for one in found["gather"]["results"]]
    assert f"at {min(roofline):.0%}".rstrip("%") in readme and f"{max(roofline):.0%} of 4.8 TB/s" in readme


def test_the_readme_quotes_what_the_trainers_cost(readme, prose, found):
    v4, nemotron = "deepseek-v4-tiny-train", "nemotron-3.5-lightning-tiny"
    plain, again = ["aligned"], ["aligned, recomputed"]

    def quoted(name, arms, key):
        return extremes([row[key] for row in found[f"cost-{name}"]["rows"] if row["arm"] in arms])

    assert f"[{quoted(v4, plain, 'both_ratio')}](" in cell(readme, f"cost-{v4}")
    assert f"[**{quoted(nemotron, plain, 'both_ratio')}**](" in cell(readme, f"cost-{nemotron}")
    assert f"DeepSeek-V4: with recomputation {quoted(v4, again, 'both_ratio')}; peak memory" in prose
    assert (f"Nemotron-H: with recomputation {quoted(nemotron, again, 'both_ratio')}; of both, forward "
            f"{quoted(nemotron, plain + again, 'forward_ratio')}, kernels alone "
            f"{quoted(nemotron, plain + again, 'kernels_ratio')}") in prose
    runs = {len(row["runs"]["both_ms"]) for name in (v4, nemotron) for row in found[f"cost-{name}"]["rows"]}
    assert f"Medians of {min(runs)} to {max(runs)} runs" in prose


def test_the_readme_quotes_a_whole_step_of_the_trainer(readme, prose, found):
    cost = found["cost-deepseek-v4-tiny-train"]
    once, optimizer = cost["requantisation"]["once_ms"], cost["optimizer_ms"]
    ms = {(row["batch"], row["arm"]): row["both_ms"] for row in cost["rows"]}
    batches = {batch for batch, _ in ms}
    aligned, ordinary = ({batch: ms[batch, kind] + optimizer[kind] for batch in batches}
                         for kind in ("aligned", "ordinary"))
    step = extremes([(aligned[batch] + once) / ordinary[batch] for batch in batches], ".1f")
    assert f"a whole step **{step}**" in cell(readme, "cost-deepseek-v4-tiny-train")
    assert f"takes {step} times as long" in prose
    again = "aligned, recomputed"
    without = extremes([ms[batch, f"{again}, no cache"] / ms[batch, again] for batch in batches], ".1f")
    assert f"without the cache by version forward and backward take {without} times" in prose
    assert (f"Quantising anew takes {once / 1e3:.2f} s a version and the optimizer {optimizer['aligned'] / 1e3:.2f} s "
            f"({optimizer['ordinary'] / 1e3:.2f})") in prose


def test_the_readme_quotes_the_trainers_memory_and_launches(prose, found):
    v4, nemotron = found["cost-deepseek-v4-tiny-train"], found["cost-nemotron-3.5-lightning-tiny"]
    for cost in (v4, nemotron):
        plain, again = ({f"{row['peak_ratio']:.2f}" for row in cost["rows"] if row["arm"] == arm}
                        for arm in ("aligned", "aligned, recomputed"))
        assert len(plain) == len(again) == 1, "two batches that differ: quote both"
        assert f"peak memory {plain.pop()}, with recomputation {again.pop()}" in prose
    optimizer, (ordinary, *_) = nemotron["optimizer_ms"], nemotron["rows"]
    (aligned,) = (row for row in nemotron["rows"] if (row["batch"], row["arm"]) == (ordinary["batch"], "aligned"))
    assert f"launches decide: {aligned['launches'] / ordinary['launches']:.1f} times as many" in prose
    assert f"the optimizer {optimizer['aligned']:.0f} ms against {optimizer['ordinary']:.0f}" in prose


def test_the_readme_quotes_the_newer_stack(readme, newer):
    linked = set(re.findall(r"\(evidence/torch-2.14/([^)]+)\.json\)", readme))
    assert linked == {name for name, data in newer.items() if isinstance(data, dict) and data.get("passed")}
    stacks = {(engine["versions"]["torch"], engine["versions"]["triton"]) for name in linked
              for engine in newer[name]["engines"].values()}
    assert stacks == {("2.14.0+cu130", "3.8.0")} and "**On torch 2.14.0+cu130 and Triton 3.8.0**" in readme
    for name in linked:
        data = newer[name]
        text = cell(readme, f"torch-2.14/{name}")
        if data["verb"] == "grad":
            assert within_and_caught(data) in text
            continue
        assert text.strip("| \n").startswith(f"[0](evidence/torch-2.14/{name}.json)")
        assert all(set(differing(row)) == {0} for row in data["rows"]), name
        if data["verb"] == "rollout":
            assert len(data["rows"]) == 22 + 1
        else:
            assert f", {len(data['curve'])}" in text
            assert len(data["curve"]) < 50 or f"reward {data['curve'][0]:.2f} to {data['curve'][-1]:.2f}" in text


def test_the_readme_quotes_the_newer_stacks_speeds(prose, newer):
    for key in ("worst_ratio", "average_ratio"):
        assert " / ".join(f"{batch[key]:.2f}" for batch in newer["mamba2"]["decode"]) in prose
        assert all(batch[key] <= {"worst_ratio": 1.3, "average_ratio": 1.1}[key] for batch in newer["mamba2"]["decode"])
    assert f"a prefill of 8,192 tokens {newer['mamba2']['prefill'][0]['us'] / 1e3:.2f} ms a layer: Triton 3.8" in prose
    top_k = [one["ratio"] for one in newer["topk"]["cells"]]
    assert f"Top-K takes {extremes(top_k)} of the time" in prose and max(top_k) <= 1.5
    benches = [newer[f"bench-{name}-tiny"] for name in ("deepseek-v4", "nemotron-3.5-lightning")]
    assert not any(bench["passed"] for bench in benches) and "neither bore a verdict" in prose
    assert "spread {:.0%} and {:.0%} over".format(*(bench["spread"] for bench in benches)) in prose
    assert ("medians were {:.2f} for DeepSeek-V4 and {:.2f} for Nemotron-H"
            .format(*(bench["ratio"] for bench in benches)) in prose)
    assert "kernels' own ratios {:.2f} and {:.2f}".format(*map(kernels_ratio, benches)) in prose
    rows = {row["case"]: row for row in newer["contrast-deepseek-v4-tiny"]["rows"]}
    said = [rows[case]["differing_words"] for case in ("twice", "prefill-batched", "reversed")]
    assert "({:,}, {:,} and {:,} of 3,081)".format(*said) in prose and rows["twice"]["tokens"] == 3081


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "patchset.lock").write_text(json.dumps({"targets": {"vllm@0/all": {"digest": "today", "paths": {}}}}))

    def write(place=".", **data):
        base = {"schema": 1, "passed": True, "complete": True, "rows": [{"case": "base"}],
                "engines": {"graph": {"lock": {"state": "locked", "entry": "vllm@0/all", "digest": "today"}}}}
        for at in (tmp_path / place, tmp_path / "kernels"):  # raw figures of kernels claim nothing
            at.mkdir(exist_ok=True)
            (at / "r.json").write_text(json.dumps(base | data))
        return record.stale(tmp_path, tmp_path / "patchset.lock")
    return write


def test_a_record_of_todays_lock_is_fresh(folder):
    assert folder() == {}


def test_a_record_of_another_lock_is_stale(folder):
    lock = {"state": "locked", "entry": "vllm@0/all", "digest": "yesterday"}
    assert "r.json" in folder(engines={"graph": {"lock": lock}})


def test_a_record_of_another_stack_is_as_stale(folder):
    assert set(folder(place="torch-0", engines={})) == {"torch-0/r.json"}


def test_one_unlocked_side_makes_a_record_stale(folder):
    good, other = {"state": "locked", "digest": "today"}, {"state": "other", "digest": "today"}
    assert "r.json" in folder(engines={"first": {"lock": good}, "restored": {"lock": other}})
    assert "r.json" in folder(actor_lock=other)


def test_a_record_without_rows_is_stale(folder):
    assert "r.json" in folder(rows=[])


def test_a_record_of_no_lock_is_stale(folder):
    assert "r.json" in folder(engines={"graph": {"lock": {"state": "other", "digest": "today"}}})
    assert "r.json" in folder(engines={})


def test_a_record_of_another_trainer_is_stale(folder):
    assert folder(actor_lock={"state": "locked", "digest": "today"}) == {}
    assert "r.json" in folder(actor_lock={"state": "locked", "digest": "yesterday"})


def test_a_record_that_does_not_claim_to_have_passed_is_left_alone(folder):
    assert folder(passed=False, engines={}) == {}


def test_the_untouched_wheel_may_stand_beside_the_locked_tree(folder):
    locks = {"off": {"lock": {"state": "pristine", "digest": "today"}},
             "on": {"lock": {"state": "locked", "digest": "today"}}}
    assert folder(verb="unchanged", engines=locks) == {}
    assert "r.json" in folder(engines=locks)
    assert "r.json" in folder(verb="unchanged", engines={"off": locks["off"]})
