"""What a container does with its command, its health, and what the build tells Docker."""
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from image_stage import ROOT
from prove import __main__ as prove_command

ECHO = "#!/bin/sh\nprintf '%s\\n' \"$0\" \"$@\" | sed 's|.*/||'\n"


@pytest.fixture
def tools(tmp_path):
    """A python3 that says what it was asked."""
    (tmp_path / "python3").write_text(ECHO)
    (tmp_path / "python3").chmod(0o755)
    return tmp_path


def entry(tools, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run([ROOT / "docker/entrypoint.sh", *arguments], capture_output=True, text=True, check=False,
                          env={"PATH": f"{tools}:/usr/bin:/bin", "ROOT": str(tools), **more})


@pytest.mark.parametrize("arguments, command", [
    (["serve", "r", "--port", "1"], ["python3", "-m", "launch", "serve", "r", "--port", "1"]),
    (["train", "r", "torchrun", "x y.py"], ["python3", "-m", "launch", "train", "r", "torchrun", "x y.py"]),
    (["prove", "rollout", "--recipe", "r"], ["python3", "-m", "prove", "rollout", "--recipe", "r"]),
])
def test_each_command_becomes_the_program_that_does_it(arguments, command, tools):
    done = entry(tools, *arguments)
    assert done.returncode == 0 and done.stdout.splitlines() == command


def test_a_proof_in_the_image_says_its_commit_and_the_users_own_folder_wins(tools):
    asked = ["prove", "rollout", "--recipe", "deepseek-v4", "--out", "mine"]
    line = entry(tools, *asked, EVIDENCE=str(tools), REVISION="abc").stdout.splitlines()
    assert line[:4] == ["python3", "-m", "prove", "rollout"] and {"--commit", "abc"} <= set(line)
    args = prove_command.parser().parse_args(line[3:])
    assert (args.commit, str(args.out)) == ("abc", "mine")
    assert entry(tools, "prove", EVIDENCE=str(tools), REVISION="abc").stdout.splitlines() == ["python3", "-m", "prove"]


def test_a_shell_runs_a_command_and_the_manifest_is_printed(tools):
    assert entry(tools, "shell", "-c", "echo $PYTHONPATH").stdout.strip() == str(tools)
    (tools / "image").mkdir()
    (tools / "image/manifest.json").write_text("{}")
    assert entry(tools, "manifest").stdout == "{}"


@pytest.mark.parametrize("arguments, code", [([], 2), (["help"], 0), (["serv"], 2), (["serve"], 2), (["train"], 2)])
def test_no_command_or_a_wrong_one_gets_the_list(arguments, code, tools):
    done = entry(tools, *arguments)
    assert done.returncode == code and "serve RECIPE" in done.stderr and "manifest" in done.stderr
    assert "set -" not in done.stderr


def health(mark) -> int:
    return subprocess.run([sys.executable, ROOT / "docker/image_health.py"], check=False, capture_output=True,
                          env={**os.environ, "ZERO_MISMATCH_SERVING": str(mark)}).returncode


def test_health_is_that_of_the_engine_that_serves(tmp_path):
    mark, status = tmp_path / "serving", [200]

    class Engine(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    assert health(mark) == 0  # nothing serves
    with http.server.HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        mark.write_text(str(server.server_port))
        assert health(mark) == 0
        status[0] = 503
        assert health(mark) == 1
        server.shutdown()
    assert health(mark) == 1  # it has gone


DOCKER = """#!{python}
import json, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], sys.stdin.read() if sys.argv[-1] == "-" else ""]) + "\\n")
if sys.argv[1] == "run":
    print({manifest!r})
"""


def test_the_build_labels_the_image_with_the_manifest_that_is_in_it(tmp_path):
    engine = {"version": "1", "commit": "c", "lock": "x", "tree": "t"}
    manifest = {"revision": "r", "base": "b@sha256:1", "cuda": "13.0.3", "vllm_from": "wheel", "patchset.lock": "l",
                "requirements.lock": "q", "engines": {"vllm": engine}}
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(python=sys.executable, log=str(tmp_path / "log"), manifest=json.dumps(manifest)))
    docker.chmod(0o755)
    subprocess.run([ROOT / "docker/build.sh", "zm:1", "--build-arg", "VLLM_FROM=source"], check=True,
                   env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True)
    first, run, second, inspect = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert first[0][:2] == ["build", "--build-arg"] and first[0][2].startswith("REVISION=")
    assert first[0][3:] == ["--tag", "zm:1", "--build-arg", "VLLM_FROM=source", "."]
    assert run[0] == ["run", "--rm", "zm:1", "manifest"] and inspect[0][:2] == ["image", "inspect"]
    assert second[1] == "FROM zm:1\n"
    assert {"zero-mismatch.vllm.tree=t", "org.opencontainers.image.base.digest=sha256:1"} <= set(second[0])
