"""The report of a job: its content, its page and its plots."""
