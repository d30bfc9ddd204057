"""The same properties as test_verl_patches.py, through verl and vLLM as they are installed: see verl_scenario.py.

Needs verl's and vLLM's dependencies in this interpreter (`pip install verl==0.9.1 vllm==0.33.0`) and takes a minute;
skipped, with the reason, where something is missing.
"""
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys

import delivery
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCENARIO = pathlib.Path(__file__).with_name("verl_scenario.py")
NEEDED = ("vllm", "ray", "tensordict", "hydra-core", "pyzmq")


@pytest.fixture(scope="module")
def run(store, checkout, tmp_path_factory):
    """A function that runs the scenario over the released verl, or with our series and overlay; {what: seen}."""
    for name in NEEDED:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed for {sys.executable}")
    tried = subprocess.run([sys.executable, "-c", "import vllm.platforms.cuda"], capture_output=True, text=True,
                           check=False, timeout=300)
    if tried.returncode:
        pytest.skip(f"vLLM does not import here: {tried.stderr.splitlines()[-1]}")

    def call(arm):
        folder = tmp_path_factory.mktemp(arm)
        tree = delivery.link_copy(store.tree("verl"), folder / "verl")
        if arm == "patched":
            checkout.run("apply", "--from", tree)
        overlay = shutil.copytree(ROOT / "overlays" / "megatron", folder / "overlay")
        env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tree, overlay, SCENARIO.parent))),
                            "VLLM_BATCH_INVARIANT": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, str(SCENARIO)], env=env, capture_output=True, text=True, check=False,
                              timeout=600)
        lines = [line for line in done.stdout.splitlines() if line.startswith("SEEN ")]
        assert lines, f"exit {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return json.loads(lines[0].removeprefix("SEEN "))
    return call


def test_verl_itself_confirms_refuses_and_keeps_addresses(run):
    seen = run("patched")
    (first, one), (second, two) = seen["syncs"]
    assert (first, second) == (5, 6) and one != two
    assert seen["after"] == {"holds": True, "graph_reads_it": True, "versions": [5, 6]}
    assert seen["flipped"] == "SyncRefused" and seen["after_flipped"]["versions"] == [5, 6]
    assert not seen["after_flipped"]["holds"]
    assert seen["driver"] == {} and seen["after_driver"] == {"holds": True, "graph_reads_it": True,
                                                            "versions": [5, 6, 8]}
    assert seen["driver_falls_back"] == "SyncRefused"
    assert (seen["metrics"]["zero_mismatch/differing_words"], seen["metrics"]["zero_mismatch/tokens"]) == (2, 3)


def test_stock_verl_takes_flipped_bits_an_older_version_and_a_moved_weight(run):
    seen = run("stock")
    assert seen["syncs"] == [None, None] and seen["after"]["holds"] and not seen["after"]["graph_reads_it"]
    assert seen["flipped"] is None and not seen["after_flipped"]["holds"]
    assert seen["after_flipped"]["versions"] == [5, 6, 7] and seen["driver_falls_back"] == {}
    assert seen["metrics"]["training/rollout_probs_diff_max"] == 0
    assert not any(key.startswith("zero_mismatch/") for key in seen["metrics"])
