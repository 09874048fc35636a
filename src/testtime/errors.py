"""What can go wrong. Nothing heavy is imported here, so that the command line starts at once.

The error tree:

    TesttimeError            something failed while working (exit code 1)
    ├── Interrupted          stopped by Ctrl-C (exit code 130)
    └── InputError           the input or the options are wrong (exit code 2)
        ├── UnknownName      no method, encoder, dataset or setting of that name
        ├── SettingError     a setting's value is out of its range
        ├── FeatureError     features or a feature file that cannot be used
        ├── ImageError       an image that cannot be read
        ├── StateError       a saved session that does not fit
        └── MissingPart      an extra, a checkpoint or a capability that is not there
"""

from __future__ import annotations

UNENCODABLE = "backslashreplace"  # what becomes of a file name that is not UTF-8, wherever it is written


class TesttimeError(Exception):
    """Something failed while working."""

    exit_code = 1


class Interrupted(TesttimeError):
    """Stopped by Ctrl-C; the message says what is kept and how to go on."""

    exit_code = 130


class InputError(TesttimeError):
    """The input or the options are wrong; the message names the value and the way out."""

    exit_code = 2


class UnknownName(InputError):
    """No method, encoder, dataset or setting of that name."""


class SettingError(InputError):
    """A setting's value is out of its range."""


class FeatureError(InputError):
    """Features, or a feature file, that cannot be used."""


class ImageError(InputError):
    """An image that cannot be read."""


class StateError(InputError):
    """A saved session that does not fit this task, or cannot be read."""


class MissingPart(InputError):
    """An extra, a checkpoint or a capability that is not there."""
