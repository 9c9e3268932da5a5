"""Text: the corpus, tokenizer and partition of a run as one spec, which opens to batches of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from atoll.core.config.type_checks import WideInt, check_positive, check_types, shown
from atoll.core.errors import ConfigError, DataError
from atoll.data.document_sources import check_corpus_spec, check_limit_bytes, open_corpus
from atoll.data.holdout_split import TRAIN, VALIDATION, Split, check_fraction, plan_split, split_documents
from atoll.data.partition import IID, ByDomain, Dirichlet, Features, KMeans, Partition
from atoll.data.prepare import is_prepared, open_prepared
from atoll.data.shuffled_epochs import OpenedData, check_shards_setting
from atoll.data.token_batches import TokenBatches, TokenExamples, validation_batches
from atoll.data.token_store import Tokens, encode_in_memory
from atoll.data.tokenizer import Tokenizer, bpe_vocab_size, load_tokenizer, train_bpe

_PREPARED = "prepared:"


@dataclass(frozen=True, kw_only=True)
class Text:
    """Where text comes from, how it becomes examples, and how examples are partitioned.

    Args:
        corpus: `stdlib`, `files:PATH[#field]`, `hf:NAME_OR_PATH[@configuration][:split][#field]`, or `prepared:FOLDER` (or just the
            folder) as `atoll data prepare` wrote it. All but prepared text is held in memory.
        tokenizer: `bytes`, a tokenizer's file or folder, or `bpe:VOCAB` to train one. Prepared text has its own.
        seq_len: tokens that an example predicts.
        validation_fraction: about this part of the documents is held out. Prepared text is split already.
        validation_corpus: the spec of another text to validate on; then all of `corpus` is for training.
        partition: how examples are divided into shards.
        limit_bytes: bytes of text to read at most, with a share for every domain; none: all.
        eval_batches: validation batches.
        shards: number of shards; none: one per island.
    """

    corpus: str = "stdlib"
    tokenizer: str = "bytes"
    seq_len: int = 64
    validation_fraction: float = 0.05
    validation_corpus: str | None = None
    partition: IID | ByDomain | KMeans | Dirichlet = IID()
    limit_bytes: WideInt | None = None
    eval_batches: int = 8
    shards: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_positive(self, "seq_len", "eval_batches")
        check_shards_setting(self.shards)
        check_limit_bytes(self.limit_bytes)
        check_fraction(self.validation_fraction)
        bpe_vocab_size(self.tokenizer)
        if self.prepared_folder is None:
            check_corpus_spec(self.corpus)
        elif self.limit_bytes is not None or self.validation_corpus is not None:
            raise ConfigError(
                f"limit_bytes and validation_corpus do not go with corpus={shown(self.corpus)}, which was cut when it was "
                f"prepared. Leave them out, or give them to `atoll data prepare`."
            )

    @property
    def prepared_folder(self) -> str | None:
        """The folder of prepared text, if the corpus is one."""
        if self.corpus.startswith(_PREPARED):
            return self.corpus.removeprefix(_PREPARED)
        return self.corpus if is_prepared(self.corpus) else None

    def load(self, log: Callable[[str], object] = lambda line: None) -> LoadedText:
        """The tokens and their tokenizer. `log` takes lines while long files of prepared text are verified. Raises DataError if the
        text cannot be found, read or split."""
        if isinstance(self.partition, KMeans):  # it partitions after the warm start, which may take hours
            self.partition.libraries()
        folder = self.prepared_folder
        return self._read() if folder is None else self._map(folder, log)

    def _read(self) -> LoadedText:
        documents = list(open_corpus(self.corpus, self.limit_bytes))
        held_out = None if self.validation_corpus is None else open_corpus(self.validation_corpus)
        split = plan_split(documents, self.validation_fraction) if held_out is None else Split(0)
        sides = list(split_documents(documents, split, held_out))
        train, validation = ([document for at, document in sides if at == side] for side in (TRAIN, VALIDATION))
        if not train or not validation:
            raise DataError(
                f"{self.corpus} is too short to hold some of it out: one document of {len(documents[0].text)} characters. "
                f"Give more text."
            )
        size = bpe_vocab_size(self.tokenizer)
        tokenizer = load_tokenizer(self.tokenizer) if size is None else train_bpe(train, size)
        train_tokens, validation_tokens = (encode_in_memory(side, tokenizer) for side in (train, validation))
        return LoadedText(settings=self, train=train_tokens, validation=validation_tokens, tokenizer=tokenizer)

    def _map(self, folder: str, log: Callable[[str], object]) -> LoadedText:
        prepared = open_prepared(folder, log)
        if self.tokenizer not in ("bytes", prepared.meta.get("tokenizer")):
            given = load_tokenizer(self.tokenizer) if bpe_vocab_size(self.tokenizer) is None else None
            if given is None or given.digest != prepared.tokenizer.digest:
                raise DataError(
                    f"tokenizer={self.tokenizer!r} is not the one that {folder} was prepared with "
                    f"({prepared.meta.get('tokenizer')!r}). Leave it out: prepared text has its own."
                )
        return LoadedText(settings=self, train=prepared.train, validation=prepared.validation, tokenizer=prepared.tokenizer)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedText:
    """Tokens in memory or memory-mapped. May be opened several times, with other shards or another partition."""

    settings: Text
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer

    def open(
        self,
        num_shards: int,
        batch_size: int,
        seed: int,
        skip_batches: int = 0,
        features: Features | None = None,
        partition: Partition | None = None,
    ) -> OpenedData[TokenBatches, list[Tensor]]:
        """Training batches from `num_shards` shards, and validation batches.

        `seed` decides the partition and the order within each shard. Each shard starts after its first `skip_batches` batches.
        KMeans needs `features`, a model's features of tokens. `partition` replaces the text's own.
        """
        text = self.settings
        examples = TokenExamples(self.train, text.seq_len)
        shards = (partition or text.partition).shards(examples, num_shards, seed, features)
        return OpenedData(
            train=TokenBatches(examples, shards, batch_size=batch_size, seed=seed, skip_batches=skip_batches),
            validation=validation_batches(self.validation, seq_len=text.seq_len, batch_size=batch_size, count=text.eval_batches),
        )
