"""Shared code of the comparisons with peers, which scripts/peers.sh starts."""

import os
import signal
import socket
import sys
import time
import urllib.request

TICK = 1 / os.sysconf("SC_CLK_TCK")
CHECKS = "out/peers_checks.txt"  # results that scripts/peers.sh prints at the end


class Checks:
    """Collects the results of checks; the script fails if one of them fails."""

    def __init__(self, part):
        self.part, self.lines, self.failed = part, [], False

    def hold(self, ok, text):
        self.failed |= not ok
        self.lines.append(f"{'ok    ' if ok else 'FAILED'}  {self.part}: {text}\n")

    def end(self):
        with open(CHECKS, "a") as f:
            f.writelines(self.lines)
        sys.exit(self.failed)


def give_up_after(seconds):
    """Ends this program, with cleanup, if it takes longer."""

    def give_up(*_):
        sys.exit(f"{sys.argv[0]}: not finished within {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    signal.alarm(seconds)


def free_ports(n):
    held = [socket.socket() for _ in range(n)]
    for s in held:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def family(pid):
    """A process and its descendants."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            children = f.read().split()
    except OSError:
        return []
    return [pid] + [p for c in children for p in family(int(c))]


def cpu_seconds(pid):
    """User and system time of a process and its descendants."""
    total = 0
    for p in family(pid):
        with open(f"/proc/{p}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK


def resident_bytes(pid):
    total = 0
    for p in family(pid):
        with open(f"/proc/{p}/statm") as f:
            total += int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def wait_for(what, limit, check, pause=0.05):
    """Waits until check returns a true value, and returns it."""
    end = time.monotonic() + limit
    while True:
        try:
            if found := check():
                return found
        except OSError:
            pass
        if time.monotonic() > end:
            sys.exit(f"{what}: not within {limit} s")
        time.sleep(pause)


def answers(url):
    with urllib.request.urlopen(url, timeout=2) as answer:
        return answer.status == 200


def end_all(processes):
    """Stops the processes in reverse order of their start."""
    for process in reversed(processes):
        process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except Exception:
            process.kill()
            process.wait()


def table(head, rows):
    """Prints a Markdown table; head and rows are lists of cells."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)
