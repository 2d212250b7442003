"""The command line: thin, one file per command.

Every command takes `--json` and then prints one JSON document on stdout; logs and progress go
to stderr. Exit 0 = done, 1 = a run failed, 2 = bad usage, 130 and 143 = interrupted. Parsing
imports nothing heavy: a command's module imports what it needs inside `run`.

Takes: arguments. Gives: text or JSON on stdout, an exit code.
"""
