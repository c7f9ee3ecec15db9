"""The report of a job, and what it shows."""
