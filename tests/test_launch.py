"""Faults of every kind, on real processes: each ends in a RankFailed with words that help, within its deadline."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from ranks import launch_bodies as bodies

import cpcompat
from cpcompat import launch
from cpcompat.errors import RankFailed
from cpcompat.launch import Ranks, run_ranks

HERE = Path(__file__).parent
ROOT = Path(cpcompat.__file__).parents[1]


def alive(pid):
    """Whether a process, or a thread of it, still runs; a mere zombie does not."""
    try:
        os.kill(pid, 0)
        proc = Path(f"/proc/{pid}")
        return not (
            (proc / "stat").exists()
            and (proc / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            and len(list((proc / "task").iterdir())) == 1
        )
    except OSError:
        return False


def gone(pids, within=5.0):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def shared():
    with Ranks(2, timeout=60) as ranks:
        yield ranks


@pytest.fixture
def ranks(shared):
    """The shared set, started, so that the short deadlines of a test measure its body."""
    shared.pids = shared.run(bodies.pid)
    return shared


# What a good run gives


def test_results_come_by_rank(ranks):
    assert ranks.run(bodies.total, 1) == [3.0, 3.0]
    assert ranks.run(bodies.total, x=2) == [5.0, 5.0]


@pytest.mark.parametrize("nproc", [1, 3])
def test_fresh_ranks(nproc):
    results = run_ranks(bodies.facts, nproc)
    assert [result["rank"] for result in results] == list(range(nproc))
    assert results[-1]["env"] == {
        "RANK": str(nproc - 1),
        "LOCAL_RANK": str(nproc - 1),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    assert all(result["threads"] == 1 for result in results)
    assert gone([result["pid"] for result in results])


def test_processes_stay_between_calls(ranks):
    assert ranks.run(bodies.pid) == ranks.pids
    begin = time.monotonic()
    for _ in range(10):
        ranks.run(bodies.pid)
    assert time.monotonic() - begin < 5


def test_each_call_sees_this_process_as_it_is_now(ranks, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CPCOMPAT_WORD", "outer")
    first = ranks.run(bodies.facts)[0]
    inner = ranks.run(bodies.facts, env={"CPCOMPAT_WORD": "inner", "RANK": "7"})
    monkeypatch.delenv("CPCOMPAT_WORD")
    last = ranks.run(bodies.facts)[0]
    assert [first["word"], inner[0]["word"], last["word"]] == ["outer", "inner", None]
    assert inner[1]["env"]["RANK"] == "1"
    assert first["cwd"] == str(tmp_path)
    assert first["draw"] == last["draw"]


def test_tensors_and_big_results(ranks):
    assert [tensor.tolist() for tensor in ranks.run(bodies.tensor)] == [[0.0] * 3, [1.0] * 3]
    assert [len(result) for result in ranks.run(bodies.big)] == [5_000_000] * 2


def test_output_by_rank(ranks):
    ranks.run(bodies.alone, 1, bodies.talk, "hello")
    assert ranks.output == ["", "python hello\nraw hello\nchild hello\n"]
    ranks.run(bodies.pid)
    assert ranks.output == ["", ""]


def test_accelerate_starts_anew_on_the_same_group(ranks):
    expected = [(2, rank, "cpu", "DistributedType.MULTI_CPU", "gloo") for rank in range(2)]
    assert ranks.run(bodies.use_accelerate) == expected
    assert ranks.run(bodies.use_accelerate) == expected
    assert ranks.run(bodies.total, 1) == [3.0, 3.0]


def test_a_body_may_start_processes(ranks):
    assert ranks.run(bodies.workers) == [[0, 1, 2, 3]] * 2


# Faults


def test_exception(ranks):
    with pytest.raises(RankFailed, match=r"rank 1 of 2 raised ValueError: boom") as info:
        ranks.run(bodies.on, 1, bodies.boom)
    error = info.value
    assert (error.rank, error.exitcode) == (1, None)
    assert isinstance(error.exception, ValueError)
    assert error.__cause__ is error.exception
    assert "in boom" in error.traceback
    assert error.traceback in textwrap.dedent(str(error).replace("\n        ", "\n"))
    assert "still running, most recent call first" in error.states[0]
    assert "launch_bodies.py" in error.states[0]
    assert "barrier" in error.states[0]
    assert error.states[1] == "raised ValueError: boom"
    assert gone(ranks.pids)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.rank == 1


def test_the_first_failure_is_the_one_that_is_raised(ranks):
    with pytest.raises(RankFailed, match="raised ValueError: boom") as info:
        ranks.run(bodies.boom)
    assert info.value.states == ["raised ValueError: boom"] * 2


def test_output_is_shown_with_a_failure(ranks):
    with pytest.raises(RankFailed) as info:
        ranks.run(bodies.on, 0, bodies.talk_and_boom)
    text = str(info.value)
    assert "output of rank 0, last 40 of 60 lines" in text
    assert "line 59" in text
    assert "line 19\n" not in text
    assert "line 0\n" in info.value.output[0]
    assert ranks.output == info.value.output


@pytest.mark.parametrize(
    "kind, name", [(bodies.locked, "Locked: no pickle"), (bodies.two_arguments, "TwoArguments: 1 2")]
)
def test_exception_that_cannot_be_pickled(ranks, kind, name):
    with pytest.raises(RankFailed, match=rf"rank 0 of 2 raised ranks\.launch_bodies\.{name}") as info:
        ranks.run(bodies.alone, 0, kind)
    assert info.value.exception.endswith(name)
    assert info.value.__cause__ is None
    assert f"in {kind.__name__}" in info.value.traceback
    assert info.value.states[1] == "finished"


def test_result_that_cannot_be_pickled(ranks):
    with pytest.raises(RankFailed, match="the result, a function, cannot be pickled"):
        ranks.run(bodies.alone, 1, bodies.give_lambda)


def test_result_that_cannot_be_read(ranks):
    with pytest.raises(RankFailed, match="a result of the ranks cannot be read here") as info:
        ranks.run(bodies.give_only_there)
    assert "LookupError" in str(info.value)
    assert info.value.states == ["finished"] * 2


@pytest.mark.parametrize(
    "kind, args, words, code",
    [
        (bodies.kill, (), "was killed by SIGKILL", -9),
        (bodies.leave, (0,), "exited with code 0", 0),
        (bodies.leave, (4,), "exited with code 4", 4),
    ],
)
def test_rank_that_dies(ranks, kind, args, words, code):
    """The other rank sees its peer go and raises, too; the one that died is named."""
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank 1 of 2 {words} before it could return") as info:
        ranks.run(bodies.on, 1, kind, *args)
    assert time.monotonic() - begin < 10
    assert (info.value.rank, info.value.exitcode) == (1, code)
    assert info.value.exception is None
    assert "os._exit" in str(info.value)
    assert gone(ranks.pids)


def test_sys_exit_is_a_failure(ranks):
    with pytest.raises(RankFailed, match="rank 0 of 2 raised SystemExit: 3"):
        ranks.run(bodies.alone, 0, bodies.quit_politely)


def test_hang(ranks):
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 2 did not return within 0\.5 s") as info:
        ranks.run(bodies.alone, 1, bodies.hang, timeout=0.5)
    assert time.monotonic() - begin < 5
    assert info.value.states[0] == "finished"
    assert "in hang" in info.value.states[1]
    assert "in hang" in info.value.traceback
    assert gone(ranks.pids)


def test_hang_in_a_collective_names_all_that_wait():
    with Ranks(3) as ranks:
        ranks.run(bodies.pid)
        with pytest.raises(RankFailed, match=r"rank 0, 1, 2 of 3 did not return within 0\.5 s") as info:
            ranks.run(bodies.on, 2, bodies.hang, timeout=0.5)
    assert ["barrier" in state for state in info.value.states] == [True, True, False]


def test_stopped_rank(ranks):
    """Not even a signal handler runs in it."""
    begin = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 of 2 did not return within"):
        ranks.run(bodies.alone, 0, os.kill, ranks.pids[0], signal.SIGSTOP, timeout=0.5)
    assert time.monotonic() - begin < 6
    assert gone(ranks.pids)


def test_the_set_serves_again_after_each_failure(ranks):
    for _ in range(3):
        with pytest.raises(RankFailed):
            ranks.run(bodies.alone, 0, bodies.kill)
        assert ranks.run(bodies.total, 1) == [3.0, 3.0]


def test_a_body_that_destroys_the_group_uses_the_set_up(ranks):
    ranks.run(bodies.destroy_group)
    assert gone(ranks.pids)
    assert ranks.run(bodies.total, 1) == [3.0, 3.0]


def test_a_set_that_died_between_calls_is_replaced(ranks):
    ranks.run(bodies.alone, 0, bodies.die_later)
    assert gone(ranks.pids[:1])
    assert ranks.run(bodies.total, 1) == [3.0, 3.0]
    assert gone(ranks.pids)


def test_functions_and_arguments_must_pickle(ranks):
    with pytest.raises(TypeError, match="must stand at the top of a module"):
        ranks.run(lambda: None)
    with pytest.raises(TypeError, match=r"total or one of its arguments cannot be sent"):
        ranks.run(bodies.total, lambda: None)
    assert ranks.run(bodies.pid) == ranks.pids


def test_ranks_of_a_fresh_interpreter(monkeypatch):
    """Where no server can be forked from, as on Windows."""
    monkeypatch.setattr(launch, "_FORKS", False)
    with Ranks(2) as ranks:
        assert ranks.run(bodies.total, 1) == [3.0, 3.0]
        with pytest.raises(RankFailed, match="raised ValueError: boom"):
            ranks.run(bodies.on, 1, bodies.boom)


def test_ranks_that_cannot_start(monkeypatch):
    """The wait for them is bounded, and what comes up too late is killed."""
    monkeypatch.setattr(launch, "START_TIMEOUT", 0.0)
    with pytest.raises(RankFailed, match=r"the 2 ranks could not be started|did not join the process group") as info:
        run_ranks(bodies.pid)
    assert len(info.value.states) == 2
    monkeypatch.undo()
    assert run_ranks(bodies.total, 2, 1) == [3.0, 3.0]


def test_nothing_to_start():
    with pytest.raises(ValueError, match="at least 1"):
        Ranks(0)


def test_close_is_final_until_the_next_run():
    ranks = Ranks(1)
    ranks.close()
    (pid,) = ranks.run(bodies.pid)
    ranks.close()
    ranks.close()
    assert gone([pid])
    with ranks:
        assert ranks.run(bodies.pid) != [pid]


# The end of the parent, and what ranks leave behind


def script(tmp_path, body):
    path = tmp_path / "script.py"
    path.write_text(
        "from ranks import launch_bodies as bodies\n"
        "from cpcompat.launch import Ranks, run_ranks\n"
        "import os, sys\n\n"
        "if __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(body), "    ")
    )
    paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(
        [sys.executable, str(path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def when_written(path, within=60.0):
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        text = path.read_text() if path.exists() else ""
        if len(text.split()) == 2:
            return [int(pid) for pid in text.split()]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def test_a_hung_rank_takes_its_own_children_along(ranks, tmp_path):
    path = tmp_path / "pids"
    with pytest.raises(RankFailed):
        ranks.run(bodies.grandchild_and_hang, str(path), timeout=2)
    assert gone(when_written(path))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_parent(tmp_path, monkeypatch, end):
    path = tmp_path / "pids"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    parent = script(tmp_path, f"run_ranks(bodies.grandchild_and_hang, 2, {str(path)!r})")
    pids = when_written(path)
    assert any((tmp_path / "temporary").glob("cpcompat-*"))
    parent.send_signal(end)
    _, err = parent.communicate(timeout=20)
    assert gone(pids)
    assert not any((tmp_path / "temporary").glob("cpcompat-*"))
    assert ("KeyboardInterrupt" in err) == (end == signal.SIGINT)


def test_a_parent_that_does_not_close_ends_at_once(tmp_path):
    parent = script(tmp_path, "print(*Ranks(2).run(bodies.pid))")
    out, err = parent.communicate(timeout=60)
    assert parent.returncode == 0, err
    assert gone([int(pid) for pid in out.split()])


def test_a_script_may_hold_the_function(tmp_path):
    body = "print(run_ranks(mine, 2), 'torch' in sys.modules)"
    path = tmp_path / "own.py"
    path.write_text(
        "import sys\nfrom cpcompat.launch import run_ranks\n"
        f"def mine():\n    return 5\n\nif __name__ == '__main__':\n    {body}\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[5, 5] False\n", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("from cpcompat.launch import run_ranks\ndef mine():\n    return 5\nrun_ranks(mine, 2)\n")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(path)], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "exited with code 1 before it could join the process group" in done.stderr
    assert "below `if __name__" in done.stderr
