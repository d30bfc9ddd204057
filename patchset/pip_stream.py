"""Stream one sdist to stdout, found and requested by pip. A script for the Python that has pip; nothing imports it.

`pip download` would build the sdist's metadata, which for vLLM means installing torch. pip's own session and finder do
only what is wanted, under the user's whole configuration: indexes, mirrors, find-links, proxies, certificates,
credentials. They are pip's internals, so this file is small, tried with pip 22.0 to 26.3, and says so when they differ.

Arguments: name, version, sha256. Output: one line of JSON, {"file", "size"} or {"error", ...}; then the bytes.
Written for Python 3.7 and later, as it may not be ours.
"""
import json
import logging
import os
import sys
import time

CHUNK = 1 << 18
ATTEMPTS = 3  # without a new byte; a broken-off transfer goes on where it stopped


class Collected(logging.Handler):
    """Keeps what pip says of indexes it could not read, rather than printing it."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.lines = []

    def emit(self, record):
        line = record.getMessage()
        warned = record.levelno >= logging.WARNING and not line.startswith(("Retrying", "Location"))
        if warned or line.startswith("Could not fetch URL"):
            self.lines.append(line)


def main(name, version, digest):
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a question for a password must not end up in the archive
    log = Collected()
    logger = logging.getLogger("pip")
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        from pip._internal.commands import create_command

        command = create_command("download")
        # No pip cache: it would hold a second copy of what ours keeps.
        options, _ = command.parse_args(
            ["--no-deps", "--no-cache-dir", "--ignore-requires-python", "--no-binary", ":all:", name])
        with command.main_context():
            session = command.get_default_session(options)
            finder = command._build_package_finder(options, session, ignore_requires_python=True)
            found = [(str(c.version), c.link) for c in finder.find_all_candidates(name)]
            links = [link for its, link in found if its == version and not link.is_wheel and not link.is_vcs]
            if not links:
                return say(out, error="not-found", versions=sorted({its for its, _ in found}), unread=log.lines)
            link = max(links, key=lambda link: rank(link, digest))
            if rank(link, digest) < 0:
                return say(out, error="other-digest", url=link.url_without_fragment, digest=link.hash)
            return stream(session, link, out)
    except (ImportError, AttributeError, TypeError) as error:
        return say(out, error="no-pip", detail=f"{type(error).__name__}: {error}")
    except Exception as error:
        return say(out, error="pip", detail=str(error))
    except SystemExit:  # a setting that pip refuses: the reason is in its log, or for an older pip on stderr
        return say(out, error="pip", detail=" ".join(log.lines))


def rank(link, digest):
    """1: the index says it has the pinned digest (any, if none is pinned). 0: it does not say. -1: it says another."""
    if link.hash_name != "sha256":
        return 0
    return 1 if digest in ("", link.hash) else -1


def say(out, **fields):
    out.write(json.dumps(fields).encode() + b"\n")
    out.flush()
    return 1 if "error" in fields else 0


def stream(session, link, out):
    """Header, then the bytes. An error once the header has gone out is told on stderr and by the exit code."""
    sent, size, failures = 0, None, 0
    while failures < ATTEMPTS:
        time.sleep(failures)
        before = sent
        try:
            headers = {"Accept-Encoding": "identity"}
            if sent:
                headers["Range"] = f"bytes={sent}-"
            response = session.get(link.url_without_fragment, stream=True, headers=headers)
            response.raise_for_status()
            if size is None:
                size = int(response.headers.get("Content-Length") or 0)
                say(out, file=link.filename, size=size or None)
            # A server that knows no ranges starts again: leave out what was sent.
            repeated = sent if response.status_code != 206 else 0
            for chunk in response.iter_content(CHUNK):
                fresh = chunk[repeated:]
                repeated = max(0, repeated - len(chunk))
                out.write(fresh)
                sent += len(fresh)
            if sent >= size:
                out.flush()
                return 0
            reason = "the server closed the connection"
        except BrokenPipeError:
            return 1
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            if size is None:  # pip has tried several times already
                return say(out, error="request", url=link.url_without_fragment, detail=reason)
        failures = 1 if sent > before else failures + 1
    out.flush()
    sys.stderr.write(f"broken off after {sent} of {size or 'unknown'} bytes: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
