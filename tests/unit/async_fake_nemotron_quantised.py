"""async_fake for the quantised Nemotron-H: learner and worker over trainer_fake_nemotron_quantised.py."""
import pathlib

import trainer_fake_nemotron_quantised

from prove import async_backend


class Backend(async_backend.Asynchronous, trainer_fake_nemotron_quantised.Backend):
    worker = str(pathlib.Path(__file__).with_name("trainer_fake_nemotron_quantised.py"))
