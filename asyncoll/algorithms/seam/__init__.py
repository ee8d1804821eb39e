"""The seam between what users call and how the ranks of a communicator carry it out."""
