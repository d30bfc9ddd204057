"""An engine's process that ends badly: whoever called it is told at once, and in words."""
import time

import pytest

from prove.engine import Engine, EngineError

BACKEND = """
import os, sys, time
ANSWERS = int(sys.argv[3])  # the pipe
class Backend:
    def __init__(self, emit=None): pass
    def info(self): return {}
    def op_half(self):
        os.write(ANSWERS, b'{"result": {"answers": "0')
        os._exit(9)  # as one that is killed
    def op_shut(self):
        os.closerange(3, 64)
        time.sleep(600)  # as one whose memory the driver still frees
"""


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "backend.py").write_text(BACKEND)
    with Engine({}, backend=str(tmp_path / "backend.py"), log=tmp_path / "log", timeout=60) as made:
        yield made


def test_an_engine_killed_in_the_middle_of_an_answer_is_not_waited_for(engine):
    began = time.monotonic()
    with pytest.raises(EngineError, match="ended with status 9") as told:
        engine.call("half", timeout=120)
    assert told.value.kind == "died" and time.monotonic() - began < 60


def test_an_engine_that_shuts_its_pipes_and_stays_is_ended(engine):
    with pytest.raises(EngineError, match="ended with status -15") as told:
        engine.call("shut", timeout=120)
    assert told.value.kind == "died" and engine.process.poll() is not None


def test_an_engine_that_was_ended_says_so_when_asked_again(engine):
    for _ in range(2):
        with pytest.raises(EngineError, match="ended with status 9"):
            engine.call("half", timeout=120)
    engine.close()
    with pytest.raises(EngineError, match="ended with status 9"):
        engine.call("half", timeout=120)
