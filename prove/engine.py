"""One engine in one subprocess, spoken to in JSON lines over two pipes.

An engine's flags, its environment and the patched files are fixed once vLLM is imported, so each configuration gets a
process of its own. What the engine prints goes to a log file; the pipes carry only the protocol:

    -> {"op": "run", ...}                       <- {"event": "where" | "log", ...}*  <- {"result": ...} | {"error": ...}

The subprocess is `python -m prove.engine BACKEND`; BACKEND is a name of BACKENDS or, in the unit tests, a path to a
file with a class Backend. A backend is built with the start message and has a method for every op.
"""
from __future__ import annotations

import collections
import importlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import time
import traceback
from typing import Self

import numpy as np

from prove.scripts import load

ROOT = pathlib.Path(__file__).resolve().parent.parent
BACKENDS = {"vllm": "prove.vllm_backend", "trainer": "prove.trainer_backend", "async": "prove.async_backend",
            "cp": "prove.cp_backend", "cost": "prove.cost_backend"}


class EngineError(RuntimeError):
    """The engine refused, failed, died or ran out of time. `kind` says which."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def pack(array: np.ndarray) -> dict:
    """Arrays cross the pipe as hex of their little-endian bytes, so that no bit is lost to decimal text."""
    array = np.ascontiguousarray(array)
    return {"dtype": array.dtype.str, "hex": array.tobytes().hex()}


def unpack(data: dict) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(data["hex"]), dtype=np.dtype(data["dtype"]))


class Engine:
    """The parent's end. Use as a context manager: leaving it ends the process it started, and no other."""

    def __init__(self, start: dict, *, backend: str = "vllm", env: dict[str, str] | None = None,
                 log: pathlib.Path, python: str = sys.executable, on_event=None, on_process=None,
                 timeout: float = 900.0):
        """`on_process` is told of the process as soon as there is one, so that another thread can end a start."""
        self.log_path = log
        self.on_event = on_event or (lambda event: None)
        log.parent.mkdir(parents=True, exist_ok=True)
        command_read, self._command = os.pipe()
        answer_read, answer_write = os.pipe()
        environment = {**os.environ, **(env or {}), "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [python, "-m", "prove.engine", backend, str(command_read), str(answer_write)],
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment, pass_fds=(command_read, answer_write))
        if on_process:
            on_process(self.process)
        os.close(command_read)
        os.close(answer_write)
        self._answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, args=(answer_read,), daemon=True).start()
        try:
            self.info = self.call("start", timeout=timeout, **start)
        except BaseException:
            self.close()
            raise

    def _read(self, descriptor: int) -> None:
        try:
            with os.fdopen(descriptor, "r", encoding="utf-8") as stream:
                for line in stream:
                    self._answers.put(json.loads(line))
        except ValueError:  # killed in the middle of a line
            pass
        finally:
            self._answers.put(None)  # or a call would wait for its whole time

    def call_by(self, deadline: float, op: str, **arguments):
        """`call` with what is left until the deadline, and never less than a second."""
        return self.call(op, timeout=max(1.0, deadline - time.monotonic()), **arguments)

    def call(self, op: str, timeout: float, **arguments):
        if self._command is None:  # an earlier call found it gone, or ended it
            raise EngineError("died", self._obituary())
        try:
            _write_line(self._command, {"op": op, **arguments})
        except BrokenPipeError:
            raise EngineError("died", self._obituary()) from None
        deadline = time.monotonic() + timeout
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close(patience=1)
                raise EngineError("timeout", f"{op} did not finish in {timeout:.0f} s; log: {self.log_path}") from None
            if answer is None:
                raise EngineError("died", self._obituary())
            if "event" in answer:
                self.on_event(answer)
            elif "error" in answer:
                raise EngineError("failed", f"{op}: {answer['error']}\n(log: {self.log_path})")
            else:
                return answer["result"]

    def _obituary(self) -> str:
        self.close(patience=10)  # one that only closed its pipe, or whose memory the driver still frees, gets a while
        code = self.process.poll()
        tail = self.log_path.read_text(errors="replace").splitlines()[-25:]
        return "\n".join([f"the engine process ended with status {code}; the end of {self.log_path}:", *tail])

    def close(self, patience: float = 30) -> None:
        """Ends the process: politely, then by SIGTERM, then by SIGKILL."""
        if self._command is not None:
            os.close(self._command)  # the worker sees the end of its input and leaves
            self._command = None
        for stop in (None, self.process.terminate, self.process.kill):
            if stop:
                stop()
            try:
                self.process.wait(timeout=patience)
                return
            except subprocess.TimeoutExpired:
                patience = 10

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc) -> None:
        self.close()


