"""Copies made by vendor: what they have, that nothing spoils them, and that they live beside one another."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from copies import copy
from installed import RELEASE
from ranks import vendor_bodies as bodies

import cpcompat
from cpcompat import VendorRefused, vendoring
from cpcompat.__main__ import main
from cpcompat.testing import Ranks
from cpcompat.vendoring import MANIFEST, Change, check, vendor

TESTING = {"launch.py", "preload.py", "pytest_plugin.py", "rank.py", "testing.py", "verifying.py"}
COMMAND_LINE = {"__main__.py", "running.py", "vendoring.py"}
OLD = "0.0.1"

two_copies = pytest.mark.skipif(not RELEASE.has_config, reason="this accelerate keeps no context to be recognised")


def contents(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "__pycache__"}


def make_old(root: Path) -> ModuleType:
    """The package as it was at another version, in a checkout of its own."""
    copy(root / "older", "__init__.py", f'__version__ = "{cpcompat.__version__}"', f'__version__ = "{OLD}"')
    (root / "older" / "sdpa.py").write_text((root / "older" / "sdpa.py").read_text() + "# other\n")
    (root / "older" / "gone.py").write_text("")
    (root / "pyproject.toml").write_text("")
    (root / "LICENSE").write_text("the licence of then")
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module("older.vendoring")
    finally:
        sys.path.remove(str(root))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    yield make_old(tmp_path_factory.mktemp("checkout"))
    for name in [name for name in sys.modules if name.split(".")[0] == "older"]:
        del sys.modules[name]


# --- what a copy has ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("testing", [False, True])
def test_a_copy_has_what_it_needs_and_nothing_else(tmp_path: Path, testing: bool) -> None:
    done = vendor(tmp_path / "new" / "_vendor", "cp_shim", testing=testing)
    source = {path.name for path in Path(cpcompat.__file__).parent.glob("*.py")}
    assert {*TESTING, *COMMAND_LINE} <= source
    left_out = COMMAND_LINE if testing else COMMAND_LINE | TESTING
    assert contents(done.place).keys() == source - left_out | {"py.typed", "LICENSE", MANIFEST}
    assert done == (tmp_path / "new" / "_vendor" / "cp_shim", None, True)
    assert os.listdir(done.place.parent) == ["cp_shim"]
    assert "Apache License" in (done.place / "LICENSE").read_text()
    manifest = json.loads((done.place / MANIFEST).read_text())
    assert manifest["version"] == cpcompat.__version__
    assert manifest["files"].keys() == contents(done.place).keys() - {MANIFEST}
    assert check(tmp_path / "new" / "_vendor", "cp_shim") == []


def test_a_second_run_does_nothing_and_an_update_keeps_the_choice(tmp_path: Path, older: ModuleType) -> None:
    older.vendor(tmp_path, "shim", testing=True)
    assert vendor(tmp_path, "shim") == (tmp_path / "shim", OLD, True)
    assert (tmp_path / "shim" / "testing.py").exists()
    assert not (tmp_path / "shim" / "gone.py").exists()
    before = (tmp_path / "shim").stat()
    assert vendor(tmp_path, "shim") == (tmp_path / "shim", cpcompat.__version__, False)
    assert (tmp_path / "shim").stat() == before
    assert vendor(tmp_path, "shim", testing=False).written
    assert not (tmp_path / "shim" / "testing.py").exists()


def test_every_module_works_without_cpcompat_and_without_those_left_out(tmp_path: Path) -> None:
    vendor(tmp_path / "product" / "_vendor", "cp_shim")
    code = (
        "import importlib, pathlib, sys\n"
        "sys.modules['cpcompat'] = None\n"
        "from product._vendor.cp_shim import *\n"
        "import product._vendor.cp_shim as shim\n"
        "for path in pathlib.Path(shim.__file__).parent.glob('*.py'):\n"
        "    importlib.import_module(f'{shim.__name__}.{path.stem}' if path.stem != '__init__' else shim.__name__)\n"
        "assert 'verify' not in {*shim.__all__, *dir(shim)} and not hasattr(shim, 'verify')\n"
        "from accelerate import Accelerator\n"
        "try: get_cp_context(Accelerator(cpu=True))\n"
        "except CPError as error: print(type(error).__module__, error.code)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.stdout == "product._vendor.cp_shim.errors CP101\n", done.stderr


# --- check --------------------------------------------------------------------------------------------------------------


def edit(place: Path) -> None:
    (place / "ring.py").write_text("")


def drop(place: Path) -> None:
    (place / "ring.py").unlink()


def link(place: Path) -> None:
    drop(place)
    (place / "ring.py").symlink_to(Path(cpcompat.__file__).parent / "ring.py")


def fold(place: Path) -> None:
    drop(place)
    (place / "ring.py").mkdir()


def add(place: Path) -> None:
    (place / "more\x1b.py").write_text("")


CHANGES: dict[str, tuple[Callable[[Path], None], Change]] = {
    "edited": (edit, Change("ring.py", "edited")),
    "missing": (drop, Change("ring.py", "missing")),
    "a link to the same": (link, Change("ring.py", "edited")),
    "a folder": (fold, Change("ring.py", "edited")),
    "added": (add, Change("more\x1b.py", "foreign")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_check_names_the_file_and_vendor_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    make, change = CHANGES[what]
    run = ["vendor", str(tmp_path), "--name", "shim"]
    assert main(run) == main([*run, "--check"]) == 0
    capsys.readouterr()
    make(tmp_path / "shim")
    before = os.listdir(tmp_path / "shim")
    assert check(tmp_path, "shim") == [change]
    assert main([*run, "--check"]) == 1
    out = capsys.readouterr().out
    assert out.split()[0] == change.kind
    assert change.file.replace("\x1b", "\\x1b") in out
    assert "\x1b" not in out
    if change.kind != "missing":  # nothing is lost by writing it again
        assert main(run) == 1
        assert f"[CP601] {tmp_path / 'shim'} was edited since" in capsys.readouterr().err
        assert os.listdir(tmp_path / "shim") == before
        assert main([*run, "--force"]) == 0
    else:
        assert main(run) == 0
    assert check(tmp_path, "shim") == []
    assert (Path(cpcompat.__file__).parent / "ring.py").stat().st_size, "what a link led to stands"


def test_check_names_what_is_older_or_newer(tmp_path: Path, older: ModuleType) -> None:
    older.vendor(tmp_path, "shim")
    assert check(tmp_path, "shim") == [
        Change(name, "older") for name in ("LICENSE", "__init__.py", "gone.py", "sdpa.py")
    ]
    vendor(tmp_path, "shim")
    assert {change.kind for change in older.check(tmp_path, "shim")} == {"newer"}


def test_turned_line_ends_are_no_edit(tmp_path: Path) -> None:
    path = vendor(tmp_path, "shim").place / "ring.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert check(tmp_path, "shim") == []


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "..", "../out", "/tmp/out", "a.b", "a b", "a\n", "class", "__pycache__", "ﬁx", "\0"]
)
@pytest.mark.parametrize("deed", [vendor, check])
def test_a_name_is_an_identifier(tmp_path: Path, name: str, deed: Callable[..., object]) -> None:
    with pytest.raises(VendorRefused, match="the name of a copy is one Python identifier"):
        deed(tmp_path / "in", name, **({"force": True} if deed is vendor else {}))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"version": 1, "testing": true, "files": {}}',
        '{"version": "1", "testing": true, "files": {"../../x": ""}}',
        '{"version": "1", "testing": true, "files": {"/etc/passwd": ""}}',
        '{"version": "1", "testing": true, "files": {"a/b.py": ""}}',
    ],
)
def test_a_folder_that_vendor_did_not_make_stays(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / MANIFEST).write_text(manifest)
    for deed in (lambda: check(tmp_path, "shim"), lambda: vendor(tmp_path, "shim", force=True)):
        with pytest.raises(VendorRefused, match="is no copy made by vendor"):
            deed()
    assert (tmp_path / "shim" / MANIFEST).read_text() == manifest


def test_a_link_in_the_place_is_not_followed(tmp_path: Path) -> None:
    outside = vendor(tmp_path / "outside", "shim").place
    before = contents(outside)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "shim").symlink_to(outside)
    (tmp_path / "in" / "nowhere").symlink_to(tmp_path / "nowhere")
    for name in ("shim", "nowhere"):
        with pytest.raises(VendorRefused, match="is a symbolic link"):
            vendor(tmp_path / "in", name, force=True)
        with pytest.raises(VendorRefused, match="is a symbolic link"):
            check(tmp_path / "in", name)
    (tmp_path / "in" / ".cp.new").symlink_to(outside)
    with pytest.raises(VendorRefused, match="could not be written"):
        vendor(tmp_path / "in", "cp")
    assert contents(outside) == before
    assert not (tmp_path / "nowhere").exists()


def test_paths_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "shim").write_text("")
    for dest in (tmp_path / "file", tmp_path, f"{tmp_path}/\0", tmp_path / ("x" * 300)):
        with pytest.raises(VendorRefused):
            vendor(dest, "shim", force=True)
        with pytest.raises(VendorRefused):
            check(dest, "shim")


def test_a_folder_with_an_odd_name_is_a_folder(tmp_path: Path) -> None:
    odd = tmp_path / "--force \n'$(x)é"
    assert vendor(odd, "shim").written
    assert check(odd, "shim") == []


def test_two_runs_do_not_meet(tmp_path: Path) -> None:
    with vendoring._alone(tmp_path), pytest.raises(VendorRefused, match="another run is at work"):
        vendor(tmp_path, "shim")
    assert vendor(tmp_path, "shim").written


# --- interrupted --------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import os, sys
from pathlib import Path
from cpcompat import vendoring

dest, kill, exchange = Path(sys.argv[1]), sys.argv[2] == "killed", sys.argv[3] == "exchange"
if not exchange:
    vendoring._exchange = lambda one, other: False
place = dest / "shim"

def contents():
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name != "__pycache__"}

def at_step(number):
    "Vendor in a process that ends at a step of its own on the file system; whether it came to the end."
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    count = 0
    def look(event, arguments):
        nonlocal count
        if event.split(".")[0] in ("open", "os", "shutil") and event != "os.fork":
            count += 1
            if count == number:
                if kill:
                    os._exit(9)
                raise KeyboardInterrupt
    sys.addaudithook(look)
    try:
        vendoring.vendor(dest, "shim", testing=True)
    except BaseException:
        os._exit(1)
    os._exit(0)

vendoring.vendor(dest, "shim", testing=False)
old, seen, steps = contents(), set(), 0
while True:
    steps += 1
    done = at_step(steps)
    if not place.exists():
        assert kill and not exchange, steps
        vendoring.vendor(dest, "shim", testing=False)  # takes the old copy up again
        state = "away"
        assert contents() == old
    else:
        assert vendoring.check(dest, "shim") == [], steps
        state = "old" if contents() == old else "new"
    assert {*os.listdir(dest)} <= {"shim", ".shim.new", ".shim.old"}
    seen.add(state)
    if done:
        break
    vendoring.vendor(dest, "shim", testing=False)
    assert os.listdir(dest) == ["shim"]
assert os.listdir(dest) == ["shim"]
print(steps > 60, sorted(seen))
"""


