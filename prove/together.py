"""The engines that one command needs, started side by side: all of them, or none."""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import subprocess
import threading
import time
from collections.abc import Iterator

from prove.engine import Engine
from prove.record import Record
from prove.rollout import _event
from prove.ui import UI


@dataclasses.dataclass(frozen=True)
class Part:
    start: dict                  # the engine's start message
    environment: dict[str, str]  # the recipe's; what every engine gets comes on top
    backend: str


@contextlib.contextmanager
def started(parts: dict[str, Part], kept: Record, ui: UI, *, env: dict[str, str], logs: pathlib.Path, deadline: float,
            at_once: int | None = None) -> Iterator[dict[str, Engine]]:
    """name -> engine, each entered in the record; `at_once` of them start at a time. Leaving ends them all, and so does
    one that does not start: those still to be started are left out, the others ended once they are up or failed. Ctrl-C
    does not wait for a start: it kills what is starting or up."""
    verb, processes, stopped = kept.data["verb"], [], threading.Event()

    def enter(process: subprocess.Popen) -> None:
        processes.append(process)
        if stopped.is_set():  # after the append: whoever sets it kills what is in the list then
            process.kill()

    def begin(name: str) -> Engine:
        part = parts[name]
        return Engine(part.start, backend=part.backend, env=part.environment | env, timeout=deadline - time.monotonic(),
                      log=logs / f"{verb}-{name.replace(' ', '-')}.log",
                      on_event=lambda event: _event(ui, event, f"{name}: "), on_process=enter)

    with contextlib.ExitStack() as opened:
        pool = concurrent.futures.ThreadPoolExecutor(at_once or len(parts))
        try:
            starting = {name: pool.submit(begin, name) for name in parts}
            _, late = concurrent.futures.wait(starting.values(), return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in late:  # there are some only where one failed
                future.cancel()
            pool.shutdown()
        except BaseException:  # what an engine raises stays in its future: this is Ctrl-C
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
            raise
        ran = [future for future in starting.values() if not future.cancelled()]
        for future in ran:
            if not future.exception():
                opened.enter_context(future.result())
        if failed := next((future.exception() for future in ran if future.exception()), None):
            raise failed
        engines = {name: future.result() for name, future in starting.items()}
        for name, engine in engines.items():
            lock = kept.engine(name, engine.info, parts[name].start.get("flags", {}), parts[name].environment)
            ui.note(f"{name} started in {engine.info['start_seconds']} s; lock: {lock['state']}")
        yield engines
