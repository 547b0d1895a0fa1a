"""What keeps a trial from going on without being a fault of its own."""


class NewerVersion(Exception):
    """A file was written by a newer version of rigsweep and is left as it is; the message is one line that names it."""


class WrongSettings(ValueError):
    """Settings that are each right and together are no training."""
