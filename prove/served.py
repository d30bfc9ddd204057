"""`prove served`: a running server compared with itself, word by word, over HTTP: any number of GPUs, the real layout.

Start it from the recipe, with the endpoint that takes and gives token ids (vLLM 0.33.0,
entrypoints/scale_out/token_in_token_out) and the count of cached tokens:

    python3 -m launch serve RECIPE --enable-scale-out --enable-prompt-tokens-details

The cases are those of `prove rollout` that a client can ask for, and one that a single engine cannot have: with several
data-parallel ranks every request is answered again by another rank, so by another GPU. JSON carries fp32 words
unharmed: a float's shortest decimal text names it exactly. The server writes -9999 for a NaN and for a missing logprob;
here it is a NaN again, which no comparison forgives.

What the record is bound to is the vLLM that this command's own Python would import. Run it where the server runs, with
the server's interpreter: of what it imported, the server says the version, and by its metrics since when it runs. One
of another version is refused, and one that began before a file that the lock names was written. Not seen is a server
that imported another folder of the same version, nor when one began that shares its metrics among several API servers.
Flags and environment in the record are the recipe's.
"""
from __future__ import annotations

import concurrent.futures
import http.client
import importlib.util
import json
import pathlib
import re
import time
import urllib.error
import urllib.request

import numpy as np

from prove import cases, record, workload
from prove.compare import words
from prove.engine import EngineError, pack
from prove.recipe import Recipe
from prove.rollout import HEADINGS, Context, line, render, run_case
from prove.ui import UI

GENERATE = "/inference/v1/generate"
STARTED_WITH = "start it with: python3 -m launch serve RECIPE --enable-scale-out --enable-prompt-tokens-details"
NO_LOGPROB = -9999.0  # entrypoints/scale_out/token_in_token_out/serving.py:85


