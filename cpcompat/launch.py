"""Start n real ranks on this machine, with one deadline; get back the results, or the first failure with everything
that is known about it.

`run_ranks(fn, 2, x)` calls ``fn(x)`` on two fresh ranks. `Ranks` keeps its processes and their process group between
calls, which makes a call cost milliseconds. A rank that raises, dies, leaves early or hangs ends the call in a
`RankFailed`, and the whole set is killed; the next call starts a fresh one. Nothing outlives the parent.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util  # registers its exit hook, which joins children, before ours
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .errors import RankFailed
from .rank import dumps, serve

__all__ = ["Ranks", "run_ranks"]

T = TypeVar("T")

START_TIMEOUT = 120.0
"""Seconds until every rank must have joined the process group; the first set of a process also imports torch."""
GRACE = 1.0
"""Seconds that the other ranks get, after the first failure, to say how they fared."""
TAIL = 40
"""Lines of a rank's output that a failure shows; its ``output`` has all of them."""

_ALWAYS = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor.experimental")
_LIKELY = ("pytest", "accelerate", "transformers", "transformers.models.llama.modeling_llama")
_FORKS = "forkserver" in multiprocessing.get_all_start_methods()


class Ranks:
    """A set of processes that form one process group and run functions together.

    Args:
        nproc: how many ranks.
        timeout: seconds that a call may take, unless the call says otherwise.
        backend: the backend of the process group.

    Attributes:
        output: what each rank wrote to stdout and stderr in the last call.

    Between calls the ranks keep their process group and their imported modules. Environment, working directory,
    ``sys.path``, seeds and accelerate's shared state are set afresh for each call.
    """

    def __init__(self, nproc: int, *, timeout: float = 60.0, backend: str = "gloo") -> None:
        if nproc < 1:
            raise ValueError(f"nproc must be at least 1, not {nproc}")
        self.nproc = nproc
        self.timeout = timeout
        self.backend = backend
        self.output: list[str] = [""] * nproc
        self._ranks: list[_Rank] = []
        self._folder = Path()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results by rank.

        Args:
            fn: a function that can be imported by its name; so must everything in ``args`` and ``kwargs``.
            args: passed on to ``fn``.
            timeout: seconds until every rank must have returned.
            env: environment variables for this call, over those of this process.
            kwargs: passed on to ``fn``.

        Raises:
            RankFailed: with the facts ``rank``, ``exitcode``, ``traceback``, ``exception`` (or its repr, if it cannot
                be pickled), and by rank ``states`` and ``output``.
        """
        job: dict[str, Any] = {"env": {**os.environ, **(env or {})}, "path": sys.path, "cwd": os.getcwd()}
        try:
            job["call"] = dumps((fn, args, kwargs))
        except Exception as error:
            name = getattr(fn, "__qualname__", repr(fn))
            raise TypeError(
                f"{name} or one of its arguments cannot be sent to the ranks ({error}); "
                "the function must stand at the top of a module, the arguments must pickle"
            ) from error
        limit = self.timeout if timeout is None else timeout
        self.output = [""] * self.nproc
        with self._killed_on_error():
            if not all(rank.waits() for rank in self._ranks):
                self._kill()
            if not self._ranks:
                self._start()
            (self._folder / "job").write_bytes(pickle.dumps(job))
            for rank in self._ranks:
                rank.order(b"run")
            self._collect(limit, "return")
            spent = any(rank.news == b"spent" for rank in self._ranks)
            self.output = [rank.output() for rank in self._ranks]
            try:
                results = [rank.load() for rank in self._ranks]
            except Exception as error:
                what = "a result of the ranks cannot be read here"
                raise self._error(what, repr(error), "return plain values or tensors") from error
        if spent:
            self.close()
        return results

    def close(self) -> None:
        """End the ranks. The next `run` would start a new set."""
        # Every rank has reported by now, which is the barrier that an end without destroy_process_group needs.
        with self._killed_on_error():
            for rank in self._ranks:
                rank.order(b"end")
            deadline = time.monotonic() + GRACE
            for rank in self._ranks:
                rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cpcompat-"))
        context = _context(self.backend)
        with socket.socket() as free:  # for a body that makes a process group of its own
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for number in range(self.nproc):
            ours, theirs = context.Pipe()
            args = (theirs, self._folder, number, self.nproc, self.backend, port)
            process = context.Process(  # type: ignore[attr-defined]
                target=serve, args=args, name=f"cpcompat rank {number}"
            )
            self._ranks.append(_Rank(number, process, ours, theirs, self._folder))
        atexit.register(self._kill)
        failures: list[BaseException] = []

        def start(ranks: list[_Rank]) -> None:
            try:
                for rank in ranks:
                    rank.process.start()
                    rank.theirs.close()
                    if self._ranks is not ranks:  # the wait below was given up
                        return rank.kill()
            except BaseException as error:
                failures.append(error)

        # The fork server answers only after it has imported torch: a wait without a deadline, so not in this thread.
        deadline = time.monotonic() + START_TIMEOUT
        starter = threading.Thread(target=start, args=(self._ranks,), daemon=True)
        starter.start()
        starter.join(START_TIMEOUT)
        if failures or starter.is_alive():
            cause = failures[0] if failures else None
            why = repr(cause) if cause else f"not started within {START_TIMEOUT:g} s"
            next_step = "see stderr; does `import torch` work, and is there memory for more processes?"
            raise self._error(f"the {self.nproc} ranks could not be started", why, next_step) from cause
        self._collect(deadline - time.monotonic(), "join the process group")

    def _collect(self, limit: float, deed: str) -> None:
        """Wait until every rank has reported; raise for the first one that failed or for those that are late."""
        end = time.monotonic() + limit
        failed: list[_Rank] = []
        while pending := [rank for rank in self._ranks if not rank.news]:
            handles = {handle: rank for rank in pending for handle in (rank.conn, rank.process.sentinel)}
            ready = wait(list(handles), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in {handles[handle].number: handles[handle] for handle in ready}.values():
                rank.listen()
                if rank.news in (b"failed", b"died"):
                    if not failed:
                        end = min(end, time.monotonic() + GRACE)
                    failed.append(rank)
        if failed or pending:
            self._fail(failed, pending, limit, deed)

    def _fail(self, failed: list[_Rank], late: list[_Rank], limit: float, deed: str) -> NoReturn:
        # Where a rank died, an error that another one raised is most likely "connection closed by peer".
        culprit = min(failed, key=lambda rank: rank.news != b"died") if failed else late[0]
        states = [rank.state() for rank in self._ranks]
        _kill_processes(self._ranks)  # and only then read, so that the last words are in
        self.output = [rank.output() for rank in self._ranks]
        exception: BaseException | str | None = None
        trace = ""
        if culprit.news == b"failed":
            what, trace, pickled = culprit.load()
            what = f"rank {culprit.number} of {self.nproc} raised {what}"
            exception = what
            if pickled is not None:
                with contextlib.suppress(Exception):
                    exception = pickle.loads(pickled)
            next_step = "read the traceback; a rank that still runs most likely waits for this one"
        elif culprit.news == b"died":
            what = f"rank {culprit.number} of {self.nproc} {states[culprit.number]} before it could {deed}"
            if culprit.joined:
                next_step = "look for os._exit in the body, a crash in native code, or a limit on memory (SIGKILL)"
            else:
                next_step = 'see stderr; a script must start ranks below `if __name__ == "__main__":` only'
        else:
            names = ", ".join(str(rank.number) for rank in late)
            what = f"rank {names} of {self.nproc} did not {deed} within {limit:g} s"
            trace = states[culprit.number]
            next_step = "see where it waits and whether the others came there too; if all are just slow, allow more"
        parts = [trace.rstrip()] if trace and culprit.news else []
        parts += [f"rank {number}: {state}" for number, state in enumerate(states)]
        for number, text in enumerate(self.output):
            lines = text.splitlines()
            if lines:
                cut = f", last {TAIL} of {len(lines)} lines" if len(lines) > TAIL else ""
                parts.append("\n".join([f"output of rank {number}{cut}:", *(f"  {line}" for line in lines[-TAIL:])]))
        raise self._error(
            what,
            "\n".join(parts).replace("\n", "\n        "),
            next_step,
            rank=culprit.number,
            exitcode=culprit.process.exitcode if culprit.news == b"died" else None,
            traceback=trace,
            exception=exception,
            states=states,
        ) from (exception if isinstance(exception, BaseException) else None)

    def _error(self, what: str, evidence: str, next_step: str, **facts: Any) -> RankFailed:
        known = {"rank": 0, "exitcode": None, "traceback": "", "exception": None}
        if "states" not in facts:
            facts["states"] = [rank.state() for rank in self._ranks]
        return RankFailed(what, evidence, next_step, **{**known, **facts, "output": self.output})

    @contextlib.contextmanager
    def _killed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also KeyboardInterrupt, and a test runner's own kinds
            self._kill()
            raise

    def _kill(self) -> None:
        ranks, self._ranks = self._ranks, []  # first: a starter that still runs sees it and kills what it starts
        _kill_processes(ranks)
        for rank in ranks:
            rank.conn.close()
        if ranks:
            shutil.rmtree(self._folder, ignore_errors=True)
            atexit.unregister(self._kill)


def run_ranks(
    fn: Callable[..., T],
    nproc: int = 2,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``nproc`` fresh ranks and return the results by rank; see `Ranks.run`."""
    with Ranks(nproc, timeout=timeout) as ranks:
        return ranks.run(fn, *args, env=env, **kwargs)


