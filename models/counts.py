"""Exact parameter counts and FLOPs per token, from the numbers of a configuration alone.

Two conventions, both 6 FLOPs per active parameter (norms and router in, token embedding out, the
output head once per prediction head) plus attention, forward and backward:

* full: 6 * heads * (d_qk + d_v) * min(S, window) per attention layer. PaLM (arXiv:2204.02311,
  appendix B) and TorchTitan count this way.
* causal: half of the sequence for a full layer; a window is causal already, so min(S/2, window).
  Megatron-LM and MaxText count this way.

Recomputation and the product that flash attention repeats in backward are in neither.
"""

from collections.abc import Sequence

import msgspec

FORWARD_AND_BACKWARD = 3


class ParameterCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters by part. `active_*`: routed experts scaled by experts per token over experts."""

    embedding: int
    layers: int
    active_layers: int
    final_norm: int
    head: int
    """The output head's, also where they are the embedding's."""
    tied: bool = False
    """Whether the head is the embedding: one parameter then, counted once in the total."""
    mtp: int = 0
    """The MTP modules' own parameters: embedding and head are shared with the main model."""
    active_mtp: int = 0
    vision: int = 0
    """A vision tower's: they work on patches, not on tokens, and are in no active count."""

    @property
    def total(self) -> int:
        """Every parameter."""
        own_head = 0 if self.tied else self.head
        own = self.embedding + self.layers + self.final_norm + own_head
        return own + self.mtp + self.vision

    @property
    def active(self) -> int:
        """Parameters that work on one token, token embedding excluded, head counted once."""
        return self.active_layers + self.final_norm + self.head + self.active_mtp


class AttentionLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Attention layers of one kind."""

    num_layers: int
    num_heads: int
    qk_head_dim: int
    v_head_dim: int
    window: int = 0
    """Keys that a query sees, itself included; 0 for all before it."""


class LinearAttentionLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of linear attention: a state of qk_head_dim x v_head_dim per (value) head."""

    num_layers: int
    num_heads: int
    qk_head_dim: int
    v_head_dim: int


class EntryAttentionLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Attention layers, or indexers, that see compressed entries of `block` tokens each."""

    num_layers: int
    num_heads: int
    width: int
    """Products of a head with one entry: of queries and of values."""
    block: int
    num_chosen: int = 0
    """Entries that a query sees at most; 0 for all before it."""


class FlopsTerm(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs per token of one part of the network, in both conventions."""

    full: int
    causal: int


class FlopsLedger(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs per token of forward and backward, term by term."""

    sequence_length: int
    terms: dict[str, FlopsTerm]

    @property
    def full(self) -> int:
        """FLOPs per token with attention over the whole window."""
        return sum(term.full for term in self.terms.values())

    @property
    def causal(self) -> int:
        """FLOPs per token with attention over what causality leaves."""
        return sum(term.causal for term in self.terms.values())


def linear_term(num_parameters: int) -> FlopsTerm:
    """A multiplication and an addition per parameter, forward and twice in backward."""
    flops = 2 * FORWARD_AND_BACKWARD * num_parameters
    return FlopsTerm(full=flops, causal=flops)


def attention_term(layers: AttentionLayers, sequence_length: int) -> FlopsTerm:
    """The products of scores and of values, forward and backward.

    Raises ValueError for a sequence of odd or no length: half of it must be a whole number.
    """
    if sequence_length <= 0 or sequence_length % 2:
        raise ValueError(f"the sequence length must be even and positive, not {sequence_length}")
    width = layers.num_heads * (layers.qk_head_dim + layers.v_head_dim)
    per_key = 2 * FORWARD_AND_BACKWARD * layers.num_layers * width
    window = layers.window or sequence_length
    return FlopsTerm(
        full=per_key * min(sequence_length, window),
        causal=per_key * min(sequence_length // 2, window),
    )


def entry_attention_term(layers: EntryAttentionLayers, sequence_length: int) -> FlopsTerm:
    """Products with the entries of the sequence, half of them in the causal convention.

    As a window, a choice of entries is causal already: the least of it and the half.
    """
    entries = sequence_length // layers.block
    chosen = layers.num_chosen or entries
    per_entry = 2 * FORWARD_AND_BACKWARD * layers.num_layers * layers.num_heads * layers.width
    return FlopsTerm(
        full=per_entry * min(entries, chosen),
        causal=per_entry * min(entries, 2 * chosen) // 2,
    )


def linear_attention_term(layers: LinearAttentionLayers) -> FlopsTerm:
    """Four products of the state's size per token, forward and backward, at any length.

    Decay, reading, update and query of the recurrence, as Megatron-Bridge counts them; TorchTitan
    does not count them at all: its sum is the ledger's without this term.
    """
    state = layers.num_heads * layers.qk_head_dim * layers.v_head_dim
    flops = 2 * FORWARD_AND_BACKWARD * 4 * layers.num_layers * state
    return FlopsTerm(full=flops, causal=flops)


def flops_ledger(
    counts: ParameterCounts,
    *,
    sequence_length: int,
    attention: Sequence[AttentionLayers],
    linear_attention: LinearAttentionLayers | None = None,
    mtp_attention: AttentionLayers | None = None,
) -> FlopsLedger:
    """The ledger of a decoder: linear, attention by kind, head, and all of MTP as one term."""
    terms = {"linear": linear_term(counts.active_layers + counts.final_norm)}
    for layers in attention:
        name = "attention_window" if layers.window else "attention"
        terms[name] = attention_term(layers, sequence_length)
    if linear_attention is not None and linear_attention.num_layers:
        terms["linear_attention_state"] = linear_attention_term(linear_attention)
    terms["head"] = linear_term(counts.head)
    if mtp_attention is not None and mtp_attention.num_layers:
        heads = mtp_attention.num_layers * counts.head
        linear = linear_term(counts.active_mtp + heads)
        scores = attention_term(mtp_attention, sequence_length)
        terms["mtp"] = FlopsTerm(
            full=linear.full + scores.full, causal=linear.causal + scores.causal
        )
    return FlopsLedger(sequence_length=sequence_length, terms=terms)