class Server:
    """The server in the place of an `Engine`: `call("run")` with the fields that a client has."""

    def __init__(self, url: str, ranks: int):
        self.url, self.ranks, self.shift, self.salt = url.rstrip("/"), ranks, 0, 0

    def about(self) -> dict:
        """The version, the tokens of a cache block, and since when it runs, None where it does not say. Raises
        EngineError if no vLLM answers there."""
        version = self._json("/version", None, 30, lambda said: str(said["version"]))
        metrics = self._ask("/metrics", None, 30)
        found = re.search(r'vllm:cache_config_info\{[^}]*\bblock_size="(\d+)"', metrics)
        if not found:
            raise EngineError("failed", f"{self.url}/metrics names no block size: is it a vLLM server?")
        # vLLM makes its metrics when the engine is up, minutes after it was imported; the process says its own start,
        # by a boot time of whole seconds.
        began = [float(at) for at in re.findall(r"^vllm:\w+_created\b.* ([\d.e+]+)$", metrics, re.MULTILINE)]
        began += [float(at) + 1 for at in re.findall(r"^process_start_time_seconds ([\d.e+]+)$", metrics, re.MULTILINE)]
        return {"versions": {"vllm": version}, "cache_block": int(found[1]), "since": min(began, default=None)}

    def call(self, op: str, timeout: float, *, requests: list[dict], fresh: bool = True,
             one_by_one: bool = False) -> dict:
        """`fresh`: nothing that earlier runs left in the prefix cache is read; a new salt sees to that."""
        assert op == "run", op
        self.salt += fresh
        started = time.monotonic()
        at_once = 1 if one_by_one else len(requests)
        pool = concurrent.futures.ThreadPoolExecutor(at_once)
        waiting = [pool.submit(self._answer, index, request, started + timeout)
                   for index, request in enumerate(requests)]
        try:
            answers = {request["id"]: each.result() for request, each in zip(requests, waiting, strict=True)}
        except BaseException as error:
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)  # Ctrl-C waits for no server
            raise
        pool.shutdown()
        return {"answers": answers, "seconds": round(time.monotonic() - started, 3)}

    def _answer(self, index: int, request: dict, deadline: float) -> dict:
        scored = request.get("prompt_logprobs", False)
        body = {"token_ids": request["prompt"], "cache_salt": f"prove-{self.salt}", "sampling_params": {
            "temperature": request["temperature"], "seed": request["seed"], "max_tokens": request["max_tokens"],
            "ignore_eos": True, "detokenize": False, "logprobs": 0, "prompt_logprobs": 0 if scored else None,
            "skip_reading_prefix_cache": not request.get("read_cache", False)}}
        headers = {"X-data-parallel-rank": str((index + self.shift) % self.ranks)} if self.ranks > 1 else {}
        left = max(1.0, deadline - time.monotonic())
        return self._json(GENERATE, body, left, lambda said: _parsed(said, request["prompt"], scored), headers)

    def _json(self, path: str, body: dict | None, timeout: float, read, headers: dict[str, str] | None = None):
        """`read` of what is answered; what it cannot read is another server's answer."""
        text = self._ask(path, body, timeout, headers)
        try:
            return read(json.loads(text))
        except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
            raise EngineError("failed", f"{self.url}{path} did not answer as vLLM 0.33.0 does ({type(error).__name__}: "
                                        f"{error}): {text[:200]!r}\n{STARTED_WITH}") from None

    def _ask(self, path: str, body: dict | None, timeout: float, headers: dict[str, str] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        deadline = time.monotonic() + timeout
        try:
            with urllib.request.urlopen(asked, timeout=timeout) as answer:
                return _read(answer, deadline).decode(errors="replace")
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise EngineError("failed", f"{self.url}{path} answered {error.code}: {said}\n{STARTED_WITH}") from None
        except (OSError, http.client.HTTPException) as error:
            said = str(error).strip() or type(error).__name__
            raise EngineError("died", f"{self.url}{path}: {said}; {STARTED_WITH}") from None


def _require_version(server: str, url: str, vllm: pathlib.Path) -> None:
    """The record would otherwise be bound to files that the server has not."""
    file = vllm / "_version.py"
    text = file.read_text() if file.is_file() else ""
    found = re.search(r"""^__version__\b[^'"\n]*=[^'"\n]*['"]([^'"\n]+)['"]""", text, re.MULTILINE)
    if not found:
        raise ValueError(f"{file} names no version to compare with the server's ({server}): run it with the server's "
                         "interpreter, for which vLLM is installed")
    if found[1] != server:
        raise ValueError(f"the server at {url} runs vLLM {server}, this Python's is {found[1]} ({vllm}): run it with "
                         "the server's interpreter")


def _require_unchanged(since: float | None, url: str, site: pathlib.Path) -> None:
    """A server goes on with what it imported. `since` is of its own clock, which is this one's where it runs here."""
    files = [path for path in record.paths(record.bind(site).get("entry")) if (site / path).is_file()]
    if since and (later := sorted(path for path in files if (site / path).stat().st_mtime > since)):
        raise ValueError(f"the server at {url} began before {later[0]} was written" + (
            f", and {len(later) - 1} more" if len(later) > 1 else "") + ": start it anew")


def _read(answer, deadline: float) -> bytes:
    """The whole answer. urlopen's time is that of one read, and a server may send a byte at a time for ever."""
    parts = []
    while part := answer.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
    if answer.length:  # read1 does not mind an answer that was cut off
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    return b"".join(parts)


def _parsed(said: dict, prompt: list[int], scored: bool) -> dict:
    """Raises where `said` is no answer to `prompt`."""
    choice = said["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or []
    details = (said.get("usage") or {}).get("prompt_tokens_details") or {}
    answer = {"tokens": pack(np.asarray([one["token_id"] for one in content], np.int64)),
              "words": _words(one["logprob"] for one in content), "cached": int(details.get("cached_tokens") or 0)}
    if scored:  # one entry a prompt token, by token id; the first has none, nor has what the cache supplied
        entries = said.get("prompt_logprobs") or ()
        given = [(one, token) for one, token in zip(entries[::-1], prompt[::-1], strict=False) if one][::-1]
        answer["prompt_words"] = _words(one[str(token)]["logprob"] for one, token in given)
    return answer


def _words(logprobs) -> dict:
    return pack(words([float("nan") if one == NO_LOGPROB else one for one in logprobs]))


def base(ctx) -> None:
    """Everything below is compared with this: all requests at once, nothing cached."""
    ctx.base = ctx.run([r.message() for r in ctx.work.requests])
    for request in ctx.work.requests:
        ctx.figures.count(request.id, ctx.base.decoded(request.id), request.max_tokens)


def alone(ctx) -> None:
    chosen = ctx.work.spread(cases.SUBSET)
    messages = [r.message(max_tokens=min(cases.ALONE_HEAD, r.max_tokens)) for r in chosen]
    ctx.compare_decoded(ctx.run(messages, one_by_one=True), chosen, head=cases.ALONE_HEAD)


def other_rank(ctx) -> None:
    """The same requests, each at the next data-parallel rank."""
    ctx.engine.shift += 1
    try:
        ctx.compare_decoded(ctx.run([r.message() for r in ctx.work.requests]))
    finally:
        ctx.engine.shift -= 1


CLIENTS = ("twice", "prefill-batched", "reversed", "prefill-alone", "prefix-warm", "prefix-turns")
CASES = (cases.Case("base", "all requests at once; nothing missing, no NaN", base),
         *(cases.BY_NAME[name] for name in CLIENTS),
         cases.Case("alone", f"batched vs alone: {cases.ALONE_HEAD} tokens of each of {cases.SUBSET} requests", alone),
         cases.Case("other-rank", "every request answered by another data-parallel rank", other_rank))


def served(recipe: Recipe, ui: UI, *, url: str, tokens: int, out: pathlib.Path, budget: float) -> dict:
    """Runs the cases against the server at `url` and returns the finished record's data."""
    if not re.match(r"https?://(\[[\da-fA-F:.]+\]|[^/:\[\]]+)(:\d+)?(/|$)", url):
        raise ValueError(f"--url {url}: expected http://HOST:PORT, of a server to be compared with itself")
    ranks = recipe.layout("rollout")["data"]
    work = workload.build(tokens, recipe.vocab)
    kept = record.Record("served", recipe.subject, {"sampled_tokens": work.tokens, "requests": len(work.requests),
                                                    "ranks": ranks}, out)
    spec = importlib.util.find_spec("vllm")
    if not spec:
        raise ValueError("this Python has no vLLM to bind the record to: run it with the server's interpreter")
    server = Server(url, ranks)
    about, vllm = server.about(), pathlib.Path(spec.origin).parent
    _require_version(about["versions"]["vllm"], server.url, vllm)
    _require_unchanged(about["since"], server.url, vllm.parent)
    kept.engine("served", {**about, "vllm_path": str(vllm)}, recipe.engine_flags(True),
                recipe.environment(True))
    context, deadline, rows = Context(work), time.monotonic() + budget, []
    ui.say(line(HEADINGS))
    for case in CASES[:len(CASES) - (ranks == 1)]:
        row = run_case(context, case, server, about["cache_block"], max(1.0, deadline - time.monotonic()))
        rows.append(row)
        kept.row(row)
        ui.say(line(render(row)))
        for text in [*row["unmet"][:3], row.get("error"), row.get("first")]:
            if text:
                ui.say(f"    {text}")
        if context.base is None:
            break
    complete = kept.locked and len(rows) > 1 and all(row["state"] in ("equal", "differs") for row in rows)
    kept.finish(complete, all(row["state"] == "equal" for row in rows), locked=kept.locked)
    return kept.data
