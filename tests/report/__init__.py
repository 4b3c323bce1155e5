"""The report: rows, pictures, the page."""
