"""Training over two nodes: a launcher on each, with CP within a node, across the nodes and over all ranks.

On loopback, and where the machine allows it with a network namespace for each node and a cable between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from installed import RELEASE

SCRIPT = Path(__file__).parent / "scripts" / "node.py"
DEADLINE, GRACE = 120.0, 20.0
METHODS = ("allgather", "alltoall")
GROUPS = {
    "within nodes": [[0, 1], [2, 3]],
    "across nodes": [[0, 2], [1, 3]],
    "over all ranks": [[0, 1, 2, 3]],
}


class Network(NamedTuple):
    """Two nodes: what to put before a command to run it on each, and how they reach each other."""

    enter: tuple[list[str], list[str]]
    interface: str
    address: str
    port: int


# --- networks -----------------------------------------------------------------------------------------------------------


@contextmanager
def loopback() -> Iterator[Network]:
    """Both nodes on this machine as it is."""
    interface = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield Network(([], []), interface, "127.0.0.1", port)


@contextmanager
def namespaces() -> Iterator[Network]:
    """A network namespace for each node and a cable between them.

    Neither has a name outside: a namespace goes, with its end of the cable, when no process is left in it, and the one
    that holds it ends with this process.
    """
    # Who is not root may be it in a user namespace, which then owns both network namespaces.
    root = os.geteuid() == 0
    with ExitStack() as stack:
        first = hold(stack, ["unshare", *([] if root else ["--user", "--map-root-user"]), "--net"])
        user = [] if root else [f"--user=/proc/{first}/ns/user", "--preserve-credentials"]
        second = hold(stack, [*(["nsenter", *user] if user else []), "unshare", "--net"])
        one, two = (["nsenter", *user, f"--net=/proc/{pid}/ns/net"] for pid in (first, second))
        permitted([*one, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(second)])
        for enter, address in ((one, "10.77.0.1"), (two, "10.77.0.2")):
            permitted([*enter, "ip", "address", "add", f"{address}/24", "dev", "cable"])
            for interface in ("lo", "cable"):
                permitted([*enter, "ip", "link", "set", interface, "up"])
        yield Network((one, two), "cable", "10.77.0.1", 29500)  # any port is free there


def hold(stack: ExitStack, unshare: list[str]) -> int:
    """The pid of a process that waits in a namespace of its own."""
    command = [*unshare, "sh", "-c", "echo; exec cat"]  # cat ends with its input, however this process ends
    pipe = subprocess.PIPE
    with skipped_where_refused():
        process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None and process.stderr is not None
    assert select.select([process.stdout], [], [], GRACE)[0], command
    if not process.stdout.readline():
        pytest.skip(f"no network namespaces here: {process.stderr.read().strip()}")
    return process.pid


def permitted(command: list[str]) -> None:
    with skipped_where_refused():
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=GRACE)


@contextmanager
def skipped_where_refused() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")


NETWORKS: dict[str, Callable[[], contextlib.AbstractContextManager[Network]]] = {
    "loopback": loopback,
    "namespaces": namespaces,
}


# --- launchers ----------------------------------------------------------------------------------------------------------


def train(network: Network, folder: Path) -> list[int]:
    """Run the script under a launcher on each node; their pids."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GLOO_SOCKET_IFNAME": network.interface,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    logs = [folder / f"node-{node}.txt" for node in range(2)]
    with ExitStack() as stack:
        launchers = []
        for node, (enter, log) in enumerate(zip(network.enter, logs, strict=True)):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
            where = ["--node-rank", str(node), "--master-addr", network.address, "--master-port", str(network.port)]
            output = stack.enter_context(log.open("w"))
            process = stack.enter_context(
                subprocess.Popen(
                    [*enter, *launcher, *where, str(SCRIPT), str(folder)],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            stack.callback(end, process)
            launchers.append(process)
        deadline = time.monotonic() + DEADLINE
        codes: list[int | None] = [None, None]
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.05)
            codes = [process.poll() for process in launchers]
    assert codes == [0, 0], "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)
    return [process.pid for process in launchers]


def end(launcher: subprocess.Popen[bytes]) -> None:
    """Asked to end, a launcher ends its ranks; killed, it leaves them to their own deadline, which comes first."""
    launcher.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)


# --- the test -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETWORKS)
def test_two_nodes_train_as_one_process_would(tmp_path: Path, kind: str) -> None:
    with NETWORKS[kind]() as network:
        launchers = train(network, tmp_path)
    found: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]

    # Two launchers of two ranks each; a namespace of its own for each launcher, or this process's for all.
    places = [(one["rank"], one["node"], one["local_rank"], one["launcher"]) for one in found]
    assert places == [(rank, rank // 2, rank % 2, launchers[rank // 2]) for rank in range(4)]
    here = os.readlink("/proc/self/ns/net") if Path("/proc/self/ns/net").is_symlink() else ""
    spaces = [one["namespace"] for one in found]
    assert [spaces[0], spaces[2]] == [spaces[1], spaces[3]]
    assert len({here, *spaces}) == (3 if kind == "namespaces" else 1)

    for rank, one in enumerate(found):
        assert one["cases"].keys() == GROUPS.keys()
        for case, methods in one["cases"].items():
            assert tuple(methods) == METHODS
            adopted = RELEASE.own_context == "prepare" and case != "across nodes"
            for method, result in methods.items():
                assert result["method"] == method
                assert [result["group"]] == [group for group in GROUPS[case] if rank in group]
                assert result["origin"] == ("adopted" if adopted else "created")
                assert result["wrapper"] == "DistributedDataParallel"
                assert result["loss"] < 1e-6
                assert result["gradient"] < 1e-5
