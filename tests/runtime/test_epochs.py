"""The rule of the agreement on the next epoch, event by event. Every order of events: tests/testing/test_explore.py."""

from __future__ import annotations

from collections import deque

import pytest

from asyncoll.runtime.epochs import (
    Agreement,
    ChangeOverdue,
    CompareAndSet,
    Decision,
    Evict,
    Found,
    Heard,
    Install,
    Linked,
    LostRank,
    Read,
    Ready,
    ReportLoss,
    Send,
    StoreAnswered,
    StoreSilent,
    Unlinked,
    WantedNext,
    step,
)


def ranks(*numbers):
    return frozenset(numbers)


def ready(epoch=2, lost=(), dead=(), linked=()):
    return Ready(epoch, ranks(*lost), ranks(*dead), ranks(*linked))


def member(rank, size=3, **more):
    return Agreement(rank, 1, tuple(range(size)), **more)


def after(state, *events):
    """The state after these events, and the actions of the last one."""
    actions = []
    for event in events:
        state, actions = step(state, event)
    return state, actions


def test_a_member_tells_the_lowest_that_lives_and_again_what_changes():
    state, actions = step(member(2, 4), LostRank(3, is_dead=True))
    assert actions == [Send(0, ready(lost=[3], dead=[3]))]
    state, actions = step(state, LostRank(3, is_dead=True))
    assert actions == []
    state, actions = step(state, LostRank(0))
    assert actions == [Send(1, ready(lost=[0, 3], dead=[3]))]
    assert state.is_changing


def test_the_coordinator_proposes_once_all_that_live_are_ready():
    state, actions = after(member(0), LostRank(2, is_dead=True), Heard(1, ready(lost=[2])))
    proposal = Decision(2, (0, 1))
    assert actions == [CompareAndSet(proposal)]
    state, actions = step(state, Heard(1, ready(lost=[2], dead=[2])))
    assert actions == []  # it asks already
    state, actions = step(state, StoreAnswered(proposal))
    assert actions == [Install(proposal), Send(1, proposal)]
    assert (state.epoch, state.members, state.is_changing) == (2, (0, 1), False)
    assert not state.lost


def test_newcomers_that_live_are_members_although_this_rank_has_given_up_their_attempt():
    state, _ = after(member(0, 2), Linked(2), WantedNext(1), Heard(1, ready(linked=[2])))
    decision = Decision(2, (0, 1, 2))
    state, actions = after(state, LostRank(1), Unlinked(2), StoreAnswered(decision))
    assert Install(decision) in actions
    assert state.lost == ranks(1)


def test_what_the_entry_holds_counts_and_not_the_proposal():
    state, _ = after(member(0), LostRank(2, is_dead=True), Heard(1, ready(lost=[2])))
    decision = Decision(2, (0, 1, 2))  # of a coordinator that has died
    state, actions = step(state, StoreAnswered(decision))
    assert actions == [Install(decision), Send(1, decision), Send(2, decision)]
    assert state.members == (0, 1, 2)


def test_a_member_that_has_died_since_the_decision_is_the_first_loss_of_the_next_epoch():
    state, actions = after(member(1), LostRank(2), LostRank(0), Heard(0, Decision(2, (0, 1))))
    assert actions == [Install(Decision(2, (0, 1)))]
    assert state.is_changing
    assert after(state, ChangeOverdue())[1] == [Read(3), CompareAndSet(Decision(3, (1,)))]


def test_a_ready_reports_losses():
    _, actions = step(member(0), Heard(1, ready(lost=[2], dead=[2])))
    assert actions == [ReportLoss(2, is_dead=True), CompareAndSet(Decision(2, (0, 1)))]


def test_what_a_lost_rank_reports_counts_for_nothing():
    state, actions = after(member(0, 4), LostRank(1), Heard(1, ready(lost=[2])))
    assert actions == []
    assert state.lost == ranks(1)


def test_a_rank_that_has_missed_the_decision_is_told():
    decision = Decision(2, (0, 1))
    state, _ = after(member(1), Heard(0, decision))
    assert step(state, Heard(0, ready(2)))[1] == [Send(0, decision)]  # one that is no member, too:
    assert step(state, Heard(2, ready(2)))[1] == [Send(2, decision)]


def test_a_ready_of_a_later_epoch_shows_that_there_is_a_decision():
    state, actions = step(member(0), Heard(1, ready(3, lost=[2])))
    assert actions == [ReportLoss(2, is_dead=False), Read(2)]
    state, actions = after(state, Found(Decision(2, (0, 1, 2))))
    assert actions == [Install(Decision(2, (0, 1, 2))), CompareAndSet(Decision(3, (0, 1)))]


