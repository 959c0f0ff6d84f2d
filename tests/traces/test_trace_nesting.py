"""The tree of host events against a search through all of them, overhanging ones included."""

from hypothesis import given, settings
from hypothesis import strategies as st

from reports.traces.loader import load
from reports.traces.nesting import NONE, nest
from tests.traces.kineto import event, write

TIMELINE = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 40), st.integers(0, 25)), min_size=1, max_size=40
)


@given(timeline=TIMELINE)
@settings(max_examples=150, deadline=None)
def test_the_parent_is_the_nearest_earlier_event_that_still_runs(
    tmp_path_factory, timeline: list[tuple[int, int, int]]
) -> None:
    rows = [event("a", "cpu_op", start, dur, tid=thread) for thread, start, dur in timeline]
    events = load(write(tmp_path_factory.mktemp("nest") / "rank0.json", rows)).events
    nesting = nest(events)

    order = sorted(
        range(len(events)),
        key=lambda row: (events.thread[row], events.start[row], -events.duration[row]),
    )
    assert nesting.rows.tolist() == order
    depth: dict[int, int] = {NONE: -1}
    for place, row in enumerate(order):
        around = [
            other
            for other in order[:place]
            if events.thread[other] == events.thread[row] and events.end[other] > events.start[row]
        ]
        parent = around[-1] if around else NONE
        assert nesting.parent[row] == parent
        depth[row] = depth[parent] + 1
    depth.pop(NONE)
    levels = [sorted(row for row in depth if depth[row] == k) for k in range(len(nesting.levels))]
    assert [sorted(level.tolist()) for level in nesting.levels] == levels
    assert sum(map(len, levels)) == len(events)