@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.parametrize("swap", ["exchange", "two renames"])
def test_a_run_that_ends_anywhere_leaves_the_old_or_the_new_copy(tmp_path: Path, how: str, swap: str) -> None:
    """Ended at every step on the file system in turn. Where a system cannot exchange, the next run finishes the swap."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(cpcompat.__file__).parents[1]), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), how, swap]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    away = ["away"] if (how, swap) == ("killed", "two renames") else []
    assert done.stdout == f"True {[*away, 'new', 'old']}\n", done.stderr


# --- beside one another -------------------------------------------------------------------------------------------------


@pytest.fixture
def neighbour(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, older: ModuleType) -> str:
    """A vendored copy of another version, in a package of somebody's, where ranks find it."""
    root = tmp_path_factory.getbasetemp() / "neighbours"
    older.vendor(root / "neighbour" / "_vendor", "cp_shim")
    monkeypatch.syspath_prepend(root)
    return "neighbour._vendor.cp_shim"


@two_copies
@pytest.mark.parametrize("first", ["cpcompat", "the copy"])
def test_one_copy_recognises_the_others_context(ranks2: Ranks, neighbour: str, first: str) -> None:
    versions = (cpcompat.__version__, OLD) if first == "cpcompat" else (OLD, cpcompat.__version__)
    for found in ranks2.run(bodies.beside, neighbour, first):
        assert found["versions"] == versions
        assert found["types"] == [True, True], "each copy gives a context of its own class"
        assert found["origins"] == ["created", "adopted"]
        assert found["stands"]
        assert found["hooks"] == {1}
        assert found["lengths"] == [{32}, {32}], "sharded once"
        assert max(found["losses"]) < 1e-6
        assert max(found["gradients"]) < 1e-5
        ours = [False, True] if first == "cpcompat" else [True, False]
        assert found["nested"] == [(True, catchable, "CP203") for catchable in ours]


@two_copies
def test_two_copies_patch_once(ranks2: Ranks, neighbour: str) -> None:
    for found in ranks2.run(bodies.patched_twice, neighbour):
        assert found == {"once": True, "lengths": [4, 8], "back": True}


def test_no_copy_without_the_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was copied out by hand has none."""
    copy(tmp_path / "bare")
    monkeypatch.syspath_prepend(tmp_path)
    bare = importlib.import_module("bare.vendoring")
    monkeypatch.setattr(bare.metadata, "distribution", lambda name: bare.metadata.Distribution.at(tmp_path))
    with pytest.raises(Exception, match="the licence of cpcompat cannot be found") as caught:
        bare.vendor(tmp_path / "dest")
    assert type(caught.value).__name__ == "VendorRefused"
    for name in [name for name in sys.modules if name.split(".")[0] == "bare"]:
        del sys.modules[name]
