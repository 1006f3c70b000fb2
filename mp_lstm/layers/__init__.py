"""Layers: pure functions in three phases, and models made of them. No devices, no files."""

from mp_lstm.layers.base import Borrowed, Context, Layer, apply, chain, residual
from mp_lstm.layers.batch import Batch, last_step_only
from mp_lstm.layers.decoder import HeadParams, TiedHeadParams
from mp_lstm.layers.dense import DenseParams, dense
from mp_lstm.layers.dropout import dropout, locked_dropout
from mp_lstm.layers.embedding import EmbeddingParams, embedding
from mp_lstm.layers.heads import loss_head, softmax_cross_entropy, softmax_head, squared_error
from mp_lstm.layers.language_model import language_model
from mp_lstm.layers.lstm import LSTMParams, LSTMState, lstm, lstm_init, lstm_layer
from mp_lstm.layers.model import Model, Tie, sequential
from mp_lstm.layers.recurrent import from_function, recurrent
from mp_lstm.layers.regularisation import activation_regularisation, temporal_regularisation
from mp_lstm.layers.two_biases import two_biases
from mp_lstm.layers.weight_drop import weight_drop

__all__ = [
    "Batch",
    "Borrowed",
    "Context",
    "DenseParams",
    "EmbeddingParams",
    "HeadParams",
    "LSTMParams",
    "LSTMState",
    "Layer",
    "Model",
    "Tie",
    "TiedHeadParams",
    "activation_regularisation",
    "apply",
    "chain",
    "dense",
    "dropout",
    "embedding",
    "from_function",
    "language_model",
    "last_step_only",
    "locked_dropout",
    "loss_head",
    "lstm",
    "lstm_init",
    "lstm_layer",
    "recurrent",
    "residual",
    "sequential",
    "softmax_cross_entropy",
    "softmax_head",
    "squared_error",
    "temporal_regularisation",
    "two_biases",
    "weight_drop",
]
