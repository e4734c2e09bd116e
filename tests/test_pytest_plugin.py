"""The plugin, in pytest sessions of their own; what it starts must be gone after each of them."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cpcompat

pytest_plugins = ["pytester"]

PACKAGE = Path(cpcompat.__file__).parent
PLUGIN = ("-p", f"{cpcompat.__name__}.pytest_plugin")

HEAD = """
import os, signal, sys, time, warnings
import pytest
import torch
import torch.distributed as dist

def note():
    "Tell the process outside which processes there were."
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
"""


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")
    except OSError:
        return False


class Session:
    """Run pytest on a file made of `HEAD` and a body."""

    def __init__(self, pytester, monkeypatch):
        self.pytester = pytester
        self.notes = pytester.path / "notes"
        paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        monkeypatch.setenv("NOTES", str(self.notes))
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)

    def write(self, body, name="test_inner.py"):
        path = self.pytester.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(HEAD + body)

    def run(self, *args, plugin=PLUGIN):
        result = self.pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", "-ra", *args, timeout=120)
        self.check_nothing_is_left()
        return result

    def pids(self):
        """The ranks that took notes, and the servers they were forked from."""
        return {int(pid) for pid in self.notes.read_text().split()} if self.notes.exists() else set()

    def check_nothing_is_left(self):
        deadline = time.monotonic() + 10
        while left := [pid for pid in self.pids() if alive(pid)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)


@pytest.fixture
def session(pytester, monkeypatch):
    return Session(pytester, monkeypatch)


GOOD = """
@pytest.mark.cp
def test_two_ranks_are_the_default():
    note()
    assert dist.get_world_size() == 2
    assert dist.get_backend() == "gloo"

@pytest.mark.cp(nproc=3, timeout=30, env={"WORD": "x"})
def test_options():
    assert dist.get_world_size() == 3
    assert os.environ["WORD"] == "x"

@pytest.mark.cp
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.parametrize("y", [torch.ones(2)], ids=["ones"])
def test_parameters_and_fixtures(x, y, tmp_path):
    dist.all_reduce(y)
    assert (x * y).tolist() == [2 * x] * 2
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2

@pytest.mark.cp
def test_monkeypatch_works_on_the_rank(monkeypatch):
    monkeypatch.setattr(torch, "tensor", 5)

class TestClass:
    @pytest.fixture(autouse=True)
    def setup(self):
        self.x = 5

    class TestInner:
        @pytest.mark.cp
        def test_the_patch_is_undone(self):
            assert callable(torch.tensor)

    @pytest.mark.cp
    def test_instance(self):
        assert self.x == 5

@pytest.mark.cp
@pytest.mark.filterwarnings("error:careful")
def test_warning_filters_reach_the_ranks():
    warnings.warn("harmless")
    with pytest.raises(UserWarning, match="careful now"):
        warnings.warn("careful now")

def scaled(n):
    return n * dist.get_rank()

def test_cp_run(cp_run):
    assert cp_run(scaled, 3) == [0, 3]
    assert cp_run(scaled, n=2, nproc=3, timeout=30, env={"WORD": "y"}) == [0, 2, 4]
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        cp_run(lambda: None)

@pytest.mark.cp
def test_skip():
    pytest.skip("not today")

@pytest.mark.cp
def test_xfail():
    pytest.xfail("some day")

@pytest.mark.cp
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_raises():
    1 / 0
"""


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_good_sessions(session, mode):
    session.write(GOOD)
    result = session.run(f"--import-mode={mode}", "--strict-markers")
    result.assert_outcomes(passed=9, skipped=1, xfailed=2, warnings=0)
    result.stdout.fnmatch_lines(["SKIPPED [[]1[]] test_inner.py:*: not today"])


def test_relative_imports_in_a_package_of_tests(session):
    session.write("NUMBER = 5", "pkg/tests/helper.py")
    session.write("", "pkg/__init__.py")
    session.write("", "pkg/tests/__init__.py")
    session.write(
        "from .helper import NUMBER\n@pytest.mark.cp\ndef test(): assert NUMBER == 5\n"
        "def body(): return NUMBER\ndef test_run(cp_run): assert cp_run(body) == [5, 5]\n",
        "pkg/tests/test_a.py",
    )
    session.run("--import-mode=importlib").assert_outcomes(passed=2)


FAULTS = """
class Locked(Exception):
    def __init__(self):
        super().__init__("no pickle")
        self.hold = lambda: None

