"""Documents one after the other, and where each begins."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.core.errors import DataError
from atoll.data.documents import Document
from atoll.data.tokenizer import BPETokenizer, ByteTokenizer, train_bpe
from atoll.data.tokens import encoded, in_memory

DOCUMENTS = [Document("1", "a", "abc"), Document("2", "b", "de"), Document("3", "a", "f")]


def test_each_document_is_followed_by_the_end_of_text():
    tokens = in_memory(DOCUMENTS, ByteTokenizer())
    assert ByteTokenizer().decode(tokens.ids) == "abc<|endoftext|>de<|endoftext|>f<|endoftext|>"
    assert tokens.starts.tolist() == [0, 4, 7]
    assert tokens.document(1).tolist() == [*b"de", 256]
    assert tokens.document(2).tolist() == [*b"f", 256]


def test_every_position_knows_its_domain():
    tokens = in_memory(DOCUMENTS, ByteTokenizer())
    names = [tokens.domains[i] for i in tokens.domains_at(np.arange(len(tokens)))]
    assert "".join(names) == "aaaabbbaa"
    assert tokens.domain_tokens == {"a": 6, "b": 3}


def test_long_streams_are_encoded_in_parts_without_losing_or_mixing_any():
    documents = [Document(str(n), "a", f"{n}." * 50_000) for n in range(40)]
    back = [(document.name, len(ids)) for document, ids in encoded(iter(documents), ByteTokenizer())]
    assert back == [(document.name, len(document.text) + 1) for document in documents]


def test_without_an_end_of_text_documents_are_simply_joined():
    named = train_bpe(DOCUMENTS, 257).text.replace("<|endoftext|>", "<|something_else|>")
    tokenizer = BPETokenizer(named)
    assert tokenizer.end_of_text is None
    assert tokenizer.decode(in_memory(DOCUMENTS, tokenizer).ids) == "abcdef"


def test_no_documents_make_no_tokens():
    with pytest.raises(DataError, match="no documents"):
        in_memory([], ByteTokenizer())
