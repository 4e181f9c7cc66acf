"""The one exception family: what went wrong, where, what was expected, what to do."""


class MlxconvError(Exception):
    """A clear failure. The message names the file, key or node, and says what to do about it."""


class ArgumentError(MlxconvError):
    """Arguments that are wrong regardless of what the files contain: a usage error."""
