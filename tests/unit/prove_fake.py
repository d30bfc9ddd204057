"""A backend for prove.engine that needs no GPU: a "model" whose next token is a pure function of the tokens before it.

flags["fault"] plants what the harness must notice: "batch" lets a logprob depend on how many requests run together,
"phase" lets prefill differ from decode in one place, "order" lets it follow the order of requests that read the cache,
"nan", "lost" (an answer is missing), "unscored hits" (no prompt logprob behind a cached prefix), "hang", "die",
"raise", "patched differs" (not from a folder named pristine), "unstable" (long prompts answer differently every time),
"no profile" (the profiler saw no step). A file "fault" in the first folder of PYTHONPATH plants one.
"""
import os
import pathlib
import struct
import time
import zlib

import numpy as np

from prove.engine import pack

BLOCK = 256


def _word(prefix: bytes, token: int) -> int:
    value = -0.5 - (zlib.crc32(prefix + struct.pack("<q", token)) % 9973) / 1000
    return struct.unpack("<I", struct.pack("<f", value))[0]


class Backend:
    def __init__(self, *, model, flags, weights_script=None, emit=None):
        self.fault, self.vocab, self.site = flags.get("fault"), 97, os.environ["FAKE_SITE"]
        planted = pathlib.Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]) / "fault"
        if planted.is_file():
            self.fault, self.site = planted.read_text(), str(planted.parent)
        self.eager = flags.get("enforce_eager", False)
        invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        self.rate, self.slow = (900.0, 80.0) if invariant else (1000.0, 50.0)
        if self.fault == "patched differs" and "pristine" in os.environ["PYTHONPATH"]:
            self.fault = None
        if self.fault == "no start":
            raise ValueError("the engine refuses: TP > 1")
        if self.fault == "refuse":
            raise ValueError("VLLM batch_invariant mode is not supported")
        emit({"event": "log", "text": "fake started"})

    def info(self):
        return {"versions": {"vllm": "fake"}, "gpu": "none", "vllm_path": self.site + "/vllm",
                "start_seconds": 0.0, "cache_block": BLOCK, "max_model_len": 8192, "max_num_seqs": 256,
                "weights": "00"}

    def op_bench(self, *, requests, profile_steps=0):
        tokens = sum(r["max_tokens"] for r in requests)
        profile_steps *= self.fault != "no profile"
        kernels = [{"name": "sm90_fp8_gemm_1d2d_impl", "count": 1, "us": 100.0 * profile_steps},
                   {"name": "flash_fwd_splitkv_mla", "count": 1, "us": self.slow * profile_steps}]
        return {"tokens": tokens, "seconds": tokens / self.rate, "decode_steps": 5,
                "decode_tokens_per_second": self.rate, "kernels": kernels if profile_steps else [],
                "profiled_steps": profile_steps, "host": [{"function": "wait", "calls": 1.0, "own_us": self.slow}]}

    def op_decode_begin(self, *, requests):
        self.rows = len(requests)
        return {"seconds": 0.1}

    def op_decode(self, *, steps, untimed):
        each = self.rows / self.rate
        return {"steps": steps, "seconds": steps * each, "median": each, "longest": each}

    def op_decode_end(self):
        self.rows = 0

    def op_run(self, *, requests, chunk=None, graphs="on", preempt_at=(), fresh=True, one_by_one=False,
               keep_blocks=None):
        if self.fault == "hang":
            time.sleep(60)
        if self.fault == "die":
            os._exit(3)
        if self.fault == "raise":
            raise RuntimeError("CUDA error: an illegal memory access")
        self.calls = getattr(self, "calls", 0) + 1
        together = 1 if one_by_one else len(requests)
        self.backwards = requests[0]["id"] > requests[-1]["id"]
        answers = {r["id"]: self._answer(r, together) for r in requests}
        if self.fault == "lost":
            answers.pop(requests[-1]["id"])
        joined = any(r.get("join") for r in requests)
        graphs = "off" if self.eager else graphs
        modes = {"off": {"NONE": 1}, "on": {"FULL": 1}, "mixed": {"FULL": 1, "NONE": 1}}[graphs]
        return {"answers": answers, "seconds": 0.0, "modes": modes, "decode_rows": [together],
                "mixed_steps": int(joined), "longest_chunk": chunk or 5000,
                "mixed_modes": {"PIECEWISE" if chunk else "NONE": 1} if joined else {},
                "preemptions": int(bool(preempt_at or keep_blocks)), "peak_blocks": 100}

    def _answer(self, request, together):
        prompt = request["prompt"]
        prefix = np.asarray(prompt, np.int64).tobytes()
        tokens, out = [], []
        for _ in range(request["max_tokens"]):
            token = (zlib.crc32(prefix) + request["seed"]) % self.vocab
            tokens.append(token)
            out.append(_word(prefix, token))
            prefix += struct.pack("<q", token)
        if self.fault == "batch" and together > 1 and len(prompt) == 257:
            out[3] ^= 1
        if self.fault == "patched differs":
            out[0] ^= 1
        if self.fault == "unstable" and len(prompt) > 200:
            out[0] ^= os.getpid() % 251 + self.calls
        if self.fault == "nan":
            out[0] = 0x7FC00000
        answer = {"tokens": pack(np.asarray(tokens, np.int64)), "words": pack(np.asarray(out, np.uint32)),
                  "cached": BLOCK if request.get("read_cache") and len(prompt) > BLOCK else 0}
        if request.get("prompt_logprobs"):
            data = np.asarray(prompt, np.int64).tobytes()
            scored = [_word(data[:8 * i], prompt[i]) for i in range(1, len(prompt))]
            if self.fault == "phase" or self.fault == "order" and self.backwards and answer["cached"]:
                scored[-1] ^= 1 << 31
            behind = len(scored) if self.fault == "unscored hits" and answer["cached"] else answer["cached"]
            answer["prompt_words"] = pack(np.asarray(scored[behind:], np.uint32))
        return answer