@pytest.mark.cp
def test_assertion():
    note()
    print("I am", dist.get_rank())
    numbers = [1, dist.get_rank()]
    if dist.get_rank() == 1:
        assert numbers == [1, 2]
    dist.barrier()

@pytest.mark.cp
def test_fresh_after_failure():
    note()

@pytest.mark.cp
def test_killed():
    note()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.cp(timeout=1)
def test_hung():
    note()
    if dist.get_rank() == 0:
        time.sleep(600)

@pytest.mark.cp
def test_unpicklable():
    note()
    raise Locked

@pytest.mark.cp
def test_early_exit():
    note()
    os._exit(0)

def bad():
    raise ValueError("from cp_run")

def test_cp_run(cp_run):
    cp_run(bad)

@pytest.mark.cp
def test_fresh_at_the_end():
    note()
"""


def test_faults(session):
    session.write(FAULTS)
    begin = time.monotonic()
    result = session.run()
    assert time.monotonic() - begin < 60
    result.assert_outcomes(passed=2, failed=6)
    result.stdout.fnmatch_lines(
        [
            "*_ test_assertion _*",
            "[[]CP501[]] rank 1 of 2 raised AssertionError: assert [[]1, 1[]] == [[]1, 2[]]",
            "Traceback (most recent call last):",
            '  File "*test_inner.py", line *, in test_assertion',
            "    assert numbers == [[]1, 2[]]",
            "rank 0: still running, most recent call first, in",
            '  File "*test_inner.py", line * in test_assertion',
            "rank 1: raised AssertionError: *",
            "*do: *",
            "*Captured output of rank 0 call*",
            "I am 0",
            "*Captured output of rank 1 call*",
            "I am 1",
            "*_ test_killed _*",
            "[[]CP501[]] rank 1 of 2 was killed by SIGKILL before it could return",
            "*_ test_hung _*",
            "[[]CP501[]] rank 0 of 2 did not return within 1 s",
            '  File "*test_inner.py", line * in test_hung',
            "rank 1: finished",
            "*_ test_unpicklable _*",
            "[[]CP501[]] rank [01] of 2 raised test_inner.Locked: no pickle",
            "*_ test_early_exit _*",
            "[[]CP501[]] rank [01] of 2 exited with code 0 before it could return",
            "*do: *os._exit*",
            "*_ test_cp_run _*",
            ">*cp_run(bad)",
            "E*rank [01] of 2 raised ValueError: from cp_run",
            "FAILED test_inner.py::test_assertion - rank 1 of 2 raised AssertionError*",
        ]
    )
    result.stdout.no_fnmatch_line("*launch.py*")


REFUSED = """
import unittest
from hypothesis import given, strategies

@pytest.fixture
def held():
    return lambda: None

@pytest.mark.cp
def test_unpicklable_value(held):
    note()

@pytest.mark.cp
def test_of_this_process(capsys):
    note()

@pytest.mark.cp
def test_skip_on_one():
    if dist.get_rank() == 0:
        pytest.skip("only here")

@pytest.mark.cp
async def test_coroutine():
    note()

class TestCase(unittest.TestCase):
    @pytest.mark.cp
    def test_method(self):
        note()

@pytest.mark.cp
@given(strategies.integers())
def test_hypothesis(n):
    note()

@pytest.mark.cp(nproc=0)
def test_no_ranks():
    note()

@pytest.mark.cp(ranks=2)
def test_wrong_option():
    note()
