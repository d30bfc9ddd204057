"""prove's asynchronous backend without a GPU or vLLM: learner and worker over trainer_fake.py.

flags["fault"] = "stale worker": the worker answers from its first weights, whatever it is sent.
"""
import pathlib

import trainer_fake

from prove import async_backend

WORKER = str(pathlib.Path(__file__).with_name("trainer_fake.py"))


class Backend(async_backend.Asynchronous, trainer_fake.Backend):
    worker = WORKER

    def __init__(self, *, flags: dict, **start):
        stale = flags.get("fault") == "stale worker"
        super().__init__(flags={}, **start)
        self.start["flags"] = {"fault": "stale"} if stale else {}
