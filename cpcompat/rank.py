"""One rank: what runs in the processes that `launch` starts, and how functions get there.

A function travels by the name of its module; where no path leads to that module (pytest can import test files without
one), by its file, too. Test files are loaded as pytest does, so that an assert tells its values.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import threading
import traceback
from datetime import timedelta
from importlib.machinery import PathFinder, SourceFileLoader
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, TracebackType
from typing import Any

__all__ = ["Place", "dumps", "find", "place_of", "serve"]

Place = tuple[str, str, bool]
"""Where a module is: its name, its file, and whether its asserts are rewritten."""


def serve(conn: Connection, folder: Path, rank: int, size: int, backend: str, port: int) -> None:
    """Join the process group, then run one job after another until the parent says or meets its end."""
    if hasattr(os, "setsid"):
        os.setsid()
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, (folder / f"stack-{rank}").open("w"), all_threads=False)

    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if backend == "gloo":
        own["ACCELERATE_USE_CPU"] = "true"
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:  # else gloo looks the host's name up, which not every machine can
        own["GLOO_SOCKET_IFNAME"] = loopback[0]
    os.environ.update(own)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
    # The parent's deadline ends a wait, with more to tell than the group's own.
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(hours=1))
    group = dist.group.WORLD
    conn.send_bytes(b"ready")
    while True:
        try:
            word = conn.recv_bytes()
        except EOFError:
            word = b"end"
        if word == b"end":
            _flush()
            os._exit(0)  # destroy_process_group aborts or hangs, on many releases, after a correct run
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        news, result = _call(pickle.loads((folder / "job").read_bytes()), own)
        if news == b"done" and (not dist.is_initialized() or dist.group.WORLD is not group):
            news = b"spent"
        (folder / f"result-{rank}").write_bytes(result)
        _reset_accelerate()
        _flush()
        conn.send_bytes(news)


def _call(job: dict[str, Any], own: dict[str, str]) -> tuple[bytes, bytes]:
    """Run one job; the news and what goes with it, pickled."""
    __tracebackhide__ = True
    os.environ.clear()
    os.environ.update({**job["env"], **own})
    sys.path[:] = job["path"]
    os.chdir(job["cwd"])
    try:
        fn, args, kwargs = pickle.loads(job["call"])
        result = fn(*args, **kwargs)
        try:
            return b"done", pickle.dumps(result)
        except Exception as error:
            raise TypeError(f"the result, a {type(result).__qualname__}, cannot be pickled: {error}") from error
    except BaseException as error:
        what = traceback.format_exception_only(type(error), error)[-1].strip()
        trace = "".join(traceback.format_exception(type(error), error, _from_body(error.__traceback__)))
        pickled = None
        with contextlib.suppress(Exception):
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        return b"failed", pickle.dumps((what, trace, pickled))


def _from_body(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames that called the body; they are marked the way pytest knows."""
    while trace and trace.tb_next and "__tracebackhide__" in trace.tb_frame.f_locals:
        trace = trace.tb_next
    return trace


def _reset_accelerate() -> None:
    state = sys.modules.get("accelerate.state")
    if state is not None:  # clears dictionaries; the process group stays
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_with_parent(folder: Path) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        shutil.rmtree(folder, ignore_errors=True)
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


# How functions get there


def place_of(module: ModuleType) -> Place:
    """Say where a module with a file is."""
    rewritten = type(getattr(module.__spec__, "loader", None)).__name__ == "AssertionRewritingHook"
    return module.__name__, str(module.__file__), rewritten


def find(place: Place, path: str) -> Any:
    """Import a module under the name it has in the parent, from the same file; return what is at a dotted path in it."""
    __tracebackhide__ = True
    return functools.reduce(getattr, path.split("."), _load(*place))


def dumps(value: Any) -> bytes:
    """Pickle for a rank."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Sends functions and classes by name and file where the name alone would not do."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, (FunctionType, type)):
            return NotImplemented
        module = sys.modules.get(value.__module__)
        with contextlib.suppress(AttributeError):  # not at the top of its module: pickle will say so
            if module is not None and _needs_file(module):
                place = place_of(module)
                if functools.reduce(getattr, value.__qualname__.split("."), module) is value:
                    return find, (place, value.__qualname__)
        return NotImplemented


def _needs_file(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    # A rank has this package already; pytest rewrites it too, as the package of an installed plugin.
    if not file.endswith(".py") or module.__name__ == "__main__" or module.__name__.startswith(f"{__package__}."):
        return False
    return place_of(module)[2] or not _found_by_name(module.__name__, file)


@functools.lru_cache(maxsize=1024)
def _found_by_name(name: str, file: str) -> bool:
    """Whether the path leads to this file, whatever stands in sys.modules."""
    parent = sys.modules.get(name.rpartition(".")[0])
    spec = PathFinder.find_spec(name, getattr(parent, "__path__", None))
    return spec is not None and spec.origin == file


def _load(name: str, file: str, rewritten: bool) -> ModuleType:
    __tracebackhide__ = True
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == file:
        return known
    if "." in name:
        with contextlib.suppress(ImportError):
            importlib.import_module(name.rpartition(".")[0])
    folder = [os.path.dirname(file)] if os.path.basename(file) == "__init__.py" else None
    loader = (_Rewriting if rewritten else SourceFileLoader)(name, file)
    spec = importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=folder)
    assert spec is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _Rewriting(SourceFileLoader):
    """Let an assert tell its values, as in any test; without pytest's hook, which needs a whole session."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        try:
            from _pytest.assertion.rewrite import rewrite_asserts

            source = self.get_data(path)
            tree = ast.parse(source, path)
            rewrite_asserts(tree, source, path)
            code: CodeType = compile(tree, path, "exec", dont_inherit=True)
            return code
        except (ImportError, TypeError):  # a pytest whose rewriting has moved: plain asserts
            return super().get_code(fullname)
