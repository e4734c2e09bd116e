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
from cpcompat.patching import EVALUATION_FIXED
from cpcompat.testing import Ranks
from cpcompat.versions import base_version, installed

CHECKOUT = Path(__file__).parents[2]
TRANSFORMERS = installed("transformers")
assert TRANSFORMERS is not None and TRANSFORMERS.base is not None
EVALUATES = TRANSFORMERS.base >= base_version(EVALUATION_FIXED)


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


@pytest.mark.parametrize("name", ["trainer_cpu", "sft_cpu"])
def test_an_example(name: str) -> None:
    """As a newcomer starts it: five losses with CP beside those without."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(Path(cpcompat.__file__).parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        [*command, str(CHECKOUT / "examples" / f"{name}.py")],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\d) +([\d.]+) +([\d.]+) +\S+$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == list("12345"), done.stdout
    for _, with_cp, without in rows:
        assert float(with_cp) == pytest.approx(float(without), abs=1.1e-4 if not EVALUATES else 1e-5)
