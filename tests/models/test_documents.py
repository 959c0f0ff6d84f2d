"""Packed documents do not see each other: neither attention nor MTP targets cross a boundary."""

import pytest
import torch
from torch import Tensor

from models.batch import IGNORE, NO_TOKEN, Batch
from models.deepseek_v3 import DEEPSEEK_V3_PROXY
from models.layers.mtp import shift_labels, shift_tokens
from models.protocol import Model, ModelConfig
from tests.models.families import MIXTURES, PROXIES
from tests.models.helpers import build, pack, relative_error

LENGTHS = [40, 150, 66]
MIDDLE = slice(40, 190)


def losses_and_embedding_gradients(
    model: Model, batch: Batch
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Main sum, MTP sum, gradient of each token's embedding (through a hook)."""
    gradients: list[Tensor] = []

    def watch(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(gradients.append)

    handle = model.embedding.register_forward_hook(watch)
    losses = model(*batch)
    losses.total.backward()
    handle.remove()
    return losses.main_sum, losses.mtp_sum, gradients


def only(batch: Batch, where: slice) -> Batch:
    """The batch with targets in these columns alone."""
    labels = torch.full_like(batch.labels_BS, IGNORE)
    labels[:, where] = batch.labels_BS[:, where]
    return batch._replace(labels_BS=labels)


@pytest.mark.parametrize("name", PROXIES)
def test_other_documents_do_not_notice_a_change_of_one(name: str) -> None:
    """Same losses and same embedding gradients elsewhere, MTP included.

    Up to the rounding of products whose number of rows differs; across the boundary exactly zero.
    """
    model = build(PROXIES[name])
    batch = pack([LENGTHS], 512)
    changed_tokens = batch.tokens_BS.clone()
    changed_tokens[:, MIDDLE] = (changed_tokens[:, MIDDLE] + 7) % 512
    changed = batch._replace(tokens_BS=changed_tokens)
    first, last = slice(0, MIDDLE.start), slice(MIDDLE.stop, 256)

    for part in (first, last):
        before = losses_and_embedding_gradients(model, only(batch, part))
        after = losses_and_embedding_gradients(model, only(changed, part))
        torch.testing.assert_close(before[:2], after[:2], rtol=1e-5, atol=0)
        for mine, other in zip(before[2], after[2], strict=True):
            assert relative_error(other, mine) < 1e-4
            assert mine[:, part].abs().max() > 0
            assert mine[:, MIDDLE].abs().max() == 0


@pytest.mark.parametrize("name", PROXIES)
def test_packing_documents_gives_the_sum_of_their_losses(name: str) -> None:
    model = build(PROXIES[name])
    packed = pack([LENGTHS], 512)
    whole = model(*packed)
    main, mtp, start = 0.0, 0.0, 0
    for length in LENGTHS:
        part = Batch(*(x[:, start : start + length] for x in packed))
        losses = model(*part)
        main, mtp, start = main + losses.main_sum, mtp + losses.mtp_sum, start + length

    assert relative_error(whole.main_sum, main) < 1e-5
    if model.config.num_mtp_layers:
        assert relative_error(whole.mtp_sum, mtp) < 1e-5


@pytest.mark.parametrize("name", PROXIES)
def test_a_change_within_a_document_is_noticed(name: str) -> None:
    """The counterpart: the first token of a document moves the loss of its others."""
    model = build(PROXIES[name])
    batch = pack([LENGTHS], 512)
    changed_tokens = batch.tokens_BS.clone()
    changed_tokens[:, MIDDLE.start] = (changed_tokens[:, MIDDLE.start] + 7) % 512
    part = slice(MIDDLE.start + 1, MIDDLE.stop)

    before = model(*only(batch, part)).main_sum
    after = model(*only(batch._replace(tokens_BS=changed_tokens), part)).main_sum

    assert (before - after).abs() > 1e-3


def test_mtp_targets_stay_in_the_document() -> None:
    """Documents abcd and efg: depth 1 predicts two ahead, depth 2 three ahead."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    # The label of a document's last token is the next one's first: data may leave it there.
    labels = torch.tensor([[11, 12, 13, 20, 21, 22, 23]])

    assert shift_labels(labels, positions, 1).tolist() == [[12, 13, IGNORE, IGNORE, 22, 23, IGNORE]]
    assert shift_labels(labels, positions, 2).tolist() == [
        [13, IGNORE, IGNORE, IGNORE, 23, IGNORE, IGNORE]
    ]


def test_mtp_sees_later_tokens_of_the_document_alone() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    none = NO_TOKEN

    assert shift_tokens(tokens, positions, 1).tolist() == [[2, 3, none, 5, none]]
    assert shift_tokens(tokens, positions, 2).tolist() == [[3, none, none, none, none]]


def test_no_token_has_no_embedding_and_trains_none() -> None:
    embedding = build(DEEPSEEK_V3_PROXY).embedding
    vectors = embedding(torch.tensor([[3, NO_TOKEN]]))
    vectors.sum().backward()

    assert vectors[0, 0].equal(embedding.weight[3])
    assert vectors[0, 1].abs().max() == 0
    assert embedding.weight.grad.nonzero()[:, 0].unique().tolist() == [3]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("routing", ["balanced", "balanced_strided", "random"])
def test_forced_routing_trains_every_expert(name: str, routing: str) -> None:
    config: ModelConfig = PROXIES[name]
    model = build(config, routing=routing)
    model(*pack([[128]], 512)).total.backward()

    layers = model.moe_layers()
    num_dense = getattr(config, "num_dense_layers", 0)
    assert len(layers) == config.num_layers + config.num_mtp_layers - num_dense
    for _, moe in layers:
        assert (moe.experts.down.grad.flatten(1).abs().amax(1) > 0).all()
