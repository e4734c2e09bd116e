"""A pytest plugin: ``@pytest.mark.cp`` runs a test on real ranks, the fixture ``cp_run`` a function.

The ranks are processes over gloo on CPU, kept for the whole session; after a failure the next test gets new ones. What
reaches them is the test's module, its parameters and fixture values (which must pickle), the environment, the working
directory and the warning filters. The plugin works from a vendored copy, too, and beside another copy of itself.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
import unittest
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import pytest

from .errors import RankFailed
from .launch import Ranks
from .rank import Place, dumps, find, place_of

T = TypeVar("T")

_SETS = pytest.StashKey[dict[int, Ranks]]()
_FAILURE = pytest.StashKey[RankFailed]()
_SKIPPED = pytest.StashKey[str]()

_MARKER = (
    "cp(nproc=2, timeout=60.0, env=None): run the body of the test on nproc ranks, real processes over gloo on CPU, "
    "for at most timeout seconds and with the environment variables env"
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _MARKER)
    config.stash[_SETS] = {}


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, however the session ended."""
    for ranks in config.stash.get(_SETS, {}).values():
        ranks.close()


class CPRun:
    """The fixture ``cp_run``: ``cp_run(fn, *args, nproc=2, timeout=60.0, env=None, **kwargs)``.

    Calls ``fn(*args, **kwargs)`` on ``nproc`` ranks and returns the results by rank, or raises `RankFailed`. ``fn``
    stands at the top of a module (the test's own will do); arguments and results must pickle.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def __call__(
        self,
        fn: Callable[..., T],
        *args: Any,
        nproc: int = 2,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Call ``fn`` on the ranks."""
        __tracebackhide__ = True
        try:
            return _ranks(self._config, nproc).run(fn, *args, timeout=timeout, env=env, **kwargs)
        except RankFailed as error:
            raise error.with_traceback(None) from error.__cause__