def _write_line(descriptor: int, message: dict) -> None:
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data):]


class Where(threading.Thread):
    """Samples the main thread's stack, so that a slow start says where it spends its time."""

    def __init__(self, emit, period: float = 1.0, report: float = 10.0):
        super().__init__(daemon=True)
        self.emit, self.period, self.report = emit, period, report
        self.main = threading.main_thread().ident
        self.seconds: collections.Counter = collections.Counter()
        self.op = "start"

    def run(self) -> None:
        said = time.monotonic()
        while True:
            time.sleep(self.period)
            place = self._place()
            if place == "waiting for a command":
                said = time.monotonic()
                continue
            self.seconds[place] += self.period
            if time.monotonic() - said >= self.report:
                said = time.monotonic()
                self.emit({"event": "where", "op": self.op, "place": place, "seconds": self.seconds[place]})

    def _place(self) -> str:
        frame, names = sys._current_frames().get(self.main), []
        while frame:
            code = frame.f_code
            names.append((code.co_filename, f"{pathlib.Path(code.co_filename).stem}.{code.co_qualname}"
                          if hasattr(code, "co_qualname") else code.co_name))
            frame = frame.f_back
        if any(name.endswith("serve") and path.endswith("engine.py") for path, name in names[:1]):
            return "waiting for a command"
        compilers = ("tilelang", "triton", "deep_gemm", "cutlass", "flashinfer", "subprocess")
        inner = next((name for path, name in names if any(c in path for c in compilers)), names[0][1] if names else "?")
        caller = next((name for path, name in names if f"{os.sep}vllm{os.sep}" in path and "jit" not in path), "")
        return f"{inner} < {caller}" if caller and caller != inner else inner


def serve(backend_class, commands, answer_fd: int) -> None:
    """The worker's loop: ends with the end of its input."""
    lock = threading.Lock()

    def emit(message: dict) -> None:
        with lock:
            _write_line(answer_fd, message)

    where = Where(emit)
    where.start()
    backend = None
    for line in commands:
        message = json.loads(line)
        op = where.op = message.pop("op")
        try:
            if op == "start":
                backend = backend_class(emit=emit, **message)
                result = backend.info()
            elif op == "where":
                result = dict(where.seconds.most_common())
            else:
                result = getattr(backend, f"op_{op}")(**message)
            emit({"result": result})
        except Exception as error:  # noqa: BLE001 - the parent decides what a failed op means; this keeps serving
            traceback.print_exc()
            emit({"error": _said(error)})
            if op == "start":
                return


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name in ("vllm", "megatron", "triton"):
        text += (f" in {sys.executable}: start prove with the interpreter that the patched engines are installed for, "
                 "or name their folders in PYTHONPATH (docs/install.md)")
    return text


def backend_class(name: str):
    if name in BACKENDS:
        return importlib.import_module(BACKENDS[name]).Backend
    return load(name).Backend


def main() -> None:
    backend, command_fd, answer_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with os.fdopen(command_fd, "r", encoding="utf-8") as commands:
        serve(backend_class(backend), commands, answer_fd)
    sys.stdout.flush()
    os._exit(0)  # an engine's own shutdown can take long, and there is nothing left to save


if __name__ == "__main__":
    main()
