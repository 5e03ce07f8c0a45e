"""argparse with errors in one line.

Here belongs the parser that all our commands share. The commands are in `run.cli`.
"""

import argparse
import re

from ..util import nearest


class Parser(argparse.ArgumentParser):
    "argparse whose errors are one line and offer the nearest name."

    def error(self, message):
        wrong = re.search(r"(?:unrecognized arguments: |invalid choice: ')([\w-]+)", message)
        if wrong:
            names = []
            for action in self._actions:
                names += [*action.option_strings, *(action.choices or ())]
                if isinstance(action.choices, dict):  # commands
                    names += [x for c in action.choices.values() for x in c._option_string_actions]
            hint = f'{nearest(wrong[1], names)}; there are: {", ".join(dict.fromkeys(names))}'
            message = f'{wrong[1]!r} is not known to {self.prog}{hint}'
        raise ValueError(message)
