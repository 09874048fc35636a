"""`testtime`, and `python -m testtime`."""

import sys


def main() -> None:
    """The command line; an interrupt while it is being loaded ends it without a traceback."""
    try:
        from testtime.cli.app import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
