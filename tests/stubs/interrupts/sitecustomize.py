"""Python runs this first. The process gets Ctrl-C as it begins to import the module that INTERRUPTED_IMPORT names."""

import os
import signal
import sys


class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPTED_IMPORT"]:
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, Interrupts())
