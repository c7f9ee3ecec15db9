"""The paper's tables: rows, numbers, comparison and pages."""