def test_a_rank_that_no_decision_names_is_evicted_and_does_nothing_more():
    state, actions = after(member(2), LostRank(2), Heard(0, Decision(2, (0, 1))))
    assert actions == [Evict(Decision(2, (0, 1)))]
    for event in (LostRank(0), ChangeOverdue(), Heard(0, Decision(3, (0, 1, 2))), WantedNext(1)):
        assert step(state, event) == (state, [])


def test_a_rank_that_is_taken_for_lost_counts_itself_as_living():
    _, actions = step(member(2), LostRank(2))
    assert actions == [Send(0, ready())]


@pytest.mark.parametrize(("lost", "waits"), [([3], False), ([2, 3], True), ([1, 2, 3], True)])
def test_at_most_half_of_the_members_wait_unless_the_others_are_certainly_dead(lost, waits):
    for is_dead in (False, True):
        state = member(0, 4)
        for rank in lost:
            state, _ = step(state, LostRank(rank, is_dead))
        others = [rank for rank in (1, 2, 3) if rank not in lost]
        state, actions = after(state, *(Heard(rank, ready(lost=lost)) for rank in others), WantedNext(1))
        proposal = Decision(2, (0, *others))
        assert state.is_asking is (is_dead or not waits)
        assert actions == []
        expected = [Read(2)] if state.is_asking else [Read(2), CompareAndSet(proposal)]
        assert step(state, ChangeOverdue())[1] == expected


def test_a_compare_and_set_that_was_not_answered_is_repeated():
    state, _ = after(member(0, 2), LostRank(1, is_dead=True), StoreSilent())
    assert step(state, ChangeOverdue())[1] == [Read(2), CompareAndSet(Decision(2, (0,)))]


# -- newcomers ---


def test_newcomers_are_those_that_every_member_is_linked_with():
    state, _ = after(member(0), Linked(3), Linked(4), Linked(5), WantedNext(1), Heard(1, ready(linked=[3, 4])))
    state, actions = step(state, Heard(2, ready(linked=[4, 5])))
    assert actions == []  # the others may soon be linked with all that the coordinator is linked with
    state, actions = step(state, ChangeOverdue())
    proposal = Decision(2, (0, 1, 2, 4))
    assert actions == [Read(2), CompareAndSet(proposal)]
    state, actions = step(state, StoreAnswered(proposal))
    assert [action.dest for action in actions[1:]] == [1, 2, 4]
    assert state.newcomers == (4,)
    assert state.linked == ranks(3, 5)


def test_a_candidate_that_dies_leaves_the_list():
    state, actions = after(member(1), Linked(3), WantedNext(1), LostRank(3))
    assert actions == [Send(0, ready())]
    assert step(state, Linked(3))[1] == []  # a number is never given again


def test_nobody_proposes_until_its_own_program_wants_it():
    state, actions = after(member(0, 2), Heard(1, ready()))
    assert actions == []
    assert step(state, WantedNext(1))[1] == [CompareAndSet(Decision(2, (0, 1)))]
    assert step(state, WantedNext(0)) == (state, [])  # of an epoch that is over


def test_a_candidate_ignores_what_does_not_name_it():
    candidate = Agreement(3, 1, ())
    state, actions = step(candidate, Heard(0, Decision(2, (0, 1))))
    assert (state, actions) == (candidate, [])
    state, actions = step(candidate, Found(Decision(2, (0, 1))))
    assert actions == [Read(3)]
    state, actions = step(state, Found(Decision(3, (0, 1, 3))))
    assert actions == [Install(Decision(3, (0, 1, 3)))]


def test_a_new_coordinator_tells_the_newcomers_that_they_are_members():
    """The one before may have died before it has told them."""
    state, _ = after(member(1), Linked(3), Heard(0, Decision(2, (0, 1, 2, 3))))
    _, actions = step(state, LostRank(0))
    assert actions == [Send(3, Decision(2, (0, 1, 2, 3)))]


# -- how much it costs ---


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 64])
@pytest.mark.parametrize("dead", ["first", "last"])
def test_a_change_takes_two_messages_a_member(size, dead):
    dead = 0 if dead == "first" else size - 1
    states = {rank: member(rank, size) for rank in range(size) if rank != dead}
    events = deque((rank, LostRank(dead, is_dead=True)) for rank in states)
    entries, sent = {}, 0
    while events:
        rank, event = events.popleft()
        states[rank], actions = step(states[rank], event)
        for action in actions:
            if isinstance(action, Send):
                sent += 1
                events.append((action.dest, Heard(rank, action.message)))
            elif isinstance(action, CompareAndSet):
                entries.setdefault(action.decision.epoch, action.decision)
                events.append((rank, StoreAnswered(action.decision)))
    assert len(entries) == 1
    assert {(state.epoch, state.members) for state in states.values()} == {(2, tuple(states))}
    assert sent == 2 * (size - 2)
