"""Text in, token batches by position out. Everything is decided by the spec and the seed, and nothing has a cursor.

corpus (stdlib, files, hub) gives documents; split holds some out; tokenizer and tokens make ids of them, in memory or in files
(shards, prepare); examples are windows on the ids; partition deals them to shards; stream gives batches; text is all of it.
gaussians are points instead of text: the asynchronous paper's toy. instructions are prompts and answers of different lengths, to
fine-tune a pretrained model on (records, encoded): its own tokenizer makes ids of them, and batches are padded.
"""

from atoll.data.corpus import Corpus, Document, open_corpus
from atoll.data.gaussians import Gaussians
from atoll.data.instructions import Instructions
from atoll.data.partition import IID, ByDomain, Dirichlet, KMeans, Partition
from atoll.data.prepare import Prepared, open_prepared, prepare
from atoll.data.text import LoadedText, Text, TextData
from atoll.data.token_batches import TokenBatches, validation_batches
from atoll.data.token_files import TokenFile, write_tokens
from atoll.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from atoll.data.tokens import Tokens

__all__ = [
    "IID",
    "BPETokenizer",
    "ByDomain",
    "ByteTokenizer",
    "Corpus",
    "Dirichlet",
    "Document",
    "Gaussians",
    "Instructions",
    "KMeans",
    "LoadedText",
    "Partition",
    "Prepared",
    "Text",
    "TextData",
    "TokenBatches",
    "TokenFile",
    "Tokenizer",
    "Tokens",
    "load_tokenizer",
    "open_corpus",
    "open_prepared",
    "prepare",
    "train_bpe",
    "validation_batches",
    "write_tokens",
]
