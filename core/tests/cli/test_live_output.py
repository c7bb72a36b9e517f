"""What an operator reads of a running instance, word for word."""

from __future__ import annotations

from kvferry.cli.live_output import cleared_text, quotas_text, status_text
from kvferry.data.questions import (
    Cleared,
    LowerStatus,
    Owner,
    PeerStatus,
    Quotas,
    SharingStatus,
    Status,
    TierCleared,
)

ONE_TIER = """\
tier cpu, 8 MiB a slot; all workers are here

NUMBER    VALUE
hits      12
resident  3"""
SEVERAL_TIERS = """\
tier cpu, 8 MiB a slot; not all workers are here: nothing is found

NUMBER    VALUE
resident  3

tier ssd: open

NUMBER  VALUE
chunks  7

tier far: paused, not used now; it failed last because: rank 0: EIO

NUMBER    VALUE
chunks    0
failures  2

what requests have of the tiers below the first

NUMBER        VALUE
waits         4
wait_seconds  0.125"""

SHARING = """\
tier cpu, 8 MiB a slot; all workers are here

NUMBER    VALUE
resident  3

what requests have of other instances

NUMBER  VALUE
waits   4

shared with other instances as a over tcp: opening; a channel was not open last because: rank 1: in use

PEER  EPOCH     STANDING  REASON
b     0a0a0a0a  agreed    -
c     0b0b0b0b  paused    it did not answer

borrowed from peers

NUMBER  VALUE
tokens  512

lent to peers

NUMBER  VALUE
leases  1"""


def test_one_tier_is_shown_alone() -> None:
    assert status_text(Status("cpu", 8 << 20, True, {"hits": 12, "resident": 3})) == ONE_TIER


def test_every_tier_has_a_table_with_its_health_above() -> None:
    status = Status(
        "cpu",
        8 << 20,
        False,
        {"resident": 3},
        (
            LowerStatus("ssd", "open", "", {"chunks": 7}),
            LowerStatus("far", "paused", "rank 0: EIO", {"chunks": 0, "failures": 2}),
        ),
        {"waits": 4, "wait_seconds": 0.125},
    )
    assert status_text(status) == SEVERAL_TIERS


def test_peers_are_shown_with_what_is_borrowed_and_lent() -> None:
    sharing = SharingStatus(
        "a",
        "0c" * 16,
        "tcp",
        "opening",
        "rank 1: in use",
        (
            PeerStatus("b", "0a" * 16, "agreed", ""),
            PeerStatus("c", "0b" * 16, "paused", "it did not answer"),
        ),
        {"tokens": 512},
        {"leases": 1},
    )
    status = Status("cpu", 8 << 20, True, {"resident": 3}, waiting={"waits": 4}, sharing=sharing)
    assert status_text(status) == SHARING
    alone = SharingStatus("a", "0c" * 16, "tcp", "open", "", (), {}, {})
    text = status_text(Status("cpu", 8 << 20, True, {}, sharing=alone))
    assert "over tcp: open\n\nnothing was wanted of any peer lately\n" in text


def test_a_clear_names_tiers_where_there_are_several() -> None:
    cpu, ssd = TierCleared("cpu", "open", 8, 2, 1), TierCleared("ssd", "paused", 0, 0, 0)
    alone = "8 chunks removed; 2 more cannot be found and go once they were read; 1 that were being written "
    assert cleared_text(Cleared(8, 2, 1, (cpu,))) == alone + "will not be kept"
    assert cleared_text(Cleared(8, 2, 1, (cpu, ssd))).splitlines() == [
        f"tier cpu: {alone}will not be kept",
        "tier ssd: 0 chunks removed; the tier is paused, and what its store holds goes when it is opened",
    ]


def test_quotas_say_of_which_tier_they_are() -> None:
    quotas = Quotas("ssd", None, (Owner("", 1 << 30, 1 << 20, 0),), 2 << 20, 5, evicted=3)
    assert quotas_text(quotas).splitlines() == [
        "tier ssd",
        "",
        "OWNER       QUOTA           HELD   REFUSED CHUNKS",
        "(no salt)   1 GiB           1 MiB  0",
        "all others  unlimited each  2 MiB  5",
        "",
        "3 chunks were evicted",
    ]
