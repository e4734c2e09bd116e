"""Every check of cpcompat, each in an environment of its own; versions come from the project's own tables.

``nox`` runs lint, types, tests and the accelerate matrix; ``nox -l`` lists the rest.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from cpcompat.layouts import RELEASES, TORCHES  # noqa: E402

TORCH = "2.13.0"
ACCELERATES = [version for row in RELEASES for version in row.tried]
NEWEST = ACCELERATES[-1]
# What depends on torch.
ENGINE = [
    f"tests/test_{name}.py"
    for name in ("context", "ring", "equality", "failure_modes", "faults", "hooks", "resolve", "upstream")
]
# The Trainer's users: transformers before and after it learned to evaluate under CP.
CLIENTS = [
    (release, transformers)
    for release in ("1.10.1", "1.12.0", "1.15.0")
    for transformers in ("4.57", "5")
    if (release, transformers) != ("1.10.1", "5")  # transformers 5 asks for accelerate 1.12 itself
]
BROKEN = next(row.tried[0] for row in RELEASES if row.has_config and row.own_context == "never")
# What depends on accelerate; the engine and the ring, which do not, run once in `tests`.
MATRIX = [
    f"tests/test_{name}.py"
    for name in ("resolve", "equality", "hooks", "batch", "patch", "testing", "verify", "diagnosing", "failure_modes")
]
# What shows that it holds.
HOLDS = [f"tests/test_{name}.py" for name in ("properties", "faults", "concurrency", "nodes")]

# What a copy under another name has no part in: the command line, which is not copied, and tests of files of the checkout.
NOT_OF_A_COPY = ("main", "verify", "package", "readme", "codes", "vendoring", "pytest_plugin")
COMMAND_LINE = "script or launcher or doctor or module_is_run or what_is_installed_is_read or patched_when_the_script"
COPY = ["tests", *(f"--ignore=tests/test_{name}.py" for name in NOT_OF_A_COPY), "-k", f"not ({COMMAND_LINE})"]
# What proves a wheel: beside the engine what looks at files and makes copies of them.
WHEEL = [f"tests/test_{name}.py" for name in ("context", "equality", "errors", "package", "vendoring")]
# What stays out of the sdist: it is about this repository.
UNPACKED = (".ci/", "bench/", "results/", "tools/")

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "types", "tests", "accelerate", "vendored", "wheel", "downstream"]

PROJECT = nox.project.load_toml(str(ROOT / "pyproject.toml"))


def group(name: str) -> list[str]:
    """The requirements of a dependency group."""
    return nox.project.dependency_groups(PROJECT, name)


def install(session: nox.Session, *requirements: str, accelerate: str = NEWEST, torch: str = TORCH) -> None:
    """Install the package with exact versions, and prove that these are the versions which run."""
    session.install("-e", ".", f"torch=={torch}", f"accelerate=={accelerate}", *requirements)
    prove(session, torch=torch, accelerate=accelerate)


def prove(session: nox.Session, **versions: str) -> None:
    """A leg proves its identity before it tests."""
    code = (
        "import importlib, sys\n"
        "for pair in sys.argv[1:]:\n"
        "    name, wanted = pair.split('==')\n"
        "    found = importlib.import_module(name).__version__.split('+')[0]\n"
        "    assert found == wanted, f'{name} {found} runs where {wanted} was claimed'\n"
        "    print(name, found)\n"
    )
    session.run("python", "-c", code, *(f"{name}=={version}" for name, version in versions.items()))


def pytest(session: nox.Session, *arguments: str, record: str = "") -> None:
    """Run the suite; with ``-- --record`` the result file that the tables are made of is written."""
    options = [option for option in session.posargs if option != "--record"]
    if record and "--record" in session.posargs:
        options.append(f"--record={ROOT / 'results' / record}.json")
    session.run("python", "-m", "pytest", *arguments, *options, env={"HF_HUB_OFFLINE": "1"})


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict."""
    install(session, *group("types"))
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The whole suite on the newest accelerate."""
    install(session, *group("test"))
    pytest(session, "tests", record=f"accelerate-{NEWEST}-whole")


@nox.session
@nox.parametrize("version", ACCELERATES, ids=ACCELERATES)
def accelerate(session: nox.Session, version: str) -> None:
    """What depends on accelerate, on each release of the table."""
    install(session, *group("test"), accelerate=version)
    pytest(session, *MATRIX, record=f"accelerate-{version}")


@nox.session(default=False)
@nox.parametrize("version,transformers", CLIENTS, ids=[f"{a}-transformers-{t}" for a, t in CLIENTS])
def clients(session: nox.Session, version: str, transformers: str) -> None:
    """Real training with transformers' Trainer and TRL's SFTTrainer, with and without CP."""
    requirement = f"transformers=={transformers}.*"
    install(session, requirement, "trl", *group("test"), accelerate=version)
    name = f"clients-{version}-transformers-{transformers}"
    pytest(session, "-m", "clients", "tests/clients", record=name)


@contextmanager
def elsewhere(session: nox.Session) -> Iterator[Path]:
    """A folder outside the checkout, from which nothing of the checkout can be imported."""
    session.env["PYTHONPATH"] = ""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        yield Path(folder).resolve()


def copy_tests(to: Path, package: str = "cpcompat") -> None:
    """Copy the tests and the pages they read; they import the package by another name, where it has one."""
    for name in ("tests", "docs", "examples"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "downstream"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, to)
    for path in (*(to / "tests").rglob("*.py"), *(to / "docs").glob("*.md")):
        text = re.sub(r"\bfrom cpcompat(?=(\.\w+)* import )", f"from {package}", path.read_text())
        text = re.sub(r"^( *)import cpcompat$", rf"\1import {package} as cpcompat", text, flags=re.M)
        path.write_text(text)


@nox.session
def vendored(session: nox.Session) -> None:
    """The library's own tests against a copy under another name, where cpcompat is not installed.

    All but those of the command line, which is not copied, and of the checkout's own files.
    """
    session.install(f"torch=={TORCH}", f"accelerate=={NEWEST}", *group("test"))
    prove(session, torch=TORCH, accelerate=NEWEST)
    with elsewhere(session) as folder:
        vendor(session, folder / "product" / "_vendor", "--with-testing")
        copy_tests(folder, "product._vendor.cp_shim")
        code = "import importlib.util as u; assert u.find_spec('cpcompat') is None; import product._vendor.cp_shim"
        session.run("python", "-c", code)
        pytest(session, *COPY)


def vendor(session: nox.Session, dest: Path, *options: str) -> None:
    """Make a copy called cp_shim from the checkout, and check it as a project's CI does."""
    env = {"PYTHONPATH": str(ROOT)}
    for more in (options, ["--check"]):
        session.run("python", "-m", "cpcompat", "vendor", str(dest), "--name", "cp_shim", *more, env=env)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build sdist and wheel, compare them with what git tracks, install the wheel elsewhere and run tests there.

    Those of the engine, the files and the copies; ``nox -s wheel -- tests/test_batch.py`` runs others, too.
    """
    session.install("build")
    with elsewhere(session) as folder:
        session.run("python", "-m", "build", "--outdir", "dist", str(ROOT), silent=True)
        (sdist,), (built,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
        tracked = set(
            subprocess.run(
                ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.splitlines()
        )
        with tarfile.open(sdist) as archive:
            held = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
        compare(session, sdist.name, held, {name for name in tracked if not name.startswith(UNPACKED)})
        info = built.name.rpartition("-py3")[0] + ".dist-info"
        metadata = {
            f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
        }
        with zipfile.ZipFile(built) as archive:
            held = set(archive.namelist())
        compare(session, built.name, held, {name for name in tracked if name.startswith("cpcompat/")} | metadata)

        session.install(str(built), f"torch=={TORCH}", f"accelerate=={NEWEST}", *group("test"))
        prove(session, torch=TORCH, accelerate=NEWEST)
        copy_tests(folder)
        session.run("python", "-c", "import cpcompat; assert 'site-packages' in cpcompat.__file__, cpcompat.__file__")
        pytest(session, *WHEEL)


def compare(session: nox.Session, archive: str, held: set[str], wanted: set[str]) -> None:
    """Fail where an archive lacks something or has too much."""
    if held != wanted:
        session.error(f"{archive} lacks {sorted(wanted - held)}, and has too much {sorted(held - wanted)}")
    session.log(f"{archive}: {len(held)} files, as git tracks them")


@nox.session
def downstream(session: nox.Session) -> None:
    """A library that carries a copy, installed in a clean environment without cpcompat, runs its own tests."""
    with elsewhere(session) as folder:
        project = folder / "longtail"
        shutil.copytree(ROOT / "tests" / "downstream", project, ignore=shutil.ignore_patterns("__pycache__"))
        vendor(session, project / "src" / "longtail" / "_vendor", "--with-testing")
        session.install(str(project), f"torch=={TORCH}", f"accelerate=={NEWEST}", "pytest")
        prove(session, torch=TORCH, accelerate=NEWEST)
        pytest(session, "longtail")


@nox.session
def verify(session: nox.Session) -> None:
    """Show the repair on the release that makes no context by itself."""
    install(session, "transformers", accelerate=BROKEN)
    session.run("python", "-m", "cpcompat", "verify", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure against torch's own context and one process, and make docs/benchmark.md: ten minutes of a quiet machine."""
    install(session, *group("bench"))
    session.run("python", str(ROOT / "bench" / "bench.py"), *session.posargs, env={"HF_HUB_OFFLINE": "1"})


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """What holds docs/guarantees.md, with what takes longer than a change waits for: many examples, long runs, inductor."""
    install(session, *group("test"))
    pytest(session, "-m", "not clients", *HOLDS, record="nightly")


