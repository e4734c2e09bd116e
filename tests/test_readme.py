"""The README tells the truth: its code runs, its error is the one that is raised, its tables are those of the results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from installed import RELEASE
from ranks.readme_bodies import blocks

from cpcompat.testing import Ranks

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="the package is not in its checkout: there is no README")


def code(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(not RELEASE.has_config, reason="the README's example asks for CP by ParallelismConfig")
def test_code_blocks_run_and_the_error_is_as_shown(ranks2: Ranks) -> None:
    python = code("python")
    assert len(python) == 4
    for found in ranks2.run(blocks, python):
        assert found["losses"] == [32, -1], "sharded, and the trainer trained"
        (shown,) = (text for text in code("text") if text.startswith("[CP101]"))
        version = re.compile(r"accelerate \d[\w.]*")
        assert version.sub("accelerate X", found["printed"]) == version.sub("accelerate X", shown)


def test_the_commands_are_sessions_of_the_noxfile() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    commands = "".join(code("sh"))
    for name in re.findall(r"nox -s (\w+)", commands):
        assert f"def {name}(session" in noxfile
    assert "python -m pip install nox && nox\n" in commands
    for script in re.findall(r"examples/\w+\.py", commands):
        assert (ROOT / script).exists()


@pytest.mark.skipif(not RELEASE.has_config, reason="the example asks for CP by ParallelismConfig")
def test_the_example_trains_with_the_losses_of_the_model_without_cp() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = subprocess.run(
        [*command, str(ROOT / "examples" / "train_cpu.py")], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    rows = [line.split() for line in output.splitlines() if line[:1].isdigit()]
    assert len(rows) == 5
    assert all(float(difference) < 5e-6 for *_, difference in rows)


def test_the_tables_are_those_of_the_results() -> None:
    """`nox -s tables` makes them anew."""
    subprocess.run([sys.executable, str(ROOT / "tools" / "tables.py"), "--check"], check=True, timeout=60)
