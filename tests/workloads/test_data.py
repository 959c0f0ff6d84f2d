"""Data: sequences are what a brute-force packing gives, whoever reads them."""

import os

import pytest
import torch

from workloads.data import (
    END_OF_DOCUMENT,
    PADDING,
    TEXT_VOCAB_SIZE,
    Data,
    count_tokens,
    open_data,
)

IGNORE = -100


def open_tiny(source: str, sequence_length: int = 64, global_batch_size: int = 8) -> Data:
    return open_data(
        source,
        sequence_length=sequence_length,
        global_batch_size=global_batch_size,
        vocab_size=TEXT_VOCAB_SIZE,
        seed=0,
    )


def write_files(folder, contents: dict[str, bytes]) -> str:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def brute_force(documents: list[bytes], first: int, rows: int, S: int):
    """Pack token by token: (tokens, labels, positions) of ``rows`` sequences from ``first``."""
    stream = [
        (token, number)
        for number, document in enumerate(documents)
        for token in [*document, END_OF_DOCUMENT]
    ]
    tokens, labels, positions = [], [], []
    for row in range(first, first + rows):
        for i in range(S):
            g = row * S + i
            token, document = stream[g % len(stream)]
            following, next_document = stream[(g + 1) % len(stream)]
            is_last = token == END_OF_DOCUMENT
            assert is_last or document == next_document
            is_start = i == 0 or stream[(g - 1) % len(stream)][0] == END_OF_DOCUMENT
            tokens.append(token)
            labels.append(IGNORE if is_last else following)
            positions.append(0 if is_start else positions[-1] + 1)
    return [torch.tensor(field).reshape(rows, S) for field in (tokens, labels, positions)]


DOCUMENTS = {"a.txt": b"abc", "b.txt": b"x", "c/d.txt": bytes(range(256)), "e.txt": b"end\n" * 9}


@pytest.mark.parametrize("S", [1, 2, 5, 16, 100, 300])
def test_packing_equals_brute_force_over_several_epochs(tmp_path, S):
    data = open_tiny(write_files(tmp_path, DOCUMENTS), sequence_length=S, global_batch_size=4)

    for step in range(300 // S + 3):
        batch = data.batch(step, 0, 1, 0, 1)

        expected = brute_force(list(DOCUMENTS.values()), 4 * step, 4, S)
        for actual, wanted in zip(batch, expected, strict=True):
            assert actual.dtype == torch.int64
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("source", ["text", "synthetic"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (1, 4), (4, 2), (8, 1)])
def test_global_batch_is_the_same_whatever_the_ranks_and_microbatches(
    source, num_ranks, num_microbatches
):
    data = open_tiny(source)
    whole = data.batch(3, 0, 1, 0, 1)

    parts = [
        data.batch(3, rank, num_ranks, microbatch, num_microbatches)
        for rank in range(num_ranks)
        for microbatch in range(num_microbatches)
    ]

    for field, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(field), expected)


@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_data_is_deterministic_and_seeded(source):
    def tokens(seed: int):
        data = open_data(
            source, sequence_length=64, global_batch_size=8, vocab_size=1000, seed=seed
        )
        return data.batch(5, 1, 2, 0, 1).tokens_BS

    assert torch.equal(tokens(0), tokens(0))
    assert not torch.equal(tokens(0), tokens(1))


def test_steps_go_on_where_the_step_before_ended():
    one_step = open_tiny("text", global_batch_size=8).batch(0, 0, 1, 0, 1)
    data = open_tiny("text", global_batch_size=4)

    two_steps = [data.batch(step, 0, 1, 0, 1) for step in (0, 1)]

    assert torch.equal(torch.cat([batch.tokens_BS for batch in two_steps]), one_step.tokens_BS)


def test_text_is_the_standard_library_of_this_interpreter():
    data = open_tiny("text", sequence_length=4096, global_batch_size=64)
    text = bytes(token for token in data.batch(0, 0, 1, 0, 1).tokens_BS.flatten() if token < 256)

    described = data.describe()

    documents = text.decode("utf-8", errors="replace")
    assert documents.count("import ") > 50 and documents.count("def ") > 100
    names = [document.name for document in data.sequences.documents]
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert "unittest" in folders and not {"test", "site-packages"} & folders
    assert described["tokens"] > 5_000_000
    assert described["tokens"] == sum(
        os.path.getsize(document.path) + 1 for document in data.sequences.documents
    )
    assert described["mean_document_length"] * described["documents"] == described["tokens"]


