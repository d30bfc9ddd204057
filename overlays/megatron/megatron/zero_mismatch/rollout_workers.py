"""Rollout workers as processes, and the thread that serves them while the learner computes.

A worker holds one engine. It gets a job (a task, with newer weights if it has old ones), generates the group, sends it
back and waits. One job at a time, and only a waiting worker is written to, so neither side can block the other.
Weights go through `weight_sync`: a worker digests what it receives and stamps its group with version and digest.

A worker that dies (killed, out of memory) is replaced, and its task is issued again. A worker that raises is a bug,
not an accident: the traceback becomes the loop's error. So do MOST_DEATHS deaths without a group in between, since a
task or an environment that kills every worker would otherwise be retried for ever. A hang is not detected.

Messages are pickled here rather than by `Connection.send`: torch sends tensors through shared memory there, which a
killed process can leak; copied bytes it cannot. A tensor's bytes go from where it lies into the pipe, outside the
pickle: copying them into one would hold up the learner's thread, which shares the interpreter with the pool's.
"""
import io
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import connection
from typing import NamedTuple, Protocol

import torch

from .sample_queue import Group, SampleQueue
from .weight_sync import Manifest, WeightReceiver

MOST_DEATHS = 3


class Rollout(Protocol):
    """An engine in a worker process."""

    def resident(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights it serves from, under the learner's names."""

    def generate(self, task: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float]]:
        """tokens, recorded logprobs and reward of each response of the task's group."""


class WorkerFailed(RuntimeError):
    """Rollout cannot go on."""


class Snapshot(NamedTuple):
    manifest: str
    tensors: dict[str, torch.Tensor]
    version: int


class Job(NamedTuple):
    task: int
    weights: Snapshot | None


class Failure(NamedTuple):
    text: str


def worker_main(pipe: connection.Connection, make_rollout: Callable[[], Rollout]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the learner's to handle; it stops the workers
    torch.set_num_threads(1)
    try:
        rollout = make_rollout()
        receiver = WeightReceiver(rollout.resident)
        while True:
            job: Job | None = _receive(pipe)
            if job is None:
                return
            if job.weights is not None:
                _install(receiver, job.weights)
            tag = receiver.tag()
            _send(pipe, Group(job.task, tag, *rollout.generate(job.task)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the learner is gone
    except Exception:
        _send(pipe, Failure(traceback.format_exc()))


def _install(receiver: WeightReceiver, weights: Snapshot) -> None:
    receiver.begin(Manifest.from_json(weights.manifest))
    for name, tensor in weights.tensors.items():
        receiver.put(name, tensor)
    receiver.commit()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value):
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (value.dtype, tuple(value.shape), pickle.PickleBuffer(flat.numpy()))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _send(pipe: connection.Connection, message) -> None:
    """The lengths of the tensors, the pickle, then each tensor's bytes."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = io.BytesIO()
    _Pickler(pickled, 5, buffer_callback=buffers.append).dump(message)
    raw = [buffer.raw() for buffer in buffers]
    pipe.send_bytes(pickle.dumps([len(one) for one in raw]))
    for part in (pickled.getbuffer(), *raw):
        pipe.send_bytes(part)


def _receive(pipe: connection.Connection):
    data = [bytearray(length) for length in pickle.loads(pipe.recv_bytes())]
    pickled = pipe.recv_bytes()
    for one in data:
        pipe.recv_bytes_into(one)
    return pickle.loads(pickled, buffers=data)


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: connection.Connection
    task: int | None = None
    version: int | None = None


class WorkerPool(threading.Thread):
    """Hands tasks of the queue to workers and puts their groups into it, until `finish` or `abort`."""

    def __init__(self, make_rollout: Callable[[], Rollout], workers: int, queue: SampleQueue, weights: Snapshot):
        super().__init__(name="rollout-pool", daemon=True)
        if workers < 1:
            raise ValueError(f"found {workers} workers, expected at least 1")
        # A fork server: children inherit no pipe of a sibling (a dead worker's pipe must end) and no thread of ours.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch"])
        self._make_rollout, self._queue, self._weights = make_rollout, queue, weights
        self._wake_up, self._wake = self._context.Pipe(duplex=False)
        self._draining = self._aborted = False
        self._deaths_in_a_row = 0
        self.deaths = 0
        self._workers = [self._start_worker() for _ in range(workers)]

    def publish(self, weights: Snapshot) -> None:
        """Newer weights, for every job handed out from now on."""
        self._weights = weights

    def wake(self) -> None:
        """The queue may have a task to issue."""
        self._wake.send_bytes(b"w")

    def finish(self) -> None:
        """Let running tasks end, then stop the workers."""
        self._queue.close()
        self._draining = True
        self.wake()
        self.join()

    def abort(self) -> None:
        """Stop the workers now; what they were generating is not lost, only not generated."""
        self._aborted = True
        self.wake()
        self.join()

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def run(self) -> None:
        try:
            while not self._aborted and not (self._draining and all(w.task is None for w in self._workers)):
                self._hand_out()
                self._collect()
        except BaseException as error:
            self._queue.fail(error)
        finally:
            self._stop_workers()

    def _start_worker(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=worker_main, args=(theirs, self._make_rollout), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.task is not None:
                continue
            task = self._queue.issue()
            if task is None:
                return
            worker.task = task
            weights = self._weights
            try:
                _send(worker.pipe, Job(task, weights if worker.version != weights.version else None))
            except (BrokenPipeError, ConnectionResetError):
                continue  # it died while waiting; _collect sees it and gives the task back
            worker.version = weights.version

    def _collect(self) -> None:
        sources = [w.pipe for w in self._workers] + [w.process.sentinel for w in self._workers] + [self._wake_up]
        ready = set(connection.wait(sources))
        if self._wake_up in ready:
            self._wake_up.recv_bytes()
        for index, worker in enumerate(self._workers):
            if worker.pipe in ready or worker.process.sentinel in ready:
                # Its pipe first: a group that was sent in full before the death counts.
                message = self._receive(worker)
                if message is None:
                    self._workers[index] = self._replace(worker)
                else:
                    self._accept(worker, message)

    @staticmethod
    def _receive(worker: _Worker) -> Group | Failure | None:
        """None: the pipe ended, or ends in the middle of a message."""
        try:
            return _receive(worker.pipe)
        except (EOFError, OSError):
            return None

    def _accept(self, worker: _Worker, message: Group | Failure) -> None:
        if isinstance(message, Failure):
            raise WorkerFailed(f"a rollout worker raised on task {worker.task}:\n{message.text}")
        worker.task = None
        self._deaths_in_a_row = 0
        self._queue.put(message)

    def _replace(self, worker: _Worker) -> _Worker:
        worker.pipe.close()
        worker.process.join()
        self.deaths += 1
        self._deaths_in_a_row += 1
        if worker.task is not None:
            self._queue.give_back(worker.task)
        if self._deaths_in_a_row > MOST_DEATHS:
            raise WorkerFailed(
                f"{self._deaths_in_a_row} rollout workers died without finishing a task, the last on task "
                f"{worker.task} with exit code {worker.process.exitcode}; look for its reason (memory, a missing "
                "import), then resume"
            )
        return self._start_worker()

    def _stop_workers(self) -> None:
        for worker in self._workers:
            if worker.task is None and not self._aborted:
                try:
                    _send(worker.pipe, None)
                except OSError:
                    pass  # already gone
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
