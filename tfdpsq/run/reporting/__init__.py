"""Reports on a job: their content, their page, and the state of a workdir."""