def test_text_has_a_target_for_all_but_the_last_token_of_each_document():
    batch = open_tiny("text", sequence_length=4096).batch(0, 0, 1, 0, 1)

    tokens, padding, targets = count_tokens(batch)

    ends = int((batch.tokens_BS == END_OF_DOCUMENT).sum())
    assert (tokens, padding, targets) == (8 * 4096, 0, 8 * 4096 - ends)
    assert ends > 0


def test_user_data_shorter_than_a_sequence_is_padded(tmp_path):
    source = write_files(tmp_path, {"a": b"abc", "b": b"de"})
    batch = open_tiny(source, sequence_length=10, global_batch_size=2).batch(7, 0, 1, 0, 1)

    E, P = END_OF_DOCUMENT, PADDING
    for row in range(2):
        assert batch.tokens_BS[row].tolist() == [97, 98, 99, E, 100, 101, E, P, P, P]
        assert batch.labels_BS[row].tolist() == [98, 99, E, IGNORE, 101, E] + [IGNORE] * 4
        assert batch.positions_BS[row].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]
    assert count_tokens(batch) == (14, 6, 10)


def test_user_file_alone_is_one_document(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"hello")

    data = open_tiny(str(path), sequence_length=6, global_batch_size=1)

    assert data.batch(0, 0, 1, 0, 1).tokens_BS.tolist() == [[*b"hello", END_OF_DOCUMENT]]
    assert data.describe()["documents"] == 1


def test_hidden_and_empty_files_are_no_documents(tmp_path):
    source = write_files(tmp_path, {".git/x": b"no", ".y": b"no", "empty": b"", "text": b"yes"})

    assert open_tiny(source).describe()["documents"] == 1


def test_synthetic_is_uniform_over_the_vocabulary_without_padding():
    V, S = 300, 64
    data = open_data("synthetic", sequence_length=S, global_batch_size=512, vocab_size=V, seed=1)
    batch = data.batch(0, 0, 1, 0, 1)

    counts = torch.bincount(batch.tokens_BS.flatten(), minlength=V)
    assert len(counts) == V
    assert counts[PADDING] == 0
    expected = 512 * S / (V - 1)
    present = counts[torch.arange(V) != PADDING].double()
    chi_square = ((present - expected) ** 2 / expected).sum()
    assert abs(chi_square - (V - 2)) < 5 * (2 * (V - 2)) ** 0.5
    assert torch.equal(batch.labels_BS[:, :-1], batch.tokens_BS[:, 1:])
    assert count_tokens(batch) == (512 * S, 0, 512 * (S - 1))
    assert torch.equal(batch.positions_BS[0], torch.arange(S))


def test_synthetic_works_with_a_vocabulary_smaller_than_bytes():
    data = open_data("synthetic", sequence_length=512, global_batch_size=1, vocab_size=7, seed=1)

    assert set(data.batch(0, 0, 1, 0, 1).tokens_BS.flatten().tolist()) == set(range(7))


def test_fingerprint_tells_content_names_and_order_but_not_place(tmp_path):
    def fingerprint(name: str, contents: dict[str, bytes]):
        return open_tiny(write_files(tmp_path / name, contents)).describe()["sha256"]

    first = fingerprint("1", {"a": b"xy", "b": b"z"})

    assert first == fingerprint("2", {"a": b"xy", "b": b"z"})
    assert first != fingerprint("3", {"a": b"xz", "b": b"z"})
    assert first != fingerprint("4", {"a": b"xy", "c": b"z"})
    assert first != fingerprint("5", {"a": b"x", "b": b"yz"})


def test_vocabulary_too_small_for_text_is_refused():
    with pytest.raises(ValueError, match=r"vocab_size=257.*258"):
        open_data("text", sequence_length=8, global_batch_size=1, vocab_size=257, seed=0)


def test_missing_path_is_refused():
    with pytest.raises(ValueError, match=r"/no/such/place: no such file or folder"):
        open_tiny("/no/such/place")


def test_path_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no text in it"):
        open_tiny(str(tmp_path))
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="no text in it"):
        open_tiny(str(tmp_path))


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    source = write_files(tmp_path, {"secret": b"x"})
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(ValueError, match="secret is not readable"):
        open_tiny(source)


def test_file_that_shrinks_during_the_run_is_an_error(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100)
    data = open_tiny(str(tmp_path))
    path.write_bytes(b"x" * 10)

    with pytest.raises(ValueError, match=r"had 100 bytes .* now has 10"):
        data.batch(0, 0, 1, 0, 1)


def test_file_that_vanishes_during_the_run_is_an_error(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100)
    data = open_tiny(str(tmp_path))
    path.unlink()

    with pytest.raises(ValueError, match="cannot read"):
        data.batch(0, 0, 1, 0, 1)


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"global_batch_size=8 .* 3 data ranks x 1"):
        open_tiny("text").batch(0, 0, 3, 0, 1)
