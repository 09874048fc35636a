"""The commands of `testtime`, one file for each kind. Each parses, calls the library and prints."""
