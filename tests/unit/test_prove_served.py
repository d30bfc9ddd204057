"""`prove served` against a server that speaks vLLM's token endpoint: equal passes, what is planted is found."""
import hashlib
import http.client
import http.server
import json
import os
import socket
import sys
import threading
import time
import types

import numpy as np
import prove_fake
import pytest

from prove import recipe, record, served, ui
from prove.engine import EngineError, unpack

RANKS = 2
LOGPROB = '{"choices": [{"logprobs": {"content": [%s]}}]}'
VERSION = "__all__ = [\n    '__version__',\n    'version',\n]\n__version__: str\n\n__version__ = version = '{}'\n"
NONSENSE = {
    "html": "<html>", "null": "null", "list": "[]", "object": "{}", "no-choice": '{"choices": []}',
    "no-logprob": LOGPROB % '{"token_id": 1}', "no-token": LOGPROB % '{"logprob": -1.0}',
    "text": LOGPROB % '{"token_id": 1, "logprob": "x"}',
    "huge": LOGPROB % '{"token_id": 9223372036854775808, "logprob": -1}',
    "double": LOGPROB % '{"token_id": 1, "logprob": -0.1}'}


class Handler(http.server.BaseHTTPRequestHandler):
    """The fake model of prove_fake behind HTTP. server.fault: None, "batch" (an answer depends on how many requests
    have come at once), "rank" (one rank has other bits), "phase", "nan", "cold" (the cache never hits)."""

    def log_message(self, *what):
        pass

    def do_GET(self):
        said = {"/version": '{"version": "0.33.0"}',
                "/metrics": 'x 1\nvllm:cache_config_info{a="b",block_size="256",c="d"} 1.0\n' + self.server.metrics}
        self._answer(200 if self.path in said else 404, said.get(self.path, ""))

    def do_POST(self):
        if self.server.fault in NONSENSE:
            return self._answer(200, NONSENSE[self.server.fault])
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.fault == "refuses":
            return self._answer(403, '{"error": {"message": "Scale-out endpoints are disabled."}}')
        params, rank = asked["sampling_params"], int(self.headers.get("X-data-parallel-rank", 0))
        with self.server.lock:
            self.server.ranks.add(rank)
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        answer = self.model(params, asked, rank)
        with self.server.lock:
            self.server.running -= 1
        words = unpack(answer["words"]).view(np.float32).astype(float)
        content = [{"token_id": int(token), "logprob": -9999.0 if np.isnan(word) else word, "rank": 1}
                   for token, word in zip(unpack(answer["tokens"]), words, strict=True)]
        said = {"choices": [{"index": 0, "logprobs": {"content": content}}],
                "usage": {"prompt_tokens_details": {"cached_tokens": answer["cached"]}}}
        if "prompt_words" in answer:
            scored = unpack(answer["prompt_words"]).view(np.float32).astype(float)
            said["prompt_logprobs"] = [None, *({str(token): {"logprob": word, "rank": 1}} for token, word in zip(
                asked["token_ids"][-len(scored):], scored, strict=True))]
            if self.server.fault == "other-ids":
                said["prompt_logprobs"][-1] = {"98": {"logprob": -1.0}}
        self._answer(200, json.dumps(said))

    def model(self, params: dict, asked: dict, rank: int) -> dict:
        fault = self.server.fault
        model = types.SimpleNamespace(fault=fault if fault in ("batch", "phase", "nan") else None, vocab=97)
        request = {"prompt": asked["token_ids"], "seed": params["seed"], "max_tokens": params["max_tokens"],
                   "read_cache": not params["skip_reading_prefix_cache"] and fault != "cold",
                   "prompt_logprobs": params["prompt_logprobs"] is not None}
        answer = prove_fake.Backend._answer(model, request, 2 - self.alone())
        if fault == "rank" and rank == 1:
            answer["words"] = prove_fake.pack(unpack(answer["words"]) ^ 1)
        return answer

    def alone(self) -> bool:
        """Whether the run goes one by one: as the harness asks then, nothing else is in flight."""
        return self.server.one_by_one()

    def _answer(self, code: int, body: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def run(tmp_path, monkeypatch):
    site = tmp_path / "site" / "vllm"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("locked")
    (site / "_version.py").write_text(VERSION.format("0.33.0"))
    sha = hashlib.sha256(b"locked").hexdigest()
    lock = tmp_path / "patchset.lock"
    lock.write_text(json.dumps({"targets": {"vllm@0/all": {
        "digest": "d", "paths": {"vllm/__init__.py": {"before": None, "after": sha}}}}}))
    bind = record.bind
    monkeypatch.setattr(record, "bind", lambda folder: bind(folder, lock_path=lock))
    paths = record.paths
    monkeypatch.setattr(record, "paths", lambda entry: paths(entry, lock_path=lock))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.request_queue_size = True, 256
    server.metrics = ""
    server.lock, server.ranks, server.running, server.most = threading.Lock(), set(), 0, 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    called = served.Server.call

    def watched(self, op, timeout, **how):
        server.one_by_one = lambda: how.get("one_by_one", False)
        return called(self, op, timeout, **how)
    monkeypatch.setattr(served.Server, "call", watched)

    def go(fault=None, ranks=RANKS, url=None):
        server.fault = fault
        made = recipe.Recipe("fake", tmp_path, None, {
            "model": {"path": "m", "vocab": 97}, "engine": {}, "layout": {"rollout": {"gpus": ranks, "data": ranks}}})
        return served.served(made, ui.UI(json_only=True), url=url or f"http://127.0.0.1:{server.server_port}",
                             tokens=100, out=tmp_path, budget=60.0)
    go.server, go.site = server, site
    yield go
    server.shutdown()
    server.server_close()


def states(data: dict) -> dict[str, str]:
    return {row["case"]: row["state"] for row in data["rows"]}


def test_a_consistent_server_passes_every_case_and_every_rank_is_asked(run):
    data = run()
    assert set(states(data)) == {case.name for case in served.CASES}
    assert set(states(data).values()) == {"equal"}, data["rows"]
    assert data["passed"] and run.server.ranks == {0, 1} and run.server.most > 1
    assert data["engines"]["served"]["lock"]["digest"] == "d"


@pytest.mark.parametrize("fault, where", [
    ("batch", {"alone"}), ("rank", {"reversed", "other-rank"}), ("phase", {"prefill-batched", "prefill-alone"})])
def test_what_is_planted_is_found_where_it_shows(run, fault, where):
    data = run(fault)
    assert where <= {name for name, state in states(data).items() if state == "differs"}
    assert states(data)["twice"] == "equal" and not data["passed"]


def test_a_nan_that_the_server_wrote_as_a_number_is_a_nan(run):
    data = run("nan")
    assert data["rows"][0]["nan"] > 0 and not data["passed"]


def test_a_cache_that_never_hits_proves_nothing(run):
    data = run("cold")
    assert states(data)["prefix-warm"] == "vacuous" and not data["passed"]


def test_one_rank_has_no_other_rank(run):
    data = run(ranks=1)
    assert "other-rank" not in states(data) and data["passed"]


def test_another_tree_is_no_evidence(run):
    (run.site / "__init__.py").write_text("edited")
    data = run()
    assert not data["passed"] and data["engines"]["served"]["lock"]["state"] == "other"


@pytest.mark.parametrize("file, said", [
    (VERSION.format("0.32.0"), "runs vLLM 0.33.0, this Python's is 0.32.0"), ("x = 1\n", "names no version"),
    (None, "names no version")])
def test_a_server_of_another_version_is_refused(run, file, said):
    """Its record would be bound to the files of this Python's vLLM, which are not the server's."""
    if file is None:
        (run.site / "_version.py").unlink()
    else:
        (run.site / "_version.py").write_text(file)
    with pytest.raises(ValueError, match=said):
        run()


@pytest.mark.parametrize("seconds, refused", [(-60, False), (60, True)])
def test_a_server_that_began_before_a_file_was_written_is_refused(seconds, refused, run):
    """It goes on with what it imported, and the record would be bound to what lies there now."""
    began = 1796089494.6455019
    run.server.metrics = (f'vllm:num_preemptions_created{{engine="0",model_name="a b"}} {began!r}\n'
                          f"vllm:x_seconds_created {began + 5:.10e}\nother_created 1.0\n")
    os.utime(run.site / "__init__.py", (began + seconds, began + seconds))
    os.utime(run.site / "_version.py", (began + 60, began + 60))  # the lock does not name it
    if refused:
        with pytest.raises(ValueError, match="began before vllm/__init__.py was written: start it anew"):
            run()
        assert not list(run.site.parents[1].glob("served-*"))
    else:
        assert run()["engines"]["served"]["since"] == began


def test_a_file_that_was_written_while_the_server_started_is_refused(run):
    """It had imported what lay there before; its metrics are made when the engine is up."""
    began = 1796089494.25
    run.server.metrics = (f"process_start_time_seconds {began - 300:.12e}\n"
                          f'vllm:num_preemptions_created{{engine="0"}} {began!r}\n')
    os.utime(run.site / "__init__.py", (began - 60, began - 60))
    with pytest.raises(ValueError, match="began before vllm/__init__.py was written: start it anew"):
        run()
    os.utime(run.site / "__init__.py", (began - 299.5, began - 299.5))  # the start is known to a second
    assert run()["engines"]["served"]["since"] == began - 299


def test_a_server_without_the_endpoint_is_told_how_to_start(run):
    data = run("refuses")
    assert not data["passed"] and "--enable-scale-out" in data["rows"][0]["error"]
    assert len(data["rows"]) == 1


@pytest.mark.parametrize("fault", NONSENSE)
def test_an_answer_that_is_no_answer_fails_the_case_and_is_shown(run, fault):
    data = run(fault)
    assert not data["passed"] and data["rows"][0]["state"] == "failed"
    said = data["rows"][0]["error"]
    assert "did not answer as vLLM 0.33.0 does" in said and NONSENSE[fault][:40] in said


def test_the_logprob_of_another_prompt_token_is_not_taken_for_the_right_ones(run):
    data = run("other-ids")
    assert not data["passed"] and {states(data)[name] for name in ("prefill-batched", "prefill-alone")} == {"failed"}


@pytest.mark.parametrize("url", ["nonsense", "localhost:8000", "file:///etc/hosts", "http://host:port", "http://"])
def test_what_is_no_address_is_refused(run, url):
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        run(url=url)


class Slow:
    """An answer that comes a byte at a time; length: what is still to come, as http.client counts."""

    def __init__(self, length=None, parts=10**9):
        self.length, self.parts = length, parts

    def read1(self, most):
        self.parts -= 1
        return b"x" if self.parts >= 0 else b""


def test_an_answer_that_never_ends_is_given_up():
    with pytest.raises(TimeoutError, match="did not end in time"):
        served._read(Slow(), time.monotonic() + 0.05)


def test_an_answer_that_was_cut_off_is_no_answer():
    with pytest.raises(http.client.IncompleteRead):
        served._read(Slow(length=5, parts=3), time.monotonic() + 5)


def test_no_server_says_so(run):
    with pytest.raises(EngineError, match="--enable-scale-out"):
        run(url=f"http://127.0.0.1:{_unused()}")


def _unused() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_fp32_words_survive_the_decimal_text():
    every = np.random.default_rng(0).integers(0x80000000, 0xFF800000, 20000, np.uint32)
    sent = json.loads(json.dumps(every.view(np.float32).astype(float).tolist()))
    assert np.array_equal(unpack(served._words(sent)), every)
