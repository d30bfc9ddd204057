"""Run a verb of apply.py and die, as by kill -9, at the n-th call that changes the disk. A script of test_deliver_kill.

Arguments: checkout, step, then the verb and its options. With step -1 it lives and prints how many steps there were.
"""
import os
import signal
import sys
from pathlib import Path

CALLS = ("replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir", "open", "fsync", "fchmod")


def main(root: str, step: str, *arguments: str) -> int:
    sys.path.insert(0, root)
    import apply

    taken, last = 0, int(step)

    def counting(real):
        def call(*args, **options):
            nonlocal taken
            if taken == last:
                os.kill(os.getpid(), signal.SIGKILL)
            taken += 1
            return real(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    sys.argv = [str(Path(root) / "apply.py"), *arguments]
    code = apply.main()
    print(f"steps: {taken}")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
