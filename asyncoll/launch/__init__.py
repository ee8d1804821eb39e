"""Start every rank of a job on this host, show what they print, and tell the truth when one fails.

    launcher (this process) ── control socket ── template (loads torch once) ── fork ── rank 0, rank 1, …

The launcher supervises and prints; the template forks and reaps. When the launcher ends, killed or not, the
template kills every descendant and removes the job's folder. When the template is killed, the kernel kills
the ranks, and the launcher their process groups.
"""

from asyncoll.launch.launcher import launch

__all__ = ["launch"]
