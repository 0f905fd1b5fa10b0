"""The command line. Imports stay light until a command needs more."""
