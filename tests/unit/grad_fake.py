"""`prove grad`'s backend in two steps of given figures. flags["fault"]: "hangs" or "fails" in the second step, "blind"
catches no fault, "far" has a gradient over its bound, "nan" one that is no number."""
import os
import time

FAULTS = ("one", "other")


def rows(*errors):
    return [{"parameter": f"w{place}", "error": error, "usual_error": 0.02, "norm": 1.0, "cosine": 1.0}
            for place, error in enumerate(errors)]


class Backend:
    def __init__(self, *, model, flags, weights_script=None, emit=None):
        self.fault = flags.get("fault")

    def info(self):
        folder = os.environ["FAKE_SITE"]
        return {"versions": {"vllm": "fake"}, "gpu": "none", "start_seconds": 0.0, "weights": "00", "cache_block": 16,
                "vllm_path": f"{folder}/vllm", "megatron_path": f"{folder}/megatron"}

    def op_actor(self, lr):
        return {"faults": FAULTS}

    def op_gradients(self, sequences, micro, faults):
        assert tuple(faults) == FAULTS
        last = {"far": 0.05, "nan": float("nan")}.get(self.fault, 0.03)
        self.found = {"rows": rows(0.01, last), "faults": {"one": rows(0.01, 0.5)}, "missing": ["planted other"]}
        return self.found

    def op_more_gradients(self):
        if self.fault == "hangs":
            time.sleep(60)
        if self.fault == "fails":
            raise RuntimeError("no memory is left")
        other = {"other": rows(0.01, 0.02 if self.fault == "blind" else 0.5)}
        return {**self.found, "faults": self.found["faults"] | other, "missing": []}
