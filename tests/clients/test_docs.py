"""The page for the Trainer's users and the two examples: their code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import client_bodies as bodies

import cpcompat
from cpcompat.layouts import TRAINER_EVALUATES_SINCE
from cpcompat.testing import Ranks
from cpcompat.versions import installed

CHECKOUT = Path(__file__).parents[2]
TRANSFORMERS = installed("transformers")
assert TRANSFORMERS is not None and TRANSFORMERS.base is not None
EVALUATES = not TRANSFORMERS.older_than(TRAINER_EVALUATES_SINCE)


def test_the_page(ranks2: Ranks) -> None:
    blocks = re.findall(
        r"^```python\n(.*?)^```", (CHECKOUT / "docs" / "trainer.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 2
    # The second one is for releases that evaluate under CP; the table on the page says what the others give.
    for found in ranks2.run(bodies.page, blocks if EVALUATES else blocks[:1]):
        assert len(found["losses"]) == 5
        if EVALUATES:
            assert found["logits"].shape == (6, bodies.LENGTH, bodies.VOCAB)
            assert found["labels"].tolist() == [row["labels"].tolist() for row in bodies.rows(6, 5)]


def start(*target: str) -> str:
    """Start a script on two processes, as a newcomer does; returns what it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *target]
    path = os.pathsep.join([str(Path(cpcompat.__file__).parents[1]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_table(text: str) -> None:
    """Five losses with CP beside those without."""
    rows = re.findall(r"^(\d) +([\d.]+) +([\d.]+) +\S+$", text, re.MULTILINE)
    assert [row[0] for row in rows] == list("12345"), text
    for _, with_cp, without in rows:
        assert float(with_cp) == pytest.approx(float(without), abs=1e-5 if EVALUATES else 1.1e-4)


@pytest.mark.parametrize("name", ["trainer_cpu", "sft_cpu"])
def test_an_example(name: str) -> None:
    check_table(start(str(CHECKOUT / "examples" / f"{name}.py")))


def test_run_makes_up_for_the_line(tmp_path: Path) -> None:
    """The example without its one line of ours; transformers is imported after cpcompat here."""
    text = (CHECKOUT / "examples" / "trainer_cpu.py").read_text()
    changed = re.sub(r"^    cpcompat\.patch\(\).*\n|^import cpcompat\n", "", text, flags=re.MULTILINE)
    assert changed.count("\n") == text.count("\n") - 2
    (tmp_path / "train.py").write_text(changed)
    check_table(start("-m", "cpcompat", "run", str(tmp_path / "train.py")))
