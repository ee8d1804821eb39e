"""The runtime of one rank: endpoint, executions by message, pending calls, failures and progress thread.

One `Endpoint` per rank holds all parts. Its parts run on one event loop, the runtime's loop. In a world of processes a
thread of its own runs that loop (`progress.ProgressThread`); in the in-process worlds it is the caller's loop
(`progress.SharedLoop`). A method that other threads may call says so in its docstring.

Events that come in:

- A message: the transport calls `Endpoint.received`. Segments, grants and credits of a call go to `Executions`, signals
  and announcements to `Router`, failures to `Failures`, introductions to `Membership`.
- The loss of a peer: the transport calls `Endpoint.lost`, a lock in shared memory calls `Endpoint.lost_in_memory`, or
  another rank reports it by a message. All three end in `Endpoint._lost`.
- A call of the user: `algorithms.calls` registers it in `PendingCalls` and starts it through `progress.Runner`.
- An expired deadline: the timer of `PendingCalls`.

Calls that go out:

- Messages: every part sends through `Router.send`, which calls `Transport.send`.
- Results and errors: `Executions` and `Failures` complete the futures that the coroutines of algorithms await.
- Shared memory: `Arena.recheck` and `Arena.peer_lost` wake the calls that wait there, so that they notice a failure.

`group.Lane` is the part that an algorithm sees: one execution, with `send`, `recv` and `exchange`. `member.Member` is
the part that the facade sees. `matching`, `numbering`, `schedule` and `signature` are pure: no loop, no thread, no
clock.
"""
