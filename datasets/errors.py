"""What a person is told when their data cannot be used."""


class DataError(Exception):
    """A corpus or cache cannot be used; the message is one line that names the file and the remedy."""
