"""Write the code and cause of every diagnosis to the file DIAGNOSIS_CODES, in whichever process it is made.

Python imports this module at its start where this folder is on PYTHONPATH.
"""

import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

MODULE = "cs_systems.analysis.diagnosis"


class Finder(MetaPathFinder):
    """Import finder that makes the module's class record its instances once the module is loaded."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            record(module.Diagnosis)

        spec.loader.exec_module = exec_module
        return spec


def record(diagnosis):
    """Make each new instance of the class write a line."""
    made = diagnosis.__init__

    def write(self, *args, **rest):
        made(self, *args, **rest)
        with open(os.environ["DIAGNOSIS_CODES"], "a") as file:  # noqa: PTH123 (quick, and one line)
            file.write(json.dumps({"code": self.code, "cause": self.cause}) + "\n")

    diagnosis.__init__ = write


if "DIAGNOSIS_CODES" in os.environ:
    sys.meta_path.insert(0, Finder())
