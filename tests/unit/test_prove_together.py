"""Of the engines that a command starts side by side, one that does not start leaves no process of the others behind."""
import contextlib
import os
import pathlib
import signal
import threading
import time

import pytest

from prove import bench, blocks, cost, cp, recipe, record, together, train, ui, unchanged
from prove.engine import EngineError

FAKES = pathlib.Path(__file__).parent
FAKE = str(FAKES / "start_fake.py")
TOKENS = blocks.tokens_of(15)
COMMANDS = {
    "bench": (bench.bench, {"concurrent": 4, "prompt_tokens": 5, "out_tokens": TOKENS, "seconds": 9.0, "turn": None}),
    "unchanged": (unchanged.unchanged, {"pristine": FAKES, "tokens": 9, "concurrent": 4, "out_tokens": TOKENS,
                                        "turn": None}),
    "train": (train.train, {"updates": 2, "groups": 1, "answers": 1, "tokens": 2, "lr": 1e-3, "restore_after": 1}),
    "cp": (cp.cp, {"ranks_backend": FAKE}),
    "cost": (cost.cost, {"runs": 1}),
}


def alive(process: str) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(process), 0)
        return True
    return False


@pytest.fixture
def seen(tmp_path):
    (tmp_path / "seen").mkdir()
    return tmp_path / "seen"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_engine_that_does_not_start_leaves_no_other_behind(command, seen, tmp_path):
    made = recipe.Recipe("fake", tmp_path, "tiny", {
        "tiny": {"model": "tiny", "weights": "weights.py", "vocab": 97}, "engine": {}})
    run, arguments = COMMANDS[command]
    with pytest.raises(EngineError, match="TP > 1"):
        run(made, ui.UI(json_only=True), out=tmp_path, logs=tmp_path / "logs", budget=60.0,
            env={"FAKE_STARTS": str(seen)}, backend=FAKE, **arguments)
    started = [path.name for path in seen.iterdir() if path.name.isdecimal()]
    assert len(started) >= 2 and not [one for one in started if alive(one)]  # cp's third may be left out


def test_what_was_still_to_start_is_left_out_after_one_that_did_not(seen, tmp_path):
    (seen / "first").mkdir()  # so that none is
    (seen / "up").touch()
    parts = {str(i): together.Part({}, {}, FAKE) for i in range(4)}
    with pytest.raises(EngineError, match="TP > 1"), together.started(
            parts, record.Record("bench", "fake", {}, tmp_path), ui.UI(json_only=True), env={"FAKE_STARTS": str(seen)},
            logs=tmp_path, deadline=time.monotonic() + 60, at_once=1):
        pass
    assert sum(path.name.isdecimal() for path in seen.iterdir()) < 4


def test_ctrl_c_waits_for_no_start_and_leaves_nothing_behind(seen, tmp_path):
    """Two are starting, for ever; the third is still to be started."""
    (seen / "first").mkdir()  # so that none is

    def begun() -> list[str]:
        return [path.name for path in seen.iterdir() if path.name.isdecimal()]

    def press() -> None:
        while len(begun()) < 2:
            time.sleep(0.01)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    parts, pressed = {str(i): together.Part({}, {}, FAKE) for i in range(3)}, []
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), together.started(
            parts, record.Record("bench", "fake", {}, tmp_path), ui.UI(json_only=True), env={"FAKE_STARTS": str(seen)},
            logs=tmp_path, deadline=time.monotonic() + 40, at_once=2):
        pass
    assert time.monotonic() - pressed[0] < 10
    while any(map(alive, begun())) and time.monotonic() - pressed[0] < 20:
        time.sleep(0.01)
    assert len(begun()) == 2 and not any(map(alive, begun()))


def test_leaving_ends_all_of_them(seen, tmp_path):
    parts = {"one": together.Part({}, {}, FAKE)}
    kept = record.Record("bench", "fake", {}, tmp_path)
    with together.started(parts, kept, ui.UI(json_only=True), env={"FAKE_STARTS": str(seen)}, logs=tmp_path,
                          deadline=time.monotonic() + 60) as engines:
        assert engines["one"].process.poll() is None and kept.data["engines"]["one"]["lock"]["state"] == "other"
    assert engines["one"].process.poll() is not None


RANK_THAT_DIES = """
import os, time
class Backend:
    def __init__(self, emit=None, **start): self.rank = start.get("rank")
    def info(self):
        return {"vllm_path": "/none/vllm", "megatron_path": "/none/megatron", "start_seconds": 0.0, "cache_block": 16}
    def op_save_weights(self, **_): return None
    def op_actor(self, **_):
        if self.rank == int(os.environ["DIES"]): os._exit(3)
        if self.rank is not None: time.sleep(600)  # in a collective with the other
        return {"weights": "0"}
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_rank_whose_other_died(rank, tmp_path):
    (tmp_path / "fake.py").write_text(RANK_THAT_DIES)
    made = recipe.Recipe("fake", tmp_path, "tiny", {
        "tiny": {"model": "tiny", "weights": "weights.py", "vocab": 97}, "engine": {}})
    began = time.monotonic()
    with pytest.raises(EngineError):
        cp.cp(made, ui.UI(json_only=True), out=tmp_path, logs=tmp_path / "logs", budget=300.0,
              env={"DIES": str(rank)}, backend=str(tmp_path / "fake.py"), ranks_backend=str(tmp_path / "fake.py"))
    assert time.monotonic() - began < 150
