"""`python -m testtime` is `testtime`."""

from testtime.cli import main

if __name__ == "__main__":
    main()