"""


def test_what_cannot_run_on_ranks_is_refused(session):
    session.write(REFUSED)
    result = session.run("-W", "ignore")
    counts = result.parseoutcomes()
    assert counts.get("passed", 0) == 0
    assert counts["failed"] + counts["errors"] == 8
    assert not session.pids()
    result.stdout.fnmatch_lines_random(
        [
            "'held', a function, cannot be sent to the ranks: *",
            "'capsys', a CaptureFixture, cannot be sent to the ranks: it belongs to this process",
            "rank 0 skipped (only here), which not all ranks did*",
            "*a test that is a coroutine cannot run on ranks",
            "*only plain test functions and methods can run on ranks; here, use the fixture cp_run",
            "*each rank would draw its own examples; draw here and use the fixture cp_run",
            "*the cp marker needs nproc of at least 1, not 0",
            "*unexpected keyword argument 'ranks'",
        ]
    )


def test_cp_run_inside_hypothesis(session):
    session.write(
        "from hypothesis import given, settings, strategies\n"
        "def body(n): return n\n"
        "@settings(max_examples=10, deadline=None)\n@given(strategies.integers())\n"
        "def test(cp_run, n): assert cp_run(body, n) == [n, n]\n"
    )
    session.run().assert_outcomes(passed=1)


def test_stop_at_the_first_failure(session):
    session.write(FAULTS)
    result = session.run("-x")
    result.assert_outcomes(failed=1)
    assert len(session.pids()) == 3  # two ranks and their server


def test_xdist(session):
    pytest.importorskip("xdist")
    session.write(FAULTS)
    result = session.run("-n", "2")
    result.assert_outcomes(passed=2, failed=6)
    result.stdout.fnmatch_lines_random(
        [
            "[[]CP501[]] rank 1 of 2 raised AssertionError: assert [[]1, 1[]] == [[]1, 2[]]",
            "[[]CP501[]] rank 0 of 2 did not return within 1 s",
            "*Captured output of rank 1 call*",
        ]
    )


@pytest.mark.parametrize("end, code", [(signal.SIGINT, 2), (signal.SIGKILL, -9)])
def test_interrupted(session, end, code):
    session.write("@pytest.mark.cp\ndef test():\n    note()\n    time.sleep(600)\n")
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider"]
    child = subprocess.Popen(command, cwd=session.pytester.path, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(session.pids()) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(end)
    out, _ = child.communicate(timeout=20)
    assert child.returncode == code
    assert ("KeyboardInterrupt" in out) == (end == signal.SIGINT)
    session.check_nothing_is_left()


VENDORED = """
@pytest.mark.cp
def test_marked():
    note()
    with open("runs", "a") as file:
        file.write("x")

def body():
    return dist.get_rank()

def test_run(cp_run):
    assert cp_run(body) == [0, 1]

@pytest.mark.cp
def test_bad():
    raise ValueError("once")
"""


@pytest.mark.parametrize("beside", [(), PLUGIN], ids=["alone", "beside the original"])
def test_vendored_copy(session, beside):
    copy = session.pytester.path / "other" / "_vendor" / "cp_shim"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    session.write(VENDORED)
    result = session.run("--strict-markers", plugin=(*beside, "-p", "other._vendor.cp_shim.pytest_plugin"))
    result.assert_outcomes(passed=2, failed=1)
    assert (session.pytester.path / "runs").read_text() == "xx"
    result.stdout.fnmatch_lines(["[[]CP501[]] rank [01] of 2 raised ValueError: once"])


def test_an_empty_test_takes_milliseconds(session):
    session.write("@pytest.mark.cp\n@pytest.mark.parametrize('n', range(50))\ndef test(n): pass\n")
    (session.pytester.path / "conftest.py").write_text(
        "def pytest_runtest_logreport(report):\n"
        "    if report.when == 'call':\n"
        "        open('times', 'a').write(f'{report.duration}\\n')\n"
    )
    session.run().assert_outcomes(passed=50)
    times = [float(line) for line in (session.pytester.path / "times").read_text().split()]
    assert statistics.median(times[1:]) < 0.1
    assert sum(times) < 20


MY_PROJECT = """
import torch
import torch.distributed as dist
from cpcompat import get_cp_context

def train(acc, model):
    model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    cp_size = dist.get_world_size()
    for start in range(2):
        ids = (torch.arange(32) + start).remainder(11).reshape(1, 32)
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
        positions = torch.arange(32)[None]

        def step():
            logits = model(input_ids=ids, position_ids=positions).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / 31
            acc.backward(loss * cp_size)
            return loss.detach()

        if cp_size == 1:
            loss = step()
        else:
            with get_cp_context(acc)(buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
                loss = step()
            dist.all_reduce(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss, "weights": dict(model.named_parameters())}
"""


def test_the_page_on_testing(session):
    """Its three pieces of code are three test files, and pass."""
    page = Path(__file__).parents[1] / "docs" / "testing.md"
    if not page.exists():
        pytest.skip("the documentation is not here")
    pytest.importorskip("accelerate.parallelism_config", reason="this accelerate has no ParallelismConfig")
    (session.pytester.path / "my_project.py").write_text(MY_PROJECT.replace("cpcompat", cpcompat.__name__))
    blocks = page.read_text().split("```python\n")[1:]
    for number, block in enumerate(blocks):
        (session.pytester.path / f"test_{number}.py").write_text(block.split("```")[0])
    session.run().assert_outcomes(passed=4)
