"""The commands of `testtime`, a file for each kind. Each parses, calls the library and prints."""