@nox.session(default=False)
@nox.parametrize("torch", TORCHES, ids=TORCHES)
def torch_matrix(session: nox.Session, torch: str) -> None:
    """The engine, the ring and the tiny Llama on each torch; ``-- 1.12.0`` runs one accelerate alone.

    One environment at a time, removed afterwards: with CUDA each is 5 GB and more.
    """
    chosen = [argument for argument in session.posargs if argument in ACCELERATES]
    session.posargs[:] = [argument for argument in session.posargs if argument not in chosen]
    failed = []
    try:
        for release in chosen or ("1.10.1", BROKEN, NEWEST):
            install(session, *group("test"), accelerate=release, torch=torch)
            try:
                pytest(session, *ENGINE, record=f"torch-{torch}-accelerate-{release}")
            except nox.command.CommandFailed:
                failed.append(release)
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)
    if failed:
        session.error(f"torch {torch} failed with accelerate {', '.join(failed)}")


@nox.session(default=False, python=["3.10", "3.12", "3.13", "3.14"])
def pythons(session: nox.Session) -> None:
    """The newest pair that each Python has."""
    try:
        session.install("-e", ".", *group("test"))
        pytest(session, *ENGINE, record=f"python-{session.python}")
    finally:
        shutil.rmtree(session.virtualenv.location, ignore_errors=True)


@nox.session(default=False)
def newest(session: nox.Session) -> None:
    """The newest of everything, pre-releases included; exit code 3: upstream moved, 4: we broke."""
    session.install("-e", ".", *group("test"))
    session.install("--pre", "--upgrade", "accelerate", "torch", "transformers")
    python = str(Path(session.bin) / "python")
    code = subprocess.run([python, str(ROOT / "tools" / "newest.py"), *ENGINE, *MATRIX], check=False).returncode
    if code:
        sys.exit(code)


@nox.session(default=False, venv_backend="none")
def tables(session: nox.Session) -> None:
    """Make the compatibility page and the README's table of the result files."""
    session.run(sys.executable, str(ROOT / "tools" / "tables.py"), external=True)
