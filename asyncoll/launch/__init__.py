"""Start every rank of a job, on this host or on several, show their output, and report the root cause of a failure.

    launcher (this process) ── control socket ── template (loads torch once) ── fork ── rank 0, rank 1, …
                            ── ssh ── agent ── control socket ── template ── fork ── rank 4, rank 5, …

The launcher supervises and prints; the templates fork and reap; an agent passes on orders of the launcher, and news of
a template. When the launcher ends, killed or not, the templates kill every descendant and remove the job's folder. When
a template is killed, the kernel kills its ranks, and the launcher, or the agent, kills their process groups.
"""

from asyncoll.launch.launcher import launch
from asyncoll.launch.placement import parse_hosts
from asyncoll.launch.rank_environment import check_current_folder

__all__ = ["check_current_folder", "launch", "parse_hosts"]
