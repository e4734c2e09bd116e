"""patch, unpatch and run: what is replaced, for whom, and that everything comes back."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from installed import RELEASE
from ranks import patch_bodies as bodies

import cpcompat
from cpcompat import VersionTooOld, patch, unpatch
from cpcompat.testing import Ranks, tiny_llama

NAMES = ("maybe_context_parallel", "gather_for_metrics")
ROOT = Path(cpcompat.__file__).parent

patchable = pytest.mark.skipif(not RELEASE.has_config, reason="this accelerate has no maybe_context_parallel to patch")


def methods() -> list[Any]:
    return [vars(Accelerator).get(name) for name in NAMES]


@pytest.fixture
def originals() -> Iterator[list[Any]]:
    """The methods before; afterwards they must stand there again."""
    before = methods()
    yield before
    after = methods()
    unpatch()
    assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A vendored copy of the package, under another name."""
    shutil.copytree(ROOT, tmp_path / "somebody" / "vendored", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("somebody.vendored")
    for name in [name for name in sys.modules if name.split(".")[0] == "somebody"]:
        del sys.modules[name]


@pytest.mark.skipif(RELEASE.has_config, reason="this accelerate has the method")
def test_an_accelerate_without_the_method_is_refused() -> None:
    with pytest.raises(VersionTooOld, match=r"no Accelerator\.maybe_context_parallel") as caught:
        patch()
    assert (caught.value.needed, caught.value.installed) == ("1.10", accelerate.__version__)


@patchable
def test_unpatch_puts_the_very_same_methods_back(originals: list[Any]) -> None:
    patch()
    patched = methods()
    assert not set(patched) & set(originals)
    for ours, theirs in zip(patched, originals, strict=True):
        assert inspect.signature(ours) == inspect.signature(theirs)
        assert ours.__doc__ == theirs.__doc__
    patch()
    assert methods() == patched
    unpatch()
    assert methods() == originals
    unpatch()


@patchable
def test_a_with_block_takes_back_only_what_it_changed(originals: list[Any]) -> None:
    with patch():
        patched = methods()
        with patch():
            assert methods() == patched
        assert methods() == patched
    assert methods() == originals
    patch()
    with patch():
        pass
    assert methods() != originals
    unpatch()


@patchable
def test_a_with_block_ends_well_after_an_error(originals: list[Any]) -> None:
    with pytest.raises(ValueError, match="body"), patch():
        raise ValueError("body")
    assert methods() == originals


@patchable
@pytest.mark.parametrize("order", list(itertools.permutations(["+a", "+b", "-a", "-b"])), ids="".join)
def test_two_copies_in_any_order(originals: list[Any], copy: ModuleType, order: tuple[str, ...]) -> None:
    """The methods are replaced once while anybody wants it, and by nobody else than the originals afterwards."""
    packages, wanted = {"a": cpcompat, "b": copy}, set()
    for sign, who in order:
        if sign == "+":
            packages[who].patch()
            wanted.add(who)
        else:
            packages[who].unpatch()
            wanted.discard(who)
        for ours, theirs in zip(methods(), originals, strict=True):
            assert (ours is theirs) == (not wanted)
            assert ours is theirs or ours.__wrapped__ is theirs
    for who in wanted:
        packages[who].unpatch()


@patchable
def test_who_came_after_us_stays(originals: list[Any]) -> None:
    patch()
    ours = methods()[0]

    def theirs(self: Accelerator, *args: Any, **keywords: Any) -> Any:
        return ours(self, *args, **keywords)

    Accelerator.maybe_context_parallel = theirs
    unpatch()
    assert methods() == [theirs, originals[1]]
    patch()
    assert methods()[0].__wrapped__ is theirs
    unpatch()
    assert methods()[0] is theirs
    Accelerator.maybe_context_parallel = originals[0]


@patchable
@pytest.mark.parametrize("prepare", ["model and optimizer", "model alone", "for evaluation"])
def test_a_loop_that_knows_nothing_of_us_gets_the_numbers_without_cp(ranks2: Ranks, prepare: str) -> None:
    for found in ranks2.run(bodies.loop, prepare):
        assert found["loss"] < 1e-6
        assert found["gradient"] < 1e-5
        assert found["lengths"] == (32, 64)
        assert found["block"] == "Block", "adopted contexts run on the engine, too"


@patchable
def test_an_accelerator_without_cp_does_not_notice(ranks2: Ranks) -> None:
    (first, second) = ranks2.run(bodies.without_cp)
    assert len(first.pop("messages")) == 1
    assert second.pop("messages") == [], "accelerate logs on the main process only"
    assert first == second == {"ids": True, "context": False}


@patchable
def test_an_instance_with_a_method_of_its_own_is_left_alone(ranks2: Ranks) -> None:
    assert ranks2.run(bodies.replaced_on_the_instance, False) == [["mine", "inside"]] * 2
    for seen in ranks2.run(bodies.replaced_on_the_instance, True):
        assert seen[0] == "mine"
        assert seen[1] == "inside" if RELEASE.own_context == "prepare" else "_cp_context" in seen[1]


@patchable
def test_another_librarys_context_gets_the_call(ranks2: Ranks) -> None:
    assert ranks2.run(bodies.foreign_context) == [["theirs", "8 tokens"]] * 2


@patchable
def test_the_last_batch_of_metrics_keeps_every_cp_rank(ranks2: Ranks) -> None:
    """accelerate cuts the last batch to its rows, all of them cp rank 0's."""
    theirs, _ = ranks2.run(bodies.gathered, True, False)
    assert theirs["rows"] == [[1, 2, 3, 4, -1, -2, -3, -4], [5, 6]]
    for ours in ranks2.run(bodies.gathered, True, True):
        assert ours["rows"] == ours["nested"] == [[1, 2, 3, 4, -1, -2, -3, -4], [5, 6, -5, -6]]
        assert ours["sums"] == [[10, -10], [11, -11]]
        assert ours["objects"] == theirs["objects"]


@patchable
def test_metrics_without_cp_are_as_ever(ranks2: Ranks) -> None:
    assert ranks2.run(bodies.gathered, False, True) == ranks2.run(bodies.gathered, False, False)


@patchable
def test_no_body_left_the_ranks_patched(ranks2: Ranks) -> None:
    assert ranks2.run(bodies.left_over) == [False, False]


# --- python -m cpcompat run ---------------------------------------------------------------------------------------------

PYTHON = [sys.executable]
RUN = [sys.executable, "-m", "cpcompat", "run"]
LOOP = Path(__file__).parent / "scripts" / "loop.py"
ENDINGS = {
    "the end": "print('done')",
    "an exit code": "import sys; sys.exit(3)",
    "an exit text": "import sys; sys.exit('no such thing')",
    "an error": "def f():\n    raise ValueError('boom')\n\nf()",
    "a chain of errors": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error",
    "an interrupt": "raise KeyboardInterrupt",
    "a hook of its own": "import sys, traceback\n"
    "sys.excepthook = lambda kind, error, trace: print(kind, len(traceback.extract_tb(trace)))\n1 / 0",
    "bad syntax": "x = = 1",
    "what it finds": "import sys, inspect\ndef f(): pass\n"
    "print(inspect.getsource(f), __name__, __file__, __doc__, __package__, __spec__, sys.argv, sys.path[0], "
    "sys.modules['__main__'].__dict__ is globals())",
    "work at the very end": "import atexit\nx = 1\natexit.register(lambda: print(x, __import__('__main__').x))",
    "a process of its own": "import multiprocessing\n\ndef f(x):\n    return x + 1\n\nif __name__ == '__main__':\n"
    "    print(multiprocessing.get_context('spawn').Pool(1).map(f, [1]))",
    "no accelerate": "import sys; print('accelerate' in sys.modules, 'torch' in sys.modules)",
}


def ended(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *filter(None, sys.path)])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_would_by_itself(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "sub" / "script.py"
    script.parent.mkdir()
    script.write_text(ENDINGS[ending])
    arguments = ["sub/script.py", "-m", "x", "--help", "--", "run"]
    alone, with_us = ended(PYTHON + arguments, tmp_path), ended(RUN + arguments, tmp_path)
    assert (with_us.returncode, with_us.stdout, with_us.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_a_module_is_run_as_python_would(tmp_path: Path) -> None:
    package = tmp_path / "tool"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import os, sys\nfrom . import __name__ as name\nprint(name, __name__, sys.argv, os.path.samefile(sys.path[0], '.'))\n"
        "raise SystemExit(len(sys.argv))"
    )
    alone, with_us = (ended([*command, "-m", "tool", "-m", "y"], tmp_path) for command in (PYTHON, RUN))
    assert alone.stdout
    assert (with_us.returncode, with_us.stdout, with_us.stderr) == (alone.returncode, alone.stdout, alone.stderr)


@patchable
def test_accelerate_is_patched_when_the_script_imports_it(tmp_path: Path) -> None:
    """And not before: what a script sets in the environment first must count."""
    (tmp_path / "script.py").write_text(
        "import os, sys\nos.environ['HF_HOME'] = 'here'\nassert 'huggingface_hub' not in sys.modules\n"
        "from accelerate import Accelerator\nfrom huggingface_hub import constants\n"
        "print(constants.HF_HOME, hasattr(Accelerator.maybe_context_parallel, '__cpcompat__'))"
    )
    assert ended([*RUN, "script.py"], tmp_path).stdout == "here True\n"


@patchable
@pytest.mark.parametrize(
    "launcher",
    [
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"],
        [
            "-m",
            "accelerate.commands.launch",
            "--multi_gpu",
            "--num_processes",
            "2",
            "--main_process_port",
            "0",
            "--module",
        ],
    ],
    ids=["torchrun", "accelerate launch"],
)
def test_two_processes_under_a_launcher(tmp_path: Path, launcher: list[str]) -> None:
    """A script that knows nothing of us trains with CP, and gets the loss without."""
    ids = torch.arange(64).remainder(7)[None] + 3
    expected = float(tiny_llama()(input_ids=ids, labels=ids).loss.detach())
    done = ended([sys.executable, *launcher, "cpcompat", "run", str(LOOP), str(tmp_path), "--lr", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("loss") == pytest.approx(expected, abs=1e-5)
        assert found == {"name": "__main__", "argv": [str(tmp_path), "--lr", "1"], "size": 2}
