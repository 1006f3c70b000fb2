"""Data: text into batches of integers. numpy only; no device."""

from mp_lstm.data.batches import ContiguousBatches, SentenceBatches, austen, sequence_batches
from mp_lstm.data.bill import BucketBill, auto_buckets, bucket_bill
from mp_lstm.data.buckets import (
    POLICIES,
    Histogram,
    best_buckets,
    check_buckets,
    fit_buckets,
    length_histogram,
    piece_histogram,
)
from mp_lstm.data.corpus import Corpus, Split, load_austen, read_directory, read_text
from mp_lstm.data.random_lengths import RandomLengthBatches
from mp_lstm.data.sequences import Sequences, join_sequences
from mp_lstm.data.source import BatchSource, Dropped, Position, iterate
from mp_lstm.data.vocabulary import EOS, UNK, Vocabulary, build_vocabulary

__all__ = [
    "EOS",
    "POLICIES",
    "UNK",
    "BatchSource",
    "BucketBill",
    "ContiguousBatches",
    "Corpus",
    "Dropped",
    "Histogram",
    "Position",
    "RandomLengthBatches",
    "SentenceBatches",
    "Sequences",
    "Split",
    "Vocabulary",
    "austen",
    "auto_buckets",
    "best_buckets",
    "bucket_bill",
    "build_vocabulary",
    "check_buckets",
    "fit_buckets",
    "iterate",
    "join_sequences",
    "length_histogram",
    "load_austen",
    "piece_histogram",
    "read_directory",
    "read_text",
    "sequence_batches",
]
