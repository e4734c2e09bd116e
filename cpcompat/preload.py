"""Imported by the server that ranks are forked from, and by nothing else: loads what the ranks would each load."""

import contextlib
import importlib
import os

for _name in os.environ.pop("CPCOMPAT_PRELOAD", "").split():
    with contextlib.suppress(Exception):  # whoever needs it will meet the error, and can tell it
        importlib.import_module(_name)
