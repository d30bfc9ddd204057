"""Kill apply and revert at any moment: after `recover` a real target is byte for byte pristine or locked.

Kills come at random moments of the whole run, at random moments of the part that writes, and at chosen system calls.
"""
from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from delivery import Checkout, assert_same, difference, snapshot

SEED = 20261130
KILLS = 13   # an apply and a revert each, on a tree and on a site: 52 in all
STEPS = 8   # chosen system calls for each verb
DIE = Path(__file__).with_name("die_at_step.py")


class Subject:
    """One target with its two ends, both taken from undisturbed runs; `now` is where it stands."""

    def __init__(self, checkout: Checkout, root: Path, where: list[str], state: str):
        self.checkout, self.root, self.where, self.state = checkout, root, where, root / state
        self.ends = {"pristine": snapshot(root)}
        checkout.run("apply", *where)
        self.ends["locked"] = snapshot(root)
        self.now = "locked"

    @property
    def interrupted(self) -> bool:
        return (self.state / "journal.json").exists()

    def settle(self, what: str) -> str:
        """Recover, and demand one of the two ends. Returns which."""
        self.checkout.run("recover", *self.where)
        found = snapshot(self.root)
        between = min((difference(end, found) for end in self.ends.values()), key=len)
        assert not between, f"in between after {what}: {len(between)} paths, {between[:5]}"
        [self.now] = [name for name, end in self.ends.items() if end == found]
        return self.now

    def bring_to(self, end: str) -> None:
        if self.now != end:
            self.checkout.run("apply" if end == "locked" else "revert", *self.where)
            assert_same(self.ends[end], snapshot(self.root), f"brought to {end}")
            self.now = end


@pytest.fixture
def tree(vllm_tree, checkout) -> Subject:
    return Subject(checkout, vllm_tree, ["--from", vllm_tree], ".zero-mismatch")


@pytest.fixture(params=["tree", "site"])
def subject(request, checkout) -> Subject:
    if request.param == "tree":
        return request.getfixturevalue("tree")
    root = request.getfixturevalue("site")
    [info] = root.glob("vllm-*.dist-info")
    return Subject(checkout, root, ["--upstream", "vllm", "--site", root], f"{info.name}/zero_mismatch")


def start(subject: Subject, verb: str) -> subprocess.Popen:
    return subprocess.Popen(subject.checkout.command(verb, *subject.where), stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, start_new_session=True, env=subject.checkout.env)


def wait_for(sign: Path, process: subprocess.Popen) -> float:
    """When `sign` appears, or the process ends without it."""
    while not sign.exists() and process.poll() is None:
        time.sleep(0.0005)
    return time.monotonic()


SINCE = ("its start", "its first write", "its first rename")


def sign(subject: Subject, verb: str, since: str) -> Path:
    """What shows that the verb has come there: apply makes the state folder first; both then write a journal."""
    return subject.state if (verb, since) == ("apply", "its first write") else subject.state / "journal.json"


def measure(subject: Subject, verb: str) -> dict[str, float]:
    """Seconds from each of the three moments to the end of an undisturbed run."""
    begun = {"its start": time.monotonic()}
    process = start(subject, verb)
    for since in SINCE[1:]:
        begun[since] = wait_for(sign(subject, verb, since), process)
    assert process.wait() == 0
    subject.now = "locked" if verb == "apply" else "pristine"
    return {since: time.monotonic() - at for since, at in begun.items()}


def kill_once(subject: Subject, verb: str, delay: float, since: str) -> None:
    process = start(subject, verb)
    if since != "its start":
        wait_for(sign(subject, verb, since), process)
    time.sleep(delay)
    try:
        os.killpg(process.pid, signal.SIGKILL)  # git, where it runs, dies with it
    except ProcessLookupError:
        pass
    process.wait()


