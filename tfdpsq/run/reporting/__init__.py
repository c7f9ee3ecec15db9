"""Reports on a job: their content and their page."""
