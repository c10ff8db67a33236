"""The edge of memory is learned: what ran out is not tried again, nor what is larger."""

from __future__ import annotations

from batchtune.tune.trials.trial import is_as_large, is_beyond_memory

SMALL, WIDE, DEEP = {"seqs": 64, "tokens": 512}, {"seqs": 512, "tokens": 512}, {"seqs": 64, "tokens": 8192}


def test_what_is_as_large_in_every_knob_is_beyond_it() -> None:
    assert is_beyond_memory({"seqs": 1024, "tokens": 512}, [WIDE])
    assert is_beyond_memory(WIDE, [WIDE])
    assert not is_beyond_memory({"seqs": 1024, "tokens": 256}, [WIDE])
    assert not is_beyond_memory(SMALL, [WIDE, DEEP])
    assert not is_beyond_memory(SMALL, [])


def test_two_points_on_the_edge_are_enough() -> None:
    between = {"seqs": 256, "tokens": 2048}
    assert not is_beyond_memory(between, [WIDE])
    assert is_beyond_memory(between, [WIDE, DEEP])


def test_words_and_switches_must_be_the_same() -> None:
    assert is_as_large({"seqs": 8, "kind": "a"}, {"seqs": 8, "kind": "a"})
    assert not is_as_large({"seqs": 8, "kind": "b"}, {"seqs": 8, "kind": "a"})
    assert not is_as_large({"seqs": 8, "eager": True}, {"seqs": 8, "eager": False})
