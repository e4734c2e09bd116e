"""The command line: ``python -m cpcompat``, under whatever name the package has.

A command is a function that gets its parser and returns what runs it, and one line in `_COMMANDS`; its docstring is its
help. What it needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from . import __version__

if TYPE_CHECKING:
    from .checks import VerifyReport
    from .findings import Report

__all__ = ["main"]

Action = Callable[[argparse.Namespace], int]


def _verify(parser: argparse.ArgumentParser) -> Action:
    """Compare context parallelism with the same without it, on real ranks, and print a table."""
    parser.add_argument("--nproc", type=_number(int, 2), default=2, help="ranks to start (default 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--timeout", type=_number(float, 1), default=120.0, metavar="S", help="seconds for each check (default 120)"
    )
    parser.epilog = (
        "GPUs are used where there are as many as ranks; CUDA_VISIBLE_DEVICES= keeps to the CPU. "
        "Exit code: 0 all that ran passed, 1 something failed or nothing ran, 2 wrong usage."
    )

    def act(arguments: argparse.Namespace) -> int:
        from .verifying import verify

        return _print(verify(arguments.nproc, timeout=arguments.timeout), arguments.json)

    return act


def _doctor(parser: argparse.ArgumentParser) -> Action:
    """Look for what is known to make context parallelism fail: versions, environment and config file."""
    parser.add_argument("--config", metavar="FILE", help="accelerate's config file, as accelerate config writes it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.epilog = (
        "In a script, cpcompat.diagnose(accelerator) looks at models and loaders, too. "
        "Exit code: 0 no errors found, 1 errors found, 2 wrong usage."
    )

    def act(arguments: argparse.Namespace) -> int:
        from .diagnosing import diagnose
        from .settings import ConfigUnreadable

        try:
            report = diagnose(config=arguments.config)
        except ConfigUnreadable as error:
            parser.error(str(error))
        return _print(report, arguments.json)

    return act


def _run(parser: argparse.ArgumentParser) -> Action:
    """Run a script or module as python would, with maybe_context_parallel patched for whatever trainer it uses."""
    parser.usage = f"{parser.prog} [-h] [-m] TARGET ..."
    parser.add_argument("-m", dest="module", action="store_true", help="TARGET is a module, as in python -m")
    parser.add_argument("target", metavar="TARGET", help="path of a script, or name of a module")
    parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="passed on to it")

    def act(arguments: argparse.Namespace) -> int:
        from .running import run

        run(arguments.target, arguments.arguments, module=arguments.module)
        return 0

    return act


def _vendor(parser: argparse.ArgumentParser) -> Action:
    """Copy this package into another one, or check such a copy."""
    parser.add_argument("dest", metavar="DEST", help="the folder that gets the copy, such as src/product/_vendor")
    parser.add_argument("--name", default="cpcompat", help="the copy's name (default cpcompat)")
    parser.add_argument("--check", action="store_true", help="only name the files that are not as they should be")
    parser.add_argument("--force", action="store_true", help="overwrite edited files, too")
    parser.add_argument(
        "--with-testing",
        action=argparse.BooleanOptionalAction,
        help="with testing, the pytest plugin and verify, or without (by default as the copy has it; a new one has not)",
    )
    parser.epilog = "Exit code: 0 all well, 1 refused or not as it should be, 2 wrong usage."

    def act(arguments: argparse.Namespace) -> int:
        from .errors import VendorRefused
        from .vendoring import check, vendor

        try:
            if arguments.check:
                changes = check(arguments.dest, arguments.name)
                print("\n".join(map(str, changes)) or "as it should be")
                return 1 if changes else 0
            done = vendor(arguments.dest, arguments.name, testing=arguments.with_testing, force=arguments.force)
        except VendorRefused as error:
            print(error, file=sys.stderr)
            return 1
        came = f"{done.before} -> {__version__}" if done.before else __version__
        print(f"{done.place}: {came if done.written else f'{__version__}, nothing to do'}")
        return 0

    return act


_COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Action]] = {
    "doctor": _doctor,
    "verify": _verify,
    "run": _run,
    "vendor": _vendor,
}


def _print(report: Report | VerifyReport, as_json: bool) -> int:
    """Print a report, coloured on a terminal only; the exit code."""
    import json
    import os

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.table(colour=colour))
    return 0 if report.ok else 1


def _number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {text}")
        return value

    parse.__name__ = "number"  # what argparse calls it where it is none
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        The exit code.
    """
    package = __package__ or "cpcompat"
    about = (sys.modules[package].__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {package}", description=about)
    parser.add_argument("--version", action="version", version=f"{package} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, make in _COMMANDS.items():
        command = commands.add_parser(name, help=make.__doc__, description=make.__doc__)
        command.set_defaults(act=make(command))
    arguments = parser.parse_args(argv)
    code: int = arguments.act(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
