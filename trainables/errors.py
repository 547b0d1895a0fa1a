"""What keeps a trial from going on without being a fault of its own."""


class NewerVersion(Exception):
    """A file was written by a newer version of rigsweep and is left as it is; the message is one line that names it."""


class WrongSettings(ValueError):
    """Settings that are each right and together are no training."""


NEVER_STARTED = "memory-estimate"
"""The rule of a trial that ended as out of memory by its estimate: nothing was allocated."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an exception says that memory has run out."""
    words = f"{type(error).__name__}: {error}"
    # PyTorch's own class, then the words of the CUDA driver, of cuBLAS and of PyTorch on a CPU.
    signs = ("OutOfMemoryError", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    return isinstance(error, MemoryError) or any(sign in words for sign in signs)