def test_killed_at_random_moments_recover_leaves_pristine_or_locked(subject):
    """Over the whole run, and, so that enough of them meet a half-written target, over its last two parts."""
    dice = random.Random(SEED)
    lasts = {"revert": measure(subject, "revert"), "apply": measure(subject, "apply")}
    ends, interrupted = set(), 0
    for number in range(KILLS):
        for verb in ("apply", "revert"):
            subject.bring_to("pristine" if verb == "apply" else "locked")
            since = SINCE[number % 3]
            delay = dice.uniform(0, lasts[verb][since])
            kill_once(subject, verb, delay, since)
            interrupted += subject.interrupted
            ends.add(subject.settle(f"a kill of {verb} {delay:.4f} s after {since}"))
    for _ in range(10 * KILLS):  # a loaded machine stretches a run's end: go on, closer to the first rename
        if interrupted >= 3:
            break
        subject.bring_to("pristine")
        delay = dice.uniform(0, lasts["apply"][SINCE[2]] / 10)
        kill_once(subject, "apply", delay, SINCE[2])
        interrupted += subject.interrupted
        ends.add(subject.settle(f"a kill of apply {delay:.4f} s after {SINCE[2]}"))
    assert interrupted >= 3, f"only {interrupted} kills met a half-written target: not a test of those"
    assert ends == {"pristine", "locked"}


def die(subject: Subject, step: int, verb: str) -> subprocess.CompletedProcess:
    arguments = [DIE, subject.checkout.root, step, verb, *subject.where, "--json"]
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env=subject.checkout.env)


def count_steps(subject: Subject, verb: str) -> int:
    end = "pristine" if verb == "revert" else "locked"
    subject.bring_to("locked" if verb == "revert" else "pristine")
    done = die(subject, -1, verb)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(subject.ends[end], snapshot(subject.root), "an undisturbed run")
    subject.now = end
    return int(done.stdout.rpartition("steps: ")[2])


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_killed_at_chosen_system_calls_recover_leaves_pristine_or_locked(subject, verb):
    """Evenly over all steps; at the end, where the journal goes, one by one."""
    count = count_steps(subject, verb)
    seen = set()
    for step in sorted({*range(0, count, count // STEPS), *range(count - 4, count)}):
        subject.bring_to("pristine" if verb == "apply" else "locked")
        done = die(subject, step, verb)
        assert done.returncode == -signal.SIGKILL, (step, done.stderr)
        seen.add(subject.settle(f"a kill of {verb} at step {step} of {count}"))
    assert seen == {"pristine", "locked"}


def interrupt(tree: Subject, verb: str = "apply") -> None:
    """Leave the target half written."""
    count = count_steps(tree, verb)
    for share in (0.8, 0.7, 0.9, 0.6, 0.95):
        tree.bring_to("pristine" if verb == "apply" else "locked")
        assert die(tree, int(count * share), verb).returncode == -signal.SIGKILL
        if tree.interrupted:
            return
        tree.settle(verb)
    pytest.fail("no kill left a journal behind")


@pytest.mark.parametrize("verb", ["apply", "revert"])
def test_recover_itself_may_be_killed(tree, verb):
    """Another recover settles it, wherever the first one died."""
    interrupt(tree, verb)
    for step in (0, 3, 10, 30, 60):
        assert die(tree, step, "recover").returncode in (0, -signal.SIGKILL)
    tree.settle(f"a killed {verb} and five killed recovers")


def test_an_interrupted_target_says_so_in_every_verb(tree):
    interrupt(tree)
    before = snapshot(tree.root)
    for verb in ("plan", "apply", "verify", "status", "revert"):
        error = tree.checkout.refused(verb, *tree.where, code=1)
        assert "interrupted half way" in error["message"] and "recover" in error["remedy"], verb
        assert_same(before, snapshot(tree.root), verb)
    said = tree.checkout.run("recover", *tree.where)
    assert said["targets"][0]["done"] in ("recovered to applied", "recovered to pristine")
