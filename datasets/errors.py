"""What a person is told when their data cannot be used."""


class DataError(Exception):
    """A corpus or cache cannot be used; the message is one line that names the file and the remedy."""


class NoCorpus(DataError):
    """No file of the corpus can be found or fetched, so another one may be meant."""
