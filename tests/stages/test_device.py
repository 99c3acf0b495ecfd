"""Streams and Points on the host."""

import threading
import weakref

import pytest

from stages.device import HostStream


@pytest.fixture
def streams():
    made = [HostStream("one"), HostStream("two")]
    yield made
    for stream in made:
        stream.close()


def blocked(stream: HostStream) -> threading.Event:
    """Stop the stream until the event is set."""
    gate = threading.Event()
    stream.launch(lambda: void(gate.wait(20)))
    return gate


def void(_: object) -> None:
    pass


def test_work_runs_in_order_and_a_point_is_reached_after_it(streams: list[HostStream]) -> None:
    stream, _ = streams
    seen: list[int] = []
    gate = blocked(stream)
    for i in range(100):
        stream.launch(lambda i=i: seen.append(i))
    point = stream.record()
    assert not point.is_reached()
    assert point.reached_at_ns == 0
    gate.set()
    stream.close()
    assert seen == list(range(100))
    assert point.is_reached()
    assert point.reached_at_ns > 0


def test_a_stream_waits_for_a_point_of_another(streams: list[HostStream]) -> None:
    one, two = streams
    seen: list[str] = []
    gate = blocked(one)
    one.launch(lambda: seen.append("one"))
    two.wait(one.record())
    two.launch(lambda: seen.append("two"))
    after = two.record()
    assert not after.is_reached()
    gate.set()
    two.close()
    assert seen == ["one", "two"]


def test_a_callback_is_called_once_whether_added_before_or_after(streams: list[HostStream]) -> None:
    stream, _ = streams
    calls: list[str] = []
    gate = blocked(stream)
    point = stream.record()
    point.add_done_callback(lambda: calls.append("before"))
    assert calls == []
    gate.set()
    stream.close()
    point.add_done_callback(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_an_error_is_sticky_and_travels_to_streams_that_wait(streams: list[HostStream]) -> None:
    one, two = streams
    ran: list[int] = []
    gate = blocked(one)
    good = one.record()
    one.launch(lambda: void(1 // 0))
    bad = one.record()
    one.launch(lambda: ran.append(1))
    later = one.record()
    two.wait(bad)
    two.launch(lambda: ran.append(2))
    other = two.record()
    called = threading.Event()
    other.add_done_callback(called.set)
    gate.set()
    assert called.wait(20), "callbacks are called after an error too"
    one.close()
    two.close()
    assert good.is_reached()
    for point in (bad, later, other):
        with pytest.raises(ZeroDivisionError):
            point.is_reached()
    assert ran == []


def test_close_runs_what_is_enqueued_and_may_be_called_twice() -> None:
    stream = HostStream("x")
    seen: list[int] = []
    gate = blocked(stream)
    stream.launch(lambda: seen.append(1))
    gate.set()
    stream.close()
    stream.close()
    assert seen == [1]
    with pytest.raises(RuntimeError, match="stream x is closed"):
        stream.launch(lambda: None)


def test_what_a_callable_holds_is_freed_once_it_has_run(streams: list[HostStream]) -> None:
    class Buffer:
        pass

    stream, _ = streams
    gate = blocked(stream)
    buffer = Buffer()
    alive = weakref.ref(buffer)
    stream.launch(lambda buffer=buffer: void(buffer))
    del buffer
    assert alive() is not None, "the stream owns it until it has run"
    after = stream.record()
    reached = threading.Event()
    after.add_done_callback(reached.set)
    gate.set()
    assert reached.wait(20)
    assert alive() is None