@pytest.fixture(scope="session")
def cp_run(pytestconfig: pytest.Config) -> CPRun:
    """Run a function on real ranks: ``cp_run(fn, *args, nproc=2, timeout=60.0, env=None, **kwargs)``."""
    return CPRun(pytestconfig)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse what would silently run here, not on ranks."""
    marker = item.get_closest_marker("cp")
    if marker is None:
        return
    options = _options(*marker.args, **marker.kwargs)
    if options["nproc"] < 1:
        pytest.fail(f"the cp marker needs nproc of at least 1, not {options['nproc']}", pytrace=False)
    cls = getattr(item, "cls", None)
    if not isinstance(item, pytest.Function) or (cls is not None and issubclass(cls, unittest.TestCase)):
        pytest.fail(
            "only plain test functions and methods can run on ranks; here, use the fixture cp_run", pytrace=False
        )
    if getattr(item.obj, "is_hypothesis_test", False):
        pytest.fail("each rank would draw its own examples; draw here and use the fixture cp_run", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test's body on ranks; this hook asks no other plugin after one that answers."""
    marker = pyfuncitem.get_closest_marker("cp")
    if marker is None:
        return None
    options = _options(*marker.args, **marker.kwargs)
    ranks = _ranks(pyfuncitem.config, options.pop("nproc"))
    state = vars(pyfuncitem.instance) if pyfuncitem.cls is not None else {}
    filters = list(warnings.filters)
    classes = [node.name for node in pyfuncitem.listchain() if isinstance(node, pytest.Class)]
    path = ".".join([*classes, pyfuncitem.originalname])
    place = place_of(pyfuncitem.module)
    try:
        verdicts = ranks.run(_test, place, path, _travelling(pyfuncitem), state, filters, **options)
    except RankFailed as error:
        pyfuncitem.stash[_FAILURE] = error
        # What the body raised is what an xfail mark asks about.
        raised = error.exception if isinstance(error.exception, Exception) else error
        raise raised.with_traceback(None) from None
    finally:
        for number, text in enumerate(ranks.output):
            if text:
                pyfuncitem.add_report_section("call", f"output of rank {number}", text)
    left = {number: verdict for number, verdict in enumerate(verdicts) if verdict is not None}
    if not left:
        return True
    if len(left) < len(verdicts) or len({kind for kind, _ in left.values()}) > 1:
        said = ", ".join(f"rank {number} {kind} ({reason})" for number, (kind, reason) in left.items())
        pytest.fail(f"{said}, which not all ranks did; leave a test on all of them or on none", pytrace=False)
    kind, reason = left[0]
    if kind == "xfailed":
        pytest.xfail(reason)
    pyfuncitem.stash[_SKIPPED] = reason
    pytest.skip(reason)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Show what happened on the ranks, not the stack of the process that waited for them."""
    report = (yield).get_result()
    if call.when != "call" or call.excinfo is None:
        return
    failure = item.stash.get(_FAILURE, None)
    if failure is not None and report.failed:
        shown = call.excinfo.getrepr(style="native")
        states = [f"rank {number}: {state}" for number, state in enumerate(failure.states)]
        parts = [f"[{failure.code}] {failure.what}", "", *states, "", f"  do:   {failure.next_step}"]
        if failure.exception is not None:
            parts[2:2] = [failure.traceback.rstrip(), ""]
        shown.reprtraceback.reprentries[0].lines = ["\n".join(parts) + "\n"]
        if shown.reprcrash is not None:
            shown.reprcrash.message = failure.what
        report.longrepr = shown
    reason = item.stash.get(_SKIPPED, None)
    if reason is not None and report.skipped:
        path, line, _ = item.reportinfo()
        report.longrepr = (str(path), (line or 0) + 1, f"Skipped: {reason}")


def _options(nproc: int = 2, timeout: float = 60.0, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    return {"nproc": nproc, "timeout": timeout, "env": env}


def _ranks(config: pytest.Config, nproc: int) -> Ranks:
    sets = config.stash[_SETS]
    if nproc not in sets:
        sets[nproc] = Ranks(nproc)
    return sets[nproc]


def _travelling(item: pytest.Function) -> dict[str, bytes | None]:
    """The arguments of a test, pickled one by one; None stands for a monkeypatch, which each rank makes itself."""
    packed: dict[str, bytes | None] = {}
    for name in inspect.signature(item.obj).parameters:
        if name not in item.funcargs:
            continue
        value = item.funcargs[name]
        kind = type(value)
        if kind is pytest.MonkeyPatch:
            packed[name] = None
            continue
        why = "it belongs to this process"
        if not kind.__module__.startswith("_pytest.") or kind.__module__.startswith("_pytest._py"):
            try:
                packed[name] = dumps(value)
                continue
            except Exception as error:
                why = str(error)
        pytest.fail(
            f"{name!r}, a {kind.__qualname__}, cannot be sent to the ranks: {why}\n"
            "Make it in the body of the test, or keep the test here and run a part of it with the fixture cp_run.",
            pytrace=False,
        )
    return packed


# From here on: inside a rank.


def _test(
    place: Place, path: str, packed: dict[str, bytes | None], state: dict[str, Any], filters: list[Any]
) -> tuple[str, str] | None:
    """Run a test's body; what it said, if it left by pytest.skip or pytest.xfail."""
    __tracebackhide__ = True
    with contextlib.ExitStack() as stack:
        body = find(place, path)
        if "." in path:
            owner, _, name = path.rpartition(".")
            instance = find(place, owner)()
            vars(instance).update(state)
            body = getattr(instance, name)
        args = {
            name: stack.enter_context(pytest.MonkeyPatch.context()) if value is None else pickle.loads(value)
            for name, value in packed.items()
        }
        stack.enter_context(warnings.catch_warnings())
        _filter(filters)
        try:
            result = body(**args)
        except pytest.skip.Exception as left:
            return "skipped", str(left)
        except pytest.xfail.Exception as left:
            return "xfailed", str(left)
        if inspect.isawaitable(result):
            raise TypeError("a test that is a coroutine cannot run on ranks")
    return None


def _filter(filters: list[Any]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        pattern, where = (getattr(part, "pattern", part) or "" for part in (message, module))
        warnings.filterwarnings(action, pattern, category, where, line)