@dataclass
class _Rank:
    """The parent's end of one rank. Results travel in files, so that no read or write can block on a stuck rank."""

    number: int
    process: Any
    conn: Connection
    theirs: Connection
    folder: Path
    news: bytes = b""
    joined: bool = False
    heard: int = 0

    def waits(self) -> bool:
        """Whether it is alive and has nothing to say; the pipe of a dead one can be read: it has ended."""
        return self.process.is_alive() and not self.conn.poll()

    def order(self, word: bytes) -> None:
        self.news = b""
        self.heard = self._log.stat().st_size
        with contextlib.suppress(OSError):  # a dead one is found by whoever waits for it
            self.conn.send_bytes(word)

    def listen(self) -> None:
        try:
            self.news = self.conn.recv_bytes() if self.conn.poll() else b"died"
        except (EOFError, OSError):
            self.news = b"died"
        if self.news == b"died":
            self.process.join(GRACE)  # for the exit code
        else:
            self.joined = True

    def load(self) -> Any:
        return pickle.loads((self.folder / f"result-{self.number}").read_bytes())

    def output(self) -> str:
        with contextlib.suppress(OSError), self._log.open("rb") as log:
            log.seek(self.heard)
            return log.read().decode(errors="replace")
        return ""

    def state(self) -> str:
        if self.news == b"failed":
            return f"raised {self.load()[0]}"
        if self.news == b"died":
            code = self.process.exitcode
            names = {-number: number.name for number in signal.Signals}
            return f"was killed by {names[code]}" if code in names else f"exited with code {code}"
        return "finished" if self.news else f"still running{self._stack()}"

    def _stack(self) -> str:
        """Where it is, told by a signal handler in C: works for a rank that hangs in native code, too."""
        if not self.joined or not hasattr(faulthandler, "register"):
            return ""
        path = self.folder / f"stack-{self.number}"
        with contextlib.suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and not path.stat().st_size:
                time.sleep(0.01)
            time.sleep(0.02)
            frames = path.read_text().rstrip().splitlines()[1:]
            ours = [number for number, frame in enumerate(frames) if f'"{serve.__code__.co_filename}"' in frame]
            return ", most recent call first, in\n" + "\n".join(frames[: ours[0] if ours else None])
        return ""

    def kill(self) -> None:
        if self.process.pid is None:
            return
        if hasattr(os, "killpg"):
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)  # with whatever it started
        with contextlib.suppress(OSError):
            self.process.kill()

    @property
    def _log(self) -> Path:
        path = self.folder / f"log-{self.number}"
        path.touch()
        return path


def _kill_processes(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        if rank.process.pid is not None:
            rank.process.join(10.0)


def _context(backend: str) -> BaseContext:
    """The way to start processes: from a server that has imported torch already, where that is possible and safe."""
    if not _FORKS or backend != "gloo":  # a forked process must not have met an accelerator before
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    # What this process has imported, the ranks will import too; so will those who use the testing kit.
    kit = f"{__package__}.testing" in sys.modules
    names = [*_ALWAYS, *(name for name in _LIKELY if kit or name in sys.modules)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.preload"])
    # One thread in every pool keeps the server free of threads; and the server finds what this process finds.
    before = dict(os.environ)
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    os.environ["CPCOMPAT_PRELOAD"] = " ".join(names)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context
