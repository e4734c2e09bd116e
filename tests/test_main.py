"""The command line, as a user starts it: in a process of its own, also from a copy under another name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from copies import copy

import cpcompat
from cpcompat.__main__ import main


def run(*arguments: str, package: str = "cpcompat", path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m package arguments``; the package lies in `path`."""
    where = [str(path or Path(cpcompat.__file__).parent.parent), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(where), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, "-m", package, *arguments], env=env, capture_output=True, text=True, timeout=200
    )


def test_verify_passes_here_and_prints_json() -> None:
    done = run("verify", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["ok"] is True
    assert report["versions"].keys() == {"python", "torch", "accelerate", "transformers"}
    assert {"forward", "backward"} == {
        what for row in report["rows"] if row["name"].startswith("attention") for what in row["numbers"]
    }


def test_verify_exits_1_in_a_broken_copy_under_another_name(tmp_path: Path) -> None:
    vendored = tmp_path / "product" / "_vendor"
    vendored.mkdir(parents=True)
    copy(vendored / "cp", "ring.py", "torch.sigmoid(block_lse - old)", "torch.sigmoid(old - block_lse)")
    done = run("verify", package="product._vendor.cp", path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED  attention, allgather" in done.stdout
    assert "FAILED  tiny Llama, DDP" in done.stdout
    assert "ok      buffers" in done.stdout
    assert " > 1e-05" in done.stdout


def test_verify_ends_in_time_when_a_rank_hangs(tmp_path: Path) -> None:
    """The check that hangs fails, what would come after it is not run, and the exit code tells."""
    copy(tmp_path / "hanging", "checks.py", "mine = cp.positions(_length(cp))", "import time; time.sleep(600)")
    before = time.monotonic()
    done = run("verify", "--timeout", "8", "--json", package="hanging", path=tmp_path)
    assert time.monotonic() - before < 60
    assert done.returncode == 1, done.stdout + done.stderr
    statuses = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert statuses["context after prepare()"]["status"] == "ok"
    hung = statuses["tokens, head-tail"]
    assert hung["status"] == "FAILED"
    assert "did not return within 8 s" in hung["detail"]
    assert "checks.py" in hung["trace"]
    after = statuses["buffers"]
    assert (after["status"], after["detail"]) == ("not run", "a rank hung before, in: tokens, head-tail")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: COMMAND"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["verify", "--nproc", "1"], "must be 2 or more, not 1"),
        (["verify", "--nproc", "two"], "invalid number value: 'two'"),
        (["verify", "--timeout", "nan"], "must be 1 or more, not nan"),
        (["verify", "more"], "unrecognized arguments: more"),
    ],
)
def test_wrong_usage_exits_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_version_and_name_are_the_packages_own(tmp_path: Path) -> None:
    copy(tmp_path / "other")
    assert run("--version", package="other", path=tmp_path).stdout == f"other {cpcompat.__version__}\n"
    assert run("--version").stdout == f"cpcompat {cpcompat.__version__}\n"
    assert "usage: python -m other verify " in run("verify", "--help", package="other", path=tmp_path).stdout


def test_help_names_every_command() -> None:
    from cpcompat.__main__ import _COMMANDS

    done = run("--help")
    assert done.returncode == 0
    for name, make in _COMMANDS.items():
        assert name in done.stdout
        assert make.__doc__
        assert " ".join(make.__doc__.split())[:40] in " ".join(done.stdout.split())


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from cpcompat.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'accelerate', 'transformers', 'packaging', 'numpy', 'multiprocessing')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"
