"""From text to tokens and back: characters, a byte-level BPE trained here, or a pretrained tokenizer."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import huggingface_hub as hub
import numpy as np
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .corpus import first_line
from .errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
UNKNOWN = "<|unknown|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

# GPT-4's words (cl100k), with runs of Han characters apart, so that a Chinese word is never glued to the
# punctuation or the Latin word before it.
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SAMPLE_COST = 200_000_000


class Vocabulary:
    """A tokenizer that treats its input as plain text: no text can name a special token."""

    def __init__(self, tokenizer: Tokenizer, end_of_document: int):
        tokenizer.no_truncation()  # a pretrained one may have been saved with either
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.end_of_document = end_of_document
        """The token between documents."""
        # Ids may have gaps, so the size is not the number of tokens.
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        """One more than the largest token."""

    @property
    def hash(self) -> str:
        """SHA-256 of what it encodes with."""
        return hashlib.sha256(self._tokenizer.to_str(pretty=True).encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text, as uint32 arrays; all cores share the texts."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; bytes that are no whole character become U+FFFD."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json` that any Hugging Face tool reads."""
        self._tokenizer.save(str(path))

    @classmethod
    def load(cls, path: Path, end_of_document: int) -> "Vocabulary":
        """Read what `save` wrote."""
        return cls(_tokenizer_from(path), end_of_document)


def is_trained(vocabulary: int | str) -> bool:
    """Whether the vocabulary of this setting depends on the corpus."""
    return isinstance(vocabulary, int) or vocabulary == "characters"


def make_vocabulary(vocabulary: int | str, texts: Iterable[str], text_bytes: int) -> Vocabulary:
    """The vocabulary of a setting; `texts` is the training text, of about `text_bytes` UTF-8 bytes."""
    if vocabulary == "characters":
        return characters(texts)
    if isinstance(vocabulary, int):
        return byte_pairs(sample(texts, text_bytes), vocabulary)
    return pretrained(vocabulary)


def characters(texts: Iterable[str]) -> Vocabulary:
    """Each character of the texts, sorted, then a token for all others, then the end of a document."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    ids = {character: index for index, character in enumerate(sorted(found))} | {UNKNOWN: len(found)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([UNKNOWN, END_OF_DOCUMENT])
    return Vocabulary(tokenizer, len(found) + 1)


def byte_pairs(texts: Iterable[str], size: int) -> Vocabulary:
    """A byte-level BPE of `size` tokens, the end of a document included; fewer where the text has no more."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return Vocabulary(tokenizer, cast(int, tokenizer.token_to_id(END_OF_DOCUMENT)))


def sample(texts: Iterable[str], text_bytes: int, limit: int = SAMPLE_COST) -> Iterator[str]:
    """Texts spread evenly over all of them, for a BPE whose training keeps every distinct word in memory.

    At most about `limit` bytes of English or code (measured: 3 MB of memory for each MB of text). Runs of
    Chinese characters hardly repeat and take 30 times that, so a character of several bytes costs more: of
    Chinese alone about 8% of `limit` is taken.
    """
    share = limit / max(text_bytes, 1)
    seen = taken = 0.0
    for text in texts:
        text_bytes_here = len(text.encode())
        seen += text_bytes_here
        if taken <= seen * share:
            taken += text_bytes_here + 17 * (text_bytes_here - len(text))
            yield text


def pretrained(name: str) -> Vocabulary:
    """A tokenizer by file (`tokenizer.json`), folder or Hub name; none of its own code is run.

    Its end of a document is its `eos_token`, else its `sep_token`.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        return _with_transformers(name, str(path))
    if path.exists():
        file = path / "tokenizer.json" if path.is_dir() else path
        return _with_end(name, _tokenizer_from(file), _config_ends(file.with_name("tokenizer_config.json")))
    if not _is_hub_name(name):
        raise DataError(f"vocabulary {name}: no such file or folder; give a tokenizer.json, or a size to train")
    try:
        file = Path(hub.hf_hub_download(name, "tokenizer.json"))
        config = Path(hub.hf_hub_download(name, "tokenizer_config.json"))
    except LocalEntryNotFoundError as error:
        why = "offline mode is on" if hub.constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise DataError(
            f"vocabulary {name}: no such folder, {why} and it is not in the Hub's cache; give a folder "
            "with a tokenizer.json, or a size to train"
        ) from error
    except EntryNotFoundError:
        return _with_transformers(name, name)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = first_line(error)
        raise DataError(f"vocabulary {name}: {reason}; give a folder with a tokenizer.json") from error
    return _with_end(name, _tokenizer_from(file), _config_ends(config))


def _is_hub_name(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1 and not name.endswith(".json")


def _tokenizer_from(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give another tokenizer") from error
    except Exception as error:  # the tokenizers library raises a bare Exception for a file it cannot use
        reason = first_line(error)
        raise DataError(f"{path}: is not a tokenizer ({reason}); give a tokenizer.json") from error


def _config_ends(path: Path) -> list[str]:
    """The end-of-sequence and separator tokens that a `tokenizer_config.json` names, if there is one."""
    if not path.is_file():
        return []
    try:
        config = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
        tokens = [config.get("eos_token"), config.get("sep_token")]
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path}: is not a tokenizer's configuration; correct or remove it") from error
    return [token["content"] if isinstance(token, dict) else token for token in tokens if token]


def _with_transformers(name: str, where: str) -> Vocabulary:
    """A tokenizer in an older format, which transformers converts (imported here: it takes seconds)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = cast(Any, AutoTokenizer.from_pretrained(where, trust_remote_code=False))
        backend = tokenizer.backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = first_line(error)
        raise DataError(f"vocabulary {name}: {reason}; give a folder with a tokenizer.json") from error
    return _with_end(name, backend, [token for token in (tokenizer.eos_token, tokenizer.sep_token) if token])


def _with_end(name: str, tokenizer: Tokenizer, ends: list[str]) -> Vocabulary:
    for token in (*ends, *KNOWN_ENDS):
        if (index := tokenizer.token_to_id(token)) is not None:
            return Vocabulary(tokenizer, index)
    raise DataError(
        f"vocabulary {name}: has no end-of-document token; name one as eos_token in its tokenizer_config.json"
    )
