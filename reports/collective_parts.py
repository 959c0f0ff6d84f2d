"""Parts about collectives in traces: time, bandwidth, and which rank the others wait for."""

from reports.blocks import Block, Cell, Column, Table, Text
from reports.numbers import number, short_bytes
from reports.trace_answer import TraceAnswer
from reports.trace_cells import ABSENT, MOST_RANKS, number_cell
from reports.traces.point_to_point import PeerTime


def collectives(answer: TraceAnswer, key: str) -> list[Block]:
    """Return collectives by axis and kind, and who is late to them."""
    if not answer.collectives and not answer.peers:
        return [Text(text="No collective is in the trace.", tone="muted")]
    return [_collective_table(answer), *_peer_blocks(answer), *_straggler_blocks(answer)]


def _collective_table(answer: TraceAnswer) -> Table:
    columns = [
        Column(title="Collective"),
        Column(title="Axis"),
        Column(title="Count", unit="all ranks", is_numeric=True),
        Column(title="Size", unit="all ranks", is_numeric=True),
        Column(title="Time", unit="ms, all ranks", is_numeric=True),
        Column(title="Exposed", unit="ms, all ranks", is_numeric=True),
        Column(title="Transfer", unit="ms, all ranks", is_numeric=True),
        Column(title="Waiting", unit="ms, all ranks", is_numeric=True),
        Column(title="Bus bandwidth", unit="GB/s, median", is_numeric=True),
    ]
    rows = []
    for one in answer.collectives:
        size = ABSENT if one.bytes is None else Cell(text=short_bytes(one.bytes), value=one.bytes)
        link = (
            ""
            if one.link_fraction is None
            else f"{number(100 * one.link_fraction, 3)} % of the link"
        )
        unmatched = Cell(text="not matched", tone="muted")
        rate = None if one.bus_bandwidth is None else one.bus_bandwidth / 1e9
        times = [one.time_ns / 1e6, one.exposed_ns / 1e6]
        parts = [one.transfer_ns, one.wait_ns]
        rows.append(
            [
                Cell(text=one.kind),
                Cell(text=one.axis, tone="muted" if one.axis == "unknown" else "plain"),
                Cell(text=f"{one.count:,}", value=one.count),
                size,
                *(number_cell(time) for time in times),
                *(unmatched if part is None else number_cell(part / 1e6) for part in parts),
                number_cell(rate, 3, link) if rate is not None else ABSENT,
            ]
        )
    caption = (
        "Collectives over all steps. Transfer is what the last rank to arrive takes, waiting is "
        "the rest; bus bandwidth as nccl-tests defines it."
    )
    return Table(columns=columns, rows=rows, caption=caption)


def _peer_blocks(answer: TraceAnswer) -> list[Block]:
    """Return sends and receives from rank to rank; nothing without any."""
    if not answer.peers:
        return []
    columns = [
        Column(title="From", unit="rank", is_numeric=True),
        Column(title="To", unit="rank", is_numeric=True),
        Column(title="Axis"),
        Column(title="Count", is_numeric=True),
        Column(title="Size", is_numeric=True),
        Column(title="Transfer", unit="ms", is_numeric=True),
        Column(title="Sender waits", unit="ms", is_numeric=True),
        Column(title="Receiver waits", unit="ms", is_numeric=True),
    ]
    caption = (
        "Sends and receives over all steps, matched by peer and order. Transfer is from when both "
        "sides are ready until the data have arrived; waiting is until the other side is ready."
    )
    rows = [_peer_row(one) for one in answer.peers[:MOST_RANKS]]
    return [Table(columns=columns, rows=rows, caption=caption)]


def _peer_row(one: PeerTime) -> list[Cell]:
    ends = [
        ABSENT if rank is None else Cell(text=str(rank), value=rank)
        for rank in (one.source, one.destination)
    ]
    size = ABSENT if one.bytes is None else Cell(text=short_bytes(one.bytes), value=one.bytes)
    unmatched = ABSENT if one.source is None else Cell(text="not matched", tone="muted")
    times = (one.transfer_ns, one.sender_wait_ns, one.receiver_wait_ns)
    return [
        *ends,
        Cell(text=one.axis, tone="muted" if one.axis == "unknown" else "plain"),
        Cell(text=f"{one.count:,}", value=one.count),
        size,
        *(unmatched if ns is None else number_cell(ns / 1e6) for ns in times),
    ]


def _straggler_blocks(answer: TraceAnswer) -> list[Block]:
    if not answer.stragglers:
        text = "Collectives of several ranks are needed to tell who is late: one rank is here."
        return [Text(text=text, tone="muted")]
    columns = [
        Column(title="Rank", is_numeric=True),
        Column(title="Last to arrive", unit="of matched collectives", is_numeric=True),
        Column(title="Delay", unit="ms", is_numeric=True),
        Column(title="Delay", unit="% of the window", is_numeric=True),
        Column(title="More compute", unit="ms than the others", is_numeric=True),
        Column(title="More host-bound", unit="ms than the others", is_numeric=True),
        Column(title="Cause"),
    ]
    rows = []
    for one in answer.stragglers[:MOST_RANKS]:
        last = Cell(text=f"{one.num_last} of {one.num_matched}", value=one.num_last)
        offset = answer.clock_offsets_ns.get(one.rank, 0)
        corrected = f"clock corrected by {number(offset / 1e3, 3)} \u00b5s" if offset else ""
        rows.append(
            [
                Cell(text=str(one.rank), value=one.rank, note=corrected),
                last,
                number_cell(one.delay_ns / 1e6),
                number_cell(100 * one.delay_share, 3),
                number_cell(one.compute_excess_ns / 1e6),
                number_cell(one.host_excess_ns / 1e6),
                Cell(text=one.cause, tone="warning" if one.cause != "none" else "plain"),
            ]
        )
    caption = "Late ranks: what would be won if that rank alone were on time, and its evidence."
    return [Table(columns=columns, rows=rows, caption=caption)]
