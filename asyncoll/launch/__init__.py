"""Start every rank of a job on this host, show their output, and report the root cause of a failure.

    launcher (this process) ── control socket ── template (loads torch once) ── fork ── rank 0, rank 1, …

The launcher supervises and prints; the template forks and reaps. When the launcher ends, killed or not, the template
kills every descendant and removes the job's folder. When the template is killed, the kernel kills the ranks, and the
launcher kills their process groups.
"""

from asyncoll.launch.launcher import launch

__all__ = ["launch"]
